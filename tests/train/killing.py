"""A script for test_kill.py: one process that imports everything once, then forks children and kills them
with SIGKILL.

A child can be told to die right before its n-th file operation under a folder (open for writing, write of a
tensor, fsync, rename, mkdir, remove), so that every moment of a save can be hit; or it is killed by the
parent's clock. Prints one JSON object.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

# what CPython audits; os.fsync and the write of a tensor are added
OPERATIONS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir")


class FileOperations:
    """Counts what this process does to files under `folder`, and calls `before(number, operation)` ahead of
    each. It stays for good."""

    def __init__(self, folder: Path, before: Callable[[int, str], None]):
        from unfreeze.checkpoint import save as writing

        self.folder, self.before, self.count = str(folder), before, 0
        sys.addaudithook(self._audit)
        fsync, raw = os.fsync, writing._raw

        def counted_fsync(descriptor: int) -> None:
            self._see("fsync", os.readlink(f"/proc/self/fd/{descriptor}"))
            fsync(descriptor)

        def counted_write(tensor: Any) -> Any:
            self._see("write", self.folder)
            return raw(tensor)

        os.fsync, writing._raw = counted_fsync, counted_write

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        reads = event == "open" and arguments[1] in ("r", "rb", None)
        if event in OPERATIONS and not reads and isinstance(arguments[0], (str, bytes, os.PathLike)):
            self._see(event, os.fsdecode(arguments[0]))

    def _see(self, operation: str, path: str) -> None:
        if path.startswith(self.folder):
            self.count += 1
            self.before(self.count, operation)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def forked(work: Callable[[], int], kill_after: Callable[[], None] | None = None) -> int:
    """Exit code of `work` in a child (minus the signal's number where one ended it); killed when
    `kill_after`, a wait, returns."""
    child = os.fork()
    if child == 0:
        signal.alarm(120)  # a child that hangs ends as an error, not as a test that never ends
        code = 70
        try:
            code = work()
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(code)
    if kill_after is not None:
        kill_after()
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def one_run_killed_often(command: list[str], out: Path, kills: int, seed: int) -> dict[str, Any]:
    """`unfreeze COMMAND --out out/straight` once in peace; the same into out/killed, killed `kills` times,
    then left alone."""
    from unfreeze import cli

    def run(name: str, *more: str) -> int:
        return cli.main([*command, "--quiet", "--out", str(out / name), *more])

    assert run("warm", "--steps", "1") == 0  # imports and compiled kernels, once for all children
    assert forked(lambda: run("straight")) == 0
    dice, seen = random.Random(seed), []

    def at_operation(number: int) -> int:
        FileOperations(out / "killed" / "state", lambda count, operation: die() if count == number else None)
        return run("killed")

    def wait_for_steps(steps: int) -> None:
        """Until the child has so many more train events (0: it is still loading), and a moment longer than
        that."""
        log = out / "killed" / "events.jsonl"
        until, deadline = count_steps(log) + steps, time.monotonic() + 60
        while steps and count_steps(log) < until and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(dice.uniform(0, 0.03 if steps else 0.2))

    for number in range(kills):
        if number % 2:
            code = forked(lambda: run("killed"), kill_after=partial(wait_for_steps, dice.randint(0, 3)))
        else:
            code = forked(partial(at_operation, dice.randint(1, 120)))
        saves = sorted(path.name for path in (out / "killed" / "state").glob("step-*"))
        seen.append({"code": code, "saves": saves})
    return {"seen": seen, "last": forked(lambda: run("killed"))}


def every_moment_of_a_save(folder: Path, bug: str) -> dict[str, Any]:
    """A run of the stand-in model, killed before each file operation of its third save (keep 1, so that it
    prunes too), then gone on with;
    of many operations of one kind in a row only before the first and the last.

    -> {"operations": [...], "left": [step of the latest save after the kill, or the error], "losses": [[...]
    of steps 1 to 4, or the error]}
    """
    import torch._dynamo  # noqa: F401 (torch's optimizers import it at their first step, over a second in each child)

    import conftest as tiny
    from unfreeze.objectives.cross_entropy import cross_entropy
    from unfreeze.train import state as module
    from unfreeze.train.fit import fit
    from unfreeze.train.optim import AdamW
    from unfreeze.train.run import Run
    from unfreeze.train.schedule import Schedule
    from unfreeze.train.timer import Saves

    def run_in(path: Path, watch: Callable[[Any], None] = lambda state: None) -> int:
        with Run(path, {}) as run:
            (path / "left").write_text(str(run.step))
            model = tiny.TinyModel(layers=1)
            state = module.start_or_resume(run, model, optimizer=AdamW(model), schedule=Schedule(1e-2, 4))
            watch(state)
            fit(
                state,
                tiny.endless(state.cursor),
                cross_entropy,
                recompute=tiny.plain,
                saves=Saves(every=1, keep=1),
            )
        return 0

    def killed_at(path: Path, number: int) -> int:
        """Number 0: nothing is killed, the operations of the third save are written down."""
        names: list[str] = []

        def before(count: int, operation: str) -> None:
            if armed and armed[0].step == 3:
                names.append(operation)
                (path / "operations").write_text(" ".join(names))
                if len(names) == number:
                    die()

        armed: list[Any] = []
        FileOperations(path / "state", before)
        return run_in(path, armed.append)

    run_in(folder / "warm")  # compiled kernels, once for all children
    whole = module._write
    plant(module, bug)
    assert forked(lambda: killed_at(folder / "0", 0)) == 0
    operations = (folder / "0" / "operations").read_text().split()
    padded = ["", *operations, ""]
    # of many writes the first and last
    moments = [n for n in range(1, len(operations) + 1) if not padded[n - 1] == padded[n] == padded[n + 1]]
    left, losses = [], []
    for number in moments if bug == "none" else moments[::4]:
        path = folder / str(number)
        assert forked(lambda path=path, number=number: killed_at(path, number)) == -signal.SIGKILL, (
            number,
            operations,
        )
        code = forked(lambda path=path: run_in(path))
        left.append(int((path / "left").read_text()) if code == 0 else "unreadable")
        losses.append(train_losses(path) if code == 0 else "unreadable")
    module._write = whole
    return {"operations": operations, "left": left, "losses": losses, "straight": train_losses(folder / "0")}


def plant(module: Any, bug: str) -> None:
    """Two ways of saving that look right and are not."""
    write = module._write
    if bug == "in place":  # the final name from the beginning: half a save counts as whole

        def in_place(final: Path, tensors: Any, record: Any) -> None:
            final.mkdir(parents=True)
            module.write_file(final / module.RECORD, json.dumps(record))
            module.write_safetensors(final / module.TENSORS, tensors)

        module._write = in_place
    elif bug == "room first":  # the old save goes before the new one is whole

        def room_first(final: Path, tensors: Any, record: Any) -> None:
            for old in module.saves(final.parents[1]):
                module._remove(old)
            write(final, tensors, record)

        module._write = room_first


def count_steps(log: Path) -> int:
    return log.read_bytes().count(b'"kind": "train"') if log.is_file() else 0


def train_losses(run: Path) -> list[float]:
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [event["loss"] for event in events if event["kind"] == "train"]


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    what, folder, *rest = sys.argv[1:]
    if what == "moments":
        print(json.dumps({bug: every_moment_of_a_save(Path(folder) / bug, bug) for bug in rest}))
    else:
        print(json.dumps(one_run_killed_often(rest[1:], Path(folder), kills=int(rest[0]), seed=0)))
