"""PiSSA: adapters that start from the largest singular values of their weight.

    W ≈ U S Vᵀ,   A₀ = √(S / scale) Vᵀ,   B₀ = U √(S / scale)      of the first r singular values

The paper trains A and B beside W − scale · B₀ A₀. Here W stays as published, packed or not, and the adapter's
change is scale · (B A − B₀ A₀) (lora.py: Start): the same function and the same gradients, and on disk a LoRA
of twice the rank, which is what peft converts a PiSSA adapter to.

Source: Meng et al. 2024, arXiv:2404.02948; the fast SVD: Halko et al. 2011, arXiv:0909.4061.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from unfreeze.adapters.lora import ExpertLowRank, LowRank, Start, generator_of
from unfreeze.core.errors import AdapterError
from unfreeze.models.blocks.experts import Experts
from unfreeze.models.blocks.linear import Linear
from unfreeze.quant.codec import Packed

MORE = 8  # columns of the random matrix beyond the rank, as Halko et al. advise


def rounds_of(start: str) -> int | None:
    """Rounds of the fast SVD in "pissa_niter_4"; None for a full one."""
    return int(start.rpartition("_")[2]) if "_niter_" in start else None


@torch.no_grad()
def begin(
    name: str,
    owner: Linear | Experts,
    adapter: LowRank | ExpertLowRank,
    start: str,
    advance: Callable[[int], None] = lambda weights: None,
) -> None:
    """Set the factors of one site from its weight, and keep them as its start.

    Packed weights are dequantized, one expert at a time. advance: called with the weights of each matrix.
    Raises AdapterError for a rank above the number of singular values.
    """
    rounds = rounds_of(start)
    for part, weight, A_RI, B_OR, scale in _matrices(name, owner, adapter):
        W = weight()
        A, B = principal(W, len(A_RI), scale, part, rounds)
        A_RI.copy_(A)
        B_OR.copy_(B)
        advance(W.numel())
    hold(adapter)


def hold(adapter: LowRank | ExpertLowRank) -> None:
    """Keep the present factors as the adapter's start."""
    if isinstance(adapter, LowRank):
        adapter.start = Start(adapter.A, adapter.B)
        return
    if adapter.gate_up_A is not None and adapter.gate_up_B is not None:
        adapter.gate_up_start = Start(adapter.gate_up_A, adapter.gate_up_B, len(adapter.names))
    if adapter.down_A is not None and adapter.down_B is not None:
        adapter.down_start = Start(adapter.down_A, adapter.down_B)


Matrix = tuple[str, Callable[[], Tensor], Tensor, Tensor, float]
"""Its name, its weight [out, in], A and B as views, scale."""


def _matrices(name: str, owner: Linear | Experts, adapter: LowRank | ExpertLowRank) -> Iterator[Matrix]:
    """The matrices of a site; gate and up of an expert are two."""
    if isinstance(owner, Linear):
        assert isinstance(adapter, LowRank)
        yield name, owner.matrix, adapter.A, adapter.B, adapter.scale
        return
    assert isinstance(adapter, ExpertLowRank)
    count, first, down = len(adapter.names), owner.gate_up_proj.value(), owner.down_proj.value()
    for e in range(len(owner.held)):
        own = f"{name}.{owner.held.first + e}"
        if adapter.gate_up_A is not None and adapter.gate_up_B is not None:
            whole = _dense(first, e)
            halves = owner.activation.split(whole, 0) if count > 1 else (whole,)
            pairs = zip(adapter.gate_up_A[e].chunk(count), adapter.gate_up_B[e].chunk(count), strict=True)
            for half, W, (A, B) in zip(adapter.names, halves, pairs, strict=True):
                yield f"{own}.{half}", partial(_same, W), A, B, adapter.scale
        if adapter.down_A is not None and adapter.down_B is not None:
            W = partial(_dense, down, e)
            yield f"{own}.down_proj", W, adapter.down_A[e], adapter.down_B[e], adapter.down_scale


def _dense(stack: Tensor | Packed, expert: int) -> Tensor:
    matrix = stack[expert]
    return matrix if isinstance(matrix, Tensor) else matrix.dequantize()


def _same(matrix: Tensor) -> Tensor:
    return matrix


def principal(
    weight_OI: Tensor, rank: int, scale: float, name: str, rounds: int | None = None
) -> tuple[Tensor, Tensor]:
    """(A₀ [rank, in], B₀ [out, rank]) float32 with scale · B₀ A₀ the best approximation of W of that rank.

    rounds: of the fast SVD, whose random matrix is drawn from `name`; None: a full SVD.
    """
    W = weight_OI.float()
    if rank > min(W.shape):
        raise AdapterError(
            f"lora.start: {name} is {W.shape[0]} x {W.shape[1]} and has {min(W.shape)} singular values, fewer"
            f" than the rank {rank}",
            next=f"--lora.rank {min(W.shape)} or less, or lora.start = lora",
        )
    U, S, Vh = torch.linalg.svd(W, full_matrices=False) if rounds is None else _fast(W, rank, rounds, name)
    root = (S[:rank] / scale).sqrt()
    return root[:, None] * Vh[:rank], U[:, :rank] * root


def _fast(W: Tensor, rank: int, rounds: int, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """The first singular values of W, from its product with a random matrix and `rounds` power iterations."""
    columns = min(rank + MORE, *W.shape)
    drawn = torch.randn(W.shape[1], columns, generator=generator_of(name)).to(W.device)
    Q = torch.linalg.qr(W @ drawn).Q
    for _ in range(rounds):
        Q = torch.linalg.qr(W @ torch.linalg.qr(W.t() @ Q).Q).Q
    U, S, Vh = torch.linalg.svd(Q.t() @ W, full_matrices=False)
    return Q @ U, S, Vh


def starts(model: nn.Module) -> Iterator[tuple[str, Start]]:
    """(name, start) of every adapter that has one."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, Start))


class KeptStarts:
    """A₀ and B₀ among the tensors of a save: a resumed run has them bit for bit, on any machine."""

    def __init__(self, model: nn.Module):
        self._tensors = {
            f"{name}.{half}": tensor
            for name, start in starts(model)
            for half, tensor in start.named_buffers()
        }

    def __call__(self, expert_load: Mapping[int, Sequence[int]]) -> None:
        """Change nothing after an update."""

    def tensors(self) -> dict[str, Tensor]:
        """The tensors to save and to restore."""
        return self._tensors
