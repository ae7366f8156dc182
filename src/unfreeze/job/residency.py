"""A run whose experts do not lie on the device: what it says of their transfers, and what it does not do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from unfreeze.core.units import format_bytes
from unfreeze.job.samples import ANSWER, Prompt

if TYPE_CHECKING:
    from unfreeze.models import Decoder
    from unfreeze.parallel.plan import Plan
    from unfreeze.parallel.residency import Streamed
    from unfreeze.train.fit import OnStep
    from unfreeze.train.run import Run
    from unfreeze.train.state import State
    from unfreeze.train.step import StepResult


def transfers_of(model: Decoder) -> list[OnStep]:
    """The hook that tells what came in a step; none where every weight is here."""
    from unfreeze.parallel.residency import Streamed

    return [TransfersSaid(model.residency)] if isinstance(model.residency, Streamed) else []


class TransfersSaid:
    """A "stream" event after each step."""

    def __init__(self, residency: Streamed):
        self._residency = residency

    def __call__(self, state: State, result: StepResult) -> None:
        came = self._residency.take()
        state.run.events.emit(
            "stream",
            state.step,
            source=self._residency.source.name,
            reads=came.reads,
            bytes=came.bytes,
            seconds=came.seconds,
            waited=came.waited,
            hidden=came.hidden,
        )


def refuse_samples(run: Run, plan: Plan, count: int, own: Sequence[Prompt], *, held_out: bool) -> None:
    """Say once that no samples are taken, with the arithmetic: each token of an answer reads every expert."""
    asked = [f"samples = {count}"] * (count > 0) + [f"{len(own)} prompts"] * bool(own)
    if not asked or run.step:
        return
    experts = sum(plan.sizes.streamed)
    instead = (
        "the held-out loss is measured instead"
        if held_out
        else "give validation_fraction = 0.05 for a held-out loss instead"
    )
    message = (
        f"no samples are taken ({', '.join(asked)}): experts come from {plan.work.experts}, and each token of"
        f" an answer reads all {format_bytes(experts)} of them, an answer of {ANSWER} tokens"
        f" {format_bytes(ANSWER * experts)}; {instead}"
    )
    run.events.emit("warning", 0, message=message)
