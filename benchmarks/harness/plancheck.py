"""Runs whose plan is compared with measurement: planned figures, measured figures, and the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from benchmarks.harness import shapes
from benchmarks.harness.case import Run
from benchmarks.harness.job import batch_of, tokens_of
from benchmarks.harness.report import markdown
from benchmarks.harness.rows import Stamp
from benchmarks.harness.sides import Side, Sides, Worker
from benchmarks.harness.synthetic import fill_random
from unfreeze import models
from unfreeze.adapters import LoraConfig, attach
from unfreeze.checkpoint.manifest import read_json
from unfreeze.core.layout import RESIDENT
from unfreeze.core.process import trim
from unfreeze.core.units import format_bytes
from unfreeze.kernels.loops.scratch import release_scratch
from unfreeze.objectives.cross_entropy import cross_entropy
from unfreeze.parallel.machine import hardware, resident_bytes
from unfreeze.parallel.plan import PlannedModel, measure_sizes, plan, rates_here, work_of
from unfreeze.parallel.plan.choose import PlanRequest, seconds_of
from unfreeze.parallel.plan.counts import counts
from unfreeze.parallel.plan.fleet import Fleet
from unfreeze.train.optim import AdamW
from unfreeze.train.step import train_step

KIMI = {"hidden_size": 512, "num_hidden_layers": 4, "n_routed_experts": 32, "num_experts_per_tok": 4}
KIMI |= {"moe_intermediate_size": 256, "intermediate_size": 1280, "num_attention_heads": 8}
KIMI |= {"num_key_value_heads": 8, "q_lora_rank": 192, "kv_lora_rank": 128}
COMMON: dict[str, Any] = {"max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "vocab_size": 16384}
COMMON |= {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2}
LLAMA = {"model_type": "llama", "intermediate_size": 1408, "num_hidden_layers": 6, "num_key_value_heads": 4}
QWEN2 = {"model_type": "qwen2", "hidden_size": 640, "intermediate_size": 1728, "num_attention_heads": 10}
QWEN3_MOE = {"model_type": "qwen3_moe", "intermediate_size": 1536, "head_dim": 64, "num_experts": 32}
QWEN3_MOE |= {"num_experts_per_tok": 8, "moe_intermediate_size": 192, "norm_topk_prob": True}
FAMILIES = {
    "llama": COMMON | LLAMA | {"tie_word_embeddings": True},
    "qwen2": COMMON | QWEN2 | {"tie_word_embeddings": False},
    "qwen3_moe": COMMON | QWEN3_MOE,
}
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""glibc's settings in the process whose bytes are measured: return every freed block."""


@dataclass(frozen=True)
class One:
    """One run.

    model      a family, or "tiny-k2"
    rank       None: every weight trains
    """

    model: str
    rank: int | None = 8
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    documents: int = 8
    length: int = 512
    recompute: Literal["layers", "selective", "elementwise", "nothing"] = "selective"
    moments: Literal["float32", "int8"] = "float32"

    @property
    def tokens(self) -> int:
        return self.documents * self.length

    @property
    def name(self) -> str:
        trains = "all" if self.rank is None else f"rank {self.rank}"
        small = ", int8 moments" if self.moments == "int8" else ""
        return (
            f"{self.model}, {trains}, {self.dtype}, {self.documents} x {self.length:,},"
            f" {self.recompute}{small}"
        )


def config_of(model: str) -> dict[str, Any]:
    """config.json of a family, or of tiny-k2."""
    if model == "tiny-k2":
        return read_json(shapes.TINY_K2 / "config.json")
    return shapes.kimi(**KIMI) if model == "kimi" else FAMILIES[model]


def checked(one: One, run: Run) -> dict[str, Any]:
    """The planned and the measured figures; measured once for the bytes, once as a normal run."""
    threads = run.config.threads
    small, remaining = stepped(one, run, 1, GIVE_BACK)
    side, _ = stepped(one, run, run.config.steps, {})
    stated, process = planned(one, threads), side.loaded["process"]
    return {
        "name": one.name,
        "planned_bytes": stated["bytes"],
        "terms": stated["terms"],
        "measured_bytes": small.peak() - remaining,
        "process_bytes": process,
        "peak_bytes": side.peak(),
        "beside_bytes": side.peak() - process - stated["bytes"],
        "planned_seconds": stated["seconds"],
        "rates": stated["rates"],
        "measured_seconds": side.median("cpu_seconds" if threads == 1 else "seconds"),
    }


def stepped(one: One, run: Run, steps: int, environment: Mapping[str, str]) -> tuple[Side, int]:
    """(the side after its steps, bytes its process keeps without the model)."""
    side = run.side(one.name, "harness.plancheck:trainer", one=asdict(one))
    side.environment = environment
    with Sides([side], lambda line: None) as sides:
        sides.take_turns("step", warmup=1, rounds=steps, peaks="timed")
        return side, side.call("leave")["resident"]


