"""The reference of a policy: the model as it was when training began, frozen.

    base       adapters that start with B = 0: the model with its adapters disabled, without a second copy
    adapters   adapters that continue from others: a copy of these, swapped in for the trained ones
    copy       every weight trains: a copy of the model, which the plan counts

It runs once per micro-batch, between the policy's forward and backward passes; or once for all documents
before the first step (kept.py).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from unfreeze.core.errors import ConfigError
from unfreeze.teach.second import Beside, Second

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from unfreeze.checkpoint.manifest import Manifest
    from unfreeze.core.batch import Batch
    from unfreeze.models import Decoder
    from unfreeze.objectives.preference import Objective, Reference
    from unfreeze.parallel.plan.aside import Aside

Kind = Literal["base", "adapters", "copy"]
"""How the initial model is kept; see the top of this file."""
KEPT_AS: dict[Kind, str] = {
    "base": "adapters off",
    "adapters": "a copy of its adapters",
    "copy": "a copy of every weight",
}


def compares(loss: str, how: str) -> str:
    """Describe the loss and its reference in a line."""
    return f"compares: {loss}, with the model as it began ({how})"


Measure = Callable[["Tensor", "nn.Module", "Batch"], "Tensor"]
"""(hidden_TD, lm_head, batch) -> outputs of the reference, without gradient."""


class AsBegun(Second):
    """The initial model as the second model of a run.

    minimise  reference outputs -> objective
    loss      the objective in words
    measure   the outputs. None: l of each document, float64 [S]; for a policy, token_log_p over the sampler's
              words (objectives/log_p.py), float64 [N]
    """

    def __init__(
        self,
        kind: Kind,
        minimise: Callable[[Reference], Objective],
        *,
        loss: str = "",
        measure: Measure | None = None,
    ):
        self.kind: Kind = kind
        self.minimise, self.loss, self.measure = minimise, loss, measure

    def said(self, start: Manifest) -> str:
        """'compares: dpo, beta 0.1, with the model as it began (adapters off)'."""
        return compares(self.loss, KEPT_AS[self.kind])

    def aside(self, beside: Beside) -> Aside:
        """Return its memory for the plan: a copy's weights, and always the forward pass."""
        from unfreeze.models import meta_model, shape
        from unfreeze.parallel.plan.aside import aside_of

        start = beside.start
        model = meta_model(shape(start.config), start, beside.dtype)
        return aside_of(model, beside.tokens, beside.longest, beside.device, shared=self.kind != "copy")

    def objective(self, model: Decoder, device: torch.device, dtype: str) -> Objective:
        """Keep the model as it is now, and return the objective.

        A resumed run calls this before its save is loaded, so that it is the same model each time.
        Raises ConfigError if every weight trains and they are sharded over processes.
        """
        from unfreeze.adapters import attached

        if self.kind == "base":
            return self.minimise(partial(asked, model, {}, measure=self.measure))
        if self.kind == "adapters":
            copies: dict[str, Any] = copy.deepcopy(attached(model))
            for adapter in copies.values():
                adapter.requires_grad_(False)
            return self.minimise(partial(asked, model, copies, measure=self.measure))
        if model.sharded or model.exchanges:
            raise ConfigError(
                "the reference is a copy of every weight, but the weights are sharded over processes",
                next="--train adapters, whose reference is the model with its adapters off; or --loss simpo",
            )
        frozen = copy.deepcopy(model).requires_grad_(False)
        return self.minimise(partial(asked, frozen, None, measure=self.measure))


def asked(
    model: Decoder, adapters: dict[str, Any] | None, batch: Batch, measure: Measure | None = None
) -> Tensor:
    """Return the measure of a batch with these adapters in the model (None: its own)."""
    from contextlib import nullcontext

    import torch

    from unfreeze.adapters import with_adapters
    from unfreeze.models.recompute import plain
    from unfreeze.objectives.log_p import log_probabilities

    instead: Any = nullcontext() if adapters is None else with_adapters(model, adapters)
    with torch.no_grad(), instead, model.looking():
        hidden_TD = model.hidden(batch, recompute=plain)
        return (measure or log_probabilities)(hidden_TD, model.lm_head, batch)
