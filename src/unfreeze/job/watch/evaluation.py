"""Scores of tasks while a run trains (--watch.eval), as "score" events with intervals.

They are the tasks of `unfreeze eval`, asked of the model as it is, before the first step, every N steps and
after the last. The first measure of the first task says which save is the best. Gradients, random state and
expert counts are unchanged afterwards, so a run trains alike with and without.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from unfreeze.core.errors import ConfigError, UserError
from unfreeze.job.watch.best import Best

if TYPE_CHECKING:
    from unfreeze.config.tables import Data, Watch
    from unfreeze.data.clean.leaks import Match, Passage
    from unfreeze.evaluate.tasks import Scores, Task
    from unfreeze.generate.model import Model
    from unfreeze.parallel.plan import Plan
    from unfreeze.parallel.processes.collectives import Group
    from unfreeze.train.run import Run
    from unfreeze.train.state import State
    from unfreeze.train.step import StepResult

DRAWS = 2000
COMPARED = 200_000
"""Training rows that are compared with the evaluation's."""


class Evaluation:
    """Hook of fit() that scores tasks; process 0 does it while the others wait.

    If a forward pass needs all processes, all score, with the tokens that process 0 samples.

    every  steps between scores; 0: only before the first step and after the last
    keep   saves the state, if the first measure of the first task is better than before (best.py)
    """

    def __init__(
        self,
        state: State,
        tasks: Sequence[Task],
        model: Model,
        *,
        every: int,
        keep: Callable[[State], bool],
        patience: int,
        group: Group,
    ):
        self._state, self._tasks, self._model, self._every, self._group = state, tasks, model, every, group
        self._best = Best(keep, patience=patience, agreed=group.any, by=tasks[0].name)

    def first(self) -> None:
        """Score the model before the first step. A resumed run has that already."""
        if self._state.step == 0:
            self._scored()

    def __call__(self, state: State, result: StepResult) -> None:
        last = state.step == state.schedule.steps
        if last or (self._every and state.step % self._every == 0):
            self._best(state, self._scored(), last=last)

    def _scored(self) -> float | None:
        """Score all tasks and emit their events. -> the score that chooses, lower is better."""
        with self._state.model.looking():
            if self._group.lockstep:
                records = self._records()
            else:
                records = self._group.on_rank0(self._records) or []
        # rounding may differ between processes: all take the same numbers
        records = json.loads(self._group.of_first(json.dumps(records).encode()))
        for record in records:
            kind = "warning" if "message" in record else "score"
            self._state.run.events.emit(kind, self._state.step, **record)
        first = next((record for record in records if record.get("chooses")), None)
        if first is None or first["value"] is None:
            return None
        return -first["value"] if first["higher_is_better"] else first["value"]

    def _records(self) -> list[dict[str, Any]]:
        from unfreeze.evaluate.kept import Kept

        records: list[dict[str, Any]] = []
        for task in self._tasks:
            started = time.perf_counter()
            try:
                measures = task.score(self._model, Kept())
            except UserError as error:
                records.append({"message": f"{task.name} has no score: {error.message}"})
                continue
            took = time.perf_counter() - started
            for number, each in enumerate(measures):
                chooses = task is self._tasks[0] and not number
                seconds = 0.0 if number else took  # once for all measures of a task
                records.append({**score_record(task.name, each), "chooses": chooses, "seconds": seconds})
        return records


def score_record(task: str, scores: Scores) -> dict[str, Any]:
    """Return the fields of a score event: value with its interval, over the items that have one."""
    from unfreeze.evaluate.table import measure_record

    record = measure_record(task, {"": scores}, [], draws=DRAWS, seed=0)
    (one,) = record["scores"]
    named = {name: record[name] for name in ("task", "measure", "unit", "higher_is_better")}
    return {**named, **{name: one[name] for name in ("value", "low", "high", "items")}}


def tasks_of_run(watch: Watch, data: Data, folder: Run, group: Group) -> list[Task]:
    """Return the tasks of [watch] eval, checked, and warn where the training rows hold rows of theirs.

    Raises UserError for a task that is not there, before any weight is loaded.
    """
    if not watch.eval:
        return []
    from unfreeze.evaluate.tasks import Settings
    from unfreeze.job.tasks import split_names, tasks_of

    settings = Settings(limit=watch.eval_limit, max_new_tokens=watch.eval_tokens)
    tasks = group.in_turn(lambda first: tasks_of(split_names(watch.eval), settings, folder.leaving))
    if folder.step == 0:
        matches = group.on_rank0(lambda: leaks(data, tasks)) or []
        for message in leak_words(matches):
            folder.events.emit("warning", 0, message=message)
    return tasks


def refuse_far(plan: Plan, tasks: Sequence[Task]) -> None:
    """Raise ConfigError if weights are not on the device: each token of an answer would move them all."""
    if tasks and (plan.layout.experts != "device" or plan.layout.rest != "device"):
        where = plan.layout.experts if plan.layout.experts != "device" else plan.layout.rest
        raise ConfigError(
            f"watch.eval: weights are on {where}, and each token of an answer would move them all",
            next="leave it out; afterwards: unfreeze eval RUN --tasks …",
        )


def leaks(data: Data, tasks: Sequence[Task]) -> list[Match]:
    """Return the training rows that hold rows of the tasks (data/clean/leaks.py)."""
    from unfreeze.data.clean.leaks import contaminated

    evaluation = [passage for task in tasks for passage in passages_of(task)]
    return contaminated(training_passages(data), evaluation) if evaluation else []


def training_passages(data: Data) -> Iterator[Passage]:
    """Yield the first COMPARED training rows; bad ones are left to the encoder."""
    from unfreeze.data import read_rows
    from unfreeze.data.clean.leaks import passage_of
    from unfreeze.data.rows.sources import files_of

    left = COMPARED
    for file in (path for name in data.files for path in files_of(name, say=lambda line: None)):
        for row in islice(read_rows(file, lambda bad: None, data.columns), left):
            left -= 1
            if (passage := passage_of(row, file.name)) is not None:
                yield passage


def passages_of(task: Task) -> list[Passage]:
    """Return the rows of a task as passages; [] for one that draws its texts (needle)."""
    from unfreeze.data.clean.leaks import Passage, passage_of
    from unfreeze.evaluate.harness import HarnessTask
    from unfreeze.evaluate.rows import RowsTask
    from unfreeze.evaluate.text import TextTask

    if isinstance(task, RowsTask):
        return [each for row in task.rows if (each := passage_of(row, task.file.name)) is not None]
    if isinstance(task, TextTask):
        return [Passage(f"{task.file.name} text {i + 1}", text) for i, text in enumerate(task.texts)]
    if isinstance(task, HarnessTask):
        return [Passage(name, text) for name, text in task.texts()]
    return []


def leak_words(matches: Sequence[Match]) -> list[str]:
    """Return a sentence about the matches; [] without any."""
    if not matches:
        return []
    first, rows = matches[0], len({match.evaluation for match in matches})
    what = "the same prompt" if first.kind == "exact" else f"shared: {first.words[:60]}"
    return [
        f"{len(matches):,} training rows hold {rows:,} evaluation rows: scores may show what was memorised;"
        f" first: {first.training} holds {first.evaluation} ({what})"
    ]
