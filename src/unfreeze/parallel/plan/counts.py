"""Bytes and multiplications of a model, divided into routed experts and all other weights ("rest").

D model width, I expert width, E experts, K experts per token, H heads.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from unfreeze.core.torch_types import named_modules
from unfreeze.models import Decoder
from unfreeze.models.blocks.attention import Attending
from unfreeze.models.blocks.compressed import CompressedAttention, EntryIndexer
from unfreeze.models.blocks.experts import Experts
from unfreeze.models.blocks.linear import Linear
from unfreeze.models.blocks.mla import MLA
from unfreeze.models.blocks.norm import RMSNorm
from unfreeze.models.targets import group_of
from unfreeze.parallel.placement.residency import come_whole

OWN_INPUT = ("o_proj", "down_proj", "fc2")
"""Linear layers whose input no other one reads; the rest read one of a layer's two normed inputs."""


@dataclass(frozen=True)
class Widths:
    """Numbers of a token between products, summed over layers; what passes over memory are counted with.

    into, out   inputs and outputs of linear layers, without the head
    inputs      each different input once
    linears     number of linear layers
    activated   outputs of dense MLPs' activations, shared experts included
    rotated     queries and keys
    normed      norms of queries, keys and latents: beside two of D a layer
    joined      keys of MLA's heads, joined of two parts
    """

    into: int = 0
    out: int = 0
    inputs: int = 0
    linears: int = 0
    activated: int = 0
    rotated: int = 0
    normed: int = 0
    joined: int = 0


@dataclass(frozen=True)
class Counts:
    """Bytes in memory (packed weights stay packed), and weights that a token is multiplied with.

    experts_bytes, rest_bytes   of routed experts, and of everything else
    layer_experts, layer_rest   the same of the largest layer
    ends_bytes                  part of rest: embeddings and head, which belong to no layer
    come_whole                  True if a layer's experts cannot be loaded in groups
    packed                      True if experts are packed, so that they are expanded at each use
    dense       weights of a token's matrix products in layers, without routed experts and routers
    router      weights of routers
    attention   2 · H · (query + value width), summed over layers: FLOP per pair of tokens, scores and
                sums
    windows     (window, its part of `attention`); None: a token sees its whole document. (): all of them
    frozen      True if some weights stay frozen where every weight trains
    passes      of a token through a layer's experts; its other products in `dense` and `router` count them
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
    windows: tuple[tuple[int | None, int], ...] = ()
    widths: Widths = Widths()
    latent: int = 0
    matrices: int = 3
    frozen: bool = False
    passes: int = 1

    @property
    def mixtures(self) -> int:
        """Mixtures of experts that a token goes through: a layer of a chain has one a pass."""
        return self.moe_layers * self.passes

    @property
    def active(self) -> int:
        """Weights that a token is multiplied with, head included; one used in two passes counts twice."""
        routed = self.mixtures * self.experts_per_token * self.expert_weights
        return self.dense + self.router + routed + self.hidden_size * self.vocab_size

    def pairs(self, length: float) -> float:
        """Attention's FLOP of one token in a document of `length`, which sees half of it, or of its window.

        A window of W tokens is full but for the first W: W - W² / 2 L.
        """
        seen = 0.0
        for window, flop in self.windows or ((None, self.attention),):
            within = length if window is None else min(window, length)
            seen += flop * (within - within**2 / (2 * length))
        return seen

    @property
    def expanded(self) -> float:
        """Bytes that expanding one packed weight of an expert moves: its codes, and 2 written."""
        weights = self.moe_layers * self.num_experts * self.expert_weights
        return self.experts_bytes / weights + 2 if weights else 0.0

    def can_come_in(self, buffer: int) -> bool:
        """Return True if a layer's experts can be loaded in groups of `buffer` bytes: one must fit."""
        # tensors in a buffer are aligned to 64 bytes, and an expert has about twelve
        return not self.come_whole and self.layer_experts // max(1, self.num_experts) + 1024 <= buffer

    @property
    def expert_weights(self) -> int:
        """Weights of one expert: gate, up and down, 3 · D · I; or up and down, of a narrower input."""
        return self.matrices * self.expert_input * self.expert_width

    @property
    def expert_input(self) -> int:
        """Width that experts see."""
        return self.latent or self.hidden_size


