"""INT4 "pack-quantized", symmetric, one scale per group of input columns: the format of Kimi-K2-Thinking's experts.

    w[o, i] = (nibble[o, i] - 8) * scale[o, i // group]            one rounding, to the dtype of the scales

Eight nibbles lie in an int32, lowest bits first, along the input dim; a nibble is its code + 8 (offset binary, not two's complement).
0.5625 byte per weight at group 32, against 2 in bf16.
Source: compressed-tensors "pack-quantized"; equal to it bit for bit in tests/quant/test_int4.py.

Shapes: out, in = matrix; G = in / group scales per row. Bytes are read as little-endian, like every machine torch runs on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from unfreeze.core.errors import CheckpointError, ConfigError
from unfreeze.quant.codec import Codec, parts_nbytes
from unfreeze.untrusted.pattern import pattern

PER_WORD = 8  # nibbles in an int32
OFFSET = 8  # stored nibble = code + 8
MAX_GROUP = 2**20  # columns that share a scale; more than the widest layer has
GRID_MAX = 7  # Kimi's grid uses codes -7..7: symmetric, so that scale = absmax / 7

# The largest scale whose 7-fold still rounds to a finite bf16: mantissa 145: 146 * 7 = 1022 would round up to 1024 * 2**118, infinity.
MAX_SCALE = 145.0 * 2.0**118


def pack_int4(codes: Tensor) -> Tensor:
    """codes int8 [..., in] in -8..7 -> int32 [..., ceil(in / 8)]; element i at bits 4(i mod 8), unused bits of the last word are 0.

    Source: compressed-tensors pack_to_int32 (num_bits 4)."""
    nibbles = (codes + OFFSET).view(torch.uint8)
    missing = -nibbles.shape[-1] % PER_WORD
    if missing:
        nibbles = torch.nn.functional.pad(nibbles, (0, missing))
    return (nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)).contiguous().view(torch.int32)


def unpack_int4(packed: Tensor, in_features: int) -> Tensor:
    """packed int32 [..., ceil(in / 8)] -> codes int8 [..., in] in -8..7. Source: compressed-tensors unpack_from_int32 (num_bits 4)."""
    two_nibbles = packed.contiguous().view(torch.uint8)
    nibbles = torch.stack((two_nibbles & 0xF, two_nibbles >> 4), dim=-1).flatten(-2)
    return nibbles.view(torch.int8)[..., :in_features] - OFFSET


@dataclass(frozen=True)
class Int4:
    """The codec; `group_size` columns share one scale. See quant/codec.py for what each method promises.

    `scale_dtype` is what the file holds its scales in (bf16 in Kimi's releases; other writers have fp16 or fp32). They are
    kept so in memory: a scale rounded to another dtype moves every weight of its group. What is quantized here has bf16.
    """

    group_size: int = 32
    scale_dtype: torch.dtype = torch.bfloat16
    name: str = field(default="int4-pack-quantized", init=False, repr=False)
    suffixes: tuple[str, ...] = field(default=("weight_packed", "weight_scale", "weight_shape"), init=False, repr=False)

    def __post_init__(self) -> None:
        if self.group_size < 1:
            raise ConfigError(f"group_size is {self.group_size}; it must be at least 1")

    def parts(self, out_features: int, in_features: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """weight_packed int32 [out, ceil(in/8)], weight_scale [out, in/group]. ConfigError if in is not a multiple of group_size."""
        if in_features % self.group_size:
            raise ConfigError(
                f"{in_features} input columns do not divide into groups of {self.group_size} (quantization_config group_size)",
                next="compare group_size and the layer's width in config.json with the checkpoint's publisher",
            )
        return {
            "weight_packed": (torch.int32, (out_features, -(-in_features // PER_WORD))),
            "weight_scale": (self.scale_dtype, (out_features, in_features // self.group_size)),
        }

    def scaled_in(self, dtype: torch.dtype) -> Int4:
        return replace(self, scale_dtype=dtype)

    def disk_extras(self, out_features: int, in_features: int) -> dict[str, Tensor]:
        """weight_shape int32 [2] = [out, in]."""
        return {"weight_shape": torch.tensor([out_features, in_features], dtype=torch.int32)}

    def shape(self, parts: Mapping[str, Tensor]) -> tuple[int, ...]:
        """[..., out, in] with in = G * group_size. (The packed width alone does not tell how full its last
        word is.)"""
        *leading, groups = parts["weight_scale"].shape
        return (*leading, groups * self.group_size)

    def nbytes(self, out_features: int, in_features: int) -> int:
        """out * (4 * ceil(in/8) + scale_dtype's size * in/group)."""
        return parts_nbytes(self.parts(out_features, in_features))

    def dequantize(self, parts: Mapping[str, Tensor]) -> Tensor:
        """w = (nibble - 8) * scale -> [..., out, in] in the dtype of the scales, one rounding.

        Codes are exact in bf16, and a bf16 product is formed in float32 and rounded once. Raises CheckpointError where packed width
        and number of scales disagree (a truncated tensor, another group size or another nibble format).
        """
        packed, scale = parts["weight_packed"], parts["weight_scale"]
        in_features = scale.shape[-1] * self.group_size
        if packed.dtype != torch.int32 or packed.shape != (*scale.shape[:-1], -(-in_features // PER_WORD)):
            raise CheckpointError(
                f"weight_packed is {packed.dtype} {list(packed.shape)}; {scale.shape[-1]} scales of group {self.group_size} need"
                f" torch.int32 {[*scale.shape[:-1], -(-in_features // PER_WORD)]}",
                next="compare quantization_config.group_size with the publisher's: the tensor is truncated or in another format",
            )
        codes = unpack_int4(packed, in_features).to(scale.dtype).unflatten(-1, (-1, self.group_size))
        return (codes * scale.unsqueeze(-1)).flatten(-2)

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        """Kimi's grid: scale = bf16(absmax / 7) per group, code = round(w / scale) in -7..7; an all-zero group gets scale 0 and stays zero.

        weight [..., out, in] bf16 or float32 -> weight_packed, weight_scale. For a given scale the codes equal compressed-tensors'
        (it divides in the dtype of the weight, and so does this). quantize(dequantize(p)) == p, bit for bit, for every p this quantizer
        made, and for any group whose codes lie in -7..7 and reach ±7 whatever its bf16 scale (tested for all of them, subnormals and
        the largest included). See `_exact_neighbour` for where plain absmax / 7 would break that.
        Raises CheckpointError on a weight that is not finite.
        """
        self.parts(weight.shape[-2], weight.shape[-1])
        grouped = weight.detach().unflatten(-1, (-1, self.group_size))
        absmax = grouped.abs().amax(dim=-1).float()
        if not bool(absmax.isfinite().all()):
            bad = int((~weight.isfinite()).sum())
            raise CheckpointError(f"{bad} of {weight.numel()} weights are NaN or infinite and cannot be quantized")
        scale = (absmax / GRID_MAX).clamp(max=MAX_SCALE).to(torch.bfloat16)
        codes = _codes(grouped, scale)
        _exact_neighbour(grouped, absmax, scale, codes)
        return {"weight_packed": pack_int4(codes.flatten(-2)), "weight_scale": scale}


def _codes(grouped: Tensor, scale: Tensor) -> Tensor:
    """round(w / scale), half to even, in -7..7; 0 where the scale is 0. grouped [..., G, group], scale [..., G] -> int8 [..., G, group]."""
    divisor = torch.where(scale == 0, 1, scale).unsqueeze(-1)
    codes = (grouped / divisor).round_().clamp_(-GRID_MAX, GRID_MAX)
    return codes.masked_fill_((scale == 0).unsqueeze(-1), 0).to(torch.int8)


def _exact_neighbour(grouped: Tensor, absmax: Tensor, scale: Tensor, codes: Tensor) -> None:
    """Where absmax / 7 misses a group but the bf16 scale next to it reproduces it exactly, take that one (in place).

    Why: absmax of a dequantized group is bf16(7 s). With s = m * 2^e, 128 <= m <= 255, the way back errs by |bf16(7 m) - 7 m| / 7:
    at most 2/7 of a step for m <= 146 and 3/7 above, both under 1/2, except where 7 m lies half-way between two bf16 numbers
    (m >= 148, m = 4 mod 8): 4/7, and s would come back one step off. Scales made as bf16(absmax / 7) from bf16 weights never
    take those values (they would need |m - 8 n / 7| = 4/7 for an integer n); scales from float32 weights or other writers do.
    Among subnormal numbers (below 2^-126) steps are so coarse that absmax may be 6 s: 25, 26, 32 and 39 steps are such.
    """
    alternatives = [(scale.view(torch.int16) + step).view(torch.bfloat16) for step in (-1, 1)]
    for alternative in alternatives:
        code = (absmax / alternative.float()).round().clamp(max=GRID_MAX)  # 7, except among subnormal numbers
        candidates = (((code * alternative.float()).to(torch.bfloat16) == absmax) & (scale > 0)).nonzero(as_tuple=True)
        if candidates[0].numel() == 0:
            continue
        weights, there = grouped[candidates], alternative[candidates]
        codes_there = _codes(weights, there)
        exact_there = ((codes_there.to(torch.bfloat16) * there.unsqueeze(-1)) == weights).all(dim=-1)
        exact_here = ((codes[candidates].to(torch.bfloat16) * scale[candidates].unsqueeze(-1)) == weights).all(dim=-1)
        better = exact_there & ~exact_here
        chosen = tuple(index[better] for index in candidates)
        scale[chosen] = there[better]
        codes[chosen] = codes_there[better]


def is_ignored(name: str, ignore: Sequence[str]) -> bool:
    """Whether a module name stays unquantized by the config's `ignore` list: "re:PATTERN" matches from the start, anything else exactly."""
    return any(re.match(entry[3:], name) if entry.startswith("re:") else entry == name for entry in ignore)


def from_quantization_config(config: Mapping[str, Any]) -> tuple[Codec, list[str]] | None:
    """(codec, ignore list) of a config.json, or None where the checkpoint is not quantized.

    Reads `quantization_config` at the top or under `text_config`. Every variant that would be read wrongly is refused by its name with a
    ConfigError: asymmetric, activations quantized, actorder that permutes columns, num_bits other than 4,
    channel or block strategy, rotations of the activations (transform_config), sparsity, other formats and
    methods (AWQ, GPTQ, FP8 …). `not_followed` names the fields that are not known here.
    """
    found = _table(config)
    if not found:
        return None
    method = found.get("quant_method") or ("modelopt" if "quant_algo" in found else "compressed-tensors")
    if "quant_method" not in found and method == "compressed-tensors" and "config_groups" not in found:
        raise _unsupported(f"quantization_config names no quant_method; it has {', '.join(map(str, found))}"[:300])
    if method != "compressed-tensors":
        algorithm = f', quant_algo "{found["quant_algo"]}"' if "quant_algo" in found else ""
        source = f" ({found['source']})" if "source" in found else ""
        raise _unsupported(f'quant_method "{method}"{algorithm}{source}')
    _refuse_unbuilt(found, ONLY, "quantization_config")
    groups = found.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise _unsupported("quantization_config without config_groups")
    codecs = {_codec_of_group(name, group, found.get("format")) for name, group in groups.items()}
    if len(codecs) > 1:
        raise _unsupported(f"mixed precision: config_groups {sorted(groups)} differ in group_size")
    ignore = found.get("ignore") or []
    if not isinstance(ignore, list) or not all(isinstance(entry, str) for entry in ignore):
        raise _unsupported("quantization_config.ignore is not a list of names")
    for entry in ignore:
        if entry.startswith("re:"):
            pattern(entry[3:], "config.json: quantization_config.ignore", ConfigError)
    return codecs.pop(), list(ignore)


ONLY: dict[str, tuple[Any, str]] = {
    "transform_config": ({}, "activations are rotated at run time"),
    "sparsity_config": ({}, "weights are stored sparse"),
    "moe_sparsity_config": ({}, "experts are left out of the computation"),
    "quantization_status": ("compressed", "weights are quantized anew at run time"),
}
"""field -> (the value that is built beside null, an empty table and one of format "dense", what another one means)."""
ONLY_OF_WEIGHTS: dict[str, tuple[Any, str]] = {
    "block_structure": ({}, "a scale for a block of rows and columns"),
    "zero_point": (False, "zero points"),
}
SILENT = frozenset("version global_compression_ratio run_compressed quant_method format config_groups ignore".split())
SILENT_OF_GROUP = frozenset("targets weights input_activations output_activations format".split())
SILENT_OF_WEIGHTS = frozenset(
    "num_bits type symmetric strategy group_size dynamic actorder observer observer_kwargs scale_dtype zp_dtype".split()
)
"""Read, or without effect on weights that are packed already: which modules are is seen in the files, scales are in the files' dtype."""


def not_followed(config: Mapping[str, Any]) -> str:
    """One line that names every field of a quantization_config that is neither read nor without effect; "" where there is none.

    Raises ConfigError for one that cannot be read.
    """
    found = _table(config)
    if found is None or from_quantization_config(config) is None:
        return ""
    fields = _unknown(found, SILENT | ONLY.keys() | {"kv_cache_scheme"}, "")
    for name, group in found["config_groups"].items():
        fields += _unknown(group, SILENT_OF_GROUP, f"config_groups.{name}.")
        fields += _unknown(group["weights"], SILENT_OF_WEIGHTS | ONLY_OF_WEIGHTS.keys(), f"config_groups.{name}.weights.")
    said = [f"{', '.join(fields)}: not known here and not followed"] if fields else []
    if found.get("kv_cache_scheme"):
        said.append("kv_cache_scheme is for a server's cache: training and generation here keep the cache unquantized")
    return f"quantization_config: {'; '.join(said)}" if said else ""


def _table(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The quantization_config at the top or under text_config, None where there is none."""
    text = config.get("text_config")
    found = config.get("quantization_config") or (text.get("quantization_config") if isinstance(text, Mapping) else None)
    if found and not isinstance(found, Mapping):
        raise _unsupported(f"quantization_config is {str(found)[:60]!r}, not an object")
    return found or None


def _refuse_unbuilt(table: Mapping[str, Any], only: Mapping[str, tuple[Any, str]], where: str) -> None:
    for name, (built, meaning) in only.items():
        value = table.get(name)
        empty = isinstance(value, Mapping) and all(entry in (None, [], {}) for entry in value.values())
        dense = isinstance(value, Mapping) and value.get("format") == "dense"
        if not (empty or dense or value in (None, [], built)):
            raise _unsupported(f"{where}.{name} {str(value)[:60]} ({meaning})")


def _unknown(table: Mapping[str, Any], known: Set[str], where: str) -> list[str]:
    return [f"{where}{name} = {value!r:.60}" for name, value in table.items() if name not in known and value not in (None, [], {})]


def _codec_of_group(name: str, group: Any, format_of_all: Any) -> Int4:
    """The codec of one entry of config_groups, or a refusal that names what it cannot read."""
    where = f"quantization_config.config_groups.{name}"
    if not isinstance(group, Mapping):
        raise _unsupported(f"{where} is not an object")
    weights = group.get("weights")
    form = group.get("format") or format_of_all
    if form != "pack-quantized":
        raise _unsupported(f'format "{form}"')
    if not isinstance(weights, Mapping) or not weights:
        raise _unsupported(f"{where} without weights")
    _refuse_unbuilt(weights, ONLY_OF_WEIGHTS, f"{where}.weights")
    if group.get("input_activations") or group.get("output_activations"):
        raise _unsupported(f"{where}: quantized activations")
    if weights.get("type", "int") != "int" or weights.get("num_bits") != 4:
        raise _unsupported(f"{where}: {weights.get('type', 'int')} weights with num_bits {weights.get('num_bits')}")
    if weights.get("symmetric") is not True:
        raise _unsupported(f"{where}: asymmetric weights (symmetric = {weights.get('symmetric')}, with zero points)")
    if weights.get("strategy") != "group":
        raise _unsupported(f'{where}: strategy "{weights.get("strategy")}"')
    if weights.get("dynamic"):
        raise _unsupported(f"{where}: dynamic weight quantization")
    # actorder "weight" (also called "static") reorders columns during calibration only and leaves the usual layout on disk;
    # "group" (True in old files) stores a permutation g_idx, without which every weight would land in the wrong column.
    if weights.get("actorder") not in (None, False, "weight", "static"):
        raise _unsupported(f"{where}: actorder {weights.get('actorder')!r} (columns permuted by g_idx)")
    size = weights.get("group_size")
    if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= MAX_GROUP:
        raise _unsupported(f"{where}: group_size {size!r}")
    return Int4(group_size=size)


def _unsupported(what: str) -> ConfigError:
    return ConfigError(
        f"this checkpoint's quantization cannot be read: {what}. Readable: compressed-tensors pack-quantized, int4, symmetric, grouped",
        next="use the publisher's bf16 or INT4 pack-quantized release of the model",
    )
