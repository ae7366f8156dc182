"""Residual blocks that differ from the pre-norm one only in the places of their norms (parts/norms.py).

A norm that stands before attention or before the MLP has the name that it has in the pre-norm block, so a
checkpoint's gain keeps its meaning. T tokens, D model width.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from unfreeze.kernels.decode_step.program import Row
from unfreeze.models.blocks.bytes import Block, Bytes
from unfreeze.models.blocks.mlp import MLP, FusedMLP, PlainMLP
from unfreeze.models.blocks.moe import ReadMoE
from unfreeze.models.blocks.norm import RMSNorm
from unfreeze.models.blocks.passes import Pass
from unfreeze.models.blocks.recording import Recording
from unfreeze.models.blocks.routers import Router
from unfreeze.models.layer import Layer

Readable = MLP | FusedMLP | PlainMLP | ReadMoE
"""Modules that a norm can stand after: their `read` computes the output again in a recomputation."""
INTO_VALUES = ("v_proj", "o_proj")
"""Matrices of attention that DeepNorm scales; those of q and k it leaves as they are."""


class NormedBranches(Layer):
    """x + after(attention(before(x))), then x + after(mlp(before(x))).

    Before: input_layernorm and post_attention_layernorm, or none. After: attention_output_layernorm and
    mlp_output_layernorm. With both it is Gemma 2's block (arXiv:2408.00118), without the first two OLMo 2's
    (arXiv:2501.00656, section 3.2).
    """

    mlp: Readable

    def __init__(
        self,
        *,
        self_attn: Block,
        mlp: Readable,
        before: tuple[RMSNorm, RMSNorm] | None,
        after: tuple[RMSNorm, RMSNorm],
        name: str = "self_attn",
    ):
        Block.__init__(self)
        self.add_module(name, self_attn)
        self.mlp, self._name, self.sandwich = mlp, name, before is not None
        if before is not None:
            self.input_layernorm, self.post_attention_layernorm = before
        self.attention_output_layernorm, self.mlp_output_layernorm = after

    def forward(self, x_TD: Tensor, run: Pass) -> Tensor:
        y_TD = self.input_layernorm(x_TD) if self.sandwich else x_TD
        x_TD = x_TD + self.attention_output_layernorm(self.attention(y_TD, run))
        y_TD = self.post_attention_layernorm(x_TD) if self.sandwich else x_TD
        return x_TD + self.mlp_output_layernorm(self.mlp.read(y_TD, run))

    def record(self, to: Recording, x: Row) -> Row:
        y = self.input_layernorm.record(to, x) if self.sandwich else x
        y = self.attention_output_layernorm.record(to, to.of(self.attention, y))
        x = to.program.combine(x, y)
        y = self.post_attention_layernorm.record(to, x) if self.sandwich else x
        return to.program.combine(x, self.mlp_output_layernorm.record(to, to.of(self.mlp, y)))

    def bytes(self, dtype: torch.dtype, device: str) -> Bytes:
        """Its parts in order, plus 2 D during all of its backward, as in Layer.

        The last norm reads the MLP's product: elementwise recomputation keeps it, D.
        """
        D, size = self.mlp_output_layernorm.size, dtype.itemsize
        parts: list[Block] = [self.attention, self.attention_output_layernorm, self.mlp]
        if self.sandwich:
            parts.insert(2, self.post_attention_layernorm)
            parts.insert(0, self.input_layernorm)
        sums = Bytes(held=2 * size * D, linear=size * D)
        return sum((part.bytes(dtype, device) for part in [*parts, self.mlp_output_layernorm]), sums)


class NormedSums(Layer):
    """h = norm(alpha x + attention(x)), then norm(alpha h + mlp(h)): post-norm, and DeepNorm with alpha > 1.

    The norms are post_attention_layernorm, which the MLP reads as in a pre-norm block, and output_layernorm.
    alpha  of the residual
    beta   factor of the initial values of v_proj, o_proj and the MLP's matrices
    std    of the initial values, before beta

    The sums are normed, so their variance does not grow with depth, and the projections into them are not
    scaled by 1/sqrt(2 · layers). Source: arXiv:1706.03762; arXiv:2203.00555, figure 2.
    """

    mlp: Readable

    def __init__(
        self,
        *,
        self_attn: Block,
        mlp: Readable,
        norms: tuple[RMSNorm, RMSNorm],
        alpha: float,
        beta: float,
        std: float,
        name: str = "self_attn",
    ):
        Block.__init__(self)
        self.add_module(name, self_attn)
        self.mlp, self._name = mlp, name
        self.alpha, self.beta, self.std = alpha, beta, std
        self.post_attention_layernorm, self.output_layernorm = norms

    def forward(self, x_TD: Tensor, run: Pass) -> Tensor:
        attended_TD = self.attention(x_TD, run)
        x_TD = self.post_attention_layernorm(torch.add(attended_TD, x_TD, alpha=self.alpha))
        return self.output_layernorm(torch.add(self.mlp.read(x_TD, run), x_TD, alpha=self.alpha))

    def record(self, to: Recording, x: Row) -> Row:
        x = self.post_attention_layernorm.record(
            to, to.program.combine(x, to.of(self.attention, x), self.alpha)
        )
        return self.output_layernorm.record(to, to.program.combine(x, to.of(self.mlp, x), self.alpha))

    def drawn(self, generator: Generator) -> dict[str, Tensor]:
        """Initial values of the matrices whose variance is not the usual one: N(0, (beta std)²).

        They are v_proj, o_proj, and the matrices of MLP and experts; a router's are as usual.
        """
        routers = {
            id(parameter)
            for module in self.modules()
            if isinstance(module, Router)
            for parameter in module.parameters()
        }
        matrices = [
            (name, parameter)
            for name, parameter in self.named_parameters()
            if id(parameter) not in routers
            and parameter.dim() >= 2
            and (name.startswith("mlp.") or name.split(".")[-2] in INTO_VALUES)
        ]
        scale = self.beta * self.std
        return {
            name: torch.randn(parameter.shape, generator=generator) * scale for name, parameter in matrices
        }

    def bytes(self, dtype: torch.dtype, device: str) -> Bytes:
        """Its parts in order, plus 2 D during all of its backward: the sums, which the norms read.

        They are computed of the products again: elementwise recomputation keeps the MLP's, D.
        """
        D, size = self.output_layernorm.size, dtype.itemsize
        parts = (self.attention, self.post_attention_layernorm, self.mlp, self.output_layernorm)
        sums = Bytes(held=2 * size * D, linear=size * D)
        return sum((part.bytes(dtype, device) for part in parts), sums)