def counts(model: Decoder) -> Counts:
    """Count a model, which may be on meta and must not have adapters yet."""
    shape = model.shape
    experts = [
        sum(_bytes(module) for module in layer.modules() if isinstance(module, Experts))
        for layer in model.layers
    ]
    whole = [_bytes(layer) for layer in model.layers]
    rest = [all_of - routed for all_of, routed in zip(whole, experts, strict=True)]
    base = _bytes(model)
    widths = 2 * shape.head_dim if shape.mla is None else shape.mla.nope + shape.mla.rope + shape.mla.value
    windows = _windows(model, 2 * shape.num_heads * widths)
    passes, mixtures = shape.moe.passes if shape.moe else 1, model.moe_layers().values()
    again = len(mixtures) // max(1, len({id(moe.gate) for moe in mixtures}))  # passes that share a gate
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
            m.in_features * m.out_features * (passes if ".shared_experts." in name else 1)
            for name, m in named_modules(model)
            if isinstance(m, Linear) and name != "lm_head"
        ),
        router=sum(p.numel() for name, p in model.named_parameters() if group_of(name) == "router") * again,
        come_whole=come_whole(model.layers),
        attention=sum(flop for _, flop in windows),
        windows=windows,
        widths=_widths(model),
        latent=shape.moe.latent if shape.moe else 0,
        matrices=shape.moe.matrices if shape.moe else 3,
        frozen=stays_frozen(model),
        passes=passes,
    )


def stays_frozen(model: Decoder) -> bool:
    """True if weights stay frozen where every weight trains: DeepSeek-V4's indexers, which cannot train."""
    return any(isinstance(module, EntryIndexer) for module in model.modules())


def _windows(model: Decoder, of_layer: int) -> tuple[tuple[int | None, int], ...]:
    """Return (window, FLOP per pair of the layers with it). of_layer: of one layer with attention."""
    by_window: dict[int | None, int] = {}
    for layer in model.layers:
        attending = [
            module for module in layer.modules() if isinstance(module, (Attending, MLA, CompressedAttention))
        ]
        if not attending:
            continue
        window = None if isinstance(attending[0], MLA) else attending[0].mask.window
        if isinstance(attending[0], Attending) and attending[0].blocks is not None:
            window = attending[0].blocks.limit  # as many pairs, but for half a block
        by_window[window] = by_window.get(window, 0) + of_layer
    return tuple(by_window.items())


def _widths(model: Decoder) -> Widths:
    shape, D = model.shape, model.shape.hidden_size
    linears = {
        name: module
        for name, module in named_modules(model)
        if isinstance(module, Linear) and name != "lm_head"
    }
    own = [
        module.in_features
        for name, module in linears.items()
        if name.endswith(OWN_INPUT) or module.in_features != D
    ]
    heads = {"q_norm": shape.num_heads, "k_norm": shape.num_kv_heads}
    normed = 0
    for name, module in named_modules(model):
        last = name.rpartition(".")[2]
        if isinstance(module, RMSNorm) and (last in heads or module.size != D):
            normed += module.size * (heads.get(last, 1) if module.size == shape.head_dim else 1)
    if shape.mla is None:
        rotated, joined = (shape.num_heads + shape.num_kv_heads) * shape.head_dim, 0
    else:
        joined = shape.num_heads * (shape.mla.nope + shape.mla.rope)
        rotated = joined + shape.mla.rope
    return Widths(
        into=sum(module.in_features for module in linears.values()),
        out=sum(module.out_features for module in linears.values()),
        inputs=2 * D * shape.num_layers + sum(own),
        linears=len(linears),
        activated=sum(
            linear.in_features for name, linear in linears.items() if name.endswith(("down_proj", "fc2"))
        ),
        rotated=shape.num_layers * rotated,
        normed=normed,
        joined=shape.num_layers * joined,
    )


def _bytes(module: nn.Module) -> int:
    """Return the bytes of its parameters and buffers; a tied head counts once."""
    return sum(tensor.nbytes for tensor in [*module.parameters(), *module.buffers()])
