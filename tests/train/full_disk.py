"""A script for test_full_disk.py, which becomes root of a user namespace of its own: real runs on a tmpfs of a few
hundred kilobytes. Prints JSON."""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import torch
from killing import plant, train_losses

import conftest as tiny
from unfreeze import cli
from unfreeze.checkpoint.save import write_file
from unfreeze.objectives.cross_entropy import cross_entropy
from unfreeze.train import state as module
from unfreeze.train.fit import fit
from unfreeze.train.optim import AdamW
from unfreeze.train.run import Run, latest
from unfreeze.train.schedule import Schedule
from unfreeze.train.state import start_or_resume
from unfreeze.train.timer import Saves

NEW_USER, NEW_MOUNTS, PRIVATE = 0x10000000, 0x00020000, 0x4000 | 0x40000  # of linux/sched.h and linux/mount.h


def alone() -> None:
    """As `unshare --user --map-root-user --mount` would begin this process, which has one thread."""
    user, group, libc = os.geteuid(), os.getegid(), ctypes.CDLL(None, use_errno=True)
    if libc.unshare(NEW_USER | NEW_MOUNTS):
        raise OSError(ctypes.get_errno(), "unshare")
    for name, line in {"setgroups": "deny", "uid_map": f"0 {user} 1", "gid_map": f"0 {group} 1"}.items():
        Path(f"/proc/self/{name}").write_text(line)
    if libc.mount(b"none", b"/", None, ctypes.c_ulong(PRIVATE), None):
        raise OSError(ctypes.get_errno(), "mount")


def small_disk(folder: Path, size: str) -> Path:
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=True)
    return folder


def fill(folder: Path, leave: int) -> Path:
    """A file that leaves so many bytes free."""
    ballast = folder / "ballast"
    ballast.write_bytes(b"x" * (shutil.disk_usage(folder).free - leave))
    return ballast


def loop(folder: Path, on_full_disk: str, full_from: int = 3, room_from: int = 5) -> dict[str, Any]:
    """6 steps of the stand-in model, a save after each; the disk is full from the end of one step to the end
    of another."""

    def disk(state: Any, result: Any) -> None:
        if state.step == full_from:
            fill(folder, leave=8192)  # events still fit, a save of 40 KB does not
        if state.step == room_from:
            (folder / "ballast").unlink(missing_ok=True)

    said = None
    with Run(folder / "run", {}) as run:
        model = tiny.TinyModel()
        state = start_or_resume(run, model, optimizer=AdamW(model), schedule=Schedule(1e-2, 6))
        try:
            fit(
                state,
                tiny.endless(state.cursor),
                cross_entropy,
                recompute=tiny.plain,
                saves=Saves(every=1, on_full_disk=on_full_disk),
                on_step=[disk],
            )
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
    (folder / "ballast").unlink(missing_ok=True)
    events = [json.loads(line) for line in (folder / "run" / "events.jsonl").read_text().splitlines()]
    save = latest(folder / "run")
    return {
        "said": said,
        "left": sorted(path.name for path in (folder / "run" / "state").iterdir()),
        "whole": (
            save is not None
            and sorted(path.name for path in save.iterdir()) == ["state.json", "tensors.safetensors"]
        ),
        "warnings": [[event["step"], event["message"]] for event in events if event["kind"] == "warning"],
        "losses": train_losses(folder / "run"),
    }


def command(folder: Path, arguments: list[str]) -> dict[str, Any]:
    """`unfreeze sft` on a disk that has no room for its second save, then with room."""

    def run() -> tuple[int, str]:
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            code = cli.main([*arguments, "--quiet", "--out", str(folder / "run")])
        return code, said.getvalue()

    first = run()
    left = sorted(path.name for path in (folder / "run" / "state").iterdir())
    subprocess.run(["mount", "-o", "remount,size=64m", folder], check=True)
    return {"first": first, "left": left, "second": run(), "losses": train_losses(folder / "run")}


if __name__ == "__main__":
    alone()
    torch.set_num_threads(1)
    base = Path(sys.argv[1])
    write_file(base / "here", "")
    found = {
        "stop": loop(small_disk(base / "stop", "512k"), "stop"),
        "continue": loop(small_disk(base / "continue", "512k"), "continue"),
        "to the end": loop(small_disk(base / "to the end", "512k"), "continue", room_from=99),
    }
    again = loop(base / "stop", "stop", full_from=99)
    (base / "roomy").mkdir()
    found |= {"again": again, "roomy": loop(base / "roomy", "stop", full_from=99)}
    if len(sys.argv) > 2:
        found["command"] = command(small_disk(base / "command", "896k"), sys.argv[2:])
        (base / "roomy command").mkdir()
        cli.main([*sys.argv[2:], "--quiet", "--out", str(base / "roomy command" / "run")])
        found["expected"] = train_losses(base / "roomy command" / "run")
    plant(module, "in place")  # last, as it stays: the control arm
    found["in place"] = loop(small_disk(base / "in place", "512k"), "stop")
    os.write(1, json.dumps(found).encode() + b"\n")
