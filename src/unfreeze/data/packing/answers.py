"""Answers that are compared, laid out as documents of a batch.

    pairs     chosen, rejected, chosen, rejected, …
    labels    desirable answers, undesirable ones, then each prompt with the answer to another prompt of the
              batch, which KTO's reference point is the mean of

A pair is one Example, so no packer parts it. Of n answers with a label the prompt of answer i is followed
by the answer before it, the first by the last: lengths only change places, so the batch takes twice their
tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from unfreeze.data.examples import TAUGHT, Example

CHOSEN, REJECTED, MISMATCHED = 1, -1, 0
"""Sides of documents, as objectives/preference.py reads them."""


def laid_out(examples: Sequence[Example]) -> tuple[list[Example], list[int], list[int]]:
    """(documents, the side of each, the example of each counted from 0; -1: of none)."""
    if not examples[0].has_label:
        documents = [document for example in examples for document in example.documents()]
        count = len(examples)
        return documents, [CHOSEN, REJECTED] * count, [i for i in range(count) for _ in range(2)]
    ordered = sorted(examples, key=lambda example: example.chosen == 0)  # stable: desirable ones first
    sides = [REJECTED if example.chosen == 0 else CHOSEN for example in ordered]
    count = len(ordered)
    others = mismatched(ordered) if count > 1 else []
    return ([*ordered, *others], [*sides, *[MISMATCHED] * len(others)], [*range(count), *[-1] * len(others)])


def mismatched(examples: Sequence[Example]) -> list[Example]:
    """Each example's prompt, followed by the answer of the example before it."""
    begins = [answer_begins(example) for example in examples]
    return [
        replace(
            example,
            tokens=[*example.tokens[:begin], *before.tokens[other:]],
            weights=[*example.weights[:begin], *before.weights[other:]],
            chosen=TAUGHT,
        )
        for example, begin, before, other in zip(
            examples, begins, [examples[-1], *examples[:-1]], [begins[-1], *begins[:-1]], strict=True
        )
    ]


def answer_begins(example: Example) -> int:
    """The place of the first supervised token; what lies before it is the prompt."""
    return int(np.flatnonzero(np.asarray(example.weights))[0])
