"""`unfreeze grpo` on two processes: the same rewards, losses and adapter as on one."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from runs import adapter, of_kind

from unfreeze import cli
from unfreeze.core.built_in import TINY_K2

REWARD = '''
def reward(prompt, completion, letter="e"):
    """More of a letter."""
    return completion.count(letter) - 0.01 * len(completion)
'''
WORDS = "--steps 3 --prompts-per-step 4 --answers 4 --max-new-tokens 8 --rollout.cut score --rank 2 --watch.samples 0"
WORDS += " --dtype float32 --learning-rate 5e-3 --micro-batches 2 --device cpu --quiet"


class Finished:
    """A run's folder, as unfreeze.grpo returns it."""

    def __init__(self, path: Path):
        self.path = path
        self.events = [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()]


@pytest.mark.nightly  # 40 s; the loss dealt to two processes is in tests/objectives
def test_two_processes_equal_one(tmp_path):
    (tmp_path / "my.py").write_text(REWARD)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(json.dumps({"prompt": f"What is {n}?", "letter": "aeiou"[n % 5]}) + "\n" for n in range(9))
    )
    words = ["grpo", "--model", str(TINY_K2), "--data", str(rows), "--reward", str(tmp_path / "my.py")]
    words += WORDS.split()
    assert cli.main([*words, "--out", str(tmp_path / "one")]) == 0
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    started = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    started += ["--master-addr", "127.0.0.1", "--master-port", port, "-m", "unfreeze", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [*started, "--out", str(tmp_path / "two")],
        check=True,
        timeout=300,
        env=environment,
        capture_output=True,
    )
    one, two = (Finished(tmp_path / name) for name in ("one", "two"))
    rewards = [[event["reward"] for event in of_kind(run, "rollout")] for run in (one, two)]
    assert rewards[0] == rewards[1] and len(set(rewards[0])) > 1  # the same answers, and not all alike
    losses = [[event["loss"] for event in of_kind(run, "train")] for run in (one, two)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4, abs=1e-6)
    theirs = adapter(two)
    for name, ours in adapter(one).items():
        assert float((ours - theirs[name]).abs().max()) <= 1e-5, name
