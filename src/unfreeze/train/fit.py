"""The training loop. Micro-batches become a step, a step becomes an event; hooks see it, saves store it.

Features enter through these arguments, never through a flag here:
- the source: the training data, such as documents, or the model's own answers;
- the objective;
- `recompute`: which activations of a layer are kept for backward, and which are recomputed;
- State.after_update: changes to the model after an update, such as the balancing bias;
- `judge`: may refuse an update; `group`: the processes that share the work;
- `on_step`: hooks after a finished step (receipt, samples, evaluation).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from unfreeze.core.errors import DataError, StepLeft, StepRefused
from unfreeze.data.packing.source import Cursor, Step
from unfreeze.models.recompute import RecomputePolicy
from unfreeze.parallel.processes.collectives import ALONE, Group
from unfreeze.train.events import emit_nonfinite, emit_start, train_fields
from unfreeze.train.memory import memory_fields, peak_bytes
from unfreeze.train.nonfinite import investigate
from unfreeze.train.optim import NonFinite
from unfreeze.train.state import State
from unfreeze.train.step import Judge, Objective, StepResult, accept, train_step
from unfreeze.train.suspects import Describe
from unfreeze.train.timer import Saves, SaveTimer
from unfreeze.train.together import save_together

SAVES = Saves()  # only at the end

OnStep = Callable[[State, StepResult], None]
"""Called after each step: state.step counts it, gradients still exist. An exception stops the run."""


@dataclass(frozen=True)
class Fitted:
    """The result of a call of fit.

    reason  "interrupted": a signal arrived; everything is saved, and the same command resumes
    steps   finished steps of the whole run. All other numbers are of this call; None if it had no step
    """

    reason: Literal["done", "interrupted"]
    steps: int
    loss_first: float | None
    loss_last: float | None
    tokens: int
    tokens_per_second: float | None
    peak_bytes: int


def fit(
    state: State,
    source: Iterator[Step],
    objective: Objective,
    *,
    recompute: RecomputePolicy,
    max_norm: float = 1.0,
    saves: Saves = SAVES,
    on_step: Sequence[OnStep] = (),
    judge: Judge = accept,
    group: Group = ALONE,
    describe: Describe | None = None,
) -> Fitted:
    """Train from state.step to the last step of state.schedule, or until a hook sets state.ended.

        source         a Source (data/packing/source.py), or any iterator of its steps, from state.cursor on.
                       The gradient is that of all tokens of a step's micro-batches together
        recompute      one of models.RECOMPUTE
        max_norm       limit of the global gradient norm; 0 disables clipping
        saves          when to save, besides at the end
        group          every process calls fit with equal batches and an equal state; process 0 saves
        describe       if a step is not finite: what suspects.jsonl adds to a document's tokens (row, text)

    Raises NonFinite at a NaN (that step changes nothing), DataError if the batches end, DiskFull at a save.
    """
    run, model, steps = state.run, state.model, state.schedule.steps
    emit_start(state, group.size)
    group.meet(lambda: None)  # another process may read its weights from a slower disk
    state.check_copies(group)
    losses: list[float] = []
    tokens, seconds = 0, 0.0
    timer = SaveTimer(saves.minutes, saves.clock)
    with state.interrupt as interrupt:
        for step in range(state.step, state.step if state.ended else steps):
            # forward, backward and update; at a NaN the step is run again to locate its origin
            started = time.perf_counter()
            try:
                batch_list, cursor = take_or_save(source, state, saves, group)
            except StepLeft:
                break
            try:
                result = train_step(
                    model,
                    state.optimizer,
                    batch_list,
                    objective,
                    learning_rate=state.schedule.learning_rate(step),
                    max_norm=max_norm,
                    recompute=recompute,
                    group=group,
                    judge=judge,
                    stop=lambda: interrupt.requested,
                    save=lambda: group.rank == 0 and timer.due(),
                )
            except NonFinite as error:
                named = investigate(
                    model,
                    batch_list,
                    objective,
                    recompute=recompute,
                    group=group,
                    folder=run.path,
                    step=step + 1,
                    describe=describe,
                )
                raise emit_nonfinite(error, named, state) from error

            # count the step: event, hooks
            seconds += advance(state, result, cursor, started, on_step)
            tokens += result.tokens
            losses = [*losses[:1], result.loss]  # the first and the last

            # save if due, and always at the end
            stop = result.stop or (group.size == 1 and interrupt.requested)
            last = stop or state.finished
            due = result.save or (saves.every and state.step % saves.every == 0)
            if last or due:
                state.check_copies(group)
                save_together(state, saves.keep, "stop" if last else saves.on_full_disk, group)
            if due or state.saved == state.step:  # a hook may already have saved
                timer.restart()
            if last:
                break
    return fitted_of(state, losses, tokens, seconds)


def fitted_of(state: State, losses: Sequence[float], tokens: int, seconds: float) -> Fitted:
    """Return the end of the loop, and write its event. losses: the first and the last."""
    fitted = Fitted(
        reason="done" if state.finished else "interrupted",
        steps=state.step,
        loss_first=losses[0] if losses else None,
        loss_last=losses[-1] if losses else None,
        tokens=tokens,
        tokens_per_second=tokens / seconds if seconds else None,
        peak_bytes=peak_bytes(state.model.device),
    )
    state.run.events.emit(
        "end",
        state.step,
        reason=fitted.reason,
        steps=fitted.steps,
        tokens_per_second=fitted.tokens_per_second,
    )
    return fitted


def advance(
    state: State, result: StepResult, cursor: Cursor, started: float, on_step: Sequence[OnStep]
) -> float:
    """Finish an update: count the step, write its event, run hooks. Return the step's seconds.

    started: time.perf_counter() at the step's start; it is the host's clock, on CUDA too.
    train_step's one read waits for the backward pass. The update is still running then, so its time counts in
    the next step. Reading CUDA events here would need a second wait.
    """
    for change in state.after_update if result.applied else ():
        change(result.expert_load)
    state.step, state.cursor = state.step + 1, cursor
    seconds = time.perf_counter() - started
    names, memory = state.model.moe_names(), memory_fields(state.model.device)
    state.run.events.emit("train", state.step, **train_fields(result, seconds, memory, cursor, names))
    for look in on_step:
        look(state, result)
    return seconds


def take_or_save(source: Iterator[Step], state: State, saves: Saves, group: Group) -> Step:
    """Take the next step. If the source refuses or leaves it, save what was trained before, then raise."""
    try:
        return take(source, state.step, state.schedule.steps)
    except (StepRefused, StepLeft):
        if state.step and state.saved != state.step:
            save_together(state, saves.keep, "stop", group)
        raise


def take(source: Iterator[Step], step: int, steps: int) -> Step:
    """Return the micro-batches of step number `step` (from 0), and the cursor after them."""
    taken = next(source, None)
    if taken is None:
        raise DataError(
            f"the data ended at step {step + 1} of {steps}", next="lower steps, or iterate over more epochs"
        )
    return taken
