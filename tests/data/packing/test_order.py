"""Mixing files: shares over epochs are exact, every document of a file comes equally often, and a cursor goes
on exactly."""

from collections import Counter

import numpy as np
import pytest
import torch

from unfreeze.core.errors import ConfigError
from unfreeze.data import Batches, Example, Examples, Mixed, Shuffled


@pytest.mark.parametrize("weights", [(1.0, 1.0), (2.0, 0.25), (0.3, 1.7), (0.0, 1.0), (0.01, 0.5)])
def test_every_document_comes_as_often_as_its_file_s_weight_says(weights):
    sources = np.array([0] * 10 + [1] * 40)
    order, epochs = Mixed(sources, weights, seed=3), 12
    drawn = [order(epoch) for epoch in range(epochs)]
    seen = Counter(index for epoch in drawn for index in epoch)
    for file, weight in enumerate(weights):
        members = np.flatnonzero(sources == file)
        counts = [seen[int(index)] for index in members]
        assert max(counts) - min(counts) <= 1 and sum(counts) == int(weight * len(members) * epochs)
        per_epoch = [sum(sources[index] == file for index in epoch) for epoch in drawn]
        assert max(per_epoch) - min(per_epoch) <= 1
    assert drawn == [Mixed(sources, weights, seed=3)(epoch) for epoch in range(epochs)]


def test_sampling_with_replacement_would_be_seen():
    """Control arm of the test above: documents drawn by chance in the same shares are not equally often
    seen."""
    drawn = np.random.default_rng(0).integers(0, 10, size=10 * 12)
    counts = np.bincount(drawn, minlength=10)
    assert counts.max() - counts.min() > 1


def test_weight_one_everywhere_is_every_document_once():
    sources = np.array([0, 0, 1, 1, 1])
    assert sorted(Mixed(sources, (1.0, 1.0), seed=0)(4)) == sorted(Shuffled(5, seed=0)(4)) == [0, 1, 2, 3, 4]


def test_files_are_shuffled_together_and_epochs_differ():
    sources = np.array([0] * 50 + [1] * 50)
    order = Mixed(sources, (1.0, 1.0), seed=1)
    first = order(0)
    assert (
        0.2 < np.mean(sources[first[:40]]) < 0.8
        and first != order(1)
        and first != Mixed(sources, (1.0, 1.0), seed=2)(0)
    )


@pytest.mark.parametrize(
    "weights", [(1.0,), (0.0, 0.0), (-1.0, 1.0), (float("nan"), 1.0), (float("inf"), 1.0)]
)
def test_weights_that_cannot_be(weights):
    with pytest.raises(ConfigError, match=r"data\.weights"):
        Mixed(np.array([0, 1]), weights, seed=0)


def examples(count):
    return Examples.of(
        [
            Example([i + 1] * (2 + i % 5), [0.0] + [1.0] * (1 + i % 5), i, source=int(i >= 6))
            for i in range(count)
        ]
    )


def batches(weights=(2.5, 0.1), start=None):
    data = examples(16)
    return Batches(data, 20, 5, start, order=Mixed(data.sources_N, weights, 5))


def test_a_mixture_resumes_from_every_cursor_and_refuses_other_weights():
    straight = batches()
    run = [next(straight) for _ in range(straight.len_steps(4))]
    for at in range(len(run) - 1):
        (batch,), after = next(batches(start=run[at][1]))
        assert torch.equal(batch.tokens_T, run[at + 1][0][0].tokens_T) and after == run[at + 1][1]
    with pytest.raises(ConfigError, match=r"data_weights changed .*2\.5, 0\.1.*1\.0, 0\.1"):
        batches(weights=(1.0, 0.1), start=run[0][1])


def test_epochs_without_a_document_are_passed_over():
    data = examples(4)
    few = Batches(data, 20, 5, order=Mixed(data.sources_N, (0.1,), 5))
    assert [len(few.plan(epoch)) for epoch in range(3)] == [0, 0, 1] and few.efficiency() == 0
    (batch,), cursor = next(few)
    assert len(batch.lengths()) == 1 and cursor["epoch"] == 2
