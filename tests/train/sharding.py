"""A script for test_shards.py: one process that imports everything once, then forks the processes of runs that
hold experts in part. Prints one JSON object.

There is no forward pass: a gradient is a function of step, name and row, and AdamW is elementwise. So any
number of processes gives the same numbers to the bit, and a row that went astray shows.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
import traceback
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
from killing import FileOperations, die

from unfreeze.core.errors import UserError
from unfreeze.parallel.processes.collectives import ALONE, Group, open_group
from unfreeze.parallel.processes.mesh import mesh_of
from unfreeze.train import together
from unfreeze.train.follower import Follower, open_run
from unfreeze.train.optim import AdamW
from unfreeze.train.run import Run
from unfreeze.train.schedule import Schedule
from unfreeze.train.state import State, load_best, start_or_resume

EXPERTS = 7  # no multiple of 2: one process holds 3, the other 4
SHAPES = {
    "embed": (5, 4),
    "experts.up": (EXPERTS, 16, 16),  # a row is one block of 256
    "experts.bias": (EXPERTS, 5),  # a row is no whole block
}


class Rows(nn.Module):
    """The parameters of SHAPES, of which "experts." have the rows that are held here."""

    device = torch.device("cpu")

    def __init__(self, held: Callable[[str], Any], dtype: torch.dtype):
        super().__init__()
        for name, shape in SHAPES.items():
            whole = torch.randn(shape, generator=torch.Generator().manual_seed(len(name)))
            rows = held(name).rows
            value = (whole if rows is None else whole[rows.slice]).to(dtype)
            module = self
            for part in name.split(".")[:-1]:
                if not hasattr(module, part):
                    module.add_module(part, nn.Module())
                module = getattr(module, part)
            module.register_parameter(name.split(".")[-1], nn.Parameter(value.clone()))


class Balance:
    """What all hold, beside the weights."""

    def __init__(self) -> None:
        self.bias = torch.zeros(3)

    def tensors(self) -> dict[str, Tensor]:
        return {"balance.0": self.bias}


def gradient(name: str, step: int) -> Tensor:
    seed = zlib.crc32(f"{name} {step}".encode())
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(seed))


def session(
    folder: Path,
    group: Group,
    until: int,
    *,
    moments: str = "float32",
    dtype: torch.dtype = torch.float32,
    watch: Callable[[State], None] = lambda state: None,
    on_full_disk: str = "stop",
    best: bool = False,
) -> State:
    """Steps to `until`, a save after each, as a run of these processes does; experts are split over pairs."""
    mesh = mesh_of(group, min(2, group.size), EXPERTS)
    torch.manual_seed(group.rank)  # process 0's numbers count
    with open_run(group, lambda: Run(folder, {}), lambda: Follower(folder, {})) as run:
        model = Rows(mesh.held, dtype)
        balance = Balance()
        state = start_or_resume(
            run,
            model,  # type: ignore[arg-type]
            optimizer=AdamW(model, moments=moments, held=mesh.held),  # type: ignore[arg-type]
            schedule=Schedule(1e-2, 10),
            after_update=[balance],  # type: ignore[list-item]
        )
        watch(state)
        for step in range(state.step + 1, until + 1):
            for name, parameter in state.optimizer.parameters.items():
                rows, whole = mesh.held(name).rows, gradient(name, step)
                parameter.grad = (whole if rows is None else whole[rows.slice]).to(dtype)
            state.optimizer.collect()
            state.optimizer.update(1e-2, 0.0, norm=1.0)
            state.optimizer.zero_grad()
            balance.bias += step * torch.rand(3)
            if group.size > 1:
                group.broadcast(balance.bias, 0)
            state.step = step
            if best and step == 2:
                state.best = {"step": 2, "loss": 0.5}
            together.save_together(state, keep=2, on_full_disk=on_full_disk, group=group)  # type: ignore[arg-type]
        if best and state.step != 2:
            assert load_best(state) == 2
        return state


def forked(count: int, work: Callable[[Group], Any], seconds: int = 120) -> list[int]:
    """Exit codes of `count` processes that each do `work`, minus the signal's number where one ended it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    ends, others = os.pipe()  # process 0 hosts the store, so it leaves last: when the others' end is closed
    for rank in range(count):
        child = os.fork()
        if child == 0:
            signal.alarm(seconds)  # a child that hangs ends as an error, not as a test that never ends
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1"}
            os.environ["MASTER_PORT"] = str(port)
            code = 70
            try:
                with open_group(torch.device("cpu")) as group:
                    work(group)
                    code = 0
                    if rank == 0:
                        os.close(others)
                        os.read(ends, 1)
            except UserError as error:
                print(f"process {rank}: {error}", file=sys.stderr)
                code = 2
            except Exception:
                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(child)
    os.close(ends)
    os.close(others)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def counts(folder: Path) -> dict[str, Any]:
    """2 processes to step 2, 1 to step 4, 4 to step 6, and 1 all the way; in float32 and with int8 moments."""
    found: dict[str, Any] = {}
    for kind, options in {
        "float32": {},
        "half": {"dtype": torch.bfloat16},
        "int8": {"moments": "int8"},
    }.items():
        session(folder / kind / "straight", ALONE, 6, **options)
        broken = folder / kind / "broken"
        codes = forked(2, lambda group, to=broken, options=options: session(to, group, 2, **options))
        first = sorted(path.name for path in (broken / "state" / "step-000002").iterdir())
        said = ""
        try:
            session(broken, ALONE, 4, **options)
        except UserError as error:
            said = str(error)
        again = 2 if said else 4
        codes += forked(again, lambda group, to=broken, options=options: session(to, group, 6, **options))
        found[kind] = {"codes": codes, "first": first, "said": said}
    # the best save's weights come back into processes that hold rows
    codes = forked(2, lambda group: session(folder / "best", group, 4, best=True))
    return found | {"best": codes}


