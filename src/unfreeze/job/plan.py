"""The plan of a run: computed, shown in three lines, written to plan.json; refused where it doesn't fit."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from unfreeze.config.training import TrainingConfig
from unfreeze.core.units import format_bytes, format_count
from unfreeze.job.data import sequence_length
from unfreeze.job.device import allocator_line
from unfreeze.job.folder import write_json
from unfreeze.job.trained import Trained

if TYPE_CHECKING:
    import torch

    from unfreeze.checkpoint import Manifest
    from unfreeze.models import Shape
    from unfreeze.parallel.collectives import Group
    from unfreeze.parallel.plan import Plan
    from unfreeze.train.run import Run


def plan_of(
    config: TrainingConfig,
    trained: Trained,
    start: Manifest,
    shape: Shape,
    device: torch.device,
    mean_length: float | None = None,
    processes: int = 1,
) -> Plan:
    """What the run will take, term by term; `unfreeze doctor` shows the same plan.

    mean_length: see the function of that name; None: every document is as long as the longest may be.
    """
    from unfreeze.adapters.snapshot import COPY_BYTES
    from unfreeze.parallel.plan import plan_training

    memory, tokens = config.memory, config.tokens_per_micro_batch
    return plan_training(
        shape,
        start,
        trained.lora,
        tokens=tokens,
        dtype=memory.dtype,
        device=device,
        micro_batches=memory.micro_batches,
        longest=sequence_length(config.data, tokens, shape.max_positions),
        mean_length=mean_length,
        recompute=memory.recompute,
        keep_layers=memory.keep_layers,
        optimizer_moments=config.optimizer.moments,
        receipt_bytes=COPY_BYTES,
        processes=processes,
    )


def mean_length(lengths: Sequence[int]) -> float:
    """Σ L² / Σ L over documents of L tokens: the length of a token's document, averaged over tokens.

    A token attends to half as many on average, so attention's time per token is proportional to it.
    """
    return sum(int(n) ** 2 for n in lengths) / max(1, sum(int(n) for n in lengths))


def emit_plan(
    folder: Run, plan: Plan, group: Group, lines: Sequence[str] = (), predicted: Sequence[str] = ()
) -> None:
    """Write and show the plan, then refuse what does not fit.

    lines      what a terminal shows instead of the whole plan (start_lines)
    predicted  ops whose kernel runs unmeasured (kernels.predicted_ops)

    On CUDA the plan says how the allocator was set (docs/trust.md L2).
    """
    from unfreeze.parallel.plan import plan_fields, refuse_if_too_large

    fields = plan_fields(plan) | ({"start": list(lines)} if lines else {})
    if group.size > 1:
        each = f"{group.size} processes, each with this plan"
        fields["lines"] = [*fields["lines"], f"  {each}; process 0 speaks, and what it measures is its own"]
    if plan.hardware.kind == "cuda":
        line, grows = allocator_line()
        fields["lines"] = [*fields["lines"], f"  {line}"]
        fields |= {} if grows else {"warning": line}
    if predicted:
        fields["predicted_kernels"] = list(predicted)
    write_json(folder.path / "plan.json", fields)
    folder.events.emit("plan", folder.step, **fields)
    refuse_if_too_large(plan)


def start_lines(
    config: TrainingConfig, trained: Trained, start: Manifest, shape: Shape, plan: Plan
) -> list[str]:
    """The plan in three lines: what is trained on what, and what that takes."""
    experts = (
        f", {shape.experts_per_token} of {shape.num_experts} experts a token" if shape.num_experts else ""
    )
    files = f"{format_bytes(start.nbytes)} in files" if start.tensors else "no weights yet"
    written, free = disk_bytes(config, trained, start, plan)
    if trained.lora is None:
        what = "every weight"
    else:
        ranks = f"rank {trained.lora.rank}" + (
            f", experts {trained.lora.experts_rank}" if trained.lora.experts_rank else ""
        )
        what = (
            f"adapters of {ranks} on {', '.join(trained.lora.targets)},"
            f" {format_count(plan.adapter_parameters)} parameters"
        )
    return [
        f"model: {Path(config.model).name}, {shape.model_type}, {shape.num_layers} layers{experts}; {files}",
        (
            f"memory: {format_bytes(plan.total)} planned, {format_bytes(plan.usable)} usable; disk:"
            f" {format_bytes(written)} of {format_bytes(free)} free"
        ),
        f"trains: {what}; {config.training.tokens_per_step:,} tokens a step",
    ]


def disk_bytes(config: TrainingConfig, trained: Trained, start: Manifest, plan: Plan) -> tuple[int, int]:
    """(bytes the run writes at most, bytes free where it writes).

    It writes saves of the state, one more than are kept, and the result.
    """
    folder = config.run_dir.absolute()
    existing = next(path for path in (folder, *folder.parents) if path.is_dir())
    each = (plan.terms["adapter"] or plan.terms["base"]) + plan.terms["optimizer"]
    # a save is whole before an old one goes
    written = (config.save.keep + 1) * each + trained.written_bytes(start, plan.terms["adapter"])
    return written, shutil.disk_usage(existing).free
