"""The plan: bytes of a training run, term by term, before anything is loaded.

Pure arithmetic; it never changes the config.

    plan_training(shape, manifest, lora, tokens=…, …)  ->  Plan   (asks the model's blocks and the machine)
    plan(sizes, work, hardware)                        ->  Plan   (numbers only; terms.py)

sizes.py    what the plan knows of a model: its blocks say what they need (models/blocks/bytes.py), this adds
terms.py    Work -> bytes per term
grouped.py  what of them experts in groups change
propose.py  what would fit, where the run does not
words.py    the plan for people and for plan.json
rates.py    how fast a device works, by its makers' facts or by records; seconds.py: of a step
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch

from unfreeze import models
from unfreeze.checkpoint.manifest import Manifest
from unfreeze.config.lora import LoraConfig
from unfreeze.kernels.linear_cross_entropy import block_cost
from unfreeze.models.chunks import chunk_tokens
from unfreeze.models.recompute import Recompute
from unfreeze.parallel.fleet import Fleet
from unfreeze.parallel.machine import hardware
from unfreeze.parallel.plan.aside import Aside
from unfreeze.parallel.plan.choose import Asked, seconds_of
from unfreeze.parallel.plan.counts import Counts, counts
from unfreeze.parallel.plan.fastest import FASTEST_FIRST, fastest
from unfreeze.parallel.plan.layout import Layout, of_one
from unfreeze.parallel.plan.propose import refuse_if_too_large, what_fits
from unfreeze.parallel.plan.rates import LEAST_WIDTH, Base, Rates, of_records
from unfreeze.parallel.plan.sizes import Sizes, measure
from unfreeze.parallel.plan.terms import (
    LOAD_BUFFERS,
    MOMENT_BYTES,
    USABLE,
    Plan,
    Work,
    beside,
    plan,
    replace_work,
)
from unfreeze.parallel.plan.words import KERNELS, plan_fields, plan_lines
from unfreeze.parallel.units import group_bytes

__all__ = [
    "KERNELS",
    "LOAD_BUFFERS",
    "MOMENT_BYTES",
    "USABLE",
    "Measured",
    "Plan",
    "Sizes",
    "Work",
    "measure",
    "measured_of",
    "plan",
    "plan_fields",
    "plan_lines",
    "plan_training",
    "rates_here",
    "refuse_if_too_large",
    "replace_work",
    "what_fits",
    "work_of",
]


class Measured(NamedTuple):
    """What a model says of itself, the same wherever its parts lie."""

    counts: Counts
    sizes: Sizes


def measured_of(
    shape: models.Shape, manifest: Manifest, lora: LoraConfig | None, dtype: torch.dtype, device: torch.device
) -> Measured:
    """Of a model on meta; of Kimi-K2's size it takes a second."""
    as_stored = lora is not None and device.type == "cpu"
    model = models.meta_model(shape, manifest, dtype, as_stored=as_stored)
    return Measured(counts(model), measure(model, lora, device.type))


