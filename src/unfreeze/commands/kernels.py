"""unfreeze dev kernels list|measure: which implementation of each op runs here, and why.

list shows them. measure times them and writes the records that decide.

On a CPU, a training run times the implementations it needs against plain torch, once per machine, for at most
2 seconds. Everything else is decided by records. An implementation runs if its record shows that it is exact
enough, forward and backward, and faster than plain torch by at least 5 % and by more than the spread of the
timings. The package has records for some machines; measure makes them for yours.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field
from rich.console import Console
from rich.table import Table

from unfreeze.config.parse import USERS_OWN, Folder, Frozen, parse
from unfreeze.core.command import Common
from unfreeze.core.errors import ConfigError, nearest
from unfreeze.core.units import format_seconds, plural

if TYPE_CHECKING:
    import torch

    from unfreeze.kernels.choice.op import Case, Op
    from unfreeze.kernels.choice.record import Row

Cell = tuple["Op", "Case", "torch.dtype"]


class Listed(Frozen):
    """Options of list: which ops, on which device."""

    op: tuple[str, ...] = Field(default=(), description="op names, such as rms_norm attention; default: all")
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto: cuda if there is one")
    threads: int = Field(default=0, ge=0, description="CPU threads of torch and numba; 0: all cores")


class Shown(Listed):
    """Options of list, with `all`."""

    all: bool = Field(default=False, description="one row per shape bucket and dtype, with the reason")


class MeasureConfig(Listed):
    """Options of measure: which ops, and where records are written."""

    to: Literal["package", "user"] = Field(
        default="package",
        description=(
            "package: the committed records; user: your own, which take precedence"
            " (~/.cache/unfreeze/kernels)"
        ),
    )
    out: Folder = Field(default="", description="write to this file instead; runs do not read it")
    seconds: float = Field(
        default=1.0,
        gt=0,
        le=600,
        description=(
            "seconds to time one op, shape and dtype; at least 9 samples each, fewer seconds once the"
            " result is clear"
        ),
    )


def main(arguments: list[str], common: Common) -> dict[str, Any]:
    """measure -> device, file, rows, unmeasured, finished, seconds. list -> device, records, ops.

    Each of ops: op, bucket, dtype, runs, why, origin, candidates.
    """
    if arguments[:1] in (["-h"], ["--help"]):
        arguments = ["measure", *arguments]
    if not arguments or arguments[0] not in ("measure", "list"):
        got = f"{arguments[0]!r}{nearest(arguments[0], ['measure', 'list'])}" if arguments else "nothing"
        raise ConfigError(
            f"kernels takes the subcommand measure or list, got {got}", next="unfreeze dev kernels list"
        )
    config = parse(
        MeasureConfig if arguments[0] == "measure" else Shown,
        arguments[1:],
        command=f"kernels {arguments[0]}",
        description=__doc__ or "",
    )
    return measure_cells(config, common) if isinstance(config, MeasureConfig) else listing(config, common)


def chosen_ops(config: Listed) -> dict[str, Op]:
    """Return the chosen ops by name, or all. Raises ConfigError for an unknown name."""
    from unfreeze.kernels.choice import ops

    return {name: ops.import_op(name) for name in config.op or ops.OPS}


def measurable_cells(ops: dict[str, Op]) -> list[Cell]:
    """Every (op, case, dtype) that can be measured."""
    return [(op, case, dtype) for op in ops.values() for case in op.cases for dtype in case.dtypes]


def measure_cells(config: MeasureConfig, common: Common) -> dict[str, Any]:
    """Measure cell by cell. Records are written after each op, and on Ctrl-C."""
    import torch

    from unfreeze.job.opening.device import pick_device
    from unfreeze.kernels.choice import configs
    from unfreeze.kernels.choice import measure as kernels
    from unfreeze.kernels.choice.record import device_key
    from unfreeze.kernels.loops.scratch import release_scratch

    ops, device = chosen_ops(config), pick_device(config.device, config.threads)
    file, begun = destination(config, device_key(device)), time.perf_counter()
    writable(file)

    def say(text: str) -> None:
        if not common.quiet:
            print(text, file=sys.stderr, flush=True)

    how = (
        "CUDA events, the L2 cache overwritten before each sample"
        if device.type == "cuda"
        else (
            f"{plural(torch.get_num_threads(), 'thread')}, wall clock"
            if torch.get_num_threads() > 1
            else "1 thread, CPU time"
        )
    )
    say(
        f"{device_key(device)}, torch {torch.__version__}, {how}; forward and backward together, medians (±"
        " interquartile range), samples interleaved"
    )
    rows: list[Row] = []
    unmeasured: list[dict[str, str]] = []
    finished, wanted = True, measurable_cells(ops)
    try:
        for number, (op, case, dtype) in enumerate(wanted, start=1):
            name = f"{op.name}, {case.bucket}, {str(dtype).removeprefix('torch.')}"
            try:
                for row in configs.measure_all(op, case, device, dtype, config.seconds, file):
                    say(f"{number:>3}/{len(wanted)}  {name}: {config_line(row)}")
                new = kernels.measure(op, case, device, dtype, config.seconds)
            # the reference itself fails (out of memory, say): skip this cell, the next one may work
            except Exception as error:
                unmeasured.append(
                    {"cell": name, "reason": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
                )
                say(
                    f"{number:>3}/{len(wanted)}  {name}: not measured; the reference failed:"
                    f" {unmeasured[-1]['reason']}"
                )
                continue
            rows += new
            say(f"{number:>3}/{len(wanted)}  {name}: {cell_line(new)}")
            if number == len(wanted) or wanted[number][0] is not op:
                save_records(file, rows, ops)
                release_scratch()
    except KeyboardInterrupt:
        finished = False
        save_records(file, rows, ops)
    seconds = time.perf_counter() - begun
    interrupted = "" if finished else "; interrupted: ops not measured keep their old records"
    say(f"{plural(len(rows), 'row')} in {file}, {format_seconds(seconds)}{interrupted}")
    return {
        "device": device_key(device),
        "file": str(file),
        "rows": rows,
        "unmeasured": unmeasured,
        "finished": finished,
        "seconds": round(seconds, 1),
    }


def cell_line(rows: list[Row]) -> str:
    """Summarise one cell's rows in one line."""
    if not rows:
        return "no candidate runs here"
    timed = [row for row in rows if "refused" not in row]
    parts = [
        f"{row['candidate']} {row['reference_median_us'] / row['median_us']:.2f} x ({row['median_us']:.0f} ±"
        f" {row['spread_us']:.0f} us, error {max(row['error_forward'], row['error_backward']):.1e})"
        for row in timed
    ] + [f"{row['candidate']} refused: {row['refused']}" for row in rows if "refused" in row]
    reference = (
        f"; reference {timed[0]['reference_median_us']:.0f} ± {timed[0]['reference_spread_us']:.0f} us"
        if timed
        else ""
    )
    return ", ".join(parts) + reference


