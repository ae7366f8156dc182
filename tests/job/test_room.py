"""A disk that is too small is refused or warned about before a run trains."""

import json
import shutil

import pytest

from unfreeze import cli
from unfreeze.commands.demo import TINY_K2
from unfreeze.job.end.folder import SAME_CALL, again
from unfreeze.job.planning import plan as run_plan
from unfreeze.report.html import summary_lines

pytestmark = pytest.mark.usefixtures("fewer_layers")


@pytest.fixture
def sft(chat_rows, tmp_path, monkeypatch, capsys):
    """-> sft(free, *flags): exit code, what stderr says, and the events of a run of two steps."""
    out = tmp_path / "run"
    real = shutil.disk_usage(tmp_path)

    def run(free, *flags):
        monkeypatch.setattr(run_plan.shutil, "disk_usage", lambda _: real._replace(free=int(free)))
        line = ["sft", "--model", TINY_K2, "--data", chat_rows, "--steps", 2, "--out", out, *flags]
        code = cli.main([*map(str, line), "--tokens-per-step", "256", "--quiet"])
        events = out / "events.jsonl"
        lines = events.read_text(encoding="utf-8").splitlines() if events.is_file() else []
        return code, capsys.readouterr().err, [json.loads(line) for line in lines]

    run.out = out
    return run


def test_no_room_for_a_save_is_refused_before_a_weight_is_read(sft):
    code, said, events = sft(0)
    assert code == 2 and "0 B free" in said and "the run writes at most" in said, said
    assert "--save.keep" in said and not any(event["kind"] in ("load", "train") for event in events)


@pytest.mark.parametrize("free, warned", [(3.0, False), (0.9, True)])
def test_room_for_some_saves_is_a_warning_and_for_all_is_none(free, warned, sft, monkeypatch):
    disks = []
    real = run_plan.disk_of
    monkeypatch.setattr("unfreeze.job.setup.disk_of", lambda *given: disks.append(real(*given)) or disks[-1])
    sft(0)
    code, _, events = sft(free * disks[0].needed)
    assert code == 0
    said = [event["message"] for event in events if event["kind"] == "warning"]
    assert any(message.startswith("disk: ") for message in said) is warned


def test_a_run_that_goes_on_is_not_asked_and_knows_how_long_a_save_took(sft):
    code, _, events = sft(2**40)
    assert code == 0
    plan, save = (next(event for event in events if event["kind"] == kind) for kind in ("plan", "save"))
    assert plan["save_bytes"] == pytest.approx(save["bytes"], abs=20_000)  # random numbers, a step a matrix
    assert "every 10 min" in plan["lines"][-1] and "the last one took" not in str(plan["lines"])
    code, said, events = sft(0, "--steps", 4, "--save.allow-changed", "steps")
    assert code == 0, said
    assert "the run writes at most" not in said
    assert "the last one took" in [event for event in events if event["kind"] == "plan"][-1]["lines"][-1]
    assert any(line.startswith("  Saves") for line in summary_lines(sft.out))


@pytest.mark.parametrize("field, more", [("steps", ["--steps", 4]), ("epochs", [])])
def test_a_finished_run_says_how_to_train_more_and_that_is_true(field, more, chat_rows, tmp_path, capsys):
    def run(*flags):
        line = ["sft", "--model", TINY_K2, "--data", chat_rows, "--out", tmp_path / "run", *flags]
        code = cli.main([*map(str, line), "--tokens-per-step", "256", "--watch.samples", "0"])
        said = capsys.readouterr().err
        steps = [json.loads(words) for words in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
        return code, " ".join(said.split()), max(event["step"] for event in steps)

    first = ["--steps", 2] if field == "steps" else ["--epochs", 0.5]
    code, said, before = run(*first)
    assert code == 0 and "to train more" not in said
    code, said, again = run(*first)
    assert code == 0 and again == before
    assert f"a higher --{field} and --save.allow-changed {field}" in said
    assert f"with --adapter {tmp_path / 'run'} and another --out" in said
    code, said, after = run(*(more or ["--epochs", 1]), "--save.allow-changed", field)
    assert code == 0 and after > before, said


def test_how_to_go_on_is_one_phrase_in_python_and_on_the_command_line():
    assert again(SAME_CALL) == "make the same call again"
    assert again("unfreeze sft") == "give the same command again: unfreeze sft"
