"""A run's folder: opened and locked, with its resolved config.

After Ctrl-C or on a full disk it says what is saved, and how to go on.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shlex
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from unfreeze.config.names import flat, given, of_today
from unfreeze.config.parse import writing
from unfreeze.config.recipes import read_resolved
from unfreeze.config.tables import Data
from unfreeze.config.training import TrainingConfig
from unfreeze.core.command import Common
from unfreeze.core.errors import FULL, ConfigError, ProcessGone
from unfreeze.core.events import RESOLVED
from unfreeze.core.schema import StartEvent, TrainEvent
from unfreeze.core.torchrun import started
from unfreeze.job.end.resume import FIXED, allowed, refuse_other_version
from unfreeze.report.events import last, read_events
from unfreeze.report.experts import ExpertWatch
from unfreeze.tracking import tracking
from unfreeze.tracking.live import LiveProgress
from unfreeze.untrusted.json_object import read_object

if TYPE_CHECKING:
    from unfreeze.parallel.processes.collectives import Group
    from unfreeze.train.run import Run


C = TypeVar("C", bound=TrainingConfig)

SAME_CALL = "the same call"  # the command of a run that Python started
SEEN = 60.0  # seconds until a file of another node is seen at the latest; NFS remembers an absent one so long
WHOLE = 2**28  # a data file of at most this many bytes is hashed whole, in about a second


@contextmanager
def live(config: TrainingConfig, common: Common, recipe: str, command: str, group: Group) -> Generator[Run]:
    """The opened, locked run folder, with live progress on stderr. On processes beyond 0 a silent Follower.

    A Ctrl-C that fit doesn't handle (before it, after it, or a second one) says what is saved and how to go
    on; a full disk does too.
    """
    from unfreeze.train.follower import Follower, open_run
    from unfreeze.train.run import Run, latest
    from unfreeze.train.state import DiskFull

    group.meet(lambda: refuse_other_recipe(config.run_dir, recipe))
    group.meet(lambda: refuse_other_version(config))

    # what a resumed run may change, and the date of its chat template, the same on every process
    record = config.record()
    changeable = allowed(config)
    date, holder = (group.texts(own)[0] for own in (first_start(config), str(os.getpid())))
    read = partial(of_today, type(config))
    progress = LiveProgress(0, quiet=common.quiet, whole_plan=common.plan)
    with progress, tracking(config.watch.track, config.run_dir, flat(config)) as sinks:
        with writing(config.run_dir, "out"):
            run = open_run(
                group,
                on_rank0=lambda: Run(
                    config.run_dir,
                    record,
                    listeners=(progress, ExpertWatch(), *sinks),
                    allow_changed=changeable,
                    fixed=FIXED,
                    read=read,
                ),
                elsewhere=lambda: Follower(
                    _shared(config.run_dir, holder), record, allow_changed=changeable, fixed=FIXED, read=read
                ),
            )

        # the run; a Ctrl-C, a full disk or a process that is gone says what is saved
        with run, group.watching(lambda who: _gone(who, run, command)):
            try:
                with writing(config.run_dir, "out"):
                    if not (run.finished and (run.path / RESOLVED).is_file()):
                        write_resolved(run, config, recipe, date)
                yield run
            except KeyboardInterrupt:
                raise KeyboardInterrupt(f"{_left(run)}; {again(command)}") from None
            except OSError as error:
                if error.errno not in FULL:
                    raise
                save = latest(run.path)
                state = f"the run is saved as of {save.name}" if save else "nothing was saved yet"
                at = f", at {error.filename}" if error.filename else ""
                raise DiskFull(
                    f"the disk of {run.shown} is full{at}; {state}", next=f"free space, then {again(command)}"
                ) from error


def refuse_other_recipe(folder: Path, recipe: str) -> None:
    """Raise ConfigError where the folder's run is of another recipe: what it minimised would change."""
    path = folder / RESOLVED
    began = read_object(path, ConfigError).get("recipe", recipe) if path.is_file() else recipe
    if began != recipe:
        raise ConfigError(
            f"{folder} is a run of unfreeze {began}, and this is unfreeze {recipe}",
            next=f"another folder with --out; to go on from what it learned: --adapter {folder}",
        )


def _shared(folder: Path, holder: str) -> Path:
    """The run folder, if it is the one that process 0 (its process id: `holder`) has locked.

    Another node sees a new file on a shared disk a while later.
    """
    lock, until = folder / "lock", time.monotonic() + SEEN
    while not (lock.is_file() and lock.read_text(encoding="utf-8").strip() == holder):
        if time.monotonic() > until:
            raise ConfigError(
                f"{folder.absolute()} is not the run folder that process 0 opened: they are on other disks",
                next="--out with a folder that all nodes share",
            )
        time.sleep(0.1)
    return folder


def _gone(who: str, run: Run, command: str) -> ProcessGone:
    """Who is gone, in which step, and what is saved."""
    from unfreeze.train.run import latest

    save, events = latest(run.path), run.path / "events.jsonl"
    told = read_events(events) if events.is_file() else []
    step, start = last(told, TrainEvent), last(told, StartEvent)
    trained, steps = max(run.step, step["step"] if step else 0), start.get("steps") if start else None
    at = f"in step {trained + 1}" if run.began else "before the first step"
    if steps is not None and trained >= steps:
        at = f"after the last step, {trained}, while its results were written"
    return ProcessGone(f"{who} {at}; saved: {save.name if save else 'nothing yet'}", next=again(command))


