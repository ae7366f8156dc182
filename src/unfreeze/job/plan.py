"""The plan of a run: computed, shown in three lines, written to plan.json; refused where it doesn't fit."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from unfreeze.config.tables import Memory, Save
from unfreeze.config.training import TrainingConfig
from unfreeze.core.errors import ConfigError, DoesNotFit
from unfreeze.core.events import RESOLVED
from unfreeze.core.process import planned_words, room_words
from unfreeze.core.schema import PlanEvent, SaveEvent
from unfreeze.core.torchrun import started
from unfreeze.core.units import format_bytes, format_count, format_seconds
from unfreeze.job.data import sequence_length
from unfreeze.job.device import allocator_line
from unfreeze.job.folder import write_json
from unfreeze.job.places import OF_CONFIG, SHARDED, Where, place_of, place_words, possible_places
from unfreeze.job.precision import computed_here
from unfreeze.job.trained import Trained
from unfreeze.report.events import last, of_kind, read_events
from unfreeze.report.run import decimal_bytes
from unfreeze.untrusted.json_object import read_object

if TYPE_CHECKING:
    import torch

    from unfreeze.adapters import LoraConfig
    from unfreeze.checkpoint import Manifest
    from unfreeze.job.second import Second
    from unfreeze.models import Shape
    from unfreeze.parallel.collectives import Group
    from unfreeze.parallel.plan import Measured, Plan
    from unfreeze.parallel.plan.aside import Aside
    from unfreeze.train.run import Run


def plan_of(
    config: TrainingConfig,
    trained: Trained,
    start: Manifest,
    shape: Shape,
    device: torch.device,
    lengths: Sequence[int] = (),
    processes: int = 1,
    recompute: str = "",
    began: str = "",
    longest: int | None = None,
    place: Where | None = None,
    aside: Aside | None = None,
    measured: Measured | None = None,
) -> Plan:
    """What the run will take, term by term; `unfreeze doctor` shows the same plan.

    lengths    of the documents, in tokens; none: each is as long as the longest may be
    recompute  instead of the config's
    began      what a run with recompute = "auto" chose when it began: now only what gives the same bits
    longest    tokens of the longest document, where that is not among `lengths`
    place      where weights lie, instead of what the config says; there "auto" is the first of
               `possible_places` where the run fits
    aside      what a model beside the one that trains takes (taken_aside)
    measured   what the model says of itself, where it was asked before
    """
    from unfreeze.adapters.snapshot import COPY_BYTES
    from unfreeze.parallel.plan import measured_of, plan_training
    from unfreeze.parallel.plan.fastest import FASTEST_FIRST, SAME_BITS

    config = computed_here(config, device)
    if place is None:
        measured = measured_of(shape, start, trained.lora, _dtype(config), device)
        given = config, trained, start, shape, device, lengths, processes, recompute, began, longest
        made: list[Plan] = []
        for possible in possible_places(config, trained, start, shape, device, processes):
            made.append(plan := plan_of(*given, possible, aside, measured))
            if plan.fits:
                break
        return _explained(made)
    memory, tokens = config.memory, config.tokens_per_micro_batch
    among: Sequence[Any] = FASTEST_FIRST
    if memory.keep_layers is not None:
        among = ("elementwise", "selective")  # the others keep all layers, or none
    if began:
        among = SAME_BITS[SAME_BITS.index(began) :] if began in SAME_BITS else (cast(Any, began),)
    if place.boundary == "host":  # where nothing is recomputed there are no inputs of layers to keep
        among = [choice for choice in among if choice != "nothing"] or among
    return plan_training(
        shape,
        start,
        trained.lora,
        tokens=tokens,
        dtype=memory.dtype,
        device=device,
        micro_batches=memory.micro_batches,
        longest=longest or _longest(config, shape, lengths),
        mean_length=mean_length(lengths) if lengths else None,
        recompute=cast(Any, recompute or memory.recompute),
        among=cast(Any, among),
        sharing=started().on_node if started().size > 1 else processes,
        keep_layers=memory.keep_layers,
        optimizer_moments=config.optimizer.moments,
        receipt_bytes=COPY_BYTES,
        processes=processes,
        experts=cast(Any, "device" if place.experts == SHARDED else place.experts),
        weights="sharded" if place.experts == SHARDED else "device",
        buffer=_buffer(config, place),
        split=place.split,
        rest=cast(Any, place.rest),
        boundary=cast(Any, place.boundary),
        optimizer=cast(Any, place.optimizer),
        aside=aside,
        measured=measured,
    )


def taken_aside(
    second: Second | None,
    config: TrainingConfig,
    trained: Trained,
    start: Manifest,
    shape: Shape,
    device: torch.device,
    lengths: Sequence[int] = (),
    longest: int | None = None,
) -> Aside | None:
    """What a model beside the one that trains takes, wherever that one lies; measured once for all plans."""
    if second is None:
        return None
    config = computed_here(config, device)
    longest, tokens = longest or _longest(config, shape, lengths), config.tokens_per_micro_batch
    return second.aside(start, tokens, longest, _dtype(config), device, trained.lora is None)


def _longest(config: TrainingConfig, shape: Shape, lengths: Sequence[int]) -> int:
    """Tokens of the longest document; as many as it may have, where lengths are not known."""
    most = sequence_length(config.data, config.tokens_per_micro_batch, shape.max_positions)
    return max(lengths, default=most)


def _dtype(config: TrainingConfig) -> torch.dtype:
    import torch

    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[config.memory.dtype]


def _buffer(config: TrainingConfig, place: Where) -> int | Literal["auto"] | None:
    """Bytes that a buffer of experts may have; "auto": as many as fit; None: as many as a layer's."""
    asked = config.place.buffer
    if place.buffer != OF_CONFIG or asked == "auto":
        return "auto" if place.buffer == OF_CONFIG else place.buffer
    return int(asked * 2**30)


