"""resolve: every tensor of a checkpoint gets its place in the model, or there is one error and no model.

It decides from names, dtypes and shapes alone, before allocating memory. Nothing may be missing, left over,
duplicated, or of another shape or dtype (docs/why/trust.md L7, L8). There is no option to ignore mismatches.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import torch

from unfreeze.checkpoint.faults import Faults
from unfreeze.checkpoint.keymap import Index, StackRule, TensorSource, tensor_sources
from unfreeze.checkpoint.manifest import MAX_TEXT, Manifest, TensorInfo
from unfreeze.checkpoint.nested import name_on_disk
from unfreeze.checkpoint.tensors import NAME, TORCH_DTYPE
from unfreeze.core.dtypes import FLOATS
from unfreeze.quant.codec import Codec, Texted, kept_suffixes, texted
from unfreeze.quant.formats import foreign_dtype, foreign_format, foreign_parts, is_part, stored_packed
from unfreeze.quant.scheme import Scheme, is_unread

_WHOLE = ("I32", "I64", "U8")  # dtypes of a codec's extras

Params = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class Placement:
    """One tensor on disk, and its place in the model.

    index           place of the tensor: params[param][index].
    start, stop     the same place as elements start:stop of the flattened parameter.
    expanded_bytes  bytes of the weight if expanded to bf16. For a packed weight its first part has them all,
                    the others have 0.
    expected        None: read the tensor into that place. Otherwise: read it, compare with these whole
                    numbers, keep nothing (a codec's extras).
    variants        the likely causes if the numbers differ from `expected`, for the message.
    transposed      the last two dimensions of the tensor on disk are swapped relative to the parameter.
    parse           converts the bytes on disk to the numbers to store (quant.codec.Texted).
    alias           True: `param` was filled from another tensor; read this one and compare (a tied head that
                    is stored too).
    """

    info: TensorInfo
    param: str
    index: Index
    start: int
    stop: int
    expanded_bytes: int
    expected: tuple[int, ...] | None = None
    variants: str = ""
    alias: bool = False
    transposed: bool = False
    parse: Callable[[bytes], list[float]] | None = None


def resolve(
    manifest: Manifest,
    rules: Sequence[StackRule],
    params: Params,
    *,
    ignore: Sequence[str] = (),
    tied: Mapping[str, str] | None = None,
) -> list[Placement]:
    """Placements that cover every element of every parameter exactly once.

    params   name -> (dtype, shape) of the tensors to fill (parameters and persistent buffers)
    rules    how stacked parameters are stored; every other tensor on disk has the name of its parameter, as
             in manifest.by_model_name()
    ignore   regular expressions (matched from the start of a name) of tensors that are not part of this model
    tied     alias -> name in `params`: the alias may be on disk too, or instead

    Floats may be BF16, F16 or F32 on disk for any dtype of the model; a codec's extras I32 or I64; anything
    else must agree exactly. Raises one CheckpointError that counts all faults and shows the first.
    """
    disk = manifest.by_model_name()
    work = _Work(manifest, disk, manifest.scheme(), Faults(manifest.path, total=len(disk)), params)
    tied = tied or {}

    # fill each parameter from its sources, and a tied one that is not on disk from its alias
    stand_ins = {name: alias for alias, name in tied.items() if name not in disk and alias in disk}
    for param, (dtype, shape) in params.items():
        for source in tensor_sources(param, shape, rules, disk):
            work.place(param, dtype, shape, source, stand_ins.get(source.name, source.name))
    for alias, name in tied.items():
        if alias in disk and alias not in work.used and name in params:
            work.alias(alias, name, params[name][1])

    # the remaining tensors must be ignored by rule; then report all faults at once
    _check_left_over(work, [re.compile(pattern) for pattern in ignore])
    work.faults.raise_if_any(
        next=(
            f"compare {manifest.path / 'config.json'} with the files beside it: unfreeze inspect"
            f" {manifest.path}"
        )
    )
    return work.placements


class _Work:
    """The state of one resolve: placements, used names, and faults."""

    def __init__(
        self,
        manifest: Manifest,
        disk: dict[str, TensorInfo],
        scheme: Scheme | None,
        faults: Faults,
        params: Params,
    ):
        self.manifest, self.disk, self.scheme, self.faults = manifest, disk, scheme, faults
        self.params = params
        self.used: set[str] = set()
        self.placements: list[Placement] = []

    def place(
        self, param: str, dtype: torch.dtype, shape: tuple[int, ...], source: TensorSource, name: str
    ) -> None:
        """Place tensor `name` at source.index of `param`, or add the fault that prevents it."""
        info = self.disk.get(name)
        base, _, suffix = name.rpartition(".")
        codec = self.scheme.part_of(name, self.disk) if self.scheme is not None else None
        if info is None:
            cause = _why_missing(base, suffix, self.disk)
            self.faults.add("tensors are missing", name_on_disk(self.manifest.prefix, name), cause=cause)
            return
        self.used.add(name)
        if texted(codec) and suffix == codec.text:
            self._text(codec, param, shape, source, info)
            return
        if not _fits(info, dtype):
            detail = f"{info.name} is {info.dtype} {list(info.shape)}, the model needs {_name(dtype)}"
            self.faults.add("tensors have the wrong dtype", detail, cause=_why_dtype(info))
            return
        column = texted(codec) and info.shape == (prod(source.shape), 1)
        if info.shape != source.shape and not column and not _one_number(info.shape, source.shape):
            detail = f"{info.name} is {list(info.shape)} on disk, config.json makes it {list(source.shape)}"
            self.faults.add("tensors have the wrong shape", detail, cause=_why_shape(codec))
            return
        start, stop = flat_range(shape, source.index)
        expanded = info.nbytes
        if codec is not None:
            expanded = self._packed(codec, param, source, base, suffix)
        self.placements.append(
            Placement(info, param, source.index, start, stop, expanded, transposed=source.transposed)
        )

    def _text(
        self, codec: Texted, param: str, shape: tuple[int, ...], source: TensorSource, info: TensorInfo
    ) -> None:
        """Place the kept numbers of a text beside a packed weight; the text also has the weight's shape."""
        if info.dtype != "U8" or len(info.shape) != 1 or info.nbytes > MAX_TEXT:
            detail = f"{info.name} is {info.dtype} {list(info.shape)}, expected a text of U8 [n]"
            self.faults.add("tensors have the wrong dtype or shape", detail)
            return
        *_, out_features, width = self.params[param.removesuffix(codec.text) + "weight"][1]
        parse = partial(
            codec.parse, name=info.name, out_features=out_features, in_features=codec.columns(width)
        )
        start, stop = flat_range(shape, source.index)
        self.placements.append(Placement(info, param, source.index, start, stop, 0, parse=parse))

    def _packed(self, codec: Codec, param: str, source: TensorSource, base: str, suffix: str) -> int:
        """Place the extras of a packed weight when its first part is placed.

        Returns the bytes of the weight expanded to bf16; 0 for its other parts.
        """
        if suffix != codec.suffixes[0]:
            return 0

        # the weight's shape [..., out, in] follows from the shapes of its parts
        model_parts = kept_suffixes(codec)
        names = {part: f"{base}.{part}" for part in model_parts}
        parts = {part: self.disk[name].shape for part, name in names.items() if name in self.disk}
        if len(parts) < len(model_parts) or not all(parts.values()) or len(codec.shape(parts)) < 2:
            return 0  # the missing or misshapen one is reported under its own parameter
        *lead, out_features, in_features = codec.shape(parts)

        # the extras repeat the shape: stream compares them when it reads them
        for extra, expected in codec.disk_extras(out_features, in_features).items():
            info = self.disk.get(f"{base}.{extra}")
            if info is None:
                self.faults.add(
                    "tensors are missing",
                    name_on_disk(self.manifest.prefix, f"{base}.{extra}"),
                    cause="an unfinished conversion",
                )
                continue
            self.used.add(f"{base}.{extra}")
            if info.packed_from is not None:
                continue
            if info.dtype not in _WHOLE or len(info.shape) > 1 or prod(info.shape) != len(expected):
                detail = (
                    f"{info.name} is {info.dtype} {list(info.shape)}, expected I32 or I64 [{len(expected)}]"
                )
                self.faults.add("tensors have the wrong dtype or shape", detail)
                continue
            self.placements.append(Placement(info, param, source.index, 0, 0, 0, expected, codec.variants))
        return prod(lead) * out_features * in_features * 2

    def zero_bias(self, name: str, info: TensorInfo) -> bool:
        """True for a bias beside a packed weight of a layer without bias; placed to be compared with zeros.

        GPTQ's older writers put one beside every layer they packed.
        """
        base, _, suffix = name.rpartition(".")
        packed = self.scheme is not None and self.scheme.stored(base, self.disk) is not None
        if suffix != "bias" or not packed or info.dtype not in FLOATS or len(info.shape) != 1:
            return False
        cause = "a layer with a bias, which this model type does not have,"
        self.placements.append(Placement(info, base, (), 0, 0, 0, (0,) * info.shape[0], cause))
        return True

    def alias(self, alias: str, name: str, shape: tuple[int, ...]) -> None:
        """Place an `alias` that is stored although tied to `name`: loading compares the bytes of the two."""
        info = self.disk[alias]
        self.used.add(alias)
        if info.shape != shape or info.dtype not in FLOATS:
            detail = f"{info.name} is {info.dtype} {list(info.shape)}, tied to {name} {list(shape)}"
            self.faults.add(
                "tensors have the wrong shape", detail, cause="tie_word_embeddings in config.json is wrong"
            )
            return
        self.placements.append(Placement(info, name, (), 0, prod(shape), 0, alias=True))


def _check_left_over(work: _Work, ignore: Sequence[re.Pattern[str]]) -> None:
    """Each tensor on disk must be used, or ignored by rule, or about a quantized model's activations."""
    for name, info in work.disk.items():
        if work.scheme is not None and is_unread(name):
            continue
        if name not in work.used and not any(pattern.match(name) for pattern in ignore):
            if work.zero_bias(name, info):
                continue
            shown = f"{info.name} {info.dtype} {list(info.shape)}"
            work.faults.add(
                "tensors are not part of the model", shown, cause=_why_unexpected(name, work.scheme)
            )


def flat_range(shape: Sequence[int], index: Index) -> tuple[int, int]:
    """(start, stop) of params[index] in the flattened parameter.

    An index is (), (e,) or (e, slice): each is one range of a contiguous tensor.
    """
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


def _one_number(*shapes: tuple[int, ...]) -> bool:
    """True if all are [], [1] or [1, 1]: writers differ in how they store one scale for a matrix."""
    return all(shape in ((), (1,), (1, 1)) for shape in shapes)


def _fits(info: TensorInfo, dtype: torch.dtype) -> bool:
    """True if the dtypes agree: floats fit other float dtypes, codes (FP8 too) only their own.

    A table of whole numbers of 64 bits (DeepSeek-V4's tid2eid) may be stored in 32.
    """
    if dtype == torch.int64 and info.dtype == "I32":
        return True
    if dtype.is_floating_point and dtype.itemsize > 1:
        return info.dtype in FLOATS
    return TORCH_DTYPE.get(info.dtype) == dtype


def _name(dtype: torch.dtype) -> str:
    return "a float" if dtype.is_floating_point and dtype.itemsize > 1 else NAME.get(dtype, str(dtype))


def _why_missing(base: str, suffix: str, disk: Mapping[str, TensorInfo]) -> str:
    if suffix != "weight" and f"{base}.weight" in disk:
        return f"{base}.weight is stored unpacked although quantization_config says it is packed"
    if suffix == "weight" and stored_packed(base, disk):
        return f"{base} is stored packed although config.json's quantization_config does not say so"
    foreign = foreign_parts(base, disk)
    return (
        f"another format on disk: {foreign}"
        if foreign
        else "the files are of another model than config.json, or a conversion stopped early"
    )


def _why_dtype(info: TensorInfo) -> str:
    if foreign := foreign_dtype(info.dtype):
        return f"{foreign}, which is not read"
    return "another number format under the same name"


def _why_shape(codec: Codec | None) -> str:
    """codec: that of a packed weight, None for a dense one."""
    if codec is not None:
        return f"{codec.variants} than quantization_config says, or other sizes in config.json"
    return "sizes in config.json that are not this checkpoint's"


def _why_unexpected(name: str, scheme: Scheme | None) -> str:
    foreign = foreign_format(name)
    if foreign:
        return f"the weights are in another format, {foreign}, which is not read"
    if scheme is None and is_part(name):
        return "packed weights, but config.json has no quantization_config"
    return "a checkpoint of another model than config.json, with more layers or parts"
