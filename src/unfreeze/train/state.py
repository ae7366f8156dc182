"""State: everything a run is between two steps; saving it atomically, and resuming bit for bit.

A save is a folder with two files and no pickle: tensors.safetensors (trainable weights, optimizer, balancing
biases, RNG) and state.json (step, data cursor, schedule, optimizer settings, config and its hash, the best
step so far). It is written under a temporary name, synced to disk and renamed, so it exists completely or not
at all. It does not depend on the number of devices: if each process holds its own rows, each writes a file of
them (shards.py), and any other number of processes can read them.
"""

from __future__ import annotations

import errno
import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from unfreeze.checkpoint.save import sync_folder, write_file, write_safetensors
from unfreeze.core.errors import FULL, CheckpointError, UserError, size_limit
from unfreeze.core.schema import Metric
from unfreeze.core.units import format_bytes
from unfreeze.models import Decoder
from unfreeze.parallel.processes.collectives import Group
from unfreeze.parallel.processes.mesh import HeldPart, check_copies
from unfreeze.train.balance import AfterUpdate
from unfreeze.train.interrupt import Interrupt
from unfreeze.train.moments import Part
from unfreeze.train.optim import AdamW
from unfreeze.train.run import RECORD, Run, config_hash, plain_json, read_record, save_name, saves
from unfreeze.train.schedule import Schedule
from unfreeze.train.shards import OLD_MOMENTS, TENSORS, SavedShards

_RNG, _KEPT = "rng.", "kept."

OnFullDisk = Literal["stop", "continue"]
"""If the disk has no room for a save: stop the run with DiskFull, or warn and continue to the next save."""


class DiskFull(UserError):
    """There was no room for a save. Earlier saves are complete and kept."""


@dataclass
class State:
    """The state that fit() advances.

    step    finished optimizer steps
    cursor  position of the next batch, from the batch iterator
    stale   number of consecutive validations without a new lowest loss. Every save contains it
    ended   True if the run ends at this step, before its schedule does
    base    digest of the initial weights (checkpoint/same.py). Every save contains it
    saved   the step of the newest save by this process; None if there is none
    metrics display settings of the loss and the objective's metrics, for the start event
    kept    cursor -> tensors that the source needs to go on there, besides the cursor, on the host. Every
            save contains them
    heldout reference values of validation: "first" and "lowest", each {"step", "loss", "rows"}
            (evaluate/by_row.py), and the "fingerprint" of the documents; {} without validation. Every
            save contains it
    best    {"step", "loss"} of the lowest validation loss so far; None without validation. Every save
            contains it, so it is always as old as the save; a separate file could be older or newer
    interrupt  notices a signal; a source that knows it may give up its next step (StepLeft)
    """

    run: Run
    model: Decoder
    optimizer: AdamW
    schedule: Schedule
    after_update: Sequence[AfterUpdate] = ()
    step: int = 0
    cursor: dict[str, Any] | None = None
    best: dict[str, Any] | None = None
    heldout: dict[str, Any] = field(default_factory=dict[str, Any])
    stale: int = 0
    ended: bool = False
    base: str = ""
    saved: int | None = None
    metrics: Sequence[Metric] = ()
    kept: Callable[[dict[str, Any]], Mapping[str, Tensor]] = lambda cursor: dict[str, Tensor]()
    interrupt: Interrupt = field(default_factory=Interrupt)

    @property
    def finished(self) -> bool:
        """True if no step follows."""
        return self.ended or self.step >= self.schedule.steps

    def tensors(self) -> dict[str, Tensor]:
        """Return the live tensors that training changes, under the names they are saved by."""
        tensors: dict[str, Tensor] = {
            f"model.{name}": weight for name, weight in self.optimizer.weights().items()
        }
        tensors |= {f"optimizer.{name}": tensor for name, tensor in self.optimizer.tensors().items()}
        for part in self.after_update:
            tensors |= {f"after_update.{name}": tensor for name, tensor in part.tensors().items()}
        return tensors

    def held(self, name: str, group: Group) -> HeldPart:
        """Return what this process holds of the tensor saved as `name`, in a run of `group`'s processes."""
        _, *parts = name.split(".")
        for begin in range(len(parts)):
            if (parameter := ".".join(parts[begin:])) in self.optimizer.parameters:
                return self.optimizer.held(parameter, group)
        return HeldPart(None, group, group.size)

    def check_copies(self, group: Group) -> None:
        """Raise UserError in all processes unless all copies of the same rows are bit-identical."""
        check_copies(group, self.tensors(), partial(self.held, group=group))

    def parts(self) -> dict[str, Part]:
        """Return the part of each tensor held here, if not whole; {} if every process holds all."""
        own = self.optimizer.parameters
        parts = self.optimizer.parts().items()
        return {f"{'model' if name in own else 'optimizer'}.{name}": part for name, part in parts}


