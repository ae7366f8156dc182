"""Measure time and peak memory per token from 4 k to 64 k tokens per step, beside what the plan states.

`unfreeze dev bench growth`, about 4 minutes.

A small Kimi-format model (hidden 256, 3 layers, 16 experts, top-2, vocabulary 4096), LoRA rank 8 on every
linear layer, bf16. Documents have 512 tokens at every size, so attention costs each token the same.
Each size is a process of its own, because an allocator keeps memory that the next size must not find. The
sizes step in turn, and peaks are of the timed steps. The slope of memory is the least-squares line through
the peaks, beside the slope of parallel/plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from benchmarks.harness.training import (
    MeasuredInTurn,
    appended_to,
    command,
    computed_here,
    float64,
    results,
    say,
    show,
)
from unfreeze.config.parse import Folder, parse
from unfreeze.core.command import Common
from unfreeze.core.errors import ConfigError
from unfreeze.core.units import format_bytes

LENGTH = 512
LORA: dict[str, Any] = {"rank": 8, "alpha": 16.0, "targets": ("all-linear",)}
SIZES = {
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "n_routed_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 128,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "vocab_size": 4096,
}
FLAT = 0.10
"""Time per token may differ by that much between the cheapest and the dearest size."""


class Config(MeasuredInTurn):
    """What is measured."""

    steps: int = Field(default=2, ge=1, description="timed steps at each size; the median counts")
    tokens: tuple[int, ...] = Field(
        default=(4096, 8192, 16384, 32768, 65536),
        min_length=2,
        description="tokens per step, multiples of 512",
    )
    recompute: Literal["layers", "selective", "nothing"] = Field(
        default="selective", description="what is computed twice; sft's default"
    )
    checkpoint: Folder = Field(
        default="",
        description="folder where the random checkpoint is, or is made and kept; default: a temporary one",
    )


def main(arguments: list[str], common: Common) -> dict[str, Any]:
    """-> rows, file."""
    return measure(parse(Config, arguments, command="dev bench growth", description=__doc__ or ""), common)


def measure(
    config: Config, common: Common, sizes: Mapping[str, int] | None = None, length: int = LENGTH
) -> dict[str, Any]:
    """The benchmark at any size: `sizes` replace those of SIZES, `length` is that of a document."""
    from benchmarks.harness import kimi
    from benchmarks.harness.checkpoints import checkpoints
    from benchmarks.harness.rows import Stamp
    from benchmarks.harness.sides import Side, Sides

    whole_documents(config.tokens, length)
    model = kimi.config(**{**SIZES, **(sizes or {})})
    stamp = Stamp.now("growth", command("growth", config), threads=config.threads or None)
    with checkpoints(config.checkpoint, model, model) as (checkpoint, _):
        exact = float64(str(checkpoint), LORA, length, common)
        stated = planned(str(checkpoint), config.tokens, config.recompute, length)
        paths = {"checkpoint": str(checkpoint), "checked": str(checkpoint)}
        job = {
            **paths,
            "dtype": computed_here(),
            "lora": LORA,
            "recompute": config.recompute,
            "length": length,
        }
        sides = [
            Side(
                f"{tokens} tokens",
                "benchmarks.harness.job:trainer",
                job | {"documents": tokens // length},
                threads=config.threads,
            )
            for tokens in config.tokens
        ]
        with Sides(sides, say(common)) as running:
            running.take_turns("step", warmup=config.warmup, rounds=config.steps, peaks="timed")
            found = {
                tokens: results(side, tokens, exact)
                for tokens, side in zip(config.tokens, running, strict=True)
            }
    settings = {
        "shape": {name: model[name] for name in SIZES},
        "rank": LORA["rank"],
        "targets": list(LORA["targets"]),
        "dtype": computed_here(),
        "length": length,
        "recompute": config.recompute,
        "steps": config.steps,
        "warmup": config.warmup,
    }
    rows = [
        stamp.row(
            f"{tokens} tokens",
            settings | {"tokens_per_step": tokens},
            entry | {"planned_bytes": stated[tokens]},
        )
        for tokens, entry in found.items()
    ]
    rows.append(stamp.row("growth", settings | {"tokens": list(config.tokens)}, growth(found, stated)))
    return show(rows, appended_to(config), common)


def whole_documents(sizes: Sequence[int], length: int = LENGTH) -> None:
    """Raises ConfigError for a number of tokens per step that documents of `length` don't make up."""
    wrong = [tokens for tokens in sizes if tokens % length or tokens < length]
    if wrong:
        raise ConfigError(
            f"tokens: {wrong[0]} is not a multiple of {length}, the length of a document",
            next="mend --tokens",
        )


def planned(checkpoint: str, tokens: Sequence[int], recompute: Any, length: int) -> dict[int, int]:
    """Bytes of the plan for the same job at each size."""
    from unfreeze import models
    from unfreeze.adapters import LoraConfig
    from unfreeze.checkpoint import open_checkpoint
    from unfreeze.core.layout import RESIDENT
    from unfreeze.parallel.plan import plan_here

    manifest = open_checkpoint(checkpoint)
    shape, lora = models.shape(manifest.config), LoraConfig(**LORA)
    job: dict[str, Any] = {
        "dtype": computed_here(),
        "device": "cpu",
        "layout": RESIDENT.but(recompute=recompute),
        "longest": length,
    }
    return {n: plan_here(shape, manifest, lora, tokens=n, **job).training for n in tokens}


def growth(found: Mapping[int, Mapping[str, Any]], stated: Mapping[int, int]) -> dict[str, Any]:
    """Work out microseconds and bytes per token at each size.

    Times come with their spread, bytes as measured and as the plan states them.
    """
    per_token = {tokens: 1e6 / entry["tokens_per_second"] for tokens, entry in found.items()}
    least, most = min(per_token.values()), max(per_token.values())
    measured = slope(list(found), [entry["peak_bytes"] for entry in found.values()])
    promised = slope(list(stated), list(stated.values()))
    line = fit(list(found), [entry["peak_bytes"] for entry in found.values()])
    off = max(
        abs(entry["peak_bytes"] - (line[0] + line[1] * tokens)) / entry["peak_bytes"]
        for tokens, entry in found.items()
    )
    return {
        "microseconds_per_token": {str(tokens): value for tokens, value in per_token.items()},
        "spread": most / least - 1,
        "flat": most / least - 1 <= FLAT,
        "bytes_per_token": measured,
        "planned_bytes_per_token": promised,
        "slope_ratio": measured / promised,
        "furthest_from_line": off,
        "note": (
            f"time per token {', '.join(f'{value:.0f}' for value in per_token.values())} us,"
            f" {most / least - 1:.1%} apart (flat: {FLAT:.0%}); memory {format_bytes(measured)} per token,"
            f" the plan states {format_bytes(promised)} ({measured / promised:.2f}), no peak further than"
            f" {off:.1%} from the line"
        ),
    }


def fit(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """(y at 0, slope) of the line through the points by least squares."""
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    steep = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum(
        (a - mean_x) ** 2 for a in x
    )
    return mean_y - steep * mean_x, steep


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    return fit(x, y)[1]
