"""Our side of `bench data`, in a process of its own. Nothing here imports torch, and encoding does not."""

from __future__ import annotations

import re
import resource
import time
from pathlib import Path
from typing import Any

from unfreeze.data import encoded_files, load_tokenizer
from unfreeze.data.store.workers import num_workers


def peak_bytes(processes: int = 0) -> int:
    """Resident bytes at most: of this process, and of its largest child for each of `processes`.

    Not getrusage's own: that begins with what the process had that started this one.
    """
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    own = int(found[1]) if found else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return 1024 * (own + processes * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)


def encode(files: list[str], model: str, length: int, processes: int, first: int = 0) -> dict[str, Any]:
    """Seconds until the files are examples, and the ids of the `first` ones.

    processes: 1 for this one alone, else as many workers as cores where they pay.
    """
    tokenizer = load_tokenizer(model)
    began = time.perf_counter()
    data = encoded_files(files, tokenizer, length, workers=0 if processes == 1 else None)
    return {
        "seconds": time.perf_counter() - began,
        "rows": data.stats.rows,
        "tokens": data.stats.tokens,
        "peak_bytes": peak_bytes(num_workers()),
        "own_peak_bytes": peak_bytes(),
        "ids": [list(example.tokens) for example in data.examples[:first]],
    }
