"""The cost of a second model (a teacher or a reference) beside the one that trains.

It is frozen, and runs forward once per micro-batch, between the forward and the backward of the trained
model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from unfreeze.models.chunks import chunk_tokens
from unfreeze.parallel.plan.counts import Counts, counts
from unfreeze.parallel.plan.sizes import measure_sizes

if TYPE_CHECKING:
    from unfreeze.models import Decoder, Shape


@dataclass(frozen=True)
class Aside:
    """Bytes of a second model, and of the loss that reads it.

    stays       its weights, during the whole run
    workspace   its experts' scratch, which both models use one after the other
    forward     additional bytes at the worst moment of its forward
    outputs     its outputs for a micro-batch, which live until the loss is computed
    loss_rows, loss_bytes  rows of the largest block of logits, and bytes alive per logit of it (both
                           models
                together) if it differs from cross entropy's; 0: it does not
    tapped      activations that the loss reads from both models' layers; compared: these with gradients
                and what their comparison needs, once the token loss is done; later: of these, what waits for
                backward
    learnt      parameters of the loss itself: projections
    counts      of the second model, for the seconds of its forward; None: there is none
    shape       its sizes
    """

    stays: int = 0
    workspace: int = 0
    forward: int = 0
    outputs: int = 0
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
    """Return the Aside of a model on meta, without adapters, that gets micro-batches of `tokens`.

        more    bytes of an adapter beside it
        shared  it is the trained model itself, whose weights are already counted

    forward = the input and the output of a layer, 2 · T · D; plus, for the tokens that go through it at once,
    the activations of its largest part, attention or MLP (everything else is freed, as no backward follows);
    plus rotary tables.
    """
    sizes = measure_sizes(model, None, device.type)
    shape = model.shape
    chunk = chunk_tokens(shape.num_experts, shape.experts_per_token, device.type)
    at_once = tokens if chunk is None else min(tokens, max(chunk, longest))
    stream = tokens * sizes.stream_size * sizes.compute_bytes
    return Aside(
        stays=more + (0 if shared else sizes.base),
        workspace=sizes.workspace,
        forward=2 * stream + at_once * sizes.forward + tokens * sizes.tables,
        outputs=stream,
        loss_rows=loss_rows,
        loss_bytes=loss_bytes,
        counts=counts(model),
        shape=shape,
    )
