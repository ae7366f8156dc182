"""Random rows, and a calibration of one of tests/compress's bases as the command does it, without the command."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from unfreeze.checkpoint import open_checkpoint
from unfreeze.compress.calibrate.calibration import Calibration
from unfreeze.compress.quantize.work import quantize_work
from unfreeze.compress.quantize.write import inputs_of, write
from unfreeze.data.packing.batches import pack
from unfreeze.data.store.examples import Example


def rows(seed: int, documents: int, length: int = 40, vocabulary: int = 96):
    """Documents of random tokens, in batches of ten: more of some tokens than of others."""
    generator = torch.Generator().manual_seed(seed)
    often = torch.rand(vocabulary, generator=generator) ** 4
    examples = [
        Example(
            torch.multinomial(often, length, True, generator=generator).tolist(), [0.0] + [1.0] * (length - 1)
        )
        for _ in range(documents)
    ]
    return [pack(examples[first : first + 10]) for first in range(0, documents, 10)]


def calibration(
    base: Path, folder: Path, batches, to: str = "int4", modules=("all-linear",), method="gptq"
) -> Calibration:
    return Calibration(quantize_work(open_checkpoint(base), to, modules), batches, folder, {"to": to}, method)


def run_calibrated(
    base: Path,
    out: Path,
    batches,
    to: str = "int4",
    progress=None,
    *,
    method: str = "gptq",
    modules=("all-linear",),
):
    """-> (the calibration, the written folder's record)."""
    manifest = open_checkpoint(base)
    made = calibration(base, out.with_name(f"{out.name}.calibration"), batches, to, modules, method)
    made.run(progress)
    work = quantize_work(manifest, to, modules, made.round, made if method != "gptq" else None)
    return made, write(work, out, inputs_of(manifest, to, modules), None)


@pytest.fixture(scope="session")
def calibrated(bases, tmp_path_factory):
    """base -> (its rows, its calibration, the written folder), each made once."""
    root, made = tmp_path_factory.mktemp("calibrated"), {}

    def make(base: str):
        if base not in made:
            batches = rows(0, 40)
            own, _ = run_calibrated(bases[base], root / base, batches)
            made[base] = batches, own, root / base
        return made[base]

    return make
