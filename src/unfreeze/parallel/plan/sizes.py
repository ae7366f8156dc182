"""The sizes of a model that a plan needs: sums over its blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from torch import nn

from unfreeze.config.lora import LoraConfig
from unfreeze.models import Decoder
from unfreeze.models.blocks.bytes import AttentionShape, Block
from unfreeze.models.indexers import mixtures_of_blocks, sparse_layers
from unfreeze.models.matrices import flop, hidden_matrices, workspace
from unfreeze.models.targets import dora_widths, largest_per_rank, per_rank
from unfreeze.models.whole import NONE_WHOLE, WholeSizes, whole_sizes
from unfreeze.parallel.placement.peers import rest_bytes
from unfreeze.parallel.placement.residency import bytes_of_expert, come_whole, streamed_bytes


@dataclass(frozen=True)
class Sizes:
    """A model in one compute dtype.

    base            bytes of parameters and buffers in memory (packed weights stay packed)
    expanded        the same with every packed weight expanded to the compute dtype
    elements        number of weights that train without adapters: all, or those of training.only
    passing         numbers of a gradient that is cut to the rows that train as it comes
    last_elements   of them, those whose gradients come last: of the first layer and, unless it is tied to
                    the head, of the embedding
    largest         weights of the largest tensor
    layer           bytes per token at the worst moment of the largest layer's backward
    held            bytes per token that each layer's forward keeps for its backward
    own             maximum bytes per token of a layer's backward beside what it holds
    kept            bytes per token of attention's and experts' outputs, layer by layer
    products        bytes per token of linear layers' outputs, likewise
    workspace       bytes of the expert op's scratch before adapters; 0 without experts, and on CUDA if they
                    are dense and read in place
    dense_per_rank, experts_per_rank   adapter parameters per unit of rank
    dense_largest, experts_largest     of them, those of the largest factor
    lengths         DoRA's m: trained numbers whatever the rank
    begins          True if A and B start from the weights: their first values stay, frozen, and products are
                    of twice the rank
    cast_per_rank   bytes per unit of rank that the expert op holds of one layer's adapter: copies of its
                    factors, their gradient, and on CUDA their columns of the workspace
    tables          bytes per token of the rotary cos and sin, float32
    forward         bytes per token of the largest part of a layer, attention or MLP, in a forward pass that
                    no backward follows
    cached          bytes of one position of one row of the KV cache
    state           bytes of a row of the cache that do not grow with its positions
    attention       of each kind of layer
    blocks          layers that choose blocks of tokens: (documents longer than that, bytes per token)
    choosing        layers whose indexer chooses keys, and those of them whose choice later layers use too
    largest_layer   weights of the largest layer
    ends            weights outside of layers: embedding, last norm and head
    streamed        bytes of routed experts in each layer that has some: what can be offloaded
    rest            bytes of each layer's other weights: what can be sharded over peers
    of_expert       for each of those layers, bytes of one expert in each offloaded tensor
    matrices        weights of the hidden layers' matrices: those that Muon moves (models/matrices.py)
    orthogonal      bytes of Muon's workspace at its largest matrix or stack
    orthogonal_flop of its orthogonalisation of all
    packing         bytes beside the model while its weights are packed as they are loaded; 0: none are
    rounding        bytes of merge-aware training (job/merge_aware.py), on one process
    come_whole      True if a layer's experts cannot be loaded in groups
    num_experts, experts_per_token, expert_width   of a layer of the whole model
    whole           of the modules that train fully beside adapters
    """

    base: int
    expanded: int
    compute_bytes: int
    hidden_size: int
    stream_size: int
    num_layers: int
    vocab_size: int
    layer: int
    held: tuple[int, ...] = ()
    own: int = 0
    kept: tuple[int, ...] = ()
    products: tuple[int, ...] = ()
    workspace: int = 0
    dense_per_rank: int = 0
    experts_per_rank: int = 0
    dense_largest: int = 0
    experts_largest: int = 0
    lengths: int = 0
    begins: bool = False
    cast_per_rank: int = 0
    elements: int = 0
    last_elements: int = 0
    passing: int = 0
    largest: int = 0
    tables: int = 0
    forward: int = 0
    cached: int = 0
    state: int = 0
    attention: tuple[AttentionShape, ...] = ()
    choosing: tuple[int, int] = (0, 0)
    blocks: tuple[tuple[int, int], ...] = ()
    streamed: tuple[int, ...] = ()
    rest: tuple[int, ...] = ()
    of_expert: tuple[tuple[int, ...], ...] = ()
    come_whole: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    expert_width: int = 0
    largest_layer: int = 0
    ends: int = 0
    packing: int = 0
    matrices: int = 0
    orthogonal: int = 0
    orthogonal_flop: int = 0
    rounding: int = 0
    whole: WholeSizes = NONE_WHOLE

    def adapter_parameters(self, rank: int | None, experts_rank: int | None) -> int:
        """Count adapter parameters: dense at `rank`, experts at `experts_rank` (or `rank`); 0 without.

        Modules that train fully beside them count too: all are float32, with gradients and moments.
        """
        if rank is None:
            return 0
        factors = self.dense_per_rank * rank + self.experts_per_rank * (experts_rank or rank)
        return factors + self.lengths + self.whole.elements

    def first_values(self, rank: int | None, experts_rank: int | None) -> dict[str, int]:
        """Bytes that a start from the weights holds beside the trained factors; {} without one.

        The first factors, and the joined ones of twice the rank that backward keeps.
        """
        others = self.lengths + self.whole.elements
        trained = self.adapter_parameters(rank, experts_rank) - others
        return {"adapter's first values": 4 * 3 * trained} if self.begins and trained > 0 else {}

    def chosen_keys(self, tokens: int, length: int, *, recomputed: bool) -> int:
        """Return the bytes of the keys chosen for `tokens`, in documents of up to `length`; int32 each.

        Backward needs those of all layers. If layers are recomputed, it needs those that later layers use
        too, and those of the layer it has reached. Chosen blocks stay in any case.
        """
        blocks = tokens * sum(of_token for limit, of_token in self.blocks if limit < length)
        keys, (every, followed) = max((shape.keys or 0 for shape in self.attention), default=0), self.choosing
        if not 0 < keys < length:
            return blocks
        return blocks + 4 * tokens * keys * (max(1, followed) if recomputed else every)

    def largest_factor(self, rank: int, experts_rank: int | None) -> int:
        """Return the number of elements in an adapter's largest tensor."""
        return max(self.dense_largest * rank, self.experts_largest * (experts_rank or rank))


