"""A run with rewards, killed at twenty moments of its life and gone on with: the bits of one that was not."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import unfreeze

pytestmark = pytest.mark.nightly
MOMENTS = 20
REWARD = "def reward(prompt, completion):\n    return completion.count('e') - len(completion) / 50\n"
COMPARED = ("step", "reward", "tokens", "signal", "cut")


def command(folder: Path, out: str) -> list[str]:
    words = "--steps 9 --updates 3 --prompts-per-step 6 --answers 4 --max-new-tokens 12 --rollout.cut score"
    words += " --rank 2 --dtype float32 --save-every 1 --watch.samples 0 --curriculum adaptive --baseline ema"
    start = [sys.executable, "-m", "unfreeze", "grpo", "--model", str(unfreeze.TINY_K2), *words.split()]
    files = ["--data", str(folder / "rows.jsonl"), "--reward", str(folder / "my.py")]
    return [*start, *files, "--out", str(folder / out), "--threads", "1", "--quiet"]


def results(run: Path) -> tuple[dict[str, torch.Tensor], list[dict], dict[int, float]]:
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    rolled = {e["step"]: {name: e[name] for name in COMPARED} for e in events if e["kind"] == "rollout"}
    losses = {e["step"]: e["loss"] for e in events if e["kind"] == "train"}
    return load_file(run / "adapter" / "adapter_model.safetensors"), list(rolled.values()), losses


def test_killed_at_twenty_moments_it_ends_with_the_same_bits(tmp_path):
    (tmp_path / "my.py").write_text(REWARD)
    rows = [json.dumps({"prompt": f"What is {number}?"}) for number in range(12)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows) + "\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run(command(tmp_path, "warm"), env=environment, check=True, timeout=300)
    begun = time.monotonic()
    subprocess.run(command(tmp_path, "whole"), env=environment, check=True, timeout=300)
    seconds = time.monotonic() - begun
    adapter, rolled, losses = results(tmp_path / "whole")
    assert [each["step"] for each in rolled] == [1, 4, 7] and len(losses) == 9

    killed = 0
    for moment in range(MOMENTS):
        out = f"killed-{moment}"
        process = subprocess.Popen(command(tmp_path, out), env=environment)
        try:
            process.wait(seconds * (moment + 0.5) / MOMENTS)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            killed += 1
        subprocess.run(command(tmp_path, out), env=environment, check=True, timeout=300)
        ours, again, same = results(tmp_path / out)
        assert all(torch.equal(tensor, ours[name]) for name, tensor in adapter.items()), moment
        assert again == rolled and same == losses, moment
    assert killed >= MOMENTS - 2
