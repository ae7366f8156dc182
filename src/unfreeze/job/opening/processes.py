"""What the processes of a run settle before it begins.

How they share a step; where model and data lie, which process 0 looks for and downloads first; and that all
of them see the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unfreeze.config.names import flat, of_today
from unfreeze.config.training import TrainingConfig
from unfreeze.core.command import Common
from unfreeze.core.errors import ConfigError, DataError
from unfreeze.core.events import RESOLVED
from unfreeze.core.torchrun import nearest_multiples, quieten, sharers, started
from unfreeze.job.end.folder import contents, files_in, versions, with_files
from unfreeze.job.opening.device import say

if TYPE_CHECKING:
    from unfreeze.checkpoint import Manifest
    from unfreeze.job.parts import Parts
    from unfreeze.parallel.processes.collectives import Group

OWN = frozenset({"model", "data.files", "data.validation", "adapter", "memory.device", "memory.threads"})
"""Fields that may differ between processes: where a node has its files (their contents are compared), and
what it computes with."""


def refuse_uneven(config: TrainingConfig, size: int | None = None) -> None:
    """Refuse micro-batches that `size` processes (default: those torchrun started) cannot share equally.

    Every process makes the same number of passes, so that none waits for one that another does not make.
    It is said before anything is downloaded, encoded or loaded.
    """
    size = started().size if size is None else size
    parts = config.memory.micro_batches
    if (saved := _saved_parts(config)) is not None and saved % size:
        counts = ", ".join(map(str, sharers(saved)))
        raise ConfigError(
            f"{config.run_dir} cuts each step into {saved} micro_batches, no multiple of {size} processes,"
            " and within a run that never changes",
            next=f"go on with as many processes as divide {saved} (torchrun --nproc-per-node): {counts}",
        )
    if parts % size:
        near = nearest_multiples(parts, size)
        raise ConfigError(
            f"{size} processes share {parts} micro_batches of a step, which is no multiple of {size}: some"
            " would make more passes than others",
            next=" or ".join(f"--micro-batches {count}" for count in near),
        )


def _saved_parts(config: TrainingConfig) -> int | None:
    """The micro-batches of the run that goes on in this folder; None where none does."""
    from unfreeze.train.run import latest, read_record

    save = latest(config.run_dir)
    parts = (
        None
        if save is None
        else of_today(type(config), read_record(save)["config"]).get("memory.micro_batches")
    )
    return parts if type(parts) is int and parts > 0 else None


def alone(
    config: TrainingConfig, parts: Parts, common: Common
) -> tuple[TrainingConfig, Manifest | None] | None:
    """(the config with its data files, where a new run starts) of one process: torch is not needed for it.

    None where torchrun started several, which look `together`. The start is None for a run that was started
    before: it may be finished, and need no model.
    """
    if started().size > 1:
        quieten()
        return None
    config = with_files(config, say(common))
    return config, None if _was_started(config) else opened_start(config.model, parts, common)


def agreed_together(
    config: TrainingConfig, parts: Parts, common: Common, group: Group
) -> tuple[TrainingConfig, Manifest | None]:
    """What `alone` gives, of several processes; refused is what they do not have in common.

    Process 0 looks first, and downloads; then the first of each other node. All others are told where it
    lies, and wait without a limit of time.
    """
    tell = say(common)
    tell(f"process 0 looks for data and model; {others(group)} for it")

    def look(first: bool) -> dict[str, Any]:
        return {"files": files_in(config, tell)} if first else {}

    told = _told(group, group.in_turn(look))["files"]
    config = config.model_copy(update={"data": config.data.written.found(told)})
    group.meet(lambda: _see(config))
    start = None if group.any(_was_started(config)) else start_of(config, parts, common, group)
    agree(group, {**_config_facts(config), **_versions(), **_data_facts(config), **_facts_of(start)})
    return config, start


def start_of(config: TrainingConfig, parts: Parts, common: Common, group: Group) -> Manifest:
    """Where training starts: process 0 opens and downloads it, then the first of each other node.

    The others are told its folder; all read its headers.
    """
    if group.size == 1:
        return opened_start(config.model, parts, common)
    first = group.in_turn(lambda first: opened_start(config.model, parts, common) if first else None)
    folder = _told(group, {"folder": str(first.path)} if first else {})["folder"]
    start = group.meet(lambda: first or opened_start(folder, parts, common))
    agree(group, _facts_of(start))
    return start


def opened_start(model: str, parts: Parts, common: Common) -> Manifest:
    """The Manifest that `parts` starts from, if it can be read."""
    from unfreeze.generate.source import refuse_unread_model

    start = parts.start(model, common)
    refuse_unread_model(start)
    return start


def others(group: Group) -> str:
    """'the other process waits', '7 others wait'."""
    return "the other process waits" if group.size == 2 else f"{group.size - 1} others wait"


def agree(group: Group, facts: Mapping[str, str]) -> None:
    """Raise ConfigError, the same in all processes, for the first fact that not all have in common."""
    every: list[dict[str, str]] = [json.loads(text) for text in group.texts(json.dumps(dict(facts)))]
    first = every[0]
    for rank, theirs in enumerate(every):
        for name in [*first, *(theirs.keys() - first.keys())]:
            if (here := theirs.get(name, "nothing")) != (there := first.get(name, "nothing")):
                raise ConfigError(
                    f"the processes differ in {name}: process {rank} has {here}, process 0 has {there}",
                    next="start all with the same command, the same versions and the same files",
                )


def _was_started(config: TrainingConfig) -> bool:
    return (config.run_dir / RESOLVED).is_file()


def _told(group: Group, found: dict[str, Any]) -> dict[str, Any]:
    """What the first process of this node found."""
    return json.loads(group.texts(json.dumps(found))[group.node_first])


def _see(config: TrainingConfig) -> None:
    """Whether this process sees the data files that the first of its node found."""
    for field, name in config.data.sources:
        if not Path(name).is_file():
            raise DataError(
                f"{field}: {name} is not a file here, though the first process of this node reads it",
                next="give every process the same files",
            )


def _config_facts(config: TrainingConfig) -> dict[str, str]:
    written = {name: value for name, value in flat(config.as_written).items() if name not in OWN}
    return {name: json.dumps(value, default=str) for name, value in written.items()}


def _versions() -> dict[str, str]:
    return {f"the version of {name}": number for name, number in versions().items()}


def _data_facts(config: TrainingConfig) -> dict[str, str]:
    found = config.data.sources
    facts = {"the number of data files": str(len(found))}
    for number, ((field, name), content) in enumerate(zip(found, contents(config.data), strict=True), 1):
        facts[f"{field} file {number} ({Path(name).name}, its size and hash)"] = content
    return facts


def _facts_of(start: Manifest | None) -> dict[str, str]:
    if start is None:
        return {}
    tensors = sorted(
        (name, info.dtype, info.shape, info.file.name, info.offset) for name, info in start.tensors.items()
    )
    return {
        "the checkpoint's files": str(len(start.files)),
        "the checkpoint's tensors": str(len(tensors)),
        "the checkpoint's bytes": str(start.nbytes),
        "the checkpoint's config.json": _hash(start.config),
        "the checkpoint's headers": _hash(tensors),
    }


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]
