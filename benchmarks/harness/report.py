"""Write docs/performance.md from the committed rows, benchmarks/results/*.jsonl; measure nothing.

`unfreeze dev bench report`. The page has every target with what was measured, then where we lose, then the
latest run of each benchmark on each device with its command and machine.
The same rows make the same page; a test holds the committed page to the committed rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field

from benchmarks.cases.formats import format_tables
from benchmarks.harness.rows import Row, checkout, read
from benchmarks.harness.targets import TARGETS, Kind, Target, not_measured
from benchmarks.harness.training import worst
from unfreeze.config.parse import Folder, Frozen, parse, writing
from unfreeze.core.command import Common
from unfreeze.core.cpu import multiplies_bf16
from unfreeze.core.errors import DataError
from unfreeze.core.units import format_bytes

ABSENT = "–"


class Config(Frozen):
    """From where, and where to."""

    results: Folder = Field(
        default="", description="folder of the .jsonl files; default: benchmarks/results of the checkout"
    )
    out: Folder = Field(default="", description="the page; default: docs/performance.md of the checkout")


def main(arguments: list[str], common: Common) -> dict[str, Any]:
    """-> file, targets (what, aim, measured, verdict), losses."""
    config = parse(Config, arguments, command="dev bench report", description=__doc__ or "")
    root = checkout()
    if root is None and not (config.results and config.out):
        raise DataError(
            "there is no source checkout here, so no committed rows", next="--results FOLDER --out FILE"
        )
    folder = Path(config.results) if config.results else (root or Path()) / "benchmarks" / "results"
    out = Path(config.out) if config.out else (root or Path()) / "docs" / "performance.md"
    runs = runs_of(folder)
    with writing(out, "out"):
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(page(runs, profiles_beside(out)), encoding="utf-8")
    judged = [(target, *judge(target, runs)) for target in TARGETS]
    if not common.quiet and not common.json:
        print(
            f"wrote {out}: {sum(target.verdict(value) == 'met' for target, value, _ in judged)} of"
            f" {len(TARGETS)} targets met"
        )
    entries = [
        {"what": t.what, "aim": t.aim, "measured": value, "verdict": t.verdict(value)}
        for t, value, _ in judged
    ]
    return {"file": str(out), "targets": entries, "losses": losses(runs)}


class Run(NamedTuple):
    """The rows of one run of one benchmark on one device, in the order they were measured."""

    device: str
    benchmark: str
    when: str
    rows: list[Row]

    @property
    def kind(self) -> Kind:
        if not self.device.startswith("cpu"):
            return "gpu"
        return "cpu" if multiplies_bf16(self.device) else "cpu without bf16"


def runs_of(folder: Path) -> list[Run]:
    """Every run under a folder, the latest first."""
    found: dict[tuple[str, str, str], list[Row]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for row in read(path):
            found.setdefault((row.run, row.machine.device, row.benchmark), []).append(row)
    return [
        Run(device, benchmark, when, rows)
        for (when, device, benchmark), rows in sorted(found.items(), reverse=True)
    ]


def judge(target: Target, runs: Sequence[Run]) -> tuple[float | None, Run | None]:
    """The target's figure from the latest run that measured it, and that run; (None, None) without one."""
    for run in runs:
        if (run.kind, run.benchmark) == (target.kind, target.benchmark):
            value = target.value(run.rows)
            if value is not None:
                return value, run
    return None, None


