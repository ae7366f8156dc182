"""Packers of formats that other libraries write: weight -> (tensors of the file, what they stand for).

W [out, in] float32. Written as the formats' descriptions say, without the code that reads them; what the
libraries themselves packed is in tests/quant/vectors, and test_quantized_models.py holds these against it.
"""

from __future__ import annotations

import json

import torch
from torch import Tensor

Packing = tuple[dict[str, Tensor], Tensor]


def grid(weight_OI: Tensor, groups_I: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """codes int32 [in, out], scales f16 [G, out], zeros int32 [G, out]: from a group's smallest to its largest."""
    by_input, top = weight_OI.t(), 2**bits - 1
    members = [by_input[groups_I == group] for group in range(int(groups_I.max()) + 1)]
    low = torch.stack([member.amin(0).clamp(max=0) for member in members])
    high = torch.stack([member.amax(0).clamp(min=0) for member in members])
    scales = ((high - low) / top).clamp(min=1e-4).half()
    zeros = (-low / scales.float()).round().clamp(0, top).int()
    codes = (by_input / scales.float()[groups_I] + zeros[groups_I]).round().clamp(0, top).int()
    return codes, scales, zeros


def words(numbers: Tensor, bits: int, places: list[int]) -> Tensor:
    """numbers int32 [..., n places] -> int32 [..., n]: number k of a word in place places[k]."""
    by_word = numbers.long().view(*numbers.shape[:-1], -1, len(places))
    packed = sum(by_word[..., k] << (bits * place) for k, place in enumerate(places))
    return torch.as_tensor(packed).to(torch.int32)


def expanded(codes: Tensor, scales: Tensor, zeros: Tensor, groups_I: Tensor) -> Tensor:
    """W [out, in] as float16 numbers in float32: exact in float64, then one rounding."""
    return ((codes - zeros[groups_I]).double() * scales[groups_I].double()).half().float().t().contiguous()


def pack_awq(codes: Tensor, scales: Tensor, zeros: Tensor) -> dict[str, Tensor]:
    places = [0, 4, 1, 5, 2, 6, 3, 7]
    return {"qweight": words(codes, 4, places), "qzeros": words(zeros, 4, places), "scales": scales}


def pack_gptq(
    codes: Tensor, scales: Tensor, zeros: Tensor, groups_I: Tensor, bits: int, *, minus_one: bool
) -> dict[str, Tensor]:
    places = list(range(32 // bits))
    qzeros = words(zeros, bits, places)
    if minus_one:
        qzeros = qzeros - sum(1 << bits * place for place in places)
    return {
        "qweight": words(codes.t(), bits, places).t(),
        "qzeros": qzeros,
        "scales": scales,
        "g_idx": groups_I.int(),
    }


def awq(weight_OI: Tensor, group: int) -> Packing:
    groups_I = torch.arange(weight_OI.shape[1]) // group
    codes, scales, zeros = grid(weight_OI, groups_I, 4)
    return pack_awq(codes, scales, zeros), expanded(codes, scales, zeros, groups_I)


def gptq(weight_OI: Tensor, bits: int, group: int, *, act_order: bool, minus_one: bool) -> Packing:
    columns = weight_OI.shape[1]
    groups_I = torch.arange(columns) // group
    if act_order:
        order = torch.Generator().manual_seed(columns + len(weight_OI))
        groups_I = groups_I[torch.randperm(columns, generator=order)]
    codes, scales, zeros = grid(weight_OI, groups_I, bits)
    parts = pack_gptq(codes, scales, zeros, groups_I, bits, minus_one=minus_one)
    return parts, expanded(codes, scales, zeros, groups_I)


def bits4(weight_OI: Tensor, kind: str, block: int, dtype: torch.dtype, *, double: bool) -> Packing:
    """bitsandbytes: blocks of the flat matrix; two codes in a byte, the first in the upper half."""
    generator = torch.Generator().manual_seed(weight_OI.numel())
    numbers = torch.linspace(-1, 1, 16) + 0.03 * torch.rand(16, generator=generator)  # the file says which
    flat = weight_OI.flatten()
    blocks = -(-len(flat) // block)
    padded = torch.nn.functional.pad(flat, (0, blocks * block - len(flat))).view(blocks, block)
    absmax = padded.abs().amax(1)
    parts = {"weight.quant_map": numbers}
    state = {
        "quant_type": kind,
        "blocksize": block,
        "dtype": str(dtype).removeprefix("torch."),
        "shape": list(weight_OI.shape),
    }
    if double:
        numbers2, offset = torch.linspace(-1, 1, 256), absmax.mean()
        centred = torch.nn.functional.pad(absmax - offset, (0, -blocks % 256)).view(-1, 256)
        absmax2 = centred.abs().amax(1).clamp(min=1e-6)
        codes2 = ((centred / absmax2[:, None])[:, :, None] - numbers2).abs().argmin(-1)
        absmax = (numbers2[codes2] * absmax2[:, None]).flatten()[:blocks] + offset
        parts["weight.absmax"] = codes2.flatten()[:blocks].byte()
        parts |= {"weight.nested_absmax": absmax2, "weight.nested_quant_map": numbers2}
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset.item()}
    else:
        parts["weight.absmax"] = absmax
    codes = ((padded / absmax[:, None])[:, :, None] - numbers).abs().argmin(-1)
    whole = (numbers[codes] * absmax[:, None]).flatten()[: len(flat)].to(dtype).float()
    codes = codes.flatten()[: len(flat)].byte()
    parts["weight"] = (codes[0::2] << 4 | codes[1::2])[:, None]
    text = json.dumps(state).encode()
    parts[f"weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(list(text), dtype=torch.uint8)
    return parts, whole.view_as(weight_OI)


def int8(weight_OI: Tensor) -> Packing:
    """LLM.int8: a row's largest number is 127."""
    largest = weight_OI.abs().amax(1)
    codes = (weight_OI / largest[:, None] * 127).round().to(torch.int8)
    parts = {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return parts, codes * largest[:, None] * 7.874015718698502e-3
