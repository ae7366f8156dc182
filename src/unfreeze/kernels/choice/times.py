"""Timings and checks on this machine: a file in the user's cache for its CPU, and one for each kind of card.

timed-<hash>.json is of a CPU: its class and model, torch, numba, threads and the source of the loops.
checked-<card>-<hash>.json is of a GPU: its name, driver, runtime, torch, Triton and the source of the
kernels. If one of these changes, another file counts. A damaged file counts as none, and nothing is kept if
the cache cannot be written.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from unfreeze.core.cpu import cpu_class, processor
from unfreeze.kernels import cards
from unfreeze.kernels.choice.op import Op
from unfreeze.kernels.choice.record import device_key, user_folder

Key = tuple[str, str, str]
"""op, dtype, bucket: the unit of a decision."""
Row = dict[str, Any]
"""op, dtype, bucket; runs: the fastest; us: microseconds by implementation, plain torch as "torch" if it is
not the op's "reference"; wrong: candidate -> the reason it may not run; untimed: the reason it was not timed
(then runs is "" and us is {}); date. Checked ones also have error: candidate -> the largest relative error of
an output and of a gradient."""
CPU = torch.device("cpu")


def key_of(op: Op, dtype: torch.dtype, bucket: str) -> Key:
    """The key of a row."""
    return op.name, str(dtype).removeprefix("torch."), bucket


def machine(device: torch.device = CPU) -> dict[str, object]:
    """The properties that a timing depends on."""
    if device.type == "cuda":
        return asdict(cards.card_of(device)) | {
            "torch": torch.__version__,
            "triton": cards.triton_version(),
            "kernels": _kernels()[:16],
        }
    import numba

    from unfreeze.kernels.loops.on_disk import ROOM, sources

    return {
        "class": cpu_class(),
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "numba": numba.__version__,
        "loops": sources(ROOM)[:16],
    }


@functools.cache
def _kernels() -> str:
    """A hash of the source of kernels/: an edited kernel is checked again."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def path(device: torch.device = CPU) -> Path:
    """The file of this machine, for its CPU or for that card."""
    name = hashlib.sha256(json.dumps(machine(device)).encode()).hexdigest()[:16]
    begins = "timed" if device.type == "cpu" else f"checked-{device_key(device)}"
    return user_folder() / f"{begins}-{name}.json"


def known(device: torch.device = CPU) -> dict[Key, Row]:
    """The timings on this machine, by `key_of`; empty if UNFREEZE_KERNELS fixes the choice."""
    return {key: row for key, row in tried(device).items() if not row.get("untimed")}


def tried(device: torch.device = CPU) -> dict[Key, Row]:
    """As `known`, plus the cells that were too expensive to time."""
    begins = "timed" if device.type == "cpu" else "checked"
    if os.environ.get("UNFREEZE_KERNELS"):
        return {}
    if not _UNWRITTEN and not any(user_folder().glob(f"{begins}-*.json")):
        return {}
    if device.type != "cpu" and not cards.present(device):
        return {}  # a plan for a card that is not here
    file = path(device)
    return _UNWRITTEN.get(file) or _read(file)


def checks_path(device: torch.device) -> Path:
    """The file of checks: of a GPU its file, of a CPU one for any number of threads."""
    if device.type != "cpu":
        return path(device)
    facts = {name: fact for name, fact in machine().items() if name != "threads"}
    name = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    return user_folder() / f"checked-{cpu_class()}-{name}.json"


def wrong(device: torch.device, key: Key) -> dict[str, str]:
    """Candidate -> the reason why it is wrong there, by the last check of `unfreeze doctor`."""
    if not _UNWRITTEN and not any(user_folder().glob("checked-*.json")):
        return {}
    if device.type != "cpu" and not cards.present(device):
        return {}
    file = checks_path(device)
    row = (_UNWRITTEN.get(file) or _read(file)).get(key)
    return row["wrong"] if row else {}


_UNWRITTEN: dict[Path, dict[Key, Row]] = {}  # rows of this process whose file cannot be written


@functools.cache
def _read(file: Path) -> dict[Key, Row]:
    """The rows of a file; {} if there is none or its content is invalid (then the rows are made again)."""
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
        return {(row["op"], row["dtype"], row["bucket"]): row for row in rows if _whole(row)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def _whole(row: Row) -> bool:
    """True if a row has every field with its type, and times above 0 for `runs` and plain torch.

    A row that was not timed has no times.
    """
    us, words = row["us"], (row["op"], row["dtype"], row["bucket"], row["runs"], row["date"])
    whole = all(isinstance(word, str) for word in words) and isinstance(row["wrong"], dict)
    if row.get("untimed"):
        return whole
    return (
        whole
        and {row["runs"], "reference"} <= us.keys()
        and all(isinstance(each, int | float) and 0 < each < math.inf for each in us.values())
    )


def keep(rows: Sequence[Row], device: torch.device = CPU, *, checks: bool = False) -> Path | None:
    """Add rows to the file atomically, and return it. checks: to the file of checks.

    None if it cannot be written: then only this process knows them.
    """
    file = checks_path(device) if checks else path(device)
    _read.cache_clear()
    new = {(row["op"], row["dtype"], row["bucket"]): row for row in rows}
    rows_by_key = _read(file) | new
    text = json.dumps({"machine": machine(device), "rows": list(rows_by_key.values())}, indent=1)
    name = ""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as opened:
            opened.write(text + "\n")
        os.replace(name, file)
    except OSError:
        if name:
            Path(name).unlink(missing_ok=True)
        _UNWRITTEN[file] = rows_by_key
        return None
    finally:
        _read.cache_clear()
    return file
