"""The memory plan: bytes of a training run, term by term, before anything is loaded.

Pure arithmetic; it never changes the config.

plan(sizes, layout, work, machine)      ->  Plan   numbers only (terms.py)
plan_run(model, layout, work, machine)  ->  Plan   with open fields of the layout chosen, and seconds

sizes.py    what the plan knows of a model: sums over its blocks' sizes (models/blocks/bytes.py)
layouts.py  requested layout -> possible layouts, fastest first (core/layout.py)
terms.py    Layout, Work -> bytes per term
grouped.py  how experts in groups change these bytes
places.py   terms.py's bytes for machines that are not here; choose.py: the best layout of such a machine
propose.py  settings that would fit, if the run does not
words.py    the plan as text and for plan.json
rates.py    a device's speed, from its maker's data or from records; seconds.py: of a step
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from unfreeze import models
from unfreeze.checkpoint.manifest import Manifest
from unfreeze.checkpoint.packing import packing_bytes
from unfreeze.config.lora import LoraConfig
from unfreeze.core.layout import GIB, RESIDENT, Layout
from unfreeze.kernels.linear_cross_entropy import block_cost
from unfreeze.models.chunks import chunk_tokens
from unfreeze.models.recompute import Recompute
from unfreeze.parallel import machine as machines
from unfreeze.parallel.machine import Hardware
from unfreeze.parallel.placement.units import group_bytes
from unfreeze.parallel.plan.aside import Aside
from unfreeze.parallel.plan.choose import PlanRequest, seconds_of
from unfreeze.parallel.plan.counts import Counts, counts
from unfreeze.parallel.plan.fastest import FASTEST_FIRST, fastest
from unfreeze.parallel.plan.fleet import Fleet
from unfreeze.parallel.plan.places import of_one
from unfreeze.parallel.plan.propose import refuse_if_too_large, what_fits
from unfreeze.parallel.plan.rates import LEAST_WIDTH, Base, Rates, of_records
from unfreeze.parallel.plan.sizes import Sizes, measure_sizes
from unfreeze.parallel.plan.terms import (
    LOAD_BUFFERS,
    MOMENT_BYTES,
    USABLE,
    Plan,
    Work,
    beside,
    plan,
    replanned,
)
from unfreeze.parallel.plan.words import KERNELS, plan_fields, plan_lines

__all__ = [
    "KERNELS",
    "LOAD_BUFFERS",
    "MOMENT_BYTES",
    "USABLE",
    "Plan",
    "PlannedModel",
    "Sizes",
    "Work",
    "measure_sizes",
    "model_of",
    "plan",
    "plan_fields",
    "plan_here",
    "plan_lines",
    "plan_run",
    "rates_here",
    "refuse_if_too_large",
    "replanned",
    "what_fits",
    "work_of",
]


@dataclass(frozen=True)
class PlannedModel:
    """The planned model, and the sizes its parts report, wherever they are placed.

    lora: None if every weight trains. dtype: compute dtype. device: its kind. meta: the model on meta.
    """

    shape: models.Shape
    lora: LoraConfig | None
    dtype: torch.dtype
    device: torch.device
    counts: Counts
    sizes: Sizes
    meta: models.Decoder


def model_of(
    shape: models.Shape, manifest: Manifest, lora: LoraConfig | None, dtype: torch.dtype, device: torch.device
) -> PlannedModel:
    """Build the model on meta and measure it; for Kimi-K2's size this takes a second."""
    as_stored = lora is not None and device.type == "cpu"
    model = models.meta_model(shape, manifest, dtype, as_stored=as_stored)
    sizes = replace(measure_sizes(model, lora, device.type), packing=packing_bytes(manifest))
    return PlannedModel(shape, lora, dtype, device, counts(model), sizes, model)


def plan_here(
    shape: models.Shape,
    manifest: Manifest,
    lora: LoraConfig | None,
    *,
    dtype: str,
    device: torch.device | str,
    layout: Layout = RESIDENT,
    **work: Any,
) -> Plan:
    """Return the plan of a run on this machine; `work` has fields of Work."""
    model = model_of(shape, manifest, lora, getattr(torch, dtype), torch.device(device))
    return plan_run(model, layout, work_of(model, **work), machines.hardware(device))


