"""torchrun -m unfreeze sft: one run folder, one voice, the losses of one process. Process-heavy: one torchrun
and one run in this process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from unfreeze import cli
from unfreeze.commands.demo import TINY_K2

ROWS = [
    {"question": f"What is {n} and {n}?", "answer": f"{2 * n}, it is. Hmm." * (1 + n % 3)} for n in range(24)
]


def events(run: Path, kind: str) -> list[dict]:
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [event for event in lines if event["kind"] == kind]


def test_two_processes_train_as_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    data = tmp_path / "chat.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    command = [
        "sft",
        "--model",
        str(TINY_K2),
        "--data",
        str(data),
        "--tokens-per-step",
        "256",
        "--micro-batches",
        "2",
        "--steps",
        "3",
        "--lora.rank",
        "2",
        "--dtype",
        "float32",
        "--samples",
        "1",
        "--threads",
        "1",
        "--json",
    ]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        port,
        "-m",
        "unfreeze",
    ]
    process = subprocess.run(
        [*torchrun, *command, "--out", str(tmp_path / "two")],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.returncode == 0, process.stderr
    assert cli.main([*command, "--quiet", "--out", str(tmp_path / "one")]) == 0
    (printed,) = process.stdout.splitlines()  # one result, of process 0
    assert json.loads(printed)["steps"] == 3 and process.stderr.count("done after step 3") == 1
    one, two = (events(tmp_path / name, "train") for name in ("one", "two"))
    # updates of tiny gradients amplify rounding
    assert [e["loss"] for e in two] == pytest.approx([e["loss"] for e in one], rel=1e-5)
    assert [e["expert_load"] for e in two] == [e["expert_load"] for e in one]
    for kind in ("start", "plan", "load", "receipt", "end"):
        assert len(events(tmp_path / "two", kind)) == 1, kind
    names = {path.relative_to(tmp_path / "one").as_posix() for path in (tmp_path / "one").rglob("*")}
    assert {path.relative_to(tmp_path / "two").as_posix() for path in (tmp_path / "two").rglob("*")} == names
    capsys.readouterr()


def test_only_the_first_process_speaks_and_the_others_name_themselves(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("RANK", "3")
    assert cli.process() == 0  # a RANK without a WORLD_SIZE isn't torchrun's
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert cli.process() == 3
    assert cli.main(["sftt", "--json"]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("process 3: ConfigError: there is no command 'sftt'") and not said.out
