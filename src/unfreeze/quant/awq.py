"""AWQ in 4 bits, "gemm" version: community releases made with autoawq.

    w[o, i] = (code[i, o] - zero[i // group, o]) * scale[i // group, o]     one rounding, to the scales' dtype

The input dimension comes first. An int32 holds eight codes of neighbouring output columns, from its lowest
bits on in the order 0, 2, 4, 6, 1, 3, 5, 7; zero points likewise. At group 128 a weight takes 0.52 byte,
against 2 in bf16. Scales are float16, so the weight is rounded to that, and in a bf16 model again to bf16.

Source: autoawq's dequantize_gemm; bit-identical to it in tests/quant/test_awq.py (0.2.9, recorded).

Shapes: W [out, in]; qweight int32 [in, out / 8], qzeros int32 [G, out / 8], scales [G, out], G = in / group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from unfreeze.core.errors import CheckpointError, ConfigError
from unfreeze.quant.codec import Format, Part, Table, Unreadable, parts_nbytes, refuse_other_values
from unfreeze.quant.grids import (
    WHOLE_COLUMN,
    Grid,
    each,
    expand,
    fresh_parts,
    pack,
    plain_grid,
    read_group_size,
    scale_dtype,
)

if TYPE_CHECKING:
    from torch import Tensor

SUFFIXES = ("qweight", "qzeros", "scales")
BITS = 4
PER_WORD = 8  # codes in an int32
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The columns of a word, from its lowest bits on."""


