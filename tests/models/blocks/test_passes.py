"""Cache and passes: what is written is what is remembered, row by row; a step sees its own row's past and
nothing else."""

import pytest
import torch

from unfreeze.core.errors import UserError
from unfreeze.models.blocks.cache import Cache
from unfreeze.models.blocks.step_pass import StepPass

GENERATOR = torch.Generator().manual_seed(0)


def filled() -> tuple[Cache, torch.Tensor]:
    cache, values = Cache(3, 5), torch.arange(24.0).reshape(6, 4)
    cache.write(0, torch.tensor([0, 0, 1, 2, 2, 2]), torch.tensor([0, 1, 0, 0, 1, 2]), (values,))
    cache.lengths = [2, 1, 3]
    return cache, values


def test_values_lie_at_their_row_and_position_and_the_rest_is_zero():
    cache, values = filled()
    (store,) = cache.layers[0]
    assert store.shape == (3, 5, 4) and cache.nbytes == 3 * 5 * 4 * 4
    assert (
        torch.equal(store[2, :3], values[3:])
        and torch.equal(store[0, :2], values[:2])
        and not store[1, 1:].any()
    )


def test_rows_that_stay_lie_first_and_only_the_last_ones_move():
    cache, values = filled()
    (store,) = cache.layers[0]
    before = store.clone()
    assert cache.keep([1, 2]) == [2, 1]  # row 2 moves into the place of row 0, row 1 stays where it is
    (kept,) = cache.layers[0]
    assert cache.lengths == [3, 1] and kept is store  # no copy of the cache
    assert torch.equal(kept[0, :3], values[3:]) and torch.equal(kept[1], before[1])
    assert cache.keep([0]) == [0] and cache.lengths == [3]


def test_any_set_of_rows_can_stay():
    for kept in ([0, 1, 2], [0, 2], [0, 1], [2], [1]):
        cache, values = filled()
        rows = {0: values[:2], 1: values[2:3], 2: values[3:]}
        order = cache.keep(kept)
        assert sorted(order) == kept and cache.lengths == [len(rows[row]) for row in order]
        for place, row in enumerate(order):
            assert torch.equal(cache.layers[0][0][place, : len(rows[row])], rows[row])


def test_a_fork_has_the_positions_it_was_given_and_rows_come_back():
    cache, values = filled()
    (store,) = cache.layers[0]
    cache.fork(2, [0, 2], 2)  # row 2 itself forgets its third position
    assert cache.lengths == [2, 1, 2] and torch.equal(store[0, :2], values[3:5])
    assert torch.equal(store[2, :2], values[3:5]) and torch.equal(store[1, :1], values[2:3])
    cache.keep([1])
    assert cache.lengths == [1] and torch.equal(store[0, :1], values[2:3])
    cache.more(2)
    assert cache.lengths == [1, 0, 0]
    cache.write(0, torch.tensor([2]), torch.tensor([0]), (values[:1],))
    assert cache.layers[0][0] is store and cache.version == 1  # allocated once
    cache.write(1, torch.tensor([0]), torch.tensor([0]), (values[:1], values[:1]))
    assert cache.version == 3
    with pytest.raises(UserError, match="has 3 rows, 3 of them run: no 1 more"):
        cache.more(1)


def test_a_step_sees_the_running_rows_only():
    cache, values = filled()
    cache.keep([0])
    run = StepPass(torch.empty(0), torch.empty(0), cache, torch.tensor([0]), torch.tensor([2]))
    (seen,) = run.remember(0, values[5:])
    assert torch.equal(seen, torch.stack([values[0], values[1], values[5]])[None])


def test_a_step_attends_to_its_own_rows_positions_only():
    """Oracle: softmax attention per row in float64, query heads 4 on 2 key heads; what lies beyond a row's
    length must not matter."""
    S, H, G, d, lengths = 3, 4, 2, 8, [2, 1, 3]
    cache = Cache(S, 6)
    keys, values = torch.randn(2, S, 6, G, d, generator=GENERATOR)
    keys_stored, values_stored = keys.clone(), values.clone()
    for row, length in enumerate(lengths):  # beyond a row's length: what a neighbour's longer past left there
        keys_stored[row, length:], values_stored[row, length:] = 50.0, 1e3
    cache.layers[0], cache.lengths = (keys_stored, values_stored), list(lengths)
    positions = torch.tensor(lengths)
    run = StepPass(torch.empty(0), torch.empty(0), cache, torch.arange(S), positions)
    new_k, new_v = torch.randn(2, S, G, d, generator=GENERATOR)
    q = torch.randn(S, H, d, generator=GENERATOR)
    out = run.attend(q, *run.remember(0, new_k, new_v), d**-0.5)
    for row, length in enumerate(lengths):
        k = torch.cat((keys[row, :length], new_k[row][None])).double().repeat_interleave(H // G, 1)
        v = torch.cat((values[row, :length], new_v[row][None])).double().repeat_interleave(H // G, 1)
        weights = (torch.einsum("hd,nhd->hn", q[row].double(), k) * d**-0.5).softmax(-1)
        torch.testing.assert_close(
            out[row].double(), torch.einsum("hn,nhd->hd", weights, v), rtol=1e-5, atol=1e-5
        )
    run.mask_S11N = None  # control: without the mask the shorter rows see what is not theirs
    assert (run.attend(q, *run.remember(0, new_k, new_v), d**-0.5) - out)[:2].abs().max() > 1


def test_rows_of_one_length_need_no_mask():
    cache = Cache(2, 4)
    cache.lengths = [3, 3]
    assert (
        StepPass(torch.empty(0), torch.empty(0), cache, torch.arange(2), torch.tensor([3, 3])).mask_S11N
        is None
    )
