"""The low-rank modules: LowRank beside one Linear, ExpertLowRank beside the E stacked experts of one layer.

ΔW = scale · B A (Hu et al. 2021, LoRA). At the start A is random and B zero: a new adapter changes nothing. A
and B are float32 parameters. The arithmetic is in the activations' dtype; gradients arrive in float32.

T tokens, E experts, D model width, I expert width, R rank of gate and of up, Rd rank of down.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unfreeze.kernels.expert_mlp import ExpertFactors
from unfreeze.kernels.loops.cores import spread

NUMBERS_PER_CORE = 1 << 20  # drawing fewer takes less time than starting a thread


class Start(nn.Module):
    """Frozen first factors A₀, B₀: the adapter then trains ΔW = scale · (B A − B₀ A₀), zero at the start.

    ΔW is a plain LoRA of twice the rank, in the form A' = [A; A − A₀], B' = [B − B₀, B₀]. peft's conversion
    writes [A; A₀] and [B, −B₀], the same product as a difference of large ones: in bf16 rounding alone would
    change the output there by as much as training does.

    parts: matrices that lie below each other in A, such as gate's and up's; they share B's columns.
    """

    A: Tensor
    B: Tensor

    def __init__(self, A: Tensor, B: Tensor, parts: int = 1):
        super().__init__()
        self.parts = parts
        self.register_buffer("A", A.detach().clone(), persistent=False)
        self.register_buffer("B", B.detach().clone(), persistent=False)

    def pair(self, A: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
        """(A', B') of the present factors."""
        both = [x.unflatten(-2, (self.parts, -1)) for x in (A, A - self.A)]
        return torch.cat(both, dim=-2).flatten(-3, -2), torch.cat((B - self.B, self.B), dim=-1)


def _pair(start: Start | None, A: Tensor | None, B: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    return (A, B) if start is None or A is None or B is None else start.pair(A, B)


class LowRank(nn.Module):
    """The factors of y += scale · (x Aᵀ) Bᵀ; A fp32 [R, in], B fp32 [out, R].

    The layer multiplies (models/blocks/linear.py), with the scale on the thin [T, R] product: fewer
    multiplications than on [T, out]. `scale` 0 switches the adapter off without changing the kernels that run
    (the receipt does that). `start`: set by adapters/pissa.py.
    """

    def __init__(
        self, in_features: int, out_features: int, rank: int, scale: float, device: torch.device | str = "cpu"
    ):
        super().__init__()
        self.rank, self.scale = rank, scale
        self.A = nn.Parameter(torch.empty(rank, in_features, dtype=torch.float32, device=device))
        self.B = nn.Parameter(torch.zeros(out_features, rank, dtype=torch.float32, device=device))
        self.start: Start | None = None

    def factors(self) -> tuple[Tensor, Tensor, float]:
        """(A [R, in], B [out, R], scale), for the layer that multiplies; of twice the rank with a `start`."""
        A, B = (self.A, self.B) if self.start is None else self.start.pair(self.A, self.B)
        return A, B, self.scale

    @torch.no_grad()
    def reset(self, seed: int, name: str) -> None:
        """Initialise A as in PEFT (kaiming_uniform, a = sqrt 5: uniform within ±1/sqrt(in)), B to zero."""
        _draw(self.A, seed, [(name, ...)])
        self.B.zero_()

    def extra_repr(self) -> str:
        return f"rank={self.rank}, scale={self.scale:g}"


class ExpertLowRank(nn.Module):
    """Separate A and B for gate, up and down of every expert.

    A pair is None if its projection is not adapted. names: the matrices before the activation.

    gate_up_A  [E, 2R, D], rows 0:R are gate's A, rows R:2R up's
    gate_up_B  [E, 2I, R], rows 0:I are gate's B, rows I:2I up's; without a gate [E, R, D] and [E, I, R]
    down_A     [E, Rd, I]
    down_B     [E, D, Rd]
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        names: tuple[str, ...] = ("gate_proj", "up_proj"),
        gate_up_rank: int | None,
        down_rank: int | None,
        scale: float,
        down_scale: float,
        device: torch.device | str = "cpu",
    ):
        super().__init__()
        E, D, I = num_experts, hidden_size, intermediate_size
        self.names = names
        self.gate_up_rank, self.down_rank = gate_up_rank, down_rank
        self.scale, self.down_scale = scale, down_scale

        def parameter(rank: int | None, *shape: int) -> nn.Parameter | None:
            if rank is None:
                return None
            return nn.Parameter(torch.zeros(*shape, dtype=torch.float32, device=device))

        self.gate_up_A = parameter(gate_up_rank, E, len(names) * (gate_up_rank or 0), D)
        self.gate_up_B = parameter(gate_up_rank, E, len(names) * I, gate_up_rank or 0)
        self.down_A = parameter(down_rank, E, down_rank or 0, I)
        self.down_B = parameter(down_rank, E, D, down_rank or 0)
        self.gate_up_start: Start | None = None
        self.down_start: Start | None = None

    def factors(self) -> ExpertFactors:
        """The factors in the form of kernels/expert_mlp; of twice the rank with a start."""
        gate_up = _pair(self.gate_up_start, self.gate_up_A, self.gate_up_B)
        down = _pair(self.down_start, self.down_A, self.down_B)
        return ExpertFactors(*gate_up, *down, scale=self.scale, down_scale=self.down_scale)

    @torch.no_grad()
    def reset(self, seed: int, name: str, first: int = 0) -> None:
        """Draw each A from its own generator, set B to zero. first: the number of the first expert held here.

        A generator is named as on disk ("….experts.17.up_proj"): the same A on any number of devices. The
        cores share a layer's matrices, and a device receives them in one copy.
        """
        if self.gate_up_A is not None and self.gate_up_B is not None and self.gate_up_rank is not None:
            rank = self.gate_up_rank
            halves = {part: slice(at * rank, (at + 1) * rank) for at, part in enumerate(self.names)}
            parts = [
                (f"{name}.{first + e}.{half}", (e, rows))
                for e in range(len(self.gate_up_A))
                for half, rows in halves.items()
            ]
            _draw(self.gate_up_A, seed, parts)
            self.gate_up_B.zero_()
        if self.down_A is not None and self.down_B is not None:
            downs = [(f"{name}.{first + e}.down_proj", e) for e in range(len(self.down_A))]
            _draw(self.down_A, seed, downs)
            self.down_B.zero_()

    def extra_repr(self) -> str:
        return (
            f"gate_up_rank={self.gate_up_rank}, down_rank={self.down_rank}, scale={self.scale:g},"
            f" down_scale={self.down_scale:g}"
        )


def generator_of(text: str) -> torch.Generator:
    """A generator on the host, seeded with the first 63 bits of a text's SHA-256."""
    digest = hashlib.sha256(text.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def _draw(A: Tensor, seed: int, parts: Sequence[tuple[str, Any]]) -> None:
    """kaiming_uniform(a = sqrt 5) in each part of A (its name, its index), from a generator of (seed, name).

    The numbers do not depend on the order of attaching, the device, or the number of cores.
    """
    host = A.detach() if A.device.type == "cpu" else torch.empty(A.shape, dtype=torch.float32)

    def fill(part: tuple[str, Any], _: int) -> None:
        name, index = part
        nn.init.kaiming_uniform_(host[index], a=math.sqrt(5), generator=generator_of(f"{seed}:{name}"))

    cores = min(torch.get_num_threads(), max(1, A.numel() // NUMBERS_PER_CORE))
    spread([parts[core::cores] for core in range(cores)], fill)
    if host.device != A.device:
        A.copy_(host)
