"""The side of `dev bench store`: random reads of the token store, in a process without torch."""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from unfreeze.data import encoded_files, load_tokenizer
from unfreeze.data.store.encoded import root


def read(file: str, model: str, length: int, tokens: int, reads: int) -> dict[str, Any]:
    """Seconds to read `tokens` of random documents, checksums included: median of `reads`, cold and warm.

    Cold: the system was asked to drop the store's pages before the store was opened.
    """
    tokenizer = load_tokenizer(model)
    encoded_files([file], tokenizer, length)
    facts: dict[str, Any] = {}
    for name in ("cold", "warm"):
        if name == "cold":
            drop_pages(root())
        examples = encoded_files([file], tokenizer, length).examples
        draw, seconds = np.random.default_rng(0), list[float]()
        for _ in range(reads):
            began, left = time.perf_counter(), tokens
            while left > 0:
                left -= examples[int(draw.integers(len(examples)))].num_tokens
            seconds.append(time.perf_counter() - began)
        facts |= {f"{name}_seconds": statistics.median(seconds), f"{name}_slowest": max(seconds)}
        facts |= {"documents": len(examples), "tokens": int(examples.lengths_N.sum())}
    return facts


def drop_pages(folder: Path) -> None:
    """Ask the system to drop the cached pages of every file in a folder."""
    for path in (path for path in folder.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
