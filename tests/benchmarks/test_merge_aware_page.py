"""docs/measured/merge_aware.md is made from its rows, and its figures are those of the rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.merge_aware_page import (
    APART,
    NEAREST,
    Row,
    Rows,
    best,
    chosen_table,
    curve_table,
    reward_table,
    shares,
    summary,
)

ROOT = Path(__file__).parents[2]
ROWS = ROOT / "benchmarks" / "results" / "merge_aware"
ROW = Row("tiny-k2", "experts", 0, "1e-3", "plain", "refit", 5.0, 1.0, 3.0, 10.0, 90.0, 0.1, 0.5)


def test_the_page_has_the_tables_of_the_rows():
    rows, page = Rows(ROWS), (ROOT / "docs" / "measured" / "merge_aware.md").read_text(encoding="utf-8")
    for table in (summary, chosen_table, curve_table, reward_table):
        assert table(rows) in page


def test_a_method_chooses_its_rate_on_seed_0_and_its_gain_is_of_the_adapter_kept_apart(tmp_path):
    rows = Rows(tmp_path)
    faster = replace(ROW, rate="3e-3", adapter=0.5, merged=4.0)
    for row in (ROW, faster, replace(ROW, seed=1, rate="3e-3", adapter=2.0), replace(ROW, seed=1)):
        rows.add(row)
    of = {"mixture": "tiny-k2", "targets": "experts"}
    chosen = {method: best(rows, method, **of) for method in (APART, NEAREST)}
    assert chosen == {APART: faster, NEAREST: ROW}  # each by what it would publish
    assert [gain for _, gain in shares(rows, NEAREST, **of)] == pytest.approx([200 / 4.5, 200 / 3])
    assert Rows(tmp_path).all == rows.all