def config_line(row: Row) -> str:
    """Summarise the launch parameters that were found fastest in one line."""
    words = (
        " ".join(f"{name}={value}" for name, value in row["config"].items()) or "its own launch parameters"
    )
    gain = f"{row['median_us']:.0f} us, its own {row['own_median_us']:.0f} us" if row["config"] else "fastest"
    failed = f"; {len(row['failed'])} did not run" if row["failed"] else ""
    return f"{row['candidate']} with {words}: {gain}{failed}"


def destination(config: MeasureConfig, key: str) -> Path:
    """Return the records file to update."""
    from unfreeze.kernels.choice import record

    if config.out:
        return Path(config.out)
    return (record.user_folder() if config.to == "user" else record.COMMITTED) / f"{key}.json"


def writable(file: Path) -> None:
    """Raise ConfigError if the file's folder cannot be written. Called before measuring, not after."""
    import tempfile

    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.is_dir():
            raise IsADirectoryError(0, "is a folder")
        with tempfile.TemporaryFile(dir=file.parent):
            pass
    except OSError as error:
        raise ConfigError(
            f"the records would go to {file}, which cannot be written: {error.strerror}",
            next="unfreeze kernels measure --to user, or --out FILE",
        ) from error


def save_records(file: Path, rows: list[Row], ops: dict[str, Op]) -> None:
    from unfreeze.kernels.choice import record

    if not rows:
        return
    try:
        record.write(file, rows, ops)
    except OSError as error:
        if error.errno not in USERS_OWN:
            raise
        raise ConfigError(
            f"out = {str(file)!r} cannot be written: {error.strerror}", next="give another file with --out"
        ) from error


