"""torchrun -m unfreeze sft: one run folder, one voice, one download, one encoding, the losses of one process;
and what is left where a process is killed. Process-heavy: one torchrun of two processes, whose Python is forked
(elastic.py), one run here, and nightly two more and one of four processes on two nodes, as a user starts them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from unfreeze import cli
from unfreeze.checkpoint import hub
from unfreeze.commands.demo import TINY_K2
from unfreeze.data.store import streamed
from unfreeze.job import data as job_data
from unfreeze.report.run import facts, read_run

ROWS = [
    {"question": f"What is {n} and {n}?", "answer": f"{2 * n}, it is. Hmm." * (1 + n % 3)} for n in range(800)
]
TOGETHER, ELASTIC = (Path(__file__).with_name(name) for name in ("together.py", "elastic.py"))
LIMIT = 280.0  # seconds; alone on two cores a torchrun here takes 12


def events(run: Path, kind: str) -> list[dict]:
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [event for event in lines if event["kind"] == kind]


def losses(run: Path) -> list[float]:
    return [event["loss"] for event in events(run, "train")]


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """As together.py has it: the rows come in windows."""
    monkeypatch.setattr(job_data, "MANY_ROWS", 60)
    for name, value in {"HEAD": 10, "WINDOW": 600, "FULL": 1}.items():
        monkeypatch.setattr(streamed, name, value)


def command(data: Path, out: Path, *more: str) -> list[str]:
    line = (
        f"sft --model org/tiny --data {data} --out {out} --tokens-per-step 512 --micro-batches 4 --steps 4"
        " --save-every 2 --lora.rank 2 --dtype float32 --watch.samples 1 --threads 1 --json"
        " --validation-fraction 0.02 --watch.validate-every 2"
    )
    return [*line.split(), *more]


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def torchrun(folder: Path, line: list[str], *options: str, **environment: str) -> subprocess.Popen[str]:
    """Two processes in a group of their own; what they keep of rows lies in `folder`."""
    options = options if "--nnodes" in options else (*two_processes(), *options)
    start = "-m torch.distributed.run".split()
    return subprocess.Popen(
        [sys.executable, *start, *options, str(TOGETHER), *line],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=kept_in(folder, **environment),
    )


def two_processes() -> tuple[str, ...]:
    return "--nproc-per-node", "2", "--master-port", free_port()


def kept_in(folder: Path, **environment: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache"), **environment}


def ended(process: subprocess.Popen[str], limit: float = LIMIT) -> tuple[int, str, str]:
    """(exit code, stdout, stderr); a run that hangs fails the test."""
    try:
        said, error = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its workers
        raise
    return process.returncode, said, error


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """More than 64 KiB: smaller files are encoded by each process."""
    file = tmp_path_factory.mktemp("data") / "chat.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert file.stat().st_size > 2**16
    return file


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, data: Path, forkserver: Any) -> tuple[Path, str, str]:
    """(folder, stdout, stderr) of a run of two processes in folder/run whose first, which writes, is killed in step
    4, behind the save of step 2; torchrun starts both again."""
    folder = tmp_path_factory.mktemp("killed")
    line = command(data, folder / "run")
    words = [ELASTIC, *two_processes(), "--max-restarts", "1", TOGETHER, *line]
    done = forkserver.run(words, env=kept_in(folder, KILLED="0:4", WINDOWS="1"), timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    return folder, done.stdout, done.stderr


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """The folder of an unbroken run of two processes, in folder/run."""
    folder = tmp_path_factory.mktemp("two")
    code, _, error = ended(torchrun(folder, command(data, folder / "run"), WINDOWS="1"))
    assert code == 0, error
    return folder


def test_two_processes_train_as_one(killed, data: Path, tmp_path: Path, monkeypatch, capsys, windows):
    """On rows that come in windows, which process 0 encodes while both train."""
    folder, said, error = killed
    monkeypatch.setattr(hub, "download", lambda *arguments: TINY_K2)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert cli.main([*command(data, tmp_path / "one"), "--quiet"]) == 0
    (printed,) = said.splitlines()  # one result, of process 0
    assert json.loads(printed)["steps"] == 4 and error.count("done after step 4") == 1
    # updates of tiny gradients amplify rounding
    assert losses(folder / "run") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    one, both = (events(path, "train") for path in (tmp_path / "one", folder / "run"))
    assert [e["expert_load"] for e in both] == [e["expert_load"] for e in one]
    cursors = [
        json.loads((path / "state" / "step-000004" / "state.json").read_text())["cursor"]
        for path in (tmp_path / "one", folder / "run")
    ]
    assert cursors[0] == cursors[1] and cursors[0]["window"] > 1
    for kind, count in {"start": 2, "plan": 2, "load": 2, "receipt": 1, "end": 1}.items():
        assert len(events(folder / "run", kind)) == count, kind  # of two starts
    names = {path.relative_to(tmp_path / "one").as_posix() for path in (tmp_path / "one").rglob("*")}
    made = {path.relative_to(folder / "run").as_posix() for path in (folder / "run").rglob("*")}
    assert made == names
    assert ("Processes", "2") in facts(read_run(folder / "run"))
    assert "Processes" not in dict(facts(read_run(tmp_path / "one")))
    capsys.readouterr()


def marked(folder: Path) -> list[str]:
    return sorted(path.name.rsplit("-", 1)[0] for path in (folder / "marks").iterdir())


def encoded_once(folder: Path, error: str) -> None:
    """Process 0 looked and encoded, and the other read what it left."""
    assert marked(folder) == ["download-0", "encoding-0"]
    assert error.count("process 0 looks for data and model; the other process waits for it") == 1
    assert error.count("process 0 encodes the rows on all cores; the other process waits for it") == 1


def test_a_killed_process_is_named_and_torchrun_goes_on_from_the_last_save(killed):
    """The other process says it. Its losses are those of one process: the test above."""
    folder, _, error = killed
    lines = [line for line in error.splitlines() if line.startswith(("ProcessGone", "process 1: Proc"))]
    gone = "process 1: ProcessGone: process 0 is gone (connection closed) in step 4; saved: step-000002"
    assert lines == [gone]
    assert "next: give the same command again: torchrun --nproc-per-node 2 -m unfreeze sft" in error
    assert "Traceback" not in error
    assert [event["resumed"] for event in events(folder / "run", "start")] == [False, True]


@pytest.mark.nightly  # 12 s: a second torchrun; saves of several processes to the bit: tests/train/test_shards.py
def test_it_has_the_bits_of_the_unbroken_run(killed, two: Path):
    assert losses(killed[0] / "run") == losses(two / "run")


@pytest.mark.nightly  # 10 s; Ctrl-C in one process: tests/recipes/test_sft.py
def test_ctrl_c_at_torchrun_saves_in_all_and_rows_were_encoded_by_one(data: Path, tmp_path: Path):
    (tmp_path / "marks").mkdir()
    line = command(data, tmp_path / "run", "--steps", "4000", "--save-every", "0")
    process = torchrun(tmp_path, line, MARKS=str(tmp_path / "marks"))
    log = tmp_path / "run" / "events.jsonl"
    until = time.monotonic() + LIMIT
    while time.monotonic() < until and not (log.is_file() and b'"train"' in log.read_bytes()):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, _, error = ended(process)
    (last,) = events(tmp_path / "run", "end")
    assert last["reason"] == "interrupted", error
    assert (tmp_path / "run" / "state" / f"step-{last['step']:06d}" / "state.json").is_file()
    assert f"interrupted after step {last['step']}, everything is saved" in error
    encoded_once(tmp_path, error)


@pytest.mark.nightly
def test_two_nodes_share_experts_within_and_go_on_when_a_process_is_killed(two, data: Path, tmp_path: Path):
    """Two agents with two processes each, one run folder; the experts are split within a node, so that every
    pass is an exchange, also those of samples and validation. The first node says whom it lost, though it is
    of the second, and both agents start again."""
    (tmp_path / "marks").mkdir()
    line = command(data, tmp_path / "run", "--place.split", "2")
    where = f"--nnodes 2 --nproc-per-node 2 --master-addr 127.0.0.1 --master-port {free_port()}".split()
    kept = {"KILLED": "3:4", "MARKS": str(tmp_path / "marks"), "WINDOWS": "1"}
    nodes = [
        torchrun(tmp_path, line, *where, "--max-restarts", "1", "--node-rank", str(rank), **kept)
        for rank in (0, 1)
    ]
    (first, _, error), (second, *silent) = [ended(node) for node in nodes]
    assert (first, second) == (0, 0), error + silent[1]
    gone = "ProcessGone: process 3 is gone (connection closed) in step 4; saved: step-000002"
    assert error.count(gone) == 1 and not silent[0] and "ProcessGone" not in silent[1]
    assert (
        "torchrun --nproc-per-node 2 -m unfreeze sft" in error and "(on each of 2 nodes, as before)" in error
    )
    assert losses(tmp_path / "run") == pytest.approx(losses(two / "run"), rel=1e-5)
    held, before = ([e["loss"] for e in events(run / "run", "eval")] for run in (tmp_path, two))
    assert held == pytest.approx(before, rel=1e-6) and len(held) == 3
    said, expected = ([e["text"] for e in events(run / "run", "sample")] for run in (tmp_path, two))
    assert said == expected
    # the first process of each node looks, twice
    assert marked(tmp_path) == ["download-0"] * 2 + ["download-2"] * 2


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
