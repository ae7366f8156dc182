"""recompute = "auto": what is chosen, that it is said, and that a run that goes on keeps it."""

import json
import shutil
from dataclasses import replace

import pytest

from unfreeze import cli
from unfreeze.commands.demo import TINY_K2
from unfreeze.core.layout import RESIDENT
from unfreeze.job.planning import plan as run_plan
from unfreeze.parallel.plan.fastest import SAME_BITS
from unfreeze.report.run import facts, read_run

pytestmark = pytest.mark.usefixtures("fewer_layers")


def sft(chat_rows, out, *flags):
    line = ["sft", "--model", TINY_K2, "--data", chat_rows, "--out", out, "--tokens-per-step", 256]
    line += ["--lora.rank", 1, "--watch.samples", 0, "--threads", 1, "--quiet", *flags]
    code = cli.main([str(word) for word in line])
    events = out / "events.jsonl"
    lines = events.read_text(encoding="utf-8").splitlines() if events.is_file() else []
    return code, [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def began(chat_rows, tmp_path_factory):
    """A run of two of four steps with recompute = "auto"; -> its folder."""
    out = tmp_path_factory.mktemp("auto") / "run"
    code, _ = sft(chat_rows, out, "--steps", 4, "--save-every", 2)
    assert code == 0
    for path in (out / "state" / "step-000004", out / "adapter"):
        shutil.rmtree(path)
    return out


def plans(events):
    return [event for event in events if event["kind"] == "plan"]


def with_memory(monkeypatch, wanted):
    """The free memory in which a run would choose `wanted`."""
    real = run_plan.Planning.plan

    def made(planning, layout, began=""):
        found = real(planning, layout, began)
        if layout.recompute != "auto":
            return found
        among = SAME_BITS if began in SAME_BITS else (began or wanted,)
        return replace(found, layout=found.layout.but(recompute=wanted)) if wanted in among else found

    monkeypatch.setattr(run_plan.Planning, "plan", made)


def test_a_run_says_what_it_chose_and_keeps_it_when_it_goes_on(began, chat_rows, tmp_path, monkeypatch):
    out = tmp_path / "run"
    shutil.copytree(began, out)
    _, events = sft(chat_rows, out, "--steps", 4, "--save-every", 2)
    first, again = plans(events)
    assert first["recompute"] == again["recompute"] == "nothing"
    peak = dict(facts(read_run(out)))["Peak memory"]  # counted of the same
    planned = again["start"][1].removeprefix("memory: ").partition(" of ")[0]
    assert " to " in planned and peak.endswith(f"; whole process (planned: {planned})")
    assert any("recompute = nothing: the fastest that fits" in line for line in first["lines"]), first[
        "lines"
    ]
    assert not any(line.endswith(" 0 B") for line in first["lines"])
    assert any("recompute = nothing" in line for line in first["lines"])
    assert json.loads((out / "resolved_config.json").read_text())["place.recompute"] == "auto"
    # another choice is refused as any other setting is
    assert sft(chat_rows, out, "--steps", 4, "--save-every", 2, "--place.recompute", "layers")[0] == 2


def test_where_it_no_longer_fits_what_gives_the_same_bits_is_taken(chat_rows, tmp_path, monkeypatch):
    """Chosen is elementwise, then there is memory for selective only: losses are those of an unbroken run."""
    with_memory(monkeypatch, "elementwise")
    _, unbroken = sft(chat_rows, tmp_path / "unbroken", "--steps", 4, "--save-every", 2)
    out = tmp_path / "run"
    shutil.copytree(tmp_path / "unbroken", out)
    for path in (out / "state" / "step-000004", out / "adapter"):
        shutil.rmtree(path)
    monkeypatch.undo()
    with_memory(monkeypatch, "selective")
    code, events = sft(chat_rows, out, "--steps", 4, "--save-every", 2)
    assert code == 0 and [event["recompute"] for event in plans(events)] == ["elementwise", "selective"]
    said = [event["message"] for event in events if event["kind"] == "warning"]
    assert any("recompute = selective from here on, because elementwise no longer fits" in m for m in said)
    losses = [[e["loss"] for e in lines if e["kind"] == "train"] for lines in (unbroken, events)]
    assert losses[0] == losses[1] and len(losses[0]) == 4


def test_a_run_that_named_its_choice_keeps_it_without_the_flag(chat_rows, tmp_path):
    out = tmp_path / "run"
    assert sft(chat_rows, out, "--steps", 2, "--place.recompute", "layers")[0] == 0
    code, events = sft(chat_rows, out, "--steps", 3, "--save.allow-changed", "steps")
    assert code == 0 and [event["recompute"] for event in plans(events)] == ["layers", "layers"]


def test_a_run_that_goes_on_may_take_only_what_gives_the_same_bits():
    assert list(run_plan.among(RESIDENT, "")) == ["nothing", "elementwise", "selective", "layers"]
    assert list(run_plan.among(RESIDENT, "selective")) == ["selective", "layers"]
    assert list(run_plan.among(RESIDENT, "nothing")) == ["nothing"]
    assert list(run_plan.among(RESIDENT.but(boundary="host"), "")) == ["elementwise", "selective", "layers"]
    assert list(run_plan.among(RESIDENT.but(keep_layers=2), "")) == ["elementwise", "selective"]
