"""Sequence length that grows: the same tokens in every step, cut by hand; resumed exactly across a change."""

from __future__ import annotations

import random
from itertools import islice

import pytest
import torch

from unfreeze.core.batch import Batch
from unfreeze.core.errors import ConfigError
from unfreeze.data import Batches, Example
from unfreeze.data.packing.growing import STEPS, Growing, pieces, stages_of

STAGES = [(3, 8), (2, 20)]  # 3 steps of up to 8 tokens, 2 of up to 20, then all of them


def documents() -> list[Example]:
    rng = random.Random(3)
    lengths = [rng.randrange(2, 60) for _ in range(50)]
    return [
        Example([rng.randrange(97) for _ in range(n)], [0.0] + [1.0] * (n - 1), row)
        for row, n in enumerate(lengths)
    ]


def batches(start=None) -> Batches:
    return Batches(documents(), 64, 1, start, micro_batches=2)


def fields(batch: Batch) -> list[torch.Tensor]:
    return [batch.tokens_T, batch.targets_T, batch.weights_T, batch.positions_T, batch.starts_S]


def same(one: list[Batch], other: list[Batch]) -> bool:
    return all(
        torch.equal(a, b)
        for x, y in zip(one, other, strict=True)
        for a, b in zip(fields(x), fields(y), strict=True)
    )


def test_pieces_by_hand():
    example = Example([1, 2, 3, 4, 5], [0.0, 1.0, 1.0, 1.0, 1.0], 7)
    assert [(p.tokens, p.row) for p in pieces(example, 2)] == [([1, 2], 7), ([3, 4], 7), ([5], 7)]
    assert pieces(example, 5) == [example]
    assert [p.num_supervised for p in pieces(example, 2)] == [1, 1, 0]  # 4 targets, 2 of them lost to 2 cuts


def test_every_step_has_the_tokens_it_had_in_pieces_of_the_stages_length():
    """Targets are those of the whole documents, but for the last of each piece, which has none."""
    longest = []
    whole = islice(batches(), 7)
    for (grown, _), (usual, _) in zip(islice(Growing(batches(), STAGES), 7), whole, strict=True):
        for a, b in zip(grown, usual, strict=True):
            assert torch.equal(a.tokens_T, b.tokens_T)
            kept = a.weights_T > 0
            assert torch.equal(a.targets_T[kept], b.targets_T[kept])
            assert a.count == b.count - (len(a.starts_S) - len(b.starts_S))
        longest.append(max(n for batch in grown for n in batch.lengths()))
    assert longest[:3] == [8] * 3 and longest[3:5] == [20] * 2 and min(longest[5:]) > 20


def test_after_the_stages_steps_are_those_of_the_inner_source():
    grown, usual = (list(islice(source, 8)) for source in (Growing(batches(), STAGES), batches()))
    assert all(same(a, b) for (a, _), (b, _) in zip(grown[5:], usual[5:], strict=True))
    assert not same(grown[0][0], usual[0][0])  # control arm
    assert Growing(batches(), STAGES).len_steps(1.5) == batches().len_steps(1.5)


@pytest.mark.parametrize("stop", [1, 3, 4, 5, 6])
def test_resumed_at_any_step_it_goes_on_to_the_bit(stop: int):
    """Before, at and behind a change of length. Control arm: a cursor that forgot how many steps were taken."""
    straight = list(islice(Growing(batches(), STAGES), 9))
    cursor = straight[stop - 1][1]
    assert cursor[STEPS] == stop
    resumed = list(islice(Growing(batches(cursor), STAGES, cursor), 9 - stop))
    assert [c for _, c in resumed] == [c for _, c in straight[stop:]]
    assert all(same(a, b) for (a, _), (b, _) in zip(resumed, straight[stop:], strict=True))
    forgot = list(islice(Growing(batches(cursor), STAGES, {**cursor, STEPS: 0}), 9 - stop))
    assert not all(same(a, b) for (a, _), (b, _) in zip(forgot, straight[stop:], strict=True))


def test_a_run_that_began_without_is_not_resumed_with_it():
    _, cursor = next(batches())
    with pytest.raises(ConfigError, match=r"began without data\.sequence_lengths"):
        Growing(batches(cursor), STAGES, cursor)


def test_shares_become_steps_and_none_is_lost():
    assert stages_of([(256, 0.5), (512, 0.25)], 10) == [(5, 256), (3, 512)]  # ends at 5 and 7.5
    assert stages_of([(8, 1 / 3), (16, 1 / 3), (32, 1 / 3)], 100) == [(33, 8), (34, 16), (33, 32)]
    assert stages_of([], 10) == []