def plan_run(
    model: PlannedModel,
    layout: Layout,
    work: Work,
    machine: Hardware,
    among: Sequence[Recompute] = FASTEST_FIRST,
) -> Plan:
    """Return the plan of one of the run's processes; each has one device.

        layout   recompute "auto": the first of `among` that fits; buffer "auto": as few groups as fit
        machine  the process's share of it (Hardware.shared)

    Reads nothing and allocates nothing. Call `refuse_if_too_large` on the result.
    """
    if layout.sharing > 1:  # all processes must visit every layer equally often: in one chunk
        work = replace(work, chunk=None)
    sizes = of_one(model.sizes, model.counts, model.device.type, layout.sharing)
    whole = layout.but(
        recompute=among[-1] if layout.recompute == "auto" else layout.recompute,
        buffer=0.0 if layout.buffer == "auto" else layout.buffer,
    )
    result = plan(sizes, whole, work, machine)
    if layout.buffer == "auto":
        result = with_groups(result)
    if layout.recompute == "auto":
        result = fastest(result, among)
    return _timed(model, result)


def _timed(model: PlannedModel, planned: Plan) -> Plan:
    """Add the seconds of a micro-batch and an update, if this machine's rates are known."""
    work, machine = planned.work, planned.hardware
    length = round(work.mean_length or work.longest or work.tokens)
    rates = rates_here(
        model.shape,
        dtype=model.dtype,
        device=model.device,
        length=length,
        every_weight=model.lora is None,
        packed=model.counts.packed,
        optimizer_moments=work.optimizer_moments,
    )
    if rates is None:
        return planned
    kind = "cuda" if model.device.type == "cuda" else "cpu"
    here = Fleet(machine.name, 1, machine.available, kind=kind)
    own = rates_of_second(work.aside, model.dtype, model.device, length)
    request = PlanRequest(replace(work, micro_batches=1), work.tokens, length, second_rates=own)
    time = seconds_of(planned.sizes, model.counts, here, rates, planned.layout, request, work.tokens)
    return replace(planned, time=time, rates=rates.source)


def with_groups(current: Plan) -> Plan:
    """Return the plan with the largest buffers that fit, or with the smallest if none fits.

    Tries half of a layer's experts, a quarter, down to one. If they cannot be loaded in groups, the plan is
    unchanged.
    """
    sizes = current.sizes
    if sizes.come_whole or not sizes.of_expert:
        return current
    largest, candidate = max(sizes.of_expert, key=sum), current
    for parts in (2**power for power in range(1, sizes.num_experts.bit_length() + 1)):
        rows = -(-sizes.num_experts // parts)
        buffer = max(group_bytes(largest, rows, None))
        candidate = replanned(current, current.layout.but(buffer=buffer / GIB))
        if candidate.fits or rows == 1:
            break
    return candidate


def rates_here(
    shape: models.Shape,
    *,
    dtype: torch.dtype,
    device: torch.device,
    length: int,
    every_weight: bool,
    packed: bool,
    optimizer_moments: str = "float32",
    threads: int | None = None,
) -> Rates | None:
    """Return this machine's rates for a model, if its kernels were measured.

    None on a GPU, whose records are not read yet. None too for a model narrower than half of what was
    measured (a matrix of tiny-k2 reaches a fraction of the rate), and for int8 moments, which have no record.
    packed: True if experts are in 4 bits. threads: number to be used; None: torch's setting.
    """
    if device.type != "cpu" or optimizer_moments != "float32" or shape.hidden_size < LEAST_WIDTH:
        return None
    frozen: Base = "packed" if packed else "unpacked"
    return of_records(
        dtype,
        threads or torch.get_num_threads(),
        length=length,
        narrow=shape.mla is not None,
        vocab=shape.vocab_size,
        every_weight=every_weight,
        experts=("all weights" if every_weight else frozen) if shape.num_experts else None,
    )


def rates_of_second(
    aside: Aside | None, dtype: torch.dtype, device: torch.device, length: int
) -> Rates | None:
    """Return this machine's rates for a second model; None if unknown."""
    if aside is None or aside.counts is None or aside.shape is None:
        return None
    packed = aside.counts.packed
    return rates_here(
        aside.shape, dtype=dtype, device=device, length=length, every_weight=False, packed=packed
    )


def work_of(model: PlannedModel, *, tokens: int, aside: Aside | None = None, **fields: Any) -> Work:
    """Return the Work of a run; `fields` are further fields of it.

    For a GPU that is not here, the size of a logits block is taken from this machine's rule (a byte limit).
    """
    shape, lora, device = model.shape, model.lora, model.device
    known = device if device.type == "cpu" or torch.cuda.is_available() else torch.device("cpu")
    loss_rows, loss_bytes = block_cost(
        shape.vocab_size,
        model.dtype,
        known,
        trained=lora is None or model.sizes.whole.head,
        softcapped=shape.softcap is not None,
    )
    work = Work(
        tokens=tokens,
        rank=lora.rank if lora else None,
        experts_rank=lora.experts_rank if lora else None,
        loss_rows=loss_rows,
        loss_bytes=loss_bytes,
        chunk=chunk_tokens(shape.num_experts, shape.experts_per_token, device.type),
        **fields,
    )
    return work if aside is None else beside(work, aside)
