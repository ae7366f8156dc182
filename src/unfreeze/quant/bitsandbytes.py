"""bitsandbytes: NF4 and FP4 with or without double quantization, and LLM.int8.

4 bits: the matrix is one row of n = out · in numbers, in blocks of 64:

    w[j] = map[code[j]] * absmax[j // 64]                                one rounding, to `dtype`

`map` has 16 numbers: the quantiles of a normal distribution (nf4) or a small float's (fp4). A byte holds two
codes, the first in the upper half. Double quantization stores absmax itself in bytes, in blocks of 256:

    absmax[b] = map2[code2[b]] * absmax2[b // 256] + offset               float32, two roundings

At 64 a weight takes 0.516 byte with it and 0.563 without, against 2 in bf16. A JSON text beside each weight
holds `dtype` (that of the weight before it was quantized), block sizes and offset.

8 bits: w[o, i] = code[o, i] * SCB[o] * (1 / 127), float32, two roundings. A server also rounds activations,
and computes columns of outliers separately; here training rounds no activations.

bitsandbytes' kernel for CPUs (0.50.2) misreads a weight whose rows are not whole blocks. Here, as in its
implementation for other devices, a block continues in the next row, as the quantizer wrote it.

Source: bitsandbytes' dequantize_4bit and int8_vectorwise_dequant on a CPU; bit-identical to them in
tests/quant/test_bitsandbytes.py (0.50.2, recorded).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import TYPE_CHECKING

from unfreeze.core.errors import CheckpointError, ConfigError
from unfreeze.quant.codec import (
    Codec,
    Format,
    Part,
    Table,
    Unreadable,
    finite,
    parts_nbytes,
    refuse_other_values,
)
from unfreeze.quant.grids import at_once, each
from unfreeze.quant.nf4 import in_blocks, numbers4, numbers8
from unfreeze.untrusted.json_object import parse_object

if TYPE_CHECKING:
    from torch import Tensor

KINDS = ("nf4", "fp4")
BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
MAP, MAP2 = 16, 256  # numbers that a code of 4 or of 8 bits can represent
INVERSE_127 = 7.874015718698502e-3  # bitsandbytes' own digits of 1 / 127
TEXT = (
    256  # bytes of a text that is written here, padded with spaces: its length must not depend on the offset
)
AGAIN = "get the checkpoint again, or save it again with bitsandbytes"


@dataclass(frozen=True)
class Bits4:
    """The codec of 4 bits. quant/codec.py documents each method, those of Texted too.

    kind     "nf4" or "fp4"
    double   True if absmax is quantized too
    block    weights that share an absmax
    block2   absmax values that share one, with double quantization
    dtype    dtype that a weight is rounded to: its dtype before it was quantized
    """

    kind: str = "nf4"
    double: bool = True
    block: int = 64
    block2: int = 256
    dtype: str = "BF16"
    variants: str = field(
        default="another blocksize or bnb_4bit_use_double_quant", init=False, repr=False, compare=False
    )

    @property
    def name(self) -> str:
        return f"bitsandbytes-{self.kind}"

    @property
    def text(self) -> str:
        """The suffix of the part that is a JSON text on disk, and only the offset in memory."""
        return f"weight_quant_state_{self.kind}"

    @property
    def suffixes(self) -> tuple[str, ...]:
        double = ("weight_nested_absmax", "weight_nested_quant_map") if self.double else ()
        return ("weight", "weight_absmax", "weight_quant_map", *double, self.text)

    def parts(self, out_features: int, in_features: int) -> dict[str, Part]:
        """weight uint8 [out, in / 2], on disk [n / 2, 1]; absmax [ceil(n / block)]; the maps; the offset [1].

        Raises ConfigError for an odd number of input columns: a byte would span two rows.
        """
        if in_features % 2:
            raise ConfigError(
                f"{in_features} input columns, an odd number, do not divide into bytes of two codes",
                next="use another release of the model",
            )
        blocks = -(-out_features * in_features // self.block)
        double: dict[str, Part] = {
            "weight_nested_absmax": ("F32", (-(-blocks // self.block2),)),
            "weight_nested_quant_map": ("F32", (MAP2,)),
        }
        return {
            "weight": ("U8", (out_features, in_features // 2)),
            "weight_absmax": ("U8" if self.double else "F32", (blocks,)),
            "weight_quant_map": ("F32", (MAP,)),
            **(double if self.double else {}),
            self.text: ("F32", (1,)),
        }

    def as_stored(self, dtypes: Mapping[str, str]) -> Bits4:
        """This codec unchanged: the texts hold block sizes and dtype (`with_text`)."""
        return self

    def disk_extras(self, out_features: int, in_features: int) -> dict[str, tuple[int, ...]]:
        """None: all parts are kept, the text as one number."""
        return {}

    def shape(self, parts: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """[..., out, in]: the codes', twice as wide. For the shapes on disk [n / 2, 2], the same number."""
        *leading, half = parts["weight"]
        return (*leading, 2 * half)

    def nbytes(self, out_features: int, in_features: int) -> int:
        """out * in / 2, and per block 1 byte with double quantization, 4 without; the maps; 4."""
        return parts_nbytes(self.parts(out_features, in_features).values())

    def columns(self, width: int) -> int:
        """Two codes per byte."""
        return 2 * width

    def with_text(self, raw: bytes, name: str) -> Bits4:
        """This codec with the block sizes and the dtype of one weight's text. Raises CheckpointError."""
        state = parse_object(raw, name, CheckpointError, next=AGAIN)
        block, block2 = state.get("blocksize"), state.get("nested_blocksize", self.block2)
        dtype = DTYPES.get(str(state.get("dtype")))
        whole = isinstance(block, int) and isinstance(block2, int)
        if not whole or block not in BLOCKS or block2 not in BLOCKS or dtype is None:
            raise CheckpointError(
                f"{name} says blocksize {block!r:.20}, nested_blocksize {block2!r:.20}, dtype"
                f" {state.get('dtype')!r:.20}; block sizes are {', '.join(map(str, BLOCKS))}, dtypes"
                f" {', '.join(DTYPES)}",
                next=AGAIN,
            )
        return replace(self, block=block, block2=block2, dtype=dtype)

    def parse(self, raw: bytes, name: str, out_features: int, in_features: int) -> list[float]:
        """[offset] from one weight's text; 0 without double quantization.

        Raises CheckpointError for a text that contradicts this codec.
        """
        state, codec = parse_object(raw, name, CheckpointError, next=AGAIN), self.with_text(raw, name)
        fields = (state.get("quant_type"), state.get("shape"), "nested_offset" in state)
        if fields != (self.kind, [out_features, in_features], self.double) or codec != self:
            raise CheckpointError(
                f"{name} says {str(state)[:300]}; the first of these and config.json say {self.kind}, shape"
                f" {[out_features, in_features]}, blocks of {self.block}, {self.dtype},"
                f" {'with' if self.double else 'without'} double quantization",
                next=AGAIN,
            )
        offset = state.get("nested_offset", 0.0)
        if not isinstance(offset, (int, float)) or not isfinite(offset):
            raise CheckpointError(f"{name} says nested_offset {offset!r:.30}, not a number", next=AGAIN)
        return [float(offset)]

    def stored_parts(self, out_features: int, in_features: int) -> dict[str, Part]:
        """`parts` with the codes as a column [n / 2, 1], and the text as TEXT bytes."""
        codes: Part = ("U8", (out_features * in_features // 2, 1))
        text: Part = ("U8", (TEXT,))
        return self.parts(out_features, in_features) | {"weight": codes, self.text: text}

    def stored_tensors(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The parts of one matrix as on disk. Source: bitsandbytes' QuantState.as_dict(packed=True)."""
        import torch

        rows, half = parts["weight"].shape
        names = {short: name for name, short in DTYPES.items()}
        state: dict[str, object] = {"quant_type": self.kind, "blocksize": self.block}
        state |= {"dtype": names[self.dtype], "shape": [rows, 2 * half]}
        if self.double:
            state |= {"nested_blocksize": self.block2, "nested_dtype": "float32"}
            state["nested_offset"] = parts[self.text].item()
        raw = torch.tensor(list(json.dumps(state).ljust(TEXT).encode()), dtype=torch.uint8)
        return {**parts, "weight": parts["weight"].reshape(-1, 1), self.text: raw}

    def dequantize(self, parts: Mapping[str, Tensor]) -> Tensor:
        """w = map[code] * absmax -> [..., out, in] in `dtype`, computed in float32.

        Raises CheckpointError if the parts do not belong together.
        """
        import torch

        codes = parts["weight"]
        needed = self.parts(codes.shape[-2], 2 * codes.shape[-1])
        for suffix, (_, shape) in needed.items():
            if tuple(parts[suffix].shape[-len(shape) :]) != shape or codes.dtype != torch.uint8:
                raise CheckpointError(
                    f"{suffix} is {list(parts[suffix].shape)} beside {codes.dtype} {list(codes.shape)};"
                    f" blocks of {self.block} need torch.uint8 and {list(shape)}",
                    next="compare the release's blocksize with its publisher's",
                )
        return each(self._matrix, parts, "weight")

    def _matrix(self, parts: Mapping[str, Tensor]) -> Tensor:
        import torch

        # look up both numbers of a byte in a table of 256 words
        codes, absmax = parts["weight"].flatten(), self._absmax(parts)
        pairs = torch.cartesian_prod(parts["weight_quant_map"], parts["weight_quant_map"])
        pairs = pairs.view(torch.int64).flatten()
        dtype: torch.dtype = getattr(torch, _TORCH[self.dtype])
        weight = torch.empty(2 * len(codes), dtype=dtype, device=codes.device)
        step = at_once(codes)  # whole blocks
        for first in range(0, len(weight), step):
            of_bytes = codes[first // 2 : (first + step) // 2]
            numbers = pairs.index_select(0, of_bytes.int()).view(torch.float32)
            scales = absmax[first // self.block : (first + step) // self.block]
            weight[first : first + step] = _by_block(numbers, scales, self.block)
        return weight.view(parts["weight"].shape[0], -1)

    def _absmax(self, parts: Mapping[str, Tensor]) -> Tensor:
        """float32 [ceil(n / block)]."""
        absmax = parts["weight_absmax"]
        if not self.double:
            return absmax
        numbers = parts["weight_nested_quant_map"].index_select(0, absmax.int())
        return _by_block(numbers, parts["weight_nested_absmax"], self.block2) + parts[self.text]

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        """The nearest codes by each block's largest weight, as bitsandbytes' quantize_4bit computes them.

        Raises CheckpointError on a weight that is not finite, ConfigError if the format cannot hold it.
        """
        import torch

        self.parts(*weight.shape[-2:])
        if weight.dim() == 2:
            return self._made(weight, numbers4(self.kind), numbers8(), None)
        matrices = [self.quantize(matrix) for matrix in weight]
        return {suffix: torch.stack([parts[suffix] for parts in matrices]) for suffix in matrices[0]}

    def refit(self, weight: Tensor, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """`quantize` of one matrix with the maps and the offset of `stored`, so its text stays valid."""
        numbers2 = stored.get("weight_nested_quant_map", stored["weight_quant_map"])
        return self._made(weight, stored["weight_quant_map"], numbers2, stored[self.text])

    def _made(
        self, weight: Tensor, numbers: Tensor, numbers2: Tensor, offset: Tensor | None
    ) -> dict[str, Tensor]:
        import torch

        finite(weight)
        codes, absmax = in_blocks(weight.detach().float().flatten(), self.block, numbers)
        double: dict[str, Tensor] = {}
        if self.double:
            offset = absmax.mean().view(1) if offset is None else offset
            absmax, absmax2 = in_blocks(absmax - offset, self.block2, numbers2)
            double = {"weight_nested_absmax": absmax2, "weight_nested_quant_map": numbers2}
        return {
            "weight": (codes[0::2] << 4 | codes[1::2]).view(len(weight), -1),
            "weight_absmax": absmax,
            "weight_quant_map": numbers,
            **double,
            self.text: torch.zeros(1) if offset is None else offset,
        }


def _by_block(numbers: Tensor, scales: Tensor, block: int) -> Tensor:
    """numbers float32 [n] * scales [ceil(n / block)], each scale for `block` of them."""
    if len(numbers) % block == 0:
        return (numbers.view(-1, block) * scales.unsqueeze(-1)).flatten()
    return numbers * scales.repeat_interleave(block)[: len(numbers)]


_TORCH = {name: dtype for dtype, name in DTYPES.items()}


@dataclass(frozen=True)
class Bits8:
    """The codec of LLM.int8. quant/codec.py documents each method."""

    name: str = field(default="bitsandbytes-int8", init=False, repr=False)
    suffixes: tuple[str, ...] = field(default=("weight", "SCB", "weight_format"), init=False, repr=False)
    variants: str = field(
        default="codes in an order for one kind of GPU", init=False, repr=False, compare=False
    )

    def parts(self, out_features: int, in_features: int) -> dict[str, Part]:
        """weight int8 [out, in], SCB float32 [out]."""
        return {"weight": ("I8", (out_features, in_features)), "SCB": ("F32", (out_features,))}

    def as_stored(self, dtypes: Mapping[str, str]) -> Bits8:
        """This codec unchanged: its scales are float32."""
        return self

    def disk_extras(self, out_features: int, in_features: int) -> dict[str, tuple[int, ...]]:
        """weight_format = 0: the codes are in row-major order."""
        return {"weight_format": (0,)}

    def shape(self, parts: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """[..., out, in], that of the codes."""
        return parts["weight"]

    def nbytes(self, out_features: int, in_features: int) -> int:
        """out * (in + 4)."""
        return parts_nbytes(self.parts(out_features, in_features).values())

    def dequantize(self, parts: Mapping[str, Tensor]) -> Tensor:
        """w = code * SCB * (1 / 127) -> float32 [..., out, in]. Raises CheckpointError."""
        import torch

        codes, largest = parts["weight"], parts["SCB"]
        if codes.dtype != torch.int8 or codes.shape[:-1] != largest.shape:
            raise CheckpointError(
                f"weight is {codes.dtype} {list(codes.shape)} with SCB {list(largest.shape)}; they need"
                f" torch.int8 and {list(codes.shape[:-1])}",
                next=AGAIN,
            )
        weight = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
        _scaled(codes.flatten(0, -2), largest.reshape(-1, 1), weight.view(-1, codes.shape[-1]))
        return weight

    def quantize(self, weight: Tensor) -> dict[str, Tensor]:
        """SCB = the largest |w| of a row, code = round(127 w / SCB), as bitsandbytes' int8_vectorwise_quant.

        Raises CheckpointError on a weight that is not finite.
        """
        import torch

        finite(weight)
        largest = weight.detach().float().abs().amax(-1)
        per_step = 127 / largest.masked_fill(largest == 0, 1.0)
        codes = (weight.detach().float() * per_step.unsqueeze(-1)).round().to(torch.int8)
        return {"weight": codes, "SCB": largest}


def _scaled(codes: Tensor, largest: Tensor, weight: Tensor) -> None:
    """weight = codes * largest * (1 / 127), some rows at a time: all are [rows, in], largest [rows, 1]."""
    import torch

    step = max(1, at_once(codes) // codes.shape[1])
    for first in range(0, len(codes), step):
        rows = slice(first, first + step)
        torch.mul(codes[rows].float(), largest[rows], out=weight[rows]).mul_(INVERSE_127)


ONLY: dict[str, tuple[object, str]] = {
    "bnb_4bit_quant_storage": ("uint8", "codes are stored as another dtype, for sharding"),
    "config_groups": ({}, "groups of modules in other formats"),
}
KNOWN = frozenset(
    """load_in_4bit load_in_8bit _load_in_4bit _load_in_8bit bnb_4bit_quant_type bnb_4bit_use_double_quant
    bnb_4bit_compute_dtype llm_int8_threshold llm_int8_skip_modules llm_int8_enable_fp32_cpu_offload
    llm_int8_has_fp16_weight""".split()
)
"""Fields that are read, or have no effect on packed weights."""


def read(where: str, table: Table) -> Codec:
    """The codec of a quantization_config with quant_method "bitsandbytes".

    Raises Unreadable naming each variant that would be read wrongly.
    """
    refuse_other_values(table, ONLY, where)
    four, eight = (table.get(f"load_in_{bits}bit") or table.get(f"_load_in_{bits}bit") for bits in (4, 8))
    if bool(four) == bool(eight):
        raise Unreadable(f"{where} with load_in_4bit {four!r:.20} and load_in_8bit {eight!r:.20}")
    if eight:
        return Bits8()
    kind = table.get("bnb_4bit_quant_type", "fp4")
    if kind not in KINDS:
        raise Unreadable(f'{where}: bnb_4bit_quant_type "{kind}"')
    return Bits4(str(kind), bool(table.get("bnb_4bit_use_double_quant", False)))


FORMAT = Format(
    key="bitsandbytes",
    title="bitsandbytes NF4, FP4 and LLM.int8",
    read=read,
    known=KNOWN | ONLY.keys(),
    suffixes=(
        "weight_absmax",
        "weight_quant_map",
        "weight_nested_absmax",
        "weight_nested_quant_map",
        *(f"weight_quant_state_{kind}" for kind in KINDS),
        "SCB",
    ),
    ignored="llm_int8_skip_modules",
)
