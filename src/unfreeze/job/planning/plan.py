"""Compute a run's plan, show it in three lines, write plan.json, and refuse a plan that doesn't fit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

from unfreeze.config.recipes import read_resolved
from unfreeze.config.tables import Save
from unfreeze.config.training import TrainingConfig
from unfreeze.core.errors import AdapterError, ConfigError, DoesNotFit, UserError
from unfreeze.core.events import RESOLVED
from unfreeze.core.layout import GIB, Layout
from unfreeze.core.process import planned_words, room_words
from unfreeze.core.schema import PlanEvent, SaveEvent
from unfreeze.core.torchrun import started
from unfreeze.core.units import format_bytes, format_count, format_seconds, plural
from unfreeze.job.data import sequence_length
from unfreeze.job.end.folder import write_json
from unfreeze.job.opening.device import allocator_line
from unfreeze.job.opening.precision import computed_here
from unfreeze.job.trained import Trained
from unfreeze.report.events import last, of_kind, read_events
from unfreeze.report.run import decimal_bytes
from unfreeze.teach.second import Beside

if TYPE_CHECKING:
    import torch

    from unfreeze.adapters import LoraConfig
    from unfreeze.checkpoint import Manifest
    from unfreeze.models import Decoder, Shape
    from unfreeze.parallel.answers import Answers
    from unfreeze.parallel.plan import Plan, PlannedModel, Work
    from unfreeze.parallel.processes.collectives import Group
    from unfreeze.teach.second import Second
    from unfreeze.train.run import Run


Answering = Callable[[int, int, int, int], "Answers"]
"""(tokens of a micro-batch, of a mean document, of the longest; documents, 0: unknown) -> answers sampled."""


@dataclass(frozen=True)
class Planning:
    """The inputs of a plan, before its layout is chosen.

    lengths    document lengths in tokens; empty: all have the maximum length
    processes  number that share the micro-batches, each with one device
    longest    tokens of the longest document, if not in `lengths`
    second     the run's second model, if any
    answers    those that the model samples before it trains on them, if any
    """

    config: TrainingConfig
    trained: Trained
    start: Manifest
    shape: Shape
    device: torch.device
    lengths: Sequence[int] = ()
    processes: int = 1
    longest: int | None = None
    second: Second | None = None
    answers: Answering | None = None

    def layouts(self) -> list[Layout]:
        """Layouts that the config allows, fastest first. Raises ConfigError for an impossible setting."""
        from unfreeze.parallel.plan.layouts import Facts, layouts

        here, experts = started().on_node if started().size > 1 else self.processes, self.shape.num_experts
        facts = Facts(
            kind=self.device.type,
            processes=self.processes,
            num_experts=experts,
            every_weight=self.trained.lora is None,
            splits=tuple(
                n for n in range(1, min(here, experts) + 1) if here % n == 0 and self.processes % n == 0
            ),
            files=bool(self.start.tensors),
            model=str(self.start.path),
            frozen=self.trained.lora is None and self.model.counts.frozen,
            packs="" if self.start.on_load is None else self.start.on_load.command,
        )
        return layouts(self.config.place, facts)

    def plan(self, layout: Layout, began: str = "") -> Plan:
        """Plan the run's memory in that layout, term by term.

        began: recompute policy that "auto" chose when a resumed run started. Only policies with bit-identical
        results are then considered.
        """
        from unfreeze.parallel import machine
        from unfreeze.parallel.plan import plan_run

        sharing = started().on_node if started().size > 1 else self.processes
        here = machine.hardware(self.device).shared(sharing)
        return plan_run(self.model, layout, self._work, here, cast(Any, among(layout, began)))

    def first(self) -> tuple[int, Plan]:
        """Return (index in `layouts`, plan) of the first layout that fits; if none does, of the smallest."""
        plans: list[Plan] = []
        for layout in self.layouts():
            plans.append(self.plan(layout))
            if plans[-1].fits:
                return len(plans) - 1, _explained(plans)
        least = min(range(len(plans)), key=lambda place: plans[place].over)
        return least, plans[least]

    @cached_property
    def model(self) -> PlannedModel:
        """The model on meta, with its sizes and counts."""
        import torch

        from unfreeze.parallel.plan import model_of

        dtype = getattr(torch, computed_here(self.config, self.device).memory.dtype)
        return self.trained.planned(model_of(self.shape, self.start, self.trained.lora, dtype, self.device))

    @cached_property
    def _work(self) -> Work:
        from unfreeze.adapters.snapshot import COPY_BYTES
        from unfreeze.parallel.plan import work_of

        config, tokens = self.config, self.config.tokens_per_micro_batch
        most = sequence_length(config.data, tokens, self.shape.max_positions)
        longest = self.longest or max(self.lengths, default=most)
        aside = None
        if self.second is not None:
            own = self.model.dtype, self.device, self.trained.lora is None
            aside = self.second.aside(Beside(self.start, tokens, longest, *own))
        each = sum(self.lengths) // len(self.lengths) if self.lengths else longest
        answers = self.answers(tokens, each, longest, len(self.lengths)) if self.answers else None
        return work_of(
            self.model,
            tokens=tokens,
            micro_batches=config.memory.micro_batches,
            longest=longest,
            mean_length=mean_length(self.lengths) if self.lengths else None,
            optimizer_moments=config.optimizer.moments,
            optimizer=config.optimizer.kind,
            receipt_bytes=COPY_BYTES,
            processes=self.processes,
            aside=aside,
            answers=answers,
        )


def if_packed(planning: Planning, plan: Plan) -> list[tuple[str, str]]:
    """Return `--quantize int4` with its bytes, if the plan does not fit and that one does."""
    from unfreeze.compress.quantize.onload import packed_on_load
    from unfreeze.parallel.plan.propose import if_it_fits

    start = planning.start
    if plan.fits or planning.trained.lora is None or not start.tensors or start.is_packed():
        return []
    try:
        packed = replace(planning, start=packed_on_load(start, "int4"))
    except UserError:  # a model that cannot be packed so
        return []
    return if_it_fits(packed.first()[1], "--quantize int4")


def among(layout: Layout, began: str) -> Sequence[str]:
    """Recompute policies that "auto" can choose, fastest first."""
    from unfreeze.parallel.plan.fastest import FASTEST_FIRST, SAME_BITS

    policies: Sequence[str] = FASTEST_FIRST
    if layout.keep_layers is not None:
        policies = ("elementwise", "selective")  # the other policies keep all layers or none
    if began:
        policies = SAME_BITS[SAME_BITS.index(cast(Any, began)) :] if began in SAME_BITS else (began,)
    if layout.boundary == "host":  # without recompute there are no layer inputs to offload
        policies = [choice for choice in policies if choice != "nothing"] or policies
    return policies


def _explained(plans: Sequence[Plan]) -> Plan:
    """Return the last of the plans tried, with the reason why the first was not chosen."""
    first, chosen = plans[0], plans[-1]
    if len(plans) == 1:
        return chosen
    over = first.total > first.usable
    total, usable = (first.total, first.usable) if over else (first.host, first.host_usable)
    where = "" if over else " of host memory"
    words = first.layout.words(first.sizes.num_experts)
    tried = f"{words} would take {format_bytes(total)}{where} of {format_bytes(usable)}"
    return replace(chosen, why_layout=tried)


def agreed_plan(planning: Planning, folder: Run, group: Group) -> Plan:
    """Return the plan with the configured or chosen layout, the same on all processes.

    A resumed run keeps its recompute policy. If that no longer fits, it takes another with bit-identical
    results and warns.
    """
    from unfreeze.parallel.plan.fastest import FASTEST_FIRST

    place, own = planning.first()
    agreed = max(map(int, group.texts(str(place))))
    layout = planning.layouts()[agreed]
    if layout.buffer != 0:  # the largest that fits on every process
        there = own if agreed == place else planning.plan(layout)
        least = min(int(text) for text in group.texts(str(there.layout.buffer_bytes or 0)))
        layout = layout.but(buffer=least / GIB)
    if layout.recompute != "auto":
        there = own if agreed == place and layout.buffer == own.layout.buffer else planning.plan(layout)
        return replace(there, why_layout=own.why_layout)
    plans = of_kind(read_events(folder.path / "events.jsonl"), PlanEvent) if folder.step else []
    began = group.texts(plans[0].get("recompute", "") if plans else "")[0]
    plan = planning.plan(layout, began if began in FASTEST_FIRST else "")
    plan = replace(plan, why_layout=own.why_layout)
    own_choice = plan.layout.recompute
    least = max(group.texts(own_choice), key=lambda name: FASTEST_FIRST.index(cast(Any, name)))
    if least != own_choice:
        plan = planning.plan(layout.but(recompute=least))
        plan = replace(plan, why="another process has less free memory", why_layout=own.why_layout)
    if began and began != least:
        message = (
            f"place.recompute = {least} from here on, because {began} no longer fits; results do not change"
        )
        folder.events.emit("warning", folder.step, message=message)
    return plan


def as_it_began(config: TrainingConfig, group: Group) -> TrainingConfig:
    """Return the config of a resumed run, with what it left open replaced by what was recorded.

    place.recompute = "auto" becomes the recorded setting. tokens_per_step, if not given, is that of the run
    that began, with however many processes; a new run's is the default times its processes.
    """
    began = (config.run_dir / RESOLVED).is_file()
    record = read_resolved(config.run_dir, ConfigError) if began else {}
    named, tokens = json.loads(
        group.texts(json.dumps([record.get("place.recompute"), record.get("training.tokens_per_step")]))[0]
    )
    if config.place.recompute == "auto" and named in get_args(Layout.model_fields["recompute"].annotation):
        config = config.model_copy(update={"place": config.place.but(recompute=named)})
    if "tokens_per_step" in config.training.model_fields_set:
        return config
    tokens = tokens if type(tokens) is int else config.training.tokens_per_step * group.size
    training = config.training.model_copy(update={"tokens_per_step": tokens})
    return config.model_copy(update={"training": training})


def mean_length(lengths: Sequence[int]) -> float:
    """Σ L² / Σ L over documents of L tokens: the mean, over tokens, of the length of a token's document.

    A token attends to half of it on average, so attention's time per token is proportional to it.
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
    export: tuple[str, str] = ("vllm", ""),
    others: Sequence[tuple[str, str]] = (),
) -> None:
    """Write and show the plan. Raises DoesNotFit if it doesn't fit.

    lines      short form for the terminal (start_lines)
    predicted  ops whose kernel runs unmeasured (kernels.predicted_ops)
    disk       bytes the run writes; for a resumed run the plan adds how long a save took
    export     reader and note of export_hint
    others     settings that would fit (propose.Proposal), beside those of the plan itself

    On CUDA the plan reports the allocator setting (docs/why/trust.md L2).
    """
    from unfreeze.parallel.plan import plan_fields, refuse_if_too_large

    fields = plan_fields(plan) | ({"start": list(lines)} if lines else {})
    if group.size > 1:
        each = f"{group.size} processes, each with this plan"
        measured = "process 0 reports tokens of all processes and the memory of the fullest"
        fields["lines"] = [*fields["lines"], f"  {each}; {measured}"]
    reader, note = export
    if note:
        fields |= {"export_for": reader, "export_note": note, "lines": [*fields["lines"], f"  {note}"]}
    if disk is not None:
        fields["save_bytes"] = disk.save
        before = last(read_events(folder.path / "events.jsonl"), SaveEvent) if folder.step else None
        seconds = before.get("seconds") if before else None
        took = "" if seconds is None else f"; the last one took {format_seconds(seconds)}"
        fields["lines"] = [*fields["lines"], f"  on disk: {disk.said}{took}"]
    if plan.hardware.kind == "cuda":
        line, grows = allocator_line()
        fields["lines"] = [*fields["lines"], f"  {line}"]
        fields |= {} if grows else {"warning": line}
    if predicted:
        fields["predicted_kernels"] = list(predicted)
    write_json(folder.path / "plan.json", fields)
    folder.events.emit("plan", folder.step, **fields)
    group.meet(lambda: refuse_if_too_large(plan, others))


