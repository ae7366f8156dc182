"""What of a teacher's layers a student is compared with, beside the words that it says.

The one way to these objectives, and to the corrector's: nothing else of the package imports their files, and
what they read of a model are taps (core/taps.py). docs/howto/teacher_layers.md says when they help, which is
seldom.
The terms are objectives/intermediate.py's; here they are made for two models, and counted.
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
    """(a batch, what to find inside) -> what the teacher says at its supervised rows."""


@dataclass(frozen=True)
class Read:
    """Bytes that comparing layers takes.

    tapped    of both models' layers, from their forward until the loss is made
    compared  these, the gradients of the student's, and a block of relations, when the words are done with
    later     the gradients, which wait for their layers' backward
    trained   numbers that are learnt with the model: projections
    """

    tapped: int
    compared: int
    later: int
    trained: int


@dataclass(frozen=True)
class Inside:
    """What is compared: the weight of each kind (0: not at all), and which layers.

    layers  (student's, teacher's), from 1; none: both last ones
    heads   relation heads; None: as many as relation_heads finds
    """

    relations: float = 0.0
    hidden: float = 0.0
    apart: Literal["mse", "cosine"] = "mse"
    layers: tuple[tuple[int, int], ...] = ()
    heads: int | None = None
    seed: int = 0

    def objective(self, model: Decoder, teacher: Decoder, says: Says, words: Words) -> Intermediate:
        """words and terms; the teacher is asked once for both.

        Raises ConfigError for layers and heads that one of the two hasn't, and for projections of a model
        whose weights are divided.
        """
        from unfreeze.models.blocks.taps import Taps

        terms = self.terms(model, teacher)
        asked = frozenset(tap for term in terms for tap in term.taps("teacher"))

        def ask(batch: Batch) -> tuple[LogProbs, dict[Tap, Tensor]]:
            taps = Taps(asked)
            return says(batch, taps), taps.found

        return Intermediate(words, ask, terms)

    def terms(self, model: Decoder, teacher: Decoder) -> list[Term]:
        """The terms, with projections where hidden states are compared, which the model has from now on."""
        terms: list[Term] = []
        pairs = self._pairs(model, teacher)
        if self.relations:
            terms.append(Relations(self.relations, pairs, self._heads(model, teacher, pairs)))
        if self.hidden:
            projections = attach_projections(model, teacher.shape.hidden_size, pairs, self.seed)
            terms.append(Hidden(self.hidden, pairs, projections, self.apart))
        return terms

    def read(self, model: Decoder, teacher: Decoder, tokens: int, longest: int, compute_bytes: int) -> Read:
        """For the plan; both models may be on "meta".

        own and their are the tapped tensors, T · width each. Of relations three tensors of a block of scores
        (block_bytes), and of one name both models' numbers, and the gradient twice, in float32. Hidden states
        are compared in float32: x, W x, y and their difference.
        """
        from unfreeze.kernels.attention.relations import block_bytes
        from unfreeze.models.widths import tap_width

        pairs, D, E = self._pairs(model, teacher), model.shape.hidden_size, teacher.shape.hidden_size
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
    """(the student's, the teacher's) of every relation."""
    from unfreeze.core.taps import Tap

    return [(Tap(pair.student, name), Tap(pair.teacher, name)) for pair in pairs for name in RELATIONS]


def attach_projections(model: Decoder, width: int, pairs: tuple[Pair, ...], seed: int) -> nn.ModuleDict:
    """W [E, D] in float32 for each pair's hidden states, a part of what trains.

    It begins as the identity where E = D, else with orthogonal rows or columns, the same for the same seed.
    A run's saves hold it, as they hold all that the optimizer moves. A checkpoint has none of it, and neither
    has an adapter's folder: it is for training alone.
    Raises ConfigError where weights are divided among processes.
    """
    import torch
    from torch import nn

    from unfreeze.adapters.snapshot import BESIDE

    if model.sharded:
        raise ConfigError(
            "place.weights is sharded, and --distillation.hidden learns a matrix that is not divided",
            next="--distillation.relations, which learns none, or --place.weights device",
        )

    class Projection(nn.Linear):
        """Left out where a model's tensors are listed for a checkpoint."""

        def _save_to_state_dict(self, destination: object, prefix: str, keep_vars: bool) -> None:
            pass

    found = nn.ModuleDict()
    for pair in pairs:
        projection = Projection(
            model.shape.hidden_size, width, bias=False, device="meta", dtype=torch.float32
        )
        projection = projection.to_empty(device="cpu")  # without the draws of its own beginning
        with torch.no_grad():
            if width == model.shape.hidden_size:
                nn.init.eye_(projection.weight)
            else:
                drawn = torch.Generator().manual_seed(seed + pair.student)
                nn.init.orthogonal_(projection.weight, generator=drawn)
        found[str(pair.student)] = projection.to(model.device)
    model.add_module(BESIDE[:-1], found)
    return found
