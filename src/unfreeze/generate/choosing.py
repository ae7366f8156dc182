"""Choose the next token of rows that are sampled each in its own way.

Rows of equal temperature, top-k and top-p are one group (sampling.py). Greedy rows cost a maximum and no
softmax, and log-probabilities are computed for the rows that want them.

S rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unfreeze.generate.request import NothingAllowed, Top
from unfreeze.generate.sampling import NotFinite, Sampling, chosen, logprobs_of


@dataclass
class Wish:
    """A row that gets its next token.

    uniform   its random number
    allowed   bool [V]; None: every id
    logprobs  compute both log-probabilities; else they are NaN
    top       likeliest ids to list
    """

    sampling: Sampling
    uniform: float = 0.0
    allowed: Tensor | None = None
    logprobs: bool = True
    top: int = 0

    def __post_init__(self) -> None:
        how = self.sampling
        self.alike = (0.0,) if how.temperature == 0 else (how.temperature, how.top_k, how.top_p)


@dataclass(slots=True)
class Choice:
    """A row's next token: logprob and sampled_logprob as in Piece. fault: why there is none."""

    token: int = -1
    logprob: float = math.nan
    sampled_logprob: float = math.nan
    top: list[tuple[int, float]] | None = None
    fault: NotFinite | NothingAllowed | None = None


def choose_each(logits_SV: Tensor, wishes: Sequence[Wish]) -> list[Choice]:
    """Choose a token for each row. A row whose logits are not numbers, or that may have no id, has a fault.

    Log-probabilities and the likeliest ids are those before the mask of allowed ids; sampled_logprob is of
    the distribution that the token was drawn from.
    """
    choices = [Choice() for _ in wishes]
    free_SV = logits_SV
    if any(wish.allowed is not None for wish in wishes):
        # the rows that may have every id are copied too: logits belong to the step's recording
        free_SV = logits_SV.clone()
        for i, wish in enumerate(wishes):
            if wish.allowed is not None:
                _hide(free_SV[i], wish.allowed, choices[i])
                if choices[i].fault is None and not bool(logits_SV[i].sum().isfinite()):
                    choices[i].fault = NotFinite()

    groups: dict[tuple[object, bool], list[int]] = {}
    for i, wish in enumerate(wishes):
        if choices[i].fault is None:
            groups.setdefault((wish.alike, wish.allowed is not None), []).append(i)
    for (_, masked), rows in groups.items():
        _choose_alike(logits_SV, free_SV, wishes, rows, choices, masked=masked)
    _list_likeliest(logits_SV, wishes, choices)
    return choices


def _choose_alike(
    logits_SV: Tensor,
    free_SV: Tensor,
    wishes: Sequence[Wish],
    rows: list[int],
    choices: list[Choice],
    *,
    masked: bool,
) -> None:
    """Choose for rows that are sampled alike. masked: their logits are looked at, and some are -inf now."""
    how, whole = wishes[rows[0]].sampling, len(rows) == len(logits_SV)
    own_SV = free_SV if whole else free_SV[rows]
    ids_S, kept_SV, finite_S = chosen(own_SV, how, [wishes[row].uniform for row in rows])
    ids = ids_S.tolist()
    finite = [True] * len(rows) if masked else finite_S.tolist()
    for row, token, good in zip(rows, ids, finite, strict=True):
        if good:
            choices[row].token = token
        else:
            choices[row].fault = NotFinite()

    wanting = [place for place, row in enumerate(rows) if wishes[row].logprobs and finite[place]]
    if not wanting:
        return
    every = len(wanting) == len(rows)
    tokens = [ids[place] for place in wanting]
    raw_SV = logits_SV if whole and every else logits_SV[[rows[place] for place in wanting]]
    logprobs = sampled = logprobs_of(raw_SV, tokens)
    if how.temperature == 0:
        sampled = [0.0] * len(wanting)
    elif kept_SV is not own_SV or free_SV is not logits_SV:
        sampled = logprobs_of(kept_SV if every else kept_SV[wanting], tokens)
    for place, *logs in zip(wanting, logprobs, sampled, strict=True):
        choices[rows[place]].logprob, choices[rows[place]].sampled_logprob = logs


def _hide(logits_V: Tensor, allowed: Tensor, choice: Choice) -> None:
    """Set what is not allowed to -inf."""
    allowed_V = allowed.to(logits_V.device)[: len(logits_V)]
    if len(allowed_V) < len(logits_V):
        padding = allowed_V.new_zeros(len(logits_V) - len(allowed_V))
        allowed_V = torch.cat((allowed_V, padding))
    if not bool(allowed_V.any()):
        choice.fault = NothingAllowed("no token may come next: the answer's form leaves none that is known")
    logits_V.masked_fill_(~allowed_V, -torch.inf)


def _list_likeliest(logits_SV: Tensor, wishes: Sequence[Wish], choices: list[Choice]) -> None:
    rows = [i for i, wish in enumerate(wishes) if wish.top and choices[i].fault is None]
    if rows:
        lists = likeliest(logits_SV[rows], max(wishes[row].top for row in rows))
        for row, each in zip(rows, lists, strict=True):
            choices[row].top = each[: wishes[row].top]


def likeliest(logits_SV: Tensor, count: int) -> Top:
    """Return the likeliest ids of each row and their log-probabilities in nats, the likeliest first."""
    top = logits_SV.float().log_softmax(-1).topk(min(count, logits_SV.shape[-1]))
    return [
        list(zip(ids, values, strict=True))
        for ids, values in zip(top.indices.tolist(), top.values.tolist(), strict=True)
    ]