def start_lines(
    config: TrainingConfig,
    trained: Trained,
    start: Manifest,
    shape: Shape,
    plan: Plan,
    disk: Disk,
    model: Decoder,
    second: Second | None = None,
) -> list[str]:
    """The plan in three lines: model, memory, trained weights; and a line for the second model if any."""
    from unfreeze.compress.quantize.onload import packs_line
    from unfreeze.models.from_shape import count_parameters
    from unfreeze.parallel.plan.words import all_parameters, experts_held, groups_of

    experts = shape.expert_words
    files = f"{decimal_bytes(start.nbytes)} in files" if start.tensors else "no weights yet"
    files = packs_line(start) if start.on_load else files
    if not start.tensors:
        files = f"{count_parameters(model).words()}, {files}"
    if trained.lora is None:
        what = f"every weight{trained.begins}"
    else:
        kind = "DoRA, " if trained.lora.dora else ""
        kind += "" if trained.lora.start == "lora" else f"{trained.lora.start}, "
        ranks = f"{kind}rank {trained.lora.rank}" + (
            f", experts {trained.lora.experts_rank}" if trained.lora.experts_rank else ""
        )
        beside = f" and all of {', '.join(trained.lora.train_too)}" if trained.lora.train_too else ""
        if added := getattr(trained, "added", None):
            beside += f" and {plural(len(added.ids), 'new token')}"
        what = (
            f"{ranks} on {', '.join(trained.lora.targets)}{beside},"
            f" {format_count(all_parameters(plan))} parameters{trained.begins}"
        )
    taken = planned_words(plan.total + plan.hardware.process, plan.hardware.kind)
    process = plan.hardware.process
    room = room_words(plan.total + process, plan.usable + process, plan.hardware.kind)
    layout = plan.layout
    if layout.sharing > 1:
        experts += f" ({experts_held(plan)} of them in each of {layout.sharing} processes)"
    if layout.experts != "device":
        groups = f" in {groups_of(plan)} groups a layer" if groups_of(plan) else ""
        because = f" because {plan.why_layout}" if plan.why_layout else ""
        experts += f", from {layout.experts}{groups}{because}"
    name = "new" if trained.new else Path(config.model).name
    return [
        f"model: {name}, {shape.kind}, {plural(shape.num_layers, 'layer')}{experts}; {files}",
        f"memory: {taken} of {room}; disk: {format_bytes(disk.needed)} of {format_bytes(disk.free)}",
        f"trains: {what}; {tokens_words(config, plan.work.processes)} {config.OF_TOKENS}",
        *([f"positions: {shape.max_positions:,} ({start.longer})"] if start.longer else []),
        *([second.said(start)] if second else []),
    ]


