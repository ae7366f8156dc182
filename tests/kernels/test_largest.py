"""The largest score of each row equals torch.max, also where scores are equal, infinite or no numbers."""

import pytest
import torch

from unfreeze.kernels import largest as file
from unfreeze.kernels.largest import largest


def scores(rows, width, seed=0):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("width", [1, 15, 16, 33, 1024, 1025, 5000])
@pytest.mark.parametrize("rows", [1, 7])
def test_it_equals_torch(rows, width, monkeypatch):
    for x in (scores(rows, width), scores(rows, width).round(), scores(rows, width + 3)[:, :width]):
        best, ids = x.max(-1)
        assert [each.tolist() for each in largest(x)] == [ids.tolist(), best.isfinite().tolist()]
    # control: the place in a part is that in the row only in the first part
    if width > 1024 and rows > 1:
        monkeypatch.setattr(file, "flat_rows", lambda x: (x.reshape(-1).numpy()[8:], x.shape[1]))
        assert largest(x)[0].tolist() != ids.tolist()


@pytest.mark.parametrize("place", [0, 5, 1023, 1024, 2999])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_what_is_not_finite_is_seen_wherever_it_is(place, wrong):
    x = scores(3, 3000)
    x[1, place] = wrong
    assert largest(x)[1].tolist() == [True, False, True]


def test_masked_scores_are_allowed_unless_nothing_is_left():
    x = scores(2, 2000)
    x[0, :1999] = -torch.inf
    x[1] = -torch.inf
    ids, finite = largest(x)
    assert ids[0] == 1999 and finite.tolist() == [True, False]


def test_other_dtypes_and_layouts_are_torchs():
    for x in (scores(4, 300).double(), scores(300, 4).T, scores(4, 300).bfloat16()):
        assert largest(x)[0].tolist() == x.max(-1).indices.tolist()
