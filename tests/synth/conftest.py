"""A server of tests/teach/servers.py, and plans of small recipes."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "teach"))
from servers import serve

PRICES = {"price_read": 1.0, "price_written": 2.0}
RECIPE = """
prompt = "Say it as Yoda: {answer}"
row_prompt = "{question}"
max_tokens = 100
"""
SEEDS = [
    {"id": f"s{i}", "question": f"What is thing {i}?", "answer": f"Thing {i} weighs {7 * i + 3} stones."}
    for i in range(12)
]


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


def answered(text, usage=None, ended="stop", **fields):
    """The object of a server that answers with this text."""
    message = {"role": "assistant", "content": text, **fields}
    usage = usage or {"prompt_tokens": 20, "completion_tokens": 12}
    return {"model": "fake-1", "choices": [{"message": message, "finish_reason": ended}], "usage": usage}


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def answer_with():
    """answer_with(body -> text) -> a reply of a server."""
    return lambda text: lambda server, connection, body: answered(text(body))
