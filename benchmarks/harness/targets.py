"""The targets of the project, as data: the place of each figure in the rows, and its limit.

A target reads one value from the rows of one run: met, missed, or not measured if no run has it. Values are
never estimated.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.harness.rows import Row
from unfreeze.core.cpu import X86

Verdict = Literal["met", "missed", "not measured"]
Kind = Literal["cpu", "cpu without bf16", "gpu"]
"""A CPU with instructions that multiply bfloat16, one without, a GPU."""
Value = Callable[[Sequence[Row]], float | None]
# the plan counts weights and buffers; names, headers and the readers' stacks are some MiB beside 0.9 GB
PROMISE = 1.02
SLOPE = 0.15  # what tests/parallel/test_plan.py allows the plan of a small run in chunks


@dataclass(frozen=True)
class Target:
    """One target: its text, kind of machine, and benchmark.

    value(rows of a run) -> the figure. least: met at `limit` or above; most: at `limit` or below. shown:
    format of the figure.
    """

    what: str
    kind: Kind
    benchmark: str
    value: Value
    rule: Literal["least", "most"]
    limit: float
    shown: str = "{:.2f}"

    def verdict(self, value: float | None) -> Verdict:
        if value is None:
            return "not measured"
        return "met" if (value >= self.limit if self.rule == "least" else value <= self.limit) else "missed"

    def write(self, value: float | None) -> str:
        return "–" if value is None else self.shown.format(value)

    @property
    def aim(self) -> str:
        return ("≥ " if self.rule == "least" else "≤ ") + self.shown.format(self.limit)


def not_measured(benchmarks: Sequence[str], devices: Collection[str]) -> list[str]:
    """A line for each benchmark without rows, and for each class of CPU that is not among `devices`."""
    return [
        *(f"- `unfreeze dev bench {name}`" for name in benchmarks),
        *(
            f"- `{name}`: no machine of this class was available. Tests emulate it (`UNFREEZE_CPU_CLASS`),"
            " and such times are never recorded"
            for name in X86[1:]
            if name not in devices
        ),
    ]


def field(side: str, *path: str, **settings: Any) -> Value:
    """Read results[path…] of the first row of a side with these settings.

    None if there is no such row or value, or it isn't a number.
    """

    def value(rows: Sequence[Row]) -> float | None:
        for row in rows:
            if row.side == side and all(
                row.settings.get(name) == wanted for name, wanted in settings.items()
            ):
                entry: Any = row.results
                for name in path:
                    entry = entry.get(name) if isinstance(entry, Mapping) else None
                if isinstance(entry, (int, float)):
                    return float(entry)
        return None

    return value


def extreme(pick: Callable[..., float], side: str, *path: str, **settings: Any) -> Value:
    """`field` of every row of a side with these settings, and of them the least or the largest.

    side "": of every side that has the value. None if no row has it.
    """

    def value(rows: Sequence[Row]) -> float | None:
        values = [
            one for row in rows if (one := field(side or row.side, *path, **settings)([row])) is not None
        ]
        return pick(values) if values else None

    return value


def host_peak(rows: Sequence[Row]) -> float | None:
    """Peak of loading over the planned bytes."""
    peak, promised = field("unfreeze", "peak_bytes")(rows), field("unfreeze", "promised_bytes")(rows)
    return None if peak is None or not promised else peak / promised


def slope_error(rows: Sequence[Row]) -> float | None:
    ratio = field("growth", "slope_ratio")(rows)
    return None if ratio is None else abs(ratio - 1)


def beyond_peak(rows: Sequence[Row]) -> float | None:
    """Peak in 10^9 bytes of a streamed run on a checkpoint of 12 GB or more."""
    large = [row for row in rows if row.settings["checkpoint_bytes"] >= 12e9]
    peak = field("experts from disk", "peak_bytes", tokens_per_step=2048)(large)
    return None if peak is None else peak / 1e9


def unequal(rows: Sequence[Row]) -> float | None:
    """The largest difference of outputs, gradients or losses of any run on several processes."""
    return max((max(row.results["correctness"].values()) for row in rows), default=None)


def refuted(rows: Sequence[Row]) -> float | None:
    """Number of the layer's predictions that were not met."""
    verdicts = [
        row.results["verdict"] for row in rows if row.results.get("verdict") in ("met", "missed", "refuted")
    ]
    return float(sum(verdict != "met" for verdict in verdicts)) if verdicts else None


