"""report.html: a run as one self-contained page.

Sections: verdict, answers, scores, rollouts, loss, evaluations, guards, data, experts, machine, receipt,
details.
Numbers and words are made here, HTML in templates/, one file per section. A section without data says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from unfreeze.core.schema import DataEvent, EvalEvent, SampleEvent, TrainEvent
from unfreeze.core.units import format_bytes, format_count
from unfreeze.report.curves import curves_section
from unfreeze.report.events import (
    data_lines,
    evals_of,
    folded,
    last,
    numbers,
    of_kind,
    sample_pairs,
    series,
    warnings,
)
from unfreeze.report.experts import experts_section
from unfreeze.report.guards import (
    GUARD_HEAD,
    broken,
    clip_limit,
    clipped,
    guard_rows,
    peak_memory,
    spikes,
    unsupervised,
)
from unfreeze.report.kernels import KERNEL_HEAD, kernel_rows, kernel_words
from unfreeze.report.metrics import loss_unit, metrics_of
from unfreeze.report.page import Figure, document, render, write_page
from unfreeze.report.pictures import Axes, Points, curve, points_json, smoothing_window
from unfreeze.report.rollouts.page import rollouts_section, rollouts_words, write_rollouts
from unfreeze.report.run import (
    RunFolder,
    expert_balance,
    facts,
    first_event_time,
    flatten,
    read_run,
    result_words,
)
from unfreeze.report.scores import read_scores, score_lines, scores_section
from unfreeze.report.tables import (
    ABSENT,
    RECEIPT_HEAD,
    left_out,
    plan_table,
    receipt_rows,
    receipt_verdict,
    standing_still,
)
from unfreeze.report.verdict import (
    EVALUATION_HEAD,
    UNITS,
    evaluation_note,
    evaluation_rows,
    evaluations,
    judged,
    machine_rows,
    rerun_command,
    subject,
    verdict,
)

# sizes of pictures in SVG units; text is 11 units high
WIDE, NARROW, SMALL = ((1100, 320), (350, 250), (340, 210))
SHOWN_SAMPLES = 3  # samples shown; the others are folded
SHOWN_STEPS = 200  # rows of the step table; for a longer run every n-th step, as the table says
# highest over lowest loss: above this the logarithmic axis is shown first, as a linear one shows a flat line
STEEP = 20.0
RELOAD = 4  # seconds between updates of the page of a running run


def write_report(run_dir: Path | str, *, watched: bool = False) -> Path:
    """Write report.html into the run folder, and rollouts.html if it has rollouts. -> path of the first.

    Reads only files of the folder, never a model.
    watched: the page is rewritten during the run and reloads itself every RELOAD seconds until the run ends.
    Raises DataError if events.jsonl is missing or damaged.
    """
    run = read_run(run_dir)
    reload = RELOAD if watched and run.state == "unfinished" else 0
    write_rollouts(run, reload=reload)
    return write_page(run.path / "report.html", page(run, reload=reload))


def page(run: RunFolder, *, reload: int = 0) -> str:
    """Return the whole page as one string, which depends only on the run folder."""
    sections = (
        _verdict,
        _answers,
        _scores,
        rollouts_section,
        _loss,
        curves_section,
        _evaluations,
        _guards,
        _data,
        experts_section,
        _machine,
        _receipt,
        _details,
    )
    footer = f"Written by unfreeze from {run.name}/events.jsonl"
    return document(
        f"{subject(run)} · {run.name}", [section(run) for section in sections], footer, reload=reload
    )


def _verdict(run: RunFolder) -> Markup:
    faults = [f"{row.guard}: {row.result}." for row in guard_rows(run) if row.state == "fault"]
    words, learnt = judged(run)
    doubt = run.state == "done" and not learnt
    return render(
        "verdict.html", title=subject(run), name=run.name, doubt=doubt, verdict=words, faults=faults
    )


def _answers(run: RunFolder) -> Markup:
    sources = dict.fromkeys(event.get("source", "") for event in of_kind(run.events, SampleEvent))
    origin = " and ".join(source for source in sources if source)
    return render("answers.html", pairs=sample_pairs(run.events), source=origin, shown=SHOWN_SAMPLES)


def _scores(run: RunFolder) -> Markup:
    """Section with the scores of `unfreeze eval` before and after the run; "" without any."""
    return scores_section(read_scores(run.path))


HEADLINE = ("Held-out reward", "Held-out loss", "Loss", "Time", "Tokens per second", "Peak memory")
"""Facts shown at the top; the others are under Details."""


def _loss(run: RunFolder) -> Markup:
    """Section with the main numbers, and training and validation loss in one picture.

    The picture has a linear and a logarithmic axis to switch between.
    """
    steps, losses = series(run.events, "train", "loss")
    known = dict(facts(run))
    # non-breaking hyphens, so that a narrow page keeps names on one line
    first = [
        (name.replace("-", "\N{NON-BREAKING HYPHEN}"), known[name]) for name in HEADLINE if name in known
    ]
    if not losses:
        return render("loss.html", facts=first, loss=None)
    measured = evals_of(run.events)
    evals = series(measured, "eval", "loss")
    if series(measured, "eval", "reward")[1]:  # minus the reward: no number of the training loss's scale
        evals = ([], [])
    # caption: first, last and lowest loss, validation, rings, steps left out
    window = smoothing_window(len(losses))
    lowest = min(range(len(losses)), key=losses.__getitem__)
    words = f"{losses[0]:.3f} at step {steps[0]:,}, {losses[-1]:.3f} at step {steps[-1]:,}; "
    words += f"lowest {losses[lowest]:.3f} at step {steps[lowest]:,}."
    words += f" Faint: each step; strong: median of {window} steps." if window > 1 else ""
    if evals[1]:
        best = min(range(len(evals[1])), key=evals[1].__getitem__)
        words += f" Dots: validation, lowest {evals[1][best]:.3f} at step {evals[0][best]:,},"
        words += f" last {evals[1][-1]:.3f}."
    ringed = {step for step, _ in spikes(run)} & set(steps)
    words += f" Ringed: {_steps(len(ringed))} that the spike guard named." if ringed else ""
    words += _left_out(run, steps)
    alt = f"Training loss per step: {words}"
    low, high = min([*losses, *evals[1]]), max([*losses, *evals[1]])

    # linear and logarithmic; a switch on the page shows one (a steep fall looks flat on the linear axis)
    def drawn(log: bool) -> list[str]:
        return [
            curve((steps, losses), alt, size, smoothed=True, axes=Axes(log_y=log), dots=evals, rings=ringed)
            for size in (WIDE, NARROW)
        ]

    picture = Figure(
        f"Training loss by step, {loss_unit(run.events)}",
        words,
        drawn(False),
        log=drawn(True) if low > 0 else (),
        log_first=low > 0 and high > STEEP * low,
        series=points_json({"loss": (steps, losses), "validation": evals}),
    )
    return render("loss.html", facts=first, loss=picture)


def _loss_over_tokens(run: RunFolder) -> Figure | None:
    """Loss over supervised tokens so far, on a logarithmic axis.

    None for fewer than three steps.
    """
    seen, xs, ys = 0.0, [], []
    for event in run.train:
        tokens, loss = event.get("supervised_tokens", 0), event.get("loss")
        seen += tokens
        if tokens and loss is not None:
            xs.append(seen)
            ys.append(loss)
    if len(xs) < 3:
        return None
    words = f"{format_count(xs[0])} to {format_count(xs[-1])} tokens seen, on a logarithmic axis."
    empty = len(unsupervised(run))
    words += f" Left out: {_steps(empty)} without a supervised token." if empty else ""
    ends = f"{ys[0]:.3f} after {xs[0]:,.0f}, {ys[-1]:.3f} after {xs[-1]:,.0f}."
    alt = f"Training loss over supervised tokens, logarithmic: {ends}"
    svg = curve((xs, ys), alt, SMALL, smoothed=True, axes=Axes(log_x=True))
    return Figure(
        "Training loss by supervised tokens",
        words,
        [svg],
        series=points_json({"loss": (xs, ys)}),
        x="supervised tokens",
    )


def _steps(count: int) -> str:
    return f"{count:,} {'step' if count == 1 else 'steps'}"


def _left_out(run: RunFolder, drawn: Sequence[float]) -> str:
    """Words on steps left out of the picture for lack of a finite value. drawn: steps shown."""
    count = len({step for step, _ in broken(run)} - set(drawn))
    return f" Left out: {_steps(count)} without a finite value." if count else ""


def _machine(run: RunFolder) -> Markup:
    """Section with small pictures: throughput, memory, learning rate, gradient norm, loss by tokens."""
    if not run.train:
        return Markup("")
    # the four series of a train event
    wanted: list[
        tuple[str, Points, str, bool, Any]
    ] = [  # title, points, axis, smoothed (if noisy), number format
        ("Tokens per second", rates(run), "count", True, "{:,.0f}".format),
        ("Peak memory", peak_memory(run), "bytes", False, format_bytes),
        ("Learning rate", series(run.events, "train", "learning_rate"), "number", False, "{:.3g}".format),
        ("Gradient norm", series(run.events, "train", "grad_norm"), "number", True, "{:.3g}".format),
    ]
    for metric in metrics_of(run.events)[1:]:
        points = series(run.events, "train", metric["field"])
        wanted.append((metric["label"], points, "number", True, "{:.3f}".format))
    figures, missing = [], []
    for title, points, y_format, smoothed, write in wanted:
        steps, ys = points
        if not ys:
            missing.append(title.lower())
            continue
        words = (
            f"{write(min(ys))} to {write(max(ys))}, last {write(ys[-1])}."
            if len(ys) > 1
            else f"{write(ys[0])} at step {steps[0]}."
        )
        # only the gradient norm has a limit and ringed spikes
        rings, level = set[float](), None
        if title == "Gradient norm":
            rings, level = {step for step, _ in spikes(run)}, clip_limit(run)
            words += (
                f" Dashed: clipped above {level:g}, in {_steps(len(clipped(run)))}."
                if level is not None and level <= max(ys)
                else ""
            )
            words += _left_out(run, steps)
        alt = f"{title} per step: {words}"
        svg = curve(
            points,
            alt,
            SMALL,
            smoothed=smoothed,
            axes=Axes(from_zero=min(ys) >= 0),
            y_format=y_format,
            rings=rings,
            level=level,
        )
        figures.append(Figure(title, words, [svg], series=points_json({title.lower(): points}, y_format)))
    over_tokens = _loss_over_tokens(run)
    figures += [over_tokens] if over_tokens else []
    return render("machine.html", figures=figures, missing=missing)


def rates(run: RunFolder) -> tuple[list[int], list[float]]:
    """(steps, tokens per second of each step)."""
    steps, values = [], []
    for event in run.train:
        tokens, seconds = event.get("tokens"), event.get("seconds")
        if tokens and seconds:
            steps.append(event["step"])
            values.append(tokens / seconds)
    return steps, values


DATA_ROWS = {  # field of the data event -> its name on the page
    "rows": "rows in the file",
    "examples": "documents",
    "tokens": "tokens",
    "supervised": "supervised tokens",
    "longest": "longest document, tokens",
    "held_out": "documents held out",
    "duplicates": "duplicate rows",
    "truncated": "rows truncated",
    "dropped": "rows dropped",
    "bad": "bad rows skipped",
}


def _data(run: RunFolder) -> Markup:
    """Section on the data: every row is used, cut, dropped or bad.

    Counts of 0 are left out.
    """
    account = last(run.events, DataEvent)
    if account is None:
        return Markup("")
    values: dict[str, Any] = {field: account.get(field) for field in DATA_ROWS}
    if room := account.get("room", 0):  # prompts: their answers are not there yet
        reserved = room * account.get("examples", 0)
        values |= {"tokens": account.get("tokens", 0) - reserved, "supervised": 0}
        values["longest"] = account.get("longest", room) - room
    counts = [(name, f"{value:,}") for field, name in DATA_ROWS.items() if (value := values[field])]
    if "supervised_fraction" in account and not room:
        counts.append(("supervised share", f"{account['supervised_fraction']:.1%}"))
    counts += [(f"rows as {shape}", f"{count:,}") for shape, count in account.get("shapes", {}).items()]
    return render(
        "data.html",
        counts=counts,
        notes=[(note, f"{count:,}") for note, count in account.get("notes", {}).items()],
        listed=[(f"row {item['row']}", item["reason"]) for item in account.get("listed", [])],
        lost=account.get("dropped", 0) + account.get("bad", 0),
        cut=account.get("truncated", 0),
    )


def _guards(run: RunFolder) -> Markup:
    """Section with a dot for each guard. Guards that are not ok are shown in full, others folded."""
    rows = guard_rows(run)
    by_state = {state: [row for row in rows if row.state == state] for state in ("ok", "look", "fault")}
    return render(
        "guards.html",
        head=GUARD_HEAD,
        rows=rows,
        loud=[row for row in rows if row.state != "ok"],
        quiet=[row[:-1] for row in by_state["ok"]],
        warnings=[(f"step {step:,}", words) for step, words in warnings(run.events)],
        **by_state,
    )


def _receipt(run: RunFolder) -> Markup:
    """Section on the receipt: the verdict, then one row per module group."""
    words = receipt_verdict(run.groups, run.exceptions)
    return render(
        "receipt.html",
        verdict=words[:1].upper() + words[1:],
        head=RECEIPT_HEAD,
        groups=receipt_rows(run.groups),
        still=standing_still(run.groups),
        left_out=left_out(run.exceptions),
    )


def _evaluations(run: RunFolder) -> Markup:
    """Section with one row per measure with its unit; single evaluations are folded."""
    measures, evals = evaluations(run), evals_of(run.events)
    if not measures:
        return Markup("")
    head = (
        "step",
        *(f"{name}, {unit}" if (unit := UNITS.get(name, ("", ""))[1]) else name for name in measures),
    )
    rows = [(f"{event['step']:,}", *(_cell(event, name, ".4g") for name in measures)) for event in evals]
    return render(
        "evaluations.html",
        summary_head=EVALUATION_HEAD,
        summary=evaluation_rows(run),
        note=evaluation_note(run),
        head=head,
        rows=rows,
    )


def _details(run: RunFolder) -> Markup:
    """Section with the command, facts and environment; folded: plan, kernels, resolved config, each step."""
    rows = [("Result", result_words(run)), ("Model", run.source("model")), ("Data", run.source("data"))]
    rows += [("Started", first_event_time(run)), ("Loaded", run.loaded), *machine_rows(run)]
    rows.append(("Kernels", kernel_words(run.events)))
    every = -(-len(run.train) // SHOWN_STEPS)
    return render(
        "details.html",
        command=_pieces(rerun_command(run, Path.cwd())),
        facts=[fact for fact in facts(run) if fact[0] not in HEADLINE],
        rows=[(name, value) for name, value in rows if value],
        plan=plan_table(run.plan),
        kernel_head=KERNEL_HEAD,
        kernels=kernel_rows(run.events),
        config=list(flatten(run.config).items()),
        every=every,
        head=("step", *(head for head, _ in STEP_COLUMNS.values())),
        steps=_step_rows(run, every),
    )


def _pieces(command: str) -> list[str]:
    """Split a command into parts, so that lines can break before each flag."""
    first, *flags = command.split(" --")
    return [first, *(f"--{flag}" for flag in flags)] if command else []


STEP_COLUMNS = {  # field of a train event -> heading, number format
    "loss": ("loss", ".4f"),
    "learning_rate": ("learning rate", ".3g"),
    "grad_norm": ("gradient norm", ".3g"),
    "tokens": ("tokens", ",.0f"),
    "supervised_tokens": ("supervised", ",.0f"),
    "seconds": ("seconds", ".3f"),
    "peak_bytes": ("peak bytes", ",.0f"),
}


def _step_rows(run: RunFolder, every: int) -> list[tuple[str, ...]]:
    """Table rows of every `every`-th step and the last."""
    shown = run.train[::every] if every else []
    if shown and shown[-1] is not run.train[-1]:
        shown.append(run.train[-1])
    return [
        (f"{event['step']:,}", *(_cell(event, name, form) for name, (_, form) in STEP_COLUMNS.items()))
        for event in shown
    ]


def _cell(event: TrainEvent | EvalEvent, name: str, form: str) -> str:
    value = numbers(event).get(name)
    return ABSENT if value is None else format(value, form)


def summary_lines(run_dir: Path | str) -> list[str]:
    """Lines that `unfreeze report` prints.

    They have the result, main numbers, data, experts and warnings.
    """
    run = read_run(run_dir)
    lines = [f"{run.name}: {result_words(run)}", f"  {verdict(run)}"]
    rows = facts(run)
    width = max(len(name) for name, _ in rows)
    lines += [f"  {name.ljust(width)}  {value}" for name, value in rows]
    if run.loaded:
        lines.append(f"  {'Loaded'.ljust(width)}  {run.loaded}")
    indent = " " * (width + 4)
    for position, line in enumerate(data_lines(run.events)):
        lines += folded(line, f"  {('Data' if position == 0 else '').ljust(width)}  ", indent)
    if rollouts := rollouts_words(run):
        lines += folded(rollouts, f"  {'Rollouts'.ljust(width)}  ", indent)
    for position, line in enumerate(score_lines(read_scores(run.path))):
        lines += folded(line, f"  {('Scores' if position == 0 else '').ljust(width)}  ", indent)
    if "not measured" in (kernels := kernel_words(run.events)):
        lines += folded(kernels, f"  {'Kernels'.ljust(width)}  ", indent)
    balance = expert_balance(run)
    if balance:
        worst = max(balance, key=lambda row: row[2])
        unused = sum(row[3] for row in balance)
        used = f"{unused:,} without a token." if unused else "Every expert got tokens."
        words = f"Busiest expert: {worst[2]:.2f}× its fair share (layer {worst[0]}). {used}"
        lines.append(f"  {'Experts'.ljust(width)}  {words}")
    if loud := [f"{row.guard} ({row.state})" for row in guard_rows(run) if row.state != "ok"]:
        words = f"{', '.join(loud)}: report.html says what to do"
        lines += folded(words, f"  {'Guards'.ljust(width)}  ", indent)
    lines += [f"  requested but did not move: {group}" for group in standing_still(run.groups)]
    lines += [f"  {line}" for line in left_out(run.exceptions)]
    lines += [f"  warning, step {step}: {words}" for step, words in warnings(run.events)]
    return lines
