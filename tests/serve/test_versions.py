"""Adapters are taken up when their files change, whole, and a bad one leaves the version before it."""

import json
import os
from pathlib import Path

import pytest

from unfreeze.core.errors import AdapterError
from unfreeze.core.events import RESOLVED
from unfreeze.serve import versions
from unfreeze.serve.versions import Versions, files_of, folder_of

BAD = b"bad"


class Loaded:
    """Stands for adapters/several.py: name -> the bytes that were read."""

    def __init__(self):
        self.now = {}

    @property
    def names(self):
        return list(self.now)

    def load(self, name, folder):
        weights = (folder / "adapter_model.safetensors").read_bytes()
        if weights == BAD:
            raise AdapterError("its shapes are others")
        self.now[name] = weights

    replace = load


def write(folder: Path, weights: bytes):
    """As a run writes them: each file under another name, then renamed."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (("adapter_model.safetensors", weights), ("adapter_config.json", b"{}")):
        new = folder / f".{name}.new"
        new.write_bytes(content)
        os.replace(new, folder / name)


@pytest.fixture
def run(tmp_path):
    (tmp_path / RESOLVED).write_text(json.dumps({"model": "base"}))
    write(tmp_path / "adapter", b"one")
    return tmp_path


def begun(run, monkeypatch):
    """Versions whose thread never looks: the test does."""
    monkeypatch.setattr(versions, "LOOK", 3600)
    lines, loaded = [], Loaded()
    there = Versions(loaded, {"mine": run}, lines.append)
    there.begin()
    return there, loaded, lines


def test_a_new_version_is_taken_up_when_two_looks_saw_it(run, monkeypatch):
    there, loaded, lines = begun(run, monkeypatch)
    assert loaded.now == {"mine": b"one"} and not lines
    write(run / "adapter", b"two")
    there.look()
    assert loaded.now["mine"] == b"one"  # it may be half written
    there.look()
    assert loaded.now["mine"] == b"two" and lines == [
        "mine: version 2 is taken up; answers that run keep theirs"
    ]
    there.look()
    there.look()
    assert there.counts == {"mine": 2} and len(lines) == 1
    there.close()


def test_files_that_change_between_two_looks_are_not_read(run, monkeypatch):
    there, loaded, _ = begun(run, monkeypatch)
    for i in range(4):
        write(run / "adapter", b"half %d" % i)
        there.look()
    assert loaded.now["mine"] == b"one"
    (run / "adapter" / "adapter_model.safetensors").unlink()
    there.look()
    there.look()
    assert loaded.now["mine"] == b"one"
    there.close()


def test_an_adapter_that_cannot_be_loaded_leaves_the_one_before(run, monkeypatch):
    there, loaded, lines = begun(run, monkeypatch)
    write(run / "adapter", BAD)
    for _ in range(4):
        there.look()
    assert loaded.now["mine"] == b"one"
    assert lines == [
        "warning: mine: the new adapter is not taken up, the version before stays: its shapes are others"
    ]
    write(run / "adapter", b"good")
    there.look()
    there.look()
    assert loaded.now["mine"] == b"good"
    there.close()


def test_a_run_without_an_adapter_yet_gets_its_name_when_it_has_one(tmp_path, monkeypatch):
    (tmp_path / RESOLVED).write_text("{}")
    there, loaded, lines = begun(tmp_path, monkeypatch)
    assert not loaded.names and "has no adapter yet" in lines[0]
    write(tmp_path / "adapter-best", b"first")
    there.look()
    there.look()
    assert loaded.now == {"mine": b"first"} and "version 1 is taken up" in lines[1]
    there.close()


def test_a_run_that_trains_has_its_newest_adapter(run, monkeypatch):
    write(run / "adapter-best", b"best")
    os.utime(run / "adapter" / "adapter_config.json", ns=(1, 1))
    assert folder_of(run) == run / "adapter"  # it has ended: its last
    monkeypatch.setattr(versions, "writer", lambda folder: "17")
    assert folder_of(run) == run / "adapter-best"
    assert folder_of(run / "adapter") == run / "adapter" and files_of(run / "none") is None


def test_a_thread_looks_by_itself(run, monkeypatch):
    from tests.serve.fakes import until

    monkeypatch.setattr(versions, "LOOK", 0.01)
    loaded = Loaded()
    there = Versions(loaded, {"mine": run}, lambda line: None)
    there.begin()
    write(run / "adapter", b"two")
    assert until(lambda: loaded.now["mine"] == b"two")
    there.close()
