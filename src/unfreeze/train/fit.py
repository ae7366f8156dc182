"""The one loop. Batches become a step, a step becomes an event, hooks look at it, saves keep it.

Features enter through these arguments, never through a flag here:
- the objective;
- `through`: how a layer is run (what it recomputes);
- State.after_update: what changes the model after an update, such as the balancing bias;
- `judge`: what may refuse an update;
- `group`: the processes that share the work;
- `on_step`: what looks at a finished step (receipt, samples, evaluation).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from torch import Tensor

from unfreeze.core.balance import balance
from unfreeze.core.batch import Batch
from unfreeze.core.errors import DataError
from unfreeze.parallel.collectives import ALONE, Group
from unfreeze.train.interrupt import Interrupt
from unfreeze.train.memory import memory_fields, peak_bytes
from unfreeze.train.nonfinite import investigate
from unfreeze.train.optim import NonFinite
from unfreeze.train.run import latest
from unfreeze.train.state import OnFullDisk, State, save
from unfreeze.train.step import Judge, Objective, StepResult, accept, train_step
from unfreeze.train.suspects import SUSPECTS, Describe

Cursor = dict[str, Any]
OnStep = Callable[[State, StepResult], None]
"""Called after each step, when state.step already counts it and gradients are still there. What it raises stops the run."""


@dataclass(frozen=True)
class Fitted:
    """How a call of fit ended. steps: finished steps of the whole run. Losses, rate and tokens are of this call (None if it had no step to do).

    reason "interrupted": a signal came; all is saved, and the same command goes on.
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
    through: Callable[..., Tensor],
    micro_batches: int = 1,
    max_norm: float = 1.0,
    save_every: int = 0,
    keep_saves: int = 2,
    on_full_disk: OnFullDisk = "stop",
    on_step: Sequence[OnStep] = (),
    judge: Judge = accept,
    group: Group = ALONE,
    describe: Describe | None = None,
) -> Fitted:
    """Train from state.step to the last step of state.schedule.

    batches        endless iterator of (Batch on the host, cursor of the batch after it); must begin at state.cursor.
    through        one of models.THROUGH.
    micro_batches  batches per optimizer step; the gradient is that of all their tokens at once.
    max_norm       limit of the global gradient norm; 0 doesn't clip.
    save_every     steps between saves; 0: only at the end and on an interruption, where it always saves.
    on_full_disk   "continue": a save without room on the disk is a warning, except the one this call ends with.
    group          every process calls fit with equal batches and an equal state; process 0 saves.
    describe       what suspects.jsonl says of a document beside its tokens (its row, its text), where a step is not finite.
    Raises NonFinite at a NaN (weights and saves are those of before), DataError if the batches end, DiskFull if a save has no room.
    """
    run, model, steps = state.run, state.model, state.schedule.steps
    emit_start(state)
    group.check_replicas(state.tensors())
    losses, tokens, seconds = [], 0, 0.0
    with Interrupt() as interrupt:
        for step in range(state.step, steps):
            started = time.perf_counter()
            batch_list, cursor = take(batches, micro_batches, step, steps)
            try:
                result = train_step(
                    model, state.optimizer, batch_list, objective,
                    learning_rate=state.schedule.learning_rate(step), max_norm=max_norm, through=through,
                    group=group, judge=judge,
                )  # fmt: skip
            except NonFinite as error:
                line = investigate(
                    model, batch_list, objective, through=through, group=group, folder=run.path, step=step + 1, describe=describe
                )  # fmt: skip
                raise _explain(error, line, state) from error
            duration = advance(state, result, cursor, started, on_step)
            losses, tokens, seconds = [*losses[:1], result.loss], tokens + result.tokens, seconds + duration

            stop = group.any(interrupt.requested)  # read once: a signal after this line is for the next step
            last = stop or state.step == steps
            if last or (save_every and state.step % save_every == 0):
                group.check_replicas(state.tensors())
                group.lead(partial(save, state, keep_saves, "stop" if last else on_full_disk))
            if stop:
                break
    fitted = Fitted(
        reason="done" if state.step >= steps else "interrupted",
        steps=state.step,
        loss_first=losses[0] if losses else None,
        loss_last=losses[-1] if losses else None,
        tokens=tokens,
        tokens_per_second=tokens / seconds if seconds else None,
        peak_bytes=peak_bytes(model.device),
    )
    run.events.emit("end", state.step, reason=fitted.reason, steps=fitted.steps, tokens_per_second=fitted.tokens_per_second)
    return fitted