def plan_training(
    shape: models.Shape,
    manifest: Manifest,
    lora: LoraConfig | None,
    *,
    tokens: int,
    dtype: str,
    device: torch.device | str,
    recompute: Recompute | Literal["auto"] = "layers",
    among: Sequence[Recompute] = FASTEST_FIRST,
    keep_layers: int | None = None,
    optimizer_moments: Literal["float32", "int8"] = "float32",
    micro_batches: int = 1,
    longest: int | None = None,
    mean_length: float | None = None,
    receipt_bytes: int = 0,
    processes: int = 1,
    sharing: int = 1,
    experts: Literal["device", "host", "disk"] = "device",
    buffer: int | Literal["auto"] | None = None,
    split: int = 1,
    weights: Literal["device", "sharded"] = "device",
    rest: Literal["device", "peers"] = "device",
    boundary: Literal["device", "host"] = "device",
    optimizer: Literal["device", "host"] = "device",
    measured: Measured | None = None,
    aside: Aside | None = None,
) -> Plan:
    """The plan of a training run on one device.

    tokens         of one of `micro_batches`, in documents of at most `longest`
    lora           None: every weight trains
    dtype          "bfloat16" or "float32"
    mean_length    tokens of the document that a token is in, on average: attention's; None: `longest`
    micro_batches  with adapters it changes no byte, only what is proposed where the run does not fit
                   (--tokens-per-step is of all of them)
    processes      among which the micro-batches are dealt; the plan is of one of them
    experts        where the weights of routed experts lie
    buffer         bytes of one of the two buffers that they come into; "auto": as many as fit, so that a
                   layer's experts come in as few groups as that takes; None: a layer's
    split          processes that share one set of experts; the plan is of one of them
    weights        whether each process holds all of what trains, or 1/processes ("sharded")
    rest           whether each process holds all of the other frozen weights, or a part of each layer's
    boundary       where the inputs of recomputed layers lie until backward
    optimizer      where the adapters' moments lie between updates
    aside          a second model, which the loss reads
    sharing        processes of one host: of its memory each has as much
    measured       what `measured_of` says of the model, where it was asked before
    recompute      "auto": the first of `among` that fits (fastest.py)

    Reads nothing but the manifest and allocates nothing. Call `refuse_if_too_large` on the result.
    """
    kind = {"bfloat16": torch.bfloat16, "float32": torch.float32}[dtype]
    place = torch.device(device)
    counted, measured_sizes = measured or measured_of(shape, manifest, lora, kind, place)
    work = work_of(
        shape,
        lora,
        tokens=tokens,
        dtype=kind,
        device=place,
        recompute=among[-1] if recompute == "auto" else recompute,
        keep_layers=keep_layers,
        optimizer_moments=optimizer_moments,
        micro_batches=micro_batches,
        longest=longest,
        receipt_bytes=receipt_bytes,
        processes=processes,
        experts=experts,
        buffer=None if buffer == "auto" else buffer,
        split=split,
        weights=weights,
        rest=rest,
        boundary=boundary,
        optimizer=optimizer,
    )
    if aside is not None:
        work = beside(work, aside)
    sizes = of_one(measured_sizes, counted, place.type, split)
    machine = hardware(place).shared(sharing)
    made = plan(sizes, work, machine)
    if buffer == "auto":
        made = with_groups(made)
    if recompute == "auto":
        made = fastest(made, among)
    length = round(mean_length or longest or tokens)
    rates = rates_here(
        shape,
        dtype=kind,
        device=place,
        length=length,
        every_weight=lora is None,
        packed=counted.packed,
        optimizer_moments=optimizer_moments,
    )
    if rates is None:
        return made
    here = Fleet(machine.name, 1, machine.available, kind="cuda" if place.type == "cuda" else "cpu")
    own = rates_of_second(aside, kind, place, length)
    asked = Asked(replace(made.work, micro_batches=1), tokens, length, second_rates=own)
    groups = made.work.buffer is not None
    layout = Layout(experts, split=split, recompute=made.work.recompute, groups=groups)
    time = seconds_of(sizes, counted, here, rates, layout, asked, tokens)
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
        found = replace_work(made, buffer=max(group_bytes(largest, rows, None)))
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


def work_of(
    shape: models.Shape,
    lora: LoraConfig | None,
    *,
    tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    **asked: Any,
) -> Work:
    """Give the Work of a run; `asked` are further fields of it.

    A GPU that is not here is taken to have this machine's block of logits, whose rows are bounded by bytes.
    """
    split = asked.get("split", 1) > 1  # all processes visit every layer equally often: in one chunk
    known = device if device.type == "cpu" or torch.cuda.is_available() else torch.device("cpu")
    loss_rows, loss_bytes = block_cost(
        shape.vocab_size, dtype, known, trained=lora is None, softcapped=shape.softcap is not None
    )
    return Work(
        tokens=tokens,
        rank=lora.rank if lora else None,
        experts_rank=lora.experts_rank if lora else None,
        loss_rows=loss_rows,
        loss_bytes=loss_bytes,
        chunk=None if split else chunk_tokens(shape.num_experts, shape.experts_per_token, device.type),
        **asked,
    )