def _explained(made: Sequence[Plan]) -> Plan:
    """The last of the plans that were tried, with why it is not the first."""
    chosen = made[-1]
    if len(made) == 1:
        return chosen
    if chosen.work.divided:
        whole = f"{format_bytes(made[0].total)} of {format_bytes(made[0].usable)}"
        return replace(chosen, why_weights=f"all in each would take {whole}")
    tried = "; ".join(
        f"{place_words(plan)} would take {format_bytes(plan.total)} of {format_bytes(plan.usable)}"
        if plan.total > plan.usable
        else f"{place_words(plan)} would take {format_bytes(plan.host)} of host memory, of which"
        f" {format_bytes(plan.host_usable)} are usable"
        for plan in made[:-1]
    )
    return replace(chosen, why_experts=tried)


def agreed_plan(
    config: TrainingConfig,
    trained: Trained,
    start: Manifest,
    shape: Shape,
    device: torch.device,
    lengths: Sequence[int],
    folder: Run,
    group: Group,
    longest: int | None = None,
    second: Second | None = None,
) -> Plan:
    """The plan with what is recomputed: as asked, or chosen, the same on all processes.

    A run that goes on keeps what it began with. Where that does not fit any more, it takes what gives the
    same numbers to the bit, and says so.
    """
    from unfreeze.parallel.plan.fastest import FASTEST_FIRST

    given = config, trained, start, shape, device, lengths, group.size
    aside = taken_aside(second, config, trained, start, shape, device, lengths, longest)
    more: dict[str, Any] = {"longest": longest, "aside": aside}
    own = plan_of(*given, **more)
    tried = possible_places(config, trained, start, shape, device, group.size)
    first = place_of(own)
    if first.buffer is not None:
        first = first._replace(buffer=OF_CONFIG)
    place = tried[max(map(int, group.texts(str(tried.index(first)))))]
    if place.buffer is not None:  # as large as fits everywhere
        there = own if place == first else plan_of(*given, **more, place=place)
        place = place._replace(buffer=min(map(int, group.texts(str(there.work.buffer)))))
    if config.memory.recompute != "auto":
        return own if place == place_of(own) else plan_of(*given, **more, place=place)
    plans = of_kind(read_events(folder.path / "events.jsonl"), PlanEvent) if folder.step else []
    began = group.texts(plans[0].get("recompute", "") if plans else "")[0]
    plan = replace(
        plan_of(*given, **more, began=began if began in FASTEST_FIRST else "", place=place),
        why_experts=own.why_experts,
        why_weights=own.why_weights,
    )
    least = max(group.texts(plan.work.recompute), key=lambda name: FASTEST_FIRST.index(cast(Any, name)))
    if least != plan.work.recompute:
        plan = replace(
            plan_of(*given, **more, recompute=least, place=place), why="another process has less free memory"
        )
    if began and began != least:
        message = (
            f"recompute = {least} from here on, because {began} no longer fits; the numbers stay the same"
        )
        folder.events.emit("warning", folder.step, message=message)
    return plan


