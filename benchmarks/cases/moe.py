"""Time LoRA on every expert of a Kimi-format INT4 checkpoint, in turn with transformers + peft.

`unfreeze dev bench moe`, about 4 minutes.

The checkpoint is random, in Kimi-K2-Thinking's on-disk format: hidden 1024, 8 layers, 128 experts, top-8,
expert width 512, vocabulary 8192, 0.9 GB.
Job: LoRA rank 8 on the five attention projections and all routed experts, 2,048 tokens per step (4 documents
of 512), clipping, AdamW; bf16, or float32 on a CPU without bf16 units.
Sides: unfreeze (recompute selective, the default), unfreeze-nothing (recompute nothing), peft-experts
(transformers + peft, experts through target_parameters), peft-checkpointing (the same with gradient
checkpointing), peft-attention (experts frozen, eager experts: their fastest). The last two step in turn with
unfreeze once the sides before them have ended, because all at once would not fit 24 GB.
Beside them the rate of torch.mm in that dtype at the experts' shapes, on all cores; on a GPU that of
torch.bmm over all experts.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from pydantic import Field

from benchmarks.harness.training import (
    Trained,
    appended_to,
    both_sizes,
    command,
    float64,
    settings_of,
    show,
    step_in_turn,
)
from unfreeze.config.parse import parse
from unfreeze.core.command import Common

Named = Literal["unfreeze", "unfreeze-nothing", "peft-experts", "peft-checkpointing", "peft-attention"]
RANK, DOCUMENTS, LENGTH = 8, 4, 512
LORA: dict[str, Any] = {"rank": RANK, "alpha": 2.0 * RANK, "targets": ("attention", "experts")}
RECOMPUTE = {"unfreeze": "selective", "unfreeze-nothing": "nothing"}
TURNS: tuple[tuple[str, ...], ...] = (
    ("unfreeze", "unfreeze-nothing", "torch.mm", "peft-experts"),
    ("unfreeze", "peft-checkpointing"),
    ("unfreeze", "peft-attention"),
)
GEMM = "torch.mm"
WAYS = {
    "together": "all cores on one GEMM",
    "each": "a GEMM per core",
    "batched": "all experts in one torch.bmm",
}


class Config(Trained):
    """What is measured."""

    sides: tuple[Named, ...] = Field(default=get_args(Named), min_length=1, description="which sides")


def main(arguments: list[str], common: Common) -> dict[str, Any]:
    """-> rows, file."""
    return measure(parse(Config, arguments, command="dev bench moe", description=__doc__ or ""), common)


def measure(
    config: Config,
    common: Common,
    sizes: Mapping[str, int] | None = None,
    checked: Mapping[str, int] | None = None,
    documents: int = DOCUMENTS,
    length: int = LENGTH,
) -> dict[str, Any]:
    """Run the benchmark at any size.

    `sizes` replace those of kimi.SIZES, `checked` those of the model for the float64 comparison.
    """
    from benchmarks.harness import kimi
    from benchmarks.harness.checkpoints import checkpoints
    from benchmarks.harness.rows import Stamp

    model, small = both_sizes(kimi.config, sizes, kimi.CHECKED if checked is None else checked)
    stamp = Stamp.now("moe", command("moe", config), config.device, threads=config.threads or None)
    tokens, rows = documents * length, []
    settings = settings_of(model, small, kimi.SIZES, config, documents, length)
    settings |= {"rank": RANK, "alpha": 2 * RANK, "targets": ["attention", "experts"]}
    with checkpoints(config.checkpoint, model, small) as (checkpoint, small_checkpoint):
        exact = float64(str(small_checkpoint), LORA, length, common)
        for turn, names in enumerate(TURNS, start=1):
            wanted = [name for name in names if name in config.sides]
            if turn > 1 and wanted == ["unfreeze"]:
                continue
            wanted += [GEMM] if GEMM in names and "unfreeze" in wanted else []
            sides = [
                _side(name, str(checkpoint), str(small_checkpoint), model, documents, length, config)
                for name in wanted
            ]
            found = step_in_turn(sides, config, tokens, exact, common)
            share_of_rate(found, {side.name: side.loaded for side in sides})
            rows += [
                stamp.row(name, settings | {"turn": turn, "recompute": RECOMPUTE.get(name, "")}, entry)
                for name, entry in found.items()
            ]
    return show(rows, appended_to(config, config.device), common)


def _side(
    name: str,
    checkpoint: str,
    checked: str,
    model: Mapping[str, Any],
    documents: int,
    length: int,
    config: Config,
) -> Any:
    from benchmarks.harness.sides import Side

    job: dict[str, Any] = {
        "checkpoint": checkpoint,
        "checked": checked,
        "documents": documents,
        "length": length,
        "device": config.device,
    }
    threads = config.threads
    if name in RECOMPUTE:
        arguments = job | {"dtype": config.computed, "lora": LORA, "recompute": RECOMPUTE[name]}
        return Side(name, "benchmarks.harness.job:trainer", arguments, threads=threads)
    if name == GEMM:
        rows = documents * length * model["num_experts_per_tok"] // model["n_routed_experts"]
        shape = {
            "rows": max(1, rows),
            "hidden": model["hidden_size"],
            "width": model["moe_intermediate_size"],
            "experts": model["n_routed_experts"],
            "device": config.device,
            "dtype": config.computed,
        }
        return Side(name, "benchmarks.cases.moe:gemm_rate", shape, threads=threads)
    return Side(
        name,
        "benchmarks.harness.peers:peft",
        job
        | {
            "trained": "attention" if name == "peft-attention" else "experts",
            "checkpointing": name == "peft-checkpointing",
            "rank": RANK,
            "dtype": config.computed,
        },
        threads=threads,
    )


def gemm_rate(rows: int, hidden: int, width: int, experts: int, device: str, dtype: str = "bfloat16") -> Any:
    """The machine's own rate as a side: each step measures it anew."""
    import torch

    from benchmarks.harness.flops import BatchedGemmRate, GemmRate, expert_gemms
    from benchmarks.harness.sides import Worker

    gemms = expert_gemms(rows, hidden, width)
    rate = (
        GemmRate(gemms, dtype=getattr(torch, dtype))
        if device == "cpu"
        else BatchedGemmRate(gemms, experts, device)
    )
    return Worker(
        {"step": rate.measure},
        {"gemms": [f"[{g.rows}, {g.inner}] x [{g.inner}, {g.columns}]" for g in rate.gemms]},
    )


