"""Records of measurements: their place, the devices they apply to, how new rows replace old ones.

A file per device class, <device_key>.json, a list of rows. Committed ones are in kernels/records/. A user's
own (`unfreeze kernels measure --to user`) are in ~/.cache/unfreeze/kernels/ ($XDG_CACHE_HOME if it is set)
and take precedence over committed ones of the same op, dtype and bucket. A record counts only on devices of
its class.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import torch

from unfreeze.core.cache import cache_folder
from unfreeze.core.cpu import cpu_class
from unfreeze.core.errors import ConfigError
from unfreeze.kernels.choice.op import Op

Row = dict[str, Any]
"""op, device, dtype, bucket, candidate, torch, threads, date; then either `refused` (the reason it may not
run: it raised, or its results are wrong), or error_forward, error_backward, median_us, reference_median_us,
spread_us, reference_spread_us (interquartile ranges) and repeats."""

log = logging.getLogger(__name__)
COMMITTED = Path(__file__).parents[1] / "records"


@functools.cache
def device_key(device: torch.device) -> str:
    """The device class of a record: a GPU's name, or the class of a CPU (core/cpu.py).

    "nvidia-h200", "cpu-avx512-bf16".
    """
    if device.type == "cuda":
        return re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(device).lower()).strip("-")
    if device.type != "cpu":
        return device.type
    return cpu_class()


def user_folder() -> Path:
    """Folder of a user's own records."""
    return cache_folder("kernels")


@functools.cache
def read(path: Path) -> list[Row]:
    """The rows of a file; [] if there is none. Read once per process.

    Raises ConfigError for any other content.
    """
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} has no valid kernel records: {error}",
            next="delete it; unfreeze dev kernels measure --to user makes one anew",
        ) from error
    if not (
        isinstance(rows, list)
        and all(
            isinstance(row, dict) and row.keys() >= {"op", "dtype", "bucket", "candidate"} for row in rows
        )
    ):
        raise ConfigError(
            f"{path} is not a list of kernel records",
            next="delete it; unfreeze dev kernels measure --to user makes one anew",
        )
    return rows


def record_rows(op: Op, device: torch.device, dtype: torch.dtype, bucket: str) -> list[Row]:
    """The records of this device class: the user's own, else the committed ones; [] if there are none.

    Records of another class are ignored: what is faster on one may be slower on another.
    """
    wanted = (op.name, str(dtype).removeprefix("torch."), bucket)
    for folder in (user_folder(), COMMITTED):
        rows = [
            row
            for row in readable(folder / f"{device_key(device)}.json")
            if (row["op"], row["dtype"], row["bucket"]) == wanted
            and row["candidate"] in op.candidates
            and _is_whole(row)
        ]
        if rows:
            return rows
    return []


def readable(path: Path) -> list[Row]:
    """As `read`, but a damaged file stops no run: its rows are not used, and the log says so once."""
    try:
        return read(path)
    except ConfigError as error:
        _warn_once(f"{error.message}; it is not read: {error.next}")
        return []


MEASURED = ("error_forward", "error_backward", "median_us", "reference_median_us", "spread_us")
MEASURED += ("reference_spread_us",)


def _is_whole(row: Row) -> bool:
    """True if a row says that its candidate is refused, or has its errors and times. Others are not read."""
    return "refused" in row or all(type(row.get(name)) in (int, float) for name in MEASURED)


@functools.cache
def _warn_once(words: str) -> None:
    log.warning("%s", words)


def identity(row: Row) -> tuple[str, str, str, str]:
    """The subject of a row: a newer row with the same identity replaces it."""
    return row["op"], row["dtype"], row["bucket"], row["candidate"]


def is_own(row: Row, key: str) -> bool:
    """True if the user measured that row, on a device of class `key`."""
    return any(identity(row) == identity(other) for other in readable(user_folder() / f"{key}.json"))


def write(path: Path, new: list[Row], ops: dict[str, Op]) -> None:
    """Replace the rows of the same identity by `new`.

    Rows of `ops` whose candidate or bucket no longer exists are dropped; all others stay. One sorted row per
    line, so that a diff shows the changes. Atomic: the file is the old one or the new one. Raises OSError if
    it can't be written.
    """
    read.cache_clear()
    replaced = {identity(row) for row in new}

    def current(row: Row) -> bool:
        op = ops.get(row["op"])
        return op is None or (
            row["candidate"] in op.candidates and row["bucket"] in {case.bucket for case in op.cases}
        )

    rows = sorted(
        [row for row in read(path) if identity(row) not in replaced and current(row)] + new, key=identity
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write("[\n" + ",\n".join(json.dumps(row, allow_nan=False) for row in rows) + "\n]\n")
        os.chmod(name, 0o644)  # mkstemp's own is 600
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    read.cache_clear()
