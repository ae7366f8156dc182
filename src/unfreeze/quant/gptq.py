"""GPTQ in 2, 4 or 8 bits, with and without act-order: community releases made with gptqmodel or AutoGPTQ.

    w[o, i] = (code[i, o] - zero[g_idx[i], o]) * scale[g_idx[i], o]     one rounding, to the scales' dtype

The input dimension comes first. An int32 holds 32 / bits codes of neighbouring input columns, lowest bits
first; zero points likewise, of neighbouring output columns. g_idx names the group of each input column: i //
group, or any with act-order (desc_act). Files without it (AutoRound's) mean i // group. At 4 bits and group
128 a weight takes 0.52 byte, against 2 in bf16.

checkpoint_format "gptq" stores each zero point minus one. The ones are subtracted from a whole word when
writing, and added to a whole word when reading: if a zero point was 0, it borrowed from its neighbour, which
gets it back. "gptq_v2" stores them unchanged. Scales are float16, so the weight is rounded to that, and in a
bf16 model again to bf16.

Source: gptqmodel's TorchLinear; bit-identical to it in tests/quant/test_gptq.py (7.7.0, recorded).

Shapes: W [out, in]; qweight int32 [in bits / 32, out], qzeros int32 [G, out bits / 32], scales [G, out],
g_idx int32 [in].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

from unfreeze.core.errors import CheckpointError, ConfigError
from unfreeze.quant.codec import Format, Part, Table, Unreadable, as_table, parts_nbytes, refuse_other_values
from unfreeze.quant.grids import (
    WHOLE_COLUMN,
    WORD,
    Grid,
    each,
    expand,
    fresh_parts,
    pack,
    plain_grid,
    read_group_size,
    scale_dtype,
    unpack,
)
from unfreeze.quant.scheme import Modules
from unfreeze.untrusted.pattern import pattern

if TYPE_CHECKING:
    from torch import Tensor

SUFFIXES = ("qweight", "qzeros", "scales", "g_idx")
BITS: tuple[object, ...] = (2, 4, 8)
ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}
"""bits -> a word in which each number is 1."""


@dataclass(frozen=True)
class Gptq:
    """The codec. quant/codec.py documents each method.

    bits         of a code: 2, 4 or 8
    group_size   input columns that share a scale and a zero point; -1: all of them
    minus_one    True if zero points are stored minus one (checkpoint_format "gptq")
    scale_dtype  dtype of the scales, in the files and in memory alike
    indexed      True if there is a g_idx
    act_order    True if config.json sets desc_act: then an absent g_idx is an error
    """

    bits: int = 4
    group_size: int = 128
    minus_one: bool = True
    scale_dtype: str = "F16"
    indexed: bool = True
    act_order: bool = field(default=False, repr=False, compare=False)
    name: str = field(default="gptq", init=False, repr=False)
    variants: str = field(default="another group_size or other bits", init=False, repr=False, compare=False)

    @property
    def suffixes(self) -> tuple[str, ...]:
        return SUFFIXES if self.indexed else SUFFIXES[:-1]

    def parts(self, out_features: int, in_features: int) -> dict[str, Part]:
        """qweight [in bits / 32, out], qzeros [G, out bits / 32], scales [G, out], g_idx [in]; rounded up.

        Raises ConfigError if `in` does not fill whole words and there is no g_idx, which would tell the
        width.
        """
        groups = 1 if self.group_size == WHOLE_COLUMN else -(-in_features // self.group_size)
        rows, words = (-(-size * self.bits // WORD) for size in (in_features, out_features))
        parts: dict[str, Part] = {
            "qweight": ("I32", (rows, out_features)),
            "qzeros": ("I32", (groups, words)),
            "scales": (self.scale_dtype, (groups, out_features)),
        }
        if self.indexed:
            return {**parts, "g_idx": ("I32", (in_features,))}
        if in_features * self.bits % WORD:
            raise ConfigError(
                f"{in_features} inputs at {self.bits} bits do not fill whole words of {WORD} bits, and there"
                " is no g_idx that tells how many they are",
                next="compare bits and the layer's width in config.json with the publisher's",
            )
        return parts

    def as_stored(self, dtypes: Mapping[str, str]) -> Gptq:
        """This codec with the scale_dtype of the files, and with a g_idx if they have one."""
        indexed = self.act_order or any(name.endswith(".g_idx") for name in dtypes)
        dtype = scale_dtype(dtypes, "scales", "qweight")
        return replace(self, scale_dtype=dtype, indexed=indexed) if dtype else self

    def disk_extras(self, out_features: int, in_features: int) -> dict[str, tuple[int, ...]]:
        """None: all parts are kept. g_idx is 4 bytes for each input column, 0.1 % of the codes."""
        return {}

    def shape(self, parts: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """[..., out, in]: the width of scales, and the length of g_idx or the number of codes in qweight."""
        *leading, _, out_features = parts["scales"]
        columns = parts["g_idx"][-1] if self.indexed else parts["qweight"][-2] * WORD // self.bits
        return (*leading, out_features, columns)

    def nbytes(self, out_features: int, in_features: int) -> int:
        """out * (in * bits / 8 + G * (bits / 8 + scale_dtype's size)) + 4 in with a g_idx."""
        return parts_nbytes(self.parts(out_features, in_features).values())

    def dequantize(self, parts: Mapping[str, Tensor]) -> Tensor:
        """w = (code - zero) * scale -> [..., out, in] in the dtype of the scales, one rounding.

        The difference is a whole number from -255 to 255, exact in any of them. Raises CheckpointError if the
        parts do not belong together.
        """
        scales = parts["scales"]
        shapes = {suffix: tuple(parts[suffix].shape) for suffix in self.suffixes}
        out_features, in_features = self.shape(shapes)[-2:]
        needed = {s: shape for s, (_, shape) in self.parts(out_features, in_features).items()}
        if any(shapes[s][-len(shape) :] != shape for s, shape in needed.items()) or not _is_int32(parts):
            raise CheckpointError(
                f"qweight is {parts['qweight'].dtype} {list(shapes['qweight'])} with"
                f" {', '.join(f'{s} {list(shape)}' for s, shape in shapes.items() if s != 'qweight')};"
                f" {self.bits} bits in groups of {self.group_size} need torch.int32 and"
                f" {', '.join(str(list(shape)) for shape in needed.values())}",
                next="compare bits and group_size of quantization_config with the publisher's",
            )
        # on CUDA the lookup checks bounds itself, and checking here would make the host wait
        g_idx = parts.get("g_idx")
        if (
            g_idx is not None
            and not g_idx.is_cuda
            and not bool(((g_idx >= 0) & (g_idx < scales.shape[-2])).all())
        ):
            raise CheckpointError(
                f"g_idx names groups {int(g_idx.min())} to {int(g_idx.max())}; there are {scales.shape[-2]}",
                next="get the checkpoint again from its publisher",
            )
        return each(self._matrix, parts, "qweight")

    @property
    def rows_at(self) -> int:
        return WORD // self.bits

    def rows(self, parts: Mapping[str, Tensor], first: int, last: int) -> dict[str, Tensor]:
        words = slice(first // self.rows_at, -(-last // self.rows_at))
        columns = {suffix: parts[suffix][:, first:last] for suffix in ("qweight", "scales")}
        order = {"g_idx": parts["g_idx"]} if self.indexed else {}
        return {**columns, "qzeros": parts["qzeros"][:, words], **order}

    def _matrix(self, parts: Mapping[str, Tensor]) -> Tensor:
        import torch

        words_IO, scales_GO, g_idx = parts["qweight"], parts["scales"], parts.get("g_idx")
        columns, groups = self._width(parts), len(scales_GO)

        def codes(first: int, last: int) -> Tensor:
            # transpose words, not codes: an eighth of the numbers
            return unpack(words_IO[:, first:last].t().contiguous(), self.bits)[:, :columns]

        size = columns if self.group_size == WHOLE_COLUMN else self.group_size
        ordered = torch.arange(columns, device=words_IO.device) // size
        groups_I = ordered if g_idx is None else g_idx.long()
        even = columns == groups * size
        # on CUDA the comparison would make the host wait
        plain = even and (g_idx is None or (not g_idx.is_cuda and torch.equal(groups_I, ordered)))
        return expand(codes, self._zeros(parts), scales_GO.t(), None if plain else groups_I)

    def _width(self, parts: Mapping[str, Tensor]) -> int:
        """Input columns of one matrix."""
        return len(parts["g_idx"]) if self.indexed else len(parts["qweight"]) * WORD // self.bits

    def _zeros(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Zero points of one matrix, uint8 [out, G]."""
        words = parts["qzeros"] + ONES[self.bits] if self.minus_one else parts["qzeros"]
        return unpack(words, self.bits)[:, : parts["scales"].shape[1]].t()

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        """Scales and zero points from a group's min and max weight, and the nearest codes: quant/grids.py.

        Groups are consecutive: there are no activations to order columns by. quant/kept.py keeps a base's
        g_idx. Raises CheckpointError on a weight that is not finite, ConfigError if the format cannot hold
        it.
        """
        self.parts(*weight.shape[-2:])

        def grid(matrix: Tensor) -> Grid:
            return plain_grid(self.bits, self.scale_dtype, matrix, self.group_size)

        return fresh_parts(self, weight, grid)

    def grid(self, parts: Mapping[str, Tensor]) -> Grid:
        """Zero points, scales and the group of each column of one matrix."""
        import torch

        columns, scales_GO = self._width(parts), parts["scales"]
        size = columns if self.group_size == WHOLE_COLUMN else self.group_size
        ordered = torch.arange(columns, device=scales_GO.device) // size
        groups_I = parts["g_idx"].long() if self.indexed else ordered
        return Grid(self.bits, self._zeros(parts), scales_GO.t(), groups_I)

    def written(self, codes_OI: Tensor, grid: Grid) -> dict[str, Tensor]:
        """qweight, qzeros, scales and g_idx of one matrix."""
        import torch

        zeros = pack(grid.zeros_OG.t(), self.bits)
        order = {"g_idx": grid.groups_I.to(torch.int32)} if self.indexed else {}
        return {
            "qweight": pack(codes_OI, self.bits).t().contiguous(),
            "qzeros": zeros - ONES[self.bits] if self.minus_one else zeros,
            "scales": grid.scales_OG.t().contiguous(),
            **order,
        }


def _is_int32(parts: Mapping[str, Tensor]) -> bool:
    import torch

    return all(part.dtype == torch.int32 for suffix, part in parts.items() if suffix != "scales")


ONLY: dict[str, tuple[object, str]] = {
    "config_groups": ({}, "groups of modules in other formats"),
    "rotation": (None, "weights are rotated"),
    "adapter": ({}, "an adapter belongs to the weights"),
}
KNOWN = frozenset(
    """bits group_size desc_act sym lm_head checkpoint_format format pack_dtype meta method dynamic
    damp_percent damp_auto_increment static_groups true_sequential act_group_aware mse
    model_name_or_path model_file_base_name model_seqlen block_name_to_quantize
    module_name_preceding_first_block modules_in_block_to_quantize backend batch_size pad_token_id
    dataset tokenizer max_input_length cache_block_outputs use_exllama use_cuda_fp16 disable_exllama
    exllama_config is_marlin_format v2 quantizer modules_to_not_convert provider autoround_version""".split()
)
"""Fields that are read, or have no effect on packed weights."""


def read(where: str, table: Table) -> Gptq:
    """The codec of a quantization_config with quant_method "gptq".

    Raises Unreadable naming each variant that would be read wrongly: other bits, other layouts, modules with
    their own bits or groups (`dynamic`; the files show which modules it leaves out).
    """
    refuse_other_values(table, ONLY, where)
    bits = table.get("bits")
    if not isinstance(bits, int) or bits not in BITS:  # 4.0 is in BITS
        raise Unreadable(f"{where}: GPTQ with {bits} bits")
    layout = str(table.get("checkpoint_format") or table.get("format") or "gptq").lower()
    if layout not in ("gptq", "gptq_v2") or table.get("is_marlin_format"):
        raise Unreadable(f'{where}: GPTQ checkpoint_format "{layout}" (codes in another order)')
    if table.get("pack_dtype") not in (None, "int32", "torch.int32"):
        raise Unreadable(f"{where}: pack_dtype {table.get('pack_dtype')}")
    # "-:" leaves modules out; an empty rule (Qwen's), or one that repeats the table, changes nothing
    own = [
        name
        for name, rule in (as_table(table.get("dynamic")) or {}).items()
        if not name.startswith("-:")
        and any(table.get(field) != value for field, value in (as_table(rule) or {}).items())
    ]
    if own:
        raise Unreadable(f"{where}.dynamic {own[0]!r:.60} (modules with bits or groups of their own)")
    return Gptq(
        bits, read_group_size(table, where), layout == "gptq", act_order=table.get("desc_act") is True
    )


def modules(table: Table, where: str) -> tuple[Modules, tuple[str, ...]]:
    """(the quantized modules, patterns of the unquantized ones) of a quantization_config.

    modules_in_block_to_quantize: names within a layer, in lists of those that were quantized together.
    dynamic: a pattern after "-:" leaves out the names whose start it matches.
    Source: gptqmodel's QuantizeConfig. Raises ConfigError for a pattern that could match forever.
    """
    names: set[str] = set()
    blocks: object = table.get("modules_in_block_to_quantize")
    for part in cast("list[object]", blocks) if isinstance(blocks, list) else []:
        together = cast("list[object]", part) if isinstance(part, list) else [part]
        names |= {name for name in together if isinstance(name, str)}
    left_out = [name[2:] for name in as_table(table.get("dynamic")) or {} if name.startswith("-:")]
    for entry in left_out:
        pattern(entry, f"config.json: {where}.dynamic", ConfigError)
    return Modules(within=frozenset(names), linear=not names), tuple(left_out)


FORMAT = Format(
    key="gptq", title="GPTQ in 2, 4 or 8 bits", read=read, known=KNOWN | ONLY.keys(), suffixes=SUFFIXES
)
