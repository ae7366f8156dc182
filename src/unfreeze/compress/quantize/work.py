"""The plan for each weight of a checkpoint that is quantized, checked before a byte is written.

The plan is a merge's without an adapter (compress/work.py).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from unfreeze import models
from unfreeze.checkpoint.manifest import Manifest, TensorInfo
from unfreeze.checkpoint.resolve import resolve
from unfreeze.compress.deltas import NoChanges
from unfreeze.compress.merge import OutFile
from unfreeze.compress.quantize.formats import FORMATS, LEFT, MODULES, Packing, Round, Scales, nearest
from unfreeze.compress.quantize.fused import OneNumber
from unfreeze.compress.released import config_of
from unfreeze.compress.work import MergeWork, Weight
from unfreeze.core.dtypes import ITEMSIZE
from unfreeze.core.errors import CheckpointError, ConfigError
from unfreeze.models.shape import Shape
from unfreeze.parallel.placement.place import check_coverage
from unfreeze.quant.codec import parts_nbytes
from unfreeze.quant.formats import recognise
from unfreeze.quant.nvfp4 import Nvfp4
from unfreeze.quant.scheme import Scheme
from unfreeze.untrusted.json_object import parse_object

WITHOUT_GROUPS = "--to int8 or --to fp8, which have a scale for each row"


@dataclass(frozen=True)
class Kept:
    """A group of weights that stays as it is: its name, its matrices, their bytes, and the reason."""

    group: str
    matrices: int
    nbytes: int
    why: str


def modules_of(shape: Shape, named: Collection[str] = ()) -> tuple[str, ...]:
    """The modules to quantize, of MODULES and in its order.

    Unless experts or all-linear are named: the routed experts if there are any, as Kimi-K2 and gpt-oss
    publish them; else every linear layer. Raises ConfigError for what the model does not have.
    """
    modules = set(named)
    if not modules & {"experts", "all-linear"}:
        modules.add("experts" if shape.num_experts else "all-linear")
    if "experts" in modules and not shape.num_experts:
        raise ConfigError(
            f"--modules experts: a {shape.model_type} is dense, without experts", next="--modules all-linear"
        )
    if "lm_head" in modules and shape.tied:
        raise ConfigError(
            f"--modules lm_head: the head of this {shape.model_type} is tied to the embeddings, which stay",
            next="leave lm_head out of --modules",
        )
    return tuple(name for name in MODULES if name in modules)


def quantize_work(
    manifest: Manifest,
    to: str,
    modules: Collection[str] = (),
    round: Round = nearest,
    scales: Scales | None = None,
) -> MergeWork:
    """The plan of `unfreeze quantize`. modules: as in `modules_of`.

    Raises ConfigError for a base that is quantized, modules that the model lacks, and a width that the format
    cannot hold; CheckpointError for a format that the family's readers cannot load.
    """
    check_dense(manifest)
    shape = models.shape(manifest.config)
    modules = modules_of(shape, modules)
    model = models.meta_model(shape, manifest, torch.float32)
    work = MergeWork(manifest, model, NoChanges(), Packing(FORMATS[to], modules, round, scales))
    if isinstance(FORMATS[to], Nvfp4) and round is nearest:
        work.packing = Packing(FORMATS[to], modules, OneNumber(work).round)
    chosen = [weight for weight in work.weights if work.chosen(weight)]
    for weight in chosen:
        if weight.to is None:
            _refuse_width(work, weight)
    return work


def check_dense(manifest: Manifest) -> None:
    """Raise ConfigError for a checkpoint without weights, and for one that is quantized already."""
    if not manifest.tensors:
        raise ConfigError(f"{manifest.path} has no weights", next="give a folder with *.safetensors files")
    scheme = manifest.scheme()
    if scheme is not None or manifest.is_packed():
        name = f" ({scheme.name})" if scheme is not None else ""
        raise ConfigError(
            f"{manifest.path} is quantized already{name}",
            next="take the bf16 release; a run on this one: unfreeze merge RUN --to bf16 --out DIR",
        )


def _refuse_width(work: MergeWork, weight: Weight) -> None:
    """Raise the codec's ConfigError for a matrix that it cannot hold, with the matrix's name."""
    assert work.packing is not None
    rows, columns = work.shape(weight)
    try:
        work.packing.codec.parts(rows, columns)
    except ConfigError as error:
        words = error.message.partition(" (quantization_config")[0]
        raise ConfigError(f"{weight.name} [{rows}, {columns}]: {words}", next=WITHOUT_GROUPS) from None


@dataclass(frozen=True)
class Planned(Manifest):
    """A checkpoint that is not written yet. Its texts (quant.codec.Texted) are those of the codec."""

    def scheme(self) -> Scheme | None:
        recognised = recognise(self.config)
        disk = self.by_model_name()
        return recognised and recognised.as_stored({name: info.dtype for name, info in disk.items()})


def planned(work: MergeWork, out: Path, files: Collection[OutFile]) -> Planned:
    """The checkpoint that the plan makes: names, dtypes and shapes, no bytes."""
    config = parse_object(config_of(work), "config.json", CheckpointError)
    tensors = {
        name: TensorInfo(name, dtype, shape, ITEMSIZE[dtype] * prod(shape), out / file.name, 0)
        for file in files
        for name, (dtype, shape) in file.parts.items()
    }
    return Planned(out, config, tensors, work.manifest.prefix, tuple(out / file.name for file in files))


def check_loads(manifest: Manifest) -> None:
    """Raise CheckpointError or ConfigError if loading would refuse the checkpoint."""
    shape = models.shape(manifest.config)
    model = models.meta_model(shape, manifest, torch.float32)
    state = model.state_dict(keep_vars=True)
    tied = models.tied(shape)
    params = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in state.items() if name not in tied}
    placements = resolve(manifest, models.rules(shape), params, ignore=models.ignored(shape), tied=tied)
    check_coverage(placements, params)


def kept(work: MergeWork) -> Iterator[Kept]:
    """The groups of matrices that are copied, largest first."""
    assert work.packing is not None
    groups: dict[tuple[str, str], tuple[int, int]] = {}
    for weight in work.weights:
        matrices = [part for part in weight.outputs.values() if len(part[1]) > 1]
        if weight.to is None and matrices:
            key = _why(work, weight)
            count, nbytes = groups.get(key, (0, 0))
            groups[key] = count + len(matrices), nbytes + parts_nbytes(matrices)
    rows = (Kept(group, *sizes, why) for (group, why), sizes in groups.items())
    yield from sorted(rows, key=lambda row: -row.nbytes)


def _why(work: MergeWork, weight: Weight) -> tuple[str, str]:
    """(group, the reason why a weight is copied)."""
    assert work.packing is not None
    if weight.home is not None:
        return weight.group, "not in --modules"
    name, shape = next(iter(weight.parts.values())).name, work.model.shape
    outside = not name.startswith(work.manifest.prefix) and weight.group != "lm_head"
    if outside or any(re.match(pattern, f"{weight.name}.weight") for pattern in models.ignored(shape)):
        return "other parts", "not part of the language model"
    return weight.group, "always" if weight.group in LEFT else "no linear layer"
