"""Verified faster, or not used: which implementation of an op runs, decided by measured records (kernels/records/<device>.json).

A candidate is chosen where a record of this device, dtype and shape bucket says that its error, forward and backward, is within the op's
tolerance, and that its median time is at least 5 % under the reference's, beyond the spread of both. No record: the reference, said once.
"""

from __future__ import annotations

import functools
import json
import logging
import re
from pathlib import Path
from typing import Any

import torch

from unfreeze.core.errors import ConfigError, nearest
from unfreeze.kernels.op import Implementation, Op

log = logging.getLogger(__name__)
RECORDS = Path(__file__).parent / "records"
REQUIRED_GAIN = 0.05


def choose(op: Op, device: torch.device, dtype: torch.dtype, bucket: str, impl: str = "auto") -> Implementation:
    """The implementation of `op` for inputs of that kind; a dictionary lookup after the first call.

    impl: "auto" (by record), "reference", or a candidate's name. Raises ConfigError for an unknown name, or a candidate that cannot run there.
    """
    return _chosen(op.name, device.type, device.index, dtype, bucket, impl) or _choose(op, device, dtype, bucket, impl)


_CHOSEN: dict[tuple[Any, ...], Implementation] = {}


def _chosen(*key: Any) -> Implementation | None:
    return _CHOSEN.get(key)


def _choose(op: Op, device: torch.device, dtype: torch.dtype, bucket: str, impl: str) -> Implementation:
    name, reason = (impl, "as asked") if impl != "auto" else by_record(op, device, dtype, bucket)
    log.info("%s on %s in %s, %s: %s (%s)", op.name, device, str(dtype).removeprefix("torch."), bucket, name, reason)
    implementation = implementation_of(op, name, device, dtype)
    _CHOSEN[op.name, device.type, device.index, dtype, bucket, impl] = implementation
    return implementation


def implementation_of(op: Op, name: str, device: torch.device, dtype: torch.dtype) -> Implementation:
    """The implementation with that name. Raises ConfigError where there is none, or it cannot run on device and dtype."""
    if name == "reference":
        return op.reference
    if name not in op.candidates:
        names = ["auto", "reference", *op.candidates]
        raise ConfigError(f"{op.name} has no implementation {name!r}{nearest(name, names)}; it has {', '.join(names)}")
    reason = op.candidates[name].refuses(device.type, dtype)
    if reason:
        raise ConfigError(f"{op.name} cannot run as {name!r} here: {reason}", next="choose impl = 'auto'")
    return _loaded(op.name, name, op.candidates[name].load)


@functools.cache
def _loaded(op: str, name: str, load: Any) -> Implementation:
    return load()


def by_record(op: Op, device: torch.device, dtype: torch.dtype, bucket: str) -> tuple[str, str]:
    """(name, why) of the fastest candidate that a record proves, or the reference."""
    key = device_key(device)
    rows = [
        row for row in records(key)
        if (row["op"], row["dtype"], row["bucket"]) == (op.name, str(dtype).removeprefix("torch."), bucket) and row["candidate"] in op.candidates
    ]  # fmt: skip
    if not rows:
        return "reference", f"no record for {key}; unfreeze kernels measure --op {op.name} makes one"
    proven = [row for row in rows if proves(row, op) and not op.candidates[row["candidate"]].refuses(device.type, dtype)]
    if not proven:
        return "reference", f"{len(rows)} measured, none 5 % faster within the tolerance"
    best = min(proven, key=lambda row: row["median_us"] / row["reference_median_us"])
    return best["candidate"], f"{best['reference_median_us'] / best['median_us']:.2f} x the reference, {best['date']}"


def proves(row: dict[str, Any], op: Op) -> bool:
    """Whether a record allows its candidate: exact enough, and faster by 5 % and by more than both spreads (half the interquartile ranges)."""
    limit = op.tolerance[getattr(torch, row["dtype"])]
    gain = row["reference_median_us"] - row["median_us"]
    return (
        max(row["error_forward"], row["error_backward"]) <= limit
        and gain >= REQUIRED_GAIN * row["reference_median_us"]
        and gain > (row["spread_us"] + row["reference_spread_us"]) / 2
    )


@functools.cache
def records(key: str) -> list[dict[str, Any]]:
    """The committed rows of a device; [] where it was never measured."""
    path = RECORDS / f"{key}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []


@functools.cache
def device_key(device: torch.device) -> str:
    """What a record is about: a GPU's name ("nvidia-h200"), or the widest arithmetic of a CPU ("cpu-avx512-bf16")."""
    if device.type == "cuda":
        return re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(device).lower()).strip("-")
    if device.type != "cpu":
        return device.type
    if torch.cpu._is_amx_tile_supported():
        return "cpu-amx"
    return "cpu-avx512-bf16" if torch.cpu._is_avx512_bf16_supported() else "cpu-" + torch.backends.cpu.get_cpu_capability().lower()
