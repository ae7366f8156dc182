"""What a run's own events prove of it: that it learnt, overfitted, or neither; each figure beside its error.

"Learnt" needs a fall of the objective on held-out rows by more than two standard errors of the difference,
paired by row, and by at least a hundredth of its value at step 0; of preferences, accuracy must have risen as
clearly. Without held-out rows: the same of the mean training loss of whole epochs, or of the first and the
last quarter of the steps, an output that the receipt saw move far enough for it, and at least half of the
sample answers other than before. Pairs need held-out
ones: random preferences can be learned by heart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from unfreeze.core.schema import DataEvent, EvalEvent, ReceiptEvent, TrainEvent
from unfreeze.report.events import AT_LEAST, LEAKED, evals_of, last, numbers, sample_pairs, series, warnings
from unfreeze.report.run import RunFolder

SHARE = 0.01  # of the value at step 0: a smaller change is none that anybody would notice
NATS = 1.0  # an answer that is e times less likely; less is said of none
LEAK = 0.1
"""Of the held-out documents, in runs of earlier versions, which measured what was trained on too: with more
of them the loss tells what is known by heart."""
LEAST_ROWS = 3  # held out: of fewer the spread of their changes is not known (errors)
REACH = 10.0
"""How many times further training may have moved the output than the first step's change, times the sum of
the learning rates over the first one. Later steps add to B what moved A besides."""
ABOUT = ("loss", "perplexity", "bits_per_byte", "logp_likelier", "tokens", "rows", "seconds")
"""Fields of an eval event that are no scores."""
PERCENT = ("style", "facts")  # of the demo


class Evidence(NamedTuple):
    """learnt: is it proven. measured: 'held-out loss 2.500 → 1.750'. note: ' Overfitted: …', or empty."""

    learnt: bool
    measured: str
    note: str = ""


class Fall(NamedTuple):
    """Two means, and whether the second is lower beyond its error. of: what they are means of."""

    before: float
    after: float
    clear: bool
    of: str = ""


def finding(run: RunFolder) -> Evidence:
    """From held-out loss, else from scores and training loss, else from training loss."""
    evals = [event for event in evals_of(run.events) if "loss" in event]
    scores = _scores(run)
    words = [f"{name} {_change_of(name, ys)}" for name, ys in scores.items()]
    trained = training(run)
    if evals:
        losses = [math.nan if (loss := event.get("loss")) is None else loss for event in evals]
        learnt, note = _held_out(run, evals, losses, scores, trained)
        since = f" (since step {evals[0]['step']:,})" if evals[0]["step"] and evals[1:] else ""
        measured = ", ".join([f"held-out loss {change(losses, 3)}{since}", *words][:4])
    elif words:
        learnt, note = _by_scores(run, scores, trained) and moved(run, trained), _rambles(run)
        measured = ", ".join(words[:4])
    else:
        learnt, note = bool(trained and trained.clear) and moved(run, trained), _rambles(run)
        measured, note = _trained_words(run, trained), note or _by_heart(run)
    same = _unchanged(run, most=not evals and not words)
    return Evidence(learnt and not (same or note), measured + same, note)


# --- on held-out rows


def _held_out(
    run: RunFolder,
    evals: Sequence[EvalEvent],
    losses: Sequence[float],
    scores: dict[str, list[float]],
    trained: Fall | None,
) -> tuple[bool, str]:
    """(whether the loss fell and accuracy rose, what is to be said beside: '' or ' Overfitted: …')."""
    if leaked := _leaked(run):
        return False, f" {leaked}, so they prove nothing: hold out other rows."
    end, first, begun = evals[-1], losses[0], evals[0]["step"]
    changes = {(each["measure"], each["since"]): each for each in end.get("changes", [])}
    if not math.isfinite(losses[-1]):
        return False, " The held-out loss is no longer finite. Lower --learning-rate."
    if ("loss", begun) not in changes and "rows" in end:  # measured once, or not comparable
        return False, ""
    if ("loss", begun) not in changes:  # of an earlier version: no error is known
        lowest = losses[-1] <= min(losses) + SHARE * abs(first)
        fell = losses[-1] <= first - SHARE * abs(first) and lowest
        return fell and bool(trained and trained.clear) and moved(run, trained), ""
    rows = end.get("rows", 0)
    fell = _beyond(changes["loss", begun]["change"], changes["loss", begun]["error"], rows, first) < 0
    if "accuracy" in scores and "accuracy" in numbers(end):
        risen = changes.get(("accuracy", begun))
        fell = (
            fell and risen is not None and _prefers(risen["change"], risen["error"], rows, scores["accuracy"])
        )
    if 0 < rows < LEAST_ROWS:
        return False, f" {rows} {'row was' if rows == 1 else 'rows were'} held out: too few to tell."
    return fell, _overfits(run, evals, rows, first) or _less_likely(run, evals, rows)


def _leaked(run: RunFolder) -> str:
    """'6 of 6 validation documents are also in the training data', where more than LEAK of them are.

    Where only some rows were looked at, any.
    """
    for _, words in reversed(warnings(run.events)):
        if words.endswith(LEAKED):
            counted = words.removeprefix(AT_LEAST)
            leaked, _, whole = (word.replace(",", "") for word in counted.split()[:3])
            least = LEAK * int(whole) if counted == words and whole.isdecimal() else 0
            if leaked.isdecimal() and int(leaked) > least:
                return counted if counted == words else f"At least {counted}"
    return ""


def _prefers(change: float, error: float | None, rows: int, accuracy: Sequence[float]) -> bool:
    """Whether the share of pairs that are chosen right rose beyond its error, or was high and stayed so."""
    if error is None:
        return False
    if change > 0 and change > errors(rows - 1) * error:
        return True
    # without a reference accuracy begins anywhere: one that began beyond chance need not rise
    begun = accuracy[0] - 0.5
    chance = errors(rows - 1) * math.sqrt(accuracy[0] * (1 - accuracy[0]) / max(rows, 1))
    return begun > 0 and begun > chance and change >= 0


def _overfits(run: RunFolder, evals: Sequence[EvalEvent], rows: int, first: float) -> str:
    """' Overfitted: …' where held-out loss rose after its lowest point; '' where it did not."""
    losses = {event["step"]: loss for event in evals if (loss := event.get("loss")) is not None}
    for each in evals[-1].get("changes", []):
        if each["measure"] != "loss" or _beyond(each["change"], each["error"], rows, first) <= 0:
            continue
        since = each["since"]
        if since == evals[0]["step"]:
            worse = f" It got worse on rows that it did not see: held-out loss rose by {each['change']:.3f}."
            return f"{worse} Lower --learning-rate, or train on more rows."
        best = next((name for name in ("adapter-best", "model-best") if (run.path / name).is_dir()), "")
        remedy = f"Use {best}/, which is step {since:,}." if best else "Stop earlier: --watch.early-stop 2."
        at = f"step {since:,}, {losses[since]:.3f}" if since in losses else f"step {since:,}"
        return f" Overfitted: held-out loss rose since its lowest point ({at}). {remedy}"
    return ""


def _less_likely(run: RunFolder, evals: Sequence[EvalEvent], rows: int) -> str:
    """What is said where both answers of held-out pairs became less likely."""
    values = [value for event in evals if (value := numbers(event).get("logp_likelier")) is not None]
    for each in evals[-1].get("changes", []):
        begun = each["since"] == evals[0]["step"]
        if each["measure"] == "logp_likelier" and begun and len(values) > 1:
            clear = _beyond(each["change"], each["error"], rows, values[0]) < 0
            return _neither(run, values[0], values[-1]) if clear and each["change"] <= -NATS else ""
    return ""


def _neither(run: RunFolder, before: float, after: float) -> str:
    remedy = (
        "Fine-tune first"
        if run.config.get("preference.loss") == "kto"
        else "Add --preference.nll 1, or take --loss orpo"
    )
    return (
        f" Both answers became less likely (the likelier of a pair {before:.1f} → {after:.1f} nats), so the"
        f" model now says something else. {remedy}."
    )


def _by_scores(run: RunFolder, scores: dict[str, list[float]], trained: Fall | None) -> bool:
    """Whether a score rose beyond its error, none fell beyond it, and the training loss fell.

    A score without an error proves nothing: the training loss decides.
    """
    evals = evals_of(run.events)
    ends = {name: event for event in evals for name in scores if name in event}
    signs: list[float] = []
    for name, event in ends.items():
        for each in event.get("changes", []):
            if each["measure"] == name and each["since"] == evals[0]["step"]:
                signs.append(_beyond(each["change"], each["error"], event.get("rows", 0), 0.0))
    proven = not signs or (max(signs) > 0 and min(signs) >= 0)
    return proven and bool(trained and trained.clear)


def _beyond(change: float, error: float | None, rows: int, first: float) -> float:
    """The change where it is beyond its error and SHARE of the first value, else 0."""
    clear = error is not None and abs(change) > errors(rows - 1) * error
    return change if clear and abs(change) >= SHARE * abs(first) else 0.0


def errors(degrees: float) -> float:
    """How many standard errors are as improbable as two of a normal distribution: Student's t, 2.3 % a side.

    Of few differences their own spread is badly known: 4.5 for two degrees of freedom, 2.3 for ten.
    Abramowitz and Stegun 26.7.5, off by less than 1 % from two degrees on.
    """
    if degrees < 2:
        return math.inf
    terms = (2.0, 5 / 2, 49 / 16, 1098 / 384, 169690 / 92160)
    return sum(term / degrees**power for power, term in enumerate(terms))


# --- in training


def training(run: RunFolder) -> Fall | None:
    """Mean loss of the first and the last epoch where all are whole, else of the quarters of the steps.

    None for fewer than four steps with a loss.
    """
    events = [event for event in run.train if event.get("loss") is not None]
    losses = [loss for event in events if (loss := event.get("loss")) is not None]
    if len(losses) < 4:
        return None
    weights = [float(event.get("supervised_tokens") or 1) for event in events]
    if "margin" in events[0]:
        weights = [1.0] * len(losses)  # a mean over pairs
    parts = _epochs(run, events)
    of = "mean of the first and the last epoch" if parts else "mean of the first and the last quarter"
    first, final = parts or (max(2, len(losses) // 4),) * 2
    (before, before_error), (after, after_error) = (
        _mean(losses[part], weights[part]) for part in (slice(None, first), slice(-final, None))
    )
    error = math.hypot(before_error, after_error)
    fell = before - after
    clear = fell > errors(first + final - 2) * error and fell >= SHARE * abs(before)
    return Fall(before, after, clear, of)


def _epochs(run: RunFolder, events: Sequence[TrainEvent]) -> tuple[int, int] | None:
    """Steps of the first and of the last epoch, where every epoch ends with a step and has two at least."""
    account = last(run.events, DataEvent)
    whole = (account or {}).get("tokens") or 0
    if not whole or "rows_in_files" in (account or {}) or len(events) != len(run.train):
        return None
    seen, ends = 0, [0]
    for step, event in enumerate(events, start=1):
        seen += event.get("tokens") or 0
        if seen == whole * len(ends):
            ends.append(step)
    if len(ends) < 3 or ends[-1] != len(events) or seen != whole * (len(ends) - 1):
        return None
    first, final = ends[1], ends[-1] - ends[-2]
    return (first, final) if min(first, final) > 1 else None


def _mean(values: Sequence[float], weights: Sequence[float]) -> tuple[float, float]:
    """(weighted mean, its standard error from the spread of the values)."""
    total = sum(weights)
    mean = sum(w * x for w, x in zip(weights, values, strict=True)) / total
    spread = sum((w * (x - mean)) ** 2 for w, x in zip(weights, values, strict=True))
    return mean, math.sqrt(spread * len(values) / (len(values) - 1)) / total


def moved(run: RunFolder, fell: Fall | None) -> bool:
    """Whether the receipt saw the output move, far enough for the loss to have fallen as it did.

    A loss falls by no more than twice the largest change of a logit. Where rounding hides the first step's
    change, sample answers that differ show it.
    """
    groups = [each for each in run.groups.values() if each.get("moved")]
    if not groups:
        return False
    seen = [
        change
        for each in groups
        if (change := each.get("output_change") or 0.0) > (each.get("rounding") or 0.0)
    ]
    if not seen:
        measured = any(each.get("output_change") is not None for each in groups)
        return _answers_changed(run) if measured else True
    receipt = last(run.events, ReceiptEvent)
    steps, rates = series(run.events, "train", "learning_rate")
    at = steps.index(receipt["step"]) if receipt and receipt["step"] in steps else None
    if at is None or not rates[at] or fell is None:
        return True
    reached = sum(seen) * sum(rates[at:]) / rates[at]
    return REACH * 2 * reached >= fell.before - fell.after


def _rambles(run: RunFolder) -> str:
    """What is said where both answers of the training pairs became less likely, in the mean of a quarter."""
    values = [series(run.events, "train", f"logp_{side}")[1] for side in ("chosen", "rejected")]
    if not all(values) or len({len(each) for each in values}) > 1 or len(values[0]) < 8:
        return ""
    part = len(values[0]) // 4
    ends = (slice(None, part), slice(-part, None))
    (before, before_error), (after, after_error) = (
        max(_mean(each[cut], [1.0] * part) for each in values) for cut in ends
    )
    fell, bound = before - after, errors(2 * part - 2) * math.hypot(before_error, after_error)
    return _neither(run, before, after) if fell > max(NATS, bound, SHARE * abs(before)) else ""


def _by_heart(run: RunFolder) -> str:
    """What is said of pairs where none is held out: random preferences can be learned by heart too."""
    if not any("margin" in event for event in run.train):
        return ""
    return (
        " No pairs were held out, so whether it prefers rightly on others is not known:"
        " --validation-fraction 0.1."
    )


# --- words


def _scores(run: RunFolder) -> dict[str, list[float]]:
    evals = evals_of(run.events)
    names = dict.fromkeys(name for event in evals for name in numbers(event) if name not in ABOUT)
    return {name: series(evals, "eval", name)[1] for name in names}


def _trained_words(run: RunFolder, trained: Fall | None) -> str:
    if trained:
        values = change([trained.before, trained.after], 3)
        return f"training loss {values} ({trained.of}; no rows were held out)"
    losses = series(run.events, "train", "loss")[1]
    return f"loss {change(losses, 3)}" if losses else ""


def _answers(run: RunFolder) -> list[tuple[str, str]]:
    return [(was, now) for _, was, now in sample_pairs(run.events) if was is not None and now is not None]


def _answers_changed(run: RunFolder) -> bool:
    return any(was != now for was, now in _answers(run))


def _unchanged(run: RunFolder, *, most: bool) -> str:
    """'; its 4 sample answers are the same as before', where all of them are.

    most: more than half of them suffice. That is asked where only training loss speaks for a run: it falls
    long before answers to the very rows that were trained on change.
    """
    answers = _answers(run)
    count, same = len(answers), sum(was == now for was, now in answers)
    if most and count / 2 < same < count:
        return f"; {same} of its {count} sample answers are the same as before"
    if not count or same < count:
        return ""
    return f"; its {'sample answer is' if count == 1 else f'{count} sample answers are'} the same as before"


def _change_of(name: str, values: Sequence[float]) -> str:
    """change() of a score: in whole percent, and shares or margins below 10 to two digits."""
    if name in PERCENT:
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
