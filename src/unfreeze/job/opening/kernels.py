"""Which implementation of each op a run takes, decided once, and what it says of them."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from unfreeze.core.cpu import cpu_class
from unfreeze.job.end.folder import write_json

if TYPE_CHECKING:
    import torch

    from unfreeze.checkpoint import Manifest
    from unfreeze.core.schema import KernelChoice
    from unfreeze.models import Shape
    from unfreeze.parallel.processes.collectives import Group
    from unfreeze.train.run import Run
    from unfreeze.train.state import State
    from unfreeze.train.step import StepResult

FILE = "kernels.json"  # in the run's folder
CHOOSING = "choosing kernels for this CPU: once, 5 to 20 s"
RECORDS = "records"  # UNFREEZE_KERNELS=records: nothing is timed; another value is a file like FILE
SHOWN = 3  # kinds of choices that a CPU cannot run


def predicted_ops(device: torch.device, dtype: str) -> list[str]:
    """Ops of which a kernel runs unmeasured on that GPU, once it is checked.

    Ops that the model does not have are among them: what ran, the events say. A CPU times what counts.
    """
    from unfreeze.generate.open import dtype_of
    from unfreeze.kernels.choice.choose import CHECKED
    from unfreeze.kernels.choice.predicted import expected

    return expected(device, dtype_of(dtype)) if device.type in CHECKED else []


def settle_kernels(
    device: torch.device,
    dtype: str,
    lengths: Sequence[int],
    shape: Shape,
    start: Manifest,
    folder: Run,
    group: Group,
    say: Callable[[str], None] = lambda line: None,
) -> None:
    """Decide what runs on a CPU, once for a run: FILE has it, for every process and for a resume.

    Process 0 decides. The first time on a machine it times what is open (kernels/choice/timed.py).

    lengths: of documents. say: is told where that begins.
    """
    from unfreeze.generate.open import dtype_of
    from unfreeze.kernels.choice import table
    from unfreeze.kernels.choice.choose import fix

    fix({})  # what this run uses, for its events
    if device.type != "cpu":
        return
    file, named, kind = folder.path / FILE, os.environ.get("UNFREEZE_KERNELS", RECORDS), dtype_of(dtype)

    def decided() -> list[KernelChoice]:
        if file.exists():
            return table.read(file)
        if named != RECORDS:
            rows = table.read(Path(named), "unset UNFREEZE_KERNELS, or name a run's kernels.json")
        else:
            scheme = start.scheme() if start.is_packed() else None
            has = {"narrow": shape.mla is not None, "experts": shape.moe is not None}
            wanted = table.cells(kind, lengths, **has, codecs=scheme.codecs if scheme else ())
            begun = time.perf_counter()
            if timed := table.time_missing(wanted, begin=lambda: say(CHOOSING)):
                seconds = time.perf_counter() - begun
                folder.events.emit("timing", folder.step, cells=timed, seconds=seconds)
            rows = table.made(kind)
        write_json(file, rows)
        return rows

    rows = json.loads(group.texts(json.dumps(group.on_rank0(decided)))[0])
    if cannot := table.take(rows):
        kinds = list(dict.fromkeys(cannot))
        more = f" and {len(kinds) - SHOWN} more" if len(kinds) > SHOWN else ""
        words = (
            f"this CPU ({cpu_class()}) cannot run {len(cannot)} of the {len(rows)} choices that the run began"
            f" with: {', '.join(kinds[:SHOWN])}{more}"
        )
        folder.events.emit("warning", folder.step, message=f"{words}; numbers may differ in their last bits")


def kernels_line(dtype: str) -> str:
    """What runs on this CPU in that dtype, and what decided it, counted over ops and kinds of inputs."""
    from unfreeze.generate.open import dtype_of
    from unfreeze.kernels.choice import table

    kind = dtype_of(dtype)
    rows = [row for row in table.made(kind) if row["dtype"] == str(kind).removeprefix("torch.")]

    def counted(field: Literal["runs", "origin"]) -> str:
        return ", ".join(f"{name} {count}" for name, count in Counter(r[field] for r in rows).most_common())

    return (
        f"kernels on {cpu_class()}: {counted('runs')}; {counted('origin')} (unfreeze dev kernels list --all)"
    )


def stepped(device: torch.device, dtype: str) -> Path | None:
    """The file that says "a run in this dtype has made a step here", so that the next compiles nothing."""
    from unfreeze.kernels.loops.on_disk import stamp

    return stamp(dtype, f"stepped-{device.type}")


def compiles(device: torch.device, dtype: str) -> bool:
    """Whether the first step compiles: no run has made one here in this dtype."""
    made = stepped(device, dtype)
    return made is None or not made.exists()


class KernelChoices:
    """The hook that tells what was chosen since the last step."""

    def __init__(self, dtype: str) -> None:
        self._told, self._dtype = 0, dtype

    def __call__(self, state: State, result: StepResult) -> None:
        from unfreeze.kernels.choice.choose import choices
        from unfreeze.kernels.choice.table import row_of

        made = choices()
        if not self._told and (file := stepped(state.model.device, self._dtype)) is not None:
            with suppress(OSError):
                file.touch()
        if len(made) == self._told:
            return
        new = list(made.items())[self._told :]
        self._told = len(made)
        rows = [row_of(inputs, choice) for inputs, choice in new]
        state.run.events.emit("kernels", state.step, choices=rows)
