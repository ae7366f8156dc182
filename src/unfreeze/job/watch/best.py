"""The best save, by one criterion, and the end of a run that finds no better one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unfreeze.train.state import State


class Best:
    """Keeps the best save, and ends the run after results in a row without a better one.

    keep      saves the state; -> True if the save exists. State.best then names it
    patience  results in a row after which the run stops (State.ended); 0: never
    agreed    True if any process says so: all must stop at the same step
    by        the criterion in words, "" for the held-out loss. State.best holds it: results by another
              criterion are not compared
    """

    def __init__(
        self,
        keep: Callable[[State], bool],
        *,
        patience: int = 0,
        agreed: Callable[[bool], bool] = lambda value: value,
        by: str = "",
    ):
        self._keep, self._patience, self._agreed, self.by = keep, patience, agreed, by

    def __call__(self, state: State, loss: float | None, *, last: bool) -> None:
        """Compare a result after training steps with the best so far. loss: lower is better."""
        if state.best is not None and state.best.get("by", "") != self.by:
            state.best, state.stale = None, 0
        if loss is not None and (state.best is None or loss < state.best["loss"]):
            named = {"by": self.by} if self.by else {}
            before, state.best = state.best, {"step": state.step, "loss": loss, **named}
            state.stale = 0  # the save must hold both
            if not self._keep(state):
                state.best = before
        else:
            state.stale += 1
        if self._patience and not last and self._agreed(state.stale >= self._patience):
            state.ended = True
            best = {f"best_{name}": value for name, value in (state.best or {}).items()}
            state.run.events.emit("early_stop", state.step, validations=state.stale, **best)


def forget_validations(state: State) -> None:
    """Forget the best save if the held-out loss chose it: the held-out documents are others now."""
    if not (state.best or {}).get("by"):
        state.best, state.stale = None, 0


def forget_best(state: State) -> None:
    """Forget the best save and the lowest loss: from here on another model is measured."""
    state.best, state.stale = None, 0
    state.heldout.pop("lowest", None)
