"""Train whole models of real shape with random weights on one GPU: tokens/s, MFU, peak memory.

`unfreeze dev bench model`, about a minute for each model, one after the other.

Each model's sizes are those of its published config.json; weights are random and made on the GPU, so nothing
is downloaded or read from disk. The step is training's own (train/step.py): packed documents of 4,096 tokens,
forward, backward, clipping, AdamW. The same batch is given at every step, so the loss must fall; a model that
doesn't learn fails its row.
"""

from __future__ import annotations

import gc
import math
import shlex
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast

import torch
from pydantic import Field
from rich.console import Console
from rich.table import Table

from benchmarks.harness.flops import StepFlops, step_flops
from benchmarks.harness.rows import Row, Stamp, append, where
from benchmarks.harness.synthetic import fill_random
from benchmarks.harness.timing import wait
from unfreeze import models
from unfreeze.adapters import LoraConfig, attach
from unfreeze.config.parse import Folder, Frozen, parse
from unfreeze.core.batch import Batch
from unfreeze.core.command import Common
from unfreeze.core.errors import ConfigError, DoesNotFit
from unfreeze.core.layout import RESIDENT
from unfreeze.core.units import format_bytes
from unfreeze.kernels.linear_cross_entropy import block_cost
from unfreeze.kernels.loops.scratch import release_scratch
from unfreeze.objectives.cross_entropy import cross_entropy
from unfreeze.parallel.machine import Hardware, hardware
from unfreeze.parallel.plan import Plan, Work, measure_sizes, plan, refuse_if_too_large
from unfreeze.quant.int4 import Int4
from unfreeze.train.memory import peak_bytes, reset_peak_bytes
from unfreeze.train.optim import AdamW
from unfreeze.train.step import StepResult, train_step

# config.json of Qwen/Qwen3-30B-A3B, Qwen/Qwen2.5-7B and Qwen/Qwen3-0.6B (huggingface.co), what sizes and
# arithmetic depend on
QWEN3_30B: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "attention_bias": False,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
QWEN25_7B: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
QWEN3_06B: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "attention_bias": False,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Job:
    """One model and what is trained of it.

    rank: of the adapters; None trains every weight, in bf16 with fp32 masters.
    target: tokens/s on one H200; None where none was set.
    """

    config: Mapping[str, Any]
    experts: Literal["int4", "bf16", ""]
    rank: int | None
    target: float | None


