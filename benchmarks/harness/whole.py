"""Whole models of real shape on one GPU: sized by the plan, trained on repeated data, and their figures."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch.profiler import profile

from benchmarks.harness.job import batch_of, model_flops
from benchmarks.harness.shapes import GPT_OSS_20B, LLAMA_31_8B, QWEN3_06B, QWEN3_30B_A3B, QWEN25_7B, qwen
from benchmarks.harness.synthetic import fill_random
from benchmarks.harness.timing import wait
from unfreeze import models
from unfreeze.adapters import LoraConfig, attach
from unfreeze.core.layout import RESIDENT
from unfreeze.kernels.linear_cross_entropy import block_cost
from unfreeze.kernels.loops.scratch import release_scratch
from unfreeze.objectives.cross_entropy import cross_entropy
from unfreeze.parallel.machine import Hardware
from unfreeze.parallel.plan import Plan, Work, measure_sizes, plan, refuse_if_too_large
from unfreeze.quant.codec import Codec
from unfreeze.quant.int4 import Int4
from unfreeze.quant.mxfp4 import Mxfp4
from unfreeze.train.memory import peak_bytes, reset_peak_bytes
from unfreeze.train.optim import AdamW
from unfreeze.train.step import train_step

# bf16 tensor-core peak without sparsity, FLOP/s, by what the GPU's name contains: NVIDIA's data sheets
PEAK = {"H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "B200": 2250e12}


@dataclass(frozen=True)
class Job:
    """One model and its trained weights.

    rank: of the adapters; None trains every weight, in bf16 with fp32 masters.
    target: tokens/s on one H200; None if none was set.
    """

    config: Mapping[str, Any]
    experts: Literal["int4", "mxfp4", "bf16", ""]
    rank: int | None
    target: float | None


QWEN3_30B = qwen("qwen3_moe", QWEN3_30B_A3B, tied=False)
Named = Literal[
    "qwen3-30b-a3b-int4", "qwen3-30b-a3b-bf16", "gpt-oss-20b", "llama-3.1-8b", "qwen2.5-7b", "qwen3-0.6b-full"
]
JOBS = {
    "qwen3-30b-a3b-int4": Job(QWEN3_30B, "int4", 16, 17000),
    "qwen3-30b-a3b-bf16": Job(QWEN3_30B, "bf16", 16, None),
    "gpt-oss-20b": Job(GPT_OSS_20B, "mxfp4", 16, None),
    "llama-3.1-8b": Job(LLAMA_31_8B, "", 16, None),
    "qwen2.5-7b": Job(qwen("qwen2", QWEN25_7B, tied=False), "", 16, 20000),
    "qwen3-0.6b-full": Job(qwen("qwen3", QWEN3_06B), "", None, 55000),
}


def built(job: Job, device: torch.device | str) -> models.Decoder:
    """The model, uninitialised."""
    codecs: dict[str, Codec] = {"int4": Int4(32), "mxfp4": Mxfp4()}
    codec, shape = codecs.get(job.experts), models.shape(job.config)
    packed = lambda name: codec if ".experts." in name else None  # noqa: E731
    return models.build(shape, dtype=torch.bfloat16, device=device, codec_for=packed)


def sized(job: Job, tokens: int, recompute: str, gpu: Hardware, device: str, sequence: int) -> Plan:
    """The plan that fits: the least recompute first, then the fewest micro-batches.

    Raises DoesNotFit with the arithmetic.
    """
    shape, lora = models.shape(job.config), LoraConfig(rank=job.rank) if job.rank else None
    sizes, documents = measure_sizes(built(job, "meta"), lora, "cuda"), max(1, tokens // sequence)
    loss = block_cost(shape.vocab_size, torch.bfloat16, torch.device(device), trained=job.rank is None)
    modes: tuple[Literal["nothing", "selective", "layers"], ...] = ("nothing", "selective", "layers")
    fitted = None
    for mode in modes[[*modes].index(recompute) :]:  # pyright: ignore[reportArgumentType]
        for parts in (n for n in range(1, documents + 1) if documents % n == 0):
            work = Work(
                tokens=documents // parts * sequence,
                rank=job.rank,
                micro_batches=parts,
                loss_rows=loss[0],
                loss_bytes=loss[1],
            )
            fitted = plan(sizes, RESIDENT.but(recompute=mode), work, gpu)
            if fitted.fits and parts <= 4:
                return fitted
    assert fitted is not None
    refuse_if_too_large(fitted)
    return fitted


class Whole:
    """The model on the device, with adapters or every weight trained; it can train steps of several sizes."""

    def __init__(self, job: Job, device: str):
        self.place = torch.device(device)
        self.model = built(job, device)
        fill_random(self.model, seed=0)
        if job.rank:
            attach(self.model, LoraConfig(rank=job.rank), seed=0)
        self.optimizer = AdamW(self.model)
        # adapters start at B = 0 and take large steps; a whole random model needs small ones
        self.options: dict[str, Any] = {"learning_rate": 1e-3 if job.rank else 1e-4, "max_norm": 1.0}

    def train(self, fitted: Plan, steps: int, sequence: int, trace: Path | None = None) -> dict[str, Any]:
        """Two warm-up steps and `steps` timed ones on the same batches; tokens/s of the median step.

        trace: file for torch's profile of one more step, which Perfetto and chrome://tracing read.
        """
        model, documents = self.model, fitted.work.tokens // sequence
        batches = [
            follows(model.shape.vocab_size, documents, sequence, n) for n in range(fitted.work.micro_batches)
        ]
        tokens = sum(batch.num_tokens for batch in batches)
        recompute = models.RECOMPUTE[fitted.layout.recompute]

        def step() -> float:
            loss = train_step(
                model, self.optimizer, batches, cross_entropy, recompute=recompute, **self.options
            ).loss
            wait(self.place)  # so that a time includes the update and nothing of the step before
            return loss

        losses, seconds = [], []
        for number in range(2 + steps):
            if number == 2:
                reset_peak_bytes(self.place)
            started = time.perf_counter()
            losses.append(step())
            seconds.append(time.perf_counter() - started)
        if trace is not None:
            with profile() as profiled:
                step()
            profiled.export_chrome_trace(str(trace))
        low, middle, high = statistics.quantiles(seconds[2:], n=4)
        return {
            "tokens_per_second": tokens / middle,
            "slowest": tokens / high,
            "fastest": tokens / low,
            "tokens": tokens,
            "peak_bytes": peak_bytes(self.place),
            "loss_first": losses[0],
            "loss_last": losses[-1],
            "learned": all(map(math.isfinite, losses)) and losses[-1] < losses[0],
            "parameters": sum(p.numel() for p in model.parameters()),
            "flop_per_token": model_flops(model, tokens // sequence, sequence) / tokens,
        }

    def close(self) -> None:
        """Free the device's memory."""
        del self.model, self.optimizer
        release_scratch()
        gc.collect()
        if self.place.type == "cuda":
            torch.cuda.empty_cache()


def follows(vocab: int, documents: int, sequence: int, seed: int):
    """Documents in which token i + 1 follows from token i, so there is something to learn."""
    first = torch.randint(0, vocab, (documents, 1), generator=torch.Generator().manual_seed(seed))
    return batch_of((first + 7 * torch.arange(sequence)) % min(vocab, 4096))


def results(job: Job, fitted: Plan, figures: Mapping[str, Any], gpu: str) -> dict[str, Any]:
    """The results of a row: `figures`, compared with the target, the GPU's peak and the plan."""
    peak = next((rate for part, rate in PEAK.items() if part in gpu), None)
    speed = figures["tokens_per_second"]
    return {
        **figures,
        "mfu": speed * figures["flop_per_token"] / peak if peak else None,
        "target": job.target,
        "verdict": "" if job.target is None else "met" if speed >= job.target else "missed",
        "plan_bytes": fitted.training,
        "peak_over_plan": figures["peak_bytes"] / fitted.training,
        "plan_terms": fitted.terms,
        "correctness": {"loss at the first and last step": "falls on repeated data"},
        "note": f"loss {figures['loss_first']:.3f} to {figures['loss_last']:.3f}",
    }
