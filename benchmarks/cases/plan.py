"""Compare what the plan states of some twenty small runs with what they took.

Each run of `unfreeze dev bench plan` is a process of its own: a model of random weights, adapters or all of
its weights, one step that warms up, then timed ones. About 10 minutes, on one core unless --threads says more.
Written to docs/plan_checked.md of the checkout, or --out; the page says how each figure is measured.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from benchmarks.harness.plan_page import cells, page
from benchmarks.harness.training import Measured, command, say
from unfreeze.config.parse import Folder, parse, writing
from unfreeze.core.command import Common
from unfreeze.core.errors import DataError
from unfreeze.core.process import trim

KIMI = {
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "n_routed_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 256,
    "intermediate_size": 1280,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 192,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "vocab_size": 8192,
}
COMMON = {"max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "vocab_size": 16384}
LLAMA = COMMON | {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
}
QWEN2 = COMMON | {
    "model_type": "qwen2",
    "hidden_size": 640,
    "intermediate_size": 1728,
    "num_hidden_layers": 4,
    "num_attention_heads": 10,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
QWEN3_MOE = COMMON | {
    "model_type": "qwen3_moe",
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 192,
    "norm_topk_prob": True,
}


@dataclass(frozen=True)
class Case:
    """One run.

    model      a family, or "tiny-k2"
    rank       None: every weight trains
    documents  of each of the `processes`, which sum their gradients (gloo)
    """

    model: str
    rank: int | None = 8
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    documents: int = 8
    length: int = 512
    recompute: Literal["layers", "selective", "elementwise", "nothing"] = "selective"
    moments: Literal["float32", "int8"] = "float32"
    sizes: Mapping[str, int] = field(default_factory=dict)
    processes: int = 1

    @property
    def tokens(self) -> int:
        """Of one process."""
        return self.documents * self.length

    @property
    def name(self) -> str:
        trains = "all" if self.rank is None else f"rank {self.rank}"
        sizes = "".join(f", {value} {name}" for name, value in self.sizes.items())
        small = ", int8 moments" if self.moments == "int8" else ""
        many = f"{self.processes} processes of " if self.processes > 1 else ""
        return (
            f"{self.model}{sizes}, {trains}, {self.dtype}, {many}{self.documents} x {self.length:,},"
            f" {self.recompute}{small}"
        )


CASES = (
    Case("tiny-k2", dtype="float32", documents=32, length=128),
    Case("tiny-k2", rank=16, documents=8, length=512, recompute="layers"),
    Case("kimi"),
    Case("kimi", rank=32, documents=4),
    Case("kimi", rank=64, documents=4, moments="int8"),
    Case("kimi", recompute="layers"),
    Case("kimi", recompute="nothing", documents=2),
    Case("kimi", documents=1, length=4096),
    Case("kimi", documents=4, dtype="float32"),
    Case("qwen3_moe", documents=4),
    Case("qwen3_moe", documents=4, rank=32, recompute="layers"),
    Case("qwen3_moe", documents=8, length=128, dtype="float32"),
    Case("qwen3_moe", documents=2, rank=None),
    Case("llama", documents=4),
    Case("llama", documents=4, rank=64, recompute="nothing"),
    Case("llama", documents=4, rank=None),
    Case("llama", documents=2, rank=None, dtype="float32", recompute="layers"),
    Case("llama", documents=2, length=2048, recompute="elementwise"),
    Case("qwen2", documents=8, rank=16),
    Case("qwen2", documents=4, rank=None, moments="int8", recompute="elementwise"),
    Case("qwen2", documents=2, length=1024, rank=4, dtype="float32", recompute="layers"),
    Case("kimi", rank=16, documents=4, processes=2),
    Case("llama", rank=None, documents=2, processes=2),
)
# what glibc is told in the process whose bytes are measured: give every freed block back
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


class Config(Measured):
    """What is measured."""

    steps: int = Field(default=3, ge=1, description="timed steps of each run; the median counts")
    only: tuple[str, ...] = Field(default=(), description="runs whose name begins so; default: all")
    out: Folder = Field(default="", description="the page; default: docs/plan_checked.md of the checkout")


def main(arguments: list[str], common: Common) -> dict[str, Any]:
    """-> file, rows: for each run the bytes and seconds, planned and measured."""
    return measure(parse(Config, arguments, command="dev bench plan", description=__doc__ or ""), common)


def measure(config: Config, common: Common, cases: Sequence[Case] = CASES) -> dict[str, Any]:
    """The runs one after the other, each twice: for its bytes, and as a run is."""
    from benchmarks.harness.rows import Stamp, checkout

    root = checkout()
    if root is None and not config.out:
        raise DataError("there is no source checkout here, so no docs/plan_checked.md", next="--out FILE")
    out = Path(config.out) if config.out else (root or Path()) / "docs" / "plan_checked.md"
    stamp = Stamp.now("plan", command("plan", config), threads=config.threads or 1)
    rows: list[dict[str, Any]] = []
    for case in cases:
        if config.only and not case.name.startswith(config.only):
            continue
        rows.append(checked(case, config))
        say(common)(" | ".join(cells(rows[-1])))
    with writing(out, "out"):
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(page(stamp, rows), encoding="utf-8")
    return {"file": str(out), "rows": rows}


def checked(case: Case, config: Config) -> dict[str, Any]:
    """One run: what the plan states, and what was measured."""
    threads = config.threads or 1
    small, kept = run(case, 1, threads, GIVE_BACK)
    side, whole = run(case, config.steps, threads, {})
    stated = planned(case, threads)
    process = side.loaded["process"]
    return {
        "name": case.name,
        "planned_bytes": stated["bytes"],
        "terms": stated["terms"],
        "measured_bytes": small.peak() - kept,
        "process_bytes": process,
        "compiled_bytes": whole - process,
        "peak_bytes": side.peak(),
        "beside_bytes": side.peak() - process - stated["bytes"],
        "planned_seconds": stated["seconds"],
        "rates": stated["rates"],
        "measured_seconds": side.median("cpu_seconds" if threads == 1 else "seconds"),
    }


def run(case: Case, steps: int, threads: int, environment: Mapping[str, str]) -> tuple[Any, int]:
    """(the side after its steps, bytes its process keeps without the model)."""
    from benchmarks.harness.sides import Side, Sides

    arguments = {**case.__dict__, "sizes": dict(case.sizes)}
    side = Side(case.name, "benchmarks.cases.plan:trainer", arguments, threads=threads)
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        with Sides([side], lambda line: None) as sides:
            sides.take_turns("step", warmup=1, rounds=steps, peaks="timed")
            return side, side.call("leave")["resident"]
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value


def config_of(model: str, sizes: Mapping[str, int]) -> dict[str, Any]:
    """config.json of a family, or of the checkpoint in a folder."""
    from benchmarks.harness import kimi
    from unfreeze.checkpoint.manifest import read_json

    if model == "tiny-k2":
        return read_json(kimi.TINY_K2 / "config.json")
    if model == "kimi":
        return kimi.config(**{**KIMI, **sizes})
    return {"llama": LLAMA, "qwen2": QWEN2, "qwen3_moe": QWEN3_MOE}[model] | dict(sizes)


def planned(case: Case, threads: int) -> dict[str, Any]:
    """What the plan states of a run on so many threads: bytes of a process, seconds by formula."""
    import torch

    from unfreeze import models
    from unfreeze.config.lora import LoraConfig
    from unfreeze.core.layout import RESIDENT
    from unfreeze.parallel.machine import hardware
    from unfreeze.parallel.plan import PlannedModel, measure_sizes, plan, rates_here, work_of
    from unfreeze.parallel.plan.choose import PlanRequest, seconds_of
    from unfreeze.parallel.plan.counts import counts
    from unfreeze.parallel.plan.fleet import Fleet

    dtype, cpu = getattr(torch, case.dtype), torch.device("cpu")
    model = models.from_config(config_of(case.model, case.sizes), dtype)
    lora = None if case.rank is None else LoraConfig(rank=case.rank)
    sizes, counted, machine = measure_sizes(model, lora), counts(model), hardware("cpu")
    work = work_of(
        PlannedModel(model.shape, lora, dtype, cpu, counted, sizes, model),
        tokens=case.tokens,
        optimizer_moments=case.moments,
        longest=case.length,
        micro_batches=case.processes,
        processes=case.processes,
        threads=threads,
    )
    layout = RESIDENT.but(recompute=case.recompute)
    made = plan(sizes, layout, work, machine)
    rates = rates_here(
        model.shape,
        dtype=dtype,
        device=torch.device("cpu"),
        length=case.length,
        every_weight=lora is None,
        packed=counted.packed,
        optimizer_moments=case.moments,
        threads=threads,
    )
    time = None
    if rates is not None:
        here = Fleet("here", case.processes, machine.available, kind="cpu")
        tokens = case.tokens * case.processes
        asked = PlanRequest(replace(work, micro_batches=1), tokens, case.length)
        time = seconds_of(sizes, counted, here, rates, layout, asked, tokens)
    return {
        "bytes": made.training,
        "terms": made.terms,
        "seconds": time and time.step,
        "rates": rates.source if rates else "",
    }


def trainer(
    model: str,
    rank: int | None,
    dtype: str,
    documents: int,
    length: int,
    recompute: str,
    moments: Any,
    sizes: Mapping[str, int],
    processes: int = 1,
    rank_of_process: int = 0,
) -> Any:
    """calls: step() -> loss; leave() frees the model, so that what remains is the process's own.

    Process 0 starts the others, and makes each step together with them.
    """
    arguments = dict(locals())  # for the other processes
    import torch

    from benchmarks.harness.job import batch_of, tokens_of
    from benchmarks.harness.sides import Worker
    from benchmarks.harness.synthetic import fill_random
    from unfreeze import models
    from unfreeze.adapters import LoraConfig, attach
    from unfreeze.kernels.loops.scratch import release_scratch
    from unfreeze.objectives.cross_entropy import cross_entropy
    from unfreeze.parallel.machine import resident_bytes
    from unfreeze.parallel.processes.collectives import open_group
    from unfreeze.train.optim import AdamW
    from unfreeze.train.step import train_step

    process, stack = resident_bytes(), ExitStack()
    made = models.from_config(config_of(model, sizes), getattr(torch, dtype), "cpu")
    fill_random(made, seed=0)
    if rank is not None:
        attach(made, LoraConfig(rank=rank), seed=0)
    generator = torch.Generator().manual_seed(0)
    held: dict[str, Any] = {"model": made, "optimizer": AdamW(made, moments=moments)}
    del made
    if processes > 1 and rank_of_process == 0:
        held["others"] = Others(arguments, processes)

    def step() -> dict[str, Any]:
        vocab = held["model"].shape.vocab_size
        batches = [batch_of(tokens_of(generator, documents, length, vocab)) for _ in range(processes)]
        with held["others"].stepping() if "others" in held else nullcontext():
            if "group" not in held:
                held["group"] = stack.enter_context(open_group(torch.device("cpu")))
            found = train_step(
                held["model"],
                held["optimizer"],
                batches,
                cross_entropy,
                learning_rate=1e-4,
                max_norm=1.0,
                recompute=models.RECOMPUTE[recompute],
                group=held["group"],
            )
        return {"loss": found.loss}

    def leave() -> dict[str, Any]:
        if "others" in held:
            held["others"].stop()
        held.clear()
        release_scratch()
        trim()
        return {"resident": resident_bytes()}

    return Worker({"step": step, "leave": leave}, {"process": process})


class Others:
    """The other processes of a run, started and told to step by process 0.

    They meet in a group of torch.distributed at their first step.
    """

    def __init__(self, arguments: Mapping[str, Any], processes: int):
        import torch

        from benchmarks.harness.sides import Side

        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        os.environ |= {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        self._sides = [
            Side(
                f"process {rank}",
                "benchmarks.cases.plan:trainer",
                {**arguments, "rank_of_process": rank},
                threads=torch.get_num_threads(),
            )
            for rank in range(1, processes)
        ]
        for rank, side in enumerate(self._sides, start=1):
            os.environ["RANK"] = str(rank)
            side.start()
        os.environ["RANK"] = "0"
        self._pool = ThreadPoolExecutor(len(self._sides))

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """They make a step while the body does. Raises SideFailed if one of them could not."""
        steps = [self._pool.submit(side.call, "step") for side in self._sides]
        yield
        for made in steps:
            made.result()

    def stop(self) -> None:
        for side in self._sides:
            side.stop()
        self._pool.shutdown()
