"""The built-in model is there by name, wherever a command is given; a folder of that name comes first."""

import json
import shutil

import pytest

from unfreeze import cli
from unfreeze.checkpoint import open_checkpoint
from unfreeze.commands.data_show import model_folder
from unfreeze.config.parse import is_model
from unfreeze.config.training import portable
from unfreeze.core.built_in import TINY_K2
from unfreeze.core.errors import CheckpointError


def test_its_name_is_its_folder_everywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert open_checkpoint("tiny-k2").path == model_folder("tiny-k2") == TINY_K2
    assert is_model("tiny-k2") and portable("tiny-k2") == str(TINY_K2)  # peft reads the path from the adapter
    with pytest.raises(CheckpointError, match=r"tiny-k3 does not exist.*; nearest: 'tiny-k2'"):
        open_checkpoint("tiny-k3")


def test_a_folder_of_that_name_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(TINY_K2, "tiny-k2")
    assert (
        open_checkpoint("tiny-k2").path.resolve() == tmp_path / "tiny-k2" == model_folder("tiny-k2").resolve()
    )
    assert portable("tiny-k2") == str(tmp_path / "tiny-k2")


def test_commands_take_the_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text(
        json.dumps({"prompt": "Hello.", "completion": "Greet you, I do."}) + "\n"
    )
    for words in (["inspect"], ["plan"], ["data", "show", "rows.jsonl", "--model"]):
        assert cli.main([*words, "tiny-k2", "--quiet"]) == 0, capsys.readouterr().err