def time_line(config: TrainingConfig, start: Manifest, plan: Plan, tokens: int) -> list[str]:
    """Predicted time of a run that makes a new model; [] for others, and where no rate is known here.

    tokens: of an epoch, without held-out rows. A forecast from real steps follows after 50 of them.
    """
    if start.tensors or plan.time is None or plan.work.answers:
        return []
    training = config.training
    steps = training.steps or max(1, round(training.epochs * tokens / training.tokens_per_step))
    seconds = steps * plan.time.of_passes(plan.work.own_batches)
    of = plural(steps, "step")
    return [f"time: about {format_seconds(seconds)} for {of}, predicted; rates {plan.rates}"]


def tokens_words(config: TrainingConfig, processes: int) -> str:
    """Return '4,096 tokens', or with several processes '32,768 tokens (4,096 in each of 8 processes)'."""
    tokens = config.training.tokens_per_step
    each = f" ({tokens // processes:,} in each of {processes} processes)" if processes > 1 else ""
    return f"{tokens:,} tokens{each}"


def export_hint(lora: LoraConfig | None, start: Manifest, model: Decoder) -> tuple[str, str]:
    """Reader for which a run's last line suggests an export, and the plan's note on what another leaves out.

    The reader is vllm, or peft if vLLM would not apply all adapters; "" if nothing else loads the model.
    """
    from unfreeze.adapters.names import check_per_expert
    from unfreeze.adapters.readers import READERS
    from unfreeze.models import ONLY_HERE
    from unfreeze.models.blocks.linear import Linear
    from unfreeze.models.targets import candidates, names_embeddings, resolve, targets_of

    if lora is None:
        return "vllm", ""
    if lora.dora:
        return "peft", "vllm and sglang read no DoRA; for them: unfreeze merge RUN --to bf16"
    model_type = str(start.config.get("model_type"))
    if model_type in ONLY_HERE:
        return "", f"no other program loads models of type {model_type}, or their adapters"
    if lora.train_too or start.tokenizer is not None or names_embeddings(lora.targets):
        return "peft", "vllm and sglang load LoRA alone; for them: unfreeze merge RUN --to bf16"
    if issue := (READERS["vllm"].refuses or {}).get(model_type):
        return "peft", f"vllm cannot load adapters of {model_type}: {issue}"
    linear = [candidate.name for candidate in candidates(model) if isinstance(candidate.owner, Linear)]
    chosen = resolve(model, lora.targets)
    for name in chosen.keys() - set(linear):
        try:
            check_per_expert(model, name)
        except AdapterError:
            remedy = "without them: --lora.targets attention"
            return "peft", f"vllm cannot load adapters of {model_type}'s experts; {remedy}"
    for reader, other in ((READERS["vllm"], "peft"), (READERS["peft"], "vllm")):
        left_out = reader.dropped([name for name in chosen if name in linear], linear)
        if left_out:
            leaves = " and ".join(sorted({name.rsplit(".", 1)[-1] for name in left_out}))
            targets = targets_of(chosen.keys() - left_out.keys(), model)
            remedy = f"; to train only what it applies: --lora.targets {' '.join(targets)}" if targets else ""
            return other, f"{reader.name} does not apply {leaves}{remedy}"
    return "vllm", ""


