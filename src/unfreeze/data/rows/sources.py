"""Resolve --data to files: a file, a pattern, a folder, or a data set on the Hub (hub.py)."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable
from pathlib import Path

from unfreeze.config.tables import HUB
from unfreeze.core.errors import ConfigError, looked_in, nearest
from unfreeze.core.units import plural
from unfreeze.data.rows.files import ending, is_data, refuse_form
from unfreeze.data.rows.hub import hub_files

FORMS = "a .jsonl, .json, .csv, .parquet, .arrow or .txt file, a folder of them, a pattern, or hf:org/name"
SHOWN = 8
"""Maximum number of names in a message."""

LEDGER = "ledger.json"
"""Account of a folder that data clean wrote; no rows."""


def files_of(written: str, field: str = "data", say: Callable[[str], None] = lambda line: None) -> list[Path]:
    """Return the files that `written` stands for, in reading order, and report them with `say`.

        a file          itself
        a pattern       its matches (* ? [] **), sorted; the name of an existing file is never a pattern
        a folder        its data files (not those of subfolders), sorted. A .txt beside files of other formats
                        is left out: it is most likely a licence
        hf:…            the Arrow files that the library `datasets` creates

    field: the flag without its dashes, or the word of a command's help for names without a flag: FILES.
    Raises ConfigError if there is none, DataError for an unsupported file.
    """
    if written.startswith(HUB):
        files = hub_files(written, field)
        say(f"{field}: {written} is {plural(len(files), 'Arrow file')} in {files[0].parent}")
        return files
    path = Path(written)
    if path.is_dir():
        return _folder(path, field, say)
    if path.is_file():
        refuse_form(path)
        return [path]
    if glob.has_magic(written):
        return _pattern(written, field, say)
    if path.is_symlink():
        raise ConfigError(
            f"{field} = {written!r} is a link to {os.readlink(path)}, which does not exist",
            next="correct the link",
        )
    raise ConfigError(
        f"{field} = {written!r} is not a file or folder{looked_in(written)}{near_path(path)}",
        next=f"give {_given(field)} {FORMS}"
        if not _like_an_id(written)
        else f"{_given(field)} {HUB}{written} reads a data set of the Hub",
    )


def _folder(path: Path, field: str, say: Callable[[str], None]) -> list[Path]:
    inside = sorted(entry for entry in path.iterdir() if not entry.name.startswith("."))
    if (path / "dataset_dict.json").is_file():  # written by save_to_disk for several splits
        splits = [entry for entry in inside if (entry / "state.json").is_file()]
        raise ConfigError(
            f"{field} = {os.fspath(path)!r} holds the splits of a saved data set:"
            f" {', '.join(split.name for split in splits[:SHOWN])}",
            next=f"{_given(field)} {next((s for s in splits if s.name == 'train'), (splits or [path])[0])}",
        )
    # in a folder from datasets' save_to_disk, skip the caches of map() and its own metadata
    saved = (path / "state.json").is_file()
    notes = ("state.json", "dataset_info.json")
    cleaned = (path / LEDGER).is_file() and any(entry.name.startswith("rows-") for entry in inside)
    files = [
        entry
        for entry in inside
        if entry.is_file()
        and is_data(entry)
        and not (saved and (entry.name in notes or entry.name.startswith("cache-")))
        and not (cleaned and entry.name == LEDGER)
    ]
    rows = [entry for entry in files if ending(entry) != ".txt"]
    files = rows or files
    if not files:
        # skip run folders: events.jsonl is not data
        folders = [e for e in inside if e.is_dir() and not (e / "events.jsonl").is_file()]
        deeper = next((entry for entry in folders if any(map(is_data, entry.iterdir()))), None)
        raise ConfigError(
            f"{field} = {os.fspath(path)!r}: the folder holds no data file"
            + (f" ({_names([entry.name for entry in inside])})" if inside else ": it is empty"),
            next=_one_split(path, deeper, field) if deeper else f"give {_given(field)} {FORMS}",
        )
    left = [entry.name + "/" * entry.is_dir() for entry in inside if entry not in files]
    say(
        f"{field}: {path} holds {_names([entry.name for entry in files])}"
        + (f"; left out: {_names(left)}" if left else "")
    )
    return files


def _one_split(path: Path, deeper: Path, field: str) -> str:
    """Suggest an argument for a folder whose data files are in subfolders.

    A folder with a card is a data set in the Hub's layout; its files may belong to several splits.
    """
    return f"{_given(field)} {HUB}{path}" if (path / "README.md").is_file() else f"{_given(field)} {deeper}"


def _pattern(written: str, field: str, say: Callable[[str], None]) -> list[Path]:
    matched = [Path(name) for name in sorted(glob.glob(written, recursive=True)) if not Path(name).is_dir()]
    # each file once, even if several links lead to it
    files = list({path.resolve(): path for path in reversed(matched)}.values())[::-1]
    if not files:
        raise ConfigError(
            f"{field} = {written!r} matches no file{looked_in(written)}", next=f"give {_given(field)} {FORMS}"
        )
    for path in files:
        refuse_form(path)
    say(f"{field}: {written} matches {_names([os.fspath(path) for path in files])}")
    return files


def _names(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    count = f"{len(names)} files: " if len(names) > 1 else ""
    return f"{count}{', '.join(names[:SHOWN])}{more}"


def near_path(path: Path) -> str:
    """End of an error message: the name in the path's folder that is most like its own."""
    return nearest(path.name, [entry.name for entry in path.parent.iterdir()]) if path.parent.is_dir() else ""


def _given(field: str) -> str:
    """The flag of a field; as it is for one in capitals, which stands without a flag (FILES, IN)."""
    return field if field.isupper() else f"--{field}"


def _like_an_id(written: str) -> bool:
    return written.count("/") == 1 and not written.startswith((".", "/", "~")) and not Path(written).suffix
