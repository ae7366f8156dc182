"""unfreeze eval MODEL_OR_RUN … --tasks rows:test.jsonl:exact,ppl:book.txt,needle: scores with intervals.

Of a run the model before it is scored too, on the same items: before, after, and the difference with its
interval (paired bootstrap). Several runs are compared with each other. What a model answers is kept, so that
the same command continues after Ctrl-C.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field
from tyro.conf import Positional, arg

from unfreeze.config.columns import Columns
from unfreeze.config.device import Device
from unfreeze.config.parse import Folder, Frozen, ModelName, parse, writing
from unfreeze.core.command import Common
from unfreeze.core.draws import SEEDS
from unfreeze.core.errors import UserError
from unfreeze.core.field import about
from unfreeze.core.files import write_file
from unfreeze.core.units import plural
from unfreeze.job.opening.device import pick_device, say
from unfreeze.report import scores as tables
from unfreeze.report.scores import PAGE, RECORD, read_scores, write_scores

if TYPE_CHECKING:
    from unfreeze.commands.eval_models import Scored, Subjects
    from unfreeze.evaluate.kept import Kept
    from unfreeze.evaluate.tasks import Scores, Task
    from unfreeze.generate.model import Model

KEPT = "evaluations-kept.jsonl"
SAY_EVERY = 10.0  # seconds between progress lines


class Config(Frozen):
    models: Annotated[tuple[ModelName, ...], Positional, arg(metavar="MODEL_OR_RUN")] = Field(
        min_length=1, max_length=6, description="runs, checkpoints, adapter folders or Hugging Face ids"
    )
    tasks: tuple[str, ...] = Field(
        min_length=1,
        description="rows:FILE[:METRIC], ppl:FILE, needle, recall, FILE.yaml or a task of lm-eval; METRIC:"
        " exact, contains, numeric, regex, math-verify, choice, my.py",
    )
    columns: Columns = Field(
        default=(),
        description="column names in the files, FIELD=COLUMN",
        json_schema_extra=about("Options", name="data.columns", alias="columns"),
    )
    limit: int | None = Field(default=None, ge=1, description="most items of a task; default all")
    max_new_tokens: int = Field(default=256, ge=1, description="most tokens of an answer")
    batch: int | None = Field(
        default=None, ge=1, description="items at once; default as many as memory allows"
    )
    lengths: tuple[int, ...] = Field(
        default=(), description="tokens of the texts of needle and recall; default 256, 512 … 4096"
    )
    window: int = Field(default=2048, ge=2, description="tokens of a window of ppl; each is half of one on")
    chat: bool = Field(
        default=False, description="ask tasks of lm-eval as a user's message, by the chat template"
    )
    draws: int = Field(default=2000, ge=100, description="draws of the bootstrap")
    seed: int = Field(default=0, ge=0, le=SEEDS[1], description="seed of drawn texts and of the bootstrap")
    base: ModelName = Field(
        default="", description="base checkpoint of an adapter, if the one it names is not on this machine"
    )
    out: Folder = Field(default="", description="folder for page and record; default the run, or evals/NAME")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="compute dtype. auto: bfloat16 where the hardware has bf16 matmul units"
    )
    device: Device = Field(default="auto", description="auto (CUDA if there is one), cpu, cuda, cuda:1")


def main(arguments: list[str], common: Common) -> dict[str, Any]:
    """Score models and compare them. -> models, tasks (scores, changes, grid, notes), out, page."""
    config = parse(Config, arguments, command="eval", description=__doc__ or "", positional=True)
    return evaluate(config, common, shlex.join(["unfreeze", "eval", *arguments]))


def evaluate(config: Config, common: Common, command: str = "", *, shown: bool = True) -> dict[str, Any]:
    """Do what `main` does, for fields that are parsed. shown: print the tables."""
    from unfreeze.commands.eval_models import memorised, subjects_of
    from unfreeze.evaluate.kept import Kept
    from unfreeze.evaluate.tasks import Settings
    from unfreeze.job.tasks import split_names, tasks_of
    from unfreeze.kernels.precision import precision

    names = ("limit", "max_new_tokens", "batch", "seed", "lengths", "columns", "window", "chat")
    settings = Settings(**{name: getattr(config, name) for name in names})
    line = say(common)
    with ExitStack() as ends:
        tasks = tasks_of(split_names(config.tasks), settings, ends, line)
        device = pick_device(config.device)
        dtype = precision(config.dtype, device).name
        subjects = subjects_of(config.models, config.base, f"{dtype} {device.type}", line)
        out = folder_of(config, subjects)
        with writing(out, "out"):
            out.mkdir(parents=True, exist_ok=True)
            kept = ends.enter_context(Kept(out / KEPT))
            subjects.notes.extend(memorised(subjects, tasks))
            table = shown and not (common.json or common.quiet)
            for note in () if table else subjects.notes:  # the table ends with them
                line(f"warning: {note}")
            again = len(kept)
            try:
                scored, errors = score_all(tasks, subjects, kept, config, dtype, common)
            except KeyboardInterrupt:
                new = plural(len(kept) - again, "result")
                message = f"{new} more kept in {out / KEPT}; the same command continues"
                raise KeyboardInterrupt(message) from None
            record = record_of(config, tasks, subjects, scored, errors, command)
            written = write(record, out, subjects)
    if table:
        show(record)
        print(f"page: {written}")
    failed = {"exit_code": UserError.exit_code} if errors else {}
    return {**record, "out": str(out), "page": str(written), **failed}


def folder_of(config: Config, subjects: Subjects) -> Path:
    """Return --out; else the folder of the only run, or evals/NAMES."""
    if config.out:
        return Path(config.out)
    typed = [model for model in subjects.models if model.name in config.models]
    if len(typed) == 1 and typed[0].run:
        return typed[0].run
    names = [Path(name).expanduser().absolute().name for name in config.models]
    return Path("evals") / "-".join(names)[:100]


def score_all(
    tasks: Sequence[Task], subjects: Subjects, kept: Kept, config: Config, dtype: str, common: Common
) -> tuple[dict[str, dict[str, list[Scores]]], dict[str, UserError]]:
    """Score every task with every model. -> task -> model -> its measures, task -> why it has none."""
    scored: dict[str, dict[str, list[Scores]]] = {task.name: {} for task in tasks}
    errors: dict[str, UserError] = {}
    model: Model | None = None
    for subject in subjects.models:
        model = opened(subject, model, config, dtype, common)
        kept.model = subject.digest
        for task in tasks:
            if task.name in errors:
                continue
            shown = progress(f"{subject.shown}: {task.name}", task.counts, say(common))
            try:
                scored[task.name][subject.name] = task.score(model, kept, shown)
            except UserError as error:
                errors[task.name] = error
                say(common)(f"warning: {task.name}: {error.message}; the other tasks go on")
        model = None if subject.source.adapter else model
    return scored, errors


def opened(subject: Scored, before: Model | None, config: Config, dtype: str, common: Common) -> Model:
    """Load a model with progress; the one before it is released first, unless it is its base."""
    from unfreeze.core.garbage import take_up
    from unfreeze.generate.open import dtype_of
    from unfreeze.tracking.live import LoadProgress

    take_up()  # all imports are done
    with LoadProgress(quiet=common.quiet) as shown:
        model = subject.loaded(
            before, dtype_of(dtype), pick_device(config.device), progress=shown, say=say(common)
        )
    model.engine.say = say(common)
    return model


def progress(what: str, counts: str, line: Callable[[str], None]) -> Callable[[int, int], None]:
    """Return a function that says how far a task is, every SAY_EVERY seconds. counts: one of its parts."""
    last = time.monotonic()

    def shown(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last > SAY_EVERY:
            last = time.monotonic()
            line(f"{what}: {done:,} of {plural(total, counts)}")

    return shown


def record_of(
    config: Config,
    tasks: Sequence[Task],
    subjects: Subjects,
    scored: dict[str, dict[str, list[Scores]]],
    errors: dict[str, UserError],
    command: str,
) -> dict[str, Any]:
    """Return the table (evaluate/table.py) with what it was made by."""
    from unfreeze.evaluate.table import measure_record, same_measures

    rows: list[dict[str, Any]] = []
    for task in tasks:
        if error := errors.get(task.name):
            rows.append({"task": task.name, "error": error.message, "next": error.next})
            continue
        for by_model in same_measures(task.name, scored[task.name]):
            row = measure_record(task.name, by_model, subjects.pairs, draws=config.draws, seed=config.seed)
            rows.append({**row, "digest": task.digest})
    models = [
        {
            "name": model.name,
            "source": str(model.source.adapter or model.source.base),
            "digest": model.digest,
            "typed": model.name in config.models,
        }
        for model in subjects.models
    ]
    return {
        "models": models,
        "tasks": rows,
        "notes": list(subjects.notes),
        "command": command,
        "time": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def write(record: dict[str, Any], out: Path, subjects: Subjects) -> Path:
    """Write the record beside every run that was scored, and page and record into `out`."""
    for model in subjects.models:
        if model.run and model.run.resolve() != out.resolve():
            keep(model.run, of_run(record, model.name, subjects.pairs))
    return write_scores(out / PAGE, keep(out, record))


def keep(folder: Path, record: dict[str, Any]) -> dict[str, Any]:
    """Write the record; tasks of an earlier one, of the same models, that were not scored now stay."""
    before = read_scores(folder)
    digests = {model["digest"] for model in record["models"]}
    if before and {model["digest"] for model in before["models"]} == digests:
        now = {task["task"] for task in record["tasks"]}
        record = {**record, "tasks": [t for t in before["tasks"] if t["task"] not in now] + record["tasks"]}
    write_file(folder / RECORD, json.dumps(record, indent=1, allow_nan=False) + "\n")
    return record


def of_run(record: dict[str, Any], name: str, pairs: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Return the part of a record about one run and the model before it."""
    before = next((one for one, other in pairs if other == name), name)
    models = (before, name)
    tasks = [
        task
        if "error" in task
        else {
            **task,
            "scores": [each for each in task["scores"] if each["model"] in models],
            "changes": [each for each in task["changes"] if (each["before"], each["after"]) == models],
            "grid": {
                row: {column: {m: v for m, v in cell.items() if m in models} for column, cell in of.items()}
                for row, of in task["grid"].items()
            },
        }
        for task in record["tasks"]
    ]
    return {**record, "models": [m for m in record["models"] if m["name"] in models], "tasks": tasks}


def show(record: dict[str, Any]) -> None:
    """Print every measure, the grids and the notes."""
    from rich.table import Table
    from rich.text import Text

    from unfreeze.tracking.console import PipeConsole

    console = PipeConsole(highlight=False)
    for name, lines in tables.in_lines(record):
        console.print(Text(name), style="bold")
        for line in lines:
            console.print(Text(f"  {line}"))
    for each in tables.grid_tables(record):
        table = Table(title=each.title, title_justify="left", box=None, pad_edge=False, header_style="dim")
        for head in each.head:
            table.add_column(Text(head), overflow="fold")
        for row in each.rows:
            table.add_row(*(Text(cell) for cell in row))
        console.print(table)
    for line in tables.cautions(record):
        console.print(Text(f"warning: {line}" if line in record["notes"] else line))
