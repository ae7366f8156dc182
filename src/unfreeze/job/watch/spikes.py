"""Judge of a run whose loss is in nats: detects spikes of the loss and of the gradient norm."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from unfreeze.core.schema import TrainEvent
from unfreeze.report.events import of_kind, read_events

if TYPE_CHECKING:
    from unfreeze.job.job import Job
    from unfreeze.train.guards import SpikeGuard


def spike_guard(job: Job) -> SpikeGuard:
    """Create the judge.

    Its window is filled from the events of earlier steps, so a resumed run judges like an uninterrupted one.
    """
    from unfreeze.train.guards import WINDOW, SpikeGuard

    state = job.state
    before = of_kind(read_events(state.run.path / "events.jsonl"), TrainEvent) if state.step else []
    history = [
        (loss, norm)
        for event in before
        if event["step"] <= state.step
        and (loss := event.get("loss")) is not None
        and (norm := event.get("grad_norm")) is not None
    ]
    # only process 0 has the earlier events, and all processes must judge alike
    history = json.loads(job.group.texts(json.dumps(history[-WINDOW:]))[0])
    return SpikeGuard(
        state.model,
        job.placed.objective,
        state.run.path,
        recompute=job.recompute,
        on_spike=job.config.watch.on_spike,
        max_norm=job.config.optimizer.clip,
        step=state.step,
        describe=job.describe,
        history=history,
        shown=state.run.shown,
    )