def losses(runs: Sequence[Run]) -> list[str]:
    """List where we lose.

    Targets missed, and in the latest runs every peer that is faster or leaner and every prediction that was
    refuted.
    """
    said = []
    for target in TARGETS:
        value, run = judge(target, runs)
        if run is not None and target.verdict(value) == "missed":
            said.append(
                f"{target.what}: {target.write(value)}, the target is {target.aim} ({run.device},"
                f" {run.when[:10]})"
            )
    for run in latest(runs):
        for row in run.rows if run.benchmark not in ("formats", "beyond") else ():  # all sides are ours
            speed, memory = row.results.get("first_side_speed"), row.results.get("first_side_memory")
            case = (
                f" at {row.settings['batch']} x {row.settings['prompt']} tokens"
                if "batch" in row.settings and "prompt" in row.settings
                else ""
            )
            if speed is not None and speed < 1:
                said.append(
                    f"{run.benchmark}: {row.side}{case} is faster, {1 / speed:.2f} x our tokens/s"
                    f" ({run.device}, {run.when[:10]})"
                )
            if memory is not None and memory > 1:
                said.append(
                    f"{run.benchmark}: {row.side}{case} takes less memory, {1 / memory:.2f} of our peak"
                    f" ({run.device}, {run.when[:10]})"
                )
            if row.results.get("predicted") and row.results.get("verdict") in ("missed", "refuted"):
                said.append(
                    f"{run.benchmark}: {row.side}: {row.results['verdict']}, {figure(row)} where"
                    f" {row.results['predicted']} was predicted ({run.device}, {run.when[:10]})"
                )
    return said


def latest(runs: Sequence[Run]) -> list[Run]:
    """Give the newest run of each benchmark on each device.

    Benchmarks in the order of their first name, CPUs first.
    """
    newest: dict[tuple[str, str], Run] = {}
    for run in runs:
        newest.setdefault((run.benchmark, run.device), run)
    return sorted(
        newest.values(),
        key=lambda run: (
            run.kind,
            ORDER.index(run.benchmark) if run.benchmark in ORDER else len(ORDER),
            run.device,
        ),
    )


ORDER = tuple("moe formats dense recompute load start data decode growth beyond equal layer model".split())


def profiles_beside(page: Path) -> list[str]:
    """Names of the profiles committed beside the page: docs/profiles/moe.md is "moe"."""
    return sorted(file.stem for file in (page.parent / "profiles").glob("*.md"))


def page(runs: Sequence[Run], profiles: Sequence[str] = ()) -> str:
    """The whole of docs/performance.md; a benchmark with a profile links it."""
    parts = [
        "# Performance",
        (
            "Made by `unfreeze dev bench report` from the rows in `benchmarks/results/`; edit nothing here."
            " A row holds the machine, all settings and the commit; the sides of a run are processes that step in"
            " turn. Speeds are medians; a peak on a CPU is the process's resident memory at its highest after"
            " loading, interpreter and libraries included. An absolute time is this machine's; ratios are of"
            " one run. Errors are relative, against float64, unless the table says otherwise."
        ),
        "## Targets",
        targets_table(runs),
        "## Where we lose",
        "\n".join(f"- {line}" for line in losses(runs)) or "Nowhere among what was measured.",
    ]
    for run in latest(runs):
        parts += [
            f"## `{run.benchmark}` on {run.device}",
            about(run),
            *TABLES.get(run.benchmark, generic)(run.rows),
        ]
        parts += [
            f"Op by op: [profiles/{name}.md](profiles/{name}.md)"
            for name in profiles
            if name == run.benchmark
        ]
    missing = not_measured(
        [name for name in ORDER if name not in {run.benchmark for run in runs}], {run.device for run in runs}
    )
    if missing:
        parts += ["## Not measured", "\n".join(missing)]
    return "\n\n".join(parts) + "\n"


def targets_table(runs: Sequence[Run]) -> str:
    lines = []
    for target in TARGETS:
        value, run = judge(target, runs)
        verdict = target.verdict(value)
        where = f"{run.device}, {run.when[:10]}" if run else ABSENT
        lines.append(
            [
                f"{target.what}",
                f"{target.kind.upper()} `{target.benchmark}`",
                target.aim,
                target.write(value),
                verdict,
                where,
            ]
        )
    return markdown(["what", "benchmark", "target", "measured", "", "machine, date"], lines)


def about(run: Run) -> str:
    """Command, machine, versions, date, and the settings all rows share."""
    row = run.rows[0]
    machine, versions = (
        row.machine,
        ", ".join(f"{name} {version}" for name, version in row.machine.versions.items()),
    )
    number = f" (family {machine.family}, model {machine.model})" if machine.family else ""
    memory = f", {format_bytes(machine.memory_bytes)}" if machine.memory_bytes else ""
    shared = {
        name: value
        for name, value in row.settings.items()
        if all(other.settings.get(name) == value for other in run.rows)
        and value not in ({}, [], "")
        and name != "converted"
    }
    note = f"\n\nRow {row.settings['converted']}." if "converted" in row.settings else ""
    return (
        f"`{row.command}`, {run.when[:10]}, commit {row.commit or 'not recorded'}. {machine.name}{number},"
        f" {machine.cores} cores, {machine.threads} threads{memory}; Python {machine.python},"
        f" {versions}.\n\nSettings:"
        f" {'; '.join(f'{name} {written(value)}' for name, value in shared.items())}.{note}"
    )


