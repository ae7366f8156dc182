"""How fast a device does each kind of work of a step: from its makers' facts, or from kernel records.

    of_device    peaks (machines.toml) times the shares of them that published runs reach
    of_records   what `unfreeze kernels measure` timed: FLOP of a case over its median, for the implementation
                 that runs. Nothing is measured here, and without a record of each op there are no rates

A record is of one number of threads; on C cores its rate is taken C / threads times.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from unfreeze.kernels.choice import ops, record
from unfreeze.kernels.choice.choose import by_record
from unfreeze.kernels.choice.measure import arguments
from unfreeze.parallel.fleet import Device

EXPERT_SHARE, HALF_ROWS = 0.66, 128.0  # grouped GEMM on H100: 650 of 989 TFLOP/s, half of it at 128 rows
DENSE_SHARE = 0.63  # 620 of 989 TFLOP/s
ATTENTION_SHARE = 0.4
VECTOR_SHARE = 0.75
LAUNCH = 5e-6  # seconds of host time of a torch operation
OPTIMIZER_BYTES = 26  # of AdamW for a parameter: gradient, master, moments read and written, weight written
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Rates:
    """FLOP per second of experts (at many rows each; half of it at `half_rows`), of linear layers, attention,
    routers and the head. expansion, passes: bytes per second, infinite where experts' rate has them in it.
    norms: numbers per second through a norm, forward and backward. optimizer: parameters per second.
    launch: seconds of host time per torch operation.

    source  where they are from, in words.
    """

    source: str
    experts: float
    half_rows: float
    dense: float
    attention: float
    routers: float
    head: float
    expansion: float
    passes: float
    norms: float
    optimizer: float
    launch: float

    def of_experts(self, rows: float) -> float:
        """FLOP per second with so many rows an expert: experts · m / (m + half_rows)."""
        return self.experts * rows / (rows + self.half_rows)


def of_device(device: Device) -> Rates:
    """Shares of the makers' peaks."""
    matrix, memory = device.matrix * 1e12, device.memory_gb_s * 1e9
    return Rates(
        source=f"machines.toml, not measured: {device.source}, {device.date}",
        experts=EXPERT_SHARE * matrix,
        half_rows=HALF_ROWS,
        dense=DENSE_SHARE * matrix,
        attention=ATTENTION_SHARE * matrix,
        routers=VECTOR_SHARE * device.vector * 1e12,
        head=DENSE_SHARE * matrix,
        expansion=memory,
        passes=memory,
        norms=math.inf,
        optimizer=memory / OPTIMIZER_BYTES,
        launch=LAUNCH,
    )


def of_records(
    dtype: torch.dtype, cores: int, *, length: int, narrow: bool, vocab: int, every_weight: bool
) -> Rates | None:
    """From the records of this CPU: its user's own, or the committed ones of its class. None where an op was
    not measured.

    length  of a document; narrow: values are narrower than keys (MLA).
    """
    lengths = (96, 192, 1024)
    at = ("under 96", "96 on", "192 on", "1024 on")[sum(length >= limit for limit in lengths)]
    half = every_weight and dtype != torch.float32
    wanted = {
        "few": ("expert_mlp", "under 64", dtype),
        "many": ("expert_mlp", "64 on", dtype),
        "dense": ("dense_mlp", "all weights" if every_weight else "adapters", dtype),
        "attention": ("attention", at + ", v < d" * narrow, dtype),
        "head": (
            "linear_cross_entropy",
            f"{'small' if vocab < 1 << 14 else 'large'} vocabulary,"
            f" head {'trained' if every_weight else 'frozen'}",
            dtype,
        ),
        "norms": ("rms_norm", "many", dtype),
        "optimizer": ("adamw", f"large tensors, {HALF if half else 'as they are'}", torch.float32),
    }
    found = {name: _rate(*cell) for name, cell in wanted.items()}
    timed = [rate for rate in found.values() if rate is not None]
    if len(timed) < len(found):
        return None
    rate = {name: value.each * cores / value.threads for name, value in zip(found, timed, strict=True)}

    # r(m) = R m / (m + h) through both measured points: 1 / r = 1 / R + h / R / m
    few, many = rate["few"], rate["many"]
    m_few, m_many = (_rows_per_expert(bucket) for bucket in ("under 64", "64 on"))
    slope = (1 / few - 1 / many) / (1 / m_few - 1 / m_many)
    experts = 1 / (1 / many - slope / m_many)
    here = all(value.own for value in timed)
    key, dates = record.device_key(CPU), sorted(value.date for value in timed)
    threads = max(value.threads for value in timed)
    return Rates(
        source=(
            f"{'measured on this machine' if here else f'measured on a machine of class {key}'},"
            f" {dates[0]}, on {threads} {'thread' if threads == 1 else 'threads'}"
        ),
        experts=experts,
        half_rows=max(0.0, slope * experts),
        dense=rate["dense"],
        attention=rate["attention"],
        routers=rate["dense"],
        head=rate["head"],
        expansion=math.inf,
        passes=math.inf,
        norms=rate["norms"],
        optimizer=rate["optimizer"],
        launch=LAUNCH,
    )


