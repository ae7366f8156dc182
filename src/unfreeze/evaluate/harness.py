"""Tasks of lm-eval (EleutherAI's Language Model Evaluation Harness) as tasks of `unfreeze eval`.

A name of its catalogue (the data come from the Hub, or from its cache), or the user's own FILE.yaml. lm-eval
writes the requests, filters the answers and scores each document; how documents become a number with an
interval is evaluate/bootstrap.py's. Groups such as mmlu are one task: all documents of its parts.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from unfreeze.core.errors import ConfigError, DataError, UserError, nearest
from unfreeze.evaluate.harness_model import harness_model, needs_lm_eval
from unfreeze.evaluate.kept import Kept
from unfreeze.evaluate.tasks import Scores, Settings, Shown, unseen
from unfreeze.generate.model import Model

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

YAML = (".yaml", ".yml")
SEED = 1234
"""lm-eval's own, of few-shot examples."""
MEANS = ("mean", "nanmean")
PERPLEXITIES = ("perplexity", "weighted_perplexity")
NATS = ("bits_per_byte",)
AT_ONCE = "{} is one number of all documents: it has no interval"


def harness_tasks(names: Sequence[str], settings: Settings | None = None) -> list[HarnessTask]:
    """Return a task for each name of lm-eval's catalogue or file of a task, in order.

    Raises ConfigError if lm-eval is not installed. `check` says whether a task is there.
    """
    needs_lm_eval()
    return [HarnessTask(name, settings or Settings()) for name in names]


class HarnessTask:
    """One task, or one group of tasks, of lm-eval."""

    counts = "request"

    def __init__(self, name: str, settings: Settings):
        self.name, self.settings = name, settings
        self.digest = ""
        self._tasks: dict[str, Any] = {}

    def check(self) -> None:
        """Load the task and its documents.

        Raises ConfigError for a task that does not exist, DataError for data that cannot be had.
        """
        with quiet(), seeded():
            self._tasks = _loaded(self.name)
        hashed = hashlib.blake2b(_version().encode(), digest_size=16)
        for name, task in self._tasks.items():
            if getattr(task, "UNSAFE_CODE", False):
                raise ConfigError(f"{name} runs code that a model writes", next="use another task")
            config = {key: value for key, value in task.dump_config().items() if key != "metadata"}
            hashed.update(json.dumps([name, config], default=_plain, sort_keys=True).encode())
            for _, document in task.doc_iterator(limit=self.settings.limit):
                hashed.update(json.dumps(document, default=_plain, sort_keys=True).encode())
        hashed.update(repr((self.settings.max_new_tokens, self.settings.limit, self.settings.chat)).encode())
        self.digest = hashed.hexdigest()

    def texts(self) -> Iterator[tuple[str, str]]:
        """Yield (name, every text) of each document, to look for in training rows."""
        for name, task in self._tasks.items():
            for number, document in task.doc_iterator(limit=self.settings.limit):
                fields = document if isinstance(document, dict) else {"text": str(document)}
                texts = [text for value in fields.values() for text in _texts(value)]
                yield f"{name} document {number}", "\n".join(texts)

    def score(self, model: Model, kept: Kept, shown: Shown = unseen) -> list[Scores]:
        """Score all documents. Raises UserError for a request that the model cannot take."""
        if not self._tasks:
            self.check()
        lm = harness_model(
            model, kept, shown, batch=self.settings.batch, new_tokens=self.settings.max_new_tokens
        )
        requests: dict[str, list[Any]] = {}
        with quiet(), seeded():
            for task in self._tasks.values():
                task.set_fewshot_seed(seed=SEED)
                task.build_all_requests(limit=self.settings.limit, **_chat(lm, self.settings))
                for request in task.instances:
                    requests.setdefault(request.request_type, []).extend([request] * request.repeats)
        for kind, each in requests.items():
            if kind not in ("loglikelihood", "loglikelihood_rolling", "generate_until"):
                raise ConfigError(f"{self.name} asks for {kind}, which text models have not")
            for request, answer in zip(each, getattr(lm, kind)(each), strict=True):
                request.resps.append(answer)
        with quiet(), seeded():
            return self._scores()

    def _scores(self) -> list[Scores]:
        measures: dict[str, Measure] = {}
        for name, task in self._tasks.items():
            task.apply_filters()
            for metric, (key, documents) in results_of(task, self.settings.limit):
                if metric not in task.higher_is_better():
                    continue
                of = measures.setdefault(key, Measure(key))
                aggregation = task.aggregation()[metric]
                of.add(name, documents, aggregation, better=bool(task.higher_is_better()[metric]))
        if not measures:
            raise DataError(f"{self.name} has no measure", next="give it a metric_list")
        return [each.scores(parts=len(self._tasks) > 1) for each in measures.values()]


