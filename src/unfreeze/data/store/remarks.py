"""Warnings about data: large losses, duplicates, and the effect of mixture weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from unfreeze.data.store.dataset import Stats
    from unfreeze.data.store.examples import Examples

UNANSWERED = "the last turn is not the assistant's: it is not trained on"
"""Note of a row that ends with a question."""
MARKUP = "chat markup ({}) read as plain text"
"""Note of a text that contains chat markup."""
MUCH = 0.1
"""Share of the rows, or tokens, above which a loss is a warning."""


def too_long(stats: Stats, length: int, positions: int | None = None) -> str:
    """Return the remedy for rows longer than `length` tokens.

    positions: the model's maximum, or None if unknown
    """
    if positions is not None and length >= positions:
        longer = (
            f"the model takes {positions:,} positions at most: shorten the rows, or --data.truncation drop"
        )
    else:
        longer = "raise --sequence-length (and --tokens-per-step, if it is lower)"
    return longer + (", or --data.truncation split for texts" if stats.shapes.get("text") else "")


def losses(stats: Stats, length: int, positions: int | None = None, *, listed: bool = False) -> list[str]:
    """Return a warning for each kind of problem that affects more than a tenth of the rows.

    The kinds: cut, dropped, bad, duplicate, unanswered. Also warn if more than half of the texts contain chat
    markup. Each warning has a remedy.

    length: tokens at which rows were cut; positions: see too_long
    listed: True if bad rows are listed below
    """
    longer = too_long(stats, length, positions)
    warnings: list[str] = []
    cut = stats.tokens_cut / max(1, stats.tokens + stats.tokens_cut)
    if stats.truncated > MUCH * stats.rows or cut > MUCH:
        warnings.append(
            f"{_rows(stats.truncated, stats)} cut to {length} tokens; {stats.tokens_cut:,} tokens"
            f" ({100 * cut:.0f} %) are never trained on: {longer}"
        )
    if stats.dropped > MUCH * stats.rows:
        reason = next((item.reason for item in stats.listed if "supervised" in item.reason), "")
        warnings.append(f"{_rows(stats.dropped, stats)} dropped{f' ({reason})' if reason else ''}: {longer}")
    if stats.bad > MUCH * stats.rows:
        reason = f" ({stats.listed[0].reason})" if stats.listed else ""
        where = "see the list below" if listed else "list them with unfreeze data show"
        warnings.append(f"{_rows(stats.bad, stats)} bad and left out{reason}: {where}")
    if stats.duplicates > MUCH * stats.rows:
        first = f" ({stats.repeats[0].reason})" if stats.repeats else ""
        warnings.append(
            f"{_rows(stats.duplicates, stats)} duplicates{first}: remove them, or they count twice"
        )
    if (unanswered := stats.notes[UNANSWERED]) > MUCH * stats.rows:
        warnings.append(
            f"{unanswered:,} of {stats.rows:,} rows end without an answer, and their last turn is not trained"
            " on: add the answer, or remove the turn"
        )
    texts, marked = stats.shapes["text"], MARKUP.partition("{")[0]
    notes = {note: count for note, count in stats.notes.items() if note.startswith(marked)}
    if (several := sum(notes.values())) > texts / 2:
        mark = next(iter(notes)).removeprefix(marked).partition(")")[0]
        warnings.append(
            f"{several:,} of {texts:,} texts hold chat markup ({mark}), which is read as plain text: write"
            ' them as {"messages": [{"role": "user", "content": …}, …]}'
        )
    return warnings


def labels(examples: Examples) -> list[str]:
    """Warn if all labelled answers have the same label, so that nothing is compared."""
    chosen_N = examples.chosen_N
    counts = {"true": int((chosen_N == examples.lengths_N).sum()), "false": int((chosen_N == 0).sum())}
    present = [label for label, count in counts.items() if count]
    if len(present) != 1 or (several := counts[present[0]]) < len(examples):
        return []
    return [
        f"{'all ' if several > 1 else ''}{several:,} answers have the label {present[0]}; KTO compares true"
        " with false: check the label column"
    ]


def _rows(count: int, stats: Stats) -> str:
    share = f" ({100 * count / stats.rows:.0f} %)" if count < stats.rows else ""
    return f"{count:,} of {stats.rows:,} rows{share} {'is' if count == 1 else 'are'}"


def mixture(examples: Examples, names: Sequence[str], weights: Sequence[float], epochs: float) -> list[str]:
    """Describe the effect of mixture weights, one line per name in the order of their first files.

        names, weights   of each file; files of one folder or pattern share a name
        epochs           of the run: a document of weight w is shown w * epochs times on average
    Share of tokens: w_f T_f / sum of w T, with T_f the tokens of file f.
    """
    sources_N, lengths_N = examples.sources_N, examples.lengths_N
    count = len(names)
    documents_F = np.bincount(sources_N, minlength=count)
    tokens_F = np.bincount(sources_N, weights=lengths_N, minlength=count)
    shown_F = tokens_F * np.asarray(weights)
    total = max(float(shown_F.sum()), 1.0)
    lines: list[str] = []
    for name in dict.fromkeys(names):
        files = [i for i, other in enumerate(names) if other == name]
        weight = weights[files[0]]
        documents = int(documents_F[files].sum())
        shown = sum(int(weight * documents_F[i]) for i in files)
        how = (
            f"{shown:,} of {documents:,} documents"
            if weight <= 1
            else f"{documents:,} documents {shown:,} times"
        )
        lines.append(
            f"{name} x {weight:g}: {how} per epoch, {100 * float(shown_F[files].sum()) / total:.1f} %"
            f" of the tokens, each {weight * epochs:.3g} times in {epochs:.3g} epochs"
        )
    return lines
