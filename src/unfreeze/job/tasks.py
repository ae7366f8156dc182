"""Tasks of an evaluation by their names, for `unfreeze eval` and the --eval of a run.

rows:FILE[:METRIC]   greedy answers to a file's prompts; METRIC: exact (default), contains, numeric, regex,
                     math-verify, choice, or my.py[:function]
ppl:FILE             bits per byte and perplexity of a text
needle, recall       grids of hidden sentences and of pairs
FILE.yaml, a name    a task of lm-eval
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from unfreeze.core.errors import ConfigError, looked_in, nearest
from unfreeze.evaluate.metrics import CHOICE, GUARDED, METRICS, SIMPLE, GradeAll, simple
from unfreeze.evaluate.recall import RecallTask
from unfreeze.evaluate.rows import RowsTask
from unfreeze.evaluate.tasks import Settings, Task
from unfreeze.evaluate.text import TextTask

GRIDS = ("needle", "recall")
FORMS = ("rows:FILE", "ppl:FILE", *GRIDS)
TABLES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".feather")
TEXTS = (".txt", ".md")
METRIC = "metric"
"""Name of the function in my.py, if none is written after a colon; a file of rewards has `reward`."""


def split_names(written: Sequence[str]) -> list[str]:
    """Return the names in words that are each one or several, with commas. Raises ConfigError for none."""
    names = [name.strip() for word in written for name in word.split(",") if name.strip()]
    if not names:
        raise ConfigError("tasks is empty", next=f"--tasks {FORMS[0]},{GRIDS[0]}")
    return list(dict.fromkeys(names))


def tasks_of(
    names: Sequence[str], settings: Settings, ends: ExitStack, say: Callable[[str], None] = lambda line: None
) -> list[Task]:
    """Return the tasks, checked: their files are read, and processes of their metrics run until `ends`.

    Raises ConfigError for a name or a metric that does not exist, DataError for a file.
    """
    others = [name for name in names if not is_own(name)]
    theirs = dict(zip(others, _of_harness(others, settings), strict=True)) if others else {}
    tasks = [theirs.get(name) or _own(name, settings, ends, say) for name in names]
    for task in tasks:
        task.check()
    return tasks


def is_own(name: str) -> bool:
    """Return True for a task of this package. Raises ConfigError for one that is nearly such."""
    kind, colon, rest = name.partition(":")
    if kind in ("rows", "ppl"):
        if not rest:
            raise ConfigError(f"tasks: {name!r} has no file", next=f"--tasks {kind}:FILE")
        return True
    if name in GRIDS:
        return True
    if meant := _of_file(name):
        raise ConfigError(
            f"tasks: {name!r} is a file; what is scored with it is missing", next=f"--tasks {meant}"
        )
    near = nearest(kind, ("rows", "ppl")) if colon else nearest(name, GRIDS)
    if colon or name in METRICS or (near and not name.endswith((".yaml", ".yml"))):
        raise ConfigError(f"tasks: there is no task {name!r}{near}", next=f"--tasks {','.join(FORMS)}")
    return False


def _of_file(name: str) -> str:
    """Return the task of a data file or a text that is named alone; "" for another name."""
    file, _, metric = name.partition(":")
    suffix = Path(file).suffix.lower()
    if suffix in TEXTS and not metric:
        return f"ppl:{file}"
    return f"rows:{file}:{metric or 'contains'}" if suffix in TABLES else ""


def _own(name: str, settings: Settings, ends: ExitStack, say: Callable[[str], None]) -> Task:
    kind, _, rest = name.partition(":")
    if name in GRIDS:
        return RecallTask(name, settings)
    if kind == "ppl":
        return TextTask(name, _file(rest, name), settings)
    written, metric = _file_and_metric(rest)
    file = _file(written, name)
    if metric in SIMPLE:
        return RowsTask(name, file, metric, settings, simple(metric))
    if metric == CHOICE:
        return RowsTask(name, file, metric, settings, None)
    grade, check, identity = _in_processes(metric, ends, say)
    own = metric not in GUARDED
    return RowsTask(name, file, metric, settings, grade, own=own, check_of=check, identity=identity)


def _file_and_metric(rest: str) -> tuple[str, str]:
    """Split FILE[:METRIC]; the metric may be my.py:name. Raises ConfigError for an unknown metric."""
    before, colon, last = rest.rpartition(":")
    if not colon or Path(rest).is_file():
        return rest, "exact"
    if before.endswith(".py"):
        file, colon, python = before.rpartition(":")
        return (file, f"{python}:{last}") if colon else (before, last)
    if last in METRICS or last.endswith(".py"):
        return before, last
    raise ConfigError(
        f"tasks: there is no metric {last!r}{nearest(last, METRICS)}",
        next=f"one of {', '.join(METRICS)}, or my.py",
    )


def _file(written: str, task: str, example: str = "") -> Path:
    path = Path(written).expanduser()
    if not path.is_file():
        there = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        raise ConfigError(
            f"tasks: {task!r}: there is no file {written}{looked_in(written)}{nearest(path.name, there)}",
            next=f"--tasks {example or task.partition(':')[0] + ':FILE'}",
        )
    return path


def _in_processes(
    metric: str, ends: ExitStack, say: Callable[[str], None]
) -> tuple[GradeAll, Callable[..., None], str]:
    """Start the processes of a metric that is the user's, or can take forever."""
    from unfreeze.evaluate.guarded import BY_NAME
    from unfreeze.rollout.graders import Graders

    if metric == "math-verify" and importlib.util.find_spec("math_verify") is None:
        raise ConfigError("the metric math-verify needs a library", next="pip install math-verify")
    code = BY_NAME.get(metric) or _named(metric)
    graders = ends.enter_context(Graders(code, say=say, field="metric"))
    return graders.grade, graders.check, graders.digest


def _named(metric: str) -> str:
    """Return my.py:function; without a name it is `metric`, or `reward` if the file defines only that."""
    file, colon, _ = metric.rpartition(":")
    path = _file(file if colon else metric, metric, "rows:FILE:my.py")
    if colon:
        return metric
    text = path.read_text(encoding="utf-8", errors="replace")
    defined = [name for name in (METRIC, "reward") if f"def {name}(" in text]
    return f"{metric}:{(defined or [METRIC])[0]}"


def _of_harness(names: Sequence[str], settings: Settings) -> Sequence[Task]:
    """Return tasks of lm-eval: names that it knows, and YAML files."""
    from unfreeze.evaluate.harness import harness_tasks

    return harness_tasks(names, settings)