def emit_start(state: State) -> None:
    """The start event: how many steps, and whether the run goes on."""
    config = state.run.config
    words = {"model": str(config.get("model", "")), "data": str(config.get("data", ""))}
    state.run.events.emit("start", state.step, steps=state.schedule.steps, resumed=state.step > 0, **words)


def advance(state: State, result: StepResult, cursor: Cursor, started: float, on_step: Sequence[OnStep]) -> float:
    """What follows an update: the step counts, its event is written, hooks look at it. -> its seconds since `started` (perf_counter).

    It is the host's clock, on CUDA too. train_step's one read waits for the backward pass; the update still
    runs then, and is counted in the next step. Reading CUDA events here would need a second wait.
    """
    for change in state.after_update if result.applied else ():
        change(result.expert_load)
    state.step, state.cursor = state.step + 1, cursor
    seconds = time.perf_counter() - started
    state.run.events.emit("train", state.step, **_train_fields(result, seconds, memory_fields(state.model.device)))
    for look in on_step:
        look(state, result)
    return seconds


def take(batches: Iterator[tuple[Batch, Cursor]], count: int, step: int, steps: int) -> tuple[list[Batch], Cursor]:
    """The next `count` batches and the cursor behind the last of them."""
    taken = [pair for _, pair in zip(range(count), batches, strict=False)]
    if len(taken) < count:
        raise DataError(
            f"the data ended at step {step + 1} of {steps}: {len(taken)} of {count} batches of that step were left",
            next="lower steps, or iterate over more epochs",
        )
    return [batch for batch, _ in taken], taken[-1][1]


def _train_fields(result: StepResult, seconds: float, memory: dict[str, int]) -> dict[str, Any]:
    """The fields of a train event: plain numbers, all finite (train_step raises before a NaN gets here; a metric may still be null)."""
    return {
        "loss": result.loss,
        "tokens": result.tokens,
        "supervised_tokens": result.supervised_tokens,
        "seconds": seconds,
        "learning_rate": result.learning_rate,
        "grad_norm": result.grad_norm,
        **memory,
        **{name: value if math.isfinite(value) else None for name, value in result.metrics.items()},
        **(_expert_fields(result.expert_load) if result.expert_load else {}),
        **({"warning": result.warning, "applied": result.applied} if result.warning else {}),
    }


def _expert_fields(load: dict[int, list[int]]) -> dict[str, Any]:
    """Tokens per expert, and how evenly they fall: max violation, entropy and dead count of each layer
    (docs/trust.md M3)."""
    return {
        "expert_load": {str(layer): counts_E for layer, counts_E in load.items()},
        "expert_balance": {str(layer): balance(counts_E) for layer, counts_E in load.items()},
    }


def _explain(error: NonFinite, line: str, state: State) -> NonFinite:
    """Leave a train event without a loss for the report, and say where the run can go on. line: what the replay found."""
    step, last = state.step + 1, latest(state.run.path)
    state.run.events.emit("train", step, loss=None, grad_norm=None, error=f"{error.message}. {line}")
    kept = f"the last save is {last}" if last else "nothing was saved before"
    return NonFinite(
        f"step {step}: {error.message}. {line}. The weights were not updated; {kept}",
        next=f"look at the rows of this step ({state.run.path / SUSPECTS}), lower learning_rate (a tenth), or lengthen the warm-up",
    )
