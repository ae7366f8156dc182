"""The sequential part of a linear recurrence in chunks: the state goes through the chunks of each document.

    U_c = U0_c - W_c S_c,  S_next = a_c S_c + K_cᵀ U_c          (without W: U_c = U0_c)

S_c is the state before chunk c. Everything else of the recurrence (kernels/recurrence) is products of all
chunks at once.

n chunks, S documents, H heads, C tokens of a chunk, k and v widths of a state; all float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from unfreeze.kernels.choice.choose import choose
from unfreeze.kernels.choice.op import Case, Implementation, Op
from unfreeze.kernels.loops import triton_options
from unfreeze.kernels.state_scan import reference

__all__ = ["OP", "Steps", "state_scan"]


WIDEST = 128  # keys of a state that the kernel holds in registers; no release has more


@dataclass(frozen=True)
class Steps:
    """Chunk c of step i and document s is first_i[i] + s, for the counts[i] documents that have a step i.

    counts   descending, on the host. first_i, steps_S: int32 on the device; steps_S: steps of each document
    """

    counts: tuple[int, ...]
    first_i: Tensor
    steps_S: Tensor

    @staticmethod
    def of(counts: tuple[int, ...], device: torch.device | str = "cpu") -> Steps:
        """Steps with these counts."""
        steps = torch.tensor(counts)
        first_i = (steps.cumsum(0) - steps).int()
        steps_S = (steps[:, None] > torch.arange(counts[0])).sum(0).int()
        return Steps(counts, first_i.to(device), steps_S.to(device))


def state_scan(
    u_nHCv: Tensor,
    w_nHCk: Tensor | None,
    k_nHCk: Tensor,
    a_nHk1: Tensor,
    state_SHkv: Tensor,
    steps: Steps,
    impl: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """(S before each chunk [n, H, k, v], U [n, H, C, v], S behind each document's last chunk [S, H, k, v]).

    u is U0; w None: U = U0. a is [n, H, k, 1] or [n, H, 1, 1].
    """
    bucket = "wide" if k_nHCk.shape[-1] > WIDEST else "additive" if w_nHCk is None else "delta"
    chosen = choose(OP, u_nHCv.device, u_nHCv.dtype, bucket, impl)
    return chosen(u_nHCv, w_nHCk, k_nHCk, a_nHk1, state_SHkv, steps)


class ScanFunctions(Protocol):
    """The module of an implementation; reference.py documents each function."""

    def forward(
        self, u: Tensor, w: Tensor | None, k: Tensor, a: Tensor, state: Tensor, steps: Steps, /
    ) -> tuple[Tensor, Tensor, Tensor]: ...

    def backward(
        self,
        dbefore: Tensor,
        du: Tensor,
        dafter: Tensor,
        w: Tensor | None,
        k: Tensor,
        a: Tensor,
        steps: Steps,
        /,
    ) -> tuple[Tensor, Tensor, Tensor]: ...


class _Scan(torch.autograd.Function):
    """With D_c = dS_next and G_c = dU_c + K_c D_c (both from the last chunk to the first, by `backward`):

    dU0 = G, dW = -G Sᵀ, dK = U Dᵀ, da = Σ_v D S.
    """

    @staticmethod
    def forward(
        ctx: Any,
        u: Tensor,
        w: Tensor | None,
        k: Tensor,
        a: Tensor,
        state: Tensor,
        steps: Steps,
        functions: ScanFunctions,
    ) -> tuple[Tensor, Tensor, Tensor]:
        before, own, after = functions.forward(u, w, k, a, state, steps)
        ctx.save_for_backward(w, k, a, before, own)
        ctx.steps, ctx.functions = steps, functions
        return before, own, after

    @staticmethod
    def backward(ctx: Any, dbefore: Tensor, du: Tensor, dafter: Tensor) -> tuple[Tensor | None, ...]:
        w, k, a, before, own = ctx.saved_tensors
        gradients = (part.contiguous() for part in (dbefore, du, dafter))
        g, d, dstate = ctx.functions.backward(*gradients, w, k, a, ctx.steps)
        dw = None if w is None else -(g @ before.mT)
        da = (d * before).sum(-1, keepdim=True)
        if a.shape[-2] == 1:
            da = da.sum(-2, keepdim=True)
        return g, dw, own @ d.mT, da, dstate, None, None


def _by(functions: ScanFunctions) -> Implementation:
    """The op, computed by `functions`."""

    def state_scan_by(
        u: Tensor, w: Tensor | None, k: Tensor, a: Tensor, state: Tensor, steps: Steps
    ) -> tuple[Tensor, Tensor, Tensor]:
        return _Scan.apply(u, w, k, a, state, steps, functions)

    return state_scan_by


def _triton() -> Implementation:
    from unfreeze.kernels.state_scan import triton_cuda

    return _by(triton_cuda)


def _inputs(
    delta: bool, device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> tuple[Any, ...]:
    """Documents of 4 to 1 chunks, the states of some of them carried in."""
    counts, heads, C, k, v = (3, 3, 2, 1), 4 if device.type == "cpu" else 32, 64, 128, 128
    n = sum(counts)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    u, state = drawn(n, heads, C, v), drawn(counts[0], heads, k, v)
    w, key = drawn(n, heads, C, k) / k, drawn(n, heads, C, k) / k**0.5
    a = torch.rand(n, heads, 1, 1, generator=generator).to(device, dtype)
    learnt = [x.requires_grad_() for x in (u, w, key, a, state)]
    return learnt[0], learnt[1] if delta else None, *learnt[2:], Steps.of(counts, device)


OP = Op(
    name="state_scan",
    reference=_by(reference),
    candidates={
        "triton": triton_options.candidate(
            _triton,
            "one launch where the reference has six per chunk of the longest document",
            computes=("delta", "additive"),
        )
    },
    cases=(
        Case("delta", lambda *where: _inputs(True, *where), dtypes=(torch.float32,)),
        Case("additive", lambda *where: _inputs(False, *where), dtypes=(torch.float32,)),
    ),
    # float32: products of 64 and 128 terms in another order, through four chunks
    tolerance={torch.float32: 5e-6},
)
