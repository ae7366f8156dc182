"""Which batch each document goes into: by the definition, and in two arrays instead of a list of lists."""

import numpy as np
import pytest

from unfreeze.data.packing import packers
from unfreeze.data.packing.packers import MAX_OPEN_BATCHES, PACKERS, PackingPlan


def by_definition(order, lengths, capacity):
    """First fit with a bounded number of open batches, as lists of lists."""
    batches, open_ones, shortest = [], [], min(lengths)
    for index in order:
        fitting = [
            batch for batch in open_ones if capacity - sum(lengths[i] for i in batch) >= lengths[index]
        ]
        if fitting:
            batch = fitting[0]
        else:
            batch = []
            batches.append(batch)
            open_ones.append(batch)
        batch.append(index)
        if capacity - sum(lengths[i] for i in batch) < shortest:
            open_ones = [other for other in open_ones if other is not batch]
        elif len(open_ones) > MAX_OPEN_BATCHES:
            open_ones = open_ones[1:]
    return batches


@pytest.mark.parametrize("shortest, longest", [(1, 90), (60, 100), (99, 100), (30, 45)])
def test_first_fit_equals_its_definition(shortest, longest):
    random = np.random.default_rng(longest)
    lengths = random.integers(shortest, longest + 1, 700).tolist()
    order = random.permutation(700).tolist()
    assert list(PackingPlan(order, PACKERS["first_fit"](order, lengths, 100))) == by_definition(
        order, lengths, 100
    )


@pytest.mark.parametrize("packing", PACKERS)
def test_a_plan_is_a_sequence_of_lists(packing):
    order, lengths = [3, 1, 0, 2], [4, 3, 2, 1]
    plan = PackingPlan(order, PACKERS[packing](order, lengths, 5))
    lists = list(plan)
    assert sorted(index for batch in lists for index in batch) == [0, 1, 2, 3]
    assert [plan[i] for i in range(-len(plan), len(plan))] == lists * 2
    with pytest.raises(IndexError):
        plan[len(plan)]
    assert plan.efficiency(np.array(lengths), 5) == 10 / (5 * len(plan))
    assert all(type(index) is int for batch in lists for index in batch)  # plain JSON in a cursor


def test_an_epoch_without_documents_has_no_batches():
    plan = PackingPlan([], packers.first_fit([], [3], 5))
    assert list(plan) == [] and plan.efficiency(np.array([3]), 5) == 0
