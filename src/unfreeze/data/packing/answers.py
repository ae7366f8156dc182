"""Lay out compared answers as documents of a batch.

    pairs     chosen, rejected, chosen, rejected, …
    labels    desirable answers, then undesirable ones, then each prompt with an answer to another prompt of
              the batch; KTO's reference point is the mean over these

A pair is one Example, so no packer separates it. With n labelled answers, each prompt is also paired with
the answer of the example k places earlier (cyclically). This only permutes lengths, so the batch takes twice
the tokens. k is the smallest of 1 to n - 1 that pairs the fewest prompts with an answer to the same prompt
(usually none).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from unfreeze.data.store.examples import TAUGHT, Example

CHOSEN, REJECTED, MISMATCHED = 1, -1, 0
"""Side of each document, as objectives/preference.py reads it."""


def laid_out(examples: Sequence[Example]) -> tuple[list[Example], list[int], list[int]]:
    """Return (documents, side of each, example index of each; -1: belongs to no example)."""
    if not examples[0].has_label:
        documents = [document for example in examples for document in example.documents()]
        count = len(examples)
        return documents, [CHOSEN, REJECTED] * count, [i for i in range(count) for _ in range(2)]
    ordered = [examples[place] for place in order_of(examples)]
    sides = [REJECTED if example.chosen == 0 else CHOSEN for example in ordered]
    count = len(ordered)
    others = mismatched(ordered) if count > 1 else []
    return ([*ordered, *others], [*sides, *[MISMATCHED] * len(others)], [*range(count), *[-1] * len(others)])


def order_of(examples: Sequence[Example]) -> list[int]:
    """Return example indices in the order in which their losses come out.

    Labelled answers: desirable ones first.
    """
    places = range(len(examples))
    if not examples or not examples[0].has_label:
        return list(places)
    return sorted(places, key=lambda place: examples[place].chosen == 0)  # stable


def mismatched(examples: Sequence[Example]) -> list[Example]:
    """Return each example's prompt followed by the answer of the example k places earlier."""
    begins = [answer_begins(example) for example in examples]
    count, k = len(examples), shift_of(examples, begins)
    mismatches: list[Example] = []
    for i, (example, begin) in enumerate(zip(examples, begins, strict=True)):
        before, other = examples[(i - k) % count], begins[(i - k) % count]
        tokens = [*example.tokens[:begin], *before.tokens[other:]]
        weights = [*example.weights[:begin], *before.weights[other:]]
        mismatches.append(replace(example, tokens=tokens, weights=weights, chosen=TAUGHT))
    return mismatches


def shift_of(examples: Sequence[Example], begins: Sequence[int]) -> int:
    """Return the smallest k in 1 to n - 1 that pairs the fewest prompts with an answer to the same prompt."""
    count = len(examples)
    prompts = [tuple(example.tokens[:begin]) for example, begin in zip(examples, begins, strict=True)]
    if len(set(prompts)) in (1, count):
        return 1
    same: list[int] = []
    for k in range(1, count):
        same.append(sum(prompts[i] == prompts[i - k] for i in range(count)))
        if not same[-1]:
            break
    return 1 + same.index(min(same))


def answer_begins(example: Example) -> int:
    """Return the index of the first supervised token; the tokens before it are the prompt."""
    return int(np.flatnonzero(np.asarray(example.weights))[0])
