"""One optimizer step over one or more micro-batches.

loss = sum_m loss_m / sum_m count_m: sums of losses, divided once by the supervised tokens of all of them.
The count is added up on the host before the first backward, so each micro-batch's gradient already has its
share. Gradient accumulation gives the same gradient for any split of the same tokens (docs/why/trust.md N3),
and a micro-batch without supervised tokens adds 0 (N2).
Processes divide the micro-batches of a step among them. Each knows all of them, so the count needs no
exchange.
On CUDA the host runs ahead of the device. It reads from the device once per step, when all backward work is
queued: loss, counts, norm and expert loads; with several processes also which parameters had a gradient, if a
process was asked to stop, and if a save is due.
"""

# torch's tolist, vector_norm, backward and hooks are untyped:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from unfreeze.core.batch import Batch, Loss
from unfreeze.core.errors import ConfigError, DataError
from unfreeze.core.taps import taps_of
from unfreeze.core.torchrun import nearest_multiples
from unfreeze.models import Decoder
from unfreeze.models.blocks.taps import Taps
from unfreeze.models.recompute import RecomputePolicy
from unfreeze.parallel.processes.collectives import ALONE, Group
from unfreeze.train.ahead import clear_expert_load, look_ahead
from unfreeze.train.memory import peak_bytes
from unfreeze.train.optim import AdamW, NonFinite

Objective = Callable[[Tensor, nn.Module, Batch], Loss]
"""(hidden_TD, lm_head, batch) -> Loss, for example objectives.cross_entropy.

An objective with a field `taps` (core/taps.py) gets a fourth argument: Tap -> tensor. One with a method
`begin` is asked before a step's first forward pass (ahead.py)."""


@dataclass(frozen=True)
class Verdict:
    """A Judge's decision on a step before its update. warning: for the step's event ("": none)."""

    apply: bool = True
    warning: str = ""


Judge = Callable[[Sequence[Batch], float, float], Verdict]
"""(micro-batches of the step, loss, gradient norm) -> Verdict; an exception stops the run. See
train/guards.py."""


def accept(micro_batches: Sequence[Batch], loss: float, grad_norm: float) -> Verdict:
    """Accept every finite step (the default Judge)."""
    return Verdict()


@dataclass(frozen=True)
class StepResult:
    """Results of one optimizer step, over all micro-batches of all processes.

    loss, metrics      sums divided by the one global count
    supervised_tokens  positions of weight > 0
    learning_rate      read back from the optimizer (0: no update)
    grad_norm          before clipping
    clip_scale         factor applied to the gradients
    expert_load        MoE layer -> tokens each expert got in this step's forward passes
    replayed           MoE layer -> choices of experts given to it, those of them that its router would not
                       have made, those not given; empty if none was given
    peak_bytes         memory of the fullest process until the step's one read (train/memory.py)
    applied, warning   the judge's decision and message
    stop               True if a process was asked to end the run before the step's one read
    save               True if a process reported then that a save is due
    """

    loss: float
    metrics: dict[str, float]
    tokens: int
    supervised_tokens: int
    learning_rate: float
    grad_norm: float
    clip_scale: float
    expert_load: dict[int, list[int]] = field(repr=False)
    replayed: dict[int, list[int]] = field(default_factory=dict[int, list[int]], repr=False)
    peak_bytes: int = 0
    applied: bool = True
    warning: str = ""
    stop: bool = False
    save: bool = False


@dataclass(frozen=True)
class Gradients:
    """Results of forward_backward. The optimizer has the gradients, summed over all processes.

    loss, metrics  sums over all micro-batches divided by the one global count
    norm           of all gradients as one vector, before clipping
    replayed, peak_bytes, stop, save   as in StepResult
    """

    micro_batches: Sequence[Batch] = field(repr=False)  # keeps the repr short in notebooks
    loss: float
    metrics: dict[str, float]
    norm: float
    expert_load: dict[int, list[int]] = field(repr=False)
    replayed: dict[int, list[int]] = field(default_factory=dict[int, list[int]], repr=False)
    peak_bytes: int = 0
    stop: bool = False
    save: bool = False


def train_step(
    model: Decoder,
    optimizer: AdamW,
    micro_batches: Sequence[Batch],
    objective: Objective,
    *,
    learning_rate: float,
    max_norm: float,
    recompute: RecomputePolicy,
    group: Group = ALONE,
    judge: Judge = accept,
    stop: Callable[[], bool] = bool,
    save: Callable[[], bool] = bool,
) -> StepResult:
    """forward_backward, then optim_step.

    w -= AdamW(g), g = grad of sum_m loss_m / max(sum_m count_m, 1), clipped to max_norm.
    """
    gradients = forward_backward(
        model, optimizer, micro_batches, objective, recompute=recompute, group=group, stop=stop, save=save
    )
    return optim_step(optimizer, gradients, learning_rate=learning_rate, max_norm=max_norm, judge=judge)


