"""What a run came to in one sentence, its evaluations with units, and the command that repeats it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from unfreeze.core.schema import DataEvent, EvalEvent
from unfreeze.core.units import format_seconds
from unfreeze.report.events import (
    ENOUGH_STEPS,
    TEACH_LITTLE,
    last,
    numbers,
    of_kind,
    sample_pairs,
    series,
    times_larger,
    warnings,
)
from unfreeze.report.run import Run, flatten, leaves, loss_unit

UNITS = {  # field of an eval event -> what it is, its unit: core/schema.py's five, and the scores of the demo
    "loss": ("held-out loss", "nats per token"),
    "perplexity": ("held-out perplexity", "exp of the loss"),
    "bits_per_byte": ("held-out bits per byte", "bits per byte of text"),
    "tokens": ("held-out tokens", "tokens"),
    "seconds": ("time of the evaluation", "s"),
    "style": ("style: answers that speak like Yoda", "%"),
    "facts": ("facts: answers with the right fact", "%"),
    "accuracy": ("held-out pairs whose chosen answer has the higher reward", "share"),
    "margin": ("held-out margin of rewards", "nats times beta"),
}
ABOUT = ("loss", "perplexity", "bits_per_byte", "tokens", "seconds")  # not scores
NOUNS = {
    "question/answer": "answers",
    "prompt/completion": "answers",
    "instruction/output": "answers",
    "text": "texts",
    "chosen/rejected": "pairs of answers",
}


def evaluations(run: Run) -> dict[str, tuple[list[int], list[float]]]:
    """Field -> (steps, values) of everything that evaluations measured, in the order in which it came."""
    evals = of_kind(run.events, EvalEvent)
    fields = dict.fromkeys(name for event in evals for name in numbers(event))
    return {name: series(evals, "eval", name) for name in fields}


def verdict(run: Run) -> str:
    """'tiny-k2 learnt 1,219 answers of yoda_train.jsonl in 2 min 20 s: style 0 → 98 %, facts 100 → 99 %.'

    "learnt" only of a finished run that saw all of its data, and whose scores, held-out loss or, without
    these, loss of training say so: without sample answers that of ENOUGH_STEPS steps. A run without scores
    whose sample answers stayed the same learnt nothing that is seen in them, and of too few steps no run
    learns much.
    """
    model, (share, things) = Path(run.source("model")).name or "The model", _what(run)
    what = f"{share}{things}"
    if not run.train:
        return f"{model} has made no training step."
    measured, better = _measured(run)
    time, said = format_seconds(run.seconds), f": {measured}." if measured else "."
    if run.state == "done":
        few = _too_few(run)
        learnt = better and not share and not few
        return f"{model} {'learnt' if learnt else 'was trained on'} {what} in {time}{said}{few}"
    of = f" of {run.steps_planned:,}" if run.steps_planned else ""
    stood = "interrupted" if run.state == "interrupted" else "unfinished"
    return f"{model} was trained on {what}; {stood} after step {run.steps_done:,}{of} and {time}{said}"


def _too_few(run: Run) -> str:
    """' Too few steps to learn much: --epochs 40.' where the run warned of the steps that it made."""
    made = f"are only {run.steps_done} steps of"
    for _, words in warnings(run.events):
        if TEACH_LITTLE in words and made in words:
            return f" Too few steps to learn much: {words.partition(': ')[2].partition(', or')[0]}."
    return ""


def _what(run: Run) -> tuple[str, str]:
    """('', '1,219 answers of yoda_train.jsonl'); in a third of an epoch ('33 % of ', '1,219 answers …').

    Without an account of the data only the file.
    """
    configured = run.config.get("data") or run.source("data")
    files = [Path(str(file)).name for file in (configured if isinstance(configured, list) else [configured])]
    where = files[0] if len(files) == 1 else f"{len(files)} files"
    account = last(run.events, DataEvent)
    if account is None or "examples" not in account:
        return "", where or "its data"
    nouns = {NOUNS.get(shape, "conversations") for shape in account.get("shapes", {})}
    noun = nouns.pop() if len(nouns) == 1 else "documents"
    # Of a run that ended within its first epoch: how much of the data that was.
    trained, there = sum(event.get("tokens") or 0 for event in run.train), account.get("tokens") or 0
    more = times_larger(account)  # rows that are not encoded are taken to be like those that are
    there *= more
    seen = f"{100 * trained / there:.0f} % of " if 0 < trained < 0.8 * there else ""
    # what a fraction held out of the files is not trained on; a validation file is not counted there
    held_out = account.get("held_out", 0) if run.config.get("validation_fraction") else 0
    number = round(account["examples"] * more) - held_out
    return seen, f"{number:,} {noun}" + (f" of {where}" if where else "")


def _measured(run: Run) -> tuple[str, bool]:
    """Give (the change in words, whether it is for the better).

    Of the scores, else of held-out loss, else of training loss.
    """
    found = evaluations(run)
    scores = {name: ys for name, (_, ys) in found.items() if name not in ABOUT}
    if scores:
        words = [f"{name} {_change_of(name, ys)}" for name, ys in scores.items()]
        return ", ".join(words[:4]), any(ys[-1] > ys[0] for ys in scores.values()) or all(
            len(ys) == 1 for ys in scores.values()
        )
    answers = [pair for _, *pair in sample_pairs(run.events) if None not in pair]
    same = bool(answers) and all(before == after for before, after in answers)
    unchanged = f"; {_answers(len(answers))} the same as before" if same else ""
    if "loss" in found:
        ys = found["loss"][1]
        return f"held-out loss {change(ys, 3)}{unchanged}", not same and (len(ys) == 1 or min(ys) < ys[0])
    ys = series(run.events, "train", "loss")[1]
    # without samples a loss of other rows in each step is all there is: of a few steps it is noise
    seen = bool(answers) or run.steps_done >= ENOUGH_STEPS
    return (f"loss {change(ys, 3)}{unchanged}", seen and not same and ys[-1] < ys[0]) if ys else ("", False)


def _answers(answers: int) -> str:
    return "its sample answer is" if answers == 1 else f"its {answers} sample answers are"


def _unit_of(name: str) -> str:
    return UNITS[name][1] if name in UNITS else ""


def _change_of(name: str, values: Sequence[float]) -> str:
    """change() of a score: in whole percent, and shares or margins below 10 to two digits."""
    if _unit_of(name) == "%":
        return f"{change(values)} %"
    return change(values, 0 if max(map(abs, values)) >= 10 else 2)


def change(values: Sequence[float], digits: int = 0) -> str:
    """'0 → 98' of first and last, with as many more digits (at most four) as it takes to tell them apart."""
    first, final = values[0], values[-1]
    if len(values) == 1:
        return f"{first:.{max(digits, 2)}f}"
    while digits < 4 and first != final and f"{first:.{digits}f}" == f"{final:.{digits}f}":
        digits += 1
    return f"{first:.{digits}f} → {final:.{digits}f}"


EVALUATION_HEAD = ("what", "unit", "first", "last", "lowest", "highest")


def evaluation_rows(run: Run) -> list[tuple[str, ...]]:
    """One row per measure in EVALUATION_HEAD's order, a step behind each value."""
    rows = []
    for name, (steps, ys) in evaluations(run).items():
        what, unit = UNITS.get(name, (name, ""))
        unit = loss_unit(run).replace("supervised ", "") if name == "loss" else unit
        at = (0, -1, min(range(len(ys)), key=ys.__getitem__), max(range(len(ys)), key=ys.__getitem__))
        rows.append((what, unit, *(f"{ys[i]:.4g} (step {steps[i]:,})" for i in at)))
    return rows


