"""The table of scores in words and on the page: escaped, self-contained, and in the report of its run."""

from __future__ import annotations

import json
import re

import pytest

from unfreeze.core.errors import DataError
from unfreeze.report.scores import (
    cautions,
    change_table,
    grid_tables,
    in_lines,
    number,
    read_scores,
    score_lines,
    score_table,
    scores_section,
    title_of,
    write_scores,
)


def score(model, value, items=40):
    return {
        "model": model,
        "value": value,
        "low": value - 0.1,
        "high": value + 0.1,
        "items": items,
        "failed": {},
    }


@pytest.fixture
def record():
    change = {"before": "base", "after": "runs/<b>", "items": 40, "value": 0.2, "low": 0.05, "high": 0.35}
    task = {
        "task": "rows:t.jsonl:exact",
        "measure": "exact",
        "unit": "share",
        "higher_is_better": True,
        "items": 40,
        "scores": [score("base", 0.4), score("runs/<b>", 0.6)],
        "changes": [{**change, "verdict": "better"}],
        "grid": {"256 tokens": {"depth 0%": {"base": 0.25, "runs/<b>": 1.0}, "depth 50%": {"base": None}}},
        "notes": ["3 answers were <cut>"],
    }
    models = [{"name": "base", "source": "tiny-k2"}, {"name": "runs/<b>", "source": "x", "typed": True}]
    failed = {"task": "my_task", "error": "it <failed>", "next": ""}
    return {"models": models, "tasks": [task, failed], "notes": [], "command": "unfreeze eval", "time": "now"}


def test_words(record):
    assert in_lines(record)[0] == (
        "rows:t.jsonl:exact, 40 items",
        ["base 0.400 → runs/<b> 0.600, +0.200 (+0.050 to +0.350): better"],
    )
    assert in_lines(record)[1] == ("my_task", ["no score: it <failed>"]) and len(score_lines(record)) == 2
    assert score_lines({}) == [] and scores_section({}) == ""
    table = change_table(record)
    assert table is not None and table.rows[0][1:4] == (
        "40",
        "0.400 (0.300 to 0.500)",
        "0.600 (0.500 to 0.700)",
    )
    (grid,) = grid_tables(record)
    assert grid.rows == [("256 tokens", "0.25 → 1.00", "– → –")]
    assert [number(value) for value in (None, 0.12345, 1234.5678)] == ["–", "0.123", "1,234.6"]
    assert [number(value, "+") for value in (330310.4, -59745.2)] == ["+330,310", "-59,745"]
    assert title_of({"task": "ppl:a", "measure": "perplexity", "unit": ""}) == "ppl:a, perplexity"
    assert title_of({"task": "needle", "measure": "log p", "unit": "nats"}) == "needle, log p (nats)"


def test_without_pairs_there_are_scores_alone(record):
    record["tasks"][0]["changes"] = []
    assert change_table(record) is None and score_table(record).head == ("task", "items", "base", "runs/<b>")
    assert in_lines(record)[0][1][0] == "base 0.400 (0.300 to 0.500)"
    assert "Scores" in scores_section(record)


def test_many_intervals_say_how_many_miss_0_by_chance(record):
    assert cautions(record) == ["rows:t.jsonl:exact: 3 answers were <cut>"]
    record["tasks"] *= 20
    assert cautions(record)[-1] == "Of 20 such intervals, about 1 would not hold 0 by chance."


def test_the_page_is_self_contained_and_escapes(record, tmp_path):
    page = write_scores(tmp_path / "evaluations.html", record).read_text(encoding="utf-8")
    assert "&lt;failed&gt;" in page and "<failed>" not in page and "<cut>" not in page and "better" in page
    assert not re.findall(r"(?:src|href)=[\"']?https?:", page) and "prefers-color-scheme" in page
    assert "<h1>Scores of runs/&lt;b&gt;</h1>" in page


def test_a_damaged_record_is_refused(tmp_path):
    assert read_scores(tmp_path) == {}
    for content in ("[]", '{"tasks": 3}', "{"):
        (tmp_path / "evaluations.json").write_text(content)
        with pytest.raises(DataError):
            read_scores(tmp_path)
    (tmp_path / "evaluations.json").write_text(json.dumps({"tasks": []}))
    assert read_scores(tmp_path) == {"tasks": []}
