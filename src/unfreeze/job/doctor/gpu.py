"""`unfreeze doctor --gpu` and `--ops`: the card and its software, then a table of every kernel."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from unfreeze.core.errors import ConfigError
from unfreeze.core.units import format_bytes
from unfreeze.job.doctor.finding import Finding
from unfreeze.kernels import cards
from unfreeze.kernels.choice import checked, configs, ops, record, times
from unfreeze.kernels.choice.timed import Cell
from unfreeze.kernels.expert_mlp import packed_op

if TYPE_CHECKING:
    from unfreeze.kernels.choice.op import Op
    from unfreeze.kernels.choice.times import Row

LIMIT = 540.0  # seconds of --gpu and --ops: ten minutes with the start and the last kernel; warm about 60
FILLED = 0.1  # of a card's memory; more in use by others is a warning
COLUMNS = (22, 38, 10, 11)  # widths of op, inputs, dtype and the implementation that runs


def gpu_findings(root: Path = Path("/")) -> Iterator[Finding]:
    """The cards and their software, one line each: driver, memory, MIG, Triton, cache and records."""
    if not torch.cuda.is_available():
        unused = cards.unused(root) or cards.Unused(
            "this machine has no GPU; unfreeze doctor --ops makes the same table for the CPU", ""
        )
        yield Finding("gpu", "fault", unused.why, unused.remedy)
        return
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        try:
            yield from card_findings(cards.card_of(device), index, *torch.cuda.mem_get_info(device))
        except RuntimeError as error:  # full or busy, so that no context can be made
            words = " ".join(str(error).split()).partition(". ")[0][:200]
            yield Finding(f"gpu {index}", "fault", words, "nvidia-smi lists who uses it")
    if version := cards.triton_version():
        yield Finding("triton", "ok", f"Triton {version}")
    else:
        words = "Triton is not installed: plain torch runs, several times as slow"
        yield Finding("triton", "warn", words, "pip install triton")
    yield cache_finding(record.user_folder())
    yield from record_findings(torch.device("cuda", 0))


def card_findings(card: cards.Card, index: int, free: int, total: int) -> Iterator[Finding]:
    """One card. free, total: bytes of its memory now."""
    if why := cards.refuses(card):
        yield Finding(f"gpu {index}", "fault", why, "--device cpu")
        return
    words = f"{card.words()}, {format_bytes(free)} of {format_bytes(total)} free"
    if card.slice:
        words += "; a MIG slice, so plans count this slice's memory"
    if card.rocm:
        words += "; nobody has tried ROCm yet, so this table decides"
    if why := cards.triton_refuses(card):
        words += f"; float32 and plain torch only: {why}"
    if total - free > FILLED * total:
        used = format_bytes(total - free)
        line = f"{words}: other processes hold {used}"
        yield Finding(
            f"gpu {index}", "warn", line, "nvidia-smi lists them; end them, or plan with what is free"
        )
    else:
        yield Finding(f"gpu {index}", "ok", words)


def cache_finding(folder: Path) -> Finding:
    """True if results can be kept: without that every first start checks again."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError:
        writable = False
    if writable:
        return Finding("cache", "ok", f"results are kept in {folder}")
    words = f"{folder} cannot be written, so kernels are checked again at every start"
    return Finding("cache", "warn", words, "set XDG_CACHE_HOME to a folder that can be written")


def record_findings(device: torch.device) -> Iterator[Finding]:
    """The files of records for that card, if one is damaged."""
    for folder in (record.user_folder(), record.COMMITTED):
        try:
            record.read(folder / f"{record.device_key(device)}.json")
        except ConfigError as error:
            yield Finding("records", "warn", f"{error.message}; it is not read", error.next or "")


def chosen(names: Sequence[str] = ()) -> list[Op]:
    """Every op with a choice, or the named ones; with the experts also how a CPU computes packed ones."""
    listed = [ops.import_op(name) for name in names or ops.OPS]
    return [packed_op(), *listed] if any(op.name == "expert_mlp" for op in listed) else listed


def table(cells: Iterable[Cell], device: torch.device, seconds: float = LIMIT) -> Iterator[Row]:
    """Check the cells and yield their rows. They are kept, even if a kernel takes the card down.

    Of a CPU only the wrong kernels count: a run times what it needs itself, in 2 seconds.
    """
    rows: list[Row] = []

    def keep() -> None:
        if kept := [row for row in rows if checked.is_kept(row)]:
            times.keep(kept, device, checks=True)
        rows.clear()

    def tune(cell: Cell) -> None:
        """Measure the launch parameters of this card, and keep the fastest."""
        # The cache cannot be written, or the kernel fails, which its check finds: then it has its own ones
        with suppress(Exception):
            configs.measure_all(cell.op, cell.case, device, cell.dtype, checked.SAMPLING)

    try:
        for row in checked.check_all(
            cells, device, seconds, tune=tune if device.type == "cuda" else lambda _: None
        ):
            if rows and rows[-1]["op"] != row["op"]:
                keep()
            rows.append(row)
            yield row
    finally:
        keep()


def heading(against: str = "against plain torch") -> str:
    """The names of the table's columns."""
    names = ("op", "inputs", "dtype", "runs", against)
    return "".join(name.ljust(width) for name, width in zip(names, (*COLUMNS, 0), strict=True))


def as_line(row: Row) -> str:
    """A row of the table: what runs, and of each candidate its speed and error, or why it does not run."""
    if row["untimed"]:
        words, runs = [f"not checked: {row['untimed']}"], "-"
        words += [f"{name} is WRONG: {why}" for name, why in row["wrong"].items()]
    else:
        plain, runs = row["us"]["reference"], row["runs"]
        words = [
            f"{name} {plain / us:.2f} x ({us:,.0f} us), error {max(row['error'][name]):.0e}"
            for name, us in row["us"].items()
            if name != "reference"
        ]
        words += [f"{name} is WRONG: {why}" for name, why in row["wrong"].items()]
        words = words or [f"plain torch {plain:,.0f} us"]
    cells = (row["op"], row["bucket"], row["dtype"], runs)
    return "".join(cell.ljust(width) for cell, width in zip(cells, COLUMNS, strict=True)) + "; ".join(words)


def summary(rows: Sequence[Row], left: int, device: torch.device) -> str:
    """Count the rows. left: cells that were not reached in time."""
    wrong = sum(bool(row["wrong"]) for row in rows)
    untimed = sum(bool(row["untimed"]) for row in rows) + left
    faster = sum(row["runs"] not in ("", "reference") for row in rows)
    slower = len(rows) - faster - sum(bool(row["untimed"]) for row in rows)
    where = times.checks_path(device)
    kept = f"; kept in {where}" if where.exists() else f"; not kept: {where.parent} cannot be written"
    kept = "" if not rows or (device.type == "cpu" and not wrong) else kept
    return (
        f"{len(rows) + left} kinds of inputs: a kernel runs in {faster}, plain torch in {slower},"
        f" {wrong} with a wrong kernel, {untimed} not checked{kept}"
    )
