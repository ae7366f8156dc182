"""Measure time and peak memory per token from 4 k to 64 k tokens per step, beside the plan's figures.

`unfreeze dev bench growth`, about 4 minutes. A small Kimi-format model, LoRA rank 8 on every linear layer,
documents of 512 tokens at every size, so attention costs each token the same. Each size is a process of its
own; they step in turn, and peaks are of the timed steps. The slope of memory is the least-squares line
through the peaks, beside the slope of the plan.
"""

from typing import Literal

import numpy as np
from pydantic import Field

from benchmarks.harness import shapes
from benchmarks.harness.case import Run, Trained
from benchmarks.harness.job import planned
from benchmarks.harness.training import job, whole
from unfreeze.core.units import format_bytes

LENGTH = 512
LORA = {"rank": 8, "alpha": 16.0, "targets": ("all-linear",)}
SIZES = {"hidden_size": 256, "num_hidden_layers": 3, "n_routed_experts": 16, "num_experts_per_tok": 2}
SIZES |= {"moe_intermediate_size": 128, "intermediate_size": 512, "vocab_size": 4096}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 128, "kv_lora_rank": 64}


class Config(Trained):
    steps: int = Field(default=2, ge=1, description="timed steps at each size; the median counts")
    tokens: tuple[int, ...] = Field(
        default=(4096, 8192, 16384, 32768, 65536), min_length=2, description="tokens per step"
    )
    recompute: Literal["layers", "selective", "nothing"] = Field(
        default="selective", description="recompute policy; the default is sft's"
    )


def rows(config: Config, run: Run):
    model, by = shapes.kimi(**SIZES), {f"{tokens} tokens": tokens for tokens in config.tokens}
    whole(config.tokens, LENGTH)
    with job(run, model, model, SIZES, LORA, 0, LENGTH) as training:
        sides = [training.ours(name, config.recompute, documents=n // LENGTH) for name, n in by.items()]
        entries = training.in_turn(sides, peaks="timed", tokens=by)
        settings = training.settings | {"rank": LORA["rank"], "recompute": config.recompute}
        common = training.checkpoint, config.computed, LORA
        stated = [planned(*common, n, LENGTH, recompute=config.recompute).training for n in by.values()]
        line = growth(config.tokens, list(entries.values()), stated)
        for (name, n), plan in zip(by.items(), stated, strict=True):
            yield run.row(name, settings | {"tokens_per_step": n}, entries[name] | {"planned_bytes": plan})
        yield run.row("growth", settings | {"tokens": list(config.tokens)}, line)


def growth(sizes, entries, stated):
    """Time and bytes per token, measured and planned."""
    times = [1e6 / entry["tokens_per_second"] for entry in entries]
    measured, promised = (np.polyfit(sizes, y, 1)[0] for y in ([e["peak_bytes"] for e in entries], stated))
    spread, ratio = max(times) / min(times) - 1, float(measured / promised)
    note = f"time per token {', '.join(f'{time:.0f}' for time in times)} us, {spread:.1%} apart; memory"
    note += f" {format_bytes(measured)} per token, the plan states {format_bytes(promised)} ({ratio:.2f})"
    return {"spread": spread, "bytes_per_token": float(measured), "slope_ratio": ratio, "note": note}