def node(rows: Sequence[Row]) -> float | None:
    """Read the tokens per second derived for eight GPUs.

    Balanced routing, no overlap, the slowest connection of the grid.
    """
    grid = [entry for row in rows if row.side == "node" for entry in row.results.get("grid", ())]
    plain = [
        entry
        for entry in grid
        if (entry["routing"], entry["imbalance"], entry["overlap"]) == ("balanced", 1.0, 0.0)
    ]
    return min((entry["derived_tokens_per_second"] for entry in plain), default=None)


def trained(*words: str) -> Value:
    """tokens_per_second of our row whose side names all these words."""

    def value(rows: Sequence[Row]) -> float | None:
        for row in rows:
            name = re.sub(
                r"[^a-z0-9]+",
                " ",
                f"{row.side} {row.settings.get('model', '')} {row.settings.get('experts', '')}".lower(),
            )
            if all(word in name for word in words) and "tokens_per_second" in row.results:
                return float(row.results["tokens_per_second"])
        return None

    return value


def least(benchmark: str, value: Value, limit: float, shown: str = "{:.2f}") -> tuple[Any, ...]:
    return benchmark, value, "least", limit, shown


def most(benchmark: str, value: Value, limit: float, shown: str = "{:.2f}") -> tuple[Any, ...]:
    return benchmark, value, "most", limit, shown


def rows_of(batch: int) -> str:
    return "1 row" if batch == 1 else f"{batch} rows"


