"""Hook that writes the receipt: which weights learned, per group, for adapters and whole models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from unfreeze.core.errors import AdapterError
from unfreeze.core.units import plural
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
    """Return the receipt's hook if the run has no receipt yet, else [].

    Process 0 checks its folder for all processes.
    """
    missing = group.any(bool(group.on_rank0(lambda: not (state.run.path / RECEIPT).is_file())))
    return [FirstStepReceipt(state, dataset, group, stop=stop)] if state.step == 0 or missing else []


class FirstStepReceipt:
    """Record which matrices moved in the first step with a gradient, how far, and the change of the output.

    Steps that prove nothing are passed over: a gradient of exactly zero (no supervised token, a student equal
    to its teacher), a refused update, or a warm-up rate below SHOWS. A run that ends without a receipt warns.

    The receipt is written even if it stops the run.
    stop  True: a matrix that did not move stops the run. False: it is a warning (see job/trained.py)
    """

    def __init__(self, state: State, dataset: Dataset, group: Group, *, stop: bool):
        from unfreeze.adapters.receipt import Receipt
        from unfreeze.data import pack
        from unfreeze.job.watch.expert_op import ExpertOp

        self._receipt: Receipt | None = Receipt(
            state.model, state.optimizer.masters, state.optimizer.gradient
        )
        self._probe = pack(dataset.examples[:8])  # the receipt uses its first 256 tokens
        self._expert_op = ExpertOp(state.model)
        self._group, self._stop, self._held = group, stop, state.optimizer.held

    def _part(self, name: str) -> tuple[Rows | None, int]:
        """Return (rows of a parameter that this process holds, number of processes that hold the same)."""
        held = self._held(name, self._group)
        return held.rows, held.copies

    def __call__(self, state: State, result: StepResult) -> None:
        if self._receipt is None:
            return
        from unfreeze.adapters.receipt import SHOWS, check
        from unfreeze.job.watch.expert_op import is_wrong

        warming = result.learning_rate < SHOWS <= state.schedule.peak
        if result.grad_norm == 0 or not result.applied or warming:
            self._receipt.pass_over()
            if state.step == state.schedule.steps:
                message = (
                    f"no receipt: no gradient moved a weight in any of the {state.step:,} steps. Nothing"
                    " was learned"
                )
                state.run.events.emit("warning", state.step, message=message)
            return
        probe = self._probe.to(state.model.device)
        taken = self._receipt.take(probe, self._group.sum_, self._part if self._group.size > 1 else None)
        self._receipt = None
        fields: dict[str, Any] = {"groups": taken.groups, "exceptions": taken.exceptions}
        compared = self._expert_op.close()
        if compared is not None:
            fields["expert_op"] = compared
        write_json(state.run.path / RECEIPT, {"step": state.step, **fields})
        state.run.events.emit("receipt", state.step, **fields)
        if compared is not None and is_wrong(compared):
            error = compared["error"]
            off = "not finite" if error is None else f"off by {error:.1%} of the norm from the reference"
            message = (
                f"the expert op is {off} on {plural(compared['rows'], 'row')} of {compared['layer']},"
                f" where at most {compared['limit']:g} is rounding: this run learns from wrong numbers;"
                " unfreeze doctor --gpu (on a CPU --ops) finds the kernel"
            )
            state.run.events.emit("warning", state.step, message=message)
        try:
            check(taken, result.learning_rate)
        except AdapterError as error:
            if self._stop:
                raise
            state.run.events.emit("warning", state.step, message=error.message)
