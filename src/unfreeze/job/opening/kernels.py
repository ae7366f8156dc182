"""Choose the implementation of each op once per run, and report the choices."""

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
from unfreeze.core.errors import ConfigError, UserError
from unfreeze.job.end.folder import write_json

if TYPE_CHECKING:
    import torch

    from unfreeze.checkpoint import Manifest
    from unfreeze.core.schema import KernelChoice
    from unfreeze.kernels.choice.timed import Cell
    from unfreeze.models import Shape
    from unfreeze.parallel.processes.collectives import Group
    from unfreeze.train.run import Run
    from unfreeze.train.state import State
    from unfreeze.train.step import StepResult

FILE = "kernels.json"  # in the run's folder
CARD_FILE = "kernels-cuda.json"  # of a run on GPUs
CHOOSING = "choosing kernels for this CPU: once for models and row lengths like these, 5 to 20 s if idle"
CHECKING = "checking the kernels of this run on {}: up to 60 s, at a first start with this torch and driver"
RECORDS = "records"  # UNFREEZE_KERNELS=records: time nothing; any other value names a file like FILE
SHOWN = 3  # choices named in the warning that this CPU cannot run them


def predicted_ops(device: torch.device, dtype: str) -> list[str]:
    """Ops for which that GPU runs a checked kernel without measuring it.

    The list can have ops that the model lacks; the events say which ran. A CPU times the relevant ops
    instead.
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
    """Choose the kernels of a run once; a file of its folder has them for all processes and resumes.

    On its first run on a machine, it times ops without a record (kernels/choice/timed.py); on a card it also
    checks them (checked.py). lengths: document lengths. say: called when this starts, and with its result.
    """
    from unfreeze.generate.open import dtype_of
    from unfreeze.kernels.choice import table
    from unfreeze.kernels.choice.choose import fix

    fix({})  # start this run's list of choices, for its events
    kind = dtype_of(dtype)

    def wanted() -> list[Cell]:
        scheme = start.scheme() if start.is_packed() else None
        has = {"narrow": shape.mla is not None, "experts": shape.moe is not None}
        return table.cells(kind, lengths, **has, codecs=scheme.codecs if scheme else (), device=device)

    settle = _settle_card if device.type == "cuda" else _settle_cpu
    rows = settle(device, kind, wanted, folder, group, say)
    if cannot := table.take(rows, device):
        kinds = list(dict.fromkeys(cannot))
        more = f" and {len(kinds) - SHOWN} more" if len(kinds) > SHOWN else ""
        here = f"this CPU ({cpu_class()})" if device.type == "cpu" else "this card"
        words = (
            f"{here} cannot run {len(cannot)} of the {len(rows)} choices that the run started with:"
            f" {', '.join(kinds[:SHOWN])}{more}"
        )
        folder.events.emit("warning", folder.step, message=f"{words}; numbers may differ in their last bits")


def _settle_cpu(
    device: torch.device,
    dtype: torch.dtype,
    wanted: Callable[[], list[Cell]],
    folder: Run,
    group: Group,
    say: Callable[[str], None],
) -> list[KernelChoice]:
    """The choices of process 0, for all."""
    from unfreeze.kernels.choice import table

    file, named = folder.path / FILE, os.environ.get("UNFREEZE_KERNELS") or RECORDS

    def decided() -> list[KernelChoice]:
        if file.exists():
            return table.read(file)
        if named != RECORDS:
            rows = table.read(Path(named), "unset UNFREEZE_KERNELS, or name a run's kernels.json")
        else:
            begun = time.perf_counter()
            if timed := table.time_missing(wanted(), begin=lambda: say(CHOOSING)):
                seconds = time.perf_counter() - begun
                folder.events.emit("timing", folder.step, cells=len(timed), seconds=seconds)
            rows = table.made(dtype)
        write_json(file, rows)
        return rows

    return json.loads(group.texts(json.dumps(group.on_rank0(decided)))[0])


def _settle_card(
    device: torch.device,
    dtype: torch.dtype,
    wanted: Callable[[], list[Cell]],
    folder: Run,
    group: Group,
    say: Callable[[str], None],
) -> list[KernelChoice]:
    """The choices of the first process of this node, whose card is checked, or those of the run's file.

    The others wait for it at the store, not in a collective, which has a time limit.
    """
    from unfreeze.kernels import cards
    from unfreeze.kernels.choice import table, times
    from unfreeze.kernels.choice.checked import is_broken

    file, name = folder.path / CARD_FILE, cards.card_of(device).name
    if os.environ.get("UNFREEZE_KERNELS") not in (None, "", RECORDS):
        words = "UNFREEZE_KERNELS names a file of choices, which only runs on a CPU read"
        raise ConfigError(words, next="unset UNFREEZE_KERNELS")

    def checked(first: bool) -> list[KernelChoice]:
        if not first:
            return []
        cells, begun = wanted(), time.perf_counter()
        if rows := table.time_missing(cells, begin=lambda: say(CHECKING.format(name)), device=device):
            seconds = time.perf_counter() - begun
            banned = [f"{row['op']}: {who}: {why}" for row in rows for who, why in row["wrong"].items()]
            kept = "" if times.path(device).exists() else f"; {times.path(device).parent} cannot be written"
            say(f"kernels on {name}: {len(rows)} checked in {seconds:.0f} s, {len(banned)} banned{kept}")
            folder.events.emit("timing", folder.step, cells=len(rows), seconds=seconds)
            broken = next((row for row in rows if is_broken(row)), None)
            if broken is not None:
                why = next(iter(broken["wrong"].values()))
                raise UserError(
                    f"a kernel of {broken['op']} broke the context of {name}: {why}",
                    next="start the same command again: that kernel does not run any more",
                )
            for words in dict.fromkeys(banned):
                folder.events.emit(
                    "warning", folder.step, message=f"a kernel is wrong on {name} and does not run: {words}"
                )
        return table.made_on(device, cells)

    here = json.loads(group.texts(json.dumps(group.in_turn(checked)))[group.node_first])

    def of_run() -> list[KernelChoice]:
        if file.exists():
            return table.read(file)
        write_json(file, here)
        return []

    return json.loads(group.texts(json.dumps(group.on_rank0(of_run)))[0]) or here


def kernels_line(dtype: str) -> str:
    """Count the implementations that run on this CPU in that dtype, and the origins of the choices."""
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
    """Stamp file: it exists once a run in this dtype has made a step here, so the next compiles nothing."""
    from unfreeze.kernels.loops.on_disk import stamp

    return stamp(dtype, f"stepped-{device.type}")


def compiles(device: torch.device, dtype: str) -> bool:
    """True if the first step compiles, because no run has made a step here in this dtype."""
    stamp_file = stepped(device, dtype)
    return stamp_file is None or not stamp_file.exists()


class KernelChoices:
    """Hook that emits the kernel choices made since the last step."""

    def __init__(self, dtype: str) -> None:
        self._emitted, self._dtype = 0, dtype

    def __call__(self, state: State, result: StepResult) -> None:
        from unfreeze.kernels.choice.choose import choices
        from unfreeze.kernels.choice.table import row_of

        chosen = choices()
        if not self._emitted and (file := stepped(state.model.device, self._dtype)) is not None:
            with suppress(OSError):
                file.touch()
        if len(chosen) == self._emitted:
            return
        new = list(chosen.items())[self._emitted :]
        self._emitted = len(chosen)
        rows = [row_of(inputs, choice) for inputs, choice in new]
        state.run.events.emit("kernels", state.step, choices=rows)
