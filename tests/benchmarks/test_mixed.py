"""`dev bench mixed` on tiny models: the lengths that it draws, and rows that end at them on both sides."""

import pytest

from benchmarks.harness import mixed, peers, shapes
from benchmarks.harness.checkpoints import make

pytestmark = pytest.mark.usefixtures("here")


def test_lengths_are_geometric_with_a_mean_of_a_third():
    lengths = mixed.lengths_of(20_000, 96)
    mean = sum(lengths) / len(lengths)
    assert mean == pytest.approx(32, rel=0.02) and max(lengths) == 96 and min(lengths) == 1
    # no memory: of the rows that reach n tokens the same share ends there, for every n
    for n in (1, 10, 40):
        reach = [length for length in lengths if length >= n]
        assert reach.count(n) / len(reach) == pytest.approx(lengths.count(1) / len(lengths), rel=0.25)
    assert mixed.lengths_of(64, 96) == mixed.lengths_of(64, 96)


def test_both_sides_end_their_rows_at_these_lengths(tiny, tmp_path):
    pytest.importorskip("transformers")
    make(tmp_path / "model", shapes.kimi())
    asked = {"prompts": [[5, 6, 7], [8, 9, 10], [11, 12, 13]], "lengths": [2, 7, 4]}
    worker = mixed.ours(str(tmp_path / "model"), "cpu", "float32")
    assert worker.calls["generate"](**asked) == {"lengths": [2, 7, 4]}
    peer = peers.mixed(str(tmp_path / "model"), "cpu")
    assert peer.calls["choose"](**asked)["dtype"] in ("bfloat16", "float32")
    assert peer.calls["generate"](**asked) == {"lengths": [2, 7, 4]}


def test_a_row_has_the_ratio(measure):
    pytest.importorskip("transformers")
    ours, peer = measure("mixed", models=("dense",), rows=3, prompt=8, longest=6, layers=2, rounds=1)
    ratio = ours.results["useful_per_second"] / peer.results["useful_per_second"]
    assert ours.results["of_transformers"] == pytest.approx(ratio) and ours.side == "unfreeze"
    assert ours.settings["layers"] == 2 and ours.settings["longest"] == 6
