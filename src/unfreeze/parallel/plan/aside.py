"""What a second model takes that stands beside the one that trains: a teacher, a reference.

It is frozen, and runs forward once a micro-batch, between the forward and the backward of the model that
trains.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from unfreeze.models.blocks.bytes import Block
from unfreeze.models.chunks import chunk_tokens
from unfreeze.parallel.plan.counts import Counts, counts
from unfreeze.parallel.plan.sizes import measure_sizes

if TYPE_CHECKING:
    from unfreeze.models import Decoder, Shape


@dataclass(frozen=True)
class Aside:
    """Bytes of a second model, and of the loss that reads it.

    stays       of its weights, during the whole run
    workspace   its experts' scratch, which both models use one after the other
    forward     more at the worst moment of its forward
    said        of what it said of a micro-batch, which lives until the loss is made
    loss_rows, loss_bytes  rows of the largest block of logits, and bytes alive per logit of it, both models'
                together, where that is not cross entropy's; 0: it is
    tapped      of what the loss reads of both models' layers; compared: with gradients and what it takes to
                compare them, once the words are done with; later: of these what waits for backward
    learnt      numbers that the loss learns besides the model: projections
    counts      of the model that is asked, for the seconds of its forward; None: none is asked
    shape       its sizes
    """

    stays: int = 0
    workspace: int = 0
    forward: int = 0
    said: int = 0
    loss_rows: int = 0
    loss_bytes: int = 0
    tapped: int = 0
    compared: int = 0
    later: int = 0
    learnt: int = 0
    counts: Counts | None = None
    shape: Shape | None = field(default=None, compare=False)


def aside_of(
    model: Decoder,
    tokens: int,
    longest: int,
    device: torch.device,
    *,
    more: int = 0,
    shared: bool = False,
    loss_rows: int = 0,
    loss_bytes: int = 0,
) -> Aside:
    """Of a model on meta, without adapters, that is asked about micro-batches of `tokens`.

    more    bytes of an adapter beside it
    shared  it is the model that trains, whose weights are counted already

    forward = the input and the output of a layer, 2 · T · D; of the tokens that go through it at once, what
    its largest part makes, attention or MLP (without a backward to come, the rest is freed); rotary tables.
    """
    sizes = measure_sizes(model, None, device.type)
    shape = model.shape
    chunk = chunk_tokens(shape.num_experts, shape.experts_per_token, device.type)
    at_once = tokens if chunk is None else min(tokens, max(chunk, longest))
    stream = tokens * sizes.hidden_size * sizes.compute_bytes
    dtype = model.dtype
    blocks = (block for layer in model.layers for block in layer.children() if isinstance(block, Block))
    part = max(block.bytes(dtype, device.type).held for block in blocks)
    return Aside(
        stays=more + (0 if shared else sizes.base),
        workspace=sizes.workspace,
        forward=2 * stream + at_once * part + tokens * sizes.tables,
        said=stream,
        loss_rows=loss_rows,
        loss_bytes=loss_bytes,
        counts=counts(model),
        shape=shape,
    )
