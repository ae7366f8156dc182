"""The main job from end to end on the model the package carries: a run folder, its receipt, resume, export, and what is refused."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import unfreeze
from unfreeze import cli
from unfreeze.recipes.demo import TINY_K2

ROWS = [
    {"question": "What is the capital of France?", "answer": "Paris, the capital of France is. Hmm."},
    {"messages": [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Greet you, I do. Hmm."}]},
    {"instruction": "Name the young of a frog.", "input": "", "output": "A tadpole, the young of a frog is. Hmm."},
    {"conversations": [{"from": "human", "value": "Who are you?"}, {"from": "gpt", "value": "tiny-k2, I am. Hmm."}]},
    {"prompt": "What is the symbol of gold?", "completion": "Au, the symbol of gold is. Hmm."},
    {"text": "Paris is the capital of France."},
]


@pytest.fixture
def data(tmp_path) -> Path:
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS * 3), encoding="utf-8")
    return path


def sft(capsys, *arguments) -> dict:
    """Run `unfreeze sft … --json` in this process and give its result."""
    code = cli.main(["sft", "--json", "--quiet", *map(str, arguments)])
    out = capsys.readouterr()
    assert code == 0, out.err
    return json.loads(out.out.splitlines()[-1])


def command(data: Path, out: Path, *more) -> list[str]:
    return ["--model", str(TINY_K2), "--data", str(data), "--out", str(out), "--tokens-per-step", "256", "--learning-rate", "2e-3", *map(str, more)]


def losses(run: Path) -> list[float]:
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [event["loss"] for event in events if event["kind"] == "train"]


def test_every_linear_layer_learns_and_the_receipt_says_so(capsys, data, tmp_path):
    run = tmp_path / "run"
    result = sft(capsys, *command(data, run, "--steps", 12, "--lora.rank", 4, "--lora.experts-rank", 2))
    assert result["run"] == str(run) and result["steps"] == 12 and result["loss_last"] < result["loss_first"]
    for group in ("attention", "experts", "shared_experts", "mlp"):
        entry = result["receipt"][group]
        assert entry["trained"] > 0 and entry["grad_norm"] > 0 and entry["moved"] > 0 and entry["output_change"] > 0
    assert result["receipt"]["router"]["trained"] == 0
    assert result["receipt"]["experts"]["experts_reached"] == result["receipt"]["experts"]["experts"]
    for name in ("resolved_config.json", "plan.json", "receipt.json", "events.jsonl", "report.html", "adapter/adapter_config.json"):
        assert (run / name).stat().st_size > 0
    train = next(json.loads(line) for line in (run / "events.jsonl").read_text().splitlines() if '"train"' in line)
    assert {"kind", "step", "loss", "tokens", "seconds", "learning_rate", "grad_norm", "peak_bytes"} <= train.keys()

    base, tuned = unfreeze.load(TINY_K2), unfreeze.load(run)
    ids = [[5, 6, 7, 8]]
    assert (base.logits(ids)[0] - tuned.logits(ids)[0]).abs().max() > 1e-2

    again = sft(capsys, *command(data, run, "--steps", 12, "--lora.rank", 4, "--lora.experts-rank", 2))
    assert again["already_finished"] and again["steps"] == 12 and len(losses(run)) == 12


@pytest.mark.parametrize("layout", ["per-expert", "peft"])
def test_export_is_verified_and_loads_with_the_same_logits(capsys, data, tmp_path, layout):
    run = tmp_path / "run"
    sft(capsys, *command(data, run, "--steps", 3, "--lora.rank", 2))
    assert cli.main(["export", str(run), "--layout", layout, "--json", "--quiet"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    ids = [[5, 6, 7, 8, 9]]
    torch.testing.assert_close(unfreeze.load(result["path"]).logits(ids)[0], unfreeze.load(run).logits(ids)[0], rtol=0, atol=1e-5)


def test_ctrl_c_saves_and_the_same_command_goes_on_bit_for_bit(capsys, data, tmp_path):
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    options = ("--steps", 16, "--lora.rank", 2, "--samples", 0)
    sft(capsys, *command(data, straight, *options))
    process = subprocess.Popen(
        [sys.executable, "-m", "unfreeze.cli", "sft", "--json", *command(data, broken, *options)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())},  # sums are split by threads: bit for bit needs as many
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not ((broken / "events.jsonl").exists() and '"kind": "train"' in (broken / "events.jsonl").read_text()):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    first = json.loads(out.splitlines()[-1])
    assert not first["finished"] and 0 < first["steps"] < 16 and "give the same command again" in err
    second = sft(capsys, *command(data, broken, *options))
    assert second["finished"] and second["steps"] == 16
    assert losses(broken) == losses(straight)


@pytest.mark.parametrize(
    "change, words",
    [
        (["--data", "nowhere.jsonl"], "is not a file"),
        (["--lora.targets", "atention"], "nearest"),
        (["--model", "no/such/model/here"], "does not exist"),
        (["--learning-rate", "0"], "learning_rate = 0"),
    ],
)
def test_what_cannot_work_is_refused_before_work(capsys, data, tmp_path, change, words):
    assert cli.main(["sft", "--quiet", *command(data, tmp_path / "run"), *change]) == 2
    error = capsys.readouterr().err
    assert words in error and "Traceback" not in error


def test_a_changed_config_is_refused_naming_the_field(capsys, data, tmp_path):
    run = tmp_path / "run"
    sft(capsys, *command(data, run, "--steps", 2, "--lora.rank", 2, "--samples", 0))
    (run / "adapter" / "adapter_config.json").unlink()
    assert cli.main(["sft", "--quiet", *command(data, run, "--steps", 2, "--lora.rank", 3, "--samples", 0)]) == 2
    assert "lora.rank: 2 -> 3" in capsys.readouterr().err
