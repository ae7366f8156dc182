"""The run folder: its lock, its configuration, the save that a run resumes from, and its events.

runs/<name>/lock                     held by flock while a process works here; contains its pid
runs/<name>/events.jsonl             see core/events.py
runs/<name>/state/step-000120/       one complete save (train/state.py); step-000120.tmp is unfinished and
                                     never read
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO, Any, cast

from unfreeze.core.errors import CheckpointError, ConfigError, UserError
from unfreeze.core.events import Event, EventLog, truncate_after
from unfreeze.core.run_folder import free_folder
from unfreeze.core.units import plural
from unfreeze.untrusted.json_object import read_object

SAVE_NAME = re.compile(r"step-(\d{6,})")
RECORD = "state.json"


class Run:
    """An open run folder.

    It is created before the model is loaded, so that a held lock or a changed configuration is refused before
    any work.

        path          the folder
        shown         the folder for messages: for a Follower the real one
        config        the resolved configuration as plain JSON, which is compared with a save's
        events        its EventLog. On resume, lines after the save are dropped first, so that no step appears
                      twice
        saved         the record of the save to resume from (state.json); None for a fresh run
        step, cursor  resume position: number of finished steps and the data position (0 and None for a fresh
                      run)
        finished      True if that save is of the last step of its schedule or was ended early, and no change
                      could require more
        changed       "field: saved -> now" of each change that allow_changed let through
        leaving       resources closed with it, such as processes that encode rows

    Use as a context manager: leaving it closes the events and frees the lock. (The kernel also frees a killed
    process's lock.)
    """

    def __init__(
        self,
        path: Path | str,
        config: Mapping[str, Any],
        *,
        listeners: tuple[Callable[[Event], str | None], ...] = (),
        allow_changed: Collection[str] = (),
        fixed: Mapping[str, str] | None = None,
        read: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict,
    ):
        """Lock the folder, and compare `config` with that of the latest save.

            allow_changed  fields (dotted, or a whole group such as "lora") in which `config` may differ
            fixed          fields that must never differ -> the reason, such as {"lora.rank": "it is the shape
                           of the trained tensors"}
            read           converts a save's configuration to today's field names

        Allowed changes are reported in a "warning" event and listed in `changed`.
        Raises UserError if another process holds the folder, ConfigError if the save was made with another
        configuration.
        """
        self.path = self.shown = Path(path)
        self.config = plain_json(config)
        self.allow_changed = frozenset(allow_changed)
        self.fixed = dict(fixed or {})
        self.changed: list[str] = []
        self.leaving = ExitStack()
        self._is_new = not self.path.exists()
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock: IO[str] | None = _take_lock(self.path)
        try:
            _clear_unfinished(self.path)
            self.save_path = latest(self.path)
            self.saved = None if self.save_path is None else read_record(self.save_path)
            if self.saved is not None:
                self.refuse_changes(dict(read(self.saved["config"])), self.config)
            events, begun = self.path / "events.jsonl", self.step if self.saved else -1
            lost = truncate_after(events, begun, ended=self.finished)
            self.events = EventLog(events, listeners)
            if lost:
                verbs = "was not saved and is" if lost == 1 else "were not saved and are"
                words = f"{plural(lost, 'step')} {verbs}"
                self.events.emit("warning", self.step, message=f"{words} lost; step {self.step + 1} is next")
            if self.changed:
                self.events.emit(
                    "warning",
                    self.step,
                    message=f"resumed with another configuration, as allowed: {'; '.join(self.changed)}",
                )
        except BaseException:
            self._free_lock()
            raise

    @property
    def step(self) -> int:
        return int(self.saved["step"]) if self.saved else 0

    @property
    def cursor(self) -> dict[str, Any] | None:
        return self.saved["cursor"] if self.saved else None

    @property
    def finished(self) -> bool:
        return self._ended and not self.changed

    @property
    def _ended(self) -> bool:
        """True if the save is of a run's last step, as it was planned then."""
        if self.saved is None:
            return False
        return bool(self.saved.get("ended")) or self.step >= int(self.saved["schedule"]["steps"])

    def refuse_changes(self, saved: Any, now: Any, prefix: str = "") -> None:
        """Raise ConfigError with every changed field that is fixed or not named by allow_changed."""
        differ = changed_fields(saved, now, prefix)
        changes = {field: f"{field}: {old} -> {new}" for field, old, new in differ}
        fixed = {field: reason for field in changes if (reason := _named(field, self.fixed))}
        refused = [
            field
            for field in changes
            if field in fixed or _named(field, dict.fromkeys(self.allow_changed, field)) is None
        ]
        self.changed += [change for field, change in changes.items() if field not in refused]
        if not refused:
            return
        never = "".join(
            f"; {field} can never change within a run: {reason}" for field, reason in fixed.items()
        )
        more = any(_is_more(*each) for each in differ)
        resume = "" if self._ended else ", or the saved values to resume"
        allow = "" if fixed or (self._ended and not more) else f", or {self.allowing(*refused)} to go on here"
        raise ConfigError(
            f"{self.path} was trained to step {self.step} with another configuration; "
            f"{len(refused)} {'field differs' if len(refused) == 1 else 'fields differ'} (saved -> now): "
            + "; ".join(changes[field] for field in refused)
            + never,
            next=f"--out {free_folder(self.path)} for a new run{resume}{allow}",
        )

    def allowing(self, *fields: str) -> str:
        """Return the one flag that allows changes of these fields and of those already allowed."""
        allowed = sorted(field for field in self.allow_changed if not field.startswith("schedule."))
        return " ".join(["--save.allow-changed", *dict.fromkeys([*allowed, *fields])])

    def close(self) -> None:
        self.leaving.close()
        self.events.close()
        self._free_lock()

    def _free_lock(self) -> None:
        if self._lock is not None:
            self._lock.close()  # closing the file releases its flock
            self._lock = None

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close. A run refused before its first step leaves no folder, unless it existed before."""
        self.close()
        if isinstance(error, UserError) and self._is_new and not self.began:
            shutil.rmtree(self.path, ignore_errors=True)

    @property
    def began(self) -> bool:
        """True if anything was trained or saved here: the "start" event precedes the first step."""
        started = b'"kind": "start"' in (self.path / "events.jsonl").read_bytes()
        return started or latest(self.path) is not None


def _clear_unfinished(run_dir: Path) -> None:
    """Remove files that killed runs left unfinished; the lock guarantees that nobody is writing them.

    checkpoint.save names its files .<name>.unfinished-<pid>.
    """
    for pattern in ("state/*.tmp", ".*.unfinished-*", "adapter*/.*.unfinished-*"):
        for unfinished in run_dir.glob(pattern):
            if unfinished.is_dir():
                shutil.rmtree(unfinished)
            else:
                unfinished.unlink()


def latest(run_dir: Path | str) -> Path | None:
    """Return the complete save with the highest step, or None.

    Folders ending in .tmp, and names other than step-<number>, are ignored.
    """
    complete = saves(Path(run_dir))
    return complete[-1] if complete else None


def save_name(step: int) -> str:
    """Return the folder name of a step's save; SAVE_NAME parses it."""
    return f"step-{step:06d}"


def saves(run_dir: Path) -> list[Path]:
    """Return complete saves, oldest first."""
    steps = [
        (int(match[1]), path)
        for path in (run_dir / "state").glob("step-*")
        if (match := SAVE_NAME.fullmatch(path.name))
    ]
    return [path for _, path in sorted(steps)]


def read_record(save_path: Path) -> dict[str, Any]:
    """Read state.json of one save.

    Raises CheckpointError if it is damaged: its config must have the hash written beside it.
    """
    path, next_command = save_path / RECORD, f"remove {save_path} to resume from the previous save"
    if not path.is_file():
        raise CheckpointError(f"{path} is missing", next=next_command)
    record = read_object(path, CheckpointError, next=next_command)
    tables = ("config", "schedule", "optimizer")
    # a cursor may be null, but not absent
    typed = all(isinstance(record.get(field), dict) for field in tables) and isinstance(
        record.get("cursor", 0), dict | None
    )
    typed = typed and _is_best(record.get("best")) and type(record.get("stale", 0)) is int
    steps = (record.get("step"), record["schedule"].get("steps")) if typed else ()
    named = SAVE_NAME.fullmatch(save_path.name)
    if named and record.get("step") != int(named[1]):
        raise CheckpointError(
            f"{path} is damaged: it says step {str(record.get('step'))[:40]}, its folder {save_path.name}",
            next=next_command,
        )
    if (
        not steps
        or any(type(number) is not int or number < 0 for number in steps)
        or record.get("config_hash") != config_hash(record["config"])
    ):
        raise CheckpointError(
            f"{path} is damaged: its fields or its config hash do not fit", next=next_command
        )
    return record


def _is_best(best: Any) -> bool:
    """Return True if a save's "best" is a valid State.best; None without validation."""
    if not isinstance(best, dict):
        return best is None
    fields = cast(dict[str, Any], best)
    return type(fields.get("step")) is int and isinstance(fields.get("loss"), int | float)


def config_hash(config: Mapping[str, Any]) -> str:
    """Return the sha256 of the configuration as JSON with sorted keys."""
    return hashlib.sha256(json.dumps(plain_json(config), sort_keys=True).encode()).hexdigest()


def plain_json(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration after a round trip through JSON: tuples as lists, paths as text."""
    return json.loads(json.dumps(config, default=str))


def changed_fields(saved: Any, now: Any, prefix: str = "") -> list[tuple[str, str, str]]:
    """Return (dotted field, saved value, current value) of every leaf that differs.

    A field that only one side has is "absent" on the other.
    """
    if not (isinstance(saved, dict) and isinstance(now, dict)):
        return [] if saved == now else [(prefix.removesuffix("."), json.dumps(saved), json.dumps(now))]
    before, after = cast(dict[str, Any], saved), cast(dict[str, Any], now)
    changes: list[tuple[str, str, str]] = []
    for key in sorted(before.keys() | after.keys()):
        if key in before and key in after:
            changes += changed_fields(before[key], after[key], f"{prefix}{key}.")
        else:
            old, new = (json.dumps(side[key]) if key in side else "absent" for side in (before, after))
            changes.append((prefix + key, old, new))
    return changes


def _is_more(field: str, saved: str, now: str) -> bool:
    """True for a change that gives a finished run more steps."""
    longer = field in ("training.steps", "training.epochs")
    return longer and (bool({saved, now} & {"null", "absent"}) or float(now) > float(saved))


def _named(field: str, fields: Mapping[str, str]) -> str | None:
    """Return the value of the entry for `field` or a group containing it; None if there is none."""
    return next(
        (value for name, value in fields.items() if field == name or field.startswith(name + ".")), None
    )


def _take_lock(run_dir: Path) -> IO[str]:
    file = (run_dir / "lock").open("a+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        pid = file.read().strip()
        file.close()
        # a holder writes its pid right after it gets the lock
        stop = f"stop it with: kill -INT {pid}" if pid else "try again in a second"
        raise UserError(
            f"{run_dir} is in use by process {pid or '(just starting)'}: two runs in one folder would"
            " overwrite each other",
            next=f"wait for it, {stop}, or give another folder with --out",
        ) from None
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file
