"""The choice for each op of one run: made at its start, kept in its folder, the same in all processes."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from unfreeze.core.errors import ConfigError
from unfreeze.core.process import trim
from unfreeze.core.schema import KernelChoice
from unfreeze.kernels import expert_mlp
from unfreeze.kernels.attention.documents import bucket_of
from unfreeze.kernels.choice import ahead, ops, times
from unfreeze.kernels.choice.choose import Choice, Inputs, by_record, fix, running
from unfreeze.kernels.choice.op import Op
from unfreeze.kernels.choice.timed import Cell, time_all
from unfreeze.kernels.expand.bucket import kind_of
from unfreeze.quant.codec import Codec

CPU = torch.device("cpu")
# Ops that are timed, the most expensive first. Not adamw and linear_cross_entropy: making their inputs alone
# takes as long as all the others, and their candidates differ by little.
TIMED = ("packed_experts", "attention", "expand", "rms_norm", "swiglu", "rotary", "few_rows")
SHARE = 0.05  # of a run's tokens: attention is not timed for document lengths with a smaller share


def all_ops() -> list[Op]:
    """Every op with a choice on a CPU."""
    return [expert_mlp.packed_op(), *map(ops.import_op, ops.OPS)]


def cells(
    dtype: torch.dtype, lengths: Iterable[int], *, narrow: bool, experts: bool, codecs: Iterable[Codec]
) -> list[Cell]:
    """The cells to time for a run in that dtype, in order.

    lengths: of its documents. narrow: values are narrower than keys (MLA). experts: True if the model has
    any. codecs: of its packed weights.
    """
    kinds, by_name = {kind_of(codec) for codec in codecs}, {op.name: op for op in all_ops()}
    attention = _buckets(lengths, narrow)

    def met(name: str, bucket: str) -> bool:
        if name == "attention":
            return bucket in attention
        if name == "packed_experts":
            return experts and bool(kinds)
        if name == "swiglu":
            return ", " not in bucket  # of the activations only SwiGLU has a loop
        return name != "expand" or (bucket.partition(", ")[2] or "int4") in kinds

    return [
        Cell(by_name[name], case, dtype)
        for name in TIMED
        for case in by_name[name].cases
        if met(name, case.bucket) and dtype in case.dtypes and running(by_name[name], CPU, dtype)
    ]


def _buckets(lengths: Iterable[int], narrow: bool) -> list[str]:
    """The buckets of attention with a large enough share of the tokens; a short document is one block."""
    tokens: Counter[str] = Counter()
    for length in lengths:
        tokens[bucket_of(length, 2, 1 if narrow else 2)] += length
    least = SHARE * tokens.total()
    return [name for name, count in tokens.items() if count >= least and not name.startswith("under")]


def time_missing(wanted: Sequence[Cell], begin: Callable[[], object] = lambda: None) -> int:
    """Time the cells that were not timed on this machine, and keep the rows. Returns their number.

    Does nothing if UNFREEZE_KERNELS fixes the choice. begin: called before the first is timed.
    """
    there = times.tried()
    missing = [cell for cell in wanted if cell.key not in there]
    if not missing or os.environ.get("UNFREEZE_KERNELS"):
        return 0
    begin()
    rows = time_all(missing, quiet=ahead.quiet)
    times.keep(rows)
    trim()  # the plan counts this process's memory
    return sum(not row.get("untimed") for row in rows)


def made(dtype: torch.dtype) -> list[KernelChoice]:
    """The choices on this CPU in that dtype and in float32: a row for each op and bucket."""
    return [
        row_of(Inputs(op.name, CPU, kind, case.bucket, "auto"), by_record(op, CPU, kind, case.bucket))
        for op in all_ops()
        for case in op.cases
        for kind in dict.fromkeys((dtype, torch.float32))
        if kind in case.dtypes
    ]


def row_of(inputs: Inputs, choice: Choice) -> KernelChoice:
    """A choice in the form of files and events."""
    return KernelChoice(
        op=inputs.op,
        bucket=inputs.bucket,
        dtype=str(inputs.dtype).removeprefix("torch."),
        runs=choice.runs,
        origin=choice.origin,
        why=choice.why,
    )


def read(file: Path, remedy: str = "delete it: they are chosen anew") -> list[KernelChoice]:
    """The rows of a run's kernels.json. Raises ConfigError, with `remedy`, for anything else."""
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(rows, list) or not all(_is_row(row) for row in rows):
            raise ValueError("it is not a list of choices")
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} does not say which kernels run: {error}", next=remedy) from error
    return rows


def take(rows: Sequence[KernelChoice]) -> list[str]:
    """Fix these choices. Returns "op as candidate" for each that cannot run here; those are looked up."""
    by_name = {op.name: op for op in all_ops()}
    table, cannot = {}, []
    for row in rows:
        op = by_name.get(row["op"])
        if op is None:
            continue
        key, dtype = (row["op"], row["dtype"], row["bucket"]), getattr(torch, row["dtype"], torch.float32)
        if row["runs"] in ("reference", op.preferred, *running(op, CPU, dtype)):
            table[key] = Choice(row["runs"], row["why"], row["origin"])  # type: ignore[arg-type]
        else:
            cannot.append(f"{row['op']} as {row['runs']}")
    fix(table)
    return cannot


def _is_row(row: Any) -> bool:
    names = KernelChoice.__annotations__
    return isinstance(row, dict) and all(isinstance(row.get(name), str) for name in names)
