"""A disk that fills up during a run: it says so, the save before stays whole, and the run stops or goes on as
asked (docs/why/trust.md R1)."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from unfreeze import cli
from unfreeze.commands.demo import TINY_K2
from unfreeze.config.parse import writing
from unfreeze.core import errors
from unfreeze.core.errors import ConfigError, size_limit
from unfreeze.core.events import EventLog
from unfreeze.report.events import read_events

ROWS = [
    {"question": f"What is the symbol of gold, {word}?", "answer": f"Au, the symbol of gold is, {word}. Hmm."}
    for word in "abcdefgh"
]
SMALL = [
    "--steps",
    "4",
    "--tokens-per-step",
    "64",
    "--lora.rank",
    "1",
    "--watch.samples",
    "0",
    "--save-every",
    "1",
    "--threads",
    "1",
]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory, rows: Path, forkserver: Any) -> dict[str, Any]:
    """What full_disk.py found on real small file systems."""
    inside = ["unshare", "--user", "--map-root-user", "--mount"]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*inside, "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip(
            "this machine gives no user namespace to mount a small file system in;"
            " test_a_failed_save_leaves_the_one_before stands in"
        )
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        "OMP_NUM_THREADS": "1",
    }
    script = [Path(__file__).with_name("full_disk.py"), tmp_path_factory.mktemp("full")]
    command = ["sft", "--model", str(TINY_K2), "--data", str(rows), *SMALL, "--save.keep", "9"]
    process = forkserver.run([*script, *command], env=environment)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1])


SAID = (
    r"could not save .*/state/step-000003: the disk is full; [\d.]+ KiB needed, [\d.]+ KiB free. Earlier"
    r" saves are untouched, the last is step-000002"
)


def test_by_default_the_run_stops_and_the_same_command_goes_on_exactly(full: dict[str, Any]):
    stopped = full["stop"]
    assert re.match(
        f"DiskFull: {SAID}\n  next: free space on the disk of .*/state, then run the same command again",
        stopped["said"],
    )
    # and no .tmp: its room was given back
    assert stopped["left"] == ["step-000001", "step-000002"] and stopped["whole"]
    assert (
        full["again"]["said"] is None
        and full["again"]["losses"] == full["roomy"]["losses"]
        and len(full["roomy"]["losses"]) == 6
    )


def test_with_continue_each_save_without_room_is_a_warning_and_later_saves_are_made(full: dict[str, Any]):
    went_on = full["continue"]
    assert went_on["said"] is None and went_on["losses"] == full["roomy"]["losses"]
    assert [step for step, _ in went_on["warnings"]] == [3, 4]
    assert re.match(SAID + "; training continues without it$", went_on["warnings"][0][1])
    assert went_on["left"] == ["step-000005", "step-000006"]


def test_the_save_at_the_end_is_never_only_a_warning(full: dict[str, Any]):
    ended = full["to the end"]
    assert "step-000006: the disk is full" in ended["said"] and [step for step, _ in ended["warnings"]] == [
        3,
        4,
        5,
    ]
    assert ended["left"] == ["step-000001", "step-000002"] and ended["whole"]


def test_control_arm_a_save_in_place_leaves_a_half_one_as_the_latest(full: dict[str, Any]):
    assert (
        full["in place"]["left"] == ["step-000001", "step-000002", "step-000003"]
        and not full["in place"]["whole"]
    )


def test_unfreeze_sft_says_it_in_one_line_and_goes_on_when_there_is_room(full: dict[str, Any]):
    (code, said), (again, _) = full["command"]["first"], full["command"]["second"]
    assert (
        code == 2
        and said.startswith("DiskFull: could not save ")
        and "the disk is full" in said
        and "Traceback" not in said
    )
    assert full["command"]["left"] and not any(name.endswith(".tmp") for name in full["command"]["left"])
    assert again == 0 and full["command"]["losses"] == full["expected"] and len(full["expected"]) == 4


class Full:
    """A file that takes half of what it is given, as a full disk does; `room` bytes are left."""

    def __init__(self, file: Any, room: int):
        self.file, self.room, self.name = file, room, file.name

    def write(self, data: bytes) -> int:
        taken = min(len(data), self.room)
        self.room -= taken
        return self.file.write(data[:taken])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def test_an_event_is_written_whole_or_not_at_all(tmp_path: Path):
    log = EventLog(tmp_path / "events.jsonl")
    log.emit("train", 1, loss=1.0, grad_norm=1.0)
    log._file = Full(log._file, room=10)
    with pytest.raises(OSError, match="No space left") as caught:
        log.emit("train", 2, loss=1.0, grad_norm=1.0)
    assert caught.value.errno == errno.ENOSPC
    log._file.room = 1000
    log.emit("train", 3, loss=1.0, grad_norm=1.0)
    log.close()
    assert [event["step"] for event in read_events(tmp_path / "events.jsonl")] == [1, 3]


@contextmanager
def at_most(nbytes: int) -> Iterator[None]:
    """`ulimit -f` of the system itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_the_limit_on_a_files_size_is_not_called_a_full_disk(tmp_path: Path):
    """Of an event, and of a folder that a command writes; of a save: test_state.py."""
    log = EventLog(tmp_path / "events.jsonl")
    log.emit("train", 1, loss=1.0, grad_norm=1.0)
    size = log.path.stat().st_size
    with at_most(size + 10), pytest.raises(OSError, match="File too large"):
        log.emit("train", 2, loss=1.0, grad_norm=1.0)
    log.close()
    assert log.path.stat().st_size == size
    reason = r"is 10\.0 KiB\n  next: ulimit -f unlimited$"
    with pytest.raises(ConfigError, match=reason), at_most(10 * 1024), writing(tmp_path, "out"):
        (tmp_path / "model").write_bytes(bytes(20_000))


def test_without_such_a_limit_it_is_the_file_systems(monkeypatch: pytest.MonkeyPatch):
    assert size_limit() == ("the file system takes no larger file", "use another file system")
    monkeypatch.setattr(errors, "file_limits", lambda: (2**20, 2**20))
    limit = "the limit on a file's size (ulimit -f) is 1.0 MiB"
    assert size_limit() == (limit, "ulimit -f unlimited in a new shell")


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (errno.ENOSPC, "DiskFull: the disk of RUN is full; free space, then give"),
        (
            errno.EFBIG,
            "UserError: the limit on a file's size (ulimit -f) is 1.0 MiB; ulimit -f unlimited, then give",
        ),
    ],
    ids=["no room", "size limit"],
)
def test_an_event_or_file_without_room_ends_the_run_in_one_line(
    number: int,
    says: str,
    rows: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr(errors, "file_limits", lambda: (2**20, None))
    emit = EventLog.emit

    def no_room(self: EventLog, kind: str, step: int, **fields: Any) -> Any:
        if kind == "train" and step == 3:
            raise OSError(number, os.strerror(number), str(self.path))
        return emit(self, kind, step, **fields)

    monkeypatch.setattr(EventLog, "emit", no_room)
    run = tmp_path / "run"
    assert (
        cli.main(["sft", "--quiet", "--model", str(TINY_K2), "--data", str(rows), *SMALL, "--out", str(run)])
        == 2
    )
    said = capsys.readouterr().err
    assert said.startswith(
        says.replace("RUN", str(run)).replace(
            "; ", f", at {run}/events.jsonl; the run is saved as of step-000002\n  next: "
        )
    )
