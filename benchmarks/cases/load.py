"""Time opening the 0.9 GB INT4 checkpoint, in turn with a raw read of its files.

`unfreeze dev bench load`, about 1 minute.

Both read from the page cache into fresh memory. The raw read is file by file into new bytes objects: the
least any loader must do, since a model's memory is new memory. Each reading is a process of its own, so that
no allocator hands back pages that were touched before.
Correctness: the tensors of the opened model, compared bit for bit with the files. Host peak: measured, beside
what the plan states for loading.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from benchmarks.harness.training import Measured, appended_to, command, say, show
from unfreeze.config.parse import Folder, parse
from unfreeze.core.command import Common


class Config(Measured):
    """What is measured."""

    checkpoint: Folder = Field(
        default="",
        description="folder where the random checkpoint is, or is made and kept; default: a temporary one",
    )
    pairs: int = Field(
        default=5, ge=1, description="readings of each side; the median ratio of a pair counts"
    )


def main(arguments: list[str], common: Common) -> dict[str, Any]:
    """-> rows, file."""
    return measure(parse(Config, arguments, command="dev bench load", description=__doc__ or ""), common)


def measure(config: Config, common: Common, sizes: Mapping[str, int] | None = None) -> dict[str, Any]:
    """The benchmark at any size: `sizes` replace those of kimi.SIZES."""
    from benchmarks.harness import kimi
    from benchmarks.harness.checkpoints import checkpoints
    from benchmarks.harness.rows import Stamp

    model = kimi.config(**(sizes or {}))
    tiny = kimi.config(**{**(sizes or {}), **kimi.CHECKED})
    stamp = Stamp.now("load", command("load", config), threads=config.threads or None)
    with checkpoints(config.checkpoint, model, tiny) as (checkpoint, _):
        _once("raw", str(checkpoint), config.threads)  # fills the page cache
        pairs = []
        for number in range(1, config.pairs + 1):
            order = ("raw", "ours") if number % 2 else ("ours", "raw")
            pair = {name: _once(name, str(checkpoint), config.threads) for name in order}
            pairs.append(pair)
            rates = ", ".join(f"{name} {_rate(pair[name]):.2f} GB/s" for name in order)
            say(common)(f"pair {number}/{config.pairs}: {rates}")
    settings = {
        "shape": {name: model[name] for name in kimi.SIZES},
        "pairs": config.pairs,
        "dtype": "bfloat16",
        "cache": "page cache, fresh memory",
    }
    return show([stamp.row("unfreeze", settings, _results(pairs))], appended_to(config), common)


def _once(side: str, checkpoint: str, threads: int) -> dict[str, Any]:
    """One reading in a process of its own: its facts."""
    from benchmarks.harness.sides import Side, Sides

    with Sides(
        [Side(side, f"benchmarks.cases.load:{side}", {"checkpoint": checkpoint}, threads=threads)],
        lambda line: None,
    ) as one:
        return one[side].loaded | ({"compared": one[side].call("compare")} if side == "ours" else {})


def _rate(facts: Mapping[str, Any]) -> float:
    return facts["bytes"] / facts["reading"] / 1e9


def _results(pairs: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    ratios = [_rate(pair["ours"]) / _rate(pair["raw"]) for pair in pairs]
    worst = max(pair["ours"]["compared"]["different"] for pair in pairs)
    peak = max(pair["ours"]["load_peak"] - pair["ours"]["runtime_bytes"] for pair in pairs)
    ours, raw = (statistics.median(_rate(pair[name]) for pair in pairs) for name in ("ours", "raw"))
    ratio, promised = statistics.median(ratios), pairs[0]["ours"]["promised"]
    return {
        "gb_per_second": ours,
        "raw_gb_per_second": raw,
        "ratio": ratio,
        "ratio_lowest": min(ratios),
        "ratio_highest": max(ratios),
        "bytes": pairs[0]["ours"]["bytes"],
        "peak_bytes": peak,
        "promised_bytes": promised,
        "correctness": {
            f"tensors that differ from the file, of {pairs[0]['ours']['compared']['tensors']}": float(worst)
        },
        "note": (
            f"{ours:.2f} GB/s against {raw:.2f} raw, {ratio:.2f} of it ({min(ratios):.2f} to"
            f" {max(ratios):.2f}); peak {peak / 2**20:,.0f} MiB, promised {promised / 2**20:,.0f}; {worst}"
            " tensors differ from the file"
        ),
    }


def raw(checkpoint: str) -> Any:
    """Every file into a new bytes object."""
    from benchmarks.harness.sides import Worker

    files = sorted(Path(checkpoint).glob("*.safetensors"))
    started = time.perf_counter()
    kept = [file.read_bytes() for file in files]
    return Worker({}, {"reading": time.perf_counter() - started, "bytes": sum(map(len, kept))})


def ours(checkpoint: str) -> Any:
    """Open the checkpoint as a model.

    calls: compare() -> tensors, different: every unstacked tensor against what safetensors' own reader finds.
    """
    import torch

    from benchmarks.harness.sides import Worker
    from unfreeze.checkpoint import open_checkpoint
    from unfreeze.generate.open import open_model
    from unfreeze.parallel.machine import resident_bytes
    from unfreeze.parallel.plan import LOAD_BUFFERS

    before = resident_bytes()
    started = time.perf_counter()
    manifest = open_checkpoint(checkpoint)
    model = open_model(manifest, torch.bfloat16)
    seconds = time.perf_counter() - started
    tensors = dict(model.state_dict())
    promised = sum({t.data_ptr(): t.nbytes for t in tensors.values()}.values()) + LOAD_BUFFERS

    def compare() -> dict[str, Any]:
        from safetensors import safe_open

        number = different = 0
        for file in sorted(Path(checkpoint).glob("*.safetensors")):
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118  (not a dictionary)
                    number += 1
                    if not _equal(opened.get_tensor(name), name, tensors):
                        different += 1
        return {"tensors": number, "different": different}

    return Worker(
        {"compare": compare},
        {"reading": seconds, "bytes": manifest.nbytes, "runtime_bytes": before, "promised": promised},
    )


def _equal(found: Any, name: str, tensors: Mapping[str, Any]) -> bool:
    """Whether the model holds what the file says under that name.

    An expert's tensor lies stacked, gate above up.
    """
    import re

    import torch

    if name in tensors:
        return torch.equal(tensors[name], found.to(tensors[name].dtype))
    expert = re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight_(packed|scale|shape)", name)
    if expert is None:
        return False
    if expert[4] == "shape":
        return True  # two numbers that the model knows from its config; not kept
    stacked = tensors[
        f"{expert[1]}.{'down_proj' if expert[3] == 'down' else 'gate_up_proj'}.weight_{expert[4]}"
    ][int(expert[2])]
    if expert[3] != "down":
        stacked = stacked.chunk(2)[0 if expert[3] == "gate" else 1]
    return torch.equal(stacked, found)
