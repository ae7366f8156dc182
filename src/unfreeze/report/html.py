"""report.html: a run as one page that stands by itself. No script, no request to anywhere, no font to load; it may be mailed or archived.

Every text from the run (prompts, answers, paths, config) goes through page.text(). A piece that the run does not have is named as missing,
with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unfreeze.core.units import format_bytes, format_count
from unfreeze.report.events import data_lines, last, number, of_kind, sample_pairs, series, warnings
from unfreeze.report.experts import experts_section
from unfreeze.report.guards import GUARD_HEAD, broken, clip_limit, clipped, guard_rows, peak_memory, spikes, unsupervised
from unfreeze.report.page import document, figure, folded, section, table, text, write_page
from unfreeze.report.pictures import curve, smoothing_window
from unfreeze.report.run import Run, expert_balance, facts, flatten, read_run, result_words, started
from unfreeze.report.tables import ABSENT, RECEIPT_HEAD, left_out, plan_lines, receipt_rows, standing_still

WIDE, NARROW, SMALL, SIDE = (760, 320), (350, 250), (280, 190), (360, 304)  # SVG units of the pictures; text in them is 11 units high
SHOWN_SAMPLES = 12  # the others are folded away
SHOWN_STEPS = 200  # rows of the step table; a longer run shows every n-th step, as the table says


def write_report(run_dir: Path | str) -> Path:
    """Write report.html into the run folder and return its path. Reads only the folder's own files; never a model.

    Raises DataError where the folder has no events.jsonl, or a damaged one.
    """
    run = read_run(run_dir)
    return write_page(run.path / "report.html", page(run))


def page(run: Run) -> str:
    """The whole page as one string; the same run folder gives the same string."""
    parts = (_header, _warnings, _loss, _machine, _guards, _data, experts_section, _receipt, _samples, _evaluations, _more)
    return document(f"{run.name} · unfreeze run", "\n".join(part(run) for part in parts), f"Written by unfreeze from {run.name}/events.jsonl")


def _header(run: Run) -> str:
    done = " done" if run.state == "done" else ""
    rows = [("Model", text(run.source("model"))), ("Data", text(run.source("data"))), ("Started", text(started(run)))]
    rows += [("Loaded", text(run.loaded)), ("Result", f'<span class="state{done}">{text(result_words(run))}</span>')]
    source = "".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in rows if value)
    numbers = "".join(f"<div><dt>{text(name)}</dt><dd>{text(value)}</dd></div>" for name, value in facts(run))
    return f'<header><h1>{text(run.name)}</h1>\n<dl class="source">{source}</dl>\n<dl class="facts">{numbers}</dl></header>'


def _warnings(run: Run) -> str:
    rows = [(f"step {step}", words) for step, words in warnings(run.events)]
    return section("Warnings", table(("when", "what"), rows, caption="Warnings of the run", kind="words")) if rows else ""


def _loss(run: Run) -> str:
    steps, losses = series(run.events, "train", "loss")
    if not losses:
        return section("Loss", "", "No training step is in the events, so there is no loss to show.")
    evals = series(run.events, "eval", "loss")
    window = smoothing_window(len(losses))
    lowest = min(range(len(losses)), key=losses.__getitem__)
    words = f"{losses[0]:.3f} at step {steps[0]:,}, {losses[-1]:.3f} at step {steps[-1]:,}; "
    words += f"lowest {losses[lowest]:.3f} at step {steps[lowest]:,}."
    words += f" Faint: each step; strong: mean of {window} steps." if window > 1 else ""
    if evals[1]:
        best = min(range(len(evals[1])), key=evals[1].__getitem__)
        words += f" Dots: validation, lowest {evals[1][best]:.3f} at step {evals[0][best]:,}, last {evals[1][-1]:.3f}."
    ringed = {step for step, _ in spikes(run)} & set(steps)
    words += f" Ringed: {_steps(len(ringed))} that the spike guard named." if ringed else ""
    words += _left_out(run, steps)
    alt = f"Training loss per step: {words}"
    pictures = [curve(f"loss-{size[0]}", (steps, losses), alt, size, smoothed=True, dots=evals, rings=ringed) for size in (WIDE, NARROW)]
    over_tokens = _loss_over_tokens(run)
    row = "row aligned lead" if over_tokens else "row"
    return section("Loss", f'<div class="{row}">{figure("Training loss by step", words, *pictures)}{over_tokens}</div>')


def _loss_over_tokens(run: Run) -> str:
    """Loss over supervised tokens so far, on a log axis: equal distances are equal factors of data. Empty for fewer than three steps."""
    seen, xs, ys = 0.0, [], []
    for event in run.train:
        tokens, loss = number(event.get("supervised_tokens")), number(event.get("loss"))
        seen += tokens or 0.0
        if tokens and loss is not None:
            xs.append(seen)
            ys.append(loss)
    if len(xs) < 3:
        return ""
    words = f"{format_count(xs[0])} to {format_count(xs[-1])} tokens seen, on a logarithmic axis."
    empty = len(unsupervised(run))
    words += f" Left out: {_steps(empty)} without a supervised token." if empty else ""
    alt = f"Training loss over supervised tokens, logarithmic: {ys[0]:.3f} after {xs[0]:,.0f}, {ys[-1]:.3f} after {xs[-1]:,.0f}."
    return figure("Training loss by supervised tokens", words, curve("loss-tokens", (xs, ys), alt, SIDE, smoothed=True, log_x=True))


def _steps(count: int) -> str:
    return f"{count:,} {'step' if count == 1 else 'steps'}"


def _left_out(run: Run, drawn: Sequence[int]) -> str:
    """What the guard of finite numbers named and a picture of the steps `drawn` therefore can't show."""
    count = len({step for step, _ in broken(run)} - set(drawn))
    return f" Left out: {_steps(count)} without a finite value." if count else ""


