"""Loading a checkpoint against a raw read of the same files, both from the page cache into fresh memory, in turn (A B A B …).

    python benchmarks/load_cpu.py CHECKPOINT --append benchmarks/results/cpu.jsonl

The raw read is file by file into new bytes objects: what any loader must at least do, since a model's memory is new memory.
Each measurement is a process of its own, so that no allocator hands back pages that were touched before.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

RAW = """
import sys, time
from pathlib import Path
import torch
files = sorted(Path(sys.argv[1]).glob("*.safetensors"))
started = time.perf_counter()
kept = [file.read_bytes() for file in files]
print(sum(map(len, kept)), time.perf_counter() - started)
"""
OURS = """
import sys, time
import torch
from unfreeze.checkpoint import open_checkpoint
from unfreeze.generate.open import open_model
started = time.perf_counter()
manifest = open_checkpoint(sys.argv[1])
model = open_model(manifest, torch.bfloat16)
print(manifest.nbytes, time.perf_counter() - started)
"""


def measure(code: str, checkpoint: str) -> tuple[float, float]:
    """(bytes, seconds) of one run in a process of its own."""
    done = subprocess.run([sys.executable, "-c", code, checkpoint], capture_output=True, text=True, check=True)
    size, seconds = done.stdout.split()
    return float(size), float(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--append", type=Path)
    arguments = parser.parse_args()
    measure(RAW, arguments.checkpoint)  # fills the page cache
    pairs = [(measure(RAW, arguments.checkpoint), measure(OURS, arguments.checkpoint)) for _ in range(arguments.pairs)]
    raw = [size / seconds / 1e9 for (size, seconds), _ in pairs]
    ours = [size / seconds / 1e9 for _, (size, seconds) in pairs]
    ratios = [mine / theirs for mine, theirs in zip(ours, raw, strict=True)]
    row = {
        "benchmark": "load_cpu", "date": time.strftime("%Y-%m-%d"), "bytes": int(pairs[0][1][0]), "pairs": arguments.pairs,
        "raw_gb_per_second": round(statistics.median(raw), 2), "load_gb_per_second": round(statistics.median(ours), 2),
        "ratio": round(statistics.median(ratios), 3), "ratio_lowest": round(min(ratios), 3), "ratio_highest": round(max(ratios), 3),
    }  # fmt: skip
    print(json.dumps(row))
    if arguments.append:
        from lora_moe_cpu import machine

        with arguments.append.open("a") as file:
            file.write(json.dumps({**row, "machine": machine()}) + "\n")


if __name__ == "__main__":
    main()
