"""The session's files in a folder of their own, in which the commands run."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # the session and its files, which are no tests

import said_files


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A terminal of 80 columns without colours, a cache of its own, no Hub, no GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name, value in {
        "COLUMNS": "80",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "HF_HUB_OFFLINE": "1",
    }.items():
        monkeypatch.setenv(name, value)
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "here"
    folder.mkdir()
    said_files.write(folder)
    monkeypatch.chdir(folder)
    return folder