def start_or_resume(
    run: Run,
    model: Decoder,
    *,
    optimizer: AdamW,
    schedule: Schedule,
    after_update: Sequence[AfterUpdate] = (),
) -> State:
    """Return the State a run starts with: step 0, or that of its latest save.

    A save is copied into model, optimizer and torch's random number generators. If another number of
    processes saved it, each process takes its own rows.
    Raises ConfigError if schedule or optimizer settings differ from the save's, CheckpointError if its
    tensors are not exactly those of this model and optimizer. Create the batch iterator from `run.cursor`.
    """
    state = State(run, model, optimizer, schedule, after_update)
    if run.saved is None or run.save_path is None:
        return state
    run.refuse_changes(run.saved["schedule"], plain_json(schedule.record()), "schedule.")
    run.refuse_changes(run.saved["optimizer"], plain_json(optimizer.settings), "optimizer.")
    _load_tensors(SavedShards(run.save_path, run.saved.get("files")), state.tensors(), state.parts())
    state.step, state.cursor, state.best = run.step, run.cursor, run.saved.get("best")
    state.stale, state.heldout = run.saved.get("stale", 0), run.saved.get("heldout", {})
    # stopped early: only the end of the run remains
    state.ended = bool(run.saved.get("ended")) and not run.changed
    return state


def save(state: State, keep: int = 2, on_full_disk: OnFullDisk = "stop") -> Path | None:
    """Write runs/<name>/state/step-<step> and return it. Emits a "save" event with its bytes and seconds.

    Each step is saved only once. The newest `keep` saves are kept, and that of state.best.
    Order: write under .tmp, fsync files and folder, rename, fsync the parent; only then are older saves
    removed. A kill at any point leaves the previous save readable.
    On a full disk: raises DiskFull, or with on_full_disk "continue" emits a "warning" event and returns None;
    the previous saves stay. Raises UserError for any other failure to write.
    """
    final = state.run.path / "state" / save_name(state.step)
    if final.exists():
        return final
    tensors = {name: tensor.contiguous() for name, tensor in state.tensors().items()} | host_tensors(state)
    started = time.perf_counter()
    try:
        _write(final, tensors, record_of(state))
    except OSError as error:
        failure = save_error(error, final, nbytes_of(tensors))
        if ends_run(state, failure, on_full_disk):
            raise failure from error
        return None
    finish_save(state, final, keep, nbytes_of(tensors), started)
    return final


def finish_save(state: State, final: Path, keep: int | None, nbytes: int, started: float) -> None:
    """Finish a save: emit its event and remove older saves. keep None: another process removes them."""
    seconds, state.saved = time.perf_counter() - started, state.step
    best = save_name(state.best["step"]) if state.best else None
    for old in saves(state.run.path)[:-keep] if keep is not None else ():
        if old.name != best:
            _remove(old)
    state.run.events.emit(
        "save", state.step, path=f"{final.parent.name}/{final.name}", bytes=nbytes, seconds=seconds
    )


def ends_run(state: State, failure: UserError, on_full_disk: OnFullDisk) -> bool:
    """Return True if a failed save ends the run; otherwise emit a warning, and the run continues."""
    if on_full_disk == "stop" or not isinstance(failure, DiskFull):
        return True
    state.run.events.emit("warning", state.step, message=f"{failure.message}; training continues without it")
    return False


def record_of(state: State) -> dict[str, Any]:
    """Return the content of a save's state.json."""
    return {
        "format": 1,
        "step": state.step,
        "cursor": state.cursor,
        "schedule": state.schedule.record(),
        "optimizer": state.optimizer.settings,
        "best": state.best,
        "heldout": state.heldout,
        "stale": state.stale,
        "ended": state.ended,
        "base": state.base,
        "config": state.run.config,
        "config_hash": config_hash(state.run.config),
        "torch": torch.__version__,
    }


def _write(final: Path, tensors: dict[str, Tensor], record: dict[str, Any]) -> None:
    """Write the folder `final` atomically. Each write below syncs its file and then the folder."""
    temporary = final.with_name(final.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        write_safetensors(temporary / TENSORS, tensors)
        write_file(temporary / RECORD, json.dumps(record, indent=1, allow_nan=False))
        temporary.rename(final)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)  # frees the space again
        raise
    sync_folder(final.parent)


def load_best(state: State) -> int | None:
    """Copy the trained weights of the best save into the live model.

    The optimizer's moments, random numbers and counters are unchanged.
    Return its step; None if there is no best save, or the model is already at that step. For output that is
    written after training.
    """
    path = None if state.best is None else state.run.path / "state" / save_name(state.best["step"])
    if path is None or state.best is None or state.best["step"] == state.step or not path.is_dir():
        return None
    record = read_record(path)
    live = {name: tensor for name, tensor in state.tensors().items() if _is_weight(name)}
    _copy(SavedShards(path, record.get("files")), live, state.parts())
    return int(state.best["step"])


