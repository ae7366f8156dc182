"""Experts that are dead or overloaded: the watch that says so while a run goes on, and the report's pictures of it (FAILURES M3).

E experts, K chosen per token, T tokens, n_e tokens given to expert e. Formulas of balance: core/balance.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from unfreeze.core.balance import dead, load_entropy, max_violation
from unfreeze.core.events import Event
from unfreeze.report.events import by_layer, expert_load, number
from unfreeze.report.page import figure, folded, section, table
from unfreeze.report.pictures import FULL, heat, heat_map
from unfreeze.report.run import Run
from unfreeze.report.tables import ABSENT

WIDTHS = (1100, 350)  # SVG units, wide and narrow
COLUMNS = {1100: 160, 350: 50}  # stretches of steps across a picture of each width
SPARSE = 10  # tokens per expert and stretch; below that an expert without a token is chance, not death

EXPECTED = 1000
"""Tokens an expert would have got by an even share before it is judged. An expert with a hundredth of that share is still missed by chance
in exp(-10) = 1 of 22,000 cases, so one without any token is one that the router doesn't choose."""
OVERLOADED = 0.5
"""Share of all tokens that go through one expert. Judged only where the even share K / E is at most an eighth, so at least 4 times as much."""


class ExpertWatch:
    """An event listener: one warning per layer and session for experts that got no token, or more than half of all.

    Judged over stretches of steps that give each expert EXPECTED tokens by an even share, never over single steps, where chance rules.
    """

    def __init__(self, expected: float = EXPECTED):
        self.expected = expected
        self._counts: dict[str, list[int]] = {}
        self._tokens: dict[str, int] = {}
        self._since: dict[str, int] = {}
        self._said: set[tuple[str, str]] = set()

    def __call__(self, event: Event) -> str | None:
        if event["kind"] != "train":
            return None
        found: list[str] = []
        for layer, counts_E in by_layer(event.get("expert_load") or {}):
            so_far = self._counts.get(layer) or [0] * len(counts_E)
            self._counts[layer] = [a + b for a, b in zip(so_far, counts_E, strict=True)]
            self._tokens[layer] = self._tokens.get(layer, 0) + int(number(event.get("tokens")) or 0)
            self._since.setdefault(layer, event["step"])
            if sum(self._counts[layer]) >= self.expected * len(counts_E):
                found += self._judge(layer, event["step"])
        return f"expert load: {'; '.join(found)}" if found else None

    def _judge(self, layer: str, step: int) -> list[str]:
        """What is wrong with a layer over the stretch that ends here; begins a new one."""
        counts_E, tokens, since = self._counts.pop(layer), self._tokens.pop(layer), self._since.pop(layer)
        num_experts, total, steps = len(counts_E), sum(counts_E), f"steps {since:,} to {step:,}"
        found = []
        if num_dead := dead(counts_E):
            first = ", ".join(str(e) for e, count in enumerate(counts_E) if count == 0)[:40]
            share = total / num_experts
            found.append(("dead", f"layer {layer}: {num_dead} of {num_experts} experts got no token in {steps}, {share:,.0f} each if even ({first}); "
                          "they don't learn; broader data or, in pretrain, a higher balance_rate reaches them"))  # fmt: skip
        busiest = max(range(num_experts), key=counts_E.__getitem__)
        even = total / tokens / num_experts if tokens else 1.0
        if tokens and even <= 1 / 8 and counts_E[busiest] > OVERLOADED * tokens:
            found.append(("overloaded", f"layer {layer}: expert {busiest} got {counts_E[busiest] / tokens:.0%} of all tokens in {steps}, "
                          f"{even:.0%} if even; the others learn less; in pretrain a higher balance_rate spreads them"))  # fmt: skip
        new = [(fault, words) for fault, words in found if (layer, fault) not in self._said]
        self._said |= {(layer, fault) for fault, _ in new}
        return [words for _, words in new]


def experts_section(run: Run) -> str:
    """Load of each expert over the whole run, its evenness over time, the busiest layer's experts over time, and the numbers per layer."""
    load = expert_load(run.events)
    if not load:
        return section("Expert load", "", "No expert load is in the events: the model is dense, or no step was made.")
    ratios = {layer: (max_violation(counts) or 0.0) + 1 for layer, counts in load.items()}
    worst = max(ratios, key=ratios.__getitem__)
    num_dead, num_experts = sum(map(dead, load.values())), sum(map(len, load.values()))
    words = f"Busiest expert against its layer's mean: {ratios[worst]:.2f} times at most, in layer {worst}. "
    words += f"{num_dead:,} of {num_experts:,} experts got no token." if num_dead else f"All {num_experts:,} experts got tokens."
    alt = f"Tokens per expert, {len(load)} layers down, {len(next(iter(load.values())))} experts across. {words}"
    pictures = [heat_map(f"experts-{width}", load, alt, width) for width in WIDTHS]
    whole = figure("Tokens per expert, whole run", words, *pictures, key=_scale("no token", f"{FULL:.0f} × the layer's mean", "never used"))
    parts = [whole, _violation_over_time(run, list(load)), _load_over_time(run, worst)]
    rows = "".join(f'<div class="row">{part}</div>' for part in parts if part)
    return section("Expert load", rows + folded("Numbers per layer", _numbers(run)))


