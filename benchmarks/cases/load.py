"""Time opening the 0.9 GB INT4 checkpoint, in turn with a raw read of its files.

`unfreeze dev bench load`, about 1 minute. Both read from the page cache into fresh memory. The raw read is
file by file into new bytes objects: the least any loader must do, since a model's memory is new memory. Each
read runs in a new process, so that no allocator returns pages that were touched before.
Correctness: the tensors of the opened model are compared bit for bit with the files. The measured host peak
stands beside the planned one.
"""

import statistics

from pydantic import Field

from benchmarks.harness import shapes
from benchmarks.harness.case import OnCheckpoint, Run
from benchmarks.harness.checkpoints import checkpoints
from benchmarks.harness.sides import Sides


class Config(OnCheckpoint):
    """Flags of this benchmark."""

    pairs: int = Field(
        default=5, ge=1, description="readings of each side; the median ratio of a pair counts"
    )


def once(run: Run, name: str, checkpoint: str) -> dict:
    """One reading in a process of its own: its facts, and GB/s as `rate`."""
    with Sides([run.side(name, f"harness.loading:{name}", checkpoint=checkpoint)], lambda line: None) as one:
        facts = one[name].loaded | {"rate": one[name].loaded["bytes"] / one[name].loaded["reading"] / 1e9}
        return facts | (one[name].call("compare") if name == "ours" else {})


def rows(config: Config, run: Run):
    model, pairs = shapes.kimi(), []
    with checkpoints(config.checkpoint, model, shapes.kimi(**shapes.CHECKED)) as (checkpoint, _):
        once(run, "raw", str(checkpoint))  # fills the page cache
        for number in range(1, config.pairs + 1):
            order = ("raw", "ours") if number % 2 else ("ours", "raw")
            pairs.append({name: once(run, name, str(checkpoint)) for name in order})
            rates = ", ".join(f"{name} {pairs[-1][name]['rate']:.2f} GB/s" for name in order)
            run.say(f"pair {number}/{config.pairs}: {rates}")
    settings = {"shape": {name: model[name] for name in shapes.SIZES}, "pairs": config.pairs}
    settings |= {"dtype": "bfloat16", "cache": "page cache, fresh memory"}
    ours, raw = ([pair[name] for pair in pairs] for name in ("ours", "raw"))
    ratios = [one["rate"] / other["rate"] for one, other in zip(ours, raw, strict=True)]
    middle, mine, theirs = (
        statistics.median(v) for v in (ratios, [o["rate"] for o in ours], [r["rate"] for r in raw])
    )
    peak, promised = max(one["load_peak"] - one["runtime_bytes"] for one in ours), ours[0]["promised"]
    different = max(one["different"] for one in ours)
    note = f"{mine:.2f} GB/s against {theirs:.2f} raw, {middle:.2f} of it;"
    note += f" peak {peak / 2**20:,.0f} MiB, promised {promised / 2**20:,.0f}"
    results = {"gb_per_second": mine, "raw_gb_per_second": theirs, "ratio": middle, "bytes": ours[0]["bytes"]}
    results |= {"ratio_lowest": min(ratios), "ratio_highest": max(ratios), "peak_bytes": peak, "note": note}
    results["correctness"] = {f"tensors that differ from the file, of {ours[0]['tensors']}": float(different)}
    yield run.row("unfreeze", settings, results | {"promised_bytes": promised})
