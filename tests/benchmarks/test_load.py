"""bench load end to end on a tiny shape, and its comparison of tensors with the files."""

import pytest
import torch

from benchmarks.cases import load
from benchmarks.harness import checkpoints, kimi
from benchmarks.harness.rows import read
from unfreeze.core.command import Common


def test_a_row_with_the_ratio_the_peak_and_what_was_promised(tmp_path, tiny_sizes):
    path = tmp_path / "rows.jsonl"
    load.measure(load.Config(append=str(path), pairs=1, threads=1), Common(quiet=True), tiny_sizes)
    (row,) = read(path)
    r = row.results
    assert (
        r["ratio"] == pytest.approx(r["gb_per_second"] / r["raw_gb_per_second"])
        and r["bytes"] > 10**5
        and r["promised_bytes"] > r["bytes"]
    )
    assert list(r["correctness"].values()) == [0.0] and "of 101" in next(iter(r["correctness"]))


def test_the_comparison_sees_one_wrong_bit(tmp_path, tiny_sizes):
    with checkpoints.checkpoints(str(tmp_path), kimi.config(**tiny_sizes), kimi.config(**tiny_sizes)) as (
        folder,
        _,
    ):
        tensors = {}
        compare = load.ours(str(folder)).calls["compare"]
        assert compare() == {"tensors": 101, "different": 0}
        stacked = torch.zeros(2, 4, 2, dtype=torch.int32)
        tensors["m.experts.gate_up_proj.weight_packed"] = stacked
        up = torch.zeros(2, 2, dtype=torch.int32)
        assert load._equal(up, "m.experts.1.up_proj.weight_packed", tensors)
        stacked[1, 2, 0] = 1
        assert not load._equal(up, "m.experts.1.up_proj.weight_packed", tensors) and load._equal(
            up, "m.experts.1.gate_proj.weight_packed", tensors
        )
        assert not load._equal(up, "m.experts.1.other.weight", tensors)
