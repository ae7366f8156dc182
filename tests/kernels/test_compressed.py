"""Compressed attention against its formulas written as loops in float64, with gradients by autograd."""

import pytest
import torch

from unfreeze.kernels import compressed
from unfreeze.kernels.compressed import attention
from unfreeze.kernels.sparse_attention import Index

LENGTHS = (300, 1, 7, 140, 4, 3)  # several blocks of 128 queries; documents without an entry
RATE, WINDOW, HEADS, WIDTH = 4, 50, 3, 8
SCALE = WIDTH**-0.5


def places(rate=RATE):
    starts = [sum(LENGTHS[:i]) for i in range(len(LENGTHS))]
    return compressed.Entries.build(starts, sum(LENGTHS), rate, "cpu")


def drawn(*shape, seed):
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return numbers.requires_grad_()


def pooled(x, z, bias, rate, overlap):
    """An entry at a time."""
    d, entries = x.shape[1] // (2 if overlap else 1), []
    for rows, _ in places(rate).documents:
        for first in range(rows.start, rows.stop - rate + 1, rate):
            own = slice(first, first + rate)
            xs, zs = [x[own, -d:]], [z[own, -d:] + bias[:, -d:]]
            if overlap and first > rows.start:
                before = slice(first - rate, first)
                xs.append(x[before, :d])
                zs.append(z[before, :d] + bias[:, :d])
            entries.append((torch.cat(xs) * torch.cat(zs).softmax(0)).sum(0))
    return torch.stack(entries)


@pytest.mark.parametrize("rate", [2, 4, 128])
@pytest.mark.parametrize("overlap", [False, True])
def test_entries_and_their_gradients_are_the_formulas(rate, overlap):
    tokens, channels = sum(LENGTHS), WIDTH * (1 + overlap)
    inputs = [drawn(tokens, channels, seed=i) for i in range(2)] + [drawn(rate, channels, seed=2)]
    wanted = pooled(*inputs, rate, overlap)
    own = compressed.pool(*inputs, places(rate), overlap=overlap)
    assert len(own) == sum(length // rate for length in LENGTHS)
    assert torch.allclose(own, wanted, atol=1e-12)
    probe = drawn(*own.shape, seed=5).detach()
    for a, b in zip(*(torch.autograd.grad((e * probe).sum(), inputs) for e in (own, wanted)), strict=True):
        assert torch.allclose(a, b, atol=1e-12)


@pytest.mark.parametrize("overlap", [False, True])
def test_an_entry_of_a_step_is_that_of_the_packed_pass(overlap):
    """Of the first window, of which none lies before it, and of a later one."""
    covered, channels = RATE * (1 + overlap), WIDTH * (1 + overlap)
    x, z, bias = drawn(12, channels, seed=0), drawn(12, channels, seed=1), drawn(RATE, channels, seed=2)
    packed = compressed.pool(x, z, bias, compressed.Entries.build([0], 12, RATE, "cpu"), overlap=overlap)
    for place, entry in enumerate(packed):
        stop = (place + 1) * RATE
        tail = [torch.cat((torch.zeros(covered, channels), y))[stop : stop + covered][None] for y in (x, z)]
        first = torch.tensor([place == 0])
        step = compressed.pool_step(*tail, bias, first, rate=RATE, overlap=overlap)
        assert torch.allclose(step[0], entry, atol=1e-12)


def attended(q, k, e, sinks, window, chosen=None):
    """A token at a time."""
    rows_of = []
    for rows, theirs in places().documents:
        for t in range(rows.start, rows.stop):
            complete = (t - rows.start + 1) // RATE
            mine = e[theirs][:complete]
            if chosen is not None and theirs.stop - theirs.start > chosen.shape[1]:
                mine = e[theirs][chosen[t][chosen[t] >= 0].long()]
            keys = torch.cat((k[max(rows.start, t - window + 1) : t + 1], mine))
            scores = torch.cat((q[t] @ keys.T * SCALE, sinks[:, None]), 1)
            rows_of.append(scores.softmax(1)[:, :-1] @ keys)
    return torch.stack(rows_of)


def attention_inputs():
    tokens, entries = sum(LENGTHS), sum(length // RATE for length in LENGTHS)
    shapes = ((tokens, HEADS, WIDTH), (tokens, WIDTH), (entries, WIDTH), (HEADS,))
    return [drawn(*shape, seed=i) for i, shape in enumerate(shapes)]


def choice(keys=5):
    entries = sum(length // RATE for length in LENGTHS)
    index = Index(
        drawn(sum(LENGTHS), 16, 6, seed=8), drawn(sum(LENGTHS), 16, seed=9), drawn(entries, 6, seed=7), 0.4
    )
    return index, compressed.select(index, places(), keys)


@pytest.mark.parametrize("few", [False, True], ids=["all heads at once", "a head at a time"])
@pytest.mark.parametrize("chosen", [False, True])
def test_attention_and_its_gradients_are_the_formulas(chosen, few, monkeypatch):
    if few:
        monkeypatch.setattr(attention, "SCORE_BYTES", 1)
    inputs, which = attention_inputs(), choice()[1] if chosen else None
    wanted = attended(*inputs, WINDOW, which)
    own = compressed.attend(*inputs, places(), SCALE, WINDOW, which)
    assert torch.allclose(own, wanted, atol=1e-12)
    probe = drawn(*own.shape, seed=5).detach()
    for a, b in zip(*(torch.autograd.grad((o * probe).sum(), inputs) for o in (own, wanted)), strict=True):
        assert torch.allclose(a, b, atol=1e-11)


def test_control_a_window_of_one_token_more_is_seen():
    inputs = attention_inputs()
    own = compressed.attend(*inputs, places(), SCALE, WINDOW)
    assert (own - attended(*inputs, WINDOW + 1)).abs().max() > 1e-3


def test_the_chosen_entries_are_the_best_of_those_complete():
    index, chosen_TK = choice()
    for rows, theirs in places().documents:
        for t in range(rows.start, rows.stop) if theirs.stop - theirs.start > 5 else ():
            complete = (t - rows.start + 1) // RATE
            products = (index.q_TJi[t] @ index.k_Ti[theirs][:complete].T * index.scale).relu()
            best = (index.w_TJ[t] @ products).topk(min(5, complete)).indices if complete else []
            assert {int(i) for i in chosen_TK[t] if i >= 0} == {int(i) for i in best}
