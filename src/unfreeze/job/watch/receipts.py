"""The hook that takes the receipt (what learned, group by group), for adapters and for whole models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unfreeze.core.errors import AdapterError
from unfreeze.job.end.folder import write_json

if TYPE_CHECKING:
    from unfreeze.core.rows import Rows
    from unfreeze.data import Dataset
    from unfreeze.parallel.processes.collectives import Group
    from unfreeze.train.fit import OnStep
    from unfreeze.train.state import State
    from unfreeze.train.step import StepResult

RECEIPT = "receipt.json"


def receipt_of(state: State, dataset: Dataset, group: Group, *, stop: bool) -> list[OnStep]:
    """The hook of a run that has no receipt yet; none for a run that goes on behind it.

    Process 0, whose folder it is, says for all.
    """
    missing = group.any(bool(group.on_rank0(lambda: not (state.run.path / RECEIPT).is_file())))
    return [FirstStepReceipt(state, dataset, group, stop=stop)] if state.step == 0 or missing else []


class FirstStepReceipt:
    """Which matrices learned in the first step with a gradient, how much, and what it did to the output.

    A step whose gradient is exactly zero (no supervised token, a student equal to its teacher) or whose
    update was refused proves nothing, and a warm-up's rate below SHOWS neither: the next is looked at. A run
    that ends without a receipt says so.
    A receipt that ends the run is written too.
    stop True: a matrix that was left out ends the run. False: it is a warning (job/trained.py says when).
    """

    def __init__(self, state: State, dataset: Dataset, group: Group, *, stop: bool):
        from unfreeze.adapters.receipt import Receipt
        from unfreeze.data import pack

        self._receipt: Receipt | None = Receipt(
            state.model, state.optimizer.masters, state.optimizer.gradient
        )
        self._probe = pack(dataset.examples[:8])  # the receipt looks at the first 256 of its tokens
        self._group, self._stop, self._held = group, stop, state.optimizer.held

    def _part(self, name: str) -> tuple[Rows | None, int]:
        """What this process holds of a parameter, and how many hold the same."""
        held = self._held(name, self._group)
        return held.rows, held.copies

    def __call__(self, state: State, result: StepResult) -> None:
        if self._receipt is None:
            return
        from unfreeze.adapters.receipt import SHOWS, check

        warming = result.learning_rate < SHOWS <= state.schedule.peak
        if result.grad_norm == 0 or not result.applied or warming:
            self._receipt.pass_over()
            if state.step == state.schedule.steps:
                message = (
                    f"no receipt: in none of the {state.step:,} steps did a gradient move a weight. Nothing"
                    " was learned"
                )
                state.run.events.emit("warning", state.step, message=message)
            return
        probe = self._probe.to(state.model.device)
        taken = self._receipt.take(probe, self._group.sum_, self._part if self._group.size > 1 else None)
        self._receipt = None
        fields = {"groups": taken.groups, "exceptions": taken.exceptions}
        write_json(state.run.path / RECEIPT, {"step": state.step, **fields})
        state.run.events.emit("receipt", state.step, **fields)
        try:
            check(taken, result.learning_rate)
        except AdapterError as error:
            if self._stop:
                raise
            state.run.events.emit("warning", state.step, message=error.message)
