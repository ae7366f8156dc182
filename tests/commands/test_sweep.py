"""--sweep: several runs by one command, each resumable, and their comparison."""

import json
from pathlib import Path

import pytest

from unfreeze import cli
from unfreeze.commands import sweep
from unfreeze.commands.demo import TINY_K2
from unfreeze.core.command import Common
from unfreeze.core.errors import ConfigError

pytestmark = pytest.mark.usefixtures("fewer_layers")

QUIET = Common(quiet=True)


@pytest.fixture
def line(chat_rows, held_rows, tmp_path):
    """The arguments of a run of two steps with validation."""
    words = ["--model", TINY_K2, "--data", chat_rows, "--out", tmp_path / "all", "--steps", 2]
    words += ["--tokens-per-step", 128, "--watch.samples", 0, "--threads", 1, "--lora.rank", 1]
    words += ["--validation", held_rows, "--optimizer.warmup", 0]
    return [str(word) for word in words]


def test_each_combination_is_a_run_and_the_best_is_first(line, tmp_path, capsys):
    """The second of three fails at first; the same command again trains only that one."""
    launched = []

    def launch(arguments):
        launched.append(arguments)
        broken = len(launched) == 2
        return 2 if broken else cli.main(arguments)

    arguments = [*line, "--sweep", "learning_rate=1e-9,1e-8,1e-2"]
    found = sweep.sweep("sft", arguments, QUIET, launch)
    folders = [tmp_path / "all" / f"learning_rate={rate}" for rate in ("1e-9", "1e-8", "1e-2")]
    assert [Path(words[-2]) if words[-1] == "--quiet" else words for words in launched] == folders
    assert found["failed"] == {"learning_rate=1e-8": 2} and found["exit_code"] == 2
    assert found["ranked_by"] == "best_validation" and found["best"] == str(folders[2])
    assert [run["name"] for run in found["runs"]] == ["learning_rate=1e-2", "learning_rate=1e-9"]
    assert found["differences"]["optimizer.learning_rate"] == ["0.01", "1e-09"]
    assert "template_date" not in found["differences"]

    stamps = [(folder / "state").stat().st_mtime_ns for folder in (folders[0], folders[2])]
    again = sweep.sweep("sft", arguments, Common(quiet=True, json=True), lambda words: cli.main(words))
    assert again["failed"] == {} and again["exit_code"] == 0 and len(again["runs"]) == 3
    assert stamps == [(folder / "state").stat().st_mtime_ns for folder in (folders[0], folders[2])]
    json.dumps(again)

    # what to do now; control arm: nothing is best where runs can't be ranked
    sweep.sweep("sft", arguments, Common(json=True), lambda words: cli.main([*words, "--quiet"]))
    said = capsys.readouterr().err
    assert "best: learning_rate=1e-2\nnext: unfreeze chat" in said and f"unfreeze export {folders[2]}" in said
    assert sweep.best_folder(folders, {**again, "ranked_by": None}) is None

    # the table of `compare`, by hand: the same order, and by what
    cli.main(["compare", *map(str, folders), "--html", str(tmp_path / "c.html")])
    said = capsys.readouterr().out
    assert "results, best first by best validation loss" in said
    assert said.index("learning_rate=1e-2") < said.index("learning_rate=1e-8")


def test_several_fields_are_multiplied_and_nothing_else_changes(line, tmp_path):
    fields, points = sweep.planned_points(
        "sft", [*line, "--sweep", "optimizer.clip=1,2", "dtype=float32,bfloat16"]
    )
    assert fields == {"optimizer.clip": ["1", "2"], "dtype": ["float32", "bfloat16"]}
    assert [point.name for point in points] == [
        f"optimizer.clip={clip},dtype={dtype}" for clip in (1, 2) for dtype in ("float32", "bfloat16")
    ]
    assert all(point.arguments[: len(line)] == line for point in points)
    assert {point.folder.parent for point in points} == {tmp_path / "all"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["learning_rate=1e-4,fast"], "--learning-rate = 'fast' is not a number"),
        (["learning_rate=1e-4,-1"], "--learning-rate -1: must be more than 0"),
        (["learning_rat=1e-4,2e-4"], "there is no flag --learning-rat; nearest: '--learning-rate'"),
        (["lr=1e-4,2e-4"], "it is called --learning-rate here"),
        (["learning_rate"], "is not FIELD=VALUE,VALUE"),
        (["learning_rate=1e-4,"], "is not FIELD=VALUE,VALUE"),
        ([], "needs FIELD=VALUE"),
        (["learning_rate=1e-4"], "makes 1 run; 2 to 12"),
        (["seed=" + ",".join(map(str, range(13)))], "makes 13 runs; 2 to 12"),
        (["seed=1,2", "clip=" + ",".join(map(str, range(7)))], "makes 14 runs"),
        (["seed=1,1"], "repeats a value"),
        (["seed=1,2", "seed=3,4"], "seed is given twice"),
        (["steps=3,4"], "steps is given twice"),
        (["out=a,b"], "out cannot be swept: each run has a folder of its own"),
        (["lora.targets=experts,attention"], "a single run takes several values"),
    ],
)
def test_bad_fields_and_values_are_refused_before_any_run(line, words, said):
    def launch(arguments):
        raise AssertionError("a run was started")

    with pytest.raises(ConfigError) as caught:
        sweep.sweep("sft", [*line, "--sweep", *words], QUIET, launch)
    assert said in str(caught.value), str(caught.value)


def test_absent_data_is_refused_before_any_run(line):
    at = line.index("--data") + 1
    with pytest.raises(ConfigError, match="is not a file"):
        sweep.planned_points("sft", [*line[:at], "nowhere.jsonl", *line[at + 1 :], "--sweep", "seed=1,2"])


def test_ctrl_c_ends_the_sweep_and_says_how_to_go_on(line):
    def launch(arguments):
        raise KeyboardInterrupt

    with pytest.raises(
        KeyboardInterrupt, match="in run 1 of 2, seed=1; to continue, run the same command again: unfreeze"
    ):
        sweep.sweep("sft", [*line, "--sweep", "seed=1,2"], QUIET, launch)


def test_the_command_line_sends_it_there_and_only_training_has_it(line, monkeypatch, capsys):
    monkeypatch.setattr(sweep, "sweep", lambda recipe, arguments, common: {"exit_code": 3})
    assert cli.main(["sft", *line, "--sweep=seed=1,2"]) == 3 and cli.main(["sft", *line[:1]]) == 2
    capsys.readouterr()


def test_each_run_is_a_process_of_its_own():
    assert sweep.run_process(["--version"]) == 0 and sweep.run_process(["sft", "--steps"]) == 2


def test_under_torchrun_it_is_refused(line, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="start one torchrun for each value"):
        sweep.planned_points("sft", [*line, "--sweep", "seed=1,2"])