def listing(config: Shown, common: Common) -> dict[str, Any]:
    """List which implementation runs here and why, for every op, shape bucket and dtype."""
    from unfreeze.job.opening.device import pick_device
    from unfreeze.kernels.choice.choose import by_record
    from unfreeze.kernels.choice.record import device_key
    from unfreeze.kernels.expert_mlp import packed_op

    ops, device = chosen_ops(config), pick_device(config.device, config.threads)
    listed, packed = [], packed_op()
    if "expert_mlp" in ops:
        ops[packed.name] = packed  # computes expert_mlp if experts are packed
    for op, case, dtype in measurable_cells(ops):
        runs, why, origin = by_record(op, device, dtype, case.bucket)
        listed.append(
            {
                "op": op.name,
                "bucket": case.bucket,
                "dtype": str(dtype).removeprefix("torch."),
                "runs": runs,
                "why": why,
                "origin": origin,
                "candidates": standing(op, case, device, dtype),
            }
        )
    result = {"device": device_key(device), "ops": listed}
    if not (common.quiet or common.json):
        show_rows(result) if config.all else show_ops(result)
    return result


def standing(op: Op, case: Case, device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    """Return candidate -> the reason it cannot run here, or a summary of its record."""
    from unfreeze.kernels.choice.record import record_rows

    rows = {row["candidate"]: row for row in record_rows(op, device, dtype, case.bucket)}
    words = {}
    for name, candidate in op.candidates.items():
        refused, row = candidate.refuses(device.type, dtype), rows.get(name)
        if refused:
            words[name] = f"cannot run: {refused}"
        elif row is None:
            words[name] = "no record"
        elif "refused" in row:
            words[name] = f"refused: {row['refused']}"
        else:
            words[name] = (
                f"{row['reference_median_us'] / row['median_us']:.2f} x, error"
                f" {max(row['error_forward'], row['error_backward']):.1e}"
            )
            words[name] += ", runs only if impl names it" * (device.type in candidate.named_on)
    return words


def show_ops(result: dict[str, Any]) -> None:
    """Print one line per op: the implementations that run, each with its number of input kinds."""
    runs: dict[str, Counter[str]] = {}
    for entry in result["ops"]:
        runs.setdefault(entry["op"], Counter())[entry["runs"]] += 1
    width = max(map(len, runs), default=0)
    print(f"{result['device']}: implementations that run, and for how many kinds of inputs")
    for op, counts in runs.items():
        words = ", ".join(f"{name} {count}" for name, count in counts.most_common())
        print(f"  {op:<{width}}  {words}")
    origins = Counter(entry["origin"] for entry in result["ops"])
    print("decided by: " + ", ".join(f"{origin} {count}" for origin, count in origins.most_common()))
    print("reasons for each kind: unfreeze dev kernels list --all")


def show_rows(result: dict[str, Any]) -> None:
    """Print the table, then the candidates that cannot run on this device at all."""
    console = Console()
    table = Table(box=None, pad_edge=False, title=result["device"], title_justify="left")
    for name in ("op", "bucket", "dtype", "runs", "decided by", "why", "others"):
        table.add_column(name, overflow="fold")
    cannot: dict[str, None] = {}
    for entry in result["ops"]:
        others = []
        for name, words in entry["candidates"].items():
            if words.startswith("cannot run: "):
                cannot[f"{entry['op']} {name}: {words.removeprefix('cannot run: ')}"] = None
            elif name != entry["runs"]:
                others.append(f"{name} {words}")
        columns = [
            *(entry[key] for key in ("op", "bucket", "dtype", "runs", "origin", "why")),
            "; ".join(others),
        ]
        table.add_row(*(text.replace("[", r"\[") for text in columns))
    console.print(table)
    for line in cannot:
        console.print(line, style="dim", markup=False)
