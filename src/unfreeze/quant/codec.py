"""Codec: the interface of a quantized weight format; Packed: one quantized weight in memory.

A format is one file beside this one. It defines the tensors on disk that make one weight, their layout in
memory, the quantization_config that declares it, and the conversions to floating point and back. Only the
conversions need torch, which is imported there: a config is refused, and a checkpoint's bytes are counted,
without it.

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
    from typing_extensions import TypeIs

Part = tuple[str, tuple[int, ...]]
"""(dtype, shape) of a tensor, e.g. ("BF16", (4, 2))."""
Table = Mapping[str, object]
"""A quantization_config, or a table inside it, as JSON."""


class Codec(Protocol):
    """One quantized format with its parameters, such as the group size. Implemented by frozen dataclasses."""

    @property
    def name(self) -> str:
        """The format's published name, e.g. "int4-pack-quantized"."""
        ...

    @property
    def suffixes(self) -> tuple[str, ...]:
        """The last name parts of the tensors on disk that make one weight, codes first."""
        ...

    @property
    def variants(self) -> str:
        """The likely causes of parts with an unexpected shape, for messages: "another group_size …"."""
        ...

    def parts(self, out_features: int, in_features: int) -> dict[str, Part]:
        """suffix -> (dtype, shape) of the parts kept in memory for one [out, in] matrix.

        Raises ConfigError if the format cannot hold it.
        """
        ...

    def as_stored(self, dtypes: Mapping[str, str]) -> Codec:
        """The same format with its scales held in the dtype of the files.

        dtypes: name on disk -> dtype. Raises CheckpointError if scales have several dtypes: a stack of
        experts can hold only one.
        """
        ...

    def disk_extras(self, out_features: int, in_features: int) -> dict[str, tuple[int, ...]]:
        """suffix -> integers (int32) that are on disk beside `parts`.

        They follow from the shape, so they are not kept in memory.
        """
        ...

    def shape(self, parts: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """Shape [..., out, in] of the weight whose parts have these shapes."""
        ...

    def dequantize(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The weight [..., out, in] in the dtype of its scales. Expands all the parts passed in."""
        ...

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        """suffix -> part for a floating point weight [..., out, in]; keys as in `parts`."""
        ...

    def nbytes(self, out_features: int, in_features: int) -> int:
        """Bytes of the parts of one [out, in] matrix in memory."""
        ...


class Texted(Protocol):
    """A codec with a text beside each weight on disk, and its codes as a column of bytes [n, 1].

    A few numbers of the text are kept in memory, as the part in `parts`.
    """

    @property
    def text(self) -> str:
        """The suffix of that part."""
        ...

    def columns(self, width: int) -> int:
        """The input columns of a matrix whose codes are `width` wide in memory."""
        ...

    def with_text(self, raw: bytes, name: str) -> Codec:
        """The same format with the settings of the text `name`, for all weights. Raises CheckpointError."""
        ...

    def parse(self, raw: bytes, name: str, out_features: int, in_features: int) -> list[float]:
        """The numbers to keep of the text `name`.

        Raises CheckpointError if it contradicts this codec on an [out, in] matrix.
        """
        ...

    def stored_parts(self, out_features: int, in_features: int) -> dict[str, Part]:
        """suffix -> (dtype, shape) on disk, where codes are a column and the text is bytes."""
        ...

    def stored_tensors(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """suffix -> tensor on disk of one matrix's parts: the inverse of `parse`."""
        ...


def texted(codec: object) -> TypeIs[Texted]:
    """True if the codec is a Texted. Python 3.11 takes 25 us for isinstance of a Protocol."""
    return hasattr(codec, "with_text")


@runtime_checkable
class ByRows(Protocol):
    """A codec whose matrix can be expanded some rows at a time, so that temporaries stay small."""

    @property
    def rows_at(self) -> int:
        """Rows may be split at multiples of this number."""
        ...

    def rows(self, parts: Mapping[str, Tensor], first: int, last: int) -> dict[str, Tensor]:
        """The parts of rows first:last of one matrix; views."""
        ...


class Format(NamedTuple):
    """The rules to recognise a format; a line of FORMATS (quant/formats.py).

    key       the quant_method; for compressed-tensors followed by a space and the `format` of its groups
    title     the format in words, for a refusal's list of readable formats
    read      (location of the table, the table) -> the codec. The table is the quantization_config, or the
              `weights` of one compressed-tensors group. Raises Unreadable for anything it would read wrongly
    known     fields of that table that are read, or have no effect on packed weights
    suffixes  last parts of tensor names that only this format has: no other format, and no dense weight
    ignored   the field that lists the modules that stay unquantized
    """

    key: str
    title: str
    read: Callable[[str, Table], Codec]
    known: frozenset[str]
    suffixes: tuple[str, ...]
    ignored: str = "modules_to_not_convert"


class Unreadable(Exception):
    """The unreadable part of a quantization_config. formats.recognise adds the list of readable formats."""


def refuse_other_values(table: Table, only: Mapping[str, tuple[object, str]], where: str) -> None:
    """Raise Unreadable for a field whose value is not the implemented one.

    only: field -> (the implemented value, the meaning of another value). null, an empty table and a table of
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
    """The value if it is a JSON object, else None."""
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
        """Number of weights, not of the words that hold them."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the parts in memory."""
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
        """One expert, or some, by the first leading dim: views, no copies."""
        return Packed(self.codec, {suffix: part[index] for suffix, part in self.parts.items()})


@lru_cache(maxsize=64)
def kept_suffixes(codec: Codec) -> tuple[str, ...]:
    """The suffixes of the parts that a model holds in memory: all except the codec's disk_extras."""
    extras = codec.disk_extras(0, 0)
    return tuple(suffix for suffix in codec.suffixes if suffix not in extras)


def parts_nbytes(parts: Iterable[Part]) -> int:
    """Σ prod(shape) * itemsize."""
    return sum(ITEMSIZE[dtype] * prod(shape) for dtype, shape in parts)


def finite(weight: Tensor) -> None:
    """Raise CheckpointError for a weight with NaN or infinity, which no code represents."""
    if not bool(weight.isfinite().all()):
        bad = int((~weight.isfinite()).sum())
        raise CheckpointError(
            f"{bad} of {weight.numel()} weights are NaN or infinite and cannot be quantized"
        )


def one_scale_dtype(dtypes: Mapping[str, str], title: str) -> str:
    """The common dtype of these scales. name -> dtype, at least one.

    Raises CheckpointError if they have several: a stack of experts can hold only one.
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
    """The list of names in a field; [] if it is absent. Raises Unreadable for anything else."""
    value: object = table.get(field) or []
    entries = cast("list[object]", value) if isinstance(value, list) else [None]
    names = [entry for entry in entries if isinstance(entry, str)]
    if len(names) < len(entries):
        raise Unreadable(f"quantization_config.{field} is not a list of names")
    return names


def unknown_fields(table: Table, known: Set[str], where: str) -> list[str]:
    """The fields of a table, with values, that are neither known nor empty."""
    return [
        f"{where}{name} = {value!r:.60}"
        for name, value in table.items()
        if name not in known and value not in (None, [], {})
    ]
