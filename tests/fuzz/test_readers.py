"""Any input is accepted whole or refused with one printable UserError; and a guard that is taken away is
found (the control arms)."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable
from copy import deepcopy
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from unfreeze import models
from unfreeze.adapters import files
from unfreeze.checkpoint import manifest
from unfreeze.config import parse as config
from unfreeze.core import errors, events
from unfreeze.data.rows import lines as row_files
from unfreeze.data.rows.row import RowPlace
from unfreeze.data.tokens import templates, tokenizer
from unfreeze.train import run

READERS = ("rows", "checkpoint", "config", "tokenizer", "template", "adapter", "run", "toml")


def one(fuzzers: Any, reader: str, random: Random) -> str:
    with TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft 0.18's swapped dimensions
        inside = Path(folder) / "input"
        inside.mkdir()
        return fuzzers.attempt(fuzzers.READERS[reader], random, inside)


@pytest.mark.parametrize("reader", READERS)
@settings(
    max_examples=15, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
@given(random=st.randoms(use_true_random=False))
def test_any_input_is_accepted_whole_or_refused_in_one_line(fuzzers, reader, random):
    assert one(fuzzers, reader, random) in {
        "accepted",
        "CheckpointError",
        "ConfigError",
        "DataError",
        "AdapterError",
    }


@pytest.mark.parametrize("reader", READERS)
def test_both_outcomes_occur(fuzzers, reader):
    """A fuzzer whose inputs are all refused, or all accepted, would test nothing behind the first check."""
    accepted = set()
    for seed in range(40):
        accepted.add(one(fuzzers, reader, Random(f"{reader}:{seed}")) == "accepted")
        if len(accepted) == 2:
            break
    assert accepted == {True, False}


@pytest.fixture
def containers(fuzzers, monkeypatch) -> Callable[[Iterable[int]], dict[int, bytes]]:
    """seeds -> the JSON text that each makes, in the order given; only lists and objects are put in, since
    only they can be changed."""
    monkeypatch.setattr(
        fuzzers, "NASTY", [deepcopy(value) for value in fuzzers.NASTY if isinstance(value, list | dict)]
    )
    rows = fuzzers.ROWS
    return lambda seeds: {
        seed: fuzzers.written(fuzzers.altered(Random(seed), rows[seed % len(rows)], 2)) for seed in seeds
    }


def test_an_input_is_made_by_its_seed_alone(fuzzers, containers):
    """Otherwise --only READER:SEED isn't the input that was found, and what is put into one input grows in
    all that follow."""
    before = deepcopy(fuzzers.NASTY)
    assert containers(range(500)) == containers(reversed(range(500)))
    assert before == fuzzers.NASTY


def test_control_a_value_handed_out_itself_ends_in_a_circle(fuzzers, containers, monkeypatch):
    monkeypatch.setattr(fuzzers, "deepcopy", as_it_is)
    with pytest.raises(ValueError, match="Circular reference detected"):
        containers(range(20_000))


def findings(fuzzers: Any, reader: str, inputs: int) -> list[Exception]:
    found = []
    for seed in range(inputs):
        try:
            one(fuzzers, reader, Random(f"{reader}:{seed}"))
        except (Exception, SystemExit) as error:
            found.append(error)
            break
    return found


def nothing(*_: Any, **__: Any) -> None:
    """A check that was taken away."""


def as_it_is(value: Any, *_: Any, **__: Any) -> Any:
    return value


ARMS = {  # guards, each taken away alone: (reader, where, name, what stands in its place)
    "bad bytes": ("rows", row_files, "decode", lambda raw, row: raw.decode()),
    "rows that vanish": (
        "rows",
        row_files.JsonLines,
        "rows",
        lambda file: (
            (RowPlace(i, 0, len(line)), line)
            for i, line in enumerate(file.path.open("rb"), 1)
            if line.startswith(b"{")
        ),
    ),
    "layout": ("checkpoint", manifest, "_check_layout", nothing),
    "sizes of numbers": (
        "checkpoint",
        manifest,
        "_naturals",
        lambda value: value if isinstance(value, list) else None,
    ),
    "fields of config.json": ("config", models, "check_fields", nothing),
    "nulls of config.json": ("config", models, "without_nulls", dict),
    "tokenizer settings": (
        "tokenizer",
        tokenizer,
        "read_object",
        lambda path, *_, **__: json.loads(path.read_text()) if path.is_file() else {},
    ),
    "errors of a template": ("template", templates, "_RENDER_ERRORS", ZeroDivisionError),
    "finite adapters": ("adapter", files, "_finite", lambda tensor: True),
    "adapter_config.json": ("adapter", files, "check_config", nothing),
    "events": ("run", events, "DataError", ZeroDivisionError),
    "state.json": ("run", run, "read_object", lambda path, *_, **__: json.loads(path.read_text())),
    "types of TOML values": (
        "toml",
        config,
        "_given",
        lambda kind, table, where, renamed: config.by_path(kind, table, where),
    ),
    "printable": ("toml", errors, "printable", as_it_is),
}


@pytest.mark.parametrize("arm", ARMS)
def test_control_a_guard_taken_away_is_found(fuzzers, monkeypatch, arm):
    reader, where, name, instead = ARMS[arm]
    monkeypatch.setattr(where, name, instead)
    assert findings(fuzzers, reader, 400), f"{arm}: 400 inputs without the guard, and nothing was found"
