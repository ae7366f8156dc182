"""Residual blocks: the places of the norms and the sums. T tokens, D model width."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from unfreeze.kernels.decode_step.program import Row
from unfreeze.models.blocks.bytes import Block, Bytes
from unfreeze.models.blocks.mlp import MLP
from unfreeze.models.blocks.moe import MoE
from unfreeze.models.blocks.norm import RMSNorm
from unfreeze.models.blocks.passes import Pass
from unfreeze.models.blocks.recording import Recording


class Layer(Block):
    """x + attention(norm(x)), then x + mlp(norm(x)): the pre-norm residual block.

    name: that of the attention in checkpoints; "linear_attn" for one with a recurrent state.
    """

    _name = "self_attn"

    def __init__(
        self,
        *,
        self_attn: Block,
        mlp: Block,
        input_layernorm: RMSNorm,
        post_attention_layernorm: RMSNorm,
        name: str = "self_attn",
    ):
        super().__init__()
        self.add_module(name, self_attn)
        self.mlp, self._name = mlp, name
        self.input_layernorm, self.post_attention_layernorm = input_layernorm, post_attention_layernorm

    @property
    def attention(self) -> Block:
        """Its attention, or what a hybrid has in its place."""
        return cast(Block, self._modules[self._name])

    def forward(self, x_TD: Tensor, run: Pass) -> Tensor:
        x_TD = x_TD + self.attention(self.input_layernorm(x_TD), run)
        return x_TD + self.mlp(self.post_attention_layernorm(x_TD), run)

    def record(self, to: Recording, x: Row) -> Row:
        """The layer's operations for a step (blocks/recording.py)."""
        x = to.of(self.attention, self.input_layernorm.record(to, x), add=x)
        return to.of(self.mlp, self.post_attention_layernorm.record(to, x), add=x)

    def bytes(self, dtype: torch.dtype, device: str) -> Bytes:
        """Its parts in order, plus 2 D during all of its backward.

        They are its output, and the sum after attention, whose place its gradient takes.
        """
        sums = Bytes(held=2 * dtype.itemsize * self.input_layernorm.size)
        parts = (self.input_layernorm, self.attention, self.post_attention_layernorm, self.mlp)
        return sum((part.bytes(dtype, device) for part in parts), sums)


class SingleLayer(Layer):
    """x + mixer(norm(x)): one norm, and attention, Mamba-2, an MLP or experts (Nemotron-H).

    Source: arXiv:2504.03624.
    """

    def __init__(self, *, mixer: Block, norm: RMSNorm):
        Block.__init__(self)
        self.mixer, self.norm, self._name = mixer, norm, "mixer"

    @property
    def mlp(self) -> Block:  # type: ignore[override]
        return self.mixer

    def forward(self, x_TD: Tensor, run: Pass) -> Tensor:
        return x_TD + self.mixer(self.norm(x_TD), run)

    def record(self, to: Recording, x: Row) -> Row:
        return to.of(self.mixer, self.norm.record(to, x), add=x)

    def bytes(self, dtype: torch.dtype, device: str) -> Bytes:
        """Its parts in order, plus D during all of its backward: its output and then its gradient."""
        sums = Bytes(held=dtype.itemsize * self.norm.size)
        return sum((part.bytes(dtype, device) for part in (self.norm, self.mixer)), sums)


class ScaledLayer(Layer):
    """x + m · attention(norm(x)), then x + m · mlp(norm(x)) (Granite's residual_multiplier)."""

    def __init__(self, multiplier: float, **parts: Any):
        super().__init__(**parts)
        self.multiplier = multiplier

    def forward(self, x_TD: Tensor, run: Pass) -> Tensor:
        x_TD = x_TD + self.multiplier * self.attention(self.input_layernorm(x_TD), run)
        return x_TD + self.multiplier * self.mlp(self.post_attention_layernorm(x_TD), run)

    def record(self, to: Recording, x: Row) -> Row:
        normed = self.input_layernorm.record(to, x)
        x = to.of(self.attention, normed, add=x, factor=self.multiplier)
        normed = self.post_attention_layernorm.record(to, x)
        return to.of(self.mlp, normed, add=x, factor=self.multiplier)


class PostNormLayer(Layer):
    """x + norm(attention(x)), then x + norm(mlp(x)) (OLMo 2). Source: arXiv:2501.00656, section 3.2."""

    def __init__(
        self,
        *,
        self_attn: Block,
        mlp: MLP,
        post_attention_layernorm: RMSNorm,
        post_feedforward_layernorm: RMSNorm,
    ):
        Block.__init__(self)
        self.self_attn, self.mlp = self_attn, mlp
        self.post_attention_layernorm = post_attention_layernorm
        self.post_feedforward_layernorm = post_feedforward_layernorm

    def forward(self, x_TD: Tensor, run: Pass) -> Tensor:
        x_TD = x_TD + self.post_attention_layernorm(self.self_attn(x_TD, run))
        return x_TD + self.post_feedforward_layernorm(self.mlp.read(x_TD, run))

    def record(self, to: Recording, x: Row) -> Row:
        attended = to.of(self.self_attn, x)
        x = to.program.combine(x, self.post_attention_layernorm.record(to, attended))
        return to.program.combine(x, self.post_feedforward_layernorm.record(to, to.of(self.mlp, x)))

    def bytes(self, dtype: torch.dtype, device: str) -> Bytes:
        """Its parts in order, plus 2 D during all of its backward, as in Layer.

        A norm after a part keeps its input, not its output as its bytes() assumes: the same size.
        """
        D = self.post_attention_layernorm.size
        # the norm after the MLP reads its product: elementwise recomputation keeps it
        sums = Bytes(held=2 * dtype.itemsize * D, linear=dtype.itemsize * D)
        parts = (self.self_attn, self.post_attention_layernorm, self.mlp, self.post_feedforward_layernorm)
        return sum((part.bytes(dtype, device) for part in parts), sums)


