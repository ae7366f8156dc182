"""The plan as text, and as the JSON of plan.json and of the plan event."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from unfreeze.core.process import COMPILED_AT_MOST
from unfreeze.core.units import format_bytes, format_count, format_step, plural
from unfreeze.parallel.placement.residency import reads_of
from unfreeze.parallel.plan.grouped import units
from unfreeze.parallel.plan.terms import Plan

SOURCES = {"host": "host memory", "disk": "disk"}
KERNELS = f"up to {COMPILED_AT_MOST} for kernels compiled at run time"


def plan_lines(plan: Plan) -> list[str]:
    """Return the plan as text, one term per line."""
    device, layout, work = plan.hardware, plan.layout, plan.work
    terms = {name: size for name, size in plan.terms.items() if size}  # a dense model has no expert workspace
    width = max(map(len, terms))
    lines = [
        f"plan for {device.name}: {plural(device.cores, 'core')}, {format_bytes(device.total)},"
        f" {format_bytes(plan.usable)} usable now"
    ]

    # the terms, their sum, and what else the process uses
    lines += [f"  {name:<{width}}  {format_bytes(size):>10}" for name, size in terms.items()]
    lines.append(f"  {'total':<{width}}  {format_bytes(plan.total):>10}  of {format_bytes(plan.usable)}")
    if device.process:
        lines.append(f"  not in the total: this process {format_bytes(device.process)}, and {KERNELS}")
    lines.append(f"  1 device, largest / smallest {plan.max_over_min:.2f}; {work.tokens:,} tokens per pass")

    if layout.sharing > 1:
        held = f"{experts_held(plan)} of {plan.sizes.num_experts}"
        lines.append(
            f"  experts split over {layout.sharing} processes: each holds {held} per layer and all"
            " other weights; a layer processes all its tokens in one pass"
        )
    if layout.experts != "device":
        lines += _streamed(plan)
    if layout.rest == "peers":
        lines += _gathered(plan)
    if layout.boundary_leaves:
        lines += _boundary(plan)
    if layout.optimizer == "host":
        lines += _moments(plan)
    if layout.sharded:
        lines.append(f"  every weight, its gradient and moments are sharded over {work.processes} processes")
    if plan.why_layout:
        lines.append(f"  because {plan.why_layout}")
    if plan.why:
        lines.append(f"  recompute = {layout.recompute}: {plan.why}")

    # numbers outside the sum
    moments = plan.beside | {"loading": plan.load}
    lines += [f"  not at the peak: {name} {format_bytes(size)}" for name, size in moments.items()]
    if plan.avoided:
        lines.append(
            f"  packed weights stay packed: {format_bytes(plan.avoided)} of expanded weights avoided"
        )
    if plan.adapter_parameters:
        lines.append(f"  {format_count(plan.adapter_parameters)} adapter parameters")
    if plan.time is None:
        rate = "not measured"
    else:
        rate = f"{format_step(plan.time.step)}, most of it {plan.time.dominating}; rates {plan.rates}"
    lines.append(f"  time per pass: {rate}")
    rollout = plan.time.rollout if plan.time else None
    return [*lines, *([f"  {rollout.line()}"] if rollout else [])]


def _streamed(plan: Plan) -> list[str]:
    """Describe how often experts are loaded."""
    layers, total = plan.sizes.streamed, sum(plan.sizes.streamed)
    come = units(plan.sizes, plan.layout.buffer_bytes)
    first, later = (reads_of(len(come), first=begins) for begins in (True, False))
    what = f"{len(layers)} layers of {format_bytes(total // len(layers))} are loaded one after another"
    if groups := groups_of(plan):
        what += (
            f", each in {groups} groups of at most {format_bytes(max(come))}; a layer processes all its"
            " tokens in one pass"
        )
    return [
        f"  experts from {SOURCES[plan.layout.experts]}: {what}; {first} in the first micro-batch, {later} in"
        f" each later one ({format_bytes(later * total // len(come))})"
    ]


def _gathered(plan: Plan) -> list[str]:
    """Describe the layers' non-expert weights: the part kept here and the part gathered."""
    layers, total = plan.sizes.rest, sum(plan.sizes.rest)
    first, later = (reads_of(len(layers), first=begins) for begins in (True, False))
    n = plan.work.processes
    come = later * total // len(layers) * (n - 1) // n
    return [
        f"  other frozen weights of {len(layers)} layers, {format_bytes(total)}, sharded over {n} processes:"
        f" gathered on visit; {first} in the first micro-batch, {later} in each later one"
        f" ({format_bytes(come)} from the others)"
    ]


def _boundary(plan: Plan) -> list[str]:
    """Describe the layer inputs in host memory."""
    layers, work = plan.sizes.num_layers - 1, plan.work
    each = work.tokens * plan.sizes.stream_size * plan.sizes.compute_bytes
    return [
        f"  the inputs of {layers} layers are in host memory until backward, {format_bytes(layers * each)};"
        " two are on the device at once"
    ]


def _moments(plan: Plan) -> list[str]:
    """Describe the adapters' moments in host memory."""
    there = plan.terms["moments on their way"]
    return [
        f"  the adapters' moments are in host memory, {format_bytes(plan.host_moments)}; updates load them in"
        f" groups, {format_bytes(there)} on the device at once"
    ]


def groups_of(plan: Plan) -> int:
    """Return the number of groups in which most layers' experts are loaded; 0 if all at once."""
    layers, come = len(plan.sizes.streamed), len(units(plan.sizes, plan.layout.buffer_bytes))
    return -(-come // layers) if come > layers else 0


def experts_held(plan: Plan) -> int:
    """Return the number of a layer's experts on the fullest process."""
    return -(-plan.sizes.num_experts // plan.layout.sharing)


def all_parameters(plan: Plan) -> int:
    """Return adapter parameters of all processes that share the experts, counting each once."""
    work = plan.work
    if plan.layout.sharing == 1:
        return plan.adapter_parameters
    own = plan.sizes.experts_per_rank * (work.experts_rank or work.rank or 0)
    return plan.adapter_parameters - own + own * plan.sizes.num_experts // experts_held(plan)


def plan_fields(plan: Plan) -> dict[str, Any]:
    """Return plain JSON values: terms, total, usable, …, and the printed lines."""
    layout = plan.layout
    return {
        "terms": dict(plan.terms),
        "beside": dict(plan.beside),
        "total": plan.total,
        "load": plan.load,
        "usable": plan.usable,
        "per_device": plan.per_device,
        "max_over_min": plan.max_over_min,
        "expanded_avoided": plan.avoided,
        "adapter_parameters": plan.adapter_parameters,
        "seconds_per_pass": plan.time.step if plan.time else None,
        **({"rollout": plan.time.rollout.fields()} if plan.time and plan.time.rollout else {}),
        "rates": plan.rates,
        "fits": plan.fits,
        "recompute": layout.recompute,
        "experts": layout.experts,
        **({"buffer": layout.buffer_bytes, "groups": groups} if (groups := groups_of(plan)) else {}),
        **({"split": layout.sharing, "experts_held": experts_held(plan)} if layout.sharing > 1 else {}),
        **({"weights": layout.weights} if layout.sharded else {}),
        **({"rest": layout.rest} if layout.rest != "device" else {}),
        **({"boundary": layout.boundary} if layout.boundary_leaves else {}),
        **({"optimizer": layout.optimizer} if layout.optimizer != "device" else {}),
        **({"host": plan.host} if plan.host else {}),
        "hardware": {name: of for name, of in asdict(plan.hardware).items() if name != "unbound"},
        "lines": plan_lines(plan),
    }