def forward_backward(
    model: Decoder,
    optimizer: AdamW,
    micro_batches: Sequence[Batch],
    objective: Objective,
    *,
    recompute: RecomputePolicy,
    group: Group = ALONE,
    stop: Callable[[], bool] = bool,
    save: Callable[[], bool] = bool,
) -> Gradients:
    """Compute the gradient of sum_m loss_m / max(sum_m count_m, 1). Earlier gradients are dropped.

    No weight changes.
    micro_batches: on the host, all of the step on every process. The result is the same on every process.
    stop: returns True if this process was asked to end the run; called once, just before the read.
    save: returns True if this process finds that a save is due; called then too. One such process suffices.

    Raises NonFinite if the loss, a hidden state (supervised or not, docs/why/trust.md N1) or a gradient is
    not finite, ConfigError if the number of micro-batches is no multiple of the processes, DataError if the
    processes read different data, ValueError if the objective counts other tokens than the batches' weights.
    """
    if len(micro_batches) % group.size:
        near = nearest_multiples(len(micro_batches), group.size)
        raise ConfigError(
            f"{group.size} processes share {len(micro_batches)} micro-batches of a step, not a multiple"
            f" of {group.size}: some would make more passes than others",
            next=" or ".join(f"--micro-batches {count}" for count in near),
        )
    # the divisor, known before the first backward; and a checksum of the data, equal on every process
    count = sum(batch.count for batch in micro_batches)
    divisor = max(count, 1.0)
    optimizer.zero_grad()
    look_ahead(model, objective, micro_batches, recompute, group)
    clear_expert_load(model)  # evaluations since the last step must not count (docs/why/trust.md M2)
    tokens_read = float(sum(int(batch.tokens_T.sum()) for batch in micro_batches))
    own: dict[str, float | Tensor] = dict.fromkeys(("loss", "counted", "not finite"), 0.0)
    own["tokens read"] = tokens_read
    largest: dict[str, Tensor] = {}

    # this process's micro-batches: each loss is divided by the global count, so gradients simply add up
    for host_batch in group.share(micro_batches):
        batch = host_batch.to(model.device)
        hidden_TD, *tapped = forward(model, batch, objective, recompute)
        not_finite = _rows_not_finite(hidden_TD)
        loss = objective(hidden_TD, model.lm_head, batch, *tapped)
        del hidden_TD, tapped  # backward no longer needs them, and each is as large as a layer's input
        (loss.sum / divisor).backward()
        optimizer.collect()
        new = {"loss": loss.sum.detach(), "counted": loss.count, "not finite": not_finite}
        if loss.metric_count is not None:
            new["metrics counted"] = loss.metric_count
        for name, value in (new | {f"metric {name}": value for name, value in loss.metrics.items()}).items():
            own[name] = own.get(name, 0.0) + (value.double() if isinstance(value, Tensor) else value)
        for name, value in loss.largest.items():
            largest[name] = value if name not in largest else torch.maximum(largest[name], value)
        del loss, new  # these keep saved activations alive until the next micro-batch has its own

    # all processes: sum gradients, then the one read, then check the step
    reached = optimizer.sum_gradients(group)
    own["stop"], own["save"] = float(stop()), float(save())
    here = peak_bytes(model.device)
    own |= _in_own_place({"peak": float(here), **largest}, group)
    norm_of_all, own["square of the rest"] = optimizer.grad_norms(group)
    sums, counts, norm, per_layer = _read(model, own, reached, norm_of_all, group)
    norm = math.hypot(norm, math.sqrt(sums["square of the rest"]))
    optimizer.keep_reached(counts)
    if sums["tokens read"] != group.size * tokens_read:
        raise DataError(
            "the processes read different data at this step",
            next="give every process the same files and the same flags",
        )
    if not math.isfinite(sums["loss"]):
        raise NonFinite(f"the loss is {sums['loss'] / divisor} over {count:.0f} supervised tokens")
    if sums["not finite"]:
        raise NonFinite(
            f"the loss is finite, {sums['loss'] / divisor:.4g}, but {sums['not finite']:.0f} hidden states"
            " are not"
        )
    if abs(sums["counted"] - count) > 1e-5 * divisor:
        raise ValueError(
            f"the objective counted {sums['counted']} supervised tokens, the batches' weights say {count}"
        )
    optimizer.refuse_non_finite(norm)
    metrics = {
        name.removeprefix("metric "): value / max(sums.get("metrics counted", divisor), 1.0)
        for name, value in sums.items()
        if name.startswith("metric ")
    }
    metrics |= {name: _largest(name, sums, group) for name in largest}
    requested: dict[str, Any] = {name: sums[name] > 0 for name in ("stop", "save")}
    requested["peak_bytes"] = int(_largest("peak", sums, group))
    return Gradients(micro_batches, sums["loss"] / divisor, metrics, norm, *per_layer, **requested)


def _in_own_place(numbers: dict[str, float | Tensor], group: Group) -> dict[str, float | Tensor]:
    """Return a number per process, 0 for the others: sums over processes are then the numbers of all."""
    return {
        f"{rank} has {name}": value if rank == group.rank else 0.0
        for name, value in numbers.items()
        for rank in range(group.size)
    }


