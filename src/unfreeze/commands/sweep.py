"""unfreeze sft … --sweep FIELD=A,B [FIELD=C,D]: a run for every combination of the values, then a comparison.

Runs are separate processes, one after the other, each in <out>/FIELD=VALUE. The same command again resumes
the sweep where it stopped; finished runs are not trained again. A run that fails does not stop the others.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from unfreeze.commands import compare
from unfreeze.config.names import fields, name_of
from unfreeze.config.parse import parse, takes_several
from unfreeze.config.recipes import CONFIGS
from unfreeze.config.training import TrainingConfig
from unfreeze.core.command import Common
from unfreeze.core.errors import ConfigError
from unfreeze.core.torchrun import started
from unfreeze.job.end.folder import with_files
from unfreeze.job.end.result import next_command

FLAG = "--sweep"
MOST = 12  # runs, the limit of `unfreeze compare`
NEVER = {"out": "each run has a folder of its own", "save.allow_changed": "it is for resuming a run"}
EXAMPLE = f"{FLAG} learning_rate=1e-4,2e-4"

Launch = Callable[[list[str]], int]
"""The arguments of `unfreeze` -> its exit code."""


@dataclass(frozen=True)
class Point:
    """One run of the sweep: its name, arguments and folder."""

    name: str
    arguments: list[str]
    folder: Path


def run_process(arguments: list[str]) -> int:
    """Run unfreeze in a child process and return its exit code.

    Ctrl-C reaches the child too, which then saves while this waits. A second Ctrl-C kills it.
    """
    child = subprocess.Popen([sys.executable, "-m", "unfreeze", *arguments], stdout=subprocess.DEVNULL)
    interrupted = False
    while True:
        try:
            code = child.wait()
        except KeyboardInterrupt:
            if interrupted:
                child.kill()
                raise
            interrupted = True
            continue
        if interrupted:
            raise KeyboardInterrupt
        return code


def sweep(recipe: str, arguments: list[str], common: Common, launch: Launch = run_process) -> dict[str, Any]:
    """Run all combinations, then compare the runs that have steps.

    -> sweep (field -> values), best (folder of the best run, None if they are not ranked), failed (run ->
    exit code), exit_code (the highest), and the result of `unfreeze compare`. Raises ConfigError for an
    invalid field or value, before any run starts.
    """
    fields, points = planned_points(recipe, arguments)
    flags = [f"--{name}" for name in ("quiet", "traceback", "plan") if getattr(common, name)]
    failed: dict[str, int] = {}
    for number, point in enumerate(points, 1):
        if not common.quiet:
            print(f"\nrun {number} of {len(points)}: {point.name}", file=sys.stderr, flush=True)
        try:
            code = launch([recipe, *point.arguments, *flags])
        except KeyboardInterrupt:
            again = shlex.join(["unfreeze", recipe, *arguments])
            message = (
                f"in run {number} of {len(points)}, {point.name}; to continue, run the same"
                f" command again: {again}"
            )
            raise KeyboardInterrupt(message) from None
        if code:
            failed[point.name] = code
    folders = [point.folder for point in points if (point.folder / "events.jsonl").is_file()]
    compared = compare.main([str(folder) for folder in folders], common) if len(folders) > 1 else {"runs": []}
    best = best_folder(folders, compared)
    if best and not common.quiet:
        adapter = (best / "adapter").is_dir()
        print(f"best: {best.name}\n{next_command(best, {'finished': True}, '', adapter)}", file=sys.stderr)
    if failed and not common.quiet:
        words = ", ".join(f"{name} (exit code {code})" for name, code in failed.items())
        print(f"failed: {words}; the same command again retries them", file=sys.stderr)
    code, named = max(failed.values(), default=0), str(best) if best else None
    return {"sweep": fields, "best": named, "failed": failed, "exit_code": code, **compared}


def best_folder(folders: Sequence[Path], compared: dict[str, Any]) -> Path | None:
    """Folder of the first finished run of a ranked comparison."""
    if not compared.get("ranked_by"):
        return None
    names = [run["name"] for run in compared["runs"] if run["state"] == "done"]
    return next((folder for name in names for folder in folders if folder.name == name), None)


def planned_points(recipe: str, arguments: Sequence[str]) -> tuple[dict[str, list[str]], list[Point]]:
    """Return (field -> values, one run per combination).

    Each run's arguments are checked as its command would.
    """
    if started().size > 1:
        raise ConfigError(
            f"{FLAG} starts one run after the other, but torchrun starts processes for a single run",
            next=f"start one torchrun for each value of {FLAG}",
        )
    if recipe not in CONFIGS:
        raise ConfigError(f"unfreeze {recipe} has no {FLAG}", next=f"unfreeze sft … {EXAMPLE}")
    rest, written = _split(arguments)
    swept = _swept(CONFIGS[recipe], rest, written)
    combinations = list(product(*swept.values()))
    if not 2 <= len(combinations) <= MOST:
        raise ConfigError(
            f"{FLAG} makes {len(combinations)} {'run' if len(combinations) == 1 else 'runs'}; 2 to {MOST} can"
            " be compared",
            next="give fewer values, or sweep one field at a time" if len(combinations) > MOST else EXAMPLE,
        )
    points: list[Point] = []
    for values in combinations:
        own = [word for name, value in zip(swept, values, strict=True) for word in (_flag(name), value)]
        # each run reports names of earlier versions itself
        run_arguments = [*rest, *own]
        try:
            config = parse(
                CONFIGS[recipe], run_arguments, command=recipe, description="", say=lambda renamed: None
            )
        except ConfigError as error:  # its next command is that of one run
            of_all = error.next.replace(shlex.join(own), shlex.join([FLAG, *written]))
            raise ConfigError(error.message, next=of_all) from None
        name = ",".join(f"{field}={value}" for field, value in zip(swept, values, strict=True))
        folder = config.run_dir / name.replace("/", "-")
        points.append(Point(name, [*run_arguments, "--out", str(folder)], folder))
    with_files(config)  # refuse missing data once, here
    return swept, points


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return (the other arguments, the words after --sweep)."""
    rest: list[str] = []
    written: list[str] = []
    inside = False
    for word in arguments:
        if word == FLAG:
            inside = True
        elif word.startswith(FLAG + "="):
            written.append(word.removeprefix(FLAG + "="))
            inside = True
        elif inside and not word.startswith("-"):
            written.append(word)
        else:
            inside = False
            rest.append(word)
    return rest, written


