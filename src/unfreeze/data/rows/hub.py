"""`hf:org/name[:config][:split]`: a data set on the Hugging Face Hub, or a folder in its layout.

The library `datasets` (extra [data]) downloads it once and stores it as Arrow files; these are then read,
memory-mapped. Only its readers of text rows are allowed: no repository script is run, no pickle is read.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from unfreeze.config.tables import HUB
from unfreeze.core.errors import DataError, nearest

SECONDS = 10
"""Timeout after which the Hub counts as unreachable."""
READERS = ("json", "csv", "parquet", "arrow", "text")
"""The readers of `datasets` that are allowed."""


def hub_files(written: str, field: str) -> list[Path]:
    """Return the Arrow files of one split of a data set.

    The configuration may be omitted if there is only one or one is the default; the split, if there is only
    one or one is called train. Raises DataError for everything that can go wrong.
    """
    name, *rest = written.removeprefix(HUB).split(":")
    if not name or len(rest) > 2 or any("[" in part for part in rest):
        raise DataError(
            f"{field} = {written!r} is not of the form hf:org/name[:config][:split]",
            next="part of a split cannot be selected; use --steps to train on less",
        )
    if name.startswith((".", "/", "~")) and not Path(name).is_dir():
        raise DataError(f"{field} = {written!r}: there is no folder {name}", next=f"--{field} {HUB}FOLDER")
    try:
        import datasets  # pyright: ignore[reportMissingTypeStubs]  # an extra, and 1 s
        from datasets.exceptions import DatasetNotFoundError, DatasetsError  # pyright: ignore[reportMissingTypeStubs]
    except ImportError:
        raise DataError(
            f"{field} = {written!r} needs the library datasets, which is not installed",
            next="pip install datasets",
        ) from None
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # errors are reported below, once
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    offline = not Path(name).is_dir() and not _reachable(datasets, name)
    try:
        with _from_cache(datasets) if offline else nullcontext():
            return _files(datasets, name, rest)
    except DatasetNotFoundError:
        raise DataError(
            f"{field} = {written!r}: {name} is neither a folder here nor a data set you can read on the Hub",
            next="check the spelling; for a private or gated one: hf auth login",
        ) from None
    except (DatasetsError, OSError, ValueError, RuntimeError) as error:
        if offline and isinstance(error, ConnectionError):
            raise DataError(
                f"{field} = {written!r}: the Hub cannot be reached, and the cache has no copy",
                next="go online, or give --data its files",
            ) from None
        cause = str(error.__cause__ or error).strip().partition("\n")[0][:300]
        raise DataError(
            f"{field} = {written!r} cannot be read: {cause}",
            next="go online, correct the data set, or give --data its files",
        ) from None


def _reachable(datasets: Any, name: str) -> bool:
    """Return True if the Hub answers, even with a refusal. datasets would retry six times (half a minute)."""
    if datasets.config.HF_HUB_OFFLINE:
        return False
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError  # pyright: ignore[reportPrivateImportUsage]

    try:
        HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None).dataset_info(name, timeout=SECONDS)
    except (HTTPError, OSError) as error:
        return getattr(error, "response", None) is not None
    except ValueError:  # not a valid name on the Hub
        return True
    return True


@contextmanager
def _from_cache(datasets: Any) -> Generator[None]:
    """Make both libraries use only their caches, like HF_HUB_OFFLINE=1."""
    from huggingface_hub import constants

    before = datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = before


def _files(datasets: Any, name: str, rest: Sequence[str]) -> list[Path]:
    # select the configuration and the split
    source = str(Path(name).resolve()) if Path(name).is_dir() else name
    configs = datasets.get_dataset_config_names(source)
    config, split = (rest[0], rest[1]) if len(rest) == 2 else (None, None)
    if len(rest) == 1:
        config, split = (rest[0], None) if rest[0] in configs else (None, rest[0])
    if config is not None and config not in configs:
        raise _unknown("configuration", config, configs, name)
    if config is None and len(configs) > 1:
        config = datasets.get_dataset_default_config_name(source)
        if config is None and split is not None:
            raise _unknown("configuration", split, configs, name)
        if config is None:
            raise DataError(
                f"{HUB}{name} has {len(configs)} configurations: {', '.join(configs[:20])}",
                next=f"--data {HUB}{name}:{configs[0]}",
            )
    builder = datasets.load_dataset_builder(source, config)
    if (reader := type(builder).__module__.rpartition(".")[2]) not in READERS:
        raise DataError(
            f"{HUB}{name} needs the {reader!r} reader of datasets; supported readers: {', '.join(READERS)}",
            next="convert it to .jsonl",
        )
    splits = datasets.get_dataset_split_names(source, config)
    split = split or ("train" if "train" in splits else splits[0] if len(splits) == 1 else None)
    if split is None:
        raise DataError(
            f"{HUB}{name} has {len(splits)} splits, none of them train: {', '.join(splits[:20])}",
            next=f"--data {HUB}{name}:{splits[0]}",
        )
    if split not in splits:
        raise _unknown("split", split, splits, f"{name}:{config}" if config in rest else name)

    cache = None
    if Path(source).is_dir():
        # datasets 5.2 returns stale rows if the card of a folder names configurations and its files changed
        made_of = repr([(files, files.origin_metadata) for files in builder.config.data_files.values()])
        digest = hashlib.blake2b(made_of.encode(), digest_size=8).hexdigest()
        cache = str(Path(datasets.config.HF_DATASETS_CACHE) / f"folder-{digest}")
    split_data = datasets.load_dataset(source, config, split=split, cache_dir=cache)
    return [Path(file["filename"]) for file in split_data.cache_files]


def _unknown(what: str, word: str, known: Sequence[str], name: str) -> DataError:
    """Return the error for an unknown word. name: the data set (with its configuration, for a split)."""
    return DataError(
        f"{HUB}{name} has no {what} {word!r}{nearest(word, known)}; there are: {', '.join(known[:20])}",
        next=f"--data {HUB}{name}:{known[0]}",
    )