def as_it_began(config: TrainingConfig, group: Group) -> TrainingConfig:
    """The config of a run that goes on: recompute = "auto" is what the run was told when it began."""
    path = config.run_dir / RESOLVED
    named = read_object(path, ConfigError).get("recompute") if path.is_file() else None
    named = group.texts(str(named or ""))[0]
    if config.memory.recompute != "auto" or named not in get_args(
        Memory.model_fields["recompute"].annotation
    ):
        return config
    return config.model_copy(update={"memory": config.memory.model_copy(update={"recompute": named})})


def mean_length(lengths: Sequence[int]) -> float:
    """Σ L² / Σ L over documents of L tokens: the length of a token's document, averaged over tokens.

    A token attends to half as many on average, so attention's time per token is proportional to it.
    """
    import numpy as np

    lengths_N = np.asarray(lengths, dtype=np.int64)
    return int((lengths_N * lengths_N).sum()) / max(1, int(lengths_N.sum()))


def emit_plan(
    folder: Run,
    plan: Plan,
    group: Group,
    lines: Sequence[str] = (),
    predicted: Sequence[str] = (),
    *,
    disk: Disk | None = None,
    note: str = "",
) -> None:
    """Write and show the plan, then refuse what does not fit.

    lines      what a terminal shows instead of the whole plan (start_lines)
    predicted  ops whose kernel runs unmeasured (kernels.predicted_ops)
    disk       what the run writes; a run that goes on knows how long a save took
    note       export_note

    On CUDA the plan says how the allocator was set (docs/trust.md L2).
    """
    from unfreeze.parallel.plan import plan_fields, refuse_if_too_large

    fields = plan_fields(plan) | ({"start": list(lines)} if lines else {})
    if group.size > 1:
        each = f"{group.size} processes, each with this plan"
        measured = "process 0 speaks; tokens are of all, memory is that of the fullest"
        fields["lines"] = [*fields["lines"], f"  {each}; {measured}"]
    if note:
        fields |= {"export_note": note, "lines": [*fields["lines"], f"  {note}"]}
    if disk is not None:
        fields["save_bytes"] = disk.save
        before = last(read_events(folder.path / "events.jsonl"), SaveEvent) if folder.step else None
        seconds = before.get("seconds") if before else None
        took = "" if seconds is None else f", {format_seconds(seconds)} the last time"
        fields["lines"] = [*fields["lines"], f"  on disk: {disk.said}{took}"]
    if plan.hardware.kind == "cuda":
        line, grows = allocator_line()
        fields["lines"] = [*fields["lines"], f"  {line}"]
        fields |= {} if grows else {"warning": line}
    if predicted:
        fields["predicted_kernels"] = list(predicted)
    write_json(folder.path / "plan.json", fields)
    folder.events.emit("plan", folder.step, **fields)
    group.meet(lambda: refuse_if_too_large(plan))


def start_lines(
    config: TrainingConfig,
    trained: Trained,
    start: Manifest,
    shape: Shape,
    plan: Plan,
    disk: Disk,
    second: Second | None = None,
) -> list[str]:
    """The plan in three lines: what is trained on what, and what that takes; and one of the second model."""
    from unfreeze.parallel.plan.words import all_parameters, experts_held, groups_of

    experts = (
        f", {shape.experts_per_token} of {shape.num_experts} experts a token" if shape.num_experts else ""
    )
    files = f"{decimal_bytes(start.nbytes)} in files" if start.tensors else "no weights yet"
    if trained.lora is None:
        what = "every weight"
    else:
        ranks = f"rank {trained.lora.rank}" + (
            f", experts {trained.lora.experts_rank}" if trained.lora.experts_rank else ""
        )
        what = (
            f"{ranks} on {', '.join(trained.lora.targets)},"
            f" {format_count(all_parameters(plan))} parameters{trained.begins}"
        )
    taken = planned_words(plan.total + plan.hardware.process, plan.hardware.kind)
    process = plan.hardware.process
    room = room_words(plan.total + process, plan.usable + process, plan.hardware.kind)
    if plan.work.split > 1:
        experts += f" ({experts_held(plan)} of them in each of {plan.work.split} processes)"
    if plan.work.experts != "device":
        groups = f" in {groups_of(plan)} groups a layer" if groups_of(plan) else ""
        experts += f", from {plan.work.experts}{groups}" + f" because {plan.why_experts}" * bool(
            plan.why_experts
        )
    return [
        f"model: {Path(config.model).name}, {shape.model_type}, {shape.num_layers} layers{experts}; {files}",
        f"memory: {taken} of {room}; disk: {format_bytes(disk.needed)} of {format_bytes(disk.free)}",
        f"trains: {what}; {config.training.tokens_per_step:,} tokens a step",
        *([second.said(start)] if second else []),
    ]


