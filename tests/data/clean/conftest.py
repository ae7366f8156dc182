"""Runs `clean` on rows and returns the ledger and the rows that are written."""

from __future__ import annotations

import json

import pytest

from unfreeze.config.clean import Recipe
from unfreeze.data.clean.run import clean
from unfreeze.data.rows.packed import open_bytes

OFF = {name: {"enabled": False} for name in ("language", "length", "repetition", "quality")}


@pytest.fixture
def cleaned(tmp_path):
    """cleaned(rows, …) -> (ledger, rows that are written). Filters are off unless `recipe` says otherwise."""

    def run(rows, out="out", name="in.jsonl", **recipe):
        path = tmp_path / name
        if rows is not None:
            lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
            path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        ledger = clean([str(path)], tmp_path / out, Recipe.model_validate({**OFF, **recipe}))
        return ledger, written(tmp_path / out)

    return run


def written(folder):
    """Rows of all output files, in order."""
    rows = []
    for path in sorted(folder.glob("rows-*")):
        with open_bytes(path) as file:
            rows += [json.loads(line) for line in file]
    return rows
