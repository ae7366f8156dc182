"""Write docs/measured/performance.md from the committed rows, benchmarks/results/*.jsonl; measure nothing.

`unfreeze dev bench report`. The page has every target with its measured value, then where we lose, then the
latest run of each benchmark on each device with its command and machine.
The same rows make the same page; a test holds the committed page to the committed rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field

from benchmarks.harness.case import worst
from benchmarks.harness.rows import RESULTS, ROOT, Row, read
from benchmarks.harness.targets import TARGETS, Kind, Target, not_measured, rows_of
from unfreeze.config.parse import Folder, Frozen, parse, writing
from unfreeze.core.command import Common
from unfreeze.core.cpu import multiplies_bf16
from unfreeze.core.units import format_bytes

ABSENT = "–"
Column = Callable[[Row], str]
Columns = dict[str, Column]
"""Column head -> text of a row's cell."""


class Config(Frozen):
    """Input folder and output page."""

    results: Folder = Field(default="", description="folder of the .jsonl files; default: benchmarks/results")
    out: Folder = Field(default="", description="the page; default: docs/measured/performance.md")


def main(arguments: list[str], common: Common) -> dict[str, Any]:
    """-> file, targets (what, aim, measured, verdict), losses."""
    config = parse(Config, arguments, command="dev bench report", description=__doc__ or "")
    folder, out = (
        Path(config.results or RESULTS),
        Path(config.out or ROOT / "docs" / "measured" / "performance.md"),
    )
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
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for row in read(path):
            groups.setdefault((row.run, row.machine.device, row.benchmark), []).append(row)
    return [
        Run(device, benchmark, when, rows)
        for (when, device, benchmark), rows in sorted(groups.items(), reverse=True)
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
    lines = []
    for target in TARGETS:
        value, run = judge(target, runs)
        if run is not None and target.verdict(value) == "missed":
            lines.append(
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
                lines.append(
                    f"{run.benchmark}: {row.side}{case} is faster, {1 / speed:.2f} x our tokens/s"
                    f" ({run.device}, {run.when[:10]})"
                )
            if memory is not None and memory > 1:
                lines.append(
                    f"{run.benchmark}: {row.side}{case} takes less memory, {1 / memory:.2f} of our peak"
                    f" ({run.device}, {run.when[:10]})"
                )
            if row.results.get("predicted") and row.results.get("verdict") in ("missed", "refuted"):
                lines.append(
                    f"{run.benchmark}: {row.side}: {row.results['verdict']}, {figure(row)} where"
                    f" {row.results['predicted']} was predicted ({run.device}, {run.when[:10]})"
                )
    return lines


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
    """Names of the profiles beside the page: "moe" for profiles/moe.md; moe-cpu-avx2.md is that class's."""
    return sorted(file.stem for file in (page.parent / "profiles").glob("*.md"))


def page(runs: Sequence[Run], profiles: Sequence[str] = ()) -> str:
    """The whole of docs/measured/performance.md; a benchmark with a profile links it."""
    parts = [
        "# Performance",
        (
            "Made by `unfreeze dev bench report` from the rows in `benchmarks/results/`; do not edit."
            " Each row has the machine, all settings and the commit. The compared programs run as processes"
            " that step in turn. Speeds are medians. On a CPU, peak memory is the process's peak resident"
            " memory after loading, with interpreter and libraries. Absolute times hold for this machine;"
            " ratios are from one run. Errors are relative to float64, unless the table says otherwise."
        ),
        "## Targets",
        targets_table(runs),
        "## Missed targets, and where others are better",
        "\n".join(f"- {line}" for line in losses(runs)) or "None among the measured benchmarks.",
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
            if name == (own if (own := f"{run.benchmark}-{run.device}") in profiles else run.benchmark)
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


def number(name: str, form: str = "{:,.1f}", scale: float = 1.0) -> Column:
    """A field of the results as a number, ABSENT where there is none."""

    def column(row: Row) -> str:
        value = row.results.get(name)
        return form.format(scale * value) if isinstance(value, (int, float)) else ABSENT

    return column


def size(name: str) -> Column:
    """A field that is bytes, or says why there are none."""

    def column(row: Row) -> str:
        value = row.results.get(name)
        return format_bytes(value) if isinstance(value, (int, float)) else str(value or ABSENT)

    return column


def error(row: Row) -> str:
    """The largest of its errors, or the reason why there is none."""
    correctness = row.results.get("correctness") or {}
    text = worst(correctness)
    return text if text != "none" else next((str(value) for value in correctness.values()), ABSENT)


def compared(place: int, form: str) -> Column:
    """One of a row's errors, by its place among them."""

    def column(row: Row) -> str:
        value = [*row.results["correctness"].values(), ABSENT, ABSENT][place]
        return form.format(value) if isinstance(value, float) else str(value)

    return column


def spread(low: str, high: str, form: str = "{:,.1f}") -> Column:
    return lambda row: f"{number(low, form)(row)} to {number(high, form)(row)}"


def figure(row: Row) -> str:
    """The one figure of a row, whatever it measures."""
    forms = {"tokens_per_second": "{:,.0f} tokens/s", "ms": "{:,.2f} ms", "gb_per_second": "{:.2f} GB/s"}
    return next(
        (form.format(row.results[name]) for name, form in forms.items() if row.results.get(name)), ABSENT
    )


def state(row: Row) -> str:
    taken = sum(row.results.get("state_bytes", {}).values())
    return format_bytes(taken) if taken else ABSENT


SIDE: Columns = {"side": lambda row: row.side}
RATES: Columns = {"tokens/s": number("tokens_per_second"), "slowest to fastest": spread("slowest", "fastest")}
FIRST: Columns = {
    "first side is": number("first_side_speed", "{:.2f} x"),
    "of its memory": number("first_side_memory", "{:.2f}"),
}
PEAK: Columns = {"peak": size("peak_bytes")}
TRAINING: Columns = {
    **SIDE,
    **RATES,
    **PEAK,
    "above weights, gradients, optimizer": size("above_state_bytes"),
    "these": state,
    "loading": size("load_peak_bytes"),
    **FIRST,
    "error": error,
}
LOADED: Columns = {
    **SIDE,
    "GB/s": number("gb_per_second", "{:.2f}"),
    "raw read": number("raw_gb_per_second", "{:.2f}"),
    "ratio": number("ratio", "{:.2f}"),
    "lowest to highest": spread("ratio_lowest", "ratio_highest", "{:.2f}"),
    **PEAK,
    "promised": size("promised_bytes"),
    "correctness": lambda row: written(dict(row.results.get("correctness", {}))),
}
DECODED: Columns = {
    "batch x prompt": lambda row: f"{row.settings['batch']} x {row.settings['prompt']}",
    **SIDE,
    **RATES,
    "ms a step": number("step_seconds", "{:,.2f}", 1e3),
    "limit, ms": number("limit_seconds", "{:,.2f}", 1e3),
    "by": lambda row: row.results.get("limit", ""),
    "reached": number("limit_share", "{:.0%}"),
    "Python calls a token": number("python_calls_per_token", "{:,.0f}"),
    "time without adapters": number("adapters_cost", "{:.2f}"),
    "time of INT4's per weight": number("of_int4", "{:.2f}"),
    "prompt, s": number("prompt_seconds", "{:.2f}"),
    **PEAK,
    **FIRST,
    "other than float32's first choice": compared(0, "{:.1%}"),
    "nats": compared(1, "{:.3f}"),
}
GROWN: Columns = {
    "tokens per step": lambda row: f"{row.settings['tokens_per_step']:,}",
    "tokens/s": number("tokens_per_second"),
    "us per token": lambda row: f"{1e6 / row.results['tokens_per_second']:,.1f}",
    "peak of the process": size("peak_bytes"),
    "plan (without the interpreter)": size("planned_bytes"),
    "error": error,
}
STEPPED: Columns = {
    "experts in": lambda row: row.side,
    "tokens/s": number("tokens_per_second"),
    "time of INT4's": number("of_int4", "{:.2f}"),
    **PEAK,
    "resident after the first step": size("resident_first"),
    "after the last": size("resident_last"),
    "error": error,
}
EXPERTS: Columns = {  # of rows before 2026-11-25
    "experts in": lambda row: row.side.removesuffix(" experts"),
    "bytes a weight": number("bytes_per_weight", "{:.3f}"),
    "ms": number("ms"),
    "time of INT4's": number("of_int4", "{:.2f}"),
    "plain torch": number("of_torch", "{:.2f} x"),
    "error against it": error,
}
GENERIC: Columns = {
    **SIDE,
    "routing": lambda row: str(row.settings.get("routing", "")),
    "measured": figure,
    "TFLOP/s": number("tflops"),
    "MFU": number("mfu", "{:.0%}"),
    "predicted": lambda row: str(row.results.get("predicted", "")),
    "refuted beyond": lambda row: number("refuted_beyond")(row) if row.results.get("predicted") else "",
    "verdict": lambda row: str(row.results.get("verdict", "")),
    **PEAK,
    "error": error,
}


def table(columns: Columns, rows: Sequence[Row], filled: bool = False) -> str:
    """One line per row; filled: omit columns without a value."""
    lines = [[column(row) for column in columns.values()] for row in rows]
    kept = [
        i for i in range(len(columns)) if not filled or any(line[i] not in ("", ABSENT) for line in lines)
    ]
    return markdown([[*columns][i] for i in kept], [[line[i] for i in kept] for line in lines])


def timed(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if "tokens_per_second" in row.results]


def notes(rows: Sequence[Row]) -> list[str]:
    lines = [f"{row.side}: {row.results['note']}." for row in rows if "note" in row.results]
    return lines + [f"{row.side}: not measured: {row.not_run}." for row in rows if row.not_run]


def training_tables(rows: Sequence[Row]) -> list[str]:
    """moe, dense, recompute: a table per turn (the sides that stepped in turn), then the notes."""
    turns = sorted({row.settings.get("turn", 1) for row in rows})
    parts = [table(TRAINING, [r for r in timed(rows) if r.settings.get("turn", 1) == turn]) for turn in turns]
    shared = [row for row in rows if "share" in row.results]
    for row in shared:
        r, again = row.results, ""
        if "recomputed_flops" in r:
            again = f" and {r['recomputed_flops'] / 1e9:,.0f} again"
        words = (
            f"{row.side}, turn {row.settings.get('turn', 1)}: {r['model_flops'] / 1e9:,.0f} GFLOP of model"
        )
        more = f", {r['share_with_recompute']:.0%} with what is recomputed" if again else ""
        parts.append(f"{words} work a step{again}: {r['share']:.0%} of the measured GEMM rate{more}.")
    return [*parts, *notes([row for row in rows if row not in shared])]


def format_tables(rows: Sequence[Row]) -> list[str]:
    """Whole steps; then the expert op, of rows that have it."""
    parts = ["A step with experts in each format, in turn:", table(STEPPED, timed(rows))]
    if experts := [row for row in rows if "bytes_per_weight" in row.results]:
        heading = (
            "One layer's experts, forward and backward. Plain torch: the time of dequantizing in plain torch,"
        )
        heading += " relative to ours:"
        parts += [heading, table(EXPERTS, experts)]
    return parts


def decoding_tables(rows: Sequence[Row]) -> list[str]:
    """A table per model; the rates behind its limits; the attempts of transformers' generate."""
    parts = []
    for model in dict.fromkeys(row.settings.get("model", "") for row in rows):
        of_model = [row for row in rows if row.settings.get("model", "") == model]
        parts += [f"`{model}`:"] if model else []
        parts.append(table(DECODED, of_model, filled=True))
        ways: dict[str, str] = {}
        for row in of_model:
            if peer := row.results.get("peer"):
                attempts = "; ".join(
                    f"{way} {ms:,.1f} ms" if isinstance(ms, float) else f"{way}: {ms}"
                    for way, ms in peer["tried"].items()
                )
                ways[f"{row.side}, {rows_of(row.settings['batch'])} x {row.settings['prompt']}"] = (
                    f"{peer['way']}. Tried: {attempts}"
                )
        parts += [f"{case}: {way}." for case, way in ways.items()]
    rates = rows[0].results
    if "read_rate" in rates:
        parts.append(
            f"Limits: bytes at {rates['read_rate'] / 1e9:,.1f} GB/s, arithmetic at"
            f" {rates['gemm_rate'] / 1e9:,.0f} GFLOP/s, both measured in this run."
        )
    return parts


def generic(rows: Sequence[Row]) -> list[str]:
    """A row per side with its figure, prediction and error; then derived figures, and notes."""
    shown = [row for row in rows if figure(row) != ABSENT]
    parts = [table(GENERIC, shown, filled=True)] if shown else []
    for row in rows:
        if entries := row.results.get("grid"):
            lines = [[short(value) for value in entry.values()] for entry in entries]
            head = [name.replace("_", " ") for name in entries[0]]
            parts += [f"{row.side}: {row.results.get('label', '')}", markdown(head, lines)]
    return [*parts, *notes(rows)]


def short(value: Any) -> str:
    """A derived figure in its table."""
    if isinstance(value, (int, float)):
        return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"
    return str(value)


TABLES: dict[str, Callable[[Sequence[Row]], list[str]]] = {
    "moe": training_tables,
    "formats": format_tables,
    "dense": training_tables,
    "recompute": training_tables,
    "load": lambda rows: [table(LOADED, rows)],
    "decode": decoding_tables,
    "growth": lambda rows: [table(GROWN, timed(rows)), *notes(rows)],
}
