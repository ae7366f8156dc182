"""Folders of caches, and a user who has none: nothing is kept, and nothing fails."""

import os
import pwd
from pathlib import Path

import pytest
import torch

from unfreeze.core.cache import cache_folder
from unfreeze.core.errors import ConfigError
from unfreeze.data.store import encoded
from unfreeze.kernels.choice import record, times
from unfreeze.kernels.rms_norm import OP

CPU = torch.device("cpu")
ROW = {
    "op": "a",
    "dtype": "float32",
    "bucket": "b",
    "runs": "reference",
    "us": {"reference": 1.0},
    "wrong": {},
}


@pytest.fixture
def homeless(monkeypatch):
    """A container whose user id is in no passwd, without $HOME."""

    def unknown(user):
        raise KeyError(f"getpwuid(): uid not found: {user}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "XDG_CACHE_HOME", "UNFREEZE_KERNELS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(times, "_UNWRITTEN", {})
    with pytest.raises(RuntimeError, match="home directory"):
        Path.home()


def test_without_a_home_it_is_a_folder_that_cannot_be_made(homeless):
    folder = cache_folder("a")
    with pytest.raises(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    assert not folder.exists() and not [*folder.glob("*")] and not os.access(folder, os.W_OK)


def test_without_a_home_kernels_are_chosen_and_timings_are_of_this_process_alone(homeless):
    record.read.cache_clear()
    assert record.record_rows(OP, CPU, torch.float64, "no such bucket") == []
    assert not record.is_own(ROW | {"candidate": "c"}, "cpu") and times.known() == {}
    assert times.keep([ROW | {"date": "2026-01-01"}]) is None
    assert [key for key in times.known()] == [("a", "float32", "b")]
    with pytest.raises(OSError):
        record.write(record.user_folder() / "cpu.json", [], {})


def test_without_a_home_measuring_into_it_is_refused_before_it_begins(homeless):
    from unfreeze.commands.kernels import MeasureConfig, destination, writable

    with pytest.raises(ConfigError, match="cannot be written"):
        writable(destination(MeasureConfig(to="user"), "cpu"))


def test_without_a_home_rows_are_encoded_and_not_kept(homeless, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "a"}\n')
    assert encoded.read("name") is None and encoded.begun("name", [rows]) is None
