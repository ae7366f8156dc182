"""Shapes that a case runs through in seconds, and the call that measures one."""

import importlib
import json
import time

import pytest

from benchmarks.harness import case, limits, shapes
from benchmarks.harness.rows import read
from benchmarks.harness.sides import Side
from unfreeze.core.command import Common

TINY = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "vocab_size": 256,
}
DENSE = {name: TINY[name] for name in ("hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size")}
DENSE |= {"num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture
def tiny(monkeypatch):
    """Every case on tiny models, 2 documents of 32 tokens."""
    for name, sizes in {"SIZES": TINY, "CHECKED": {}, "DENSE_CHECKED": {}, "QWEN2_05B": DENSE}.items():
        monkeypatch.setattr(shapes, name, sizes)
    monkeypatch.setattr(shapes, "QWEN3_06B", DENSE | {"head_dim": 16})
    for name, value in {"LEAST": 2**20, "TIMES": 0, "GEMM_SECONDS": 0.01}.items():
        monkeypatch.setattr(limits, name, value)
    for name in ("moe", "dense", "recompute"):
        module = importlib.import_module(f"benchmarks.cases.{name}")
        monkeypatch.setattr(module, "DOCUMENTS", 2)
        monkeypatch.setattr(module, "LENGTH", 32)
    return TINY


@pytest.fixture
def here(monkeypatch):
    """Sides are loaded and called in this process, with what the protocol (test_sides.py) carries: seconds of a case
    are those of its arithmetic."""

    def start(side):
        module, _, function = side.load.partition(":")
        given = json.loads(json.dumps(side.arguments))
        side.worker = getattr(importlib.import_module(module), function)(**given)
        side.loaded = json.loads(json.dumps(side.worker.facts))
        side.loaded |= {"load_seconds": 1.0, "load_peak": 2**30, "loaded_resident": 2**29}

    def call(side, name, within=None, fresh_peak=False, **arguments):
        began = time.perf_counter()
        result = json.loads(json.dumps(dict(side.worker.calls[name](**arguments))))
        seconds = time.perf_counter() - began
        side._peaks[name] = 2**30
        return {"seconds": seconds, "cpu_seconds": seconds, "peak": 2**30, "resident": 2**29, **result}

    for name, function in {"start": start, "call": call, "stop": lambda side, grace=0.0: None}.items():
        monkeypatch.setattr(Side, name, function)


@pytest.fixture
def measure(tiny, tmp_path):
    """measure("moe", steps=1) -> the rows that were appended; of a case that writes a page, what it gives."""

    def measure(name, **fields):
        module, path = importlib.import_module(f"benchmarks.cases.{name}"), tmp_path / "rows.jsonl"
        path.unlink(missing_ok=True)
        given = {"threads": 1, "steps": 1, "warmup": 0, "dtype": "float32", "append": str(path)} | fields
        known = {field: value for field, value in given.items() if field in module.Config.model_fields}
        made = case.measured(name, module, module.Config(**known), Common(quiet=True))
        return read(path) if path.exists() else made

    return measure
