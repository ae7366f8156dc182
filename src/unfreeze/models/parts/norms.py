"""Parts for a whole layer: the same attention and MLP, with the norms in other places."""

from __future__ import annotations

from typing import NamedTuple

from unfreeze.models.blocks.bytes import Block
from unfreeze.models.blocks.moe import MoE, ReadMoE
from unfreeze.models.blocks.norm import RMSNorm
from unfreeze.models.layer import Layer
from unfreeze.models.parts import At, refuse
from unfreeze.models.placements import INTO_VALUES, NormedBranches, NormedSums, Readable


def pre_norm(own: Layer, at: At) -> Layer:
    """x + f(norm(x)); a pre-norm layer itself is returned as it is."""
    if type(own) is Layer:
        return own
    inside = _inside(own, "pre_norm", at)
    input_layernorm, post_attention_layernorm = inside.before(at)
    return Layer(
        self_attn=inside.attention,
        mlp=inside.mlp,
        input_layernorm=input_layernorm,
        post_attention_layernorm=post_attention_layernorm,
        name=inside.name,
    )


def post_norm(own: Layer, at: At) -> NormedSums:
    """norm(x + f(x))."""
    return _normed_sums(own, at, "post_norm", 1.0, 1.0)


def deep_norm(own: Layer, at: At) -> NormedSums:
    """norm(alpha x + f(x)), alpha = (2L)^(1/4), beta = (8L)^(-1/4) for a decoder of L layers."""
    layers = at.shape.num_layers
    return _normed_sums(own, at, "deep_norm", (2 * layers) ** 0.25, (8 * layers) ** -0.25)


def sandwich_norm(own: Layer, at: At) -> NormedBranches:
    """x + norm(f(norm(x)))."""
    inside = _inside(own, "sandwich_norm", at)
    return NormedBranches(
        self_attn=inside.attention,
        mlp=inside.mlp,
        before=inside.before(at),
        after=inside.after(at),
        name=inside.name,
    )


def branch_norm(own: Layer, at: At) -> NormedBranches:
    """x + norm(f(x))."""
    inside = _inside(own, "branch_norm", at)
    return NormedBranches(
        self_attn=inside.attention, mlp=inside.mlp, before=None, after=inside.after(at), name=inside.name
    )


class _Inside(NamedTuple):
    """The parts of a layer that stay. norms: those it has, by name; kind: their class."""

    name: str
    attention: Block
    mlp: Readable
    norms: dict[str, RMSNorm]
    kind: type[RMSNorm]

    def norm(self, name: str, at: At) -> RMSNorm:
        """The layer's own norm of that name, or a new one."""
        return self.norms.get(name) or at.make.norm(at.shape.hidden_size, at.shape.rms_norm_eps, self.kind)

    def before(self, at: At) -> tuple[RMSNorm, RMSNorm]:
        return self.norm("input_layernorm", at), self.norm("post_attention_layernorm", at)

    def after(self, at: At) -> tuple[RMSNorm, RMSNorm]:
        return self.norm("attention_output_layernorm", at), self.norm("mlp_output_layernorm", at)


def _inside(own: Layer, part: str, at: At) -> _Inside:
    """Take a layer apart. Raises CheckpointError for one that is more than attention and MLP with norms."""
    if type(own) not in (Layer, NormedBranches, NormedSums):
        refuse(own, part, "a pre-norm layer", at)
    norms = {name: block for name, block in own.named_children() if isinstance(block, RMSNorm)}
    kind = type(next(iter(norms.values())))
    return _Inside(own._name, own.attention, _read(own.mlp, part, at), norms, kind)


def _read(mlp: Block, part: str, at: At) -> Readable:
    """The MLP or the experts, in the form whose output is read by a norm (MLP.read, ReadMoE)."""
    if type(mlp) is MoE:
        return ReadMoE(mlp.layer, gate=mlp.gate, experts=mlp.experts, shared_experts=mlp.shared_experts)
    if not isinstance(mlp, Readable):
        refuse(mlp, part, "a layer with an MLP or plain experts", at)
    return mlp


def _normed_sums(own: Layer, at: At, part: str, alpha: float, beta: float) -> NormedSums:
    inside = _inside(own, part, at)
    if beta != 1 and not {name for name, _ in inside.attention.named_children()}.issuperset(INTO_VALUES):
        refuse(inside.attention, part, "a layer whose attention has v_proj and o_proj", at)
    return NormedSums(
        self_attn=inside.attention,
        mlp=inside.mlp,
        norms=(inside.norm("post_attention_layernorm", at), inside.norm("output_layernorm", at)),
        alpha=alpha,
        beta=beta,
        std=at.shape.initializer_range,
        name=inside.name,
    )