def full(folder: Path) -> dict[str, Any]:
    """The disk of process 1 is full at step 3: to stop, and to go on to the next save."""
    found: dict[str, Any] = {}
    folder.mkdir()
    write = together.write_part

    for mode in ("stop", "continue"):

        def work(group: Group, mode: str = mode) -> None:
            state: list[State] = []

            def one_is_full(*arguments: Any) -> int:
                if group.rank == 1 and state[0].step == 3:
                    raise OSError(28, "No space left on device")
                return write(*arguments)

            together.write_part = one_is_full
            said = ""
            try:
                session(folder / mode, group, 4, watch=state.append, on_full_disk=mode)
            except UserError as error:
                said = f"{type(error).__name__}: {error}"
            (folder / f"said-{mode}-{group.rank}").write_text(said)

        codes = forked(2, work)
        left = sorted(path.name for path in (folder / mode / "state").iterdir())
        said = [(folder / f"said-{mode}-{rank}").read_text() for rank in (0, 1)]
        found[mode] = {"codes": codes, "left": left, "said": said}
    return found


def moments(folder: Path, bug: str) -> dict[str, Any]:
    """Two processes, one killed before each of its file operations of the third save; then 1 goes on.

    -> per process: {"operations": [...], "left": [step it went on from, or "unreadable"]}
    """
    begun = folder / "begun"
    assert forked(2, lambda group: session(begun, group, 2)) == [0, 0]
    if bug == "in place":
        together._write = in_place
    found: dict[str, Any] = {}
    for rank in (0, 1):

        def killed_at(path: Path, number: int, rank: int = rank) -> Callable[[Group], None]:
            def work(group: Group) -> None:
                names: list[str] = []

                def before(count: int, operation: str) -> None:
                    names.append(operation)
                    (folder / f"operations-{rank}").write_text(" ".join(names))
                    if len(names) == number:
                        die()

                def watch(state: State) -> None:
                    if group.rank == rank:
                        FileOperations((state.run.path / "state").resolve(), before)

                session(path, group, 3, watch=watch)

            return work

        whole = folder / f"whole-{rank}"
        shutil.copytree(begun, whole)
        assert forked(2, killed_at(whole, 0)) == [0, 0]
        operations = (folder / f"operations-{rank}").read_text().split()
        padded = ["", *operations, ""]
        # of many operations of a kind in a row the first and last
        each = [n for n in range(1, len(operations) + 1) if not padded[n - 1] == padded[n] == padded[n + 1]]
        left: list[Any] = []
        for number in each if bug == "none" else each[-4:-3]:
            path = folder / f"{rank}-{number}"
            shutil.copytree(begun, path)
            codes = forked(2, killed_at(path, number))
            assert codes[rank] == -signal.SIGKILL, (codes, operations, number)
            stood: list[int] = []
            try:
                session(path, ALONE, 4, watch=lambda state, to=stood: to.append(state.step))
                left.append(stood[0])
            except UserError:
                left.append("unreadable")
        found[str(rank)] = {"operations": operations, "left": left}
    return found


def in_place(state: State, parts: Any, final: Path, group: Group) -> int:
    """The planted bug: the final name from the beginning, so half a save counts as whole."""
    names = [together.file_name(rank, group.size) for rank in range(group.size)]
    tensors = together.own_share(state, parts, group)
    final.mkdir(parents=True, exist_ok=True)
    if group.rank == 0:
        sizes = {name: (final.with_name("step-000002") / name).stat().st_size for name in names}
        record = together.record_of(state) | {"files": sizes}
        together.write_file(final / together.RECORD, json.dumps(record))
    together.write_part(final / names[group.rank], tensors, parts)
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    base = Path(sys.argv[1])
    found = {"counts": counts(base / "counts"), "full": full(base / "full")}
    for bug in ("none", "in place"):  # the planted one last, as it stays
        found[bug] = moments(base / bug, bug)
    print(json.dumps(found))
