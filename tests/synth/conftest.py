"""A server of tests/teach/servers.py, and plans of small recipes."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "teach"))
sys.path.insert(0, str(Path(__file__).parent))
from servers import serve
from synth_plans import RECIPE, SEEDS


@pytest.fixture
def serving():
    """serving(reply) -> a running Server."""
    with serve() as start:
        yield start


@pytest.fixture
def waits(monkeypatch):
    """The seconds that the library would wait between two tries, in order; nothing waits."""
    waited: list[float] = []
    monkeypatch.setattr("openai._base_client.time", SimpleNamespace(sleep=waited.append, time=time.time))
    return waited


@pytest.fixture
def files(tmp_path):
    """files(recipe, seeds) -> (path of the seeds, path of the recipe)."""

    def write(recipe: str = RECIPE, seeds=None) -> tuple[Path, Path]:
        rows, file = tmp_path / "seeds.jsonl", tmp_path / "recipe.toml"
        rows.write_text("".join(json.dumps(row) + "\n" for row in seeds or SEEDS), encoding="utf-8")
        file.write_text(recipe, encoding="utf-8")
        return rows, file

    return write
