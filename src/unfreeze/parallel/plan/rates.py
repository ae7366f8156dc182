"""A device's speed for each kind of work in a step, from published figures or from kernel records.

    of_device    peak rates (machines.toml) times the shares of them that published runs reach
    of_records   timings of `unfreeze kernels measure`: FLOP of a case over its median, for the implementation
                 in use. Nothing is measured here; without a record of each op there are no rates

A record was measured with some number of threads; on C cores its rate is multiplied by C / threads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch

from unfreeze.kernels.choice import ops, record
from unfreeze.kernels.choice.choose import by_record
from unfreeze.parallel.plan.fleet import DeviceFacts

EXPERT_SHARE, HALF_ROWS = 0.66, 128.0  # grouped GEMM on H100: 650 of 989 TFLOP/s, half of it at 128 rows
DENSE_SHARE = 0.63  # 620 of 989 TFLOP/s
# torch's grouped GEMM is one kernel on capability 9 and 10. Elsewhere ours in Triton runs: a tenth slower
# than cuBLAS by assumption, never measured. Without Triton it is a loop of products that waits for the device
# once a call (GroupedBlas.cpp: offs.cpu(), then mm_out per expert)
FAST_GROUPED = (9, 10)
TRITON_SHARE, WAIT = 0.6, 50e-6  # of the peak; seconds of one wait and the queue that runs empty
# FlashAttention-2, forward and backward of documents of 2 k tokens: half the peak on an A100 (its paper,
# 4.1), and 300 TFLOP/s on an H100, whose own instructions it does not use
ATTENTION_SHARE, ATTENTION_MOST = 0.5, 300e12
VECTOR_SHARE = 0.75
MEMORY_SHARE = 0.9  # 3.0 of an H100's 3.35 TB/s, in passes over large tensors
NORM_BYTES = 10  # of a number: x and y; in backward dy, x and dx
# Of a CPU: the rate of dense layers relative to a frozen head, whose softmax counts. SwiGLU blocks of
# Qwen2-0.5B reached 1.13 to 1.25 times as many FLOP/s (AMD EPYC with avx512_bf16, one thread, both dtypes)
DENSE_OF_HEAD = 1.2
LAUNCH = 5e-6  # seconds of host time per torch operation
DEVICE_LAUNCH = 6e-6  # with a GPU's driver
# bytes of AdamW per parameter: gradient, master, moments read and written, weight written
OPTIMIZER_BYTES = 26
CPU = torch.device("cpu")

# The work of a measured case, forward and backward: FLOP, except numbers for rms_norm and parameters for
# adamw. These are constants because counting needs the cases' inputs, and creating those would take 0.7 s of
# every start. A test checks them.
WORK = {
    ("expert_mlp", "under 64"): 215_482_368,
    ("expert_mlp", "64 on"): 1_723_858_944,
    ("expert_mlp", "under 64, unpacked"): 215_482_368,
    ("expert_mlp", "64 on, unpacked"): 1_723_858_944,
    ("expert_mlp", "under 64, all weights"): 301_989_888,
    ("expert_mlp", "64 on, all weights"): 2_415_919_104,
    ("attention", "under 96"): 58_720_256,
    ("attention", "96 on"): 117_440_512,
    ("attention", "192 on"): 469_762_048,
    ("attention", "1024 on"): 1_879_048_192,
    ("attention", "2048 on"): 7_516_192_768,
    ("attention", "under 96, v < d"): 73_400_320,
    ("attention", "96 on, v < d"): 146_800_640,
    ("attention", "192 on, v < d"): 587_202_560,
    ("attention", "1024 on, v < d"): 2_348_810_240,
    ("attention", "2048 on, v < d"): 9_395_240_960,
    ("linear_cross_entropy", "small vocabulary, head frozen"): 4_294_967_296,
    ("linear_cross_entropy", "small vocabulary, head trained"): 6_442_450_944,
    ("linear_cross_entropy", "large vocabulary, head frozen"): 15_032_385_536,
    ("linear_cross_entropy", "large vocabulary, head trained"): 22_548_578_304,
    ("rms_norm", "many"): 2_097_152,
    ("adamw", "large tensors, as they are"): 16_777_216,
    ("adamw", "large tensors, half precision weights"): 17_432_576,
}
LEAST_WIDTH = 256  # half of the hidden size of the narrowest measured case, the experts'
ROWS_PER_EXPERT = 16, 128  # of the two cases of expert_mlp
DOCUMENTS = {"under 96": 64, "96 on": 128, "192 on": 512, "1024 on": 1024, "2048 on": 2048}
"""Attention case -> tokens per document in it."""
Base = Literal["packed", "unpacked", "all weights"]
"""Kind of routed experts: frozen in 4 bits, frozen in the compute dtype, or trained."""


@dataclass(frozen=True)
class Rates:
    """A device's rates.

    source             where the rates come from, in words
    experts            FLOP/s at many rows per expert; half of that at `half_rows` rows
    dense              FLOP/s of linear layers
    attention, routers, head  FLOP/s of each
    expansion, passes  bytes/s: expanding packed experts; gather, SwiGLU and combination of rows. Infinite
                       if the rate of experts includes them
    norms              numbers/s through a norm, forward and backward
    optimizer          parameters/s
    launch             seconds of host time per torch operation
    loop               seconds that each grouped product waits for the device, if it is a loop over experts;
                       0: it is one kernel
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
    loop: float = 0.0

    def of_experts(self, rows: float) -> float:
        """FLOP/s at `rows` rows per expert: experts · m / (m + half_rows)."""
        return self.experts * rows / (rows + self.half_rows)


