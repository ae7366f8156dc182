"""Scaled: the common part of formats with codes and scales, and compressed-tensors' description of them.

    w[o, i] = number[code[o, i]] * scale          a block, a row, a group of columns or the matrix shares it

fp8, fp8_scaled, mxfp8, mxfp4, nvfp4 and integers define their numbers and the layout of their scales. Here
bytes are counted, the scales' dtype is taken from the files, rows are split and shapes are compared.

Shapes: a matrix is [out, in]; parts may have leading dims.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, cast

from unfreeze.core.dtypes import FLOATS
from unfreeze.core.errors import CheckpointError, ConfigError
from unfreeze.quant.codec import Part, Table, Unreadable, one_scale_dtype, parts_nbytes, refuse_other_values

if TYPE_CHECKING:
    from torch import Tensor

MAX_E4M3 = 448.0  # the largest float8_e4m3fn
EXPONENTS = ("U8", "F8_E8M0")  # dtypes of a byte that holds only an exponent
BIAS = 127  # of such an exponent


class Kind(NamedTuple):
    """Properties of a format that do not depend on its parameters.

    title     its name in messages
    variants  as Codec.variants
    scales    the dtypes that its scales may have on disk
    compare   the next command of an error about shapes
    """

    title: str
    variants: str
    scales: tuple[str, ...] = FLOATS
    compare: str = "get the checkpoint again: a tensor is truncated or in another format"


class Scaled:
    """The base of these codecs, which are frozen dataclasses. quant/codec.py documents each method.

    A format adds `suffixes` (codes, scales, then any others), `parts`, `dequantize` and `quantize`.

    group        columns that share a scale; 0: a row or a block does, -1: the whole matrix does
    scale_dtype  dtype of the scales, in the files and in memory alike
    """

    kind: ClassVar[Kind]
    group: int = 0
    scale_dtype: str

    @property
    def name(self) -> str:
        raise NotImplementedError

    @property
    def suffixes(self) -> tuple[str, ...]:
        raise NotImplementedError

    def parts(self, out_features: int, in_features: int) -> dict[str, Part]:
        raise NotImplementedError

    @property
    def variants(self) -> str:
        return self.kind.variants

    def as_stored(self, dtypes: Mapping[str, str]) -> Self:
        """This codec with the scale_dtype of the files."""
        scales = self.scales_in(dtypes, self.suffixes[1])
        dtype = one_scale_dtype(scales, self.kind.title) if scales else self.scale_dtype
        return self if dtype == self.scale_dtype else cast(Self, replace(cast(Any, self), scale_dtype=dtype))

    def scales_in(self, dtypes: Mapping[str, str], suffix: str) -> dict[str, str]:
        """name -> dtype of the scales called `suffix`. Only those with codes beside them count."""
        codes, wanted = self.suffixes[0], self.parts(0, 0)[self.suffixes[0]][0]
        return {
            name: dtype
            for name, dtype in dtypes.items()
            if name.endswith(suffix)
            and dtype in self.kind.scales
            and dtypes.get(name.removesuffix(suffix) + codes) == wanted
        }

    def disk_extras(self, out_features: int, in_features: int) -> dict[str, tuple[int, ...]]:
        """None: all parts are kept."""
        return {}

    def shape(self, parts: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """[..., out, in]: that of the codes, or with groups that of the scales times the group."""
        if self.group <= 0:
            return parts[self.suffixes[0]]
        *leading, groups = parts[self.suffixes[1]]
        return (*leading, groups * self.group)

    def nbytes(self, out_features: int, in_features: int) -> int:
        """The bytes of all parts."""
        return parts_nbytes(self.parts(out_features, in_features).values())

    @property
    def rows_at(self) -> int:
        return 1

    def rows_each(self, suffix: str) -> int:
        """Number of rows of the matrix per row of this part; 0 for a part of the whole matrix."""
        return 1

    def rows(self, parts: Mapping[str, Tensor], first: int, last: int) -> dict[str, Tensor]:
        """The parts of rows first:last, split where `rows_at` allows."""
        each = {suffix: self.rows_each(suffix) for suffix in parts}
        return {
            suffix: part[first // each[suffix] : -(-last // each[suffix])] if each[suffix] else part
            for suffix, part in parts.items()
        }

    def compare(self, parts: Mapping[str, Tensor]) -> tuple[int, ...]:
        """Shape [..., out, in]. Raises CheckpointError if codes and scales do not belong together."""
        shapes = {suffix: tuple(parts[suffix].shape) for suffix in parts}
        *lead, out_features, in_features = self.shape(shapes)
        needed = self.parts(out_features, in_features)
        codes = self.suffixes[0]
        right = torch_name(needed[codes][0])
        if parts[codes].dtype != right or any(
            shapes.get(suffix) != (*lead, *shape) for suffix, (_, shape) in needed.items()
        ):
            others = ", ".join(f"{suffix} {list(shape)}" for suffix, shape in shapes.items())
            should = ", ".join(f"{suffix} {[*lead, *shape]}" for suffix, (_, shape) in needed.items())
            raise CheckpointError(
                f"a weight has {parts[codes].dtype} {others}; {self.needs} needs {right} {should}",
                next=self.kind.compare,
            )
        return (*lead, out_features, in_features)

    @property
    def needs(self) -> str:
        """The format in the words of an error about shapes."""
        return f"{self.name} in groups of {self.group}" if self.group > 0 else self.name

    def groups(self, in_features: int) -> int:
        """in / group. Raises ConfigError if this is not a whole number."""
        if in_features % self.group:
            raise ConfigError(
                f"{in_features} input columns do not divide into groups of {self.group}, as {self.kind.title}"
                " needs (quantization_config group_size)",
                next="compare group_size and the layer's width in config.json with the publisher's",
            )
        return in_features // self.group


def torch_name(dtype: str) -> Any:
    """The torch dtype of codes: "U8", "I8", "I32" or "F8_E4M3"."""
    import torch

    return {"U8": torch.uint8, "I8": torch.int8, "I32": torch.int32, "F8_E4M3": torch.float8_e4m3fn}[dtype]


def to_e4m3(scaled: Tensor) -> Tensor:
    """The nearest float8_e4m3fn, clamped to ±448."""
    import torch

    return scaled.clamp(-MAX_E4M3, MAX_E4M3).to(torch.float8_e4m3fn)


def nonzero(scale: Tensor) -> Tensor:
    """The scales, with the dtype's epsilon for 0. Source: compressed-tensors' calculate_qparams."""
    import torch

    return torch.where(scale == 0, torch.finfo(scale.dtype).eps, scale)


def exponents(absmax: Tensor, offset: int, most: int) -> Tensor:
    """float32 absmax -> uint8 exponents floor(log2(absmax)) - offset, in 0 to `most`.

    Where the mantissa is 1.75 or more, the next one. Source: compressed-tensors' generate_mx_scales.
    """
    import torch

    # add a quarter to the mantissa: the carry into the exponent is the rounding
    exponent = (absmax.view(torch.int32) + (1 << 21)) >> 23
    return (exponent - offset).clamp(0, most).to(torch.uint8)


def by_exponents(grouped: Tensor, scales: Tensor) -> Tensor:
    """float32 grouped [..., G, group] / 2 ** (scales - 127), for scales [..., G] of one byte each."""
    import torch

    return torch.ldexp(grouped, (BIAS - scales.view(torch.uint8).int()).unsqueeze(-1))


def as_exponents(scales: Tensor, dtype: str) -> Tensor:
    """uint8 exponents in their dtype on disk; the bytes are the same."""
    import torch

    return scales if dtype == "U8" else scales.view(torch.float8_e8m0fnu)


ONLY: dict[str, tuple[object, str]] = {
    "block_structure": ({}, "a scale for a block of rows and columns"),
    "zero_point": (False, "zero points"),
}
KNOWN = frozenset(ONLY) | frozenset(
    "num_bits type symmetric strategy group_size dynamic actorder observer observer_kwargs scale_dtype"
    " zp_dtype".split()
)
"""Fields of compressed-tensors that are read, or without effect on weights that are packed already."""


def refuse_weights(where: str, weights: Table, bits: int, strategies: Iterable[str], group: int = 0) -> str:
    """The strategy of the `weights` of one compressed-tensors group of symmetric floats.

    group: the only group size there is. A strategy "block" reads its block_structure itself.
    Raises Unreadable, naming it, for each variant that would be read wrongly.
    """
    only = {name: value for name, value in ONLY.items() if name != "block_structure" or group}
    refuse_other_values(weights, only, f"{where}.weights")
    if weights.get("type") != "float" or weights.get("num_bits") != bits:
        raise Unreadable(f"{where}: {weights.get('type')} weights with num_bits {weights.get('num_bits')}")
    if weights.get("symmetric", True) is not True or weights.get("dynamic"):
        raise Unreadable(f"{where}: asymmetric or dynamic weights")
    strategy, size = str(weights.get("strategy") or "tensor"), weights.get("group_size")
    if strategy not in strategies or (group and size != group):
        raise Unreadable(f'{where}: strategy "{strategy}" with group_size {size!r:.60}')
    if weights.get("actorder") not in (None, False, "weight", "static"):
        raise Unreadable(f"{where}: actorder {weights.get('actorder')!r:.60} (columns permuted by g_idx)")
    return strategy


def refuse_group(where: str, table: Table, group: int) -> None:
    """Raise Unreadable if modelopt's group_size differs from the format's."""
    if table.get("group_size", group) != group:
        raise Unreadable(f"{where}: group_size {table.get('group_size')!r:.60}")
