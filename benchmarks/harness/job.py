"""Our side of the training jobs: a model, its optimizer, and whole steps of `unfreeze.train` as a Worker.

A step is that of a real run, on random documents: forward, backward, the norm of all gradients, clipping to
1, AdamW. B documents of L tokens, T = B · L.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.harness.sides import Worker
from unfreeze import models
from unfreeze.adapters import LoraConfig, attach, sites
from unfreeze.adapters.lora import ExpertLowRank
from unfreeze.checkpoint import open_checkpoint
from unfreeze.core.batch import Batch
from unfreeze.core.layout import RESIDENT
from unfreeze.generate.open import open_model
from unfreeze.models import Decoder
from unfreeze.objectives.cross_entropy import cross_entropy
from unfreeze.parallel.machine import resident_bytes
from unfreeze.parallel.plan import Plan, plan_here
from unfreeze.parallel.plan.counts import counts
from unfreeze.train.optim import AdamW
from unfreeze.train.step import train_step

LEARNING_RATE, MAX_NORM, BETAS = 2e-4, 1.0, (0.9, 0.95)
FIRST_WORD = 2  # ids 0 and 1 begin and end documents
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


def tokens_of(generator: torch.Generator, documents: int, length: int, vocab_size: int) -> torch.Tensor:
    """[B, L] random ids; every side draws the same from the same seed."""
    return torch.randint(FIRST_WORD, vocab_size, (documents, length), generator=generator)


def batch_of(tokens_BL: torch.Tensor) -> Batch:
    """B documents, supervised at every position except their last."""
    documents, length = tokens_BL.shape
    weights_BL = torch.ones(documents, length)
    weights_BL[:, -1] = 0
    positions_T, starts_S = torch.arange(length).repeat(documents), torch.arange(documents) * length
    return Batch(
        tokens_BL.flatten(), tokens_BL.roll(-1, 1).flatten(), weights_BL.flatten(), positions_T, starts_S
    )


def open_job(checkpoint: str, dtype: str, lora: Mapping[str, Any] | None, device: str = "cpu") -> Decoder:
    """The checkpoint with fresh adapters, or with every weight trainable."""
    model = open_model(
        open_checkpoint(checkpoint), DTYPES[dtype], device, as_stored=lora is not None and dtype != "float64"
    )
    if lora is not None:
        attach(model, LoraConfig(**lora), seed=0)
    return model


def trainer(
    checkpoint: str,
    checked: str,
    dtype: str,
    lora: Mapping[str, Any] | None,
    recompute: Any,
    documents: int,
    length: int,
    device: str = "cpu",
) -> Worker:
    """Build the worker that trains.

    calls: step() -> loss, grad_norm; state() -> bytes of weights, gradients and optimizer; check() -> see
    `check`.
    """
    before = resident_bytes()
    return training_worker(
        open_job(checkpoint, dtype, lora, device),
        documents,
        length,
        recompute,
        runtime_bytes=before,
        check=lambda: check(
            checked, dtype, lora, recompute, documents=2, length=min(length, 128), device=device
        ),
    )


def model_flops(model: Decoder, documents: int, length: int) -> float:
    """Model FLOP of one step, without recompute; T tokens.

    T · (4·N + 6·A) + 3·attention with a frozen base, T · 6·N + 3·attention where every weight trains.
    N, A  of `multiplied`
    attention  2 · H · (query + value width) · L(L + 1)/2 of each document and layer: causal scores and sums
    """
    weights, adapters = multiplied(model)
    attention = counts(model).attention * documents * length * (length + 1) / 2
    frozen = bool(sites(model))
    return documents * length * ((4 if frozen else 6) * weights + 6 * adapters) + 3 * attention


def multiplied(model: Decoder) -> tuple[float, float]:
    """(N, A): weights that a token is multiplied with, and the same of adapters.

    N is dense matrices, routers, the token's K experts and the head.
    """
    of = counts(model)
    share = of.experts_per_token / max(1, of.num_experts)
    experts = of.moe_layers * of.experts_per_token * of.expert_weights
    adapters = sum(
        (share if isinstance(site.adapter, ExpertLowRank) else 1)
        * sum(p.numel() for p in site.adapter.parameters())
        for site in sites(model)
    )
    return of.dense + of.router + experts + of.hidden_size * of.vocab_size, adapters


def planned(
    checkpoint: str,
    dtype: str,
    lora: Mapping[str, Any],
    tokens: int,
    length: int,
    moments: Any = "float32",
    **layout: Any,
) -> Plan:
    """The plan of such a job with `tokens` tokens per step."""
    manifest = open_checkpoint(checkpoint)
    return plan_here(
        models.shape(manifest.config),
        manifest,
        LoraConfig(**lora),
        tokens=tokens,
        dtype=dtype,
        device="cpu",
        layout=RESIDENT.but(**layout),
        optimizer_moments=moments,
        longest=length,
    )


def training_worker(
    model: Decoder,
    documents: int,
    length: int,
    recompute: Any,
    *,
    check: Any,
    runtime_bytes: int = 0,
    moments: Any = "float32",
) -> Worker:
    """Wrap an opened model in a Worker with the calls of `trainer`."""
    optimizer = AdamW(model, betas=BETAS, moments=moments)
    generator = torch.Generator().manual_seed(0)

    def step() -> dict[str, Any]:
        batch = batch_of(tokens_of(generator, documents, length, model.shape.vocab_size))
        result = train_step(
            model,
            optimizer,
            [batch],
            cross_entropy,
            learning_rate=LEARNING_RATE,
            max_norm=MAX_NORM,
            recompute=models.RECOMPUTE[recompute],
        )
        return {"loss": result.loss, "grad_norm": result.grad_norm}

    def state() -> dict[str, Any]:
        gradients = [
            gradient for name in optimizer.parameters if (gradient := optimizer.gradient(name)) is not None
        ]
        # a tied head is one tensor
        weights = {id(tensor): tensor.nbytes for tensor in [*model.parameters(), *model.buffers()]}
        return {
            "weights": sum(weights.values()),
            "gradients": sum(gradient.nbytes for gradient in gradients),
            "optimizer": sum(tensor.nbytes for tensor in optimizer.tensors().values()),
        }

    facts = {
        "trained_parameters": sum(p.numel() for p in optimizer.parameters.values()),
        "model_flops": model_flops(model, documents, length),
        "runtime_bytes": runtime_bytes,
    }
    return Worker({"step": step, "state": state, "check": check}, facts)


def check(
    checkpoint: str,
    dtype: str,
    lora: Mapping[str, Any] | None,
    recompute: Any,
    *,
    documents: int,
    length: int,
    device: str = "cpu",
) -> dict[str, Any]:
    """Return the numbers by which sides are compared: loss_fresh, loss_moved and grad_norm.

    loss_fresh is the loss of the model as opened. loss_moved and grad_norm are taken with a random B in every
    adapter, because A has no gradient while B = 0.
    """
    model = open_job(checkpoint, dtype, lora, device)
    batch = batch_of(
        tokens_of(torch.Generator().manual_seed(1), documents, length, model.shape.vocab_size)
    ).to(device)
    policy = models.RECOMPUTE[recompute]
    with torch.no_grad():
        first = cross_entropy(model.hidden(batch, policy), model.lm_head, batch)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for site in sites(model):
            for name, parameter in site.adapter.named_parameters():
                if name.endswith("B"):
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
    moved = cross_entropy(model.hidden(batch, policy), model.lm_head, batch)
    (moved.sum / moved.count).backward()
    norms = [parameter.grad.double().norm() for parameter in model.parameters() if parameter.grad is not None]
    return {
        "loss_fresh": float(first.sum) / float(first.count),
        "loss_moved": float(moved.sum.detach()) / float(moved.count),
        "grad_norm": float(torch.stack(norms).norm()),
    }


def exact(checked: str, lora: Mapping[str, Any] | None, length: int) -> Worker:
    """Return `check` in float64 on the reference path: every side is compared with it.

    Routing is computed in float32, as the models define it.
    """
    return Worker({}, check(checked, "float64", lora, "nothing", documents=2, length=min(length, 128)))


def errors(checked: Mapping[str, Any], exact: Mapping[str, Any]) -> dict[str, float]:
    """Return |checked - exact| / |exact| of each value of a side's `check`, by name."""
    names = {"loss_fresh": "loss, fresh adapters", "loss_moved": "loss", "grad_norm": "gradient norm"}
    return {
        f"{names[key]}, against float64": abs(checked[key] - exact[key]) / abs(exact[key])
        for key in names
        if key in checked and key in exact
    }