def of_device(device: DeviceFacts, *, triton: bool = True) -> Rates:
    """Return rates as shares of the maker's peak rates. triton: False if it is not installed there."""
    matrix, memory = device.matrix * 1e12, MEMORY_SHARE * device.memory_gb_s * 1e9
    fast = int(device.capability) in FAST_GROUPED
    return Rates(
        source=f"machines.toml, derived, not measured: {device.source}, {device.date}",
        experts=(EXPERT_SHARE if fast or not triton else TRITON_SHARE) * matrix,
        half_rows=HALF_ROWS,
        dense=DENSE_SHARE * matrix,
        attention=min(ATTENTION_SHARE * matrix, ATTENTION_MOST),
        routers=VECTOR_SHARE * device.vector * 1e12,
        head=DENSE_SHARE * matrix,
        expansion=memory,
        passes=memory,
        norms=memory / NORM_BYTES,
        optimizer=memory / OPTIMIZER_BYTES,
        launch=DEVICE_LAUNCH,
        loop=0.0 if fast or triton else WAIT,
    )


def of_records(
    dtype: torch.dtype,
    cores: int,
    *,
    length: int,
    narrow: bool,
    vocab: int,
    every_weight: bool,
    experts: Base | None,
) -> Rates | None:
    """Return rates from the records of this CPU: the user's own, or the committed ones of its class.

    None if an op was not measured.

        length   tokens of a document
        narrow   True if values are narrower than keys (MLA)
        experts  their kind; None: the model has none
    """
    half = every_weight and dtype != torch.float32
    base = "" if experts in (None, "packed") else f", {experts}"
    wanted = {
        "few": ("expert_mlp", f"under 64{base}", dtype),
        "many": ("expert_mlp", f"64 on{base}", dtype),
        "dense": ("linear_cross_entropy", "large vocabulary, head frozen", dtype),
        "head": (
            "linear_cross_entropy",
            f"{'small' if vocab < 1 << 14 else 'large'} vocabulary,"
            f" head {'trained' if every_weight else 'frozen'}",
            dtype,
        ),
        "norms": ("rms_norm", "many", dtype),
        "optimizer": ("adamw", f"large tensors, {HALF if half else 'as they are'}", torch.float32),
    }
    if experts is None:
        del wanted["few"], wanted["many"]
    measured = {name: _rate(*cell) for name, cell in wanted.items()}
    measured["attention"] = _attention(length, narrow, dtype)
    timed = {name: rate for name, rate in measured.items() if rate is not None}
    if len(timed) < len(measured):
        return None
    rate = {name: value.each * cores / value.threads for name, value in timed.items()}
    many, half_rows = _of_rows(rate["few"], rate["many"]) if experts else (math.inf, 0.0)
    here = all(value.own for value in timed.values())
    key, dates = record.device_key(CPU), sorted(value.date for value in timed.values())
    threads = max(value.threads for value in timed.values())
    return Rates(
        source=(
            f"{'measured on this machine' if here else f'measured on a machine of class {key}'},"
            f" {dates[0]}, on {threads} {'thread' if threads == 1 else 'threads'}"
        ),
        experts=many,
        half_rows=half_rows,
        dense=DENSE_OF_HEAD * rate["dense"],
        attention=rate["attention"],
        routers=DENSE_OF_HEAD * rate["dense"],
        head=rate["head"],
        expansion=math.inf,
        passes=math.inf,
        norms=rate["norms"],
        optimizer=rate["optimizer"],
        launch=LAUNCH,
    )


