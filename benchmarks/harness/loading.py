"""The sides of `dev bench load`."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from benchmarks.harness.sides import Worker
from unfreeze.checkpoint import open_checkpoint
from unfreeze.generate.open import open_model
from unfreeze.parallel.machine import resident_bytes
from unfreeze.parallel.plan import LOAD_BUFFERS


def raw(checkpoint: str) -> Worker:
    """Read every file into a new bytes object."""
    files = sorted(Path(checkpoint).glob("*.safetensors"))
    started = time.perf_counter()
    contents = [file.read_bytes() for file in files]
    return Worker({}, {"reading": time.perf_counter() - started, "bytes": sum(map(len, contents))})


def ours(checkpoint: str) -> Worker:
    """Open the checkpoint as a model.

    calls: compare() -> tensors, different: every tensor against safetensors' own reader.
    """
    before, started = resident_bytes(), time.perf_counter()
    manifest = open_checkpoint(checkpoint)
    model = open_model(manifest, torch.bfloat16)
    seconds, tensors = time.perf_counter() - started, dict(model.state_dict())
    promised = sum({t.data_ptr(): t.nbytes for t in tensors.values()}.values()) + LOAD_BUFFERS

    def compare() -> dict[str, int]:
        number = different = 0
        for file in sorted(Path(checkpoint).glob("*.safetensors")):
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118  (not a dictionary)
                    number += 1
                    different += not holds(tensors, name, opened.get_tensor(name))
        return {"tensors": number, "different": different}

    facts = {"reading": seconds, "bytes": manifest.nbytes, "runtime_bytes": before, "promised": promised}
    return Worker({"compare": compare}, facts)


def holds(tensors: Mapping[str, Tensor], name: str, expected: Tensor) -> bool:
    """True if the model holds the file's tensor under that name. Experts are stacked, gate above up."""
    if name in tensors:
        return torch.equal(tensors[name], expected.to(tensors[name].dtype))
    expert = re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight_(packed|scale|shape)", name)
    if expert is None:
        return False
    layer, number, matrix, part = expert.groups()
    if part == "shape":
        return True  # two numbers that the model knows from its config; not kept
    stacked = tensors[f"{layer}.{'down_proj' if matrix == 'down' else 'gate_up_proj'}.weight_{part}"][
        int(number)
    ]
    if matrix != "down":
        stacked = stacked.chunk(2)[0 if matrix == "gate" else 1]
    return torch.equal(stacked, expected)
