"""rollouts.html, the page to read what a model wrote, and the section of report.html that leads there.

The page holds the numbers of all steps; the answers of a step are in a script of their own (copies.py), which
the page loads when the step is opened. It needs no server.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from unfreeze.report.page import document, look, render, write_page
from unfreeze.report.rollouts.answers import FOLDER
from unfreeze.report.rollouts.copies import Step, copy_steps
from unfreeze.report.rollouts.trends import FURTHER, facts, figures, mean_reward, notes, warnings
from unfreeze.report.run import RunFolder

NAME = "rollouts.html"
LOOK = look(["rollouts"], ["rollout_text", "rollout_steps", "rollout_answers", "rollouts"])
FIRST = ("Mean reward", "Tokens per answer", "Groups without signal")  # pictures in report.html


def has_rollouts(run: RunFolder) -> bool:
    """True if the run writes rollouts, even if none is there yet."""
    return (run.path / FOLDER).is_dir()


def write_rollouts(run: RunFolder, *, reload: int = 0) -> Path | None:
    """Write rollouts.html and the copies it loads. -> its path; None for a run without rollouts.

    reload: seconds after which the page looks for new steps while none is open; 0: never.
    """
    if not has_rollouts(run):
        return None
    return write_page(run.path / NAME, rollouts_page(run, copy_steps(run.path), reload=reload))


def rollouts_page(run: RunFolder, steps: Sequence[Step], *, reload: int = 0) -> str:
    """Return the page as one string."""
    pictures = figures(steps, run) if steps else []
    body = render(
        "rollouts.html",
        name=run.name,
        facts=facts(steps) if steps else [],
        alarms=warnings(steps),
        notes=notes(steps),
        figures=[picture for picture in pictures if picture.title not in FURTHER],
        further=[picture for picture in pictures if picture.title in FURTHER],
        steps=json.dumps([_entry(step) for step in steps], separators=(",", ":")),
        empty=not steps,
        reload=reload,
    )
    footer = f"Written by unfreeze from {run.name}/{FOLDER}, which has the answers: keep it beside this page"
    return document(f"Rollouts · {run.name}", [body], footer, look=LOOK)


def _entry(step: Step) -> list[float | None]:
    """[step, answers, groups, groups without signal, mean reward], for rollouts.js."""
    numbers = step.numbers
    reward = mean_reward(numbers)
    return [
        numbers["step"],
        numbers["answers"],
        numbers["groups"],
        numbers["without_signal"],
        None if reward is None else float(f"{reward:.6g}"),
    ]


def rollouts_words(run: RunFolder) -> str:
    """'768 answers in 12 steps, mean reward 0.261 → 0.935: rollouts.html'; "" without rollouts."""
    steps = copy_steps(run.path) if has_rollouts(run) else []
    known = dict(facts(steps)) if steps else {}
    if not known:
        return ""
    reward = f", mean reward {known['Mean reward']}" if "Mean reward" in known else ""
    return f"{known['Answers'].replace('; in', ' answers in')}{reward}: {NAME}"


def rollouts_section(run: RunFolder) -> Markup:
    """Section of report.html: the main numbers and pictures, alarms, and the link. Empty without rollouts."""
    if not has_rollouts(run):
        return Markup("")
    steps = copy_steps(run.path)
    return render(
        "rollouts_section.html",
        page=NAME,
        facts=facts(steps) if steps else [],
        alarms=warnings(steps),
        figures=[figure for figure in figures(steps, run) if figure.title in FIRST] if steps else [],
    )
