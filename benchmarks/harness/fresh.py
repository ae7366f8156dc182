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
    """Run the command and return its stdout. Raises UserError with the end of its stderr if it fails."""
    variables = os.environ | {"PYTHONPATH": python_path()} | environment
    done = subprocess.run(words, env=variables, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise UserError(f"{words[3]} ended with {done.returncode}: {done.stderr[-500:]}", next="report it")
    return done.stdout


def call(function: str, arguments: dict[str, Any], cache: Path, *, parallel: bool = False) -> dict[str, Any]:
    """Call "module:name" in a new process with `cache` as its cache folders; return its result.

    parallel: let the library `tokenizers` use all cores.
    """
    caches = dict.fromkeys(("XDG_CACHE_HOME", "HF_HOME", "HF_DATASETS_CACHE"), str(cache))
    words = [sys.executable, "-c", CALL, function, json.dumps(arguments)]
    threads = "true" if parallel else "false"
    output = process(words, TOKENIZERS_PARALLELISM=threads, HF_HUB_OFFLINE="1", **caches)
    return json.loads(output.splitlines()[-1])


def peak_bytes(processes: int = 0) -> int:
    """Peak resident bytes of this process, plus those of its largest child times `processes`.

    VmHWM, not getrusage: the latter starts from the memory of the parent process.
    """
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    match = re.search(r"VmHWM:\s+(\d+) kB", status)
    own = int(match[1]) if match else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return 1024 * (own + processes * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