def _is_weight(name: str) -> bool:
    """Return True for a trained weight, or the float32 master it is rounded from."""
    return not name.startswith("optimizer.") or name.startswith("optimizer.master.")


def _load_tensors(saved: SavedShards, live: dict[str, Tensor], parts: dict[str, Part]) -> None:
    """Copy a save into the live tensors, one at a time, and into torch's random number generators.

    Every name must be on both sides, with the same shape and dtype. A half-precision weight is its rounded
    float32 master; if only one side has the weight, the master stands for it.
    """
    names = saved.names
    missing = sorted(name for name in live.keys() | {_RNG + "cpu"} if not ({name, _master_of(name)} & names))
    unexpected = sorted(
        name
        for name in names - live.keys()
        if not name.startswith((_RNG, _KEPT)) and _master_of(name) not in live
    )
    if missing or unexpected:
        raise CheckpointError(
            f"{saved.path} does not fit this model: {len(missing)} of {len(live)} tensors missing,"
            f" {len(unexpected)} unexpected; first: {(missing + unexpected)[0]}",
            next=(
                OLD_MOMENTS
                if all(".exp_avg_" in name for name in (missing + unexpected))
                else "resume with the model and adapter the save was made with, or give another folder with"
                " --out"
            ),
        )
    _copy(saved, live, parts)
    torch.set_rng_state(saved.whole(_RNG + "cpu"))
    if torch.cuda.is_available() and _RNG + "cuda" in names:
        torch.cuda.set_rng_state(saved.whole(_RNG + "cuda"))


def _master_of(name: str) -> str:
    """Return the name of the master of a weight "model.…"; for other tensors a name that does not exist."""
    return f"optimizer.master.{name.removeprefix('model.')}" if name.startswith("model.") else ""


@torch.no_grad()
def _copy(saved: SavedShards, live: dict[str, Tensor], parts: dict[str, Part]) -> None:
    """Copy into each live tensor its rows of the saved one."""
    for name, tensor in live.items():
        part = parts.get(name)
        if name in saved.names:
            tensor.copy_(saved.read(name, tensor, part))
        else:
            like = torch.empty_like(tensor, dtype=torch.float32, device="meta")
            tensor.copy_(saved.read(_master_of(name), like, part))


def kept_of(run: Run) -> dict[str, Tensor]:
    """Return what State.kept put into the save that the run resumes from; {} for a new run."""
    if run.saved is None or run.save_path is None:
        return {}
    saved = SavedShards(run.save_path, run.saved.get("files"))
    return {name.removeprefix(_KEPT): saved.whole(name) for name in saved.names if name.startswith(_KEPT)}


def host_tensors(state: State) -> dict[str, Tensor]:
    """Return what one process saves for all: random numbers, and what the source keeps."""
    tensors = rng_tensors(state.model.device)
    if state.cursor is not None:
        tensors |= {_KEPT + name: tensor for name, tensor in state.kept(state.cursor).items()}
    return tensors


def rng_tensors(device: torch.device) -> dict[str, Tensor]:
    tensors = {_RNG + "cpu": torch.get_rng_state()}
    if device.type == "cuda":
        tensors[_RNG + "cuda"] = torch.cuda.get_rng_state(device)
    return tensors


def _remove(save_path: Path) -> None:
    """Rename, then remove: a kill in between leaves no half save under a valid name."""
    doomed = save_path.with_name(save_path.name + ".old.tmp")
    save_path.rename(doomed)
    shutil.rmtree(doomed)


def nbytes_of(tensors: Mapping[str, Tensor]) -> int:
    """Return the bytes of all of them."""
    return sum(tensor.nbytes for tensor in tensors.values())


def save_error(error: OSError, final: Path, needed: int) -> UserError:
    """Return the error for a save of `needed` bytes that could not be written, with its remedy."""
    free = shutil.disk_usage(final.parents[1]).free
    full = error.errno in FULL
    cause = "the disk is full" if full else f"{type(error).__name__}: {error}"
    sizes, remedy = f"{format_bytes(needed)} needed, {format_bytes(free)} free", ""
    if error.errno == errno.EFBIG:
        cause, remedy = size_limit()
        sizes = f"{format_bytes(needed)} needed"
    complete = saves(final.parents[1])
    return (DiskFull if full else UserError)(
        f"could not save {final}: {cause}; {sizes}. "
        + (
            f"Earlier saves are untouched, the last is {complete[-1].name}"
            if complete
            else "There is no earlier save"
        ),
        next=f"{remedy or f'free space on the disk of {final.parent}'}, then run the same command again: "
        + ("it resumes from the last save" if complete else "it starts at step 1"),
    )
