"""`unfreeze report`: the page of a run, and its summary with the account of the data; --watch follows a run
that goes on."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shlex
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from unfreeze import cli
from unfreeze.commands import report
from unfreeze.core.command import Common

STEP = {"kind": "train", "time": 1.0, "loss": 1.0, "grad_norm": 1.0, "tokens": 10, "seconds": 1.0}


def test_page_and_summary(run_dir, unfreeze_json, capsys):
    (run_dir / "report.html").unlink()
    result = unfreeze_json("report", run_dir)
    page = (run_dir / "report.html").read_text(encoding="utf-8")
    assert result["report"] == str(run_dir / "report.html") and "supervised share" in page
    words = " ".join(" ".join(result["summary"]).split())  # lines are folded
    assert "18 rows" in words and "% supervised" in words
    assert cli.main(["report", str(run_dir)]) == 0
    assert capsys.readouterr().out.splitlines() == [*result["summary"], f"report: {run_dir / 'report.html'}"]


def test_a_folder_without_a_run_is_said(tmp_path, capsys):
    for flags in ([], ["--watch"]):
        assert cli.main(["report", str(tmp_path), *flags]) == 2
        assert "events.jsonl is missing" in capsys.readouterr().err


def test_a_run_that_is_not_there_is_said_with_one_that_is(run_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["report", "runs/nope"]) == 2
    said = capsys.readouterr().err
    assert f"there is no run runs/nope in {tmp_path}" in said and "next: give the folder that --out" in said
    assert cli.main(["report", str(run_dir.parent / "thre steps")]) == 2
    assert f"next: {shlex.join(['unfreeze', 'report', str(run_dir)])}\n" in capsys.readouterr().err
    for name in ("a", "b", "c", "mine"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "events.jsonl").touch()
        (tmp_path / "runs" / name / "resolved_config.json").write_text("{}")
    for line in (["report", "runs/min"], ["compare", "runs/a", "runs/min"], ["chat", "runs/min"]):
        assert cli.main(line) == 2
        mended = " ".join(line).replace("runs/min", "runs/mine")
        assert f"next: unfreeze {mended}\n" in capsys.readouterr().err


@pytest.mark.parametrize("number, remedy", [(errno.ENOSPC, "free space there"), (errno.EACCES, "make ")])
def test_a_disk_without_room_for_the_page_still_gives_the_summary(
    run_dir, monkeypatch, capsys, number: int, remedy: str
):
    """Control arm: a folder that may not be written to is no full disk."""

    def refused(folder, **options):
        raise OSError(number, os.strerror(number), f"{folder}/report.html")

    monkeypatch.setattr(report, "write_report", refused)
    assert cli.main(["report", str(run_dir)]) == 2
    said = capsys.readouterr()
    assert "Loss  " in said.out and "report:" not in said.out
    assert f"next: {remedy}" in said.err and "--run" not in said.err
    assert ("the disk at /" in said.err) == (number == errno.ENOSPC)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """As a run holds its folder."""
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def wait_for(there, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < end, "not within the time"
        time.sleep(0.02)


def append(folder: Path, **event) -> None:
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n")


def test_watch_follows_a_run_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr(report.watch, "__kwdefaults__", {"quiet": False, "seconds": 0.05})
    page = tmp_path / "report.html"
    append(tmp_path, **STEP, step=1)
    watching = threading.Thread(target=report.main, args=([str(tmp_path), "--watch"], Common()))
    with locked(tmp_path):
        watching.start()
        wait_for(page.is_file)
        assert '<meta http-equiv="refresh" content="4">' in page.read_text()
        append(tmp_path, **STEP, step=2)
        wait_for(lambda: "<dd>2</dd>" in page.read_text())
        assert watching.is_alive()
        append(tmp_path, kind="end", step=2, reason="done")
        watching.join(20)
    assert not watching.is_alive() and 'http-equiv="refresh"' not in page.read_text()
    said = capsys.readouterr()
    assert f"watching {tmp_path}; open {page}" in said.err and f"report: {page}" in said.out


def test_a_killed_run_is_watched_no_longer(tmp_path: Path, capsys):
    append(tmp_path, **STEP, step=1)
    report.watch(tmp_path, seconds=0.01)
    assert f"no process writes to {tmp_path} any more" in capsys.readouterr().err


def test_ctrl_c_ends_the_watch_and_leaves_a_page_that_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    def pressed(seconds: float) -> None:
        raise KeyboardInterrupt

    append(tmp_path, **STEP, step=1)
    monkeypatch.setattr(report.time, "sleep", pressed)
    with locked(tmp_path):
        assert report.main([str(tmp_path), "--watch"], Common())["report"] == str(tmp_path / "report.html")
    assert "stopped watching" in capsys.readouterr().err
    assert 'http-equiv="refresh"' not in (tmp_path / "report.html").read_text()
