"""A run whose training loop the caller writes; everything else is as in job.run.

    job = unfreeze.prepare("run.toml")
    for batch in job.batches:
        job.forward_backward(batch)
        job.optim_step()

Leaving the loop (its end, `break`, an exception, Ctrl-C) saves. The same call resumes there.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from unfreeze.config.training import TrainingConfig
from unfreeze.core.closing import Closing
from unfreeze.core.command import Common
from unfreeze.core.errors import ConfigError
from unfreeze.core.run_folder import refuse_other_files
from unfreeze.job.end.folder import SAME_CALL, live
from unfreeze.job.end.result import finish
from unfreeze.job.job import Job, is_written, open_job, target_of
from unfreeze.job.opening.device import pick_device
from unfreeze.job.opening.precision import settled
from unfreeze.job.opening.processes import agreed_together, alone, refuse_uneven
from unfreeze.job.parts import Parts
from unfreeze.job.planning.plan import as_it_began

if TYPE_CHECKING:
    from unfreeze.core.batch import Batch
    from unfreeze.data.packing.source import Cursor
    from unfreeze.models import Decoder
    from unfreeze.train.state import State
    from unfreeze.train.step import Gradients, Objective, StepResult


class Loop(Closing):
    """An opened run: `batches`, `forward_backward`, `optim_step`.

    It saves and closes when the loop is left, or on `close`.
    """

    def __init__(self, config: TrainingConfig, parts: Parts, common: Common):
        refuse_other_files(config.run_dir)
        refuse_uneven(config)
        begun = alone(config, parts, common)

        from unfreeze.parallel.processes.collectives import open_group
        from unfreeze.train.timer import SaveTimer

        device = pick_device(config.memory.device, config.memory.threads)
        self._common, self._stack = common, ExitStack()
        self._gradients: Gradients | None = None
        self._started, self._save_is_due = 0.0, False
        self._cursor: Cursor = {}
        with self._stack as opening:
            group = opening.enter_context(open_group(device, config.run_dir))
            config, start = begun or agreed_together(config, parts, common, group)
            config, dtype = settled(as_it_began(config, group), start, device, group)
            folder = opening.enter_context(live(config, common, parts.recipe, "", group))
            if group.any(is_written(folder, parts)):
                raise ConfigError(
                    f"{folder.path} is finished; nothing is left to train",
                    next="give more epochs or steps, or another out",
                )
            self.job: Job = open_job(config, parts, common, device, group, folder, dtype, start)
            self._stack = opening.pop_all()  # opened without errors; close() closes it
        self._hooks, self._judge = self.job.hooks(), parts.judge(self.job)
        self._timer = SaveTimer(config.save.minutes)
        self._open = True

    @property
    def model(self) -> Decoder:
        return self.job.state.model

    @property
    def state(self) -> State:
        return self.job.state

    @property
    def batches(self) -> Iterator[list[Batch]]:
        """Yield the micro-batches of each step, up to the last step or an early stop.

        A step counts once optim_step has run.
        """
        from unfreeze.train.events import emit_start
        from unfreeze.train.fit import take
        from unfreeze.train.together import save_together

        state, saves = self.state, self.job.config.save
        emit_start(state, self.job.group.size)
        self._timer.restart()
        for hook in self.job.validation:
            hook.first()
        try:
            while not state.finished:
                before = state.step
                self._started = time.perf_counter()
                micro_batches, self._cursor = take(self.job.source, before, state.schedule.steps)
                yield micro_batches
                due = self._save_is_due or (saves.every and state.step % saves.every == 0)
                if due and state.step > before:
                    save_together(state, saves.keep, saves.on_full_disk, self.job.group)
                    self._timer.restart()
        finally:
            self.close()

    def forward_backward(
        self, batch: Batch | Sequence[Batch], objective: Objective | None = None
    ) -> Gradients:
        """Compute loss and gradients of a step: one batch, or all its micro-batches. Changes no weight.

        objective: used instead of the run's own.
        Raises ConfigError on a second call before optim_step: the loss of a step is divided once, by the
        tokens of all its micro-batches, so they come in one call.
        """
        from unfreeze.core.batch import Batch
        from unfreeze.train.step import forward_backward

        if self._gradients is not None:
            raise ConfigError(
                "forward_backward was called twice without optim_step; a step takes all its micro-batches in"
                " one call",
                next="job.forward_backward(batch) with the whole list that job.batches gives",
            )
        state = self.state
        self._gradients = forward_backward(
            state.model,
            state.optimizer,
            [batch] if isinstance(batch, Batch) else batch,
            objective or self.job.placed.objective,
            recompute=self.job.recompute,
            group=self.job.group,
            save=lambda: self.job.group.rank == 0 and self._timer.due(),
        )
        return self._gradients

    def optim_step(self, learning_rate: float | None = None) -> StepResult:
        """Update the weights with the gradients of forward_backward, and count the step.

        learning_rate: used instead of the schedule's.
        """
        from unfreeze.train.fit import advance
        from unfreeze.train.step import optim_step

        if self._gradients is None:
            raise ConfigError("optim_step has no gradients", next="call job.forward_backward(batch) first")
        state = self.state
        rate = state.schedule.learning_rate(state.step) if learning_rate is None else learning_rate
        gradients, self._gradients = self._gradients, None
        result = optim_step(
            state.optimizer,
            gradients,
            learning_rate=rate,
            max_norm=self.job.config.optimizer.clip,
            judge=self._judge,
        )
        self._save_is_due = result.save
        advance(state, result, self._cursor, self._started, self._hooks)
        return result

    def close(self) -> None:
        """Save, write the result, close the folder.

        Called when the loop is left. A second call does nothing.
        """
        from unfreeze.train.together import save_together

        if not self._open:
            return
        self._open = False
        job, state = self.job, self.state
        finished = state.finished
        with self._stack:
            save_together(state, job.config.save.keep, group=job.group)
            state.run.events.emit(
                "end",
                state.step,
                reason="done" if finished else "interrupted",
                steps=state.step,
                tokens_per_second=None,
            )
            job.write(finished=finished)
            extra = job.setup.parts.trained.as_result(target_of(state.run, job.setup.parts))
            job.group.on_rank0(lambda: finish(state.run.path, self._common, SAME_CALL, **extra))
