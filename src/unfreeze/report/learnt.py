"""Judge by a run's events if it learnt, overfitted, or neither; each figure is compared with its error.

"Learnt" requires that the held-out loss fell by more than two standard errors of the difference, paired by
row, and by at least a hundredth of its value at step 0. For preferences, accuracy must also have risen as
clearly. Without held-out rows, the same must hold for the mean training loss of whole epochs, or of the first
and last quarter of the steps; the receipt must show that the output moved far enough; and at least half of
the sample answers must have changed. Without any, it takes ENOUGH_STEPS. Pairs need held-out rows: random
preferences can be memorised.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from unfreeze.core.schema import DataEvent, EvalEvent, ReceiptEvent, RolloutEvent, TrainEvent
from unfreeze.report.events import (
    AT_LEAST,
    ENOUGH_STEPS,
    LEAKED,
    evals_of,
    last,
    numbers,
    of_kind,
    sample_pairs,
    series,
    unreached,
    warnings,
)
from unfreeze.report.run import RunFolder

SHARE = 0.01  # of the value at step 0; a smaller change is too small to notice
RISE = 0.1  # of the first step's loss: with few steps, a rise beyond it is no accident of their order
NATS = 1.0  # smallest fall of log-probability that is reported: answers are e times less likely
LEAK = 0.1
"""Share of held-out documents that are also trained on (runs of earlier versions measured these too). Above
it the loss shows memorised rows."""
LEAST_ROWS = 3  # held-out rows; with fewer the spread of their changes is unknown (see errors)
REACH = 10.0
"""Limit for the total movement of the output, as a multiple of the first step's change · the sum of the
learning rates / the first one. Later steps also move A, not only B."""
ABOUT = ("loss", "perplexity", "bits_per_byte", "logp_likelier", "tokens", "rows", "seconds")
ABOUT += ("reward_low", "reward_high", "length", "failed")
ABOUT += tuple(f"pass_{k}{end}" for k in (1, 2, 4) for end in ("", "_low", "_high"))
"""Fields of an eval event that are not scores."""
PERCENT = ("style", "facts")  # scores of the demo in per cent


class Evidence(NamedTuple):
    """learnt: True if proven. measured: 'held-out loss 2.500 → 1.750'. note: ' Overfitted: …', or ""."""

    learnt: bool
    measured: str
    note: str = ""


class Fall(NamedTuple):
    """Two means. clear: True if the second is lower beyond the error; rose: if it is higher.

    of: words on the averaged steps.
    """

    before: float
    after: float
    clear: bool
    of: str = ""
    rose: bool = False


def finding(run: RunFolder) -> Evidence:
    """Judge by held-out loss, else by scores and training loss, else by training loss."""
    evals = [event for event in evals_of(run.events) if "loss" in event]
    scores = _scores(run)
    words = [f"{name} {_change_of(name, ys)}" for name, ys in scores.items()]
    trained = training(run)
    if evals:
        losses = [math.nan if (loss := event.get("loss")) is None else loss for event in evals]
        learnt, note = _held_out(run, evals, losses, scores, trained)
        since = f" (since step {evals[0]['step']:,})" if evals[0]["step"] and evals[1:] else ""
        of_loss = [] if "reward" in scores else [f"held-out loss {change(losses, 3)}{since}"]
        measured = ", ".join([*of_loss, *words][:4])
        measured = f"held-out {measured}" if not of_loss else measured
    elif rolled := of_kind(run.events, RolloutEvent):  # a policy's loss falls to 0 where nothing is learned
        learnt, note = False, ""
        measured = f"{_rewards_words(rolled)}; no prompts were held out, so this proves nothing"
    elif words:
        learnt, note = _by_scores(run, scores, trained) and moved(run, trained), _rambles(run)
        measured = ", ".join(words[:4])
    else:
        learnt, note = bool(trained and trained.clear) and moved(run, trained), _rambles(run)
        measured, note = _trained_words(run, trained), note or _by_heart(run)
        note = note or (_unseen(run) if learnt else "")
    same, all_same = _unchanged(run)
    # the training loss falls long before answers to the trained rows change: alone it is no proof beside them
    doubt = all_same or (bool(same) and not evals and not words)
    return Evidence(learnt and not (doubt or note), measured + same, note)


# --- on held-out rows


def _held_out(
    run: RunFolder,
    evals: Sequence[EvalEvent],
    losses: Sequence[float],
    scores: dict[str, list[float]],
    trained: Fall | None,
) -> tuple[bool, str]:
    """Return (True if the loss fell and accuracy rose, note: '' or ' Overfitted: …')."""
    if leaked := _leaked(run):
        return False, f" {leaked}, so the loss proves nothing: hold out other rows."
    end, first, begun = evals[-1], losses[0], evals[0]["step"]
    changes = {(each["measure"], each["since"]): each for each in end.get("changes", [])}
    if not math.isfinite(losses[-1]):
        return False, " The held-out loss is no longer finite. Lower --learning-rate."
    if ("loss", begun) not in changes and "rows" in end:  # measured once, or not comparable
        return False, ""
    if ("loss", begun) not in changes:  # events of earlier versions have no error
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
    """Warning '6 of 6 validation documents are also in the training data' if more than LEAK of them are.

    If only some rows were checked, any such document counts.
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
    """True if accuracy on pairs rose beyond its error, or was already high and stayed so."""
    if error is None:
        return False
    if change > 0 and change > errors(rows - 1) * error:
        return True
    # without a reference, accuracy can start anywhere: if it starts beyond chance, it need not rise
    begun = accuracy[0] - 0.5
    chance = errors(rows - 1) * math.sqrt(accuracy[0] * (1 - accuracy[0]) / max(rows, 1))
    return begun > 0 and begun > chance and change >= 0