class Measure:
    """One measure, document by document, of all tasks of a group."""

    def __init__(self, key: str):
        self.key = key
        self.items: list[str] = []
        self.values: list[float | None] = []
        self.weights: list[float] = []
        self.parts: dict[str, list[int]] = {}
        self.exponent = self.whole = False
        self.better = True

    def add(self, task: str, documents: Mapping[int, Any], aggregation: Any, *, better: bool) -> None:
        """Add the values of a task's documents. aggregation: lm-eval's function of their list."""
        self.better = better
        by = getattr(aggregation, "__name__", "")
        first = len(self.items)
        each: dict[int, tuple[float | None, float]] = {}
        if by in MEANS:
            each = {number: (_number(value), 1.0) for number, value in documents.items()}
        elif by == "perplexity":
            self.exponent = True
            each = {number: (-float(value), 1.0) for number, value in documents.items()}
        elif by in (*PERPLEXITIES, *NATS):
            self.exponent = by in PERPLEXITIES
            unit = math.log(2) if by in NATS else 1.0
            sized = {number: pair for number, pair in documents.items() if pair[1]}
            each = {number: (-log_p / (size * unit), float(size)) for number, (log_p, size) in sized.items()}
        else:  # of all documents together, such as bleu
            self.whole = True
            self.items.append(f"{task}: all")
            self.values.append(_number(aggregation(list(documents.values()))))
            self.weights.append(float(len(documents)))
            self.parts[task] = [first]
            return
        self.items += [f"{task}: document {number}" for number in each]
        self.values += [value for value, _ in each.values()]
        self.weights += [weight for _, weight in each.values()]
        self.parts[task] = list(range(first, len(self.items)))

    def scores(self, *, parts: bool) -> Scores:
        """parts: with a row for each task of a group."""
        even = all(weight == 1.0 for weight in self.weights)
        return Scores(
            self.key,
            self.items,
            self.values,
            () if even else self.weights,
            unit="share" if self.better and even and not self.exponent else "",
            higher_is_better=self.better,
            exponent=self.exponent,
            grid={name: {self.key: numbers} for name, numbers in self.parts.items()} if parts else {},
            notes=[AT_ONCE.format(self.key)] if self.whole else (),
        )


def results_of(task: Any, limit: int | None) -> Iterator[tuple[str, tuple[str, dict[int, Any]]]]:
    """Yield (metric, (its name with the filter, document -> its value)) of a task with filtered answers."""
    by_document: dict[int, list[Any]] = {}
    for request in task.instances:
        by_document.setdefault(request.doc_id, []).append(request)
    for requests in by_document.values():
        requests.sort(key=lambda request: request.idx)
    filters = list(task.instances[0].filtered_resps)
    for name in filters:
        values: dict[str, dict[int, Any]] = {}
        for number, document in task.doc_iterator(limit=limit):
            answers = [request.filtered_resps[name] for request in by_document[number]]
            for metric, value in task.process_results(document, answers).items():
                values.setdefault(metric, {})[number] = value
        for metric, documents in values.items():
            yield metric, (metric if name == "none" else f"{metric},{name}", documents)


def _chat(lm: Any, settings: Settings) -> dict[str, Any]:
    """Return how build_all_requests renders with the model's chat template; {} for plain text."""
    if not settings.chat:
        return {}
    names = {"chat_template": lm.apply_chat_template, "tokenizer_name": lm.tokenizer_name}
    return {"apply_chat_template": True, "fewshot_as_multiturn": True, **names}


def _loaded(name: str) -> dict[str, Any]:
    """Return lm-eval's tasks of a name or a file, in order."""
    own = Path(name).expanduser()
    if own.suffix in YAML:
        if not own.is_file():
            raise ConfigError(f"tasks: there is no file {name}", next="--tasks FILE.yaml")
        spec: str = str(own.resolve())
        manager = _manager(False)
    else:
        spec, manager = name, _manager(True)
        if name not in manager.all_tasks:
            near = nearest(name, manager.all_tasks)
            raise ConfigError(f"tasks: lm-eval has no task {name!r}{near}", next="lm_eval ls tasks")
    try:
        return dict(manager.load([spec])["tasks"])
    except UserError:
        raise
    except ConnectionError as fault:
        raise DataError(
            f"tasks: the data of {name} are not on this machine and the Hub cannot be reached",
            next="run it once with a network; HF_HOME keeps the data",
        ) from fault
    except Exception as fault:  # lm-eval, its YAML and its data libraries raise anything
        why = str(fault).strip().splitlines() or [type(fault).__name__]
        raise DataError(f"tasks: {name}: {why[0][:100]}", next="mend the task's file") from fault


@cache
def _manager(catalogue: bool) -> TaskManager:
    """Return the catalogue of lm-eval's tasks (14,683 in 0.4.13: about 7 s), or an empty one for files."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_defaults=catalogue)


def _version() -> str:
    from importlib.metadata import version

    return f"lm-eval {version('lm_eval')}"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep lm-eval's bars and log lines off the screen. No model runs inside."""
    levels = {name: logging.getLogger(name) for name in ("lm_eval", "datasets")}
    before = {name: each.level for name, each in levels.items()}
    try:
        for each in levels.values():
            each.setLevel(logging.ERROR)
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        for name, each in levels.items():
            each.setLevel(before[name])


@contextlib.contextmanager
def seeded() -> Iterator[None]:
    """Give tasks that draw the seeds of lm-eval, and the caller its random state back."""
    state, numbers = random.getstate(), np.random.get_state()
    random.seed(0)
    np.random.seed(SEED)
    try:
        yield
    finally:
        random.setstate(state)
        np.random.set_state(numbers)


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, list | tuple):
        return [text for each in value for text in _texts(each)]
    return [text for each in value.values() for text in _texts(each)] if isinstance(value, dict) else []


def _number(value: Any) -> float | None:
    """Return a metric's value as a number; None for one that is none, or NaN."""
    if isinstance(value, bool | int | float | np.number) and math.isfinite(value):
        return float(value)
    return None


def _plain(value: Any) -> str:
    """Return a text for what JSON does not know, the same in every process."""
    return getattr(value, "__name__", None) or type(value).__name__
