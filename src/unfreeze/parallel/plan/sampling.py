"""Seconds of a step with rewards: its answers are sampled, then trained on in as few passes as hold them.

R answers run at once. A decoding step reads every weight that a row of it needs and the KV cache once, and
multiplies R tokens:

    step    (bytes / read + 2 · R · weights / dense) / SHARE, at least the launches of a forward visit
    bytes   the rest and the head, experts · (1 - (1 - K / E)^R), and the cache at half of its length
    weights of a token: dense ones, K experts, adapters, the head
    read    bytes/s of AdamW, which is bound by memory: rates.optimizer · OPTIMIZER_BYTES

Answers that take all their tokens need ⌈answers / R⌉ · new_tokens such steps, beside a forward pass over the
prompts. SHARE is derived from `unfreeze dev bench decode` (benchmarks/results): there a step took the time
above with a share of .41 to .70, at 1 to 64 rows of the benchmark's moe and dense models.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from unfreeze.core.units import format_seconds, format_step, plural
from unfreeze.parallel.answers import Answers, OfStep
from unfreeze.parallel.plan.counts import Counts
from unfreeze.parallel.plan.passes import launches_of_visit
from unfreeze.parallel.plan.rates import OPTIMIZER_BYTES, Rates

SHARE = 0.5


@dataclass(frozen=True)
class Rollout:
    """Seconds of a step with rewards at most: of sampling, and of training. Grading is unknown."""

    sampling: float
    training: float
    of: OfStep

    @property
    def step(self) -> float:
        return self.sampling + self.training

    @property
    def share(self) -> float:
        """Part of the step that is sampling."""
        return self.sampling / self.step

    @property
    def run(self) -> float | None:
        """Seconds of the run, if its steps are known."""
        return None if self.of.steps is None else self.of.steps * self.step

    def fields(self) -> dict[str, float | int | None]:
        """Plain JSON values."""
        return {"step": self.step, "sampling": self.sampling, "share": self.share, "run": self.run}

    def line(self) -> str:
        """The numbers in one sentence."""
        steps, whole = self.of.steps, ""
        if steps is not None and self.run is not None:
            whole = f"; {plural(steps, 'step')} in {format_seconds(self.run)}"
        return (
            f"a step with rewards takes at most {format_step(self.step)}, {100 * self.share:.0f} % of it"
            f" sampling: {self.of.answers:,} answers of {self.of.new_tokens:,} tokens after prompts of"
            f" {self.of.prompt_tokens:,}{whole}; estimated, without grading and validation"
        )


def sampling_seconds(
    counts: Counts,
    rates: Rates,
    answers: Answers,
    *,
    cached: int,
    trained: int,
    number_bytes: int,
    prefill: float,
) -> float:
    """Return the seconds of sampling a step's answers on one device.

        cached        bytes of a position of the KV cache
        trained       adapters' parameters; 0 if every weight trains
        number_bytes  of a weight of the head
        prefill       seconds of a forward pass over the prompts

    0 if the answers are not those of a step.
    """
    of = answers.step
    if of is None:
        return 0.0
    rows = min(answers.rows, of.answers)
    passed = rows * counts.passes
    missed = (1 - counts.experts_per_token / counts.num_experts) ** passed if counts.num_experts else 1.0
    head = counts.vocab_size * counts.hidden_size
    length = of.prompt_tokens + of.new_tokens / 2
    read = counts.rest_bytes - counts.ends_bytes + min(counts.ends_bytes, head * number_bytes)
    read += counts.experts_bytes * (1 - missed) + 4 * trained + rows * length * cached
    weights = counts.dense + counts.router + head + trained
    weights += counts.mixtures * counts.experts_per_token * counts.expert_weights
    computed = read / (rates.optimizer * OPTIMIZER_BYTES) + 2 * rows * weights / rates.dense
    each = max(computed / SHARE, launches_of_visit(counts) * rates.launch)
    return prefill + math.ceil(of.answers / rows) * of.new_tokens * each
