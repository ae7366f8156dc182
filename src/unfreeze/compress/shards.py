"""One checkpoint becomes another, file by file: a rerun continues after a kill.

OUT/<record> keeps the progress after every file, with the file's size and SHA-256. config.json and the index
come last: before them no program takes the folder for a model.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from unfreeze.checkpoint.manifest import INDEX
from unfreeze.checkpoint.save import write_file
from unfreeze.checkpoint.shard import Shard, file_bytes, sha256_of
from unfreeze.core.errors import ConfigError, DoesNotFit
from unfreeze.core.units import format_bytes, plural
from unfreeze.quant.codec import Part, as_table, parts_nbytes
from unfreeze.untrusted.json_object import read_object

VERSION = 1  # of the record
SAMPLE = 2**16  # bytes read at three places of a file for its fingerprint

Progress = Callable[[int, int], None]
"""(bytes done, total bytes)"""


class Planned(Protocol):
    """A file to write: its name, and its tensors' dtypes and shapes."""

    @property
    def name(self) -> str: ...

    @property
    def parts(self) -> Mapping[str, Part]: ...


F = TypeVar("F", bound=Planned)


@dataclass
class Record:
    """The inputs and the finished files of a folder.

    file: the record's name there. noun: names the work. absent: inputs that older records lack, with the
    value that they had.
    """

    inputs: dict[str, Any]
    shards: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    finished: bool = False
    more: dict[str, Any] = field(default_factory=dict[str, Any])
    file: str = ""
    noun: str = ""
    absent: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def a_noun(self) -> str:
        """The noun with its article."""
        return f"{'an' if self.noun[0] in 'aeiou' else 'a'} {self.noun}"

    def write(self, out: Path) -> None:
        whole = {"version": VERSION, "finished": self.finished, "inputs": self.inputs, **self.more}
        whole["shards"] = self.shards
        write_file(out / self.file, json.dumps(whole, indent=1, ensure_ascii=False) + "\n")


R = TypeVar("R", bound=Record)


def refuse_others(record: Record, out: Path, next: str = "give an empty or new folder") -> None:
    """Raise ConfigError for a file, and for a folder with files but without this work's record."""
    if out.is_file():
        raise ConfigError(f"out = {str(out)!r} is a file, not a folder", next="give another folder")
    if out.is_dir() and not (out / record.file).is_file():
        others = sorted(path.name for path in out.iterdir() if ".unfinished-" not in path.name)
        if others:
            raise ConfigError(f"{out} holds {others[0]}, not {record.a_noun}", next=next)


def begun(record: R, out: Path) -> R:
    """Fill an empty record with the progress in `out`; it stays empty if the folder is new or empty.

    Raises ConfigError for a folder with anything else in it, and for one of other inputs.
    """
    refuse_others(record, out)
    if not (out / record.file).is_file():
        return record
    stored = read_object(out / record.file, ConfigError)
    before, shards = {**record.absent, **(as_table(stored.get("inputs")) or {})}, stored.get("shards")
    if not isinstance(shards, dict) or not all(as_table(entry) for entry in shards.values()):
        raise damaged(record, out)
    other = [name for name in record.inputs if before.get(name) != record.inputs[name]]
    if other or stored.get("version") != VERSION:
        files = [f"of another {name}" for name in other if name in ("base", "adapter")]
        flags = [f"with --{name} {before.get(name)}" for name in other if name not in ("base", "adapter")]
        what = " and ".join(files + flags) or "by another version of this program"
        raise ConfigError(
            f"{out} holds {record.a_noun} {what}", next="give another folder, or the same command as then"
        )
    record.shards, record.finished = dict(shards), bool(stored.get("finished"))
    known = ("version", "finished", "inputs", "shards")
    record.more = {name: value for name, value in stored.items() if name not in known}
    return record


def damaged(record: Record, out: Path) -> ConfigError:
    """The error for a record that cannot be read."""
    return ConfigError(f"{out / record.file} is damaged", next="give another folder, or empty this one")


def write_files(
    out: Path,
    files: Sequence[F],
    record: Record,
    write: Callable[[F, Shard, Callable[[int], None]], dict[str, Any]],
    finish: Callable[[], None],
    progress: Progress | None,
) -> None:
    """Write the files that are missing or not whole, then call `finish` (config.json, the index).

    write: (file, its open shard, adds bytes to the progress) -> further fields of its entry in the record.
    Raises DoesNotFit if the disk is too small, before anything is written.
    """
    done = {file.name for file in files if _is_whole(out, file.name, record)}
    left = [file for file in files if file.name not in done]
    check_disk(out, left, len(files))
    out.mkdir(parents=True, exist_ok=True)
    with _alone(out, record.noun):
        for stale in out.glob(".*.unfinished-*"):
            stale.unlink()
        record.shards = {name: entry for name, entry in record.shards.items() if name in done}
        record.write(out)
        total = sum(file_bytes(file.parts) for file in files)
        written = total - sum(file_bytes(file.parts) for file in left)

        def advance(nbytes: int) -> None:
            nonlocal written
            written += nbytes
            if progress is not None:
                progress(min(written, total), total)

        for file in left:
            whole = written + file_bytes(file.parts)
            with Shard(out / file.name, file.parts) as shard:
                more = write(file, shard, advance)
                size, digest = shard.close()
            record.shards[file.name] = {"bytes": size, "sha256": digest, **more}
            record.write(out)
            advance(whole - written)  # its header
        finish()


def write_index(out: Path, files: Sequence[Planned]) -> None:
    """Write the index of several files; one file needs none."""
    if len(files) > 1:
        weight_map = {name: file.name for file in files for name in file.parts}
        total = sum(parts_nbytes(file.parts.values()) for file in files)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        write_file(out / INDEX, json.dumps(index, indent=2) + "\n")


def check_disk(out: Path, left: Sequence[Planned], files: int) -> None:
    """Raise DoesNotFit if the remaining files take more than the free disk space."""
    existing = next(path for path in (out.absolute(), *out.absolute().parents) if path.is_dir())
    free, needed = shutil.disk_usage(existing).free, sum(file_bytes(file.parts) for file in left)
    if needed > free:
        there = f" more, after {files - len(left)}" if len(left) < files else ""
        raise DoesNotFit(
            f"disk: {format_bytes(needed)} for {plural(len(left), 'file')}{there}; {format_bytes(free)} free"
            f" for {out}",
            next="free space, or give --out on another disk",
        )


def files_fingerprint(*files: Path) -> str:
    """SHA-256 over the files' names and sizes and 64 KiB at the start, middle and end of each.

    A base of 594 GB is not read twice; the start of a safetensors file has the place of every tensor.
    """
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}\n".encode())
        with path.open("rb") as file:
            for at in (0, size // 2, max(0, size - SAMPLE)):
                file.seek(at)
                digest.update(file.read(SAMPLE))
    return digest.hexdigest()


def _is_whole(out: Path, name: str, record: Record) -> bool:
    """True if a file exists as the record has it."""
    entry, path = record.shards.get(name), out / name
    if entry is None or not path.is_file() or path.stat().st_size != entry.get("bytes"):
        return False
    return sha256_of(path) == entry.get("sha256")


@contextmanager
def _alone(out: Path, noun: str) -> Generator[None]:
    """Hold a lock, so that no other process writes into the folder meanwhile."""
    descriptor = os.open(out, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        words = "is merging" if noun == "merge" else "is writing"
        raise ConfigError(
            f"another process {words} into {out}", next="wait for it, or give another --out"
        ) from None
    try:
        yield
    finally:
        os.close(descriptor)
