"""The one loop. Batches become a step, a step becomes an event, hooks look at it, saves keep it.

Features enter through these arguments, never through a flag here:
- the objective;
- `rewrite`: what is learned in place of a step's micro-batches, such as answers of the model's own;
- `recompute`: what of a layer is kept for backward and what is computed again;
- State.after_update: what changes the model after an update, such as the balancing bias;
- `judge`: what may refuse an update;
- `group`: the processes that share the work;
- `on_step`: what looks at a finished step (receipt, samples, evaluation).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from unfreeze.core.batch import Batch
from unfreeze.core.errors import DataError
from unfreeze.models.recompute import RecomputePolicy
from unfreeze.parallel.processes.collectives import ALONE, Group
from unfreeze.train.events import emit_nonfinite, emit_start, train_fields
from unfreeze.train.interrupt import Interrupt
from unfreeze.train.memory import memory_fields, peak_bytes
from unfreeze.train.nonfinite import investigate
from unfreeze.train.optim import NonFinite
from unfreeze.train.state import OnFullDisk, State
from unfreeze.train.step import Judge, Objective, Rewrite, StepResult, accept, as_read, train_step
from unfreeze.train.suspects import Describe
from unfreeze.train.timer import SaveTimer
from unfreeze.train.together import save_together

Cursor = dict[str, Any]
OnStep = Callable[[State, StepResult], None]
"""Called after each step: state.step counts it, gradients are still there. What it raises stops the run."""


@dataclass(frozen=True)
class Fitted:
    """How a call of fit ended.

    reason  "interrupted": a signal came; all is saved, and the same command goes on.
    steps   finished steps of the whole run. All other numbers are of this call; None if it had no step.
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
    batches: Iterator[tuple[Batch, Cursor]],
    objective: Objective,
    *,
    recompute: RecomputePolicy,
    micro_batches: int = 1,
    rewrite: Rewrite = as_read,
    max_norm: float = 1.0,
    save_every: int = 0,
    save_minutes: float = 0,
    keep_saves: int = 2,
    on_full_disk: OnFullDisk = "stop",
    on_step: Sequence[OnStep] = (),
    judge: Judge = accept,
    group: Group = ALONE,
    describe: Describe | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Fitted:
    """Train from state.step to the last step of state.schedule, or to where a hook sets state.ended.

    batches        endless iterator of (Batch on the host, cursor behind it), from state.cursor on.
    recompute      one of models.RECOMPUTE.
    micro_batches  batches per optimizer step; the gradient is that of all their tokens at once.
    rewrite        called with them and the number of steps before; the same on every process.
    max_norm       limit of the global gradient norm; 0 doesn't clip.
    save_every     steps between saves; 0: none. At the end and on an interruption it always saves.
    save_minutes   of `clock` since the last save, after which it saves; 0: never. Process 0's clock decides.
    on_full_disk   "continue": a save without room on the disk is a warning, except the last of this call.
    group          every process calls fit with equal batches and an equal state; process 0 saves.
    describe       where a step is not finite, what suspects.jsonl says of a document beside its tokens (its
                   row, its text).
    Raises NonFinite at a NaN (weights and saves are those of before), DataError if the batches end, DiskFull
    if a save has no room.
    """
    run, model, steps = state.run, state.model, state.schedule.steps
    emit_start(state, group.size)
    group.meet(lambda: None)  # one that reads its weights from a slower disk
    state.check_copies(group)
    losses: list[float] = []
    tokens, seconds = 0, 0.0
    timer = SaveTimer(save_minutes, clock)
    with Interrupt() as interrupt:
        for step in range(state.step, state.step if state.ended else steps):
            # forward, backward and update; at a NaN the step is run again to find where it came up
            started = time.perf_counter()
            batch_list, cursor = take(batches, micro_batches, step, steps)
            batch_list = rewrite(batch_list, step)
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

            # the step counts: event, hooks
            seconds += advance(state, result, cursor, started, on_step)
            tokens += result.tokens
            losses = [*losses[:1], result.loss]  # the first and the last

            # a save where one is due, and always at the end
            # Several processes agree on it by the step's one read: a later signal is for the next step.
            stop = result.stop or (group.size == 1 and interrupt.requested)
            last = stop or state.finished
            due = result.save or (save_every and state.step % save_every == 0)
            if last or due:
                state.check_copies(group)
                save_together(state, keep_saves, "stop" if last else on_full_disk, group)
            if due or state.saved == state.step:  # a hook may have saved too
                timer.restart()
            if last:
                break
    fitted = Fitted(
        reason="done" if state.finished else "interrupted",
        steps=state.step,
        loss_first=losses[0] if losses else None,
        loss_last=losses[-1] if losses else None,
        tokens=tokens,
        tokens_per_second=tokens / seconds if seconds else None,
        peak_bytes=peak_bytes(model.device),
    )
    run.events.emit(
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
    """What follows an update: the step counts, its event is written, hooks look at it. -> the step's seconds.

    started: time.perf_counter() at the step's begin; it is the host's clock, on CUDA too.
    train_step's one read waits for the backward pass. The update still runs then, so its time falls into the
    next step. Reading CUDA events here would need a second wait.
    """
    for change in state.after_update if result.applied else ():
        change(result.expert_load)
    state.step, state.cursor = state.step + 1, cursor
    seconds = time.perf_counter() - started
    fields = train_fields(result, seconds, memory_fields(state.model.device), cursor)
    state.run.events.emit("train", state.step, **fields)
    for look in on_step:
        look(state, result)
    return seconds


def take(
    batches: Iterator[tuple[Batch, Cursor]], count: int, step: int, steps: int
) -> tuple[list[Batch], Cursor]:
    """The next `count` batches and the cursor behind the last of them."""
    taken = [pair for _, pair in zip(range(count), batches, strict=False)]
    if len(taken) < count:
        raise DataError(
            f"the data ended at step {step + 1} of {steps}: {len(taken)} of {count} batches of that step were"
            " left",
            next="lower steps, or iterate over more epochs",
        )
    return [batch for batch, _ in taken], taken[-1][1]