JOBS: dict[str, Job] = {
    "qwen3-30b-a3b-int4": Job(QWEN3_30B, "int4", 16, 17000),
    "qwen3-30b-a3b-bf16": Job(QWEN3_30B, "bf16", 16, None),
    "qwen2.5-7b": Job(QWEN25_7B, "", 16, 20000),
    "qwen3-0.6b-full": Job(QWEN3_06B, "", None, 55000),
}
# bf16 tensor-core peak without sparsity, FLOP/s, by what the GPU's name contains: NVIDIA's data sheets. MFU
# is null for others.
PEAK = {"H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "B200": 2250e12}
SEQUENCE = 4096


class Config(Frozen):
    models: tuple[str, ...] = Field(default=tuple(JOBS), description=f"which to run, of {', '.join(JOBS)}")
    tokens_per_step: Annotated[int, Field(ge=2)] = Field(
        default=65536, description="of a step, in micro-batches as large as fit; 4,096 per document"
    )
    steps: Annotated[int, Field(ge=3, le=100)] = Field(
        default=8, description="timed steps after two that warm up; the median counts"
    )
    recompute: Literal["layers", "selective", "nothing"] = Field(
        default="selective", description="as in sft; falls to what fits, and says so"
    )
    append: Folder = Field(
        default="",
        description=(
            "file the rows are appended to; default: benchmarks/results/<device>.jsonl of the checkout"
        ),
    )


def main(arguments: list[str], common: Common) -> dict[str, Any]:
    """Train them; -> rows, path."""
    config = parse(Config, arguments, command="dev bench model", description=__doc__ or "")
    unknown = [name for name in config.models if name not in JOBS]
    if unknown:
        raise ConfigError(
            f"bench model knows no {unknown[0]!r}; it has {', '.join(JOBS)}",
            next="unfreeze dev bench model --help",
        )
    if not torch.cuda.is_available():
        raise ConfigError(
            "bench model needs a CUDA device and there is none here; its rows stay not measured",
            next="run it on a machine with a GPU",
        )
    device = torch.device("cuda", torch.cuda.current_device())
    stamp = Stamp.now("model", shlex.join(["unfreeze", "bench", "model", *arguments]), device)
    path, console, rows = where(config.append, device), Console(stderr=True, quiet=common.quiet), []
    for name in config.models:
        console.print(f"{name} …")
        rows.append(run(name, JOBS[name], config, device, stamp))
        append(rows[-1:], path)
    show(rows, Console(file=sys.stderr if common.json else sys.stdout, quiet=common.quiet))
    return {
        "rows": [row.model_dump() for row in rows],
        "path": str(path) if path else None,
        "exit_code": int(any(failed(row) for row in rows)),
    }


def failed(row: Row) -> bool:
    """Whether a model ran and did not learn."""
    return bool(row.results) and not row.results["learned"]


def run(
    name: str, job: Job, config: Config, device: torch.device, stamp: Stamp, sequence: int = SEQUENCE
) -> Row:
    """One job: sized by the plan, or a row that says with the plan's arithmetic why it isn't run here."""
    settings = {
        "sizes": dict(job.config),
        "experts": job.experts,
        "rank": job.rank,
        "sequence": sequence,
        "tokens_per_step": config.tokens_per_step,
        "steps": config.steps,
        "dtype": "bfloat16",
        "weights": "random",
    }
    shape = models.shape(job.config)
    try:
        made = sized(job, config, hardware(device), device, sequence)
    except DoesNotFit as error:
        return stamp.row(name, settings, not_run=str(error).replace("\n", " "))
    settings |= {"micro_batches": made.work.micro_batches, "recompute": made.layout.recompute}
    try:
        found = train(shape, job, made, config.steps, device, sequence)
    finally:
        release_scratch()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    peak_rate = next((rate for part, rate in PEAK.items() if part in hardware(device).name), None)
    flops: StepFlops = found.pop("flops")
    speed, per_token = found["tokens_per_second"], flops.model / found["tokens"]
    results = {
        **found,
        "flop_per_token": per_token,
        "mfu": speed * per_token / peak_rate if peak_rate else None,
        "recomputed_flop_per_token": flops.recomputed / found["tokens"],
        "target": job.target,
        "verdict": "" if job.target is None else "met" if speed >= job.target else "missed",
        "plan_bytes": made.training,
        "peak_over_plan": found["peak_bytes"] / made.training,
        "plan_terms": made.terms,
        "correctness": {
            "loss at the first and last step": (
                "falls on repeated data" if found["learned"] else "DID NOT FALL"
            ),
            "arithmetic": (
                "the same code on the CPU against transformers and float64 (tests/models, tests/kernels)"
            ),
        },
    }
    return stamp.row(name, settings, results)


def built(shape: models.Shape, job: Job, device: torch.device | str) -> models.Decoder:
    """The model, uninitialised."""
    codec = Int4(32) if job.experts == "int4" else None
    return models.build(
        shape,
        dtype=torch.bfloat16,
        device=device,
        codec_for=lambda name: codec if ".experts." in name else None,
    )


def sized(job: Job, config: Config, found: Hardware, device: torch.device, sequence: int) -> Plan:
    """Give the plan that fits: the least recompute first, then the fewest micro-batches.

    Raises DoesNotFit with the arithmetic.
    """
    shape = models.shape(job.config)
    lora = LoraConfig(rank=job.rank) if job.rank else None
    sizes = measure_sizes(built(shape, job, "meta"), lora, "cuda")
    modes: tuple[Literal["nothing", "selective", "layers"], ...] = ("nothing", "selective", "layers")
    documents = max(1, config.tokens_per_step // sequence)
    loss_rows, loss_bytes = block_cost(shape.vocab_size, torch.bfloat16, device, trained=job.rank is None)
    made = None
    for mode in modes[modes.index(config.recompute) :]:
        for parts in (n for n in range(1, documents + 1) if documents % n == 0):
            work = Work(
                tokens=documents // parts * sequence,
                rank=job.rank,
                micro_batches=parts,
                loss_rows=loss_rows,
                loss_bytes=loss_bytes,
            )
            made = plan(sizes, RESIDENT.but(recompute=mode), work, found)
            if made.fits and parts <= 4:
                return made
    assert made is not None
    refuse_if_too_large(made)
    return made


def train(
    shape: models.Shape, job: Job, made: Plan, steps: int, device: torch.device, sequence: int
) -> dict[str, Any]:
    """Train two warm-up steps and `steps` timed ones on the same batch.

    Gives tokens/s of the median step, losses, peak memory, and the arithmetic.
    """
    model = built(shape, job, device)
    fill_random(model, seed=0)
    if job.rank:
        attach(model, LoraConfig(rank=job.rank), seed=0)
    optimizer = AdamW(model)
    batches = [
        _batch(shape.vocab_size, made.work.tokens // sequence, sequence, seed)
        for seed in range(made.work.micro_batches)
    ]
    tokens = sum(batch.num_tokens for batch in batches)
    # adapters start at B = 0 and take large steps; a whole random model needs small ones
    rate = 1e-3 if job.rank else 1e-4

    def step() -> StepResult:
        return train_step(
            model,
            optimizer,
            batches,
            cross_entropy,
            learning_rate=rate,
            max_norm=1.0,
            recompute=models.RECOMPUTE[made.layout.recompute],
        )

    losses = [step().loss for _ in range(2)]
    wait(device)
    reset_peak_bytes(device)
    seconds = []
    for _ in range(steps):
        started = time.perf_counter()
        losses.append(step().loss)
        wait(device)  # the update too: a step's own time, and nothing of the one before
        seconds.append(time.perf_counter() - started)
    low, middle, high = statistics.quantiles(seconds, n=4)
    return {
        "tokens_per_second": tokens / middle,
        "slowest_quartile": tokens / high,
        "fastest_quartile": tokens / low,
        "tokens": tokens,
        "peak_bytes": peak_bytes(device),
        "loss_first": losses[0],
        "loss_last": losses[-1],
        "learned": all(math.isfinite(loss) for loss in losses) and losses[-1] < losses[0],
        "parameters": sum(p.numel() for p in model.parameters()),
        "flops": step_flops(model, [sequence] * (tokens // sequence), cast(Any, made.layout.recompute)),
    }


def _batch(vocab: int, documents: int, sequence: int, seed: int) -> Batch:
    """Make documents of one length in which token i + 1 follows from token i, so there is something to learn.

    Each position is supervised but the last.
    """
    first = torch.randint(0, vocab, (documents, 1), generator=torch.Generator().manual_seed(seed))
    tokens = (first + 7 * torch.arange(sequence)) % min(vocab, 4096)
    weights = torch.ones(documents, sequence)
    weights[:, -1] = 0
    positions = torch.arange(sequence).repeat(documents)
    return Batch(
        tokens.flatten(),
        tokens.roll(-1, 1).flatten(),
        weights.flatten(),
        positions,
        torch.arange(documents) * sequence,
    )


def show(rows: list[Row], console: Console) -> None:
    """One line per model."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for head in (
        "model",
        "tokens/s",
        "quartiles",
        "target",
        "verdict",
        "MFU",
        "peak",
        "of the plan",
        "loss",
        "micro-batches",
        "recompute",
    ):
        table.add_column(head)
    for row in rows:
        found, settings = row.results, row.settings
        if row.not_run:
            table.add_row(row.side, "not run", row.not_run)
            continue
        table.add_row(
            row.side,
            f"{found['tokens_per_second']:,.0f}",
            f"{found['slowest_quartile']:,.0f} to {found['fastest_quartile']:,.0f}",
            f"{found['target']:,.0f}" if found["target"] else "",
            found["verdict"],
            f"{found['mfu']:.1%}" if found["mfu"] else "unknown peak",
            format_bytes(found["peak_bytes"]),
            f"{found['peak_over_plan']:.2f}",
            f"{found['loss_first']:.3f} to {found['loss_last']:.3f}",
            str(settings["micro_batches"]),
            settings["recompute"],
        )
    console.print(table)
