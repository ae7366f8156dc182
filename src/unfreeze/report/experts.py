"""Dead and overloaded experts: the warning during a run, and the report's section (docs/why/trust.md M3).

E experts, K chosen per token, T tokens, n_e tokens of expert e. Formulas of balance: core/balance.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from markupsafe import Markup

from unfreeze.core.balance import dead, load_entropy, max_violation
from unfreeze.core.schema import Event
from unfreeze.report.balance import DUE, Balance, mean, missed
from unfreeze.report.events import by_layer
from unfreeze.report.page import Figure, render
from unfreeze.report.pictures import FULL, heat, heat_map
from unfreeze.report.run import RunFolder
from unfreeze.report.tables import ABSENT

WIDTHS = (1100, 350)  # SVG units, wide and narrow

EXPECTED = 1000
"""Fair share in tokens before an expert is judged. Even an expert with a hundredth of that share gets no
token only in exp(-10) = 1 of 22,000 cases, so one without any token is never chosen by the router."""
OVERLOADED = 0.5
"""Share of all tokens that one expert gets. Judged only if the fair share K / E is at most an eighth, so this
is at least 4 times as much."""


class ExpertWatch:
    """Event listener that warns, once per layer and session, of experts with no token or with most tokens.

    It judges ranges of steps with a fair share of EXPECTED tokens per expert, never single steps, which are
    too random.
    """

    def __init__(self, expected: float = EXPECTED):
        self.expected = expected
        self._counts: dict[str, list[int]] = {}
        self._tokens: dict[str, int] = {}
        self._since: dict[str, int] = {}
        self._warned: set[tuple[str, str]] = set()

    def __call__(self, event: Event) -> str | None:
        if event["kind"] != "train":
            return None
        faults: list[str] = []
        for layer, counts_E in by_layer(event.get("expert_load", {})):
            so_far = self._counts.get(layer) or [0] * len(counts_E)
            self._counts[layer] = [a + b for a, b in zip(so_far, counts_E, strict=True)]
            self._tokens[layer] = self._tokens.get(layer, 0) + event.get("tokens", 0)
            self._since.setdefault(layer, event["step"])
            if sum(self._counts[layer]) >= self.expected * len(counts_E):
                faults += self._judge(layer, event["step"])
        return f"expert load: {'; '.join(faults)}" if faults else None

    def _judge(self, layer: str, step: int) -> list[str]:
        """Judge a layer over the range that stops here, and start a new range. -> warnings."""
        counts_E, tokens, since = self._counts.pop(layer), self._tokens.pop(layer), self._since.pop(layer)
        # dead: no token although the fair share was EXPECTED
        num_experts, total, steps = len(counts_E), sum(counts_E), f"steps {since:,} to {step:,}"
        faults = []
        if num_dead := dead(counts_E):
            first = ", ".join(str(e) for e, count in enumerate(counts_E) if count == 0)[:40]
            share = total / num_experts
            faults.append(
                (
                    "dead",
                    (
                        f"layer {layer}: {num_dead} of {num_experts} experts got no token in {steps} and"
                        f" learn nothing ({first}; the fair share is {share:,.0f} tokens). Broader data"
                        " or, in pretrain, a higher experts.balance_loss reaches them, as does balance_rate"
                        " where routers have a bias"
                    ),
                )
            )
        # overloaded: more than half of all tokens although the fair share is an eighth or less
        busiest = max(range(num_experts), key=counts_E.__getitem__)
        even = total / tokens / num_experts if tokens else 1.0
        if tokens and even <= 1 / 8 and counts_E[busiest] > OVERLOADED * tokens:
            faults.append(
                (
                    "overloaded",
                    (
                        f"layer {layer}: expert {busiest} got {counts_E[busiest] / tokens:.0%} of all tokens"
                        f" in {steps} (the fair share is {even:.0%}), so the others learn less. In pretrain a"
                        " higher experts.balance_loss spreads them, as does balance_rate where routers have"
                        " a bias"
                    ),
                )
            )
        # report each fault of a layer once
        new = [(fault, words) for fault, words in faults if (layer, fault) not in self._warned]
        self._warned |= {(layer, fault) for fault, _ in new}
        return [words for _, words in new]


def experts_section(run: RunFolder) -> Markup:
    """Section on experts: load over the whole run, balance over time, numbers per layer.

    One layer's experts are drawn over time. Pictures are folded if the load is even (Balance.is_even),
    because they are then all of one colour. Empty for a dense model.
    """
    balance = run.balance
    if balance is None:
        return Markup("")
    figures = [_whole(balance)]
    if len(balance.columns) > 1:
        figures += [_violation_over_time(balance), _load_over_time(balance)]
    even = balance.is_even
    words = f"Even. {figures[0].words}" if even else "The experts that the router chose."
    return render("experts.html", words=words, even=even, figures=figures, rows=_numbers(run))


def _whole(balance: Balance) -> Figure:
    ratios, load = balance.ratios, balance.whole
    worst = max(ratios, key=ratios.__getitem__)
    words = (
        f"Busiest expert over its layer's mean: at most {ratios[worst]:.2f}, in layer {worst}."
        f" {balance.unused_words()}."
    )
    alt = (
        f"Tokens per expert, {len(load)} layers down, {len(next(iter(load.values())))} experts across."
        f" {words}"
    )
    red = [missed(counts_E) for counts_E in load.values()]
    pictures = [heat_map(load, red, alt, width) for width in WIDTHS]
    scale = ("no token", f"{FULL:.0f} × the layer's mean", "never used")
    return Figure("Tokens per expert, whole run", words, pictures, scale=scale)


def load_by_step(run: RunFolder, layer: str) -> tuple[list[int], list[Sequence[int]]]:
    """(steps, tokens per expert in each step) of one layer."""
    loads = [(event["step"], event.get("expert_load", {})) for event in run.train]
    of_layer = [(step, load[layer]) for step, load in loads if layer in load]
    return [step for step, _ in of_layer], [counts for _, counts in of_layer]


def _ticks(columns: Sequence[tuple[int, int]], width: int) -> list[tuple[int, str]]:
    """Step numbers under the first range and about every 90 units."""
    every = max(1, math.ceil(len(columns) * 90 / width))
    return [(i, f"{columns[i][0]:,}") for i in range(0, len(columns), every)]


def _violation_over_time(balance: Balance) -> Figure:
    """Picture with layers down and steps across: mean max violation in each range of steps."""
    words = f"Busiest expert over the mean, minus 1, in each step; mean of the layers {balance.rise_words()}."
    alt = f"Max violation, {len(balance.violation)} layers down, steps across. {words}"
    strength = [[value / (FULL - 1) for value in values] for values in balance.violation.values()]
    pictures = [
        heat(
            strength,
            None,
            alt,
            width,
            rows=list(balance.violation),
            ticks=_ticks(balance.columns, width),
            axes=("step", "layer"),
        )
        for width in WIDTHS
    ]
    return Figure(
        "Max violation per layer over time", words, pictures, scale=("even", f"{FULL - 1:.0f} or more", "")
    )


def _load_over_time(balance: Balance) -> Figure:
    """Picture with one layer's experts down and steps across: tokens over the layer's mean in each range."""
    # strength: tokens over the layer's mean in each range; red: none although DUE were due
    layer = balance.shown
    cells = balance.cells[layer]
    num_experts = len(cells[0])
    means = [max(sum(counts_E) / num_experts, 1e-12) for counts_E in cells]
    strength = [
        [counts_E[e] / mean / FULL for counts_E, mean in zip(cells, means, strict=True)]
        for e in range(num_experts)
    ]
    red = [list(row) for row in zip(*(missed(counts_E) for counts_E in cells), strict=True)]
    alt = (
        f"Tokens per expert of layer {layer}, {num_experts} experts down, steps across."
        f" {balance.gone_words()}."
    )
    pictures = [
        heat(
            strength,
            red,
            alt,
            width,
            rows=[str(e) for e in range(num_experts)],
            ticks=_ticks(balance.columns, width),
            axes=("step", "expert"),
        )
        for width in WIDTHS
    ]
    why = "the one with most cells in red" if balance.gone[layer] else "the one with the busiest expert"
    words = f"Layer {layer}, {why}: {balance.gone_words()}."
    scale = ("no token", f"{FULL:.0f} × the mean", f"no token where {DUE} or more were due")
    return Figure(f"Tokens per expert of layer {layer} over time", words, pictures, scale=scale)


def _numbers(run: RunFolder) -> list[tuple[str, ...]]:
    """Table of numbers per layer.

    For the whole run: tokens, max violation, entropy, dead experts. For single steps: mean max violation and
    mean number of dead experts.
    """
    rows = []
    for layer, counts_E in (run.balance.whole if run.balance else {}).items():
        per_step = load_by_step(run, layer)[1]
        step_violation = [value for counts in per_step if (value := max_violation(counts)) is not None]
        rows.append(
            (
                layer,
                f"{sum(counts_E):,}",
                _cell(max_violation(counts_E)),
                _cell(load_entropy(counts_E), ".3f"),
                f"{dead(counts_E):,}",
                _cell(mean(step_violation) if step_violation else None),
                f"{mean([dead(counts) for counts in per_step]):,.1f}",
            )
        )
    return rows


def _cell(value: float | None, form: str = ".2f") -> str:
    return ABSENT if value is None else format(value, form)
