"""Checkpoints quantized into a folder, as the command does it, without the command."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from unfreeze import models
from unfreeze.checkpoint import open_checkpoint
from unfreeze.compress.deltas import NoChanges
from unfreeze.compress.merge import merge
from unfreeze.compress.quantize.work import quantize_work
from unfreeze.compress.quantize.write import inputs_of, write
from unfreeze.compress.work import MergeWork


def run_quantize(base: Path, out: Path, to: str, modules=(), progress=None):
    """-> its record."""
    manifest = open_checkpoint(base)
    work = quantize_work(manifest, to, modules)
    return write(work, out, inputs_of(manifest, to, tuple(work.packing.modules)), progress)


@pytest.fixture(scope="session")
def quantized(bases, tmp_path_factory):
    """(base, format, modules) -> folder, each made once."""
    root, folders = tmp_path_factory.mktemp("quantized"), {}

    def make(base: str, to: str, *modules: str) -> Path:
        key = (base, to, modules)
        if key not in folders:
            folders[key] = root / "-".join([base, to, *modules])
            run_quantize(bases[base], folders[key], to, modules)
        return folders[key]

    return make


def expanded(folder: Path, out: Path) -> Path:
    """A quantized checkpoint in bf16."""
    manifest = open_checkpoint(folder)
    model = models.meta_model(models.shape(manifest.config), manifest, torch.float32)
    work = MergeWork(manifest, model, NoChanges(), "bf16")
    merge(work, NoChanges(), out, {"base": folder.name}, "refit", None)
    return out


@pytest.fixture(scope="session")
def deepseek(bases, tmp_path_factory) -> Path:
    """tiny-k2's shape, MLA and shared experts beside routed ones, in bf16."""
    return expanded(bases["int4"], tmp_path_factory.mktemp("deepseek") / "bf16")
