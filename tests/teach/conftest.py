"""Servers of these tests (servers.py, which can be imported by name) and the model behind them; and live, which
counts bytes (tests/parallel/live.py)."""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

import unfreeze
from unfreeze.commands.demo import TINY_K2

sys.path.insert(0, str(Path(__file__).parent))
from servers import Completions, serve


@pytest.fixture
def serving():
    """serving(reply) -> a running Server."""
    with serve() as start:
        yield start


@pytest.fixture
def waits(monkeypatch):
    """The seconds that the library would wait between two tries, in order; nothing waits."""
    waited: list[float] = []
    fake = SimpleNamespace(sleep=waited.append, time=time.time)
    monkeypatch.setattr("openai._base_client.time", fake)
    return waited


@pytest.fixture(scope="session")
def tiny():
    """tiny-k2 in memory, the teacher of these servers."""
    return unfreeze.load(TINY_K2, dtype="float32")


@pytest.fixture
def completions(serving, tiny):
    """completions(kind, change) -> a running server of tiny-k2."""
    return lambda kind="vllm", change=None: serving(Completions(tiny, kind, change))


@pytest.fixture
def oracle(tiny):
    """oracle(tokens) -> log p_TV in float64: what each position says of the next token."""

    def says(tokens: list[int]) -> torch.Tensor:
        return tiny.logits([tokens])[0].double().log_softmax(-1)

    return says


@pytest.fixture(scope="session")
def live() -> ModuleType:
    path = Path(__file__).parents[1] / "parallel" / "live.py"
    spec = importlib.util.spec_from_file_location("live", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
