"""A process of its own for one piece of work, with caches of its own."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.sides import python_path
from unfreeze.core.errors import UserError

CALL = (
    "import importlib, json, sys; module, name = sys.argv[1].split(':');"
    " print(json.dumps(getattr(importlib.import_module(module), name)(**json.loads(sys.argv[2]))))"
)


def process(words: Sequence[str], **environment: str) -> str:
    """What the command printed. Raises UserError with its last words where it fails."""
    given = os.environ | {"PYTHONPATH": python_path()} | environment
    done = subprocess.run(words, env=given, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise UserError(f"{words[3]} ended with {done.returncode}: {done.stderr[-500:]}", next="report it")
    return done.stdout


def call(function: str, given: dict[str, Any], cache: Path) -> dict[str, Any]:
    """function: "module:name", called in a process with this folder as its caches; -> what it returns."""
    caches = dict.fromkeys(("XDG_CACHE_HOME", "HF_HOME", "HF_DATASETS_CACHE"), str(cache))
    words = [sys.executable, "-c", CALL, function, json.dumps(given)]
    said = process(words, TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1", **caches)
    return json.loads(said.splitlines()[-1])


def peak_bytes(processes: int = 0) -> int:
    """Resident bytes at most: of this process, and of its largest child for each of `processes`.

    Not getrusage's own: that begins with what the process had that started this one.
    """
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    own = int(found[1]) if found else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return 1024 * (own + processes * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