def again(run: Run) -> str:
    """The command that makes this run once more, in a folder beside it; empty without a resolved config.

    Only the fields that differ from their defaults, where the run recorded which these are ("given"); else
    all that are set.
    """
    recipe = run.config.get("recipe")
    if not isinstance(recipe, str):
        return ""
    effective = run.config.get("effective")
    given = effective.get("given") if isinstance(effective, dict) else None
    fields = leaves(
        {name: value for name, value in run.config.items() if name not in ("recipe", "effective", "out")}
    )
    words = ["unfreeze", recipe]
    for name, value in fields.items():
        if (isinstance(given, list) and name not in given) or value in (None, "", [], {}):
            continue
        values = value if isinstance(value, list) else [value]
        words += [
            f"--{name.replace('_', '-')}",
            *(item if isinstance(item, str) else f"{item}" for item in values),
        ]
    return shlex.join([*words, "--out", f"{run.config.get('out') or f'runs/{run.name}'}-again"])


def machine_rows(run: Run) -> list[tuple[str, str]]:
    """(what, value) of where and with what it ran, as far as plan and config say."""
    effective = run.config.get("effective")
    effective = effective if isinstance(effective, dict) else {}
    rows = []
    if lines := run.plan.get("lines") if run.plan else None:
        rows.append(("Machine", lines[0].removeprefix("plan for ")))
    for name, title in (("device", "Device"), ("machine", "System"), ("versions", "Versions")):
        if value := effective.get(name):
            rows.append(
                (
                    title,
                    (
                        ", ".join(f"{key} {of}" for key, of in flatten(value).items())
                        if isinstance(value, dict)
                        else str(value)
                    ),
                )
            )
    return rows
