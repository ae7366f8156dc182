"""The rotation in plain torch: the oracle; it runs if no faster candidate is proven.

T tokens, H heads, d head width, r = R/2 pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(
    x_THd: Tensor,
    cos_Tr: Tensor,
    sin_Tr: Tensor,
    sign: float,
    read_adjacent: bool,
    write_adjacent: bool,
    y_THd: Tensor,
) -> None:
    """y = [x's first d - R elements | (a cos - b sin, b cos + a sin)], with sin times sign.

    In float32 (float64 for float64), rounded once. The pairs (a, b) are elements (i, i + r) of the last R, or
    (2i, 2i + 1) if adjacent; x and y each have their own layout.
    """
    begin = x_THd.shape[-1] - 2 * cos_Tr.shape[-1]
    wide = torch.promote_types(x_THd.dtype, torch.float32)
    a, b = _pairs(x_THd[..., begin:], read_adjacent)
    cos, sin = cos_Tr[:, None].to(wide), sin_Tr[:, None].to(wide) * sign
    a, b = a.to(wide), b.to(wide)
    y_THd[..., :begin] = x_THd[..., :begin]
    y_a, y_b = _pairs(y_THd[..., begin:], write_adjacent)
    y_a.copy_(a * cos - b * sin)
    y_b.copy_(b * cos + a * sin)


def _pairs(x: Tensor, adjacent: bool) -> tuple[Tensor, Tensor]:
    if adjacent:
        return x[..., 0::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]
