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
from unfreeze.kernels.choice.checked import check_all, is_kept
from unfreeze.kernels.choice.choose import Choice, Inputs, by_record, fix, running
from unfreeze.kernels.choice.op import Op
from unfreeze.kernels.choice.timed import Cell, time_all
from unfreeze.kernels.choice.times import Row
from unfreeze.kernels.expand.bucket import kind_of, triton_kinds
from unfreeze.quant.codec import Codec

CPU = torch.device("cpu")
FIRST_START = 60.0  # seconds of checks at the first start on a card
# Ops that are timed, the most expensive first. Not adamw and linear_cross_entropy: making their inputs alone
# takes as long as all the others, and their candidates differ by little.
TIMED = ("packed_experts", "attention", "expand", "rms_norm", "swiglu", "rotary", "few_rows")
# Ops that are checked at the first start on a card, in the order of their share of a step. Not replay: it
# needs a model.
CARD_OPS = (
    "expert_mlp",
    "grouped_mm",
    "packed_attention",
    "expand",
    "token_order",
    "swiglu",
    "rms_norm",
    "rotary",
    "linear_cross_entropy",
    "adamw",
    "int4_grouped_mm",
    "few_rows",
)
SHARE = 0.05  # of a run's tokens: attention is not timed for document lengths with a smaller share


def all_ops() -> list[Op]:
    """Every op with a choice on a CPU."""
    return [expert_mlp.packed_op(), *map(ops.import_op, ops.OPS)]


def cells(
    dtype: torch.dtype,
    lengths: Iterable[int],
    *,
    narrow: bool,
    experts: bool,
    codecs: Iterable[Codec],
    device: torch.device = CPU,
) -> list[Cell]:
    """The cells to time for a run in that dtype, in order.

    lengths: of its documents. narrow: values are narrower than keys (MLA). experts: True if the model has
    any. codecs: of its packed weights. device: on a GPU every op that the run uses is checked, adamw in its
    own dtype.
    """
    codecs, by_name = list(codecs), {op.name: op for op in all_ops()}
    kinds = {kind_of(codec) for codec in codecs}
    if device.type != "cpu":
        kinds = {kind for codec in codecs for kind in triton_kinds(codec)}
    attention = _buckets(lengths, narrow)

    def met(name: str, bucket: str) -> bool:
        if name == "attention":
            return bucket in attention
        if name == "packed_experts":
            return experts and bool(codecs)
        if name == "swiglu":
            return ", " not in bucket  # other activations have no loop; on a GPU they are among its uses
        if name == "expert_mlp":
            return experts and ("unpacked" in bucket or "all weights" in bucket) != bool(codecs)
        if name in ("token_order", "grouped_mm"):
            return experts
        if name == "packed_attention":
            return ("v < d" in bucket) == narrow
        if name == "int4_grouped_mm":
            return experts and "int4" in kinds
        return name != "expand" or (bucket.partition(", ")[2] or "int4") in kinds

    names = TIMED if device.type == "cpu" else CARD_OPS
    wanted = [
        Cell(by_name[name], case, dtype if dtype in case.dtypes else case.dtypes[0])
        for name in names
        for case in by_name[name].cases
        if met(name, case.bucket) and (dtype in case.dtypes or dtype not in by_name[name].tolerance)
    ]
    return [cell for cell in wanted if running(cell.op, device, cell.dtype, cell.case.bucket)]


def _buckets(lengths: Iterable[int], narrow: bool) -> list[str]:
    """The buckets of attention with a large enough share of the tokens; a short document is one block."""
    tokens: Counter[str] = Counter()
    for length in lengths:
        tokens[bucket_of(length, 2, 1 if narrow else 2)] += length
    least = SHARE * tokens.total()
    return [name for name, count in tokens.items() if count >= least and not name.startswith("under")]


def time_missing(
    wanted: Sequence[Cell], begin: Callable[[], object] = lambda: None, device: torch.device = CPU
) -> list[Row]:
    """Time the cells that were not timed on this machine, and keep the rows. Returns them.

    On a GPU they are also compared with float64, for at most FIRST_START seconds (checked.py). Does nothing
    if UNFREEZE_KERNELS fixes the choice. begin: called before the first is timed.
    """
    there = times.tried(device)
    missing = [cell for cell in wanted if cell.key not in there]
    if not missing or os.environ.get("UNFREEZE_KERNELS"):
        return []
    begin()
    rows: list[Row] = []
    try:
        if device.type == "cpu":
            rows = time_all(missing, quiet=ahead.quiet)
        else:
            rows.extend(check_all(missing, device, FIRST_START))
    finally:  # a kernel that ends the process is banned at its next start
        if kept := [row for row in rows if is_kept(row)]:
            times.keep(kept, device)
    trim()  # the plan counts this process's memory
    return [row for row in rows if row["wrong"] or not row.get("untimed")]


def made(dtype: torch.dtype) -> list[KernelChoice]:
    """The choices on this CPU in that dtype and in float32: a row for each op and bucket."""
    return [
        row_of(Inputs(op.name, CPU, kind, case.bucket, "auto"), by_record(op, CPU, kind, case.bucket))
        for op in all_ops()
        for case in op.cases
        for kind in dict.fromkeys((dtype, torch.float32))
        if kind in case.dtypes
    ]


def made_on(device: torch.device, wanted: Sequence[Cell]) -> list[KernelChoice]:
    """The choices on a GPU, of the cells that were checked there; the others are chosen as they are used."""
    there = times.known(device)
    return [
        row_of(
            Inputs(cell.op.name, device, cell.dtype, cell.case.bucket, "auto"),
            by_record(cell.op, device, cell.dtype, cell.case.bucket),
        )
        for cell in wanted
        if cell.key in there
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


def take(rows: Sequence[KernelChoice], device: torch.device = CPU) -> list[str]:
    """Fix these choices. Returns "op as candidate" for each that cannot run here; those are looked up.

    One that was checked on this card and is wrong cannot run, whatever card the run started on.
    """
    by_name = {op.name: op for op in all_ops()}
    table, cannot, checks = {}, [], times.known(device) if device.type != "cpu" else {}
    for row in rows:
        op = by_name.get(row["op"])
        if op is None:
            continue
        key, dtype = (row["op"], row["dtype"], row["bucket"]), getattr(torch, row["dtype"], torch.float32)
        wrong = row["runs"] in checks[key]["wrong"] if key in checks else False
        if not wrong and row["runs"] in (
            "reference",
            op.preferred,
            *running(op, device, dtype, row["bucket"]),
        ):
            table[key] = Choice(row["runs"], row["why"], row["origin"])  # type: ignore[arg-type]
        else:
            cannot.append(f"{row['op']} as {row['runs']}")
    fix(table, device.type)
    return cannot


def _is_row(row: Any) -> bool:
    names = KernelChoice.__annotations__
    return isinstance(row, dict) and all(isinstance(row.get(name), str) for name in names)
