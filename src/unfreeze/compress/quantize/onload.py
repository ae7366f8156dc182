"""A float release as the manifest of the folder that `unfreeze quantize` would write of it.

    packed = packed_on_load(manifest, "int4")

Its tensors have the names, dtypes and shapes of that folder's, and its config the quantization_config. Each
part of a packed weight names the matrix that it is made from when it is read (checkpoint/packing.py). So
training, plans and merges treat it as that folder, and nothing is written.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from unfreeze import models
from unfreeze.checkpoint.keymap import tensor_sources
from unfreeze.checkpoint.manifest import Manifest, TensorInfo
from unfreeze.checkpoint.packing import OnLoad, PackedFrom, matrix_of, packing_bytes
from unfreeze.compress.quantize.formats import stored_parts
from unfreeze.compress.quantize.work import check_loads, quantize_work
from unfreeze.compress.released import config_of
from unfreeze.compress.work import MergeWork, Out, Weight
from unfreeze.config.adapter import packed_as
from unfreeze.config.lora import LoraConfig
from unfreeze.core.errors import CheckpointError, ConfigError, UserError
from unfreeze.core.units import format_bytes
from unfreeze.models.blocks.experts import Experts
from unfreeze.quant.codec import Codec, parts_nbytes
from unfreeze.report.run import decimal_bytes
from unfreeze.untrusted.json_object import parse_object

FLAGS = (("--modules", "--quantize-modules"), ("--to ", "--quantize "))
"""Flags of `unfreeze quantize`, and of a run."""


def packed_on_load(manifest: Manifest, to: str, modules: Collection[str] = ()) -> Manifest:
    """The manifest of this release packed in the format `to` of FORMATS.

    modules: of MODULES; empty: those that `unfreeze quantize` packs. A manifest without weights, of a
    config.json alone, is packed as its release in bf16 would be. Raises ConfigError for a release that is
    quantized already, for modules that it lacks and widths that the format cannot hold; CheckpointError for a
    format that the family's readers cannot load.
    """
    scheme = manifest.scheme()
    if scheme is not None or manifest.is_packed():
        name = f" ({scheme.name})" if scheme is not None else ""
        raise ConfigError(
            f"quantize is {to}, but {manifest.path} is quantized already{name}",
            next="leave --quantize out: it is trained in its own format",
        )
    whole = manifest if manifest.tensors else replace(manifest, tensors=dict(_of_config(manifest)))
    try:
        work = quantize_work(whole, to, modules)
        packed = replace(
            whole,
            config=parse_object(config_of(work), "config.json", CheckpointError),
            tensors={info.name: info for weight in work.weights for info in _tensors(work, weight)},
            on_load=OnLoad(whole, to, _modules(work)),
        )
        check_loads(packed)
    except UserError as error:
        raise type(error)(_as_of_run(error.message), next=_as_of_run(error.next)) from None
    return packed


def as_trained(manifest: Manifest, adapter: Path, say: Callable[[str], None]) -> Manifest:
    """The base of an adapter as the adapter was trained: packed on the way, if its run packed it.

    A base that is quantized already is taken as it is: `unfreeze quantize` wrote it.
    """
    packed = packed_as(adapter)
    if packed is None or manifest.is_packed():
        return manifest
    say(f"{manifest.path} is packed to {packed.format.upper()} while it is loaded, as when {adapter} trained")
    return packed_on_load(manifest, packed.format, packed.modules)


def packs_line(manifest: Manifest) -> str:
    """Words such as '61.1 GB in files, packed to INT4 while they are loaded: 16.9 GB; …'."""
    assert manifest.on_load is not None
    before, after = manifest.on_load.released.nbytes, manifest.nbytes
    return (
        f"{decimal_bytes(before)} in files, {decimal_bytes(after)} once they are packed to"
        f" {manifest.on_load.words} (loading takes at most {format_bytes(packing_bytes(manifest))} more)"
    )


def room_line(manifest: Manifest) -> str:
    """Say what adapters on this release take on this machine, before it is quantized or read.

    Such as '8.1 GiB of 15.3 GiB here with adapters on it (rank 16, 4,096 tokens a step); as it is 63.0 GiB'.
    """
    from unfreeze.config.tables import Training
    from unfreeze.generate.open import device_of
    from unfreeze.kernels.precision import AUTO, precision
    from unfreeze.parallel.plan import plan_here

    device, tokens, lora = device_of("auto"), Training().tokens_per_step, LoraConfig()
    shape, dtype = models.shape(manifest.config), precision(AUTO, device).name
    before = manifest.on_load.released if manifest.on_load else None
    of_both = [
        plan_here(shape, each, lora, dtype=dtype, device=device, tokens=tokens)
        for each in (manifest, before)
        if each is not None
    ]
    words = (
        f"{format_bytes(of_both[0].total)} of {format_bytes(of_both[0].usable)} here with adapters on it"
        f" (rank {lora.rank}, {tokens:,} tokens a step)"
    )
    return f"{words}; as it is {format_bytes(of_both[1].total)}" if len(of_both) > 1 else words


def _as_of_run(words: str) -> str:
    """A message of `unfreeze quantize` with the flags of a run."""
    for flag, own in FLAGS:
        words = words.replace(flag, own)
    return words


def _modules(work: MergeWork) -> tuple[str, ...]:
    assert work.packing is not None
    return tuple(work.packing.modules)


def _tensors(work: MergeWork, weight: Weight) -> Iterator[TensorInfo]:
    """The tensors of a weight: those on disk, or those that it becomes."""
    codec, home = weight.to, weight.home
    if codec is None or isinstance(codec, str):
        yield from weight.parts.values()
        return
    assert home is not None and work.packing is not None
    stored, outs = weight.parts[""], work.outs(weight, 0)
    if any(out.whole for out in outs):  # one tensor for all experts
        yield from _parts(work, weight, stored, outs, codec)
        return
    for expert in weight.experts():
        matrix = stored if home.experts is None else matrix_of(stored, expert)
        yield from _parts(work, weight, matrix, work.outs(weight, expert), codec)


def _parts(
    work: MergeWork, weight: Weight, source: TensorInfo, outs: list[Out], codec: Codec
) -> Iterator[TensorInfo]:
    """The parts of the weights that one matrix becomes; of all experts, for a stack that stays one."""
    assert weight.home is not None and work.packing is not None
    for out in outs:
        rows = None if out.half is None else _rows(work, weight, out.half)
        whole = PackedFrom(source, codec, "", out.name, work.packing.round, weight.home.transposed, rows)
        lead = () if whole.experts is None else (whole.experts,)
        for suffix, (dtype, shape) in stored_parts(codec, *whole.shape).items():
            name, own = work.part_name(out.name, suffix), replace(whole, suffix=suffix)
            nbytes = parts_nbytes([(dtype, (*lead, *shape))])
            yield TensorInfo(name, dtype, (*lead, *shape), nbytes, source.file, source.offset, own)


def _rows(work: MergeWork, weight: Weight, half: int) -> tuple[int, int, int]:
    """(first, stop, step) of gate's or up's rows in an expert's fused matrix."""
    assert weight.home is not None
    owner = work.model.get_submodule(weight.home.place.site)
    assert isinstance(owner, Experts)
    numbers = torch.arange(weight.home.shape[0]).unsqueeze(-1)
    own = owner.activation.split(numbers, 0)[half].flatten().tolist()
    return own[0], own[-1] + 1, own[1] - own[0] if len(own) > 1 else 1


def _of_config(manifest: Manifest) -> Iterator[tuple[str, TensorInfo]]:
    """The tensors of a release of this config.json, in bf16."""
    model = models.from_config(manifest.config, torch.bfloat16)
    rules, tied = models.rules(model.shape), models.tied(model.shape)
    for param, tensor in model.state_dict().items():
        for source in () if param in tied else tensor_sources(param, tensor.shape, rules):
            part = ("BF16" if tensor.is_floating_point() else "I64"), source.shape
            yield source.name, TensorInfo(source.name, *part, parts_nbytes([part]), manifest.path, 0)
