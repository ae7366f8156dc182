"""A run's folder: open it, lock it, write its resolved config.

After Ctrl-C or on a full disk, say what is saved and how to continue.
"""

from __future__ import annotations

import errno
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
from unfreeze.core.errors import FULL, ConfigError, ProcessGone, UserError, size_limit
from unfreeze.core.events import RESOLVED
from unfreeze.core.run_folder import free_folder, refuse_other_files
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

SAME_CALL = "the same call"  # stands for the command if Python started the run
SEEN = 60.0  # seconds to wait for a file of another node; NFS can cache its absence that long
WHOLE = 2**28  # data files up to this size (bytes) are hashed completely, in about a second


@contextmanager
def live(config: TrainingConfig, common: Common, recipe: str, command: str, group: Group) -> Generator[Run]:
    """Open and lock the run folder, with live progress on stderr. Processes beyond 0 get a silent Follower.

    On a full disk, or a Ctrl-C that fit doesn't handle (before it, after it, or a second one), say what is
    saved and how to continue.
    """
    from unfreeze.train.follower import Follower, open_run
    from unfreeze.train.run import Run, latest
    from unfreeze.train.state import DiskFull

    group.meet(lambda: refuse_other_recipe(config.run_dir, recipe))
    group.meet(lambda: refuse_other_version(config))

    # fields that a resumed run may change, and its chat template's date, the same on every process
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

        # the run; on Ctrl-C, a full disk or a lost process, say what is saved
        with run, group.watching(lambda who: _gone(who, run, command)):
            try:
                with writing(config.run_dir, "out"):
                    if not (run.finished and (run.path / RESOLVED).is_file()):
                        write_resolved(run, config, recipe, date)
                yield run
            except KeyboardInterrupt:
                raise KeyboardInterrupt(f"{_left(run)}; {again(command)}") from None
            except OSError as error:
                if error.errno not in (*FULL, errno.EFBIG):
                    raise
                save = latest(run.path)
                state = f"the run is saved as of {save.name}" if save else "nothing was saved yet"
                at = f", at {error.filename}" if error.filename else ""
                if error.errno == errno.EFBIG:
                    cause, remedy = size_limit()
                    raise UserError(
                        f"{cause}{at}; {state}", next=f"{remedy}, then {again(command)}"
                    ) from error
                raise DiskFull(
                    f"the disk of {run.shown} is full{at}; {state}", next=f"free space, then {again(command)}"
                ) from error


def refuse_other_recipe(folder: Path, recipe: str) -> None:
    """Raise ConfigError if the folder is no run, or one of another recipe: its loss would change."""
    refuse_other_files(folder)
    path = folder / RESOLVED
    began = read_object(path, ConfigError).get("recipe", recipe) if path.is_file() else recipe
    if began != recipe:
        raise ConfigError(
            f"{folder} is a run of unfreeze {began}, and this is unfreeze {recipe}",
            next=f"--out {free_folder(folder)}; to continue its adapter, add --adapter {folder}",
        )


def _shared(folder: Path, holder: str) -> Path:
    """Return the run folder once it shows the lock of process 0 (whose process id is `holder`).

    Another node sees a new file on a shared disk only after a while.
    """
    lock, until = folder / "lock", time.monotonic() + SEEN
    while not (lock.is_file() and lock.read_text(encoding="utf-8").strip() == holder):
        if time.monotonic() > until:
            raise ConfigError(
                f"{folder.absolute()} is not the run folder that process 0 opened: the nodes do not share it",
                next="give --out a folder that all nodes share",
            )
        time.sleep(0.1)
    return folder


def _gone(who: str, run: Run, command: str) -> ProcessGone:
    """Return the error for a lost process: which, in which step, and the last save."""
    from unfreeze.train.run import latest

    save, events = latest(run.path), run.path / "events.jsonl"
    known_events = read_events(events) if events.is_file() else []
    step, start = last(known_events, TrainEvent), last(known_events, StartEvent)
    trained, steps = max(run.step, step["step"] if step else 0), start.get("steps") if start else None
    at = f"in step {trained + 1}" if run.began else "before the first step"
    if steps is not None and trained >= steps:
        at = f"after the last step, {trained}, while writing its results"
    return ProcessGone(f"{who} {at}; saved: {save.name if save else 'nothing yet'}", next=again(command))


