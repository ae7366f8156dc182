"""The forecast event: after AT steps of a session, or half of them, the time of the run and its cost."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from unfreeze.report.events import read_events
from unfreeze.report.forecast import Rhythm, forecast

if TYPE_CHECKING:
    from unfreeze.config.tables import Save, Watch
    from unfreeze.train.state import State
    from unfreeze.train.step import StepResult

AT = 50
"""Steps of a session before the forecast. In a shorter session it comes when half of the steps are done."""
LEAST = 40
"""Steps of a session that has a forecast: it needs some plain ones before it, and a rest that is worth it."""


def due(steps: int) -> int:
    """Step of a session of `steps` steps that has the forecast; 0 if none has."""
    return min(AT, steps // 2) if steps >= LEAST else 0


class ForecastOnce:
    """Hook of fit(): emits the forecast event once in a session. Its clock is the run's own events."""

    def __init__(self, save: Save, watch: Watch, *, validates: bool):
        self._save, self._watch, self._validates = save, watch, validates
        self._begun: int | None = None

    def __call__(self, state: State, result: StepResult) -> None:
        self._begun = state.step - 1 if self._begun is None else self._begun
        steps = state.schedule.steps
        if state.step - self._begun != due(steps - self._begun) or state.run.events.path is None:
            return
        rhythm = Rhythm(
            steps, self._watch.validate_every, self._save.every, self._save.minutes, self._validates
        )
        ahead = forecast(read_events(state.run.events.path), rhythm)
        if ahead is None:
            return
        price = self._watch.usd_per_hour
        usd = {"usd": ahead.seconds / 3600 * price} if price else {}
        state.run.events.emit("forecast", state.step, **asdict(ahead), **usd)
