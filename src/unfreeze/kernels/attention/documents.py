"""Causal attention inside documents of one length, [S, L] tokens.

The op that packed_attention/by_buckets.py calls once per bucket of a layout. S documents of L tokens, H query
heads, G key/value heads (G divides H), d width of q and k, v width of values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from unfreeze.core.cpu import loops_have
from unfreeze.kernels.attention.sdpa import sdpa
from unfreeze.kernels.choice.choose import choose
from unfreeze.kernels.choice.draw import normal
from unfreeze.kernels.choice.op import Candidate, Case, Implementation, Op
from unfreeze.kernels.recompute import Reuse

# bucket bounds: blocked_cpu pads to 128 queries; from 1,024 tokens on scores outgrow the caches; from 2,048
# on per-token costs hardly count
LENGTHS = (96, 192, 1024, 2048)


def attend(
    q_SLHd: Tensor,
    k_SLGd: Tensor,
    v_SLGv: Tensor,
    scale: float,
    reuse: Reuse | None = None,
    impl: str = "auto",
) -> Tensor:
    """Causal attention over S documents of equal length -> [S, L, H, v] in q's dtype.

        o[s, t, h] = Σ_u softmax_u(scale · q[s, t, h]·k[s, u, g]) v[s, u, g] over u <= t, g = h·G/H

    The reference is torch's own scaled_dot_product_attention. It is not an explicit mask, because the
    reference runs wherever nothing is measured, and a mask holds [S, H, L, L] scores. Both are tested against
    the explicit mask (attention/reference.py). `reuse`: of a layer that is recomputed; used on CPU.
    """
    implementation = choose(OP, q_SLHd.device, q_SLHd.dtype, bucket(q_SLHd, k_SLGd, v_SLGv), impl)
    return implementation(q_SLHd, k_SLGd, v_SLGv, scale, reuse)


def bucket(q_SLHd: Tensor, k_SLGd: Tensor, v_SLGv: Tensor) -> str:
    """The bucket's name: document length, and ", v < d" if values are narrower than keys.

    "under 96", "96 on", "192 on", "1024 on", "2048 on", with ", v < d" for MLA. "other": v > d.
    """
    length, d, v = q_SLHd.shape[1], q_SLHd.shape[3], v_SLGv.shape[3]
    return "other" if v > d else bucket_of(length, d, v)


def bucket_of(length: int, d: int, v: int) -> str:
    """The bucket's name for documents of that many tokens, v at most d."""
    names = _NARROW if v < d else _EQUAL
    return names[sum(length >= limit for limit in LENGTHS)]


_EQUAL = (f"under {LENGTHS[0]}", *(f"{limit} on" for limit in LENGTHS))
_NARROW = tuple(f"{name}, v < d" for name in _EQUAL)


def _blocked() -> Implementation:
    from unfreeze.kernels.attention.blocked_cpu import blocked_attention

    return blocked_attention


def _blocked_refuses(device: str, dtype: torch.dtype) -> str:
    if device != "cpu":
        return f"device {device}; it runs on cpu"
    if dtype == torch.float32 and not loops_have("cpu-avx512"):
        return "float32 without AVX512: slower than torch at every length (AVX2)"
    return "" if dtype in (torch.float32, torch.bfloat16) else f"dtype {dtype}; it takes float32 and bfloat16"


def _tiled() -> Implementation:
    from unfreeze.kernels.attention.tiled_cpu import tiled_attention

    return tiled_attention


def _tiled_refuses(device: str, dtype: torch.dtype) -> str:
    if device != "cpu":
        return f"device {device}; it runs on cpu"
    return "" if dtype == torch.float32 else f"dtype {dtype}; it takes float32"


def _inputs(
    length: int, d: int, v: int, device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor, float]:
    """Draw q, k and v of enough documents for a measurement.

    512 tokens, or one longer document, of 4 heads on CPU; 8,192 tokens of 16 heads on a GPU. Two query heads
    share a key if v = d (GQA).
    """
    tokens, heads = (8192, 16) if device.type == "cuda" else (512, 4)
    groups = heads // 2 if v == d else heads
    shape = (max(1, tokens // length), length)

    def random(*size: int) -> Tensor:
        return normal(device, generator, *shape, *size).to(dtype).requires_grad_()

    return random(heads, d), random(groups, d), random(groups, v), d**-0.5


def _cases() -> tuple[Case, ...]:
    """One length inside each bucket, at the widths of common models.

    64 / 64 as in small dense models, 96 / 64 and on a GPU 192 / 128 as in MLA.
    """

    def narrow(length: int) -> Callable[..., Any]:
        return lambda device, *rest: _inputs(
            length, *((192, 128) if device.type == "cuda" else (96, 64)), device, *rest
        )

    lengths = (64, 128, 512, 1024, 2048)
    equal = [
        Case(name, functools.partial(_inputs, length, 64, 64))
        for name, length in zip(_EQUAL, lengths, strict=True)
    ]
    return (*equal, *(Case(name, narrow(length)) for name, length in zip(_NARROW, lengths, strict=True)))


OP = Op(
    name="attention",
    reference=sdpa,
    candidates={"blocked": Candidate(_blocked, _blocked_refuses), "tiled": Candidate(_tiled, _tiled_refuses)},
    cases=_cases(),
    # float32: sums of up to 1,024 terms. bf16: P, dS and outputs are rounded to 8 bits (2^-9 = 0.2 % each).
    tolerance={torch.float32: 4e-6, torch.bfloat16: 1e-2},
)
