"""Compare a teacher's layers with the student's, in addition to their outputs.

This is the only access to these objectives and to the corrector's: nothing else in the package imports their
files, and they read a model through taps (core/taps.py). docs/howto/teacher_layers.md says when they help,
which is rarely.
The terms are in objectives/intermediate.py; here they are built for two models, and their memory is counted.
T tokens of a micro-batch, D and E widths of the student and of the teacher.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from unfreeze.core.errors import ConfigError
from unfreeze.objectives.corrector import corrector
from unfreeze.objectives.intermediate import (
    RELATIONS,
    Hidden,
    Intermediate,
    Pair,
    Relations,
    Term,
    pairs_of,
    relation_heads,
)

__all__ = ["Inside", "Read", "attach_projections", "corrector"]

if TYPE_CHECKING:
    from torch import Tensor, nn

    from unfreeze.core.batch import Batch
    from unfreeze.core.taps import Tap
    from unfreeze.models import Decoder
    from unfreeze.models.blocks.taps import Taps
    from unfreeze.objectives.divergence import LogProbs
    from unfreeze.objectives.intermediate import Words

    Says = Callable[[Batch, Taps], LogProbs]
    """(a batch, taps to fill) -> the teacher's output at its supervised rows."""


@dataclass(frozen=True)
class Read:
    """Bytes needed to compare layers.

    tapped    activations of both models' layers, from their forward until the loss is computed
    compared  these, the student's gradients, and a block of relations, after the token loss is done
    later     the gradients, which wait for their layers' backward
    trained   parameters learned with the model: projections
    """

    tapped: int
    compared: int
    later: int
    trained: int


@dataclass(frozen=True)
class Inside:
    """Settings of the comparison: the weight of each kind (0: off), and the layers.

    layers  (student's, teacher's), from 1; empty: both last ones
    heads   relation heads; None: the number that relation_heads finds
    """

    relations: float = 0.0
    hidden: float = 0.0
    apart: Literal["mse", "cosine"] = "mse"
    layers: tuple[tuple[int, int], ...] = ()
    heads: int | None = None
    seed: int = 0

    def objective(self, model: Decoder, teacher: Decoder, says: Says, words: Words) -> Intermediate:
        """Return the objective with the token loss and these terms; the teacher runs once for both.

        Raises ConfigError for layers and heads that one of the models lacks, and for projections of a model
        whose weights are sharded.
        """
        from unfreeze.models.blocks.taps import Taps

        terms = self.terms(model, teacher)
        wanted = frozenset(tap for term in terms for tap in term.taps("teacher"))

        def ask(batch: Batch) -> tuple[LogProbs, dict[Tap, Tensor]]:
            taps = Taps(wanted)
            return says(batch, taps), taps.found

        return Intermediate(words, ask, terms)

    def terms(self, model: Decoder, teacher: Decoder) -> list[Term]:
        """Return the terms; if hidden states are compared, attach their projections to the model."""
        terms: list[Term] = []
        pairs = self._pairs(model, teacher)
        if self.relations:
            terms.append(Relations(self.relations, pairs, self._heads(model, teacher, pairs)))
        if self.hidden:
            projections = attach_projections(model, teacher.shape.stream_size, pairs, self.seed)
            terms.append(Hidden(self.hidden, pairs, projections, self.apart))
        return terms

    def read(self, model: Decoder, teacher: Decoder, tokens: int, longest: int, compute_bytes: int) -> Read:
        """Return the memory for the plan; both models may be on "meta".

        own and their are the tapped tensors, T · width each. For relations: three tensors of a block of
        scores (block_bytes), and for one name both models' values, plus the gradient twice, in float32.
        Hidden states are
        compared in float32: x, W x, y and their difference.
        """
        from unfreeze.kernels.attention.relations import block_bytes
        from unfreeze.models.widths import tap_width

        pairs, D, E = self._pairs(model, teacher), model.shape.stream_size, teacher.shape.stream_size
        own = their = block = trained = 0
        if self.relations:
            heads = self._heads(model, teacher, pairs)
            widths = [
                (tap_width(model, own_tap), tap_width(teacher, their_tap))
                for own_tap, their_tap in _taps(pairs)
            ]
            own, their = (sum(each) for each in zip(*widths, strict=True))
            block = 3 * block_bytes(heads, tokens, longest) + 4 * tokens * max(3 * a + b for a, b in widths)
        if self.hidden:
            own, their, trained = own + len(pairs) * D, their + len(pairs) * E, len(pairs) * D * E
            block = max(block, 4 * tokens * (D + 3 * E))
        stream = tokens * compute_bytes
        return Read(stream * (own + their), stream * (2 * own + their) + block, stream * own, trained)

    def _pairs(self, model: Decoder, teacher: Decoder) -> tuple[Pair, ...]:
        return pairs_of(
            model.shape.num_layers, teacher.shape.num_layers, self.layers, option="--distillation.layers"
        )

    def _heads(self, model: Decoder, teacher: Decoder, pairs: tuple[Pair, ...]) -> int:
        from unfreeze.models.widths import tap_width

        widths = [
            width
            for own, their in _taps(pairs)
            for width in (tap_width(model, own), tap_width(teacher, their))
        ]
        return relation_heads(widths, self.heads)


def _taps(pairs: tuple[Pair, ...]) -> list[tuple[Tap, Tap]]:
    """Return (the student's, the teacher's) tap of every relation."""
    from unfreeze.core.taps import Tap

    return [(Tap(pair.student, name), Tap(pair.teacher, name)) for pair in pairs for name in RELATIONS]


def attach_projections(model: Decoder, width: int, pairs: tuple[Pair, ...], seed: int) -> nn.ModuleDict:
    """Attach a trainable W [E, D] in float32 for each pair's hidden states.

    It starts as the identity if E = D, else with orthogonal rows or columns; equal seeds give equal values. A
    run's saves contain it, like everything the optimizer updates. Checkpoints and adapter folders do not: it
    only serves training.
    Raises ConfigError if weights are sharded over processes.
    """
    import torch
    from torch import nn

    from unfreeze.adapters.snapshot import BESIDE

    if model.sharded:
        raise ConfigError(
            "place.weights is sharded, but --distillation.hidden trains a matrix that cannot be sharded",
            next="use --distillation.relations, which trains none, or --place.weights device",
        )

    class Projection(nn.Linear):
        """A linear layer that is left out when a model's tensors are listed for a checkpoint."""

        def _save_to_state_dict(self, destination: object, prefix: str, keep_vars: bool) -> None:
            pass

    projections = nn.ModuleDict()
    for pair in pairs:
        projection = Projection(
            model.shape.stream_size, width, bias=False, device="meta", dtype=torch.float32
        )
        projection = projection.to_empty(device="cpu")  # skip the default initialisation
        with torch.no_grad():
            if width == model.shape.stream_size:
                nn.init.eye_(projection.weight)
            else:
                drawn = torch.Generator().manual_seed(seed + pair.student)
                nn.init.orthogonal_(projection.weight, generator=drawn)
        projections[str(pair.student)] = projection.to(model.device)
    model.add_module(BESIDE[:-1], projections)
    return projections
