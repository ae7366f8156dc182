"""A new folder is whole or absent, and never takes another's place."""

import pytest

from unfreeze.core.errors import CheckpointError
from unfreeze.core.files import write_folder


def test_a_folder_is_written_whole(tmp_path):
    write_folder(tmp_path / "a" / "b", {"x.json": "{}", "y": b"\xff"}, "a tokenizer")
    assert (tmp_path / "a" / "b" / "x.json").read_text() == "{}"
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"]


def test_a_folder_with_files_is_left_alone(tmp_path):
    (tmp_path / "kept").write_text("kept")
    with pytest.raises(CheckpointError, match="exists and is not empty; a tokenizer is written"):
        write_folder(tmp_path, {"kept": "lost"}, "a tokenizer")
    assert (tmp_path / "kept").read_text() == "kept"


def test_an_interrupted_folder_is_absent(tmp_path, monkeypatch):
    class Interrupting(dict):
        def items(self):
            yield "x.json", "{}"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_folder(tmp_path / "new", Interrupting(), "a tokenizer")
    assert not list(tmp_path.iterdir())