def written(value: Any) -> str:
    """A setting in a sentence."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {written(inner)}" for name, inner in value.items())
    if isinstance(value, list):
        return " + ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table: the first column to the left, the others to the right."""
    rule = ["---", *["---:" for _ in head[1:]]]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in (head, rule, *lines)
    )


def number(results: Mapping[str, Any], name: str, form: str = "{:,.1f}") -> str:
    value = results.get(name)
    return form.format(value) if isinstance(value, (int, float)) else ABSENT


def size(results: Mapping[str, Any], name: str) -> str:
    value = results.get(name)
    return format_bytes(value) if isinstance(value, (int, float)) else str(value or ABSENT)


def error(results: Mapping[str, Any]) -> str:
    correctness = results.get("correctness") or {}
    text = worst(correctness)
    return text if text != "none" else next((str(value) for value in correctness.values()), ABSENT)


def figure(row: Row) -> str:
    """The one figure of a row, whatever it measures."""
    for name, form in (
        ("tokens_per_second", "{:,.0f} tokens/s"),
        ("ms", "{:,.2f} ms"),
        ("gb_per_second", "{:.2f} GB/s"),
    ):
        if isinstance(row.results.get(name), (int, float)):
            return form.format(row.results[name])
    return ABSENT


def training_tables(rows: Sequence[Row]) -> list[str]:
    """moe and dense: a table per turn (the sides that stepped in turn), then what is left to say."""
    parts = []
    head = [
        "side",
        "tokens/s",
        "slowest to fastest",
        "peak",
        "above weights, gradients, optimizer",
        "these",
        "loading",
        "first side is",
        "of its memory",
        "error",
    ]
    for turn in sorted({row.settings.get("turn", 1) for row in rows}):
        lines = []
        for row in [
            row for row in rows if row.settings.get("turn", 1) == turn and "tokens_per_second" in row.results
        ]:
            r = row.results
            state = sum(r["state_bytes"].values()) if "state_bytes" in r else None
            lines.append(
                [
                    row.side,
                    number(r, "tokens_per_second"),
                    f"{number(r, 'slowest')} to {number(r, 'fastest')}",
                    size(r, "peak_bytes"),
                    size(r, "above_state_bytes"),
                    format_bytes(state) if state else ABSENT,
                    size(r, "load_peak_bytes"),
                    number(r, "first_side_speed", "{:.2f} x"),
                    number(r, "first_side_memory", "{:.2f}"),
                    error(r),
                ]
            )
        parts.append(markdown(head, lines))
    for row in rows:
        if "share" in row.results:
            r = row.results
            parts.append(
                f"{row.side}, turn {row.settings.get('turn', 1)}: {r['model_flops'] / 1e9:,.0f} GFLOP of"
                f" model work a step and {r['recomputed_flops'] / 1e9:,.0f} again: {r['share']:.0%} of the"
                f" measured GEMM rate, {r['share_with_recompute']:.0%} with what is recomputed."
            )
    return [*parts, *notes([row for row in rows if "share" not in row.results])]


def notes(rows: Sequence[Row]) -> list[str]:
    said = [f"{row.side}: {row.results['note']}." for row in rows if "note" in row.results]
    return said + [f"{row.side}: not measured: {row.not_run}." for row in rows if row.not_run]


def load_tables(rows: Sequence[Row]) -> list[str]:
    lines = []
    for row in rows:
        r = row.results
        spread = f"{number(r, 'ratio_lowest', '{:.2f}')} to {number(r, 'ratio_highest', '{:.2f}')}"
        lines.append(
            [
                row.side,
                number(r, "gb_per_second", "{:.2f}"),
                number(r, "raw_gb_per_second", "{:.2f}"),
                number(r, "ratio", "{:.2f}"),
                spread,
                size(r, "peak_bytes"),
                size(r, "promised_bytes"),
                written(dict(r.get("correctness", {}))),
            ]
        )
    return [
        markdown(
            ["side", "GB/s", "raw read", "ratio", "lowest to highest", "peak", "promised", "correctness"],
            lines,
        )
    ]


