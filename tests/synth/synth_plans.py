"""Seeds, a recipe and answers of these tests; imported by name (conftest.py has the path)."""

from __future__ import annotations

import json
from pathlib import Path

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


def answered(text, usage=None, ended="stop", **fields):
    """The object of a server that answers with this text."""
    message = {"role": "assistant", "content": text, **fields}
    usage = usage or {"prompt_tokens": 20, "completion_tokens": 12}
    return {"model": "fake-1", "choices": [{"message": message, "finish_reason": ended}], "usage": usage}


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def yoda(server, connection, body):
    """The reply of a server that does what RECIPE asks."""
    text = body["messages"][-1]["content"].removeprefix("Say it as Yoda: ")
    return answered(f"{text.split(' weighs ')[1][:-1]}, {text.split(' weighs ')[0]} weighs. Hmm.")


def batch_result(key, body=None, status=200, error=None):
    """A line of a batch's results."""
    response = None if error else {"status_code": status, "body": body or answered(f"An answer to {key}.")}
    return json.dumps({"id": "batch_req_1", "custom_id": key, "response": response, "error": error})