def _scale(low: str, high: str, red: str = "") -> str:
    end = f'<span><i class="dead"></i>{red}</span>' if red else ""
    return f'<p class="scale" aria-hidden="true">{low} <i></i> {high}{end}</p>'


def steps_of(run: Run, layer: str) -> tuple[list[int], list[Sequence[int]]]:
    """(steps, tokens per expert in each) of one layer."""
    found = [(event["step"], event["expert_load"][layer]) for event in run.train if layer in (event.get("expert_load") or {})]
    return [step for step, _ in found], [counts for _, counts in found]


def stretches(count: int, most: int) -> list[range]:
    """`count` steps cut into at most `most` stretches of equal length (the last may be shorter)."""
    length = math.ceil(count / most) if count else 1
    return [range(begin, min(begin + length, count)) for begin in range(0, count, length)]


def _ticks(steps: Sequence[int], parts: Sequence[range], width: int) -> list[tuple[int, str]]:
    """A step number under the first stretch and about every 90 units."""
    every = max(1, math.ceil(len(parts) * 90 / width))
    return [(i, f"{steps[parts[i][0]]:,}") for i in range(0, len(parts), every)]


def _violation_over_time(run: Run, layers: Sequence[str]) -> str:
    """Layers down, steps across: mean max violation of each stretch of steps. Empty for fewer than two steps."""
    steps, _ = steps_of(run, layers[0])
    if len(steps) < 2:
        return ""
    per_layer = {layer: [max_violation(counts) or 0.0 for counts in steps_of(run, layer)[1]] for layer in layers}
    first = sum(values[0] for values in per_layer.values()) / len(layers)
    last = sum(values[-1] for values in per_layer.values()) / len(layers)
    words = f"Busiest expert over the mean, minus 1, in each step; mean of the layers {first:.2f} at step {steps[0]:,}, "
    words += f"{last:.2f} at step {steps[-1]:,}."
    pictures = []
    for width in WIDTHS:
        parts = stretches(len(steps), COLUMNS[width])
        strength = [[_mean([values[i] for i in part]) / (FULL - 1) for part in parts] for values in per_layer.values()]
        ticks = _ticks(steps, parts, width)
        alt = f"Max violation, {len(layers)} layers down, steps across. {words}"
        pictures.append(heat(f"violation-{width}", strength, None, alt, width, rows=list(layers), ticks=ticks, axes=("step", "layer")))
    return figure("Max violation per layer over time", words, *pictures, key=_scale("even", f"{FULL - 1:.0f} or more"))


def _load_over_time(run: Run, layer: str) -> str:
    """Experts of one layer down, steps across: tokens over the layer's mean in each stretch of steps. Empty for fewer than two steps."""
    steps, counts = steps_of(run, layer)
    if len(steps) < 2:
        return ""
    num_experts = len(counts[0])
    pictures, alt = [], f"Tokens per expert of layer {layer}, {num_experts} experts down, steps across."
    for width in WIDTHS:
        parts = stretches(len(steps), COLUMNS[width])
        sums = [[sum(counts[i][e] for i in part) for part in parts] for e in range(num_experts)]
        means = [sum(row[column] for row in sums) / num_experts for column in range(len(parts))]
        strength = [[count / max(mean, 1e-12) / FULL for count, mean in zip(row, means, strict=True)] for row in sums]
        gone = [[count == 0 and mean >= SPARSE for count, mean in zip(row, means, strict=True)] for row in sums]
        rows, ticks = [str(e) for e in range(num_experts)], _ticks(steps, parts, width)
        pictures.append(heat(f"layer-{width}", strength, gone, alt, width, rows=rows, ticks=ticks, axes=("step", "expert")))
    words = f"Layer {layer}, the one with the busiest expert. Red: no token in a stretch of steps where the mean is {SPARSE} or more."
    key = _scale("no token", f"{FULL:.0f} × the mean", "none where many were due")
    return figure(f"Tokens per expert of layer {layer} over time", words, *pictures, key=key)


def _numbers(run: Run) -> str:
    """Per layer, of the whole run: tokens, max violation, entropy, dead experts; and of single steps the mean max violation and dead count."""
    rows = []
    for layer, counts_E in expert_load(run.events).items():
        per_step = steps_of(run, layer)[1]
        step_violation = [value for counts in per_step if (value := max_violation(counts)) is not None]
        rows.append(
            (layer, f"{sum(counts_E):,}", _cell(max_violation(counts_E)), _cell(load_entropy(counts_E), ".3f"), f"{dead(counts_E):,}",
             _cell(_mean(step_violation) if step_violation else None), f"{_mean([dead(counts) for counts in per_step]):,.1f}")
        )  # fmt: skip
    head = ("layer", "tokens routed", "max violation", "entropy", "dead experts", "max violation of a step", "dead in a step")
    return table(head, rows, caption="Expert load per layer")


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _cell(value: float | None, form: str = ".2f") -> str:
    return ABSENT if value is None else format(value, form)
