"""The hook after the first optimizer step: the receipt of what learned (DESIGN promise 2), for adapters and for whole models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unfreeze.core.errors import AdapterError
from unfreeze.recipes.training import write_json

if TYPE_CHECKING:
    from unfreeze.data import Dataset
    from unfreeze.train.state import State
    from unfreeze.train.step import StepResult


class FirstStepReceipt:
    """Which groups learned in the first step, by how much, and what it changed in the output. Written also where it stops the run.

    stop True: a group that stood still ends the run. False: it is a warning (recipes/trained.py says when).
    """

    def __init__(self, state: State, dataset: Dataset, *, stop: bool):
        from unfreeze.adapters.receipt import Receipt
        from unfreeze.data import pack

        self._receipt = Receipt(state.model)
        self._probe = pack(dataset.examples[:8])  # the receipt looks at the first 256 of its tokens
        self._stop = stop

    def __call__(self, state: State, result: StepResult) -> None:
        if state.step != 1:
            return
        lend_gradients(state)
        self._receipt.after_backward(state.model)
        failed: AdapterError | None = None
        try:
            self._receipt.after_update(state.model, self._probe.to(state.model.device))
        except AdapterError as error:
            failed = error
        groups = self._receipt.groups
        write_json(state.run.path / "receipt.json", {"groups": groups})
        state.run.events.emit("receipt", state.step, groups=groups)
        if failed is not None and self._stop:
            raise failed
        if failed is not None:
            state.run.events.emit("warning", state.step, message=failed.message)


def lend_gradients(state: State) -> None:
    """The optimizer holds the gradients of half precision weights in fp32; the receipt looks for them at the weights. Gone at the next step."""
    for name, parameter in state.optimizer.parameters.items():
        gradient = state.optimizer.gradient(name)
        if parameter.grad is None and gradient is not None:
            parameter.grad = gradient.to(parameter.dtype)