@dataclass(frozen=True)
class Disk:
    """Bytes that a run writes, and bytes free on its disk.

    save    bytes of a save of the state
    saves   most saves at a time: one more than are kept, as an old one goes only when the new one is complete
    result  bytes of the trained adapter or model
    when    the schedule of saves
    """

    folder: Path
    save: int
    saves: int
    result: int
    free: int
    when: Save

    @property
    def needed(self) -> int:
        """Most bytes that the run writes."""
        return self.saves * self.save + self.result

    @property
    def said(self) -> str:
        """Words such as 'a save is 6.6 MiB, every 10 min and 50 steps'."""
        minutes, steps = self.when.minutes, self.when.every
        often = [f"{minutes:g} min"] * (minutes > 0) + [plural(steps, "step")] * (steps > 0)
        when = f"every {' and '.join(often)}" if often else "at the end"
        return f"a save is {format_bytes(self.save)}, {when}"

    def words(self, what: str) -> str:
        """Words on free and needed bytes; `what` names the trained result."""
        return (
            f"{format_bytes(self.free)} free for {self.folder}; the run writes at most"
            f" {format_bytes(self.needed)} ({self.saves} saves of {format_bytes(self.save)}, {what})"
        )


ROOM = "free space, give --out on another disk, or lower --save.keep"


