"""The values of bitsandbytes' codes, and the nearest codes of a row of numbers in blocks.

    absmax[b] = the largest |x| of block b;  code[j] = the nearest of map to x[j] / absmax[j // block]

nf4: quantiles of a normal distribution (QLoRA, arXiv:2305.14314, appendix E). fp4: a float of a sign, 2 bits
of exponent and 1 of fraction. 8 bits, for absmax: fractions of 0 to 6 bits, each within a power of ten.

Source: bitsandbytes' get_4bit_type and create_dynamic_map; equal to its maps and codes in
tests/quant/test_nf4.py (0.50.2, recorded), except for ties of FP4.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

# fmt: off
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)
# fmt: on
FP4 = (0, 0.0625, 8, 12, 4, 6, 2, 3)  # of 12
POWERS = 7  # powers of ten that an 8-bit number can start in


def numbers4(kind: str) -> Tensor:
    """float32 [16]: the values of the codes of "nf4" or "fp4"."""
    import torch

    if kind == "nf4":
        return torch.tensor(NF4)
    half = torch.tensor(FP4) / 12
    return torch.cat((half, -half))


def numbers8() -> Tensor:
    """float32 [256], ascending: the values of the codes of a quantized absmax."""
    import torch

    pieces = [torch.tensor([0.0, 1.0])]
    for power in range(POWERS):
        ends = torch.linspace(0.1, 1, 2**power + 1, dtype=torch.float32)
        middles = (ends[:-1] + ends[1:]) / 2 * 10.0 ** (power - POWERS + 1)
        pieces += [middles, -middles]
    return torch.cat(pieces).sort().values


def in_blocks(row: Tensor, block: int, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """(codes uint8 [n], absmax float32 [ceil(n / block)]) of float32 [n].

    fp4 has 0 twice: the second is for numbers above 0, as in the library.
    """
    import torch

    missing = -len(row) % block
    blocks = torch.nn.functional.pad(row, (0, missing)).view(-1, block)
    absmax = blocks.abs().amax(1)
    scaled = (blocks / absmax.masked_fill(absmax == 0, 1.0).unsqueeze(1)).flatten()[: len(row)]
    ascending, order = numbers.sort(stable=True)
    middles = (ascending[1:] + ascending[:-1]) / 2
    return order[torch.bucketize(scaled, middles)].to(torch.uint8), absmax
