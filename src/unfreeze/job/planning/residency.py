"""Runs whose weights are not all on the device: report transfers, refuse samples and on-policy answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from unfreeze.core.errors import ConfigError
from unfreeze.core.layout import Layout
from unfreeze.core.units import format_bytes
from unfreeze.job.watch.samples import ANSWER, Prompt

if TYPE_CHECKING:
    import torch

    from unfreeze.config.training import TrainingConfig
    from unfreeze.models import Decoder
    from unfreeze.parallel.placement.residency import Streamed
    from unfreeze.parallel.plan import Plan
    from unfreeze.parallel.processes.collectives import Group
    from unfreeze.parallel.processes.mesh import HeldPart
    from unfreeze.train.fit import OnStep
    from unfreeze.train.optim import AdamW
    from unfreeze.train.qk_clip import QkClip
    from unfreeze.train.run import Run
    from unfreeze.train.state import State
    from unfreeze.train.step import Objective, StepResult


def transfers_of(model: Decoder) -> list[OnStep]:
    """Hooks that report each step's transfers, one per source; none if every weight is on the device."""
    from unfreeze.parallel.placement.residency import streams_of

    return [TransferEvents(residency) for residency in streams_of(model.residency)]


def keep_boundary(model: Decoder, layout: Layout, device: torch.device) -> None:
    """Offload layer inputs to host memory until backward, if the plan says so."""
    if layout.boundary_leaves:
        from unfreeze.parallel.placement.boundary import BoundaryInHost
        from unfreeze.parallel.processes.lanes import lane_of

        model.boundary = BoundaryInHost(model.layers, lane_of(device))


def optimizer_of(
    model: Decoder,
    config: TrainingConfig,
    layout: Layout,
    device: torch.device,
    held: Callable[[str], HeldPart] | None,
    group: Group,
) -> AdamW:
    """Create the optimizer of the trained parameters, with its moments where the plan puts them.

    held: see AdamW. group: all processes of the run.
    """
    from unfreeze.parallel.processes.lanes import lane_of
    from unfreeze.train.host_state import InHost
    from unfreeze.train.optim import AdamW

    if config.optimizer.kind == "muon":
        return muon_of(model, config, held, group)
    place = InHost(device, lane_of(device), lane_of(device)) if layout.optimizer == "host" else None
    more: dict[str, Any] = {
        "weight_decay": config.optimizer.weight_decay,
        "moments": config.optimizer.moments,
    }
    return AdamW(model, **more, held=held, place=place)


def muon_of(
    model: Decoder, config: TrainingConfig, held: Callable[[str], HeldPart] | None, group: Group
) -> AdamW:
    """Create Muon for the matrices of hidden layers, with AdamW for the other weights."""
    from unfreeze.models.matrices import hidden_matrices
    from unfreeze.train.muon import Muon
    from unfreeze.train.orthogonal import MuonRule

    return Muon(
        model,
        hidden_matrices(model),
        rule=MuonRule(config.muon.momentum, config.muon.update_scale, config.muon.adamw_rate),
        weight_decay=config.optimizer.weight_decay,
        moments=config.optimizer.moments,
        held=held,
        group=group,
    )


def clips_of(
    model: Decoder, config: TrainingConfig, optimizer: AdamW, objective: Objective, group: Group
) -> list[QkClip]:
    """Return what scales heads back after an update, if muon.qk_clip is set."""
    from unfreeze.train.qk_clip import LargestLogits, QkClip

    if not isinstance(objective, LargestLogits):
        return []
    return [QkClip(model, optimizer, objective, config.muon.qk_clip, group)]


class TransferEvents:
    """Hook that emits a "stream" event after each step."""

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
    """Raise ConfigError if every generated token would transfer every layer again."""
    layout = plan.layout
    if layout.experts != "device" or layout.rest != "device":
        what = (
            f"experts come from {layout.experts}" if layout.experts != "device" else "layers come from peers"
        )
        raise ConfigError(
            f"the model must generate answers while it trains, but {what}: each token would transfer"
            " every layer",
            next="--place.experts device, --place.rest device, or train without the model's own answers",
        )


def refuse_samples(run: Run, plan: Plan, count: int, own: Sequence[Prompt], *, held_out: bool) -> None:
    """Warn once that no samples are generated, with the arithmetic: each token would transfer every layer."""
    settings = [f"samples = {count}"] * (count > 0) + [f"{len(own)} prompts"] * bool(own)
    if not settings or run.step:
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
        f"no samples are generated ({', '.join(settings)}): {what}, so each token of an answer {verb} all"
        f" {format_bytes(each)} of them, and an answer of {ANSWER} tokens {format_bytes(ANSWER * each)};"
        f" {instead}"
    )
    run.events.emit("warning", 0, message=message)
