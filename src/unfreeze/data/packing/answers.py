"""Answers that are compared, laid out as documents of a batch.

    pairs     chosen, rejected, chosen, rejected, …
    labels    desirable answers, undesirable ones, then each prompt with the answer to another prompt of the
              batch, which KTO's reference point is the mean of

A pair is one Example, so no packer parts it. Of n answers with a label each prompt is followed by the answer
of another one, k places before it in a circle: lengths only change places, so the batch takes twice their
tokens. k is the first of 1 to n - 1 at which the fewest meet an answer to their own prompt: mostly none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from unfreeze.data.store.examples import TAUGHT, Example

CHOSEN, REJECTED, MISMATCHED = 1, -1, 0
"""Sides of documents, as objectives/preference.py reads them."""


def laid_out(examples: Sequence[Example]) -> tuple[list[Example], list[int], list[int]]:
    """(documents, the side of each, the example of each counted from 0; -1: of none)."""
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
    """The places of the examples in the order in which their losses come: desirable answers first."""
    places = range(len(examples))
    if not examples or not examples[0].has_label:
        return list(places)
    return sorted(places, key=lambda place: examples[place].chosen == 0)  # stable


def mismatched(examples: Sequence[Example]) -> list[Example]:
    """Each example's prompt, followed by the answer of the example k places before it."""
    begins = [answer_begins(example) for example in examples]
    count, k = len(examples), shift_of(examples, begins)
    made: list[Example] = []
    for i, (example, begin) in enumerate(zip(examples, begins, strict=True)):
        before, other = examples[(i - k) % count], begins[(i - k) % count]
        tokens = [*example.tokens[:begin], *before.tokens[other:]]
        weights = [*example.weights[:begin], *before.weights[other:]]
        made.append(replace(example, tokens=tokens, weights=weights, chosen=TAUGHT))
    return made


def shift_of(examples: Sequence[Example], begins: Sequence[int]) -> int:
    """k of 1 to n - 1 at which the fewest prompts meet an answer to the same prompt; of several the first."""
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
    """The place of the first supervised token; what lies before it is the prompt."""
    return int(np.flatnonzero(np.asarray(example.weights))[0])
