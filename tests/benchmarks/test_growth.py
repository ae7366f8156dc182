"""bench growth: its arithmetic, and the whole on a tiny shape."""

import numpy as np
import pytest

from benchmarks.cases import growth
from benchmarks.harness.rows import read
from unfreeze.core.command import Common
from unfreeze.core.errors import ConfigError


def test_the_line_is_numpys():
    x, y = [4096, 8192, 16384, 65536], [3.1e8, 3.9e8, 6.2e8, 1.9e9]
    expected = np.polyfit(x, y, 1)
    assert growth.fit(x, y) == pytest.approx((expected[1], expected[0]))


def test_flat_time_and_a_linear_memory_are_told_from_others():
    def found(*entries):
        return {tokens: {"tokens_per_second": speed, "peak_bytes": peak} for tokens, speed, peak in entries}

    good = growth.growth(
        found((100, 50.0, 1_100), (200, 51.0, 1_200), (400, 50.5, 1_400)), {100: 600, 200: 700, 400: 900}
    )
    assert (
        good["flat"]
        and good["bytes_per_token"] == pytest.approx(1)
        and good["slope_ratio"] == pytest.approx(1)
    )
    assert good["furthest_from_line"] == pytest.approx(0, abs=1e-9) and good["spread"] == pytest.approx(0.02)
    steep = growth.growth(
        found((100, 50.0, 1_100), (200, 45.0, 1_300), (400, 40.0, 2_500)), {100: 600, 200: 700, 400: 900}
    )
    assert not steep["flat"] and steep["slope_ratio"] > 4 and steep["furthest_from_line"] > 0.02


@pytest.mark.nightly
def test_every_size_and_the_growth_have_a_row(tmp_path, tiny_sizes):
    path = tmp_path / "rows.jsonl"
    growth.measure(
        growth.Config(append=str(path), tokens=(64, 128), steps=1, threads=1),
        Common(quiet=True),
        tiny_sizes,
        length=32,
    )
    rows = {row.side: row for row in read(path)}
    assert list(rows) == ["64 tokens", "128 tokens", "growth"]
    total = rows["growth"].results
    assert total["microseconds_per_token"]["64"] == pytest.approx(
        1e6 / rows["64 tokens"].results["tokens_per_second"]
    )
    planned = [rows[f"{n} tokens"].results["planned_bytes"] for n in (64, 128)]
    assert total["planned_bytes_per_token"] == pytest.approx((planned[1] - planned[0]) / 64)
    assert rows["64 tokens"].results["correctness"]["gradient norm, against float64"] < 0.03


def test_a_size_that_is_no_multiple_of_a_document_is_refused():
    with pytest.raises(ConfigError, match="5000 is not a multiple of 512"):
        growth.measure(growth.Config(tokens=(5000, 4096)), Common(quiet=True))
