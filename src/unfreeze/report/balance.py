"""Load balance of a run's experts, computed once from the events.

All numbers on it in the report come from here. E experts, n_e tokens of expert e; the fair share is sum(n) /
E. Formulas: core/balance.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from unfreeze.core.balance import dead, max_violation
from unfreeze.core.schema import Event, TrainEvent
from unfreeze.report.events import expert_load, of_kind

# ranges of steps across a picture: the same number in wide and narrow pictures, so that counts agree
COLUMNS = 100
# tokens per expert at the fair share: with fewer, some experts get none by chance; with this many, one in
# exp(10) = 22,000
DUE = 10
# rise of the max violation from the first to the last range: the busiest expert takes one more fair share
RISE = 1.0

EVEN = 2.0  # busiest expert over its layer's mean; a well-balanced router stays below


def missed(counts_E: Sequence[int]) -> list[bool]:
    """Return for each expert: True if it got no token although its fair share was DUE or more."""
    due = sum(counts_E) >= DUE * len(counts_E)
    return [due and count == 0 for count in counts_E]


@dataclass(frozen=True)
class Balance:
    """Load balance of a run's experts: numbers for the pictures, the guard and the captions.

    whole       layer -> tokens per expert of the whole run
    columns     ranges of steps, each as (first step, last step)
    cells       layer -> range -> tokens per expert
    violation   layer -> range -> max violation of a step, averaged over the range
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
        """Number of experts without a token in the whole run although their fair share was DUE or more."""
        return sum(sum(missed(counts_E)) for counts_E in self.whole.values())

    @cached_property
    def gone(self) -> dict[str, int]:
        """Layer -> number of cells (an expert in a range of steps) without a token although DUE were due."""
        return {
            layer: sum(sum(missed(counts_E)) for counts_E in stretch) for layer, stretch in self.cells.items()
        }

    @cached_property
    def shown(self) -> str:
        """Layer whose experts are drawn over time.

        The one with most cells without a token, else the one with the busiest expert.
        """
        gone, ratios = self.gone, self.ratios
        return max(self.whole, key=lambda layer: (gone[layer], ratios[layer]))

    @cached_property
    def rise(self) -> tuple[float, float]:
        """Max violation in the first and in the last range, averaged over layers."""
        first, last = (
            sum(values[at] for values in self.violation.values()) / len(self.violation) for at in (0, -1)
        )
        return first, last

    @property
    def has_risen(self) -> bool:
        """True if max violation rose by RISE or more, in ranges with a fair share of DUE tokens per step."""
        first, last = self.rise
        return last - first >= RISE and all(self._due(at) for at in (0, -1))

    @property
    def is_even(self) -> bool:
        """True if the load was even.

        That is: no expert lacked tokens where DUE were due, the busiest stayed under EVEN times its layer's
        mean, and max violation did not rise by RISE.
        """
        used = not self.unused and not any(self.gone.values())
        return used and max(self.ratios.values()) < EVEN and not self.has_risen

    def _due(self, at: int) -> bool:
        begin, end = self.columns[at]
        return all(
            sum(stretch[at]) >= DUE * len(stretch[at]) * (end - begin + 1) for stretch in self.cells.values()
        )

    def unused_words(self) -> str:
        """Words such as '2 of 48 experts got no token', for the whole run."""
        num_experts, num_idle = sum(map(len, self.whole.values())), sum(map(dead, self.whole.values()))
        if not num_idle:
            return f"All {num_experts:,} experts got tokens"
        few = num_idle - self.unused
        words = f"{num_idle:,} of {num_experts:,} experts got no token"
        return f"{words} ({few:,} of them in layers with a fair share below {DUE} tokens)" if few else words

    def gone_words(self) -> str:
        """Words on how often experts of the shown layer got no token, with the other layers' count.

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
        """Words such as '0.77 at step 1, 2.15 at step 95'."""
        first, last = self.rise
        return f"{first:.2f} {_when(self.columns[0])}, {last:.2f} {_when(self.columns[-1])}"


def _when(steps: tuple[int, int]) -> str:
    return f"at step {steps[0]:,}" if steps[0] == steps[1] else f"in steps {steps[0]:,} to {steps[1]:,}"


def balance_of(events: Sequence[Event]) -> Balance | None:
    """Compute the balance; None without expert load in the events. Raises DataError if it is damaged."""
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
    """Divide `count` steps into at most `most` ranges of equal length; the last can be shorter."""
    length = math.ceil(count / most) if count else 1
    return [range(begin, min(begin + length, count)) for begin in range(0, count, length)]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
