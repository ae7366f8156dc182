"""What a model holds and multiplies, split as machines split it: routed experts and the rest.

D model width, I expert width, E experts, K experts per token, H heads.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from unfreeze.core.torch_types import named_modules
from unfreeze.models import Decoder
from unfreeze.models.blocks.experts import Experts
from unfreeze.models.blocks.linear import Linear
from unfreeze.models.targets import group_of
from unfreeze.parallel.placement.residency import come_whole


@dataclass(frozen=True)
class Counts:
    """Bytes as they lie in memory (packed weights packed), and numbers that a token is multiplied with.

    experts_bytes, rest_bytes   of routed experts, and of everything else
    layer_experts, layer_rest   the same of the largest layer
    ends_bytes                  of the rest: embeddings and head, which no layer holds
    come_whole                  whether a layer's experts cannot come in groups
    packed                      whether experts are packed, so that they are expanded at each use
    dense       weights of a token's matrix products in layers, routed experts and routers aside
    router      weights of routers
    attention   2 · H · (query + value width), summed over layers: FLOP per pair of tokens, scores and sums
    """

    hidden_size: int
    vocab_size: int
    num_layers: int
    moe_layers: int
    num_experts: int
    experts_per_token: int
    expert_width: int
    experts_bytes: int
    rest_bytes: int
    layer_experts: int
    layer_rest: int
    ends_bytes: int
    packed: bool
    dense: int
    router: int
    attention: int
    come_whole: bool = False

    def can_come_in(self, buffer: int) -> bool:
        """Whether a layer's experts can come in groups of so many bytes: one of them fits."""
        # a buffer's tensors begin at multiples of 64 bytes, and an expert has some twelve
        return not self.come_whole and self.layer_experts // max(1, self.num_experts) + 1024 <= buffer

    @property
    def expert_weights(self) -> int:
        """Of one expert: gate, up and down, 3 · D · I."""
        return 3 * self.hidden_size * self.expert_width


def counts(model: Decoder) -> Counts:
    """Of a model, which may be on meta and has no adapters yet."""
    shape = model.shape
    experts = [
        sum(_bytes(module) for module in layer.modules() if isinstance(module, Experts))
        for layer in model.layers
    ]
    whole = [_bytes(layer) for layer in model.layers]
    rest = [all_of - routed for all_of, routed in zip(whole, experts, strict=True)]
    base = _bytes(model)
    widths = 2 * shape.head_dim if shape.mla is None else shape.mla.nope + shape.mla.rope + shape.mla.value
    return Counts(
        hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        num_layers=shape.num_layers,
        moe_layers=sum(size > 0 for size in experts),
        num_experts=shape.num_experts,
        experts_per_token=shape.experts_per_token,
        expert_width=shape.moe_intermediate_size,
        experts_bytes=sum(experts),
        rest_bytes=base - sum(experts),
        layer_experts=max(experts),
        layer_rest=max(rest),
        ends_bytes=base - sum(whole),
        packed=any(m.gate_up_proj.codec is not None for m in model.modules() if isinstance(m, Experts)),
        dense=sum(
            m.in_features * m.out_features
            for name, m in named_modules(model)
            if isinstance(m, Linear) and name != "lm_head"
        ),
        router=sum(p.numel() for name, p in model.named_parameters() if group_of(name) == "router"),
        come_whole=come_whole(model.layers),
        attention=shape.num_layers * 2 * shape.num_heads * widths,
    )


def _bytes(module: nn.Module) -> int:
    """Of its parameters and buffers; a tied head counts once."""
    return sum(tensor.nbytes for tensor in [*module.parameters(), *module.buffers()])
