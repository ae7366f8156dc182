"""A save made by all processes of a run together; each holds its own rows.

1. process 0 creates the folder step-000120.tmp
2. every process writes and syncs tensors-0000i-of-0000n.safetensors in it
3. process 0 checks that all files exist, writes state.json, renames the folder and syncs its parent

After each step all processes learn the result. So all know if one has no room, and a killed process leaves
the previous save intact.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from unfreeze.checkpoint.save import sync_folder, write_file
from unfreeze.core.errors import UserError
from unfreeze.parallel.processes.collectives import ALONE, Group
from unfreeze.train.moments import Part
from unfreeze.train.run import RECORD, save_name
from unfreeze.train.shards import dealt, file_name, write_part
from unfreeze.train.state import (
    DiskFull,
    OnFullDisk,
    State,
    ends_run,
    finish_save,
    host_tensors,
    nbytes_of,
    record_of,
    save,
    save_error,
)


def save_together(
    state: State, keep: int = 2, on_full_disk: OnFullDisk = "stop", group: Group = ALONE
) -> Path | None:
    """Run `save` in all processes of a run, `group`, which call it together; all return the same.

    If all hold the same tensors, process 0 writes one file and the others wait.
    """
    final = (state.run.path / "state").resolve() / save_name(state.step)  # for a Follower this is a link
    parts = state.parts()
    if not parts:
        path = group.on_rank0(lambda: save(state, keep, on_full_disk))
        return final if group.any(path is not None) else None
    if group.any(group.rank == 0 and final.exists()):
        return final
    started = time.perf_counter()
    try:
        nbytes = _write(state, parts, final, group)
    except UserError as failure:
        if ends_run(state, failure, on_full_disk):
            raise
        return None
    finish_save(state, final, keep if group.rank == 0 else None, nbytes, started)
    return final


def _write(state: State, parts: dict[str, Part], final: Path, group: Group) -> int:
    """Write the folder `final` atomically; return the bytes of all its tensors."""
    temporary = final.with_name(final.name + ".tmp")
    tensors = own_share(state, parts, group)
    names = [file_name(rank, group.size) for rank in range(group.size)]
    sizes: dict[str, int] = {}

    def folder() -> int:
        if group.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        return nbytes_of(tensors)

    def file() -> int:
        return write_part(temporary / names[group.rank], tensors, parts)

    def record() -> int:
        if group.rank == 0:
            for name, size in sizes.items():
                if (temporary / name).stat().st_size != size:
                    raise OSError(f"{name} has {(temporary / name).stat().st_size:,} bytes, not {size:,}")
            text = json.dumps(record_of(state) | {"files": sizes}, indent=1, allow_nan=False)
            write_file(temporary / RECORD, text)
            temporary.rename(final)
            sync_folder(final.parent)
        return 0

    try:
        total = sum(_all(group, folder, final, tensors))
        sizes.update(zip(names, _all(group, file, final, tensors), strict=True))
        _all(group, record, final, tensors)
    except UserError:
        if group.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)  # frees the space again
        raise
    return total


def _all(group: Group, act: Callable[[], int], final: Path, tensors: dict[str, Tensor]) -> list[int]:
    """Run `act` in every process; return all results. If one fails, raise in all and name it."""
    try:
        outcome = json.dumps({"gave": act()})
    except (OSError, UserError) as error:
        failure = save_error(error, final, nbytes_of(tensors)) if isinstance(error, OSError) else error
        full = isinstance(failure, DiskFull)
        outcome = json.dumps({"failed": failure.message, "next": failure.next, "full": full})
    heard = [json.loads(text) for text in group.texts(outcome)]
    for rank, each in enumerate(heard):
        if "failed" in each:
            kind = DiskFull if each["full"] else UserError
            raise kind(f"process {rank}: {each['failed']}", next=each["next"])
    return [each["gave"] for each in heard]


def own_share(state: State, parts: dict[str, Part], group: Group) -> dict[str, Tensor]:
    """Return the tensors that this process writes, so that every row is written exactly once.

    Replicated tensors are divided among all processes, replicated rows among their holders. Random numbers
    are process 0's.
    """
    live = {name: tensor.contiguous() for name, tensor in state.tensors().items()}
    everywhere = dealt({name: t.nbytes for name, t in live.items() if name not in parts}, group.size)
    mine = {name: live[name] for name, writer in everywhere.items() if writer == group.rank}
    for number, name in enumerate(sorted(name for name in live if name in parts)):
        summed = state.held(name, group).summed
        if number % summed.size == summed.rank:
            mine[name] = live[name]
    return mine | (host_tensors(state) if group.rank == 0 else {})