def _swept(config: type[TrainingConfig], rest: Sequence[str], written: Sequence[str]) -> dict[str, list[str]]:
    """Return field -> values. Raises ConfigError if not FIELD=VALUE,VALUE, or if it cannot be swept."""
    flags = [word.partition("=")[0].removeprefix("--") for word in rest if word.startswith("--")]
    seen = {name_of(config, flag) for flag in flags}
    swept: dict[str, list[str]] = {}
    for each in written:
        name, equals, text = each.partition("=")
        name = name.lstrip("-").replace("-", "_")
        values = [value.strip() for value in text.split(",")]
        if not equals or not name or not all(values):
            raise ConfigError(f"{FLAG} {each!r} is not FIELD=VALUE,VALUE", next=EXAMPLE)
        own = name_of(config, name)
        several = own in fields(config) and takes_several(fields(config)[own].info)
        wrong = NEVER.get(own) or ("a single run takes several values" if several else "")
        if wrong:
            raise ConfigError(f"{name} cannot be swept: {wrong}", next=EXAMPLE)
        if own in seen:
            raise ConfigError(f"{name} is given twice", next=f"give it once, after {FLAG}")
        if len(set(values)) < len(values):
            raise ConfigError(f"{FLAG} {each!r} repeats a value", next="give each value once")
        swept[name] = values
        seen.add(own)
    if not swept:
        raise ConfigError(f"{FLAG} needs FIELD=VALUE,VALUE", next=EXAMPLE)
    return swept


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