def disk_of(config: TrainingConfig, trained: Trained, start: Manifest, plan: Plan) -> Disk:
    """Compute the disk space that the run needs in its folder, and the space free there."""
    from unfreeze.parallel.plan.words import all_parameters

    folder = config.run_dir.absolute()
    existing = next(path for path in (folder, *folder.parents) if path.is_dir())
    each = (plan.terms["adapter"] or plan.terms["base"]) + plan.terms["optimizer"] + plan.host_moments
    if plan.sizes.begins:  # A and B as they were at the start
        each += plan.terms["adapter"]
    adapter = plan.terms["adapter"]
    if plan.layout.sharded:
        each *= plan.work.processes
    if plan.layout.sharing > 1:  # the plan is per process, the files are for all
        every = all_parameters(plan)
        each, adapter = (size * every // plan.adapter_parameters for size in (each, adapter))
    result = trained.written_bytes(start, adapter)
    free = shutil.disk_usage(existing).free
    return Disk(config.run_dir, each, config.save.keep + 1, result, free, config.save)


def check_room(disk: Disk, folder: Run, what: str) -> None:
    """Before training: raise DoesNotFit if not even one save and the result fit; warn if not all saves do.

    A resumed run has saves already and is not checked.
    """
    if folder.step or disk.needed <= disk.free:
        return
    if disk.save + disk.result > disk.free:
        raise DoesNotFit(f"disk: {disk.words(what)}", next=ROOM)
    folder.events.emit("warning", 0, message=f"disk: {disk.words(what)}: {ROOM}")
