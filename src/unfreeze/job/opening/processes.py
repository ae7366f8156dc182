"""Agreement between the processes of a run before it starts.

They must be able to share a step equally, find model and data (process 0 looks and downloads first), and all
see the same files and config.
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
"""Fields that can differ between processes: paths (file contents are compared), device and threads."""


def refuse_uneven(config: TrainingConfig, size: int | None = None) -> None:
    """Raise ConfigError if `size` processes (default: torchrun's) cannot share the micro-batches equally.

    Each process must run the same number of micro-batches; otherwise the collectives would deadlock.
    Checked before anything is downloaded, encoded or loaded.
    """
    size = started().size if size is None else size
    parts = config.memory.micro_batches
    if (saved := _saved_parts(config)) is not None and saved % size:
        counts = ", ".join(map(str, sharers(saved)))
        raise ConfigError(
            f"{config.run_dir} has {saved} micro_batches per step, which is no multiple of {size} processes"
            " and cannot change within a run",
            next=f"resume with a number of processes that divides {saved} (torchrun --nproc-per-node):"
            f" {counts}",
        )
    if parts % size:
        near = nearest_multiples(parts, size)
        raise ConfigError(
            f"{parts} micro_batches per step is no multiple of {size} processes: each process needs the same"
            " number",
            next=" or ".join(f"--micro-batches {count}" for count in near),
        )


def _saved_parts(config: TrainingConfig) -> int | None:
    """Micro-batches per step of the run to resume in this folder; None if there is none."""
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
    """Return (config with its data files, manifest of the starting model) for one process, without torch.

    Returns None if torchrun started several processes (see `agreed_together`). The manifest is None for a run
    that was started before: it may be finished and need no model.
    """
    if started().size > 1:
        quieten()
        return None
    config = with_files(config, say(common))
    return config, None if _was_started(config) else opened_start(config, parts, common)


def agreed_together(
    config: TrainingConfig, parts: Parts, common: Common, group: Group
) -> tuple[TrainingConfig, Manifest | None]:
    """Like `alone`, for several processes. Raises ConfigError for anything they do not have in common.

    Process 0 looks and downloads first, then the first process of each other node. The others wait without
    a time limit, and then get the paths.
    """
    show = say(common)
    show(f"process 0 looks for data and model; {others(group)} for it")

    def look(first: bool) -> dict[str, Any]:
        return {"files": files_in(config, show)} if first else {}

    files = _from_node_first(group, group.in_turn(look))["files"]
    config = config.model_copy(update={"data": config.data.written.with_files(files)})
    group.meet(lambda: _see(config))
    start = None if group.any(_was_started(config)) else start_of(config, parts, common, group)
    agree(group, {**_config_facts(config), **_versions(), **_data_facts(config), **_facts_of(start)})
    return config, start


def start_of(config: TrainingConfig, parts: Parts, common: Common, group: Group) -> Manifest:
    """Open the starting model: process 0 first, then the first process of each other node.

    These download it if needed. The others get the folder; all read its headers.
    """
    if group.size == 1:
        return opened_start(config, parts, common)
    first = group.in_turn(lambda first: opened_start(config, parts, common) if first else None)
    folder = _from_node_first(group, {"folder": str(first.path)} if first else {})["folder"]
    start = group.meet(lambda: first or opened_start(config, parts, common, folder))
    agree(group, _facts_of(start))
    return start


def opened_start(config: TrainingConfig, parts: Parts, common: Common, folder: str = "") -> Manifest:
    """Open the manifest of the starting model, with the run's scaling of positions.

    folder: where it is, if it is known. Raises UserError if it cannot be read.
    """
    from unfreeze.generate.source import refuse_unread_model
    from unfreeze.models.longer import lengthened

    start = parts.start(folder or config.model, common)
    refuse_unread_model(start)
    return lengthened(start, config.rope.longer)


def others(group: Group) -> str:
    """Words such as 'the other process waits' or '7 others wait'."""
    return "the other process waits" if group.size == 2 else f"{group.size - 1} others wait"


def agree(group: Group, facts: Mapping[str, str]) -> None:
    """Raise ConfigError, the same in all processes, for the first fact on which they differ."""
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


def _from_node_first(group: Group, facts: dict[str, Any]) -> dict[str, Any]:
    """Return the facts of this node's first process. Collective."""
    return json.loads(group.texts(json.dumps(facts))[group.node_first])


def _see(config: TrainingConfig) -> None:
    """Raise DataError if this process does not see the data files that its node's first process found."""
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
    sources = config.data.sources
    facts = {"the number of data files": str(len(sources))}
    for number, ((field, name), content) in enumerate(zip(sources, contents(config.data), strict=True), 1):
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
