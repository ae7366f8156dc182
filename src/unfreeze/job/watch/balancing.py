"""Hooks of fit() that watch the balancing of experts: that there is any, and that its bias moves."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from unfreeze.models import Decoder
    from unfreeze.train.state import State
    from unfreeze.train.step import StepResult

STEPS = 100
"""Steps between two looks: a bias of a running balancer moves in every step whose load is uneven."""


def biases(model: Decoder) -> dict[int, Tensor]:
    """Mixture -> the selection bias that its router has now."""
    biases = {key: moe.gate.e_score_correction_bias for key, moe in model.moe_layers().items()}
    return {key: bias for key, bias in biases.items() if bias is not None}


class UnbalancedWatch:
    """Warns once, at the first step of a run, if nothing balances the experts that train.

    auxiliary  True if the objective has a loss that does
    """

    def __init__(self, auxiliary: bool):
        self.auxiliary = auxiliary

    def __call__(self, state: State, result: StepResult) -> None:
        from unfreeze.train.balance import LossFreeBalance

        if state.step != 1 or self.auxiliary or not result.expert_load:
            return
        if any(isinstance(change, LossFreeBalance) for change in state.after_update):
            return
        has = "its routers have a selection bias" if biases(state.model) else "its routers have no bias"
        next = "a balance_rate above 0" if biases(state.model) else "--experts.balance-loss 0.01"
        state.run.events.emit(
            "warning",
            state.step,
            message=f"nothing balances the experts of this model ({has}): some may never learn. {next} does",
        )


class BiasWatch:
    """Warns if a router's bias is unchanged for STEPS steps in which its load was uneven.

    It compares the bias that the router has, not the one that the balancer moves: after a buffer was replaced
    they are two, and balancing is present but inert. The host reads from the device once per STEPS.
    """

    def __init__(self, steps: int = STEPS):
        self.steps = steps
        self._last: dict[int, Tensor] = {}
        self._moved: dict[int, Tensor] = {}
        self._since = 0
        self._uneven: set[int] = set()
        self._warned: set[int] = set()

    def __call__(self, state: State, result: StepResult) -> None:
        now = biases(state.model)
        if not self._last:
            self._begin(state)
        # step by step, on the device: a bias that swings may be back where it was after any number of steps
        for key, bias in now.items():
            self._moved[key] |= bias.ne(self._last[key]).any()
        self._last = {key: bias.clone() for key, bias in now.items()}
        if result.applied:
            self._uneven |= {key for key, load in result.expert_load.items() if len(set(load)) > 1}
        if state.step - self._since < self.steps:
            return
        judged = self._uneven & now.keys() - self._warned
        if still := sorted(key for key in judged if not bool(self._moved[key])):
            names = state.model.moe_names()
            layers = ", ".join(names[key] for key in still)
            self._warned |= set(still)
            state.run.events.emit(
                "warning",
                state.step,
                message=(
                    f"expert_bias unchanged for {self.steps} steps in layer {layers}, though the load is"
                    " uneven: balancing is inert"
                ),
            )
        self._begin(state)

    def _begin(self, state: State) -> None:
        now = biases(state.model)
        self._last = {key: bias.clone() for key, bias in now.items()}
        self._moved = {key: bias.ne(bias).any() for key, bias in now.items()}
        self._since, self._uneven = state.step, set()
