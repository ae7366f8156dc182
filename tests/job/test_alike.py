"""Held-out pairs of which one answer is trained on: its rank is memorised, so they prove nothing."""

from __future__ import annotations

import pytest

from unfreeze.config.tables import Data
from unfreeze.data import Dataset, Example, Examples, Stats
from unfreeze.job.alike import alike
from unfreeze.report.events import LEAKED


def pair(prompt, chosen, rejected):
    return Example([1, prompt, chosen, 1, prompt, rejected], [0.0, 0.0, 1.0] * 2, chosen=3)


def warning(trained_on, held):
    dataset = Dataset(Examples.of(trained_on), Stats(), Examples.of(held))
    return alike(Data.model_construct(files=(), columns=()), dataset)


@pytest.mark.parametrize(
    ("held", "count"),
    [
        ([pair(5, 10, 12), pair(6, 30, 31)], 1),  # 10 is chosen in training, too
        ([pair(5, 13, 11), pair(5, 12, 10)], 2),  # 11 and 10 are trained on, on either side
        ([pair(6, 10, 11), pair(5, 12, 13)], 0),  # the same answers to another prompt; other answers
    ],
)
def test_held_out_pairs_that_share_an_answer_are_counted(held, count):
    words = warning([pair(5, 10, 11), pair(7, 10, 11)], held)
    assert words == (f"{count} of 2 (by one of their answers) {LEAKED}" if count else "")