def _largest(name: str, sums: dict[str, float], group: Group) -> float:
    """Return the largest of the numbers that _in_own_place spread."""
    return max(sums[f"{rank} has {name}"] for rank in range(group.size))


def forward(
    model: Decoder, batch: Batch, objective: Objective, recompute: RecomputePolicy
) -> tuple[Any, ...]:
    """Return (hidden_TD,), or (hidden_TD, Tap -> tensor) for an objective with taps."""
    wanted = taps_of(objective)
    if not wanted:
        return (model.hidden(batch, recompute=recompute),)
    taps = Taps(wanted)
    return model.hidden(batch, recompute=recompute, taps=taps), taps.found


def loss_of(model: Decoder, batch: Batch, objective: Objective, recompute: RecomputePolicy) -> Loss:
    """Return the objective of a batch that is on the model's device."""
    hidden_TD, *tapped = forward(model, batch, objective, recompute)
    return objective(hidden_TD, model.lm_head, batch, *tapped)


def optim_step(
    optimizer: AdamW, gradients: Gradients, *, learning_rate: float, max_norm: float, judge: Judge = accept
) -> StepResult:
    """Clip to max_norm (0: don't) and update, unless the judge refuses.

    If the judge raises, no weight has changed.
    """
    verdict = judge(gradients.micro_batches, gradients.loss, gradients.norm)
    update = optimizer.update(learning_rate, max_norm, gradients.norm) if verdict.apply else None
    return StepResult(
        loss=gradients.loss,
        metrics=gradients.metrics,
        tokens=sum(batch.num_tokens for batch in gradients.micro_batches),
        supervised_tokens=sum(int(batch.weights_T.gt(0).sum()) for batch in gradients.micro_batches),
        learning_rate=optimizer.learning_rate if update else 0.0,
        grad_norm=gradients.norm,
        clip_scale=update.clip_scale if update else 1.0,
        expert_load=gradients.expert_load,
        replayed=gradients.replayed,
        peak_bytes=gradients.peak_bytes,
        applied=verdict.apply,
        warning=verdict.warning,
        stop=gradients.stop,
        save=gradients.save,
    )


def _rows_not_finite(hidden_TD: Tensor) -> Tensor:
    """Count positions with a NaN or infinity in their hidden state, including unsupervised ones.

    Checks the largest magnitude of each row, which is NaN if one value is. Checking every value would
    allocate tensors as large as the hidden state.
    """
    largest_T: Tensor = torch.linalg.vector_norm(hidden_TD.detach(), ord=math.inf, dim=-1)
    return (~largest_T.isfinite()).sum()


def _read(
    model: Decoder, sums: dict[str, float | Tensor], reached: Sequence[bool], norm: Tensor, group: Group
) -> tuple[dict[str, float], list[float], float, tuple[dict[int, list[int]], dict[int, list[int]]]]:
    """Read (sums, processes that reached each parameter, gradient norm, expert loads and replays).

    All are numbers on the host.

    sums, reached, loads: over all processes, in one exchange. The gradients behind the norm are summed
    already.
    This is the one place of a step where the host waits for the device. All numbers are in one float64 tensor
    (exact for counts below 2^53), because a read costs a round trip to the device, whatever its size.
    """

    def double(value: float | Tensor) -> Tensor:
        if isinstance(value, Tensor):
            return value.to(dtype=torch.float64, device=model.device)
        return torch.full((), value, dtype=torch.float64, device=model.device)

    # one exchange: the sums, which parameters had a gradient, each layer's counts
    loads = {layer: moe.counts_E for layer, moe in model.moe_layers().items()}
    total = torch.stack([value if isinstance(value, Tensor) else double(value) for value in sums.values()])
    replays = {layer: moe.replayed_3 for layer, moe in model.moe_layers().items()}
    counters = [*loads.values(), *replays.values()]
    parts = [total, *(counter.double() for counter in counters)]
    if reached:
        flags = torch.tensor(reached, dtype=torch.float64)
        parts.append(flags.to(model.device, non_blocking=True))
    exchanged = torch.cat(parts)
    group.sum_([exchanged])

    # one read: these and the norm
    numbers = iter(_numbers(torch.cat([exchanged, double(norm).view(1)])))
    summed = dict(zip(sums, islice(numbers, len(sums)), strict=True))

    def read(counters: dict[int, Tensor]) -> dict[int, list[int]]:
        return {
            layer: [int(count) for count in islice(numbers, counter.numel())]
            for layer, counter in counters.items()
        }

    load, replayed = read(loads), read(replays)
    replayed = {layer: counts for layer, counts in replayed.items() if counts[0]}
    counts = list(islice(numbers, len(reached)))
    return summed, counts, next(numbers), (load, replayed)


def _numbers(tensor: Tensor) -> list[float]:
    """The one read of a step. A separate function, so that tests/train/test_no_sync.py can count it."""
    return tensor.tolist()
