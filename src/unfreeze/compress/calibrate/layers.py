"""A checkpoint's model with one layer in memory at a time, and rows that go through it layer by layer.

Every batch goes through a layer before the next layer is read, so the files are read once. In memory are the
embedding, the head, one layer as its files hold it, and the hidden states of all rows: 4 bytes · T · D.

T tokens, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from unfreeze import models
from unfreeze.checkpoint.manifest import Manifest
from unfreeze.checkpoint.resolve import Placement, resolve
from unfreeze.checkpoint.stream import stream
from unfreeze.core.batch import Batch
from unfreeze.core.torch_types import buffers_of, parameters_of
from unfreeze.models.blocks.experts import Experts
from unfreeze.models.blocks.linear import Linear
from unfreeze.models.blocks.passes import PackedPass
from unfreeze.models.layer import Layer
from unfreeze.parallel.placement.place import hand_over


@dataclass
class State:
    """One batch on its way: its pass, which all layers share, and its hidden states [T, D]."""

    batch: Batch
    run: PackedPass
    x_TD: Tensor


class Layers:
    """The model of a checkpoint, float32 arithmetic, without its layers' weights until one is `loaded`.

    Raises CheckpointError if the files are not the model's.
    """

    def __init__(self, manifest: Manifest):
        shape = models.shape(manifest.config)
        self.model = models.meta_model(shape, manifest, torch.float32, as_stored=True)
        tied = models.tied(shape)
        self._params = {
            name: (tensor.dtype, tuple(tensor.shape))
            for name, tensor in self.model.state_dict().items()
            if name not in tied
        }
        placements = resolve(
            manifest, models.rules(shape), self._params, ignore=models.ignored(shape), tied=tied
        )
        self._by_layer: dict[int | None, list[Placement]] = {}
        for placement in placements:
            self._by_layer.setdefault(self.layer_of(placement.param), []).append(placement)
        self._fill(self.model, None)

    def __len__(self) -> int:
        return len(self.model.layers)

    @staticmethod
    def layer_of(name: str) -> int | None:
        """The number of the layer of a parameter or a module; None outside of the layers."""
        pieces = name.split(".")
        return int(pieces[2]) if pieces[:2] == ["model", "layers"] else None

    @contextmanager
    def loaded(self, index: int) -> Generator[Layer]:
        """The layer with its weights, within this context only."""
        layer = self.model.layers[index]
        self._fill(layer, index)
        try:
            yield layer
        finally:
            for module in layer.modules():
                for name, tensor in list(parameters_of(module).items()):
                    if tensor is not None:
                        empty = torch.empty_like(tensor, device="meta")
                        parameters_of(module)[name] = nn.Parameter(empty, requires_grad=tensor.requires_grad)
                for name, tensor in list(buffers_of(module).items()):
                    if tensor is not None and name in module.state_dict(keep_vars=True):
                        buffers_of(module)[name] = torch.empty_like(tensor, device="meta")

    def _fill(self, owner: nn.Module, index: int | None) -> None:
        """Read the weights of a layer, or all that are outside of the layers."""
        placements = self._by_layer.get(index, [])
        names = {placement.param for placement in placements}
        meta = self.model.state_dict(keep_vars=True)
        tensors = {
            name: torch.empty(shape, dtype=dtype)
            for name, (dtype, shape) in self._params.items()
            if name in names
        }
        stream(placements, tensors)
        by_id = {id(meta[name]): tensor for name, tensor in tensors.items()}
        if index is not None:
            hand_over(owner, by_id, torch.device("cpu"))
            return
        for module in owner.modules():  # the layers stay on meta
            for name, old in list(parameters_of(module).items()):
                if old is not None and id(old) in by_id:
                    parameters_of(module)[name] = nn.Parameter(by_id[id(old)], requires_grad=False)
            for name, old in list(buffers_of(module).items()):
                if old is not None and id(old) in by_id:
                    buffers_of(module)[name] = by_id[id(old)]

    @torch.no_grad()
    def begin(self, batches: Sequence[Batch]) -> list[State]:
        """The rows' states before the first layer."""
        states: list[State] = []
        for batch in batches:
            self.model.assigned.documents(batch.lengths())
            run = self.model.packed_pass(batch)
            states.append(State(batch, run, self.model.model.embed_tokens(batch.tokens_T)))
        return states

    @torch.no_grad()
    def last(self, states: Sequence[State]) -> list[Tensor]:
        """Hidden states after the last layer -> after the final norm, as the head reads them."""
        return [self.model.model.norm(state.x_TD) for state in states]


@torch.no_grad()
def through(layer: Layer, states: Sequence[State]) -> None:
    """Move all states through a loaded layer."""
    for state in states:
        state.x_TD = layer(state.x_TD, state.run)


def hidden_states(
    layers: Layers, batches: Sequence[Batch], change: Callable[[Layer, int], None] | None = None
) -> list[Tensor]:
    """The states that the head reads, [T, D] for each batch.

    change: (a loaded layer, its number) may write other weights into it.
    """
    states = layers.begin(batches)
    for index in range(len(layers)):
        with layers.loaded(index) as layer:
            if change is not None:
                change(layer, index)
            through(layer, states)
    return layers.last(states)


def memory_of(manifest: Manifest, tokens: int) -> int:
    """Bytes of a calibration on so many tokens.

    All outside of the layers and the largest layer, as their files hold them; the states, twice: of experts
    their inputs too; H of every width of a layer; float64 copies of the largest H while it is factored.
    """
    model = models.meta_model(models.shape(manifest.config), manifest, torch.float32, as_stored=True)
    by_layer = [sum(tensor.nbytes for tensor in layer.state_dict().values()) for layer in model.layers]
    rest = sum(tensor.nbytes for tensor in model.state_dict().values()) - sum(by_layer)
    widths = [
        [linear.in_features for linear in layer.modules() if isinstance(linear, Linear)]
        + [
            size
            for experts in layer.modules()
            if isinstance(experts, Experts)
            for size in (experts.hidden_size, experts.intermediate_size)
        ]
        for layer in model.layers
    ]
    hessians = max((sum(4 * width**2 for width in own) for own in widths), default=0)
    widest = max((width for own in widths for width in own), default=0)
    states = 2 * 4 * tokens * model.shape.hidden_size
    return rest + max(by_layer, default=0) + hessians + 4 * 8 * widest**2 + states