HALF = "half precision weights"


@dataclass(frozen=True)
class _Timed:
    """each: work per second of the implementation that runs. own: whether the record is this user's."""

    each: float
    threads: int
    date: str
    own: bool


def _rate(name: str, bucket: str, dtype: torch.dtype) -> _Timed | None:
    """What a record says of one op here; None where there is none of this device."""
    op, key = ops.load(name), record.device_key(CPU)
    source, rows = record.speaking_for(op, CPU, dtype, bucket)
    rows = [row for row in rows if "refused" not in row]
    if source != key or not rows:
        return None
    runs = by_record(op, CPU, dtype, bucket)[0]
    row = next((row for row in rows if row["candidate"] == runs), rows[0])
    micro = row["median_us"] if row["candidate"] == runs else row["reference_median_us"]
    own = any(record.identity(row) == record.identity(other) for other in _own_rows(key))
    return _Timed(work_of_case(name, bucket) / micro * 1e6, row["threads"], row["date"], own)


def _own_rows(key: str) -> list[record.Row]:
    return record.read(record.user_folder() / f"{key}.json")


@functools.cache
def work_of_case(name: str, bucket: str) -> float:
    """What a case computes, forward and backward: FLOP; numbers of rms_norm, parameters of adamw."""
    op = ops.load(name)
    case = next(case for case in op.cases if case.bucket == bucket)
    return COUNTED[name](*arguments(case, CPU, torch.float32))


def _experts(x_TD: Any, ids_TK: Any, _: Any, gate_up: Any, down: Any, factors: Any) -> float:
    """Forward and the input's gradient; of adapters both factors' gradients too."""
    base = gate_up.shape[1] * gate_up.shape[2] + down.shape[1] * down.shape[2]
    parts = (factors.gate_up_A, factors.gate_up_B, factors.down_A, factors.down_B)
    adapter = sum(part[0].numel() for part in parts)
    return 2.0 * ids_TK.numel() * (2 * base + 3 * adapter)


def _rows_per_expert(bucket: str) -> float:
    case = next(case for case in ops.load("expert_mlp").cases if case.bucket == bucket)
    given: Any = arguments(case, CPU, torch.float32)
    return given[1].numel() / given[3].shape[0]


def _dense(x_TD: Any, norm_D: Any, eps: float, *projections: Any) -> float:
    base = sum(one.weight.numel() for one in projections)
    adapter = sum(one.A.numel() + one.B.numel() for one in projections if one.A is not None)
    return 2.0 * len(x_TD) * (base * (3 if projections[0].weight.requires_grad else 2) + 3 * adapter)


def _attention(q_SLHd: Any, k_SLGd: Any, v_SLGv: Any, scale: float) -> float:
    """Causal: 2 · H · (d + v) FLOP a pair, and 2.5 times as much in backward."""
    S, L, H, d = q_SLHd.shape
    return 3.5 * S * L * L / 2 * 2 * H * (d + v_SLGv.shape[3])


def _head(hidden_ND: Any, weight_VD: Any, *_: Any) -> float:
    return 2.0 * len(hidden_ND) * weight_VD.numel() * (3 if weight_VD.requires_grad else 2)


COUNTED: Mapping[str, Callable[..., float]] = {
    "expert_mlp": _experts,
    "dense_mlp": _dense,
    "attention": _attention,
    "linear_cross_entropy": _head,
    "rms_norm": lambda x_TD, *_: float(x_TD.numel()),
    "adamw": lambda updates, _: float(sum(update.master.numel() for update in updates)),
}