TIMES, SHARE, RATE, COUNT, SECONDS = "{:.2f} x", "{:.0%}", "{:,.0f} tokens/s", "{:.0f}", "{:.1f} s"
CALLS = "{:,.0f}"
DECODE = {
    **{
        f"decoding, MoE, {rows_of(batch)}, against transformers' generate: the less of two prompts": least(
            "decode", extreme(min, "transformers", "first_side_speed", model="moe", batch=batch), limit, TIMES
        )
        for batch, limit in ((1, 2.5), (4, 2.5), (16, 2.5), (64, 3.0))
    },
    **{
        f"decoding, MoE, {rows_of(batch)}, of the machine's limit: the less of two prompts": least(
            "decode", extreme(min, "unfreeze", "limit_share", model="moe", batch=batch), 0.5, SHARE
        )
        for batch in (1, 64)
    },
    "decoding, MoE, Python function calls a token at one row and 8 layers": most(
        "decode", extreme(max, "unfreeze", "python_calls_per_token", model="moe", batch=1), 1000.0, CALLS
    ),
    "decoding, MoE, peak memory against transformers' generate: the most of all cases": most(
        "decode", extreme(max, "transformers", "first_side_memory", model="moe"), 0.31
    ),
    "decoding, dense 0.6 B in bf16, against transformers' generate: the least of all cases": least(
        "decode", extreme(min, "transformers", "first_side_speed", model="dense"), 1.2, TIMES
    ),
    "decoding, dense 0.6 B in bf16, 1 row, of the machine's limit: the less of two prompts": least(
        "decode", extreme(min, "unfreeze", "limit_share", model="dense", batch=1), 0.7, SHARE
    ),
    "decoding, time of a step with adapters over one without: the most of all cases": most(
        "decode", extreme(max, "unfreeze", "adapters_cost", model="adapters"), 1.15
    ),
    "decoding, experts in other formats, time per weight read over INT4's: the most of all": most(
        "decode", extreme(max, "", "of_int4", model="formats"), 1.5
    ),
}
CPU = {
    "all experts trained, tokens/s against transformers + peft training experts": least(
        "moe", field("peft-experts", "first_side_speed"), 6.0, TIMES
    ),
    "all experts trained, peak memory against transformers + peft training experts": most(
        "moe", field("peft-experts", "first_side_memory"), 0.2
    ),
    "all experts trained, tokens/s against transformers + peft without experts": least(
        "moe", field("peft-attention", "first_side_speed"), 2.5, TIMES
    ),
    "hybrid with a recurrent state, INT4 experts, tokens/s against transformers + peft": least(
        "hybrid", field("peft", "first_side_speed"), 2.0, TIMES
    ),
    "hybrid with a recurrent state, INT4 experts, peak memory against transformers + peft": most(
        "hybrid", field("peft", "first_side_memory"), 0.35
    ),
    (
        "share of the machine's own GEMM rate, in the run's number format, at the expert"
        " shapes, whole step (model FLOPs, nothing recomputed counted)"
    ): least("moe", field("unfreeze", "share"), 0.6, SHARE),
    "time of a step with FP8 experts over one with INT4 experts": most(
        "formats", field("fp8", "of_int4"), 1.3
    ),
    "time of a step with MXFP4 experts over one with INT4 experts": most(
        "formats", field("mxfp4", "of_int4"), 1.3
    ),
    "full fine-tuning, tokens/s against transformers": least(
        "dense", field("transformers", "first_side_speed"), 1.2, TIMES
    ),
    "full fine-tuning, memory above weights, gradients and optimizer, against transformers": most(
        "dense", field("transformers", "first_side_above_state"), 0.5
    ),
    "loading against a raw read from the page cache": least("load", field("unfreeze", "ratio"), 0.9),
    "peak of the host while loading, of what the plan promises": most("load", host_peak, PROMISE),
    "from Enter to the first step of tiny-k2 in float32, the first time on a machine": most(
        "start", field("first", "seconds", dtype="float32"), 15.0, SECONDS
    ),
    "from Enter to the first step of tiny-k2 in float32, after that": most(
        "start", field("warm", "seconds", dtype="float32"), 3.5, SECONDS
    ),
    "from Enter to the first step of tiny-k2 in bfloat16, the first time on a machine": most(
        "start", field("first", "seconds", dtype="bfloat16"), 15.0, SECONDS
    ),
    "from Enter to the first step of tiny-k2 in bfloat16, after that": most(
        "start", field("warm", "seconds", dtype="bfloat16"), 3.5, SECONDS
    ),
    "rows encoded, against datasets.map with transformers' template and as many processes": least(
        "data", field("datasets + transformers", "first_side_rate"), 1.0
    ),
    "time per token from 4 k to 64 k tokens per step, dearest over cheapest - 1": most(
        "growth", field("growth", "spread"), 0.1, SHARE
    ),
    "memory's slope, distance from the plan's": most("growth", slope_error, SLOPE, SHARE),
    "experts from disk, 12 GB of INT4 at 2,048 tokens: peak memory": most(
        "beyond", beyond_peak, 3.0, "{:.2f} GB"
    ),
    "experts from disk, 2 GB of INT4 at 16,384 tokens, compared with experts in memory": least(
        "beyond", field("experts in memory", "first_side_speed", tokens_per_step=16384), 0.7, TIMES
    ),
    "float32 on several processes, experts split or not: the worst difference from one process": most(
        "equal", unequal, 1e-05, "{:.0e}"
    ),
    **DECODE,
}
NARROW = {
    "all experts trained, tokens/s against transformers + peft training experts": least(
        "moe", field("peft-experts", "first_side_speed"), 3.5, TIMES
    ),
    "all experts trained, peak memory against transformers + peft training experts": most(
        "moe", field("peft-experts", "first_side_memory"), 0.3
    ),
    "LoRA on the Qwen3-0.6B shape, tokens/s against transformers + peft": least(
        "recompute", field("peft", "first_side_speed"), 1.2, TIMES
    ),
    "LoRA on the Qwen3-0.6B shape, peak memory against transformers + peft": most(
        "recompute", field("peft", "first_side_memory"), 0.5
    ),
    **DECODE,
}
GPU = {
    "Kimi-K2 layer: predictions not met": most("layer", refuted, 0.0, COUNT),
    (
        "Kimi-K2 on eight GPUs, derived from one layer: 65,536 tokens, sequence 2,048, rank 16, no overlap"
    ): least("layer", node, 15900.0, RATE),
    "Qwen3-30B-A3B, LoRA, INT4 experts, 4 k sequences": least(
        "model", trained("qwen3 30b a3b", "int4"), 17000.0, RATE
    ),
    "Qwen2.5-7B, LoRA": least("model", trained("qwen2 5 7b"), 20000.0, RATE),
    "Qwen3-0.6B, full fine-tuning": least("model", trained("qwen3 0 6b"), 55000.0, RATE),
}
KINDS: dict[Kind, dict[str, Any]] = {"cpu": CPU, "cpu without bf16": NARROW, "gpu": GPU}
TARGETS = tuple(Target(what, kind, *aim) for kind, aims in KINDS.items() for what, aim in aims.items())
