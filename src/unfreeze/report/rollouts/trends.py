"""Numbers of all steps of rollouts as pictures, facts and sentences."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from unfreeze.core.units import format_count, plural
from unfreeze.report.events import series
from unfreeze.report.metrics import metrics_of
from unfreeze.report.page import Figure
from unfreeze.report.pictures import HUES, Axes, Points, curve, lines, points_json
from unfreeze.report.rollouts.behaviours import NAMES
from unfreeze.report.rollouts.canaries import alarms, correlation
from unfreeze.report.rollouts.copies import Step
from unfreeze.report.rollouts.numbers import Numbers, reward_of
from unfreeze.report.run import RunFolder

SIZE = (340, 210)  # SVG units
CUT = ("length", "window")  # stop reasons of answers without an end
OF_POLICY = ("kl", "clip", "gap", "ratio")  # beginnings of metrics that belong beside rewards


def mean_reward(numbers: Numbers) -> float | None:
    """Mean over the graded answers; None if there are none."""
    reward = reward_of(numbers)
    return reward.mean if reward.count else None


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _percent(part: float, whole: float) -> float | None:
    return 100 * part / whole if whole else None


def ungraded(numbers: Numbers) -> int:
    """Answers whose grading failed; cut ones that were left out are not among them."""
    return numbers["answers"] - sum(numbers["outcomes"].get(name, 0) for name in ("ok", "cut"))


MEASURES: dict[str, tuple[str, Callable[[Numbers], float | None], str]] = {
    "Mean reward": ("of the graded answers", mean_reward, "{:.3f}"),
    "Groups without signal": (
        "all rewards of the group are equal",
        lambda n: _percent(n["without_signal"], n["groups"]),
        "{:.0f} %",
    ),
    "Tokens per answer": ("mean", lambda n: _share(n["tokens"], n["answers"]), "{:,.1f}"),
    "Entropy": (
        "nats per token: minus the mean log-probability of what was sampled",
        lambda n: -n["log_p"][1] / n["log_p"][0] if n["log_p"][0] else None,
        "{:.3f}",
    ),
    "Cut answers": (
        "sampling stopped at the limit of tokens",
        lambda n: _percent(sum(n["stops"].get(stop, 0) for stop in CUT), n["answers"]),
        "{:.1f} %",
    ),
    "Grading failed": (
        "by an error, a time-out, or a value that is no number",
        lambda n: _percent(ungraded(n), n["answers"]),
        "{:.1f} %",
    ),
}
"""Title -> unit or meaning, value of a step, format."""
QUIET = ("Cut answers", "Grading failed")  # not drawn if they are always 0
FURTHER = (*QUIET, "Behaviours", "What the reward follows")  # folded on the page


def over_steps(steps: Sequence[Step], measure: Callable[[Numbers], float | None]) -> Points:
    """(steps, values), without steps that have no value."""
    pairs = [(step.numbers["step"], measure(step.numbers)) for step in steps]
    return [x for x, y in pairs if y is not None], [y for _, y in pairs if y is not None]


def figures(steps: Sequence[Step], run: RunFolder) -> list[Figure]:
    """Pictures of all measures that have values, those of FURTHER last."""
    pictures: list[Figure] = []
    for title, (unit, measure, form) in MEASURES.items():
        points = over_steps(steps, measure)
        if points[1] and (any(points[1]) or title not in QUIET):
            pictures.append(_single(title, unit, points, form))
        if title == "Mean reward":  # the parts stand beside the whole
            pictures += _several("Parts of the reward", "mean of each", _parts(steps), "{:.3f}")
    for metric in metrics_of(run.events)[1:]:
        points = series(run.events, "train", metric["field"])
        if metric["field"].startswith(OF_POLICY):
            pictures.append(_single(metric["label"], metric["unit"], points, "{:.3g}"))
    counted = {name: over_steps(steps, _per_answer(name)) for name in NAMES}
    if any(any(values) for _, values in counted.values()):
        pictures += _several("Behaviours", "phrases per answer, by patterns for English", counted, "{:.2f}")
    words = "r within groups; near 1 or −1 the reward is little else"
    pictures += _several("What the reward follows", words, _correlations(steps), "{:+.2f}")
    return sorted(pictures, key=lambda picture: picture.title in FURTHER)


def _per_answer(name: str) -> Callable[[Numbers], float | None]:
    return lambda numbers: _share(numbers["behaviours"].get(name, 0), numbers["answers"])


def _parts(steps: Sequence[Step]) -> dict[str, Points]:
    """Part -> its mean by step."""
    names = dict.fromkeys(name for step in steps for name in step.numbers["parts"])
    return {name: over_steps(steps, _part(name)) for name in names}


def _part(name: str) -> Callable[[Numbers], float | None]:
    def mean(numbers: Numbers) -> float | None:
        count, total = numbers["parts"].get(name, (0, 0.0))
        return _share(total, count)

    return mean


def _correlations(steps: Sequence[Step]) -> dict[str, Points]:
    """Canary -> r by step."""
    names = dict.fromkeys(name for step in steps for name in step.numbers["canaries"])

    def r(name: str) -> Callable[[Numbers], float | None]:
        return lambda n: correlation(n["canaries"][name]) if name in n["canaries"] else None

    return {name: over_steps(steps, r(name)) for name in names}


def _ends(points: Points, form: str) -> str:
    """'0.504 at step 1, 0.932 at step 80'."""
    (xs, ys), write = points, form.format
    first = f"{write(ys[0])} at step {xs[0]:,}"
    return first if len(ys) == 1 else f"{first}, {write(ys[-1])} at step {xs[-1]:,}"


def _single(title: str, unit: str, points: Points, form: str) -> Figure:
    words = f"{unit[:1].upper()}{unit[1:]}. {_ends(points, form)}."
    axes = Axes(from_zero=min(points[1]) >= 0)
    svg = curve(points, f"{title} by step: {words}", SIZE, smoothed=True, axes=axes)
    return Figure(title, words, [svg], series=points_json({title.lower(): points}))


def _several(title: str, words: str, named: dict[str, Points], form: str) -> list[Figure]:
    """A picture with a line for each name, of at most len(HUES) names; none without values."""
    named = {name: points for name, points in named.items() if points[1]}
    if not named:
        return []
    shown, more = dict(list(named.items())[: len(HUES)]), len(named) - len(HUES)
    ends = [f"{name} {_change(ys, form)}" for name, (_, ys) in shown.items()]
    words = f"{words[:1].upper()}{words[1:]}." + (f" {more} more are in the answers." if more > 0 else "")
    positive = min(min(ys) for _, ys in shown.values()) >= 0
    svg = lines(list(shown.values()), f"{title}: {'; '.join(ends)}", SIZE, smoothed=True, from_zero=positive)
    return [Figure(title, words, [svg], series=points_json(shown), names=list(shown))]


def facts(steps: Sequence[Step]) -> list[tuple[str, str]]:
    """Main numbers over all steps; a note follows after '; '."""
    all_numbers = [step.numbers for step in steps]
    answers, groups, silent = (
        sum(each[name] for each in all_numbers) for name in ("answers", "groups", "without_signal")
    )
    rows = [("Answers", f"{answers:,}; in {plural(len(steps), 'step')}")]
    if rewards := over_steps(steps, mean_reward)[1]:
        rows.append(("Mean reward", _change(rewards, "{:.3f}")))
    if lengths := over_steps(steps, MEASURES["Tokens per answer"][1])[1]:
        longest = format_count(max(each["longest"] for each in all_numbers))
        rows.append(("Tokens per answer", f"{_change(lengths, '{:,.0f}')}; longest {longest}"))
    if groups:
        rows.append(("Groups without signal", f"{100 * silent / groups:.0f} %; {silent:,} of {groups:,}"))
    if failed := sum(map(ungraded, all_numbers)):
        rows.append(("Grading failed", f"{100 * failed / answers:.1f} %; {plural(failed, 'answer')}"))
    return rows


def _change(values: Sequence[float], form: str) -> str:
    """'0.504 → 0.932', or one number if it is the only one."""
    ends = [form.format(value) for value in (values[0], values[-1])]
    return ends[0] if len(values) == 1 else " → ".join(ends)


def notes(steps: Sequence[Step]) -> list[str]:
    """Sentences on answers that are not in the files, and on damage."""
    sentences = [f"{step.fault}." for step in steps if step.fault]
    if dropped := [step for step in steps if step.dropped]:
        count, first = sum(step.dropped for step in dropped), dropped[0].numbers["step"]
        sentences.append(
            f"Left out from step {first:,} on, for the limit of the folder: {plural(count, 'answer')}."
            " The numbers and pictures are of all."
        )
    return sentences


def warnings(steps: Sequence[Step]) -> list[str]:
    """Sentences of the canaries."""
    return alarms([step.numbers["canaries"] for step in steps], [reward_of(step.numbers) for step in steps])