def _machine(run: Run) -> str:
    """Throughput, memory, learning rate and gradient norm as four small pictures."""
    if not run.train:
        return ""
    wanted = [  # title, points, axis, smoothed: what is noisy by nature, how its numbers are written
        ("Tokens per second", rates(run), "count", True, "{:,.0f}".format),
        ("Peak memory", peak_memory(run), "bytes", False, format_bytes),
        ("Learning rate", series(run.events, "train", "learning_rate"), "number", False, "{:.3g}".format),
        ("Gradient norm", series(run.events, "train", "grad_norm"), "number", True, "{:.3g}".format),
    ]
    figures, missing = [], []
    for position, (title, points, y_format, smoothed, write) in enumerate(wanted):
        steps, ys = points
        if not ys:
            missing.append(title.lower())
            continue
        words = f"{write(min(ys))} to {write(max(ys))}, last {write(ys[-1])}." if len(ys) > 1 else f"{write(ys[0])} at step {steps[0]}."
        rings, level = set[int](), None
        if title == "Gradient norm":
            rings, level = {step for step, _ in spikes(run)}, clip_limit(run)
            words += f" Dashed: clipped above {level:g}, in {_steps(len(clipped(run)))}." if level is not None and level <= max(ys) else ""
            words += _left_out(run, steps)
        alt = f"{title} per step: {words}"
        picture = curve(f"small-{position}", points, alt, SMALL, smoothed=smoothed, from_zero=True, y_format=y_format, rings=rings, level=level)
        figures.append(figure(title, words, picture))
    note = f"Not in the events: {', '.join(missing)}." if missing else ""
    return section("Speed, memory and optimizer", f'<div class="row aligned">{"".join(figures)}</div>', note)


def rates(run: Run) -> tuple[list[int], list[float]]:
    """(steps, tokens per second of each step)."""
    steps, values = [], []
    for event in run.train:
        tokens, seconds = number(event.get("tokens")), number(event.get("seconds"))
        if tokens and seconds:
            steps.append(event["step"])
            values.append(tokens / seconds)
    return steps, values


DATA_ROWS = {  # field of the data event -> its name in the table
    "rows": "rows in the file",
    "examples": "documents",
    "tokens": "tokens",
    "supervised": "supervised tokens",
    "longest": "longest document, tokens",
    "truncated": "rows truncated",
    "dropped": "rows dropped",
    "bad": "bad rows skipped",
}


def _data(run: Run) -> str:
    """The account of the data file: every row of it is used, cut, dropped or bad."""
    account = last(run.events, "data")
    if account is None:
        return ""
    rows = [(name, f"{value:,.0f}") for field, name in DATA_ROWS.items() if (value := number(account.get(field))) is not None]
    share = number(account.get("supervised_fraction"))
    rows += [("supervised share", f"{share:.1%}")] if share is not None else []
    rows += [(f"rows as {shape}", f"{count:,}") for shape, count in (account.get("shapes") or {}).items()]
    notes = [(note, f"{count:,}") for note, count in (account.get("notes") or {}).items()]
    listed = [(f"row {item['row']}", item["reason"]) for item in account.get("listed") or []]
    parts = [table(("count", "value"), rows, caption="Data")]
    parts += [table(("note", "rows"), notes, caption="Notes on the data", kind="words")] if notes else []
    left_out = int(number(account.get("dropped")) or 0) + int(number(account.get("bad")) or 0)
    reasons = table(("row", "why"), listed, caption="Rows left out", kind="words")
    parts += [folded(f"Rows left out: {len(listed)} of {left_out:,}", reasons)] if listed else []
    return section("Data", "".join(parts), "Loss is taken on the supervised tokens only.")


def _guards(run: Run) -> str:
    rows = guard_rows(run)
    marked = {state: [row.guard for row in rows if row.state == state] for state in ("look", "fault")}
    body = table(GUARD_HEAD, rows, caption="Guards of the run", bad=marked["fault"], look=marked["look"], kind="words stack")
    return section("Guards", body, "What watched over this run, and what it said.")