def _left(run: Run) -> str:
    """What a run that ended at once, by Ctrl-C before its first step or by a second one, has on disk."""
    from unfreeze.train.run import latest

    save, events = latest(run.path), run.path / "events.jsonl"
    step = last(read_events(events), TrainEvent) if events.is_file() else None
    if save is not None:
        return f"the run is saved as of {save.name}"
    if step is None:
        return "nothing was trained yet"
    return f"ended at once, before a save: its {step['step']} steps are lost (one Ctrl-C saves first)"


def first_start(config: TrainingConfig) -> str:
    """The date a run's chat template tells: as given, as the run's first start wrote it down, or now."""
    began = (config.run_dir / RESOLVED).is_file()
    before = read_resolved(config.run_dir, ConfigError).get("data.template_date") if began else None
    return config.data.template_date or before or datetime.now().isoformat(timespec="seconds")


def write_resolved(
    run: Run, config: TrainingConfig, recipe: str, date: str = "", **effective: object
) -> None:
    """resolved_config.json: every field of the Config by its dotted name.

    Under "effective" stands what defaults, data and machine made of it.
    With effective values come "given" (the fields that are not at their default), "versions", "machine" and
    "contents".
    `date`: of the chat template; left out, it stays as it was written before.
    """
    if effective:
        machine = f"{platform.system()} {platform.machine()}"
        effective |= {
            "given": given(config),
            "versions": versions(),
            "machine": machine,
            "contents": contents(config.data),
        }
    date = date or read_resolved(run.path, ConfigError).get("data.template_date", "")
    fields = {
        **flat(config.as_written),
        **config.record(),
        "out": str(config.run_dir),
        "data.template_date": date,
    }
    write_json(
        run.path / RESOLVED, {"recipe": recipe, **fields, **({"effective": effective} if effective else {})}
    )


def contents(data: Data) -> list[str]:
    """Size and SHA-256 of each data file, in the order of the config.

    Of a file above 256 MiB the hash is of its first and last MiB only.
    """
    found: list[str] = []
    for _, name in data.sources:
        if not Path(name).is_file():  # moved away since it was read
            found.append("absent")
            continue
        with Path(name).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            hashed = hashlib.sha256(file.read() if size <= WHOLE else file.read(2**20))
            if size > WHOLE:
                file.seek(-(2**20), os.SEEK_END)
                hashed.update(file.read())
        found.append(f"{size}:{hashed.hexdigest()}")
    return found


def refuse_other_data(data: Data, folder: Run) -> None:
    """Refuse a finished run whose data files hold other bytes now.

    An unfinished one is recognised by its cursor's fingerprint.
    """
    effective: dict[str, list[str]] = read_object(folder.path / RESOLVED, ConfigError).get("effective") or {}
    before = effective.get("contents", [])
    changed = [
        name for (_, name), old, new in zip(data.sources, before, contents(data), strict=False) if old != new
    ]
    if changed:
        raise ConfigError(
            f"{folder.path} is finished, and {', '.join(changed)} has changed since: nothing was trained on"
            " what it holds now",
            next="give another folder with --out",
        )


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that a run's numbers depend on."""
    found = {"python": platform.python_version()}
    for name in ("unfreeze", "torch", "numpy", "numba", "safetensors", "tokenizers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # run from a source tree that nobody installed
            found[name] = "not installed"
    return found


def write_json(path: Path, value: object) -> None:
    """Write a JSON file atomically."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    temporary.replace(path)


def again(command: str) -> str:
    """How to go on."""
    if command == SAME_CALL:
        return f"make {SAME_CALL} again"
    return "give the same command again" + (f": {command}" if command else "")


def typed(recipe: str, arguments: Sequence[str]) -> str:
    """The command as the user gave it, to be repeated; under torchrun with torchrun before it."""
    here = started()
    start = (
        ["unfreeze"]
        if here.size == 1
        else ["torchrun", "--nproc-per-node", str(here.on_node), "-m", "unfreeze"]
    )
    return shlex.join([*start, recipe, *arguments]) + (
        f" (on each of {here.nodes} nodes, as before)" if here.nodes > 1 else ""
    )


def with_files(config: C, say: Callable[[str], None] = lambda line: None) -> C:
    """The config with the files that its data names stand for; `say` is told which.

    Data that isn't there, or of a form that isn't read, is refused before the model is loaded.
    """
    return config.model_copy(update={"data": config.data.written.found(files_in(config, say))})


def files_in(config: TrainingConfig, say: Callable[[str], None] = lambda line: None) -> dict[str, list[str]]:
    """What each name of its data stands for -> the files."""
    from unfreeze.data.rows.columns import renames_of
    from unfreeze.data.rows.sources import files_of

    renames_of(config.data.columns)
    sources = config.data.written.sources
    return {name: [str(path) for path in files_of(name, field, say)] for field, name in sources}
