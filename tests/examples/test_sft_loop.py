"""examples/sft_loop.py is what `unfreeze sft` computes: the same losses and the same adapter, to the bit."""

import io
import json
import os
import runpy
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

import unfreeze
from unfreeze import cli
from unfreeze.drill.sandbox import TINY_K2

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "sft_loop.py"
SETTINGS = {
    "steps": 4,
    "tokens_per_step": 256,
    "rank": 2,
    "learning_rate": 5e-3,
    "seed": 3,
    "dtype": "float32",
    "device": "cpu",
}
FLAGS = [text for name, value in SETTINGS.items() for text in (f"--{name.replace('_', '-')}", str(value))]


def losses(out):
    lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["loss"] for line in lines]


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """The run that the loop must equal."""
    out, data = tmp_path_factory.mktemp("job") / "run", TINY_K2 / "yoda_train.jsonl"
    more = {"alpha": 32.0, "threads": 1, "samples": 0, "quiet": True}
    return unfreeze.sft(model=TINY_K2, data=data, out=out, **more, **SETTINGS)


@pytest.fixture(scope="module")
def script(tmp_path_factory, forkserver):
    """The script as a user starts it. -> (folder, what it said)"""
    out = tmp_path_factory.mktemp("script") / "run"
    said = forkserver.run([SCRIPT, "--out", out, *FLAGS], env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert said.returncode == 0, said.stderr
    return out, said


def test_its_losses_and_its_adapter_are_those_of_a_run(job, script):
    assert len(job.losses) == 4 and losses(script[0]) == job.losses
    files = [folder / "adapter" / "adapter_model.safetensors" for folder in (script[0], job.path)]
    ours, theirs = map(load_file, files)
    assert ours.keys() == theirs.keys() and all(ours[name].equal(theirs[name]) for name in ours)


def test_it_says_each_step_and_what_to_do_next_and_nothing_on_stderr(script):
    out, said = script
    lines = said.stdout.splitlines()
    assert sum(line.startswith("step ") for line in lines) == 4
    assert lines[-1].startswith(f"next: unfreeze chat {out}/adapter")
    assert said.stderr == ""


def test_chat_reads_the_adapter_it_writes(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is the capital of France?\n"))
    adapter = str(script[0] / "adapter")
    assert cli.main(["chat", adapter, "--max-new-tokens", "4", "--device", "cpu", "--json"]) == 0
    answered = json.loads(capsys.readouterr().out.splitlines()[-1])["messages"]
    assert [message["role"] for message in answered] == ["user", "assistant"] and answered[1]["content"]


@pytest.mark.parametrize(
    "line, bug",
    [
        ("optimizer.zero_grad()", "pass"),
        ("rate = schedule.learning_rate(step)", "rate = config.learning_rate"),
        ("config.tokens_per_step, config.seed)", "config.tokens_per_step, config.seed + 1)"),
    ],
    ids=["gradients pile up", "no schedule", "another order"],
)
def test_a_planted_bug_is_seen_in_the_losses(job, tmp_path, monkeypatch, line, bug):
    source = SCRIPT.read_text(encoding="utf-8")
    assert source.count(line) == 1
    (tmp_path / "planted.py").write_text(source.replace(line, bug), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["planted.py", "--out", str(tmp_path / "run"), *FLAGS])
    runpy.run_path(str(tmp_path / "planted.py"), run_name="__main__")
    assert losses(tmp_path / "run") != job.losses


def test_it_is_short_and_its_loop_is_its_own():
    source = SCRIPT.read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 140 and max(map(len, source.splitlines())) <= 110
    kept_away = ("unfreeze.job", "unfreeze.api", "train.step", "train.fit", "recipes")
    assert not any(module in source for module in kept_away)