def _receipt(run: Run) -> str:
    if not run.groups:
        return section("Receipt", "", "No receipt: it is written after the first step with a gradient; neither receipt.json nor the events hold one.")
    still = standing_still(run.groups)
    note = (
        "What was trained, and the proof: matrices that moved of those that a gradient came to, gradient norm, movement and change in output "
        "after the first step with a gradient."
    )
    alarm = f'<p class="bad">Asked for, and not moved: {text(", ".join(still))}.</p>' if still else ""
    rows = table(RECEIPT_HEAD, receipt_rows(run.groups), caption="Receipt per module group", bad=still, kind="stack")
    out = "".join(f'<p class="bad">{text(line)}</p>' for line in left_out(run.exceptions))
    return section("Receipt", alarm + rows + out, note)


def _samples(run: Run) -> str:
    pairs = sample_pairs(run.events)
    if not pairs:
        return section("Before and after", "", "No samples are in the events.")
    blocks = [
        f'<article class="sample"><h3>{text(prompt)}</h3><div class="pair">{_side("before", before)}{_side("after", after)}</div></article>'
        for prompt, before, after in pairs
    ]
    rest = blocks[SHOWN_SAMPLES:]
    more = folded(f"{len(rest)} more", "".join(rest)) if rest else ""
    note = "The same prompts, answered by the model before training and after."
    return section("Before and after", "".join(blocks[:SHOWN_SAMPLES]) + more, note)


def _side(when: str, said: str | None) -> str:
    missing = f"no sample taken {when} training" if said is None else "an empty answer"
    words = text(said) if said else f'<span class="note">{missing}</span>'
    return f'<div class="{when}"><span class="when">{when}</span>{words}</div>'


def _evaluations(run: Run) -> str:
    evals = of_kind(run.events, "eval")
    if not evals:
        return ""
    fields = dict.fromkeys(name for event in evals for name, value in event.items() if number(value) is not None)
    names = [name for name in fields if name not in ("step", "time")]
    rows = [(f"{event['step']:,}", *(_cell(event, name, ".4g") for name in names)) for event in evals]
    return section("Evaluations", table(("step", *names), rows, caption="Evaluations"))


def _more(run: Run) -> str:
    """The folded parts: plan, resolved config, every step's numbers."""
    plan = plan_lines(run.plan)
    parts = [folded("Plan", f"<pre>{text(chr(10).join(plan))}</pre>")] if plan else []
    if run.config:
        rows = list(flatten(run.config).items())
        parts.append(folded("Resolved config", table(("field", "value"), rows, caption="Resolved config", kind="words")))
    if run.train:
        parts.append(folded("Numbers of each step", _step_table(run)))
    missing = [name for name, there in (("plan", plan), ("resolved config", run.config)) if not there]
    return section("Details", "".join(parts), f"Not in the run folder: {' and '.join(missing)}." if missing else "")


STEP_COLUMNS = {  # field of a train event -> heading, how its number is written
    "loss": ("loss", ".4f"),
    "learning_rate": ("learning rate", ".3g"),
    "grad_norm": ("gradient norm", ".3g"),
    "tokens": ("tokens", ",.0f"),
    "supervised_tokens": ("supervised", ",.0f"),
    "seconds": ("seconds", ".3f"),
    "peak_bytes": ("peak bytes", ",.0f"),
}


def _step_table(run: Run) -> str:
    every = -(-len(run.train) // SHOWN_STEPS)
    shown = run.train[::every]
    if shown[-1] is not run.train[-1]:
        shown.append(run.train[-1])
    rows = [(f"{event['step']:,}", *(_cell(event, name, form) for name, (_, form) in STEP_COLUMNS.items())) for event in shown]
    note = f'<p class="note">Every {every}th step and the last; all of them are in events.jsonl.</p>' if every > 1 else ""
    return note + table(("step", *(head for head, _ in STEP_COLUMNS.values())), rows, caption="Numbers of each step")


def _cell(event: Mapping[str, Any], name: str, form: str) -> str:
    value = number(event.get(name))
    return ABSENT if value is None else format(value, form)


def summary_lines(run_dir: Path | str) -> list[str]:
    """What `unfreeze report` prints beside the path of the page: result, main numbers, data, expert balance, idle groups, warnings."""
    run = read_run(run_dir)
    lines = [f"{run.name}: {result_words(run)}"]
    rows = facts(run)
    width = max(len(name) for name, _ in rows)
    lines += [f"  {name.ljust(width)}  {value}" for name, value in rows]
    if run.loaded:
        lines.append(f"  {'Loaded'.ljust(width)}  {run.loaded}")
    lines += [f"  {('Data' if position == 0 else '').ljust(width)}  {line}" for position, line in enumerate(data_lines(run.events))]
    balance = expert_balance(run)
    if balance:
        worst = max(balance, key=lambda row: row[2])
        lines.append(f"  {'Experts'.ljust(width)}  max/mean {worst[2]:.2f} (layer {worst[0]}), {sum(row[3] for row in balance):,} dead")
    lines += [f"  asked for, and not moved: {group}" for group in standing_still(run.groups)]
    lines += [f"  {line}" for line in left_out(run.exceptions)]
    lines += [f"  warning, step {step}: {words}" for step, words in warnings(run.events)]
    return lines