def _overfits(run: RunFolder, evals: Sequence[EvalEvent], rows: int, first: float) -> str:
    """' Overfitted: …' if held-out loss rose after its lowest point, else ''."""
    losses = {event["step"]: loss for event in evals if (loss := event.get("loss")) is not None}
    for each in evals[-1].get("changes", []):
        if each["measure"] != "loss" or _beyond(each["change"], each["error"], rows, first) <= 0:
            continue
        since, rewarded = each["since"], "reward" in numbers(evals[-1])  # whose loss is minus the reward
        moved_by = "reward fell" if rewarded else "loss rose"
        if since == evals[0]["step"]:
            worse = f" It got worse on unseen rows: held-out {moved_by} by {each['change']:.3f}."
            return f"{worse} Lower --learning-rate, or train on more rows."
        best = next((name for name in ("adapter-best", "model-best") if (run.path / name).is_dir()), "")
        remedy = f"Use {best}/, which is step {since:,}." if best else "Stop earlier: --watch.early-stop 2."
        value = f", {-losses[since] if rewarded else losses[since]:.3f}" if since in losses else ""
        point = "highest" if rewarded else "lowest"
        return f" Overfitted: held-out {moved_by} since its {point} point (step {since:,}{value}). {remedy}"
    return ""


def _less_likely(run: RunFolder, evals: Sequence[EvalEvent], rows: int) -> str:
    """Note if both answers of held-out pairs became less likely, else ""."""
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
    """True if a score rose beyond its error, none fell beyond it, and the training loss fell.

    A score without an error proves nothing; then the training loss decides.
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
    """Return the change if it exceeds its error and SHARE of the first value, else 0."""
    clear = error is not None and abs(change) > errors(rows - 1) * error
    return change if clear and abs(change) >= SHARE * abs(first) else 0.0


def errors(degrees: float) -> float:
    """Number of standard errors as improbable as two of a normal distribution: Student's t, 2.3 % per side.

    With few differences their spread is uncertain: 4.5 for two degrees of freedom, 2.3 for ten.
    Source: Abramowitz and Stegun 26.7.5; error below 1 % from two degrees on.
    """
    if degrees < 2:
        return math.inf
    terms = (2.0, 5 / 2, 49 / 16, 1098 / 384, 169690 / 92160)
    return sum(term / degrees**power for power, term in enumerate(terms))


# --- in training


def training(run: RunFolder) -> Fall | None:
    """Mean loss of the first and last epoch if all epochs are whole, else of the first and last quarter.

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
    first, final = parts or (max(2, len(losses) // 4),) * 2
    part = "epoch" if parts else "quarter"
    of = f"mean of the first and the last {part if parts or len(losses) >= 8 else f'{first} steps'}"
    (before, before_error), (after, after_error) = (
        _mean(losses[part], weights[part]) for part in (slice(None, first), slice(-final, None))
    )
    bound = max(errors(first + final - 2) * math.hypot(before_error, after_error), SHARE * abs(before))
    fell, few = before - after, len(losses) < ENOUGH_STEPS
    rose = -fell > bound or (few and _much_higher(before, after) and _much_higher(losses[0], losses[-1]))
    return Fall(before, after, fell > bound, of, rose)


def risen(run: RunFolder) -> tuple[float, float] | None:
    """(before, after) of a training loss that clearly rose, else None. A policy's loss says nothing."""
    if of_kind(run.events, RolloutEvent):
        return None
    if trained := training(run):
        return (trained.before, trained.after) if trained.rose else None
    losses = series(run.events, "train", "loss")[1]
    return (losses[0], losses[-1]) if losses and _much_higher(losses[0], losses[-1]) else None


def _much_higher(before: float, after: float) -> bool:
    return before > 0 and after > (1 + RISE) * before


def _epochs(run: RunFolder, events: Sequence[TrainEvent]) -> tuple[int, int] | None:
    """Steps of the first and last epoch, if each epoch ends with a step and has at least two, else None."""
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
    """Return (weighted mean, its standard error from the spread of the values)."""
    total = sum(weights)
    mean = sum(w * x for w, x in zip(weights, values, strict=True)) / total
    spread = sum((w * (x - mean)) ** 2 for w, x in zip(weights, values, strict=True))
    return mean, math.sqrt(spread * len(values) / (len(values) - 1)) / total


def moved(run: RunFolder, fell: Fall | None) -> bool:
    """True if the output in the receipt moved far enough to explain the fall of the loss.

    A loss falls by at most twice the largest change of a logit. If rounding hides the first step's change,
    changed sample answers count instead.
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
    """Note if both answers of training pairs became less likely, from first to last quarter, else ""."""
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


def _unseen(run: RunFolder) -> str:
    """Note on a short run without held-out rows and sample answers, else "".

    Nothing but its training loss speaks for it, and that falls on random letters too.
    """
    steps = len(run.train)
    if _answers(run) or steps >= ENOUGH_STEPS:
        return ""
    return f" {steps} steps without sample answers are too few to tell: add --validation-fraction 0.1."


def _by_heart(run: RunFolder) -> str:
    """Note on pairs without held-out ones: random preferences can be memorised; else ""."""
    if not any("margin" in event for event in run.train):
        return ""
    return (
        " No pairs were held out, so its preferences on other pairs are unknown: add"
        " --validation-fraction 0.1."
    )


# --- words


def _scores(run: RunFolder) -> dict[str, list[float]]:
    evals = evals_of(run.events)
    left = {*ABOUT, *unreached(evals)}
    names = dict.fromkeys(name for event in evals for name in numbers(event) if name not in left)
    return {name: series(evals, "eval", name)[1] for name in names}


def _trained_words(run: RunFolder, trained: Fall | None) -> str:
    if trained:
        values = change([trained.before, trained.after], 3)
        return f"training loss {values} ({trained.of}; no rows were held out)"
    losses = series(run.events, "train", "loss")[1]
    return f"loss {change(losses, 3)}" if losses else ""


def _rewards_words(rolled: Sequence[RolloutEvent]) -> str:
    """'reward of its answers 0.362 → 0.660 (first and last quarter of the steps)'."""
    rewards = [reward for event in rolled if (reward := event.get("reward")) is not None]
    if not rewards:
        return "no answer had a reward"
    quarter = max(1, len(rewards) // 4)
    ends = [sum(part) / quarter for part in (rewards[:quarter], rewards[-quarter:])]
    return f"reward of its answers {change(ends, 3)} (first and last quarter of the steps)"


def _answers(run: RunFolder) -> list[tuple[str, str]]:
    return [(was, now) for _, was, now in sample_pairs(run.events) if was is not None and now is not None]


def _answers_changed(run: RunFolder) -> bool:
    return any(was != now for was, now in _answers(run))


def _unchanged(run: RunFolder) -> tuple[str, bool]:
    """Return ('; 3 of its 4 sample answers are the same as before', True if all are).

    The words come if more than half of the answers are the same, else "".
    """
    answers = _answers(run)
    count, same = len(answers), sum(was == now for was, now in answers)
    if same <= count / 2:
        return "", False
    if same < count:
        return f"; {same} of its {count} sample answers are the same as before", False
    return (
        f"; its {'sample answer is' if count == 1 else f'{count} sample answers are'} the same as before",
        True,
    )


def _change_of(name: str, values: Sequence[float]) -> str:
    """change() of a score: whole per cent; two digits for shares and margins below 10."""
    if name in PERCENT:
        return f"{change(values)} %"
    return change(values, 0 if max(map(abs, values)) >= 10 else 2)


def change(values: Sequence[float], digits: int = 0) -> str:
    """First and last value, as '0 → 98', with up to four digits if needed to show a difference."""
    first, final = values[0], values[-1]
    if len(values) == 1:
        return f"{first:.{max(digits, 2)}f}"
    while digits < 4 and first != final and f"{first:.{digits}f}" == f"{final:.{digits}f}":
        digits += 1
    return f"{first:.{digits}f} → {final:.{digits}f}"