def export_note(lora: LoraConfig | None, start: Manifest, shape: Shape) -> str:
    """What vLLM, for which a run's last line names the export, would not apply of these adapters; else ""."""
    import torch

    from unfreeze import models
    from unfreeze.adapters.readers import READERS
    from unfreeze.models.blocks.linear import Linear
    from unfreeze.models.targets import candidates, resolve, targets_of

    if lora is None:
        return ""
    reader, model_type = READERS["vllm"], str(start.config.get("model_type"))
    if issue := (reader.refuses or {}).get(model_type):
        return f"vllm loads no adapters of {model_type}: {issue}"
    model = models.meta_model(shape, start, torch.float32)
    linear = [candidate.name for candidate in candidates(model) if isinstance(candidate.owner, Linear)]
    chosen = resolve(model, lora.targets)
    left_out = reader.dropped([name for name in chosen if name in linear], linear)
    if not left_out:
        return ""
    leaves = " and ".join(sorted({name.rsplit(".", 1)[-1] for name in left_out}))
    targets = targets_of(chosen.keys() - left_out.keys(), model)
    remedy = f"; to train only what it applies: --lora.targets {' '.join(targets)}" if targets else ""
    return f"vllm does not apply {leaves}{remedy}"


@dataclass(frozen=True)
class Disk:
    """What a run writes, and the bytes that are free where it writes.

    save    bytes of a save of the state          saves   saves at most: one more than are kept, because a new
    result  bytes of what is trained, at the end          one is whole before an old one goes
    when    when the run saves
    """

    folder: Path
    save: int
    saves: int
    result: int
    free: int
    when: Save

    @property
    def needed(self) -> int:
        """Bytes that the run writes at most."""
        return self.saves * self.save + self.result

    @property
    def said(self) -> str:
        """'a save is 6.6 MiB, every 10 min and 50 steps'."""
        minutes, steps = self.when.minutes, self.when.every
        often = [f"{minutes:g} min"] * (minutes > 0) + [f"{steps:,} steps"] * (steps > 0)
        when = f"every {' and '.join(often)}" if often else "at the end"
        return f"a save is {format_bytes(self.save)}, {when}"

    def words(self, what: str) -> str:
        """The sum; `what` is trained."""
        return (
            f"{format_bytes(self.free)} free for {self.folder}; the run writes at most"
            f" {format_bytes(self.needed)} ({self.saves} saves of {format_bytes(self.save)}, {what})"
        )


ROOM = "free space, give --out on another disk, or lower --keep-saves"


def disk_of(config: TrainingConfig, trained: Trained, start: Manifest, plan: Plan) -> Disk:
    """What the run takes of the disk of its folder, and what is free there."""
    from unfreeze.parallel.plan.words import all_parameters

    folder = config.run_dir.absolute()
    existing = next(path for path in (folder, *folder.parents) if path.is_dir())
    each = (plan.terms["adapter"] or plan.terms["base"]) + plan.terms["optimizer"] + plan.host_moments
    adapter = plan.terms["adapter"]
    if plan.work.divided:
        each *= plan.work.processes
    if plan.work.split > 1:  # the plan is of one process, the files are of all
        every = all_parameters(plan)
        each, adapter = (size * every // plan.adapter_parameters for size in (each, adapter))
    result = trained.written_bytes(start, adapter)
    free = shutil.disk_usage(existing).free
    return Disk(config.run_dir, each, config.save.keep + 1, result, free, config.save)


def check_room(disk: Disk, folder: Run, what: str) -> None:
    """Before training: refuse where not even one save and the result fit, warn where not all saves do.

    A run that goes on has saves already, and is not asked.
    """
    if folder.step or disk.needed <= disk.free:
        return
    if disk.save + disk.result > disk.free:
        raise DoesNotFit(f"disk: {disk.words(what)}", next=ROOM)
    folder.events.emit("warning", 0, message=f"disk: {disk.words(what)}: {ROOM}")