@dataclass(frozen=True)
class Awq:
    """The codec. quant/codec.py documents each method.

    group_size   input columns that share a scale and a zero point; -1: all of them
    scale_dtype  dtype of the scales, in the files and in memory alike
    """

    group_size: int = 128
    scale_dtype: str = "F16"
    name: str = field(default="awq", init=False, repr=False)
    suffixes: tuple[str, ...] = field(default=SUFFIXES, init=False, repr=False)
    variants: str = field(
        default="another group_size or another version", init=False, repr=False, compare=False
    )

    def parts(self, out_features: int, in_features: int) -> dict[str, Part]:
        """qweight [in, out / 8], qzeros [G, out / 8], scales [G, out].

        Raises ConfigError if they cannot hold the matrix.
        """
        group = in_features if self.group_size == WHOLE_COLUMN else self.group_size
        if in_features % group or out_features % PER_WORD:
            raise ConfigError(
                f"a matrix of {out_features} x {in_features} does not divide into groups of {group} inputs"
                f" and words of {PER_WORD} outputs (quantization_config group_size)",
                next="compare group_size and the layer's width in config.json with the publisher's",
            )
        groups, words = in_features // group, out_features // PER_WORD
        return {
            "qweight": ("I32", (in_features, words)),
            "qzeros": ("I32", (groups, words)),
            "scales": (self.scale_dtype, (groups, out_features)),
        }

    def as_stored(self, dtypes: Mapping[str, str]) -> Awq:
        """This codec with the scale_dtype of the files."""
        dtype = scale_dtype(dtypes, "scales", "qweight")
        return replace(self, scale_dtype=dtype) if dtype else self

    def disk_extras(self, out_features: int, in_features: int) -> dict[str, tuple[int, ...]]:
        """None: all parts are kept."""
        return {}

    def shape(self, parts: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """[..., out, in]: the widths of scales and of qweight's first dimension."""
        *leading, in_features, _ = parts["qweight"]
        return (*leading, parts["scales"][-1], in_features)

    def nbytes(self, out_features: int, in_features: int) -> int:
        """out * (in / 2 + G * (1 / 2 + scale_dtype's size))."""
        return parts_nbytes(self.parts(out_features, in_features).values())

    def dequantize(self, parts: Mapping[str, Tensor]) -> Tensor:
        """w = (code - zero) * scale -> [..., out, in] in the dtype of the scales, one rounding.

        The difference is a whole number from -15 to 15, exact in any of them. Raises CheckpointError if the
        parts do not belong together.
        """
        import torch

        shapes = {suffix: tuple(parts[suffix].shape) for suffix in SUFFIXES}
        out_features, in_features = self.shape(shapes)[-2:]
        needed = {s: shape for s, (_, shape) in self.parts(out_features, in_features).items()}
        if {s: shape[-2:] for s, shape in shapes.items()} != needed or parts["qweight"].dtype != torch.int32:
            raise CheckpointError(
                f"qweight is {parts['qweight'].dtype} {list(shapes['qweight'])} with qzeros"
                f" {list(shapes['qzeros'])} and scales {list(shapes['scales'])}; groups of {self.group_size}"
                f" need torch.int32 and {', '.join(str(list(shape)) for shape in needed.values())}",
                next="compare quantization_config.group_size with the publisher's",
            )
        return each(self._matrix, parts, "qweight")

    @property
    def rows_at(self) -> int:
        return PER_WORD

    def rows(self, parts: Mapping[str, Tensor], first: int, last: int) -> dict[str, Tensor]:
        words = slice(first // PER_WORD, last // PER_WORD)
        packed = {suffix: parts[suffix][:, words] for suffix in ("qweight", "qzeros")}
        return {**packed, "scales": parts["scales"][:, first:last]}

    def _matrix(self, parts: Mapping[str, Tensor]) -> Tensor:
        words_IO = parts["qweight"]

        def codes(first: int, last: int) -> Tensor:
            words = words_IO[:, first // PER_WORD : -(-last // PER_WORD)]
            return _columns(words)[:, : last - first].t().contiguous()

        zeros_GO, scales_GO = _columns(parts["qzeros"]), parts["scales"]
        return expand(codes, zeros_GO.t(), scales_GO.t(), None)

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        """Scales and zero points from a group's min and max weight, and the nearest codes: quant/grids.py.

        Raises CheckpointError on a weight that is not finite, ConfigError if the format cannot hold it.
        """
        self.parts(*weight.shape[-2:])

        def grid(matrix: Tensor) -> Grid:
            return plain_grid(BITS, self.scale_dtype, matrix, self.group_size)

        return fresh_parts(self, weight, grid)

    def grid(self, parts: Mapping[str, Tensor]) -> Grid:
        """Zero points and scales of one matrix."""
        import torch

        scales_GO, columns = parts["scales"], len(parts["qweight"])
        groups_I = torch.arange(columns, device=scales_GO.device) // (columns // len(scales_GO))
        return Grid(BITS, _columns(parts["qzeros"]).t(), scales_GO.t(), groups_I)

    def written(self, codes_OI: Tensor, grid: Grid) -> dict[str, Tensor]:
        """qweight, qzeros and scales of one matrix."""
        return {
            "qweight": _words(codes_OI.t()),
            "qzeros": _words(grid.zeros_OG.t()),
            "scales": grid.scales_OG.t().contiguous(),
        }


def _words(numbers: Tensor) -> Tensor:
    """Whole numbers [..., 8 n] in the order of the columns -> int32 [..., n]; `_columns` is the inverse."""
    by_word = numbers.reshape(*numbers.shape[:-1], -1, PER_WORD)
    return pack(by_word[..., ORDER].flatten(-2), BITS)


def _columns(words: Tensor) -> Tensor:
    """int32 [..., n] -> uint8 [..., 8 n] in column order: 0, 2, 4, 6 are a word's lower half.

    Each half is spread over every second byte of 8, by shifts that vector units do.
    """
    import torch

    halves = [words.long() >> shift & 0xFFFF for shift in (0, 16)]
    for distance, bits in ((24, 0x000000FF_000000FF), (12, 0x000F000F_000F000F)):
        halves = [(half | half << distance) & bits for half in halves]
    return (halves[0] | halves[1] << 8).view(torch.uint8)


ONLY: dict[str, tuple[object, str]] = {
    "config_groups": ({}, "groups of modules in other formats"),
    "dynamic": ({}, "modules with bits or groups of their own"),
}
KNOWN = frozenset(
    """bits w_bit group_size q_group_size zero_point version format checkpoint_format backend desc_act
    sym lm_head modules_to_not_convert pack_dtype meta method damp_percent act_group_aware
    true_sequential block_name_to_quantize module_name_preceding_first_block
    modules_in_block_to_quantize model_seqlen batch_size pad_token_id dataset tokenizer max_input_length
    cache_block_outputs do_fuse fuse_max_seq_len modules_to_fuse exllama_config
    provider autoround_version""".split()
)
"""Fields that are read, or have no effect on packed weights."""


def read(where: str, table: Table) -> Awq:
    """The codec of a quantization_config with quant_method "awq".

    Raises Unreadable naming each variant that would be read wrongly: other bits, other layouts than "gemm".
    zero_point false (AutoRound's, for symmetric codes) is accepted: the files have qzeros, or an error says
    that they are missing.
    """
    refuse_other_values(table, ONLY, where)
    bits = table.get("bits", table.get("w_bit", BITS))
    if bits != BITS:
        raise Unreadable(f"{where}: AWQ with {bits} bits")
    layout = table.get("version") or table.get("format") or table.get("checkpoint_format") or "gemm"
    if str(layout).lower() != "gemm":
        raise Unreadable(
            f'{where}: AWQ version "{layout}" (codes in another order; autoawq writes "gemm" too)'
        )
    if "group_size" not in table and "q_group_size" in table:
        table = {**table, "group_size": table["q_group_size"]}
    return Awq(read_group_size(table, where))


FORMAT = Format(
    key="awq", title="AWQ in 4 bits (gemm)", read=read, known=KNOWN | ONLY.keys(), suffixes=SUFFIXES
)
