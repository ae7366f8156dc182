"""A run takes no folder with the user's own files, and the name that is proposed instead is free."""

from __future__ import annotations

from pathlib import Path

import pytest

from unfreeze import cli
from unfreeze.core.errors import ConfigError
from unfreeze.core.run_folder import OURS, free_name, refuse_other_files


def folder_with(tmp_path: Path, *names: str) -> Path:
    folder = tmp_path / "full"
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("hi")
    return folder


def test_a_folder_with_other_files_is_refused_and_the_command_names_a_free_one(tmp_path: Path):
    folder = folder_with(tmp_path, "report.html", "notes.txt", "adapter/README.md")
    with pytest.raises(ConfigError) as error:
        refuse_other_files(folder)
    assert (
        error.value.message == f"{folder} holds other files (adapter, notes.txt and 1 more) and is not a run"
    )
    assert error.value.next == f"--out {folder}/run, or another name"
    (folder / "run").mkdir()
    with pytest.raises(ConfigError) as error:
        refuse_other_files(folder)
    assert f"--out {folder}/run-2," in error.value.next


@pytest.mark.parametrize("name", OURS)
def test_what_a_run_writes_first_makes_it_a_run(name: str, tmp_path: Path):
    """A run that died before its first save leaves these beside its plan."""
    refuse_other_files(folder_with(tmp_path, name, "plan.json", "report.html"))


def test_hidden_and_empty_files_and_those_of_a_call_from_python_are_taken(tmp_path: Path):
    folder = folder_with(tmp_path, ".gitignore", "rows-0123abcd.jsonl", "reward-0123abcd.py")
    (folder / "log.txt").touch()
    (folder / "empty").mkdir()
    refuse_other_files(folder)
    refuse_other_files(tmp_path / "none")
    (folder / "rows.jsonl").write_text("{}")  # control arm
    with pytest.raises(ConfigError, match=r"holds other files \(rows.jsonl\)"):
        refuse_other_files(folder)


def test_a_model_in_the_folder_is_named_as_one(tmp_path: Path):
    with pytest.raises(ConfigError, match="holds a model, and a run needs a folder of its own"):
        refuse_other_files(folder_with(tmp_path, "config.json"))


def test_free_names_are_counted(tmp_path: Path):
    assert free_name(tmp_path / "a") == tmp_path / "a"
    (tmp_path / "a").mkdir()
    (tmp_path / "a-2").mkdir()
    assert free_name(tmp_path / "a") == tmp_path / "a-3"


@pytest.mark.parametrize(
    "words",
    [
        ("sft",),
        ("pretrain",),
        ("prefer",),
        ("distill", "--teacher", "tiny-k2"),
        ("grpo", "--reward", "my.py"),
    ],
)
def test_every_recipe_refuses_before_it_looks_for_the_data(
    words: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    folder = folder_with(tmp_path, "report.html")
    (tmp_path / "my.py").write_text("def reward(answer, row):\n    return 1.0\n")
    monkeypatch.chdir(tmp_path)
    command = [words[0], "--model", "tiny-k2", "--data", "none.jsonl", *words[1:], "--out", str(folder)]
    assert cli.main(command) == 2
    assert "holds other files (report.html) and is not a run" in capsys.readouterr().err
    assert [path.name for path in folder.iterdir()] == ["report.html"]