def _left(run: Run) -> str:
    """Describe the saved state of a run stopped by Ctrl-C before its first step, or by a second Ctrl-C."""
    from unfreeze.train.run import latest

    save, events = latest(run.path), run.path / "events.jsonl"
    step = last(read_events(events), TrainEvent) if events.is_file() else None
    if save is not None:
        return f"the run is saved as of {save.name}"
    if step is None:
        return "nothing was trained yet"
    return f"stopped before a save: its {step['step']} steps are lost (one Ctrl-C saves first)"


def first_start(config: TrainingConfig) -> str:
    """Date for a run's chat template: as configured, else as recorded at the run's first start, else now."""
    began = (config.run_dir / RESOLVED).is_file()
    before = read_resolved(config.run_dir, ConfigError).get("data.template_date") if began else None
    return config.data.template_date or before or datetime.now().isoformat(timespec="seconds")


def write_resolved(
    run: Run, config: TrainingConfig, recipe: str, date: str = "", **effective: object
) -> None:
    """Write resolved_config.json: every field of the Config by its dotted name.

    effective: values derived from defaults, data and machine, written under "effective" together with "given"
    (fields not at their default), "versions", "machine" and "contents".
    date: for the chat template; "" keeps the recorded one.
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

    For a file above 256 MiB, only its first and last MiB are hashed.
    """
    hashes: list[str] = []
    for _, name in data.sources:
        if not Path(name).is_file():  # moved away since it was read
            hashes.append("absent")
            continue
        with Path(name).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            hashed = hashlib.sha256(file.read() if size <= WHOLE else file.read(2**20))
            if size > WHOLE:
                file.seek(-(2**20), os.SEEK_END)
                hashed.update(file.read())
        hashes.append(f"{size}:{hashed.hexdigest()}")
    return hashes


def refuse_other_data(data: Data, folder: Run) -> None:
    """Raise ConfigError if the data files of a finished run have changed since.

    An unfinished run is checked by the fingerprint in its cursor.
    """
    effective: dict[str, list[str]] = read_object(folder.path / RESOLVED, ConfigError).get("effective") or {}
    before = effective.get("contents", [])
    changed = [
        name for (_, name), old, new in zip(data.sources, before, contents(data), strict=False) if old != new
    ]
    if changed:
        raise ConfigError(
            f"{folder.path} is finished, but {', '.join(changed)} has changed since: the run was not"
            " trained on the new contents",
            next=f"--out {free_folder(folder.path)}",
        )


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that a run's numbers depend on."""
    numbers = {"python": platform.python_version()}
    for name in ("unfreeze", "torch", "numpy", "numba", "safetensors", "tokenizers"):
        try:
            numbers[name] = version(name)
        except PackageNotFoundError:  # run from a source tree that is not installed
            numbers[name] = "not installed"
    return numbers


def write_json(path: Path, value: object) -> None:
    """Write a JSON file atomically."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    temporary.replace(path)


def again(command: str) -> str:
    """Say how to continue."""
    if command == SAME_CALL:
        return f"make {SAME_CALL} again"
    return "give the same command again" + (f": {command}" if command else "")


def typed(recipe: str, arguments: Sequence[str]) -> str:
    """The user's command, for repeating it, with torchrun in front if it was used."""
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
    """Return the config with its data names resolved to files, and report these through `say`.

    Missing data, or data in an unknown format, is refused here, before the model is loaded.
    """
    return config.model_copy(update={"data": config.data.written.with_files(files_in(config, say))})


def files_in(config: TrainingConfig, say: Callable[[str], None] = lambda line: None) -> dict[str, list[str]]:
    """Return data name -> files."""
    from unfreeze.data.rows.columns import renames_of
    from unfreeze.data.rows.sources import files_of

    renames_of(config.data.columns)
    sources = config.data.written.sources
    return {name: [str(path) for path in files_of(name, field, say)] for field, name in sources}
