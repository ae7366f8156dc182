"""How evenly a run used its experts, computed once from the events.

Every number of it that the report draws or says is made here. E experts, n_e tokens given to expert e; an
even share is sum(n) / E. Formulas of balance: core/balance.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from unfreeze.core.balance import dead, max_violation
from unfreeze.core.schema import Event, TrainEvent
from unfreeze.report.events import expert_load, of_kind

# stretches of steps across a picture, wide or narrow: the same cells in both, so that one count is true of
# both
COLUMNS = 100
# tokens per expert by an even share: with fewer, chance leaves some without any, with so many one of exp(10)
# = 22,000
DUE = 10
# of the max violation between the first and the last stretch: the busiest expert took one more mean's worth
RISE = 1.0

EVEN = 2.0  # times the mean of its layer: a busiest expert below it is what a well balanced router shows


def missed(counts_E: Sequence[int]) -> list[bool]:
    """Which experts got no token although DUE or more were due to each by an even share."""
    due = sum(counts_E) >= DUE * len(counts_E)
    return [due and count == 0 for count in counts_E]


@dataclass(frozen=True)
class Balance:
    """How evenly a run used its experts: the numbers behind the pictures, the guard and the captions.

    whole       layer -> tokens per expert of the whole run
    columns     the stretches of steps, each as (first step, last step)
    cells       layer -> stretch -> tokens per expert
    violation   layer -> stretch -> max violation of a step, mean over the stretch
    """

    whole: dict[str, list[int]]
    columns: list[tuple[int, int]]
    cells: dict[str, list[list[int]]]
    violation: dict[str, list[float]]

    @cached_property
    def ratios(self) -> dict[str, float]:
        """Layer -> busiest expert over the mean, whole run."""
        return {layer: (max_violation(counts_E) or 0.0) + 1 for layer, counts_E in self.whole.items()}

    @property
    def unused(self) -> int:
        """Experts that got no token in the whole run although DUE were due."""
        return sum(sum(missed(counts_E)) for counts_E in self.whole.values())

    @cached_property
    def gone(self) -> dict[str, int]:
        """Layer -> cells (an expert over a stretch of steps) without a token although DUE were due."""
        return {
            layer: sum(sum(missed(counts_E)) for counts_E in stretch) for layer, stretch in self.cells.items()
        }

    @cached_property
    def shown(self) -> str:
        """Choose the layer whose experts are drawn over time.

        The one with the most cells without a token, else the one with the busiest expert.
        """
        gone, ratios = self.gone, self.ratios
        return max(self.whole, key=lambda layer: (gone[layer], ratios[layer]))

    @cached_property
    def rise(self) -> tuple[float, float]:
        """Max violation in the first and in the last stretch, mean of the layers."""
        first, last = (
            sum(values[at] for values in self.violation.values()) / len(self.violation) for at in (0, -1)
        )
        return first, last

    @property
    def has_risen(self) -> bool:
        """By RISE or more, and in stretches whose steps gave each expert DUE tokens by an even share."""
        first, last = self.rise
        return last - first >= RISE and all(self._due(at) for at in (0, -1))

    @property
    def is_even(self) -> bool:
        """Whether the experts were used evenly.

        None went without tokens where DUE were due, the busiest stayed under EVEN times its layer's mean, and
        nothing rose by RISE.
        """
        used = not self.unused and not any(self.gone.values())
        return used and max(self.ratios.values()) < EVEN and not self.has_risen

    def _due(self, at: int) -> bool:
        begin, end = self.columns[at]
        return all(
            sum(stretch[at]) >= DUE * len(stretch[at]) * (end - begin + 1) for stretch in self.cells.values()
        )

    def unused_words(self) -> str:
        """'2 of 48 experts got no token', of the whole run."""
        num_experts, num_idle = sum(map(len, self.whole.values())), sum(map(dead, self.whole.values()))
        if not num_idle:
            return f"All {num_experts:,} experts got tokens"
        few = num_idle - self.unused
        words = f"{num_idle:,} of {num_experts:,} experts got no token"
        return (
            f"{words} ({few:,} of them in layers with less than {DUE} tokens due to each)" if few else words
        )

    def gone_words(self) -> str:
        """Say how often experts of the layer shown got no token, with the other layers' count.

        '3 times an expert got no token over 2 steps where 10 or more were due (expert 7)'
        """
        layer, gone = self.shown, self.gone
        if not gone[layer]:
            return f"every expert got tokens wherever {DUE} or more were due"
        experts = sorted(
            {e for counts_E in self.cells[layer] for e, is_missed in enumerate(missed(counts_E)) if is_missed}
        )
        names = ", ".join(map(str, experts[:8])) + (", …" if len(experts) > 8 else "")
        begin, end = self.columns[0]
        span = f"over {end - begin + 1:,} steps" if end > begin else "in a step"
        words = (
            f"{gone[layer]:,} {'time' if gone[layer] == 1 else 'times'} an expert got no token {span} where"
            f" {DUE} or more were due"
        )
        words += f" (expert {names})" if len(experts) == 1 else f" (experts {names})"
        others = {other: count for other, count in gone.items() if count and other != layer}
        more = (
            f", {sum(others.values()):,} more in {len(others):,} other"
            f" {'layer' if len(others) == 1 else 'layers'}"
        )
        return words + (more if others else "")

    def rise_words(self) -> str:
        """'0.77 at step 1, 2.15 at step 95'."""
        first, last = self.rise
        return f"{first:.2f} {_when(self.columns[0])}, {last:.2f} {_when(self.columns[-1])}"


def _when(steps: tuple[int, int]) -> str:
    return f"at step {steps[0]:,}" if steps[0] == steps[1] else f"in steps {steps[0]:,} to {steps[1]:,}"


def balance_of(events: Sequence[Event]) -> Balance | None:
    """None where no expert load is in the events. Raises DataError where it is damaged."""
    whole = expert_load(events)
    if not whole:
        return None
    train = of_kind(events, TrainEvent)
    loads = [(event["step"], load) for event in train if (load := event.get("expert_load"))]
    parts = stretches(len(loads), COLUMNS)
    cells: dict[str, list[list[int]]] = {}
    violation: dict[str, list[float]] = {}
    for layer, total_E in whole.items():
        none_E = [0] * len(total_E)
        per_step = [load.get(layer) or none_E for _, load in loads]
        cells[layer] = [
            [sum(column) for column in zip(*per_step[part.start : part.stop], strict=True)] for part in parts
        ]
        of_steps = [max_violation(counts_E) or 0.0 for counts_E in per_step]
        violation[layer] = [mean(of_steps[part.start : part.stop]) for part in parts]
    return Balance(whole, [(loads[part[0]][0], loads[part[-1]][0]) for part in parts], cells, violation)


def stretches(count: int, most: int) -> list[range]:
    """`count` steps cut into at most `most` stretches of equal length (the last may be shorter)."""
    length = math.ceil(count / most) if count else 1
    return [range(begin, min(begin + length, count)) for begin in range(0, count, length)]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
