"""Packers of formats that are read here and not written: weight -> (tensors of the file, what they stand for).

W [out, in] float32. Written as the formats' descriptions say, without the code that reads them; what the
libraries themselves packed is in tests/quant/vectors, and test_quantized_models.py holds these against it.
"""

from __future__ import annotations

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