def choosing(model: Decoder) -> tuple[int, int]:
    """As Sizes.choosing."""
    sparse = sparse_layers(model).values()
    return sum(part.indexer is not None for part in sparse), sum(part.followed for part in sparse)


def measure_sizes(model: Decoder, lora: LoraConfig | None, device: str = "cpu") -> Sizes:
    """Measure the sizes of a model for a kind of device ("cpu", "cuda").

    The model may be on meta and must not have adapters yet.
    """
    shape, dtype = model.shape, model.dtype
    parts = [part for layer in model.layers for part in layer.children() if isinstance(part, Block)]
    layers = [layer.bytes(dtype, device) for layer in model.layers]
    base = sum(t.nbytes for t in [*model.parameters(), *model.buffers()])  # a tied head is listed once
    packed = model.packed_weights()
    cast = max(layer.adapter_per_rank + layer.scratch_per_rank * dtype.itemsize for layer in layers)
    whole = whole_sizes(model, lora.train_too) if lora else NONE_WHOLE
    tied = shape.tied
    dense_per_rank, experts_per_rank = per_rank(lora, model) if lora else (0, 0)
    matrices = [] if lora else [weight.shape for weight in hidden_matrices(model).values()]
    dense_largest, experts_largest = largest_per_rank(model, lora.targets) if lora else (0, 0)
    widths = dora_widths(lora, model) if lora else {}
    begins = lora is not None and lora.start != "lora"
    cast *= 1 + begins
    # DoRA keeps x (W + ΔW)ᵀ beside its output
    more = [dtype.itemsize * sum(_of_layer(widths, index)) for index in range(len(layers))]
    return Sizes(
        base=base + whole.copies,
        expanded=base + sum(weight.numel * dtype.itemsize - weight.nbytes for weight in packed),
        elements=sum(p.numel() for p in model.parameters()),
        last_elements=_elements(model.layers[0]) + (0 if tied else _elements(model.model.embed_tokens)),
        largest=max(p.numel() for p in model.parameters()),
        compute_bytes=dtype.itemsize,
        hidden_size=shape.hidden_size,
        stream_size=shape.stream_size,
        num_layers=shape.num_layers,
        vocab_size=shape.vocab_size,
        layer=max(layer.peak + own for layer, own in zip(layers, more, strict=True)),
        held=tuple(layer.held + own for layer, own in zip(layers, more, strict=True)),
        own=max(layer.own for layer in layers),
        kept=tuple(layer.expensive for layer in layers),
        products=tuple(layer.linear for layer in layers),
        workspace=max(layer.scratch for layer in layers),
        dense_per_rank=dense_per_rank,
        experts_per_rank=experts_per_rank,
        dense_largest=dense_largest,
        experts_largest=experts_largest,
        lengths=sum(widths.values()),
        begins=begins,
        cast_per_rank=cast if experts_per_rank else 0,
        tables=8 * sum(len(rope.inverse_frequency) for rope in (shape.rope, *shape.ropes.values())),
        forward=max(part.bytes(dtype, device).held for part in parts),
        cached=model.cache_bytes(),
        state=model.state_bytes(),
        attention=tuple({layer.attention for layer in layers if layer.attention}),
        choosing=choosing(model),
        blocks=tuple((part.limit, part.chosen_bytes) for part in mixtures_of_blocks(model).values()),
        streamed=tuple(streamed_bytes(model.layers)),
        rest=tuple(rest_bytes(model.layers)),
        of_expert=tuple(bytes_of_expert(model.layers)),
        come_whole=come_whole(model.layers),
        num_experts=shape.num_experts,
        experts_per_token=shape.experts_per_token,
        expert_width=shape.moe_intermediate_size,
        largest_layer=max(map(_elements, model.layers)),
        ends=_elements(model) - sum(map(_elements, model.layers)),
        matrices=sum(map(prod, matrices)),
        orthogonal=max((workspace(each, 2 if device == "cuda" else 4) for each in matrices), default=0),
        orthogonal_flop=sum(map(flop, matrices)),
        whole=whole,
    )


def _of_layer(widths: Mapping[str, int], index: int) -> list[int]:
    return [width for name, width in widths.items() if f".layers.{index}." in f".{name}"]


def _elements(part: nn.Module) -> int:
    return sum(p.numel() for p in part.parameters())
