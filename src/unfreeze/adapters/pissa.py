"""PiSSA: adapters that start from the largest singular values of their weight.

    W ≈ U S Vᵀ,   A₀ = √(S / scale) Vᵀ,   B₀ = U √(S / scale)      of the first r singular values

The paper trains A and B beside W − scale · B₀ A₀. Here W stays as published, packed or not, and the adapter's
change is scale · (B A − B₀ A₀) (lora.py: Start): the same function and the same gradients, and on disk a LoRA
of twice the rank, which is what peft converts a PiSSA adapter to.

Source: Meng et al. 2024, arXiv:2404.02948; the fast SVD: Halko et al. 2011, arXiv:0909.4061.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from unfreeze.adapters.lora import ExpertLowRank, LowRank, Start
from unfreeze.core.errors import AdapterError
from unfreeze.models.blocks.experts import Experts
from unfreeze.models.blocks.linear import Linear


MORE = 8  # columns of the random matrix beyond the rank, as Halko et al. advise


def rounds_of(start: str) -> int | None:
    """Rounds of the fast SVD in "pissa_niter_4"; None for a full one."""
    return int(start.rpartition("_")[2]) if "_niter_" in start else None


@torch.no_grad()
def begin(name: str, owner: Linear | Experts, adapter: LowRank | ExpertLowRank, start: str) -> None:
    """Set the factors of one site from its weight, and keep them as its start.

    Packed weights are dequantized, one expert at a time. Raises AdapterError for a rank above the number of
    singular values.
    """
    rounds = rounds_of(start)
    if isinstance(owner, Linear):
        assert isinstance(adapter, LowRank)
        A, B = principal(owner.matrix(), adapter.rank, adapter.scale, name, rounds)
        adapter.A.copy_(A)
        adapter.B.copy_(B)
        adapter.start = Start(adapter.A, adapter.B)
        return
    assert isinstance(adapter, ExpertLowRank)
    parts = len(adapter.names)
    first, down = owner.gate_up_proj.value(), owner.down_proj.value()
    for e in range(len(owner.held)):
        number = owner.held.first + e
        if adapter.gate_up_A is not None and adapter.gate_up_B is not None:
            pairs = zip(adapter.gate_up_A[e].chunk(parts), adapter.gate_up_B[e].chunk(parts), strict=True)
            matrix = first[e] if isinstance(first, Tensor) else first[e].dequantize()
            halves = owner.activation.split(matrix, 0) if parts > 1 else (matrix,)
            for half, W, (A_RI, B_OR) in zip(adapter.names, halves, pairs, strict=True):
                A, B = principal(W, len(A_RI), adapter.scale, f"{name}.{number}.{half}", rounds)
                A_RI.copy_(A)
                B_OR.copy_(B)
        if adapter.down_A is not None and adapter.down_B is not None:
            W = down[e] if isinstance(down, Tensor) else down[e].dequantize()
            name_e = f"{name}.{number}.down_proj"
            A, B = principal(W, len(adapter.down_A[e]), adapter.down_scale, name_e, rounds)
            adapter.down_A[e].copy_(A)
            adapter.down_B[e].copy_(B)
    if adapter.gate_up_A is not None and adapter.gate_up_B is not None:
        adapter.gate_up_start = Start(adapter.gate_up_A, adapter.gate_up_B, parts)
    if adapter.down_A is not None and adapter.down_B is not None:
        adapter.down_start = Start(adapter.down_A, adapter.down_B)


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
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") >> 1
    columns = min(rank + MORE, *W.shape)
    drawn = torch.randn(W.shape[1], columns, generator=torch.Generator().manual_seed(seed)).to(W.device)
    Q = torch.linalg.qr(W @ drawn).Q
    for _ in range(rounds):
        Q = torch.linalg.qr(W @ torch.linalg.qr(W.t() @ Q).Q).Q
    U, S, Vh = torch.linalg.svd(Q.t() @ W, full_matrices=False)
    return Q @ U, S, Vh


def starts(model: nn.Module) -> Iterator[tuple[str, Start]]:
    """(name, start) of every adapter that has one."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, Start))


class KeptStarts:
    """A₀ and B₀ among the tensors of a save: a resumed run has them bit for bit, whatever machine it is on."""

    def __init__(self, model: nn.Module):
        self._tensors = {
            f"{name}.{half}": tensor for name, start in starts(model) for half, tensor in start.named_buffers()
        }

    def __call__(self, expert_load: Mapping[int, Sequence[int]]) -> None:
        """Change nothing after an update."""

    def tensors(self) -> dict[str, Tensor]:
        """The tensors to save and to restore."""
        return self._tensors