class SandwichLayer(Layer):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x))) (Gemma 2). Source: arXiv:2408.00118."""

    def __init__(
        self,
        *,
        self_attn: Block,
        mlp: MLP,
        input_layernorm: RMSNorm,
        post_attention_layernorm: RMSNorm,
        pre_feedforward_layernorm: RMSNorm,
        post_feedforward_layernorm: RMSNorm,
    ):
        Block.__init__(self)
        self.self_attn, self.mlp = self_attn, mlp
        self.input_layernorm, self.post_attention_layernorm = input_layernorm, post_attention_layernorm
        self.pre_feedforward_layernorm = pre_feedforward_layernorm
        self.post_feedforward_layernorm = post_feedforward_layernorm

    def forward(self, x_TD: Tensor, run: Pass) -> Tensor:
        attended_TD = self.self_attn(self.input_layernorm(x_TD), run)
        x_TD = x_TD + self.post_attention_layernorm(attended_TD)
        return x_TD + self.post_feedforward_layernorm(
            self.mlp.read(self.pre_feedforward_layernorm(x_TD), run)
        )

    def record(self, to: Recording, x: Row) -> Row:
        x = self.record_attention(to, x)
        y = to.of(self.mlp, self.pre_feedforward_layernorm.record(to, x))
        return to.program.combine(x, self.post_feedforward_layernorm.record(to, y))

    def record_attention(self, to: Recording, x: Row) -> Row:
        """x + norm(attention(norm(x)))."""
        attended = to.of(self.self_attn, self.input_layernorm.record(to, x))
        return to.program.combine(x, self.post_attention_layernorm.record(to, attended))

    def bytes(self, dtype: torch.dtype, device: str) -> Bytes:
        """As in PostNormLayer, plus a norm before each part."""
        D = self.input_layernorm.size
        sums = Bytes(held=2 * dtype.itemsize * D, linear=dtype.itemsize * D)
        parts = (
            self.input_layernorm,
            self.self_attn,
            self.post_attention_layernorm,
            self.pre_feedforward_layernorm,
            self.mlp,
            self.post_feedforward_layernorm,
        )
        return sum((part.bytes(dtype, device) for part in parts), sums)


class GatedSandwichLayer(SandwichLayer):
    """SandwichLayer whose output is multiplied by layer_scalar, a constant of the checkpoint (Gemma 4)."""

    layer_scalar: Tensor

    def __init__(self, layer_scalar: Tensor, **parts: Any):
        super().__init__(**parts)
        self.register_buffer("layer_scalar", layer_scalar)

    def forward(self, x_TD: Tensor, run: Pass) -> Tensor:
        return super().forward(x_TD, run) * self.layer_scalar

    def record(self, to: Recording, x: Row) -> Row:
        return to.program.combine(super().record(to, x), a=float(self.layer_scalar))


class BesideLayer(GatedSandwichLayer):
    """GatedSandwichLayer whose MLP has experts beside it: norm(norm_1(mlp(norm(x))) + moe(x)) (Gemma 4).

    The MoE has norms of its own (blocks.moe.NormedMoE).
    """

    def __init__(
        self, layer_scalar: Tensor, *, moe: MoE, post_feedforward_layernorm_1: RMSNorm, **parts: Any
    ):
        super().__init__(layer_scalar, **parts)
        self.moe, self.post_feedforward_layernorm_1 = moe, post_feedforward_layernorm_1

    def forward(self, x_TD: Tensor, run: Pass) -> Tensor:
        attended_TD = self.self_attn(self.input_layernorm(x_TD), run)
        x_TD = x_TD + self.post_attention_layernorm(attended_TD)
        dense_TD = self.mlp.read(self.pre_feedforward_layernorm(x_TD), run)
        both_TD = self.post_feedforward_layernorm_1(dense_TD) + self.moe(x_TD, run)
        return (x_TD + self.post_feedforward_layernorm(both_TD)) * self.layer_scalar

    def record(self, to: Recording, x: Row) -> Row:
        x = self.record_attention(to, x)
        dense = to.of(self.mlp, self.pre_feedforward_layernorm.record(to, x))
        dense = self.post_feedforward_layernorm_1.record(to, dense)
        both = self.post_feedforward_layernorm.record(to, to.of(self.moe, x, add=dense))
        scalar = float(self.layer_scalar)
        return to.program.combine(x, both, scalar, scalar)

    def bytes(self, dtype: torch.dtype, device: str) -> Bytes:
        """As in GatedSandwichLayer, plus the MoE and one norm."""
        norm = self.post_feedforward_layernorm_1.bytes(dtype, device)
        return super().bytes(dtype, device) + norm + self.moe.bytes(dtype, device)