def decode_tables(rows: Sequence[Row]) -> list[str]:
    head = [
        "batch x prompt",
        "side",
        "tokens/s",
        "slowest to fastest",
        "prompt, s",
        "peak",
        "first side is",
        "of its memory",
        "other than float32's first choice",
        "nats",
    ]
    lines = []
    for row in rows:
        r = row.results
        other, nats = [*r["correctness"].values(), ABSENT, ABSENT][:2]
        lines.append(
            [
                f"{row.settings['batch']} x {row.settings['prompt']}",
                row.side,
                number(r, "tokens_per_second"),
                f"{number(r, 'slowest')} to {number(r, 'fastest')}",
                number(r, "prompt_seconds", "{:.2f}"),
                size(r, "peak_bytes"),
                number(r, "first_side_speed", "{:.2f} x"),
                number(r, "first_side_memory", "{:.2f}"),
                f"{other:.1%}" if isinstance(other, float) else str(other),
                f"{nats:.3f}" if isinstance(nats, float) else str(nats),
            ]
        )
    return [markdown(head, lines)]


def growth_tables(rows: Sequence[Row]) -> list[str]:
    lines = [
        [
            f"{row.settings['tokens_per_step']:,}",
            number(row.results, "tokens_per_second"),
            f"{1e6 / row.results['tokens_per_second']:,.1f}",
            size(row.results, "peak_bytes"),
            size(row.results, "planned_bytes"),
            error(row.results),
        ]
        for row in rows
        if "tokens_per_second" in row.results
    ]
    head = [
        "tokens per step",
        "tokens/s",
        "us per token",
        "peak of the process",
        "plan (without the interpreter)",
        "error",
    ]
    return [markdown(head, lines), *notes(rows)]


def generic(rows: Sequence[Row]) -> list[str]:
    """Make the table of a benchmark that has none of its own: layer, model, and any new one.

    A row per side with its figure, its memory, the prediction and the error. Columns without a value are left
    out.
    """
    head = [
        "side",
        "routing",
        "measured",
        "TFLOP/s",
        "MFU",
        "predicted",
        "refuted beyond",
        "verdict",
        "peak",
        "error",
    ]
    lines = [
        [
            row.side,
            str(row.settings.get("routing", "")),
            figure(row),
            number(row.results, "tflops"),
            number(row.results, "mfu", "{:.0%}"),
            str(row.results.get("predicted", "")),
            number(row.results, "refuted_beyond") if row.results.get("predicted") else "",
            str(row.results.get("verdict", "")),
            size(row.results, "peak_bytes"),
            error(row.results),
        ]
        for row in rows
        if figure(row) != ABSENT
    ]
    filled = [
        column for column in range(len(head)) if any(line[column] not in ("", ABSENT) for line in lines)
    ]
    table = markdown(
        [head[column] for column in filled], [[line[column] for column in filled] for line in lines]
    )
    return [*([table] if lines else []), *grid(rows), *notes(rows)]


def grid(rows: Sequence[Row]) -> list[str]:
    """The derived figures of a node, with their assumptions."""
    parts = []
    for row in rows:
        entries = row.results.get("grid")
        if entries:
            head = list(entries[0])
            lines = [[written_number(entry[name]) for name in head] for entry in entries]
            parts += [
                f"{row.side}: {row.results.get('label', '')}",
                markdown([name.replace("_", " ") for name in head], lines),
            ]
    return parts


def written_number(value: Any) -> str:
    if isinstance(value, (int, float)):
        return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"
    return str(value)


TABLES: dict[str, Callable[[Sequence[Row]], list[str]]] = {
    "moe": training_tables,
    "formats": format_tables,
    "dense": training_tables,
    "recompute": training_tables,
    "load": load_tables,
    "decode": decode_tables,
    "growth": growth_tables,
}
