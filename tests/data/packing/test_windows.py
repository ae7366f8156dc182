"""Batches of one window after the other: packed by themselves, gone on with from any cursor of theirs only."""

from itertools import islice, pairwise
from types import SimpleNamespace

import numpy as np
import pytest

from unfreeze.core.errors import ConfigError, DataError
from unfreeze.data import Batches, Example, Examples
from unfreeze.data.packing.windows import InWindows

STEP = 40


def windows_of(stream, start=None, **options):
    return Batches(InWindows(stream), STEP, stream.seed, start, **options)


def stream_of(windows, seed=0):
    """What a Stream says of itself, its windows given: documents by (epoch, window)."""
    taken = []
    made = [
        [
            Examples.of([Example([n] * length, [0.0] + [1.0] * (length - 1)) for n, length in window])
            for window in epoch
        ]
        for epoch in windows
    ]
    return SimpleNamespace(
        seed=seed,
        size=8,
        windows=len(windows[0]),
        rows=SimpleNamespace(digest="d"),
        window=lambda epoch, number: made[epoch][number],
        take=lambda: taken.append(1),
        taken=taken,
    )


DRAWN = np.random.default_rng(0)
WINDOWS = [
    [[(100 * w + n, int(DRAWN.integers(2, 30))) for n in range(8)] for w in range(3)] for _ in range(2)
]


class InOrder:
    """An order that changes nothing."""

    identity = {}  # noqa: RUF012

    def __call__(self, epoch):
        return list(range(8))


def of(batch):
    starts = batch.starts_S.tolist()
    return [int(batch.tokens_T[start]) for start in starts]


@pytest.mark.parametrize("packing", ["first_fit", "best_fit", "none"])
def test_a_window_is_packed_as_batches_would_pack_it_alone(packing):
    ours = iter(windows_of(stream_of(WINDOWS), packing=packing))
    for epoch, windows in enumerate(WINDOWS):
        for number, window in enumerate(windows):
            alone = Batches(
                stream_of(WINDOWS).window(epoch, number), STEP, 0, packing=packing, order=InOrder()
            )
            found = list(islice(ours, len(alone.plan(0))))
            assert all((at["epoch"], at["window"]) == (epoch, number) for _, at in found)
            mine, theirs = (  # each in a random order of its own
                sorted(batch.tokens_T.tolist() for (batch,), _ in each)
                for each in (found, islice(alone, len(found)))
            )
            assert mine == theirs
            assert sorted(n for (batch,), _ in found for n in of(batch)) == [n for n, _ in window]


def test_every_cursor_goes_on_behind_it():
    stream = stream_of(WINDOWS)
    found = list(islice(windows_of(stream), 16))
    assert len(stream.taken) == 16, "what is encoded meanwhile is taken at each batch"
    for place, (_, cursor) in enumerate(found):
        went_on = list(islice(windows_of(stream_of(WINDOWS), cursor), 15 - place))
        assert [(of(batch), at) for (batch,), at in went_on] == [
            (of(batch), at) for (batch,), at in found[place + 1 :]
        ]
    passes = [at["passes"] for _, at in found]
    assert passes == sorted(passes) and passes[-1] > 1 and 1.0 in passes
    places = [(at["epoch"], at["window"], at["position"]) for _, at in found]
    assert all(before < after for before, after in pairwise(places)) and places[-1][0] == 1


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"seed": 1}, "seed changed"),
        ({"tokens_per_step": 41}, "tokens_per_step changed"),
        ({"packing": "none"}, "packing changed"),
        ({"rows": "e"}, "the data changed"),
        ({"window_rows": 9}, "the data changed"),
        ({"fingerprint": "0"}, "the data changed"),
        ({"position": 99}, "position 99 of window 0 lies outside"),
    ],
)
def test_a_cursor_of_something_else_is_refused(changed, said):
    cursor = windows_of(stream_of(WINDOWS)).cursor()
    windows_of(stream_of(WINDOWS), cursor)
    with pytest.raises(ConfigError, match=said):
        windows_of(stream_of(WINDOWS), cursor | changed)


def test_a_window_without_documents_is_passed_over_and_an_epoch_is_not():
    rows = [(1, 3), (2, 4)]
    found = [of(batch) for (batch,), _ in islice(windows_of(stream_of([[[], rows, []], [[], rows, []]])), 2)]
    assert found == [[1, 2], [1, 2]]
    with pytest.raises(DataError, match="no row of the data is left"):
        next(windows_of(stream_of([[[], []]] * 9)))


def test_what_it_says_of_itself():
    batches = windows_of(stream_of([[[(1, 30), (2, 30), (3, 10)]]]))
    assert batches.efficiency() == 70 / 80
    assert batches.len_steps(2.0) is None


def test_an_earlier_versions_cursor_keeps_the_order_in_which_batches_were_begun():
    windows = [[[(n, 15 + n % 7) for n in range(60)]]] * 2
    cursor = windows_of(stream_of(windows)).cursor()
    old = {name: value for name, value in cursor.items() if name != "batches"}
    orders = []
    for start in (cursor, old):
        found = list(islice(windows_of(stream_of(windows), start), 30))
        assert all(("batches" in at) is ("batches" in start) for _, at in found)
        orders.append([of(batch) for (batch,), _ in found])
    shuffled, begun = orders
    assert sorted(shuffled) == sorted(begun) and shuffled != begun
    assert [batch[0] for batch in begun] == sorted(batch[0] for batch in begun)  # the stream changes no order
