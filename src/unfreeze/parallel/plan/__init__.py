"""The plan: bytes of a training run, term by term, before anything is loaded.

Pure arithmetic; it never changes the config.

    plan(sizes, layout, work, machine)      ->  Plan   numbers only (terms.py)
    plan_run(model, layout, work, machine)  ->  Plan   with what the layout leaves open chosen, and seconds

sizes.py    what the plan knows of a model: its blocks say what they need (models/blocks/bytes.py), this adds
layouts.py  a wish -> the layouts that there can be, fastest first (core/layout.py)
terms.py    Layout, Work -> bytes per term
grouped.py  what of them experts in groups change
places.py   the same for machines that are not here; choose.py: the best layout of one
propose.py  what would fit, where the run does not
words.py    the plan for people and for plan.json
rates.py    how fast a device works, by its makers' facts or by records; seconds.py: of a step
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from unfreeze import models
from unfreeze.checkpoint.manifest import Manifest
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
    """What is planned, and what its parts say of themselves: the same wherever they lie.

    lora: None where every weight trains. dtype: of the computation. device: of which kind. meta: on meta.
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
    """Built on meta and asked; of Kimi-K2's size it takes a second."""
    as_stored = lora is not None and device.type == "cpu"
    model = models.meta_model(shape, manifest, dtype, as_stored=as_stored)
    return PlannedModel(
        shape, lora, dtype, device, counts(model), measure_sizes(model, lora, device.type), model
    )


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
    """The plan of a run on this machine; `work` has fields of Work."""
    model = model_of(shape, manifest, lora, getattr(torch, dtype), torch.device(device))
    return plan_run(model, layout, work_of(model, **work), machines.hardware(device))


def plan_run(
    model: PlannedModel,
    layout: Layout,
    work: Work,
    machine: Hardware,
    among: Sequence[Recompute] = FASTEST_FIRST,
) -> Plan:
    """The plan of one of the run's processes, each of which has one device.

    layout  recompute "auto": the first of `among` that fits; buffer "auto": in as few groups as fit
    machine  what the process has of it (Hardware.shared)

    Reads nothing and allocates nothing. Call `refuse_if_too_large` on the result.
    """
    if layout.sharing > 1:  # all processes visit every layer equally often: in one chunk
        work = replace(work, chunk=None)
    sizes = of_one(model.sizes, model.counts, model.device.type, layout.sharing)
    whole = layout.but(
        recompute=among[-1] if layout.recompute == "auto" else layout.recompute,
        buffer=0.0 if layout.buffer == "auto" else layout.buffer,
    )
    made = plan(sizes, whole, work, machine)
    if layout.buffer == "auto":
        made = with_groups(made)
    if layout.recompute == "auto":
        made = fastest(made, among)
    return _timed(model, made)


def _timed(model: PlannedModel, made: Plan) -> Plan:
    """The plan with the seconds of a micro-batch and an update, where this machine's rates are known."""
    work, machine = made.work, made.hardware
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
        return made
    kind = "cuda" if model.device.type == "cuda" else "cpu"
    here = Fleet(machine.name, 1, machine.available, kind=kind)
    own = rates_of_second(work.aside, model.dtype, model.device, length)
    asked = PlanRequest(replace(work, micro_batches=1), work.tokens, length, second_rates=own)
    time = seconds_of(made.sizes, model.counts, here, rates, made.layout, asked, work.tokens)
    return replace(made, time=time, rates=rates.source)


def with_groups(made: Plan) -> Plan:
    """The plan with the largest buffers that fit; with the smallest where none does.

    Half of a layer's experts, a quarter, down to one. Where they cannot come in groups, the plan as it is.
    """
    sizes = made.sizes
    if sizes.come_whole or not sizes.of_expert:
        return made
    largest, found = max(sizes.of_expert, key=sum), made
    for parts in (2**power for power in range(1, sizes.num_experts.bit_length() + 1)):
        rows = -(-sizes.num_experts // parts)
        buffer = max(group_bytes(largest, rows, None))
        found = replanned(made, made.layout.but(buffer=buffer / GIB))
        if found.fits or rows == 1:
            break
    return found


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
    """The rates of this machine for a model, where its kernels were measured.

    None on a GPU: its records are not read yet. None too for a model narrower than half of what was measured
    (a matrix of tiny-k2 reaches a fraction of the rate), and for int8 moments, which have no record.
    packed: whether experts are in 4 bits. threads: that will be used; None: torch's setting.
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
    """The rates of this machine for a model that is asked; None where they are not known."""
    if aside is None or aside.counts is None or aside.shape is None:
        return None
    packed = aside.counts.packed
    return rates_here(
        aside.shape, dtype=dtype, device=device, length=length, every_weight=False, packed=packed
    )


def work_of(model: PlannedModel, *, tokens: int, aside: Aside | None = None, **asked: Any) -> Work:
    """The Work of a run; `asked` are further fields of it.

    A GPU that is not here is taken to have this machine's block of logits, whose rows are bounded by bytes.
    """
    shape, lora, device = model.shape, model.lora, model.device
    known = device if device.type == "cpu" or torch.cuda.is_available() else torch.device("cpu")
    loss_rows, loss_bytes = block_cost(
        shape.vocab_size, model.dtype, known, trained=lora is None, softcapped=shape.softcap is not None
    )
    work = Work(
        tokens=tokens,
        rank=lora.rank if lora else None,
        experts_rank=lora.experts_rank if lora else None,
        loss_rows=loss_rows,
        loss_bytes=loss_bytes,
        chunk=chunk_tokens(shape.num_experts, shape.experts_per_token, device.type),
        **asked,
    )
    return work if aside is None else beside(work, aside)
