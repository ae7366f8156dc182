"""Distillation from hidden layers: compare a teacher's layers, in addition to its next-token probabilities.

loss = words + Σ weight · term,  words = alpha · CE + (1 - alpha) · τ² · divergence (divergence.py)

relations  MiniLMv2's self-relations of queries, keys and values: which tokens of a document are similar. They
           are independent of width and number of heads, so the two models may differ in these
hidden     hidden states, through a trained matrix, as in TinyBERT

Both read taps (core/taps.py), at the supervised rows. T tokens of a step, D and E widths of the student and
of the teacher, A relation heads.
Sources: MiniLMv2, arXiv:2012.15828; TinyBERT, arXiv:1909.10351.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from unfreeze.core.errors import ConfigError
from unfreeze.core.taps import Tap, TapName

if TYPE_CHECKING:
    from torch import Tensor, nn

    from unfreeze.core.batch import Batch, Loss
    from unfreeze.objectives.divergence import LogProbs, Teacher

    Found = Mapping[Tap, Tensor]
    Ask = Callable[[Batch], tuple[LogProbs, Found]]
    """A batch -> (the teacher's outputs at its supervised rows, the values of its taps)."""
    Words = Callable[[Tensor, nn.Module, Batch, Teacher], Loss]
    """objectives.divergence, with its settings."""

RELATIONS: tuple[TapName, ...] = ("q_plain", "k_plain", "v")
"""Without positions: a relation head may be part of a head, and a rotation mixes numbers of a whole one."""
NARROWEST, MOST = (
    16,
    64,
)  # numbers per relation head, relation heads: MiniLMv2's have 16 to 64 numbers, and 48 or 64 heads


@dataclass(frozen=True)
class Pair:
    """A layer of the student and the teacher's layer it is compared with, from 0."""

    student: int
    teacher: int


@dataclass(frozen=True)
class Relations:
    """weight · Σ_t w_t · (1/P) Σ_pairs (1/3) Σ_{q, k, v} (1/A) Σ_a KL(teacher's row t ‖ student's row t).

    A row is softmax(a_t · a_s / √c) over the tokens s <= t of its document, where a_t is one of the A pieces
    of all of a token's queries (keys, values). Grouped keys count as the G heads that exist, latent
    attention's once per head. The paper sums the three and takes means over tokens; here they are one mean,
    so that a weight has the same effect for any choice.
    """

    weight: float
    pairs: tuple[Pair, ...]
    heads: int
    names: tuple[TapName, ...] = RELATIONS
    name: str = "relations"

    def taps(self, of: Literal["student", "teacher"]) -> frozenset[Tap]:
        """Return the taps read from that model."""
        return frozenset(Tap(getattr(pair, of), name) for pair in self.pairs for name in self.names)

    def sum(self, ours: Found, theirs: Found, batch: Batch) -> Tensor:
        """Return the sum without its weight; the gradient reaches `ours`."""
        from unfreeze.kernels.attention import DocumentLayout
        from unfreeze.kernels.attention.relations import relation_divergence

        layout = DocumentLayout.build(batch.starts_S, batch.num_tokens, batch.weights_T.device)
        terms = [
            relation_divergence(
                ours[Tap(pair.student, name)],
                theirs[Tap(pair.teacher, name)],
                batch.weights_T,
                layout,
                self.heads,
            )
            for pair in self.pairs
            for name in self.names
        ]
        return sum(terms[1:], terms[0]) / len(terms)


@dataclass(frozen=True)
class Hidden:
    """weight · Σ_t w_t · (1/P) Σ_pairs apart(W x_t, y_t), x [D] the student's and y [E] the teacher's output.

    apart  "mse": (1/E) Σ (W x - y)²;  "cosine": 1 - cos(W x, y)
    W      [E, D], trained, one per pair (`projections`)
    """

    weight: float
    pairs: tuple[Pair, ...]
    projections: nn.ModuleDict
    apart: Literal["mse", "cosine"] = "mse"
    name: str = "hidden"

    def taps(self, of: Literal["student", "teacher"]) -> frozenset[Tap]:
        """Return the taps read from that model: a layer's output is the next one's input."""
        return frozenset(Tap(getattr(pair, of) + 1, "input") for pair in self.pairs)

    def sum(self, ours: Found, theirs: Found, batch: Batch) -> Tensor:
        """Return the sum without its weight; the gradient reaches `ours` and W."""
        import torch
        import torch.nn.functional as F

        rows_N = batch.supervised()
        total: list[Tensor] = []
        weights_N = batch.weights_T.index_select(0, rows_N)
        for pair in self.pairs:
            x_ND = ours[Tap(pair.student + 1, "input")].index_select(0, rows_N)
            y_NE = theirs[Tap(pair.teacher + 1, "input")].detach().index_select(0, rows_N)
            exact = torch.promote_types(x_ND.dtype, torch.float32)
            x_NE, y_NE = self.projections[str(pair.student)](x_ND.to(exact)), y_NE.to(exact)
            if self.apart == "mse":
                apart_N = (x_NE - y_NE).square().mean(-1)
            else:
                apart_N = 1 - F.cosine_similarity(x_NE, y_NE, dim=-1)
            total.append((apart_N * weights_N).sum())
        return sum(total[1:], total[0]) / len(total)


Term = Relations | Hidden


@dataclass(frozen=True)
class Intermediate:
    """The objective: token loss and terms. `taps` are those it needs from the student."""

    words: Words
    ask: Ask
    terms: Sequence[Term]
    taps: frozenset[Tap] = field(init=False)

    def __post_init__(self) -> None:
        needed = [term.taps("student") for term in self.terms]
        object.__setattr__(self, "taps", frozenset[Tap]().union(*needed))

    def __call__(self, hidden_TD: Tensor, lm_head: nn.Module, batch: Batch, ours: Found) -> Loss:
        return intermediate(hidden_TD, lm_head, batch, ours, words=self.words, ask=self.ask, terms=self.terms)


def intermediate(
    hidden_TD: Tensor,
    lm_head: nn.Module,
    batch: Batch,
    ours: Found,
    *,
    words: Words,
    ask: Ask,
    terms: Sequence[Term],
) -> Loss:
    """Return words + Σ weight · term. The teacher runs once for both.

    metrics: those of words, and each term's unweighted sum under its name.
    """
    import torch

    with torch.no_grad():
        log_probs, theirs = ask(batch)
    loss = words(hidden_TD, lm_head, batch, lambda _: log_probs)
    total, metrics = loss.sum, dict(loss.metrics)
    for term in terms:
        own = term.sum(ours, theirs, batch)
        total = total + term.weight * own
        metrics[term.name] = own.detach()
    return replace(loss, sum=total, metrics=metrics)


def relation_heads(widths: Sequence[int], requested: int | None = None) -> int:
    """Return the number of pieces for queries, keys and values of both models; `widths` are all of theirs.

    None: the most that divide every width and leave NARROWEST numbers in the narrowest piece, at most MOST.
    The paper finds more relation heads than attention heads better, 48 of 16 numbers for 12 heads of 64.
    Raises ConfigError for a number that does not divide one of them.
    """
    whole = math.gcd(*widths)
    if requested is None:
        limit = min(MOST, max(1, min(widths) // NARROWEST))
        return max(heads for heads in range(1, limit + 1) if whole % heads == 0)
    if whole % requested:
        wrong = next(width for width in widths if width % requested)
        raise ConfigError(
            f"relation_heads = {requested} does not divide {wrong}, a width of queries, keys or values"
            f" ({sorted(set(widths))}); a divisor of {whole} does",
            next=f"--distillation.relation-heads {relation_heads(widths)}, or leave it out",
        )
    return requested


def pairs_of(
    student: int, teacher: int, requested: Sequence[tuple[int, int]] = (), *, option: str
) -> tuple[Pair, ...]:
    """Return the requested pairs, whose layers count from 1; if there are none, both models' last layers.

    student, teacher: their numbers of layers. Raises ConfigError for a layer that one of them lacks.
    """
    if not requested:
        return (Pair(student - 1, teacher - 1),)
    for own, their in requested:
        if not (1 <= own <= student and 1 <= their <= teacher):
            raise ConfigError(
                f"{option} has the pair {own}:{their}; the student has the layers 1 to {student}, the teacher"
                f" 1 to {teacher}",
                next=f"{option} {student}:{teacher}, which are the last ones",
            )
    return tuple(Pair(own - 1, their - 1) for own, their in requested)