def _of_rows(few: float, many: float) -> tuple[float, float]:
    """Return (R, h) of the curve R m / (m + h) through both measured rates: 1 / r = 1 / R + h / R / m.

    No such curve exists if the rate at many rows is lower, or higher by more than the ratio of rows; then
    that rate is used for any number of rows.
    """
    m_few, m_many = ROWS_PER_EXPERT
    slope = (1 / few - 1 / many) / (1 / m_few - 1 / m_many)
    left = 1 / many - slope / m_many
    if slope <= 0 or left <= 0:
        return many, 0.0
    return 1 / left, slope / left


def _attention(length: int, narrow: bool, dtype: torch.dtype) -> _Timed | None:
    """Return FLOP/s for documents of `length`, interpolated between the two measured lengths around it.

    A token's seconds are s(L) = a + b L: fixed work, and work per token it sees. The line goes through both
    measured points and continues beyond the longest; below the shortest, its rate is used.
    """
    lengths = list(DOCUMENTS.items())
    (lower, low), (upper, high) = next(
        (pair for pair in pairwise(lengths) if length <= pair[1][1]), (lengths[-2], lengths[-1])
    )
    suffix = ", v < d" * narrow
    first, second = (_rate("attention", name + suffix, dtype) for name in (lower, upper))
    if first is None or (length <= low and low == lengths[0][1]):
        return first
    if second is None:
        return None
    # in units of one FLOP per token and key, a rate is L / s
    before, after = (tokens * timed.threads / timed.each for tokens, timed in ((low, first), (high, second)))
    seconds = before + (after - before) * (length - low) / (high - low)
    threads = max(first.threads, second.threads)
    date, own = min(first.date, second.date), first.own and second.own
    return _Timed(length / seconds * threads, threads, date, own)


HALF = "half precision weights"


@dataclass(frozen=True)
class _Timed:
    """each: work/s of the implementation in use. own: True if the record is this user's."""

    each: float
    threads: int
    date: str
    own: bool


def _rate(name: str, bucket: str, dtype: torch.dtype) -> _Timed | None:
    """Return the rate of one op on this CPU from its record; None if there is no record."""
    op, key = ops.import_op(name), record.device_key(CPU)
    rows = [row for row in record.record_rows(op, CPU, dtype, bucket) if "refused" not in row]
    if not rows:
        return None
    runs = by_record(op, CPU, dtype, bucket).runs
    row = next((row for row in rows if row["candidate"] == runs), rows[0])
    micro = row["median_us"] if row["candidate"] == runs else row["reference_median_us"]
    return _Timed(WORK[name, bucket] / micro * 1e6, row["threads"], row["date"], record.is_own(row, key))