def planned(one: One, threads: int) -> dict[str, Any]:
    """The planned bytes of a process and seconds of a step on `threads` threads."""
    dtype, cpu = getattr(torch, one.dtype), torch.device("cpu")
    model = models.from_config(config_of(one.model), dtype)
    lora = None if one.rank is None else LoraConfig(rank=one.rank)
    sizes, counted, machine = measure_sizes(model, lora), counts(model), hardware("cpu")
    work = work_of(
        PlannedModel(model.shape, lora, dtype, cpu, counted, sizes, model),
        tokens=one.tokens,
        optimizer_moments=one.moments,
        longest=one.length,
        threads=threads,
    )
    layout = RESIDENT.but(recompute=one.recompute)
    result = plan(sizes, layout, work, machine)
    rates = rates_here(
        model.shape,
        dtype=dtype,
        device=torch.device("cpu"),
        length=one.length,
        every_weight=lora is None,
        packed=counted.packed,
        optimizer_moments=one.moments,
        threads=threads,
    )
    time = None
    if rates is not None:
        here = Fleet("here", 1, machine.available, kind="cpu")
        request = PlanRequest(work, one.tokens, one.length)
        time = seconds_of(sizes, counted, here, rates, layout, request, one.tokens)
    return {
        "bytes": result.training,
        "terms": result.terms,
        "seconds": time and time.step,
        "rates": rates.source if rates else "",
    }


def trainer(one: dict[str, Any]) -> Worker:
    """calls: step() -> loss; leave() frees the model, so that only the process's own memory remains."""
    process, of = resident_bytes(), One(**one)
    model = models.from_config(config_of(of.model), getattr(torch, of.dtype), "cpu")
    fill_random(model, seed=0)
    if of.rank is not None:
        attach(model, LoraConfig(rank=of.rank), seed=0)
    generator = torch.Generator().manual_seed(0)
    held: dict[str, Any] = {"model": model, "optimizer": AdamW(model, moments=of.moments)}
    options: dict[str, Any] = {
        "learning_rate": 1e-4,
        "max_norm": 1.0,
        "recompute": models.RECOMPUTE[of.recompute],
    }
    del model

    def step() -> dict[str, Any]:
        tokens_BL = tokens_of(generator, of.documents, of.length, held["model"].shape.vocab_size)
        batches = [batch_of(tokens_BL)]
        return {"loss": train_step(held["model"], held["optimizer"], batches, cross_entropy, **options).loss}

    def leave() -> dict[str, Any]:
        held.clear()
        release_scratch()
        trim()
        return {"resident": resident_bytes()}

    return Worker({"step": step, "leave": leave}, {"process": process})


MEMORY, SECONDS = 0.10, 0.25
"""Largest relative differences between planned and measured figures."""
HEAD = [
    "run",
    "planned",
    "alive at once",
    "planned / measured",
    "peak of the process",
    "of it beside the plan",
    "planned s",
    "measured s",
    "planned / measured",
]


def cells(row: Mapping[str, Any]) -> list[str]:
    """A row of the table; ratios beyond the limits are bold."""
    memory, seconds = ratios(row)
    return [
        row["name"],
        format_bytes(row["planned_bytes"]),
        format_bytes(row["measured_bytes"]),
        marked(memory, MEMORY),
        format_bytes(row["peak_bytes"]),
        format_bytes(row["beside_bytes"]),
        "–" if row["planned_seconds"] is None else f"{row['planned_seconds']:.2f}",
        f"{row['measured_seconds']:.2f}",
        "–" if seconds is None else marked(seconds, SECONDS),
    ]


def ratios(row: Mapping[str, Any]) -> tuple[float, float | None]:
    """Planned over measured: bytes, seconds."""
    memory = row["planned_bytes"] / row["measured_bytes"]
    stated = row["planned_seconds"]
    return memory, None if stated is None else stated / row["measured_seconds"]


def beyond(ratio: float, limit: float) -> bool:
    """True if planned and measured differ by more than `limit` of the measured value."""
    return abs(ratio - 1) > limit


def marked(ratio: float, limit: float) -> str:
    return f"**{ratio:.2f}**" if beyond(ratio, limit) else f"{ratio:.2f}"


def page(stamp: Stamp, rows: Sequence[Mapping[str, Any]]) -> str:
    """docs/measured/plan_checked.md."""
    pairs = [ratios(row) for row in rows]
    outside = sum(beyond(memory, MEMORY) for memory, _ in pairs)
    timed = [seconds for _, seconds in pairs if seconds is not None]
    slow = sum(beyond(seconds, SECONDS) for seconds in timed)
    machine, rates = stamp.machine, next((row["rates"] for row in rows if row["rates"]), "none")
    lines = [
        "# Plan compared with measurement",
        f"`{stamp.command}` on {machine.name}, {machine.threads} of {machine.cores} cores, {stamp.run[:10]}.",
        NOTES.strip(),
        f"Memory: {len(rows) - outside} of {len(rows)} within {MEMORY:.0%}. Seconds:"
        f" {len(timed) - slow} of {len(timed)} within {SECONDS:.0%}; rates {rates}.",
        markdown(HEAD, [cells(row) for row in rows]),
        REASONS.strip(),
    ]
    return "\n\n".join(lines) + "\n"


NOTES = """
A row names model, trained weights, dtype, documents x length and recompute. Bold exceeds the limits (10 %
of memory, 25 % of seconds). Models have random weights.

- Alive at once: peak of the process while the C library returns every freed block, minus what it
  held before the model was built and what it keeps after the model is gone. The plan's terms add up to it.
- Peak of the process: as in a normal run. Besides the plan and the process at its start it includes code
  that numba and oneDNN compile, and heap that the C library keeps for reuse. `unfreeze doctor` puts this at
  0.3 to 0.8 GiB.
- Seconds: CPU time of the median step on one core, which other processes of the machine disturb least.
  Planned with the closed formula.
"""
REASONS = """
If planned seconds are missing, no rate was measured: int8 moments have no record, and tiny-k2 is narrower
than half of the narrowest measured model (its matrices of 64 to 384 numbers reach a fraction of the rate).
Values just outside the limits change between runs, because other processes share the machine's caches and
memory.
"""