def share_of_rate(found: dict[str, dict[str, Any]], loaded: Mapping[str, Mapping[str, Any]]) -> None:
    """Add model FLOP per second of our sides over the measured GEMM rate.

    The replies of the side that measured the rate become its results.
    """
    if GEMM not in found:
        return
    replies: Sequence[Mapping[str, float]] = found[GEMM].pop("replies")
    rates = {
        name: statistics.median(reply[name] for reply in replies)
        for name in ("gflops_per_second", *WAYS)
        if name in replies[0]
    }
    found[GEMM] |= {
        **rates,
        "gemms": loaded[GEMM]["gemms"],
        "note": (
            f"{rates['gflops_per_second']:.0f} GFLOP/s"
            f" ({', '.join(f'{WAYS[name]} {rates[name]:.0f}' for name in WAYS if name in rates)})"
        ),
    }
    for name in RECOMPUTE:
        if name in found:
            entry, model, again = found[name], loaded[name]["model_flops"], loaded[name]["recomputed_flops"]
            per_second = entry["step_seconds"] * rates["gflops_per_second"] * 1e9
            shares = {"share": model / per_second, "share_with_recompute": (model + again) / per_second}
            entry |= {"model_flops": model, "recomputed_flops": again, **shares}
            entry["note"] = (
                f"{entry['share']:.0%} of torch.mm's rate, {entry['share_with_recompute']:.0%} with what is"
                " recomputed"
            )
