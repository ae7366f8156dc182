"""A run whose weights do not all lie on the device: what it says of transfers, and what it does not do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from unfreeze.core.errors import ConfigError
from unfreeze.core.layout import Layout
from unfreeze.core.units import format_bytes
from unfreeze.job.watch.samples import ANSWER, Prompt

if TYPE_CHECKING:
    import torch

    from unfreeze.config.tables import Optimizer
    from unfreeze.models import Decoder
    from unfreeze.parallel.placement.residency import Streamed
    from unfreeze.parallel.plan import Plan
    from unfreeze.parallel.processes.mesh import HeldPart
    from unfreeze.train.fit import OnStep
    from unfreeze.train.optim import AdamW
    from unfreeze.train.run import Run
    from unfreeze.train.state import State
    from unfreeze.train.step import StepResult


def transfers_of(model: Decoder) -> list[OnStep]:
    """The hooks that tell what came in a step, one for each source; none where every weight is here."""
    from unfreeze.parallel.placement.residency import streams_of

    return [TransfersSaid(residency) for residency in streams_of(model.residency)]


def keep_boundary(model: Decoder, layout: Layout, device: torch.device) -> None:
    """The inputs of layers go to host memory until backward, where the plan says so."""
    if layout.boundary_leaves:
        from unfreeze.parallel.placement.boundary import BoundaryInHost
        from unfreeze.parallel.processes.lanes import lane_of

        model.boundary = BoundaryInHost(model.layers, lane_of(device))


def optimizer_of(
    model: Decoder,
    config: Optimizer,
    layout: Layout,
    device: torch.device,
    held: Callable[[str], HeldPart] | None,
) -> AdamW:
    """AdamW of what trains; its moments lie where the plan says. held: as AdamW's."""
    from unfreeze.parallel.processes.lanes import lane_of
    from unfreeze.train.host_state import InHost
    from unfreeze.train.optim import AdamW

    place = InHost(device, lane_of(device), lane_of(device)) if layout.optimizer == "host" else None
    more: dict[str, Any] = {"weight_decay": config.weight_decay, "moments": config.moments}
    return AdamW(model, **more, held=held, place=place)


class TransfersSaid:
    """A "stream" event after each step."""

    def __init__(self, residency: Streamed):
        self._residency = residency

    def __call__(self, state: State, result: StepResult) -> None:
        came = self._residency.take()
        state.run.events.emit(
            "stream",
            state.step,
            source=self._residency.source.name,
            reads=came.reads,
            bytes=came.bytes,
            seconds=came.seconds,
            waited=came.waited,
            hidden=came.hidden,
        )


def refuse_answers(plan: Plan) -> None:
    """Raise ConfigError where each token that the model answers in training would need every layer anew."""
    layout = plan.layout
    if layout.experts != "device" or layout.rest != "device":
        what = (
            f"experts come from {layout.experts}" if layout.experts != "device" else "layers come from peers"
        )
        raise ConfigError(
            f"the model is to answer while it trains, and {what}: each token would need every layer anew",
            next="--place.experts device, --place.rest device, or without the model's own answers",
        )


def refuse_samples(run: Run, plan: Plan, count: int, own: Sequence[Prompt], *, held_out: bool) -> None:
    """Say once that no samples are taken, with the arithmetic: each token of an answer needs every layer."""
    asked = [f"samples = {count}"] * (count > 0) + [f"{len(own)} prompts"] * bool(own)
    if not asked or run.step:
        return
    n, sizes, where = plan.work.processes, plan.sizes, plan.layout.experts
    experts = where != "device"
    each = sum(sizes.streamed) if experts else sum(sizes.rest) * (n - 1) // n
    what = f"experts come from {where}" if experts else "layers are gathered from peers"
    verb = "reads" if experts else "gathers"
    instead = (
        "the held-out loss is measured instead"
        if held_out
        else "give validation_fraction = 0.05 for a held-out loss instead"
    )
    message = (
        f"no samples are taken ({', '.join(asked)}): {what}, and each token of an answer {verb} all"
        f" {format_bytes(each)} of them, an answer of {ANSWER} tokens {format_bytes(ANSWER * each)};"
        f" {instead}"
    )
    run.events.emit("warning", 0, message=message)
