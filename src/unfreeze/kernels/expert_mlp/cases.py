"""Inputs that the expert MLP is measured with, and checked with on a GPU before its first use.

T tokens, E experts, D model width, I expert width, R rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from unfreeze.kernels.choice.draw import normal, uniform
from unfreeze.kernels.choice.op import Arguments, Case
from unfreeze.kernels.expert_mlp.factors import ExpertFactors
from unfreeze.kernels.swiglu.activation import SWIGLU, Activation, ClampedSwiGLU, GeGLU, SquaredReLU
from unfreeze.quant.codec import Packed
from unfreeze.quant.int4 import Int4

Base = Literal["packed", "unpacked", "all weights"]
SUFFIX: dict[Base, str] = {"packed": "", "unpacked": ", unpacked", "all weights": ", all weights"}
PER_TOKEN = 2  # experts of a token


@dataclass(frozen=True)
class Problem:
    """A call of the op with random numbers.

    used    the experts that have rows, the first of E; each next one has fewer, the last a `skew`-th
    biased  gate and up have biases, which are trained
    """

    tokens: int
    experts: int
    hidden: int
    intermediate: int
    rank: int
    used: int
    kind: Base = "packed"
    skew: float = 1.0
    activation: Activation = SWIGLU
    biased: bool = False

    def arguments(self, device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Arguments:
        """Drawn on `device`. A base is INT4 or not, with LoRA, or trained whole."""
        E, D, I, R = self.experts, self.hidden, self.intermediate, self.rank

        def randn(*shape: int, scale: float = 1.0) -> Tensor:
            return normal(device, generator, *shape) * scale

        parts = len(self.activation.projections)
        bases = [randn(E, parts * I, D, scale=D**-0.5), randn(E, D, I, scale=I**-0.5)]
        codec = Int4(32)
        matrices = (
            [Packed(codec, codec.quantize(base.bfloat16())) for base in bases]
            if self.kind == "packed"
            else [base.to(dtype).requires_grad_(self.kind == "all weights") for base in bases]
        )
        pairs = (
            randn(E, parts * R, D, scale=D**-0.5),
            randn(E, parts * I, R, scale=0.1),
            randn(E, R, I, scale=I**-0.5),
            randn(E, D, R, scale=0.1),
        )
        factors = ExpertFactors(*(pair.requires_grad_() for pair in pairs), scale=2.0, down_scale=2.0)
        share = torch.logspace(0, -1, self.used, base=self.skew, device=device)
        # the largest of u^(1 / share) are a sample without replacement, by share (Efraimidis, Spirakis 2006)
        lots = uniform(device, generator, self.tokens, self.used)
        ids = (lots.log() / share).topk(PER_TOKEN, dim=1).indices
        weights = uniform(device, generator, self.tokens, PER_TOKEN)
        x = randn(self.tokens, D).to(dtype).requires_grad_()
        lora = None if self.kind == "all weights" else factors
        args = (x, ids, weights.requires_grad_(), *matrices, lora)
        if self.activation == SWIGLU and not self.biased:
            return args
        if not self.biased:
            return (*args, None, self.activation, None)
        bias = randn(E, 2 * I)
        if isinstance(self.activation, ClampedSwiGLU):
            # Two columns of 15 are clamped, far from the limit: those that rounding moves past a limit within
            # reach would be 2 to 7 % of the gradients' norm.
            bias[:, ::15] += 2 * self.activation.limit + 2
            bias[:, 7::15] -= 2 * self.activation.limit + 2
        return (*args, None, self.activation, bias.to(dtype).requires_grad_())


def inputs(rows: int, kind: Base) -> Callable[[torch.device, torch.dtype, torch.Generator], Arguments]:
    """8 experts with about `rows` rows each, and LoRA of rank 8. On a GPU 16 times the weights."""

    def made(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Arguments:
        D, I = (2048, 1024) if device.type == "cuda" else (512, 256)
        problem = Problem(rows * 8 // PER_TOKEN, 8, D, I, 8, used=8, kind=kind)
        return problem.arguments(device, dtype, generator)

    return made


def measured() -> tuple[Case, ...]:
    return tuple(
        Case(name + suffix, inputs(rows, kind))
        for kind, suffix in SUFFIX.items()
        for name, rows in (("under 64", 16), ("64 on", 128))
    )


# One of 4 experts gets no rows; rank 3, so the workspace's rows are padded.
SMALL = Problem(24, 4, 64, 32, 3, used=3)
# Shapes of Qwen3-30B-A3B: 15 of 16 experts have about 60 to 470 rows each.
HOT = Problem(1536, 16, 2048, 768, 16, used=15, skew=10.0)


@dataclass(frozen=True)
class Checked:
    """One kind of call to check.

    at_once  experts in a workspace at once; 0: all
    """

    kind: Base
    activation: Activation = SWIGLU
    biased: bool = False
    at_once: int = 0

    @property
    def name(self) -> str:
        words = [self.kind]
        words += [self.activation.kind] if self.activation != SWIGLU else []
        words += ["in groups"] if self.at_once else []
        return ", ".join(words)

    def case(self, of: Problem) -> Case:
        """The case of that kind, with the shapes of `of`."""
        problem = replace(of, kind=self.kind, activation=self.activation, biased=self.biased)
        return Case(self.name, problem.arguments)

    def workspace(self, of: Problem, dtype: torch.dtype) -> int | None:
        """Bytes of a workspace for `at_once` experts of `of`; None if all fit."""
        if not self.at_once:
            return None
        of_one = (2 * of.intermediate + of.rank * 2 + 16) * (of.hidden + of.rank * 2 + 16)
        return self.at_once * of_one * dtype.itemsize


EVERY_KIND = (
    Checked("packed"),
    Checked("packed", at_once=3),
    Checked("unpacked"),
    Checked("all weights"),
    Checked("unpacked", GeGLU(), biased=True),
    Checked("packed", ClampedSwiGLU(interleaved=True), biased=True),
    Checked("packed", SquaredReLU()),
    Checked("all weights", SquaredReLU()),
)
"""What models run: every kind of base, several groups, and each activation with its biases."""
