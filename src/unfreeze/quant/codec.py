"""Codec: what a quantized weight format must say about itself; Packed: one quantized weight in memory.

A format is one file beside this one. It knows which tensors on disk make one weight, how they are laid out in
memory, which quantization_config says so, and how to go to floating point and back. Only the last needs
torch, which is imported there: a config is refused, and a checkpoint's bytes are counted, without it.

Shapes: a matrix W [out, in] with y = x Wᵀ. Parts may have leading dims (E experts); the last two are W's.
Dtypes are safetensors' names (core/dtypes.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast, runtime_checkable

from unfreeze.core.dtypes import ITEMSIZE
from unfreeze.core.errors import CheckpointError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Part = tuple[str, tuple[int, ...]]
"""(dtype, shape) of a tensor, e.g. ("BF16", (4, 2))."""
Table = Mapping[str, object]
"""A quantization_config, or a table within it, as JSON."""


class Codec(Protocol):
    """One quantized format with its parameters, such as the group size. Implemented by frozen dataclasses."""

    @property
    def name(self) -> str:
        """The format's published name, e.g. "int4-pack-quantized"."""
        ...

    @property
    def suffixes(self) -> tuple[str, ...]:
        """The last name parts of the tensors on disk that make one weight, its codes first."""
        ...

    @property
    def variants(self) -> str:
        """The likely causes of parts with an unexpected shape, for messages: "another group_size …"."""
        ...

    def parts(self, out_features: int, in_features: int) -> dict[str, Part]:
        """suffix -> (dtype, shape) of the parts kept in memory for one [out, in] matrix.

        Raises ConfigError where the format cannot hold it.
        """
        ...

    def as_stored(self, dtypes: Mapping[str, str]) -> Codec:
        """The same format with its scales held in the dtype of the files.

        dtypes: name on disk -> dtype.
        Raises CheckpointError where scales have several dtypes: a stack of experts can hold only one.
        """
        ...

    def disk_extras(self, out_features: int, in_features: int) -> dict[str, tuple[int, ...]]:
        """suffix -> integers (int32) that stand on disk beside `parts`.

        They are known from the shape, so they are not kept in memory.
        """
        ...

    def shape(self, parts: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """Shape [..., out, in] of the weight whose parts have these shapes."""
        ...

    def dequantize(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The weight [..., out, in] in the dtype of its scales. Expands everything it is given."""
        ...

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        """suffix -> part for a floating point weight [..., out, in]; keys as in `parts`."""
        ...

    def nbytes(self, out_features: int, in_features: int) -> int:
        """Bytes of the parts of one [out, in] matrix in memory."""
        ...


@runtime_checkable
class Texted(Protocol):
    """A codec that writes of each weight in a text beside it, and its codes as a column of bytes [n, 1].

    Of the text a few numbers are kept in memory, as the part that `parts` says.
    """

    @property
    def text(self) -> str:
        """The suffix of that part."""
        ...

    def columns(self, width: int) -> int:
        """The input columns of a matrix whose codes are `width` wide in memory."""
        ...

    def told(self, raw: bytes, name: str) -> Codec:
        """The same format with what the text `name` says of all weights. Raises CheckpointError."""
        ...

    def parse(self, raw: bytes, name: str, out_features: int, in_features: int) -> list[float]:
        """The numbers to keep of the text `name`.

        Raises CheckpointError where it says something else of an [out, in] matrix than this codec.
        """
        ...


@runtime_checkable
class ByRows(Protocol):
    """A codec whose matrix can be expanded some rows at a time: little then lies between codes and result."""

    @property
    def rows_at(self) -> int:
        """Rows may be cut at multiples of this number."""
        ...

    def rows(self, parts: Mapping[str, Tensor], first: int, last: int) -> dict[str, Tensor]:
        """The parts of rows first:last of one matrix; views."""
        ...


class Format(NamedTuple):
    """How a format is recognised; a line of FORMATS (quant/formats.py).

    key       the quant_method; for compressed-tensors followed by a blank and the `format` of its groups
    title     the format in words, for a refusal's list of what can be read
    read      (where the table stands, the table) -> the codec. The table is the quantization_config, or the
              `weights` of one compressed-tensors group. Raises Unreadable for whatever would be read wrongly
    known     fields of that table that are read, or without effect on weights that are packed already
    suffixes  the last name parts of tensors that only this format has: no other format, and no dense weight
    ignored   the field that lists the modules which stay unquantized
    """

    key: str
    title: str
    read: Callable[[str, Table], Codec]
    known: frozenset[str]
    suffixes: tuple[str, ...]
    ignored: str = "modules_to_not_convert"


class Unreadable(Exception):
    """What in a quantization_config cannot be read. formats.recognise adds to it which formats can be."""


def refuse_other_values(table: Table, only: Mapping[str, tuple[object, str]], where: str) -> None:
    """Raise Unreadable for a field whose value is not the one that is implemented.

    only: field -> (the implemented value, what another value means). null, an empty table and a table of
    format "dense" are always allowed.
    """
    for name, (built, meaning) in only.items():
        value = table.get(name)
        inner = as_table(value)
        empty = inner is not None and all(entry in (None, [], {}) for entry in inner.values())
        dense = inner is not None and inner.get("format") == "dense"
        if not (empty or dense or value in (None, [], built)):
            raise Unreadable(f"{where}.{name} {str(value)[:60]} ({meaning})")


def as_table(value: object) -> Table | None:
    """A JSON object, None where it is something else."""
    return cast(Table, value) if isinstance(value, Mapping) else None


@dataclass(frozen=True, eq=False)
class Packed:
    """A quantized weight [..., out, in] in memory: its codec, and its parts (suffix -> tensor).

    It is expanded only by `dequantize`.
    """

    codec: Codec
    parts: Mapping[str, Tensor]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codec.shape({suffix: tuple(part.shape) for suffix, part in self.parts.items()})

    @property
    def numel(self) -> int:
        """Number of weights, not of the words they are packed in."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the parts as they are held."""
        return sum(part.nbytes for part in self.parts.values())

    @property
    def device(self) -> torch.device:
        return next(iter(self.parts.values())).device

    def dequantize(self) -> Tensor:
        """All of it, in floating point: 2 bytes per weight in bf16.

        To expand one matrix, index first: `packed[expert].dequantize()`.
        """
        return self.codec.dequantize(self.parts)

    def __getitem__(self, index: int | slice) -> Packed:
        """One expert, or some, by the first leading dim: views, nothing is copied."""
        return Packed(self.codec, {suffix: part[index] for suffix, part in self.parts.items()})


@lru_cache(maxsize=64)
def kept_suffixes(codec: Codec) -> tuple[str, ...]:
    """The suffixes of the parts that a model holds in memory: all but the codec's disk_extras."""
    extras = codec.disk_extras(0, 0)
    return tuple(suffix for suffix in codec.suffixes if suffix not in extras)


def parts_nbytes(parts: Iterable[Part]) -> int:
    """Σ prod(shape) * itemsize."""
    return sum(ITEMSIZE[dtype] * prod(shape) for dtype, shape in parts)


def finite(weight: Tensor) -> None:
    """Raise CheckpointError for a weight that is NaN or infinite: no code stands for it."""
    if not bool(weight.isfinite().all()):
        bad = int((~weight.isfinite()).sum())
        raise CheckpointError(
            f"{bad} of {weight.numel()} weights are NaN or infinite and cannot be quantized"
        )


def one_scale_dtype(dtypes: Mapping[str, str], title: str) -> str:
    """The dtype that all of these scales have. name -> dtype, at least one.

    Raises CheckpointError where they have several: a stack of experts can hold only one.
    """
    first: dict[str, str] = {}
    for name, dtype in dtypes.items():
        first.setdefault(dtype, name)
    if len(first) > 1:
        named = ", ".join(f"{name} is {dtype}" for dtype, name in first.items())
        raise CheckpointError(
            f"the scales of {title} weights have {len(first)} dtypes: {named}",
            next="convert them to the widest of these",
        )
    return next(iter(first))


def names_in(table: Table, field: str) -> list[str]:
    """The list of names in a field; [] where it is absent. Raises Unreadable for anything else."""
    found: object = table.get(field) or []
    entries = cast("list[object]", found) if isinstance(found, list) else [None]
    names = [entry for entry in entries if isinstance(entry, str)]
    if len(names) < len(entries):
        raise Unreadable(f"quantization_config.{field} is not a list of names")
    return names


def unknown_fields(table: Table, known: Set[str], where: str) -> list[str]:
    """The fields of a table that are neither known nor empty, each with its value."""
    return [
        f"{where}{name} = {value!r:.60}"
        for name, value in table.items()
        if name not in known and value not in (None, [], {})
    ]
