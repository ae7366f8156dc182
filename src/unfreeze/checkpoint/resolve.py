"""resolve: every tensor of a checkpoint gets its one place in the model, or there is one error and no model.

It decides from names, dtypes and shapes alone, before any memory is taken. docs/trust.md L7 and L8: nothing
missing, nothing left over, nothing twice, nothing of another shape or kind. There is no option to ignore
mismatches.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from unfreeze.checkpoint.faults import Faults, foreign_format
from unfreeze.checkpoint.keymap import Index, Source, StackRule, memory_suffixes, sources
from unfreeze.checkpoint.manifest import TORCH_DTYPE, Manifest, TensorInfo
from unfreeze.core.errors import CheckpointError
from unfreeze.quant.codec import Codec
from unfreeze.quant.int4 import from_quantization_config

_FLOATS = ("BF16", "F16", "F32")
_WHOLE = ("I32", "I64")

Params = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class Placement:
    """One tensor on disk and where it belongs: `params[param][index]`, which is elements start:stop of the flattened parameter.

    expected  None: read the tensor into that place. Otherwise: read it, compare with this, keep nothing
              (weight_shape).
    alias     True: `param` was filled from another tensor; read this one and compare (a tied head that is
              stored too).
    expanded_bytes  bytes of the expanded bf16 weight, counted once per packed weight: 0 for its other parts.
    """

    info: TensorInfo
    param: str
    index: Index
    start: int
    stop: int
    expanded_bytes: int
    expected: Tensor | None = None
    alias: bool = False


def resolve(
    manifest: Manifest,
    rules: Sequence[StackRule],
    params: Params,
    *,
    ignore: Sequence[str] = (),
    tied: Mapping[str, str] | None = None,
) -> list[Placement]:
    """Placements that cover every element of every parameter exactly once.

    params   name -> (dtype, shape) of what the model wants filled (parameters and persistent buffers)
    rules    how stacked parameters stand on disk; every other name on disk is a parameter's, after manifest.prefix
    ignore   regular expressions (matched from the start of a name) of tensors that are not part of this model
    tied     alias -> name in `params`: the alias may be on disk too, or instead

    Floats may be BF16, F16 or F32 on disk whatever the model computes in; weight_shape I32 or I64; anything else must agree exactly.
    Raises one CheckpointError that counts all faults and shows the first.
    """
    disk = manifest.by_model_name()
    work = _Work(manifest, disk, codec_of(manifest), Faults(manifest.path, total=len(disk)))
    tied = tied or {}
    stand_ins = {name: alias for alias, name in tied.items() if name not in disk and alias in disk}
    for param, (dtype, shape) in params.items():
        for source in sources(param, shape, rules, disk):
            work.place(param, dtype, shape, source, stand_ins.get(source.name, source.name))
    for alias, name in tied.items():
        if alias in disk and alias not in work.used and name in params:
            work.alias(alias, name, params[name][1])
    _check_left_over(work, [re.compile(pattern) for pattern in ignore])
    work.faults.raise_if_any(next=f"compare {manifest.path / 'config.json'} with the files beside it: unfreeze inspect {manifest.path}")
    return work.placements


def codec_of(manifest: Manifest) -> Codec | None:
    """The codec that config.json names, its scales in the dtype that the files hold them in; None for a checkpoint that isn't quantized.

    Raises ConfigError for a format that cannot be read, CheckpointError where scales have several dtypes: a stack of experts has one.
    """
    found = from_quantization_config(manifest.config)
    if found is None:
        return None
    first: dict[str, str] = {}
    for name, info in manifest.tensors.items():
        base, _, suffix = name.rpartition(".")
        if suffix == "weight_scale" and info.dtype in _FLOATS and f"{base}.weight_packed" in manifest.tensors:
            first.setdefault(info.dtype, name)
    if len(first) > 1:
        named = ", ".join(f"{name} is {dtype}" for dtype, name in first.items())
        raise CheckpointError(f"the scales of packed weights have {len(first)} dtypes: {named}", next="convert them to the widest of these")
    return found[0].scaled_in(TORCH_DTYPE[next(iter(first))]) if first else found[0]


class _Work:
    """The state of one resolve: what is placed, which names are used up, which faults were found."""

    def __init__(self, manifest: Manifest, disk: dict[str, TensorInfo], codec: Codec | None, faults: Faults):
        self.manifest, self.disk, self.codec, self.faults = manifest, disk, codec, faults
        self.kept: tuple[str, ...] = memory_suffixes(codec) if codec else ()
        self.used: set[str] = set()
        self.placements: list[Placement] = []

    def place(self, param: str, dtype: torch.dtype, shape: tuple[int, ...], source: Source, name: str) -> None:
        """Put tensor `name` at source.index of `param`, with the check tensors that stand beside it."""
        info = self.disk.get(name)
        base, _, suffix = name.rpartition(".")
        packed = suffix in self.kept
        if info is None:
            self.faults.add("tensors are missing", f"{self.manifest.prefix}{name}", cause=_why_missing(base, suffix, self.disk))
            return
        self.used.add(name)
        if not _fits(info, dtype, packed):
            detail = f"{info.name} is {info.dtype} {list(info.shape)}, the model needs {_name(dtype)}"
            self.faults.add("tensors have the wrong dtype", detail, cause=_why_dtype(info))
            return
        if info.shape != source.shape:
            detail = f"{info.name} is {list(info.shape)} on disk, config.json makes it {list(source.shape)}"
            self.faults.add("tensors have the wrong shape", detail, cause=_why_shape(suffix, packed))
            return
        start, stop = flat_range(shape, source.index)
        expanded = info.nbytes
        if self.codec and packed:
            expanded = self._packed(param, source, base, suffix)
        self.placements.append(Placement(info, param, source.index, start, stop, expanded))

    def _packed(self, param: str, source: Source, base: str, suffix: str) -> int:
        """For the first part of a packed weight: check its extras and return its expanded bytes. Other parts
        return 0."""
        assert self.codec is not None
        if suffix != self.codec.suffixes[0]:
            return 0
        parts = {kept: self.disk[f"{base}.{kept}"].shape for kept in self.kept if f"{base}.{kept}" in self.disk}
        if len(parts) < len(self.kept) or any(len(shape) < 2 for shape in parts.values()):
            return 0  # the missing or misshapen one is reported under its own parameter
        out_features, in_features = self.codec.shape({kept: torch.empty(shape, device="meta") for kept, shape in parts.items()})[-2:]
        for extra, expected in self.codec.disk_extras(out_features, in_features).items():
            info = self.disk.get(f"{base}.{extra}")
            if info is None:
                self.faults.add("tensors are missing", f"{self.manifest.prefix}{base}.{extra}", cause="an unfinished conversion")
                continue
            self.used.add(f"{base}.{extra}")
            if info.dtype not in _WHOLE or info.shape != tuple(expected.shape):
                detail = f"{info.name} is {info.dtype} {list(info.shape)}, expected I32 or I64 {list(expected.shape)}"
                self.faults.add("tensors have the wrong dtype or shape", detail)
                continue
            self.placements.append(Placement(info, param, source.index, 0, 0, 0, expected=expected))
        return out_features * in_features * 2

    def alias(self, alias: str, name: str, shape: tuple[int, ...]) -> None:
        """`alias` is stored although it is tied to `name`: its bytes must be the same, which is checked after loading."""
        info = self.disk[alias]
        self.used.add(alias)
        if info.shape != shape or info.dtype not in _FLOATS:
            detail = f"{info.name} is {info.dtype} {list(info.shape)}, tied to {name} {list(shape)}"
            self.faults.add("tensors have the wrong shape", detail, cause="tie_word_embeddings in config.json is wrong")
            return
        self.placements.append(Placement(info, name, (), 0, prod(shape), 0, alias=True))


def _check_left_over(work: _Work, ignore: Sequence[re.Pattern[str]]) -> None:
    """Every tensor on disk is used, or ignored by rule."""
    for name, info in work.disk.items():
        if name not in work.used and not any(pattern.match(name) for pattern in ignore):
            shown = f"{info.name} {info.dtype} {list(info.shape)}"
            work.faults.add("tensors are not part of the model", shown, cause=_why_unexpected(name, work.codec))


def flat_range(shape: Sequence[int], index: Index) -> tuple[int, int]:
    """The elements of the flattened parameter that params[index] is: (), (e,) or (e, slice) of a contiguous tensor are one range."""
    numel = prod(shape)
    if not index:
        return 0, numel
    expert, *rows = index
    assert isinstance(expert, int) and len(rows) <= 1
    size = numel // shape[0]
    if not rows:
        return expert * size, (expert + 1) * size
    assert isinstance(rows[0], slice)
    row = size // shape[1]
    return expert * size + rows[0].start * row, expert * size + rows[0].stop * row


def _fits(info: TensorInfo, dtype: torch.dtype, packed: bool) -> bool:
    if dtype.is_floating_point:
        return info.dtype in _FLOATS
    return TORCH_DTYPE.get(info.dtype) == dtype


def _name(dtype: torch.dtype) -> str:
    return next((name for name, known in TORCH_DTYPE.items() if known == dtype), str(dtype)) if not dtype.is_floating_point else "a float"


def _why_missing(base: str, suffix: str, disk: Mapping[str, TensorInfo]) -> str:
    if suffix != "weight" and f"{base}.weight" in disk:
        return f"{base}.weight is stored unpacked although quantization_config says it is packed"
    if suffix == "weight" and f"{base}.weight_packed" in disk:
        return f"{base} is stored packed although config.json's quantization_config does not say so"
    foreign = next((title for piece in ("qweight", "blocks") if f"{base}.{piece}" in disk and (title := foreign_format(piece))), "")
    return f"another format on disk: {foreign}" if foreign else "the files are of another model than config.json, or a conversion stopped early"


def _why_dtype(info: TensorInfo) -> str:
    if info.dtype.startswith("F8"):
        return "FP8 with block scales (weight_scale_inv), which is not read"
    return "another number format under the same name"


def _why_shape(suffix: str, packed: bool) -> str:
    if packed:
        return "another group_size or another nibble format than quantization_config says, or other sizes in config.json"
    return "sizes in config.json that are not this checkpoint's"


def _why_unexpected(name: str, codec: Codec | None) -> str:
    foreign = foreign_format(name)
    if foreign:
        return f"the weights are in another format, {foreign}, which is not read"
    if codec is None and name.endswith(("weight_packed", "weight_scale", "weight_shape")):
        return "packed weights, but config.json has no quantization_config"
    return "a checkpoint of another model than config.json, with more layers or parts"
