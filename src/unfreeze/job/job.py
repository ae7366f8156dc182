"""What a run is: `run(config, parts)` is the table of contents of every kind of training.

A recipe says in Parts what is its own: where training starts, what trains, what is minimised, how rows are
read. Everything else is the same for all and stands here: folder and lock, plan, model, resuming, samples,
validation, guards, receipt, report.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unfreeze.checkpoint.same import weights_digest
from unfreeze.config.tables import Memory, Save
from unfreeze.config.training import TrainingConfig
from unfreeze.core.command import Common
from unfreeze.core.garbage import take_up
from unfreeze.core.schema import TrainEvent
from unfreeze.job.data import (
    batches_in,
    check_vocabulary,
    describer,
    document_tokens,
    encode,
    few_steps,
    num_steps,
    open_tokenizer,
    schedule_of,
    sequence_length,
)
from unfreeze.job.device import pick_device, say
from unfreeze.job.end import finish
from unfreeze.job.folder import live, refuse_other_data, write_resolved
from unfreeze.job.kernels import KernelChoices, predicted_ops, settle_kernels
from unfreeze.job.loading import load, load_divided
from unfreeze.job.parts import Parts
from unfreeze.job.plan import (
    agreed_plan,
    as_it_began,
    check_room,
    disk_of,
    emit_plan,
    export_note,
    possible_places,
    start_lines,
)
from unfreeze.job.precision import dtype_line, expected, settled, warn_slow
from unfreeze.job.processes import alone, refuse_uneven, start_of, together
from unfreeze.job.receipts import receipt_of
from unfreeze.job.residency import keep_boundary, optimizer_of, refuse_answers, refuse_samples, transfers_of
from unfreeze.job.resume import refuse_other_base
from unfreeze.job.samples import Samples, own_prompts
from unfreeze.job.second import first_asked
from unfreeze.job.shortage import refused_when_short
from unfreeze.job.streaming import Followed, saved_before
from unfreeze.job.validation import Validation, best_is_written, refuse_other_rows, validation_of, write_best
from unfreeze.job.written import forget, is_noted, note
from unfreeze.report.events import of_kind, read_events

if TYPE_CHECKING:
    import torch

    from unfreeze.checkpoint import Manifest
    from unfreeze.core.batch import Batch
    from unfreeze.data import Batches, Dataset
    from unfreeze.data.packing.windows import WindowBatches
    from unfreeze.models import Decoder
    from unfreeze.models.recompute import RecomputePolicy
    from unfreeze.parallel.collectives import Group
    from unfreeze.parallel.mesh import Mesh
    from unfreeze.parallel.plan import Plan
    from unfreeze.train.fit import OnStep
    from unfreeze.train.guards import OnSpike, SpikeGuard
    from unfreeze.train.run import Run
    from unfreeze.train.state import State
    from unfreeze.train.step import Objective
    from unfreeze.train.suspects import Describe


def run(config: TrainingConfig, parts: Parts, common: Common, command: str = "") -> dict[str, Any]:
    """Train as the config says, or go on where an unfinished run in the same folder stopped.

    command: what the user typed, to be shown where the run must be given again.
    -> the run's result, as `finish` gives it.
    """
    # what can be refused without torch and before there is a folder
    refuse_uneven(config)
    begun = alone(config, parts, common)

    from unfreeze.kernels.choice.ahead import compiling

    memory = config.memory
    with compiling(memory.device, memory.threads, expected(config)):  # before torch is imported
        device = pick_device(memory.device, memory.threads)

        from unfreeze.parallel.collectives import open_group

        plans: list[Plan] = []
        with refused_when_short(plans), ExitStack() as opened:
            group = opened.enter_context(open_group(device))
            config, start = begun or together(config, parts, common, group)
            config = settled(as_it_began(config, group), start, device, group)
            folder = opened.enter_context(live(config, common, parts.recipe, command, group))
            end = partial(
                finish, folder.path, common, command, **parts.trained.as_result(target_of(folder, parts))
            )
            if group.any(is_written(folder, parts)):
                group.on_rank0(lambda: refuse_other_data(config.data, folder))
                return group.on_rank0(lambda: end(already_finished=True)) or {}
            job = prepare(config, parts, common, device, group, folder, start, plans)
            job.write(finished=job.fit())
            return group.on_rank0(lambda: end(best=job.state.best)) or {}


def target_of(folder: Run, parts: Parts) -> Path:
    """Where what was trained is written."""
    return folder.path / parts.trained.name


def best_of(folder: Run, parts: Parts) -> Path:
    """Where the best of the validated saves is written, if it is not the last."""
    return folder.path / f"{parts.trained.name}-best"


def is_written(folder: Run, parts: Parts) -> bool:
    """Whether the run is finished and everything it leaves behind is there, and of its last step."""
    target = target_of(folder, parts)
    written = (target / parts.trained.marker).is_file() and is_noted(folder.path, target)
    return folder.finished and written and best_is_written(folder, best_of(folder, parts))


@dataclass
class Job:
    """A run that is ready for its next step."""

    parts: Parts
    model_name: str
    memory: Memory
    saves: Save
    on_spike: OnSpike
    max_norm: float
    mesh: Mesh
    device: torch.device
    start: Manifest
    dataset: Dataset
    batches: Batches | WindowBatches
    model: Decoder
    state: State
    samples: Samples
    validation: list[Validation]
    describe: Describe
    followed: list[Followed]
    objective: Objective

    @property
    def group(self) -> Group:
        """All processes of the run."""
        return self.mesh.all

    def fit(self) -> bool:
        """The loop, with everything that looks at a step.

        -> whether the run reached its last step; otherwise it was interrupted, and saved.
        """
        from unfreeze.train.fit import fit
        from unfreeze.train.memory import reset_peak_bytes

        state, saves = self.state, self.saves
        if state.step == 0:
            self.samples.say("before", 0)
        for hook in self.validation:
            hook.first()
        reset_peak_bytes(self.device)
        take_up()  # everything is imported
        with saved_before(state, saves.keep, self.dataset.stream is not None, self.group):
            fitted = fit(
                state,
                self.batches,
                self.objective,
                recompute=self.recompute,
                micro_batches=self.memory.micro_batches,
                rewrite=self.rewrite,
                max_norm=self.max_norm,
                save_every=saves.every,
                save_minutes=saves.minutes,
                keep_saves=saves.keep,
                on_full_disk=saves.on_full_disk,
                group=self.group,
                judge=self.spike_guard(),
                describe=self.describe,
                on_step=self.hooks(),
            )
        if fitted.reason == "done":
            self.samples.say("after", state.step)
        return fitted.reason == "done"

    def rewrite(self, micro_batches: list[Batch], step: int) -> list[Batch]:
        """What is learned in the step behind `step` others, instead of these."""
        return micro_batches if self.parts.rewrite is None else self.parts.rewrite(self, micro_batches, step)

    @cached_property
    def recompute(self) -> RecomputePolicy:
        """How a layer is run: what it keeps for backward, and what it recomputes."""
        from unfreeze.models import recompute_policy

        return recompute_policy(self.memory.recompute, self.model.layers, self.memory.keep_layers)

    def hooks(self) -> list[OnStep]:
        """What looks at each finished step: kernels, the receipt, validation, then the recipe's own."""
        receipt = receipt_of(self.state, self.dataset, self.group, stop=self.parts.trained.strict)
        return [
            *transfers_of(self.model),
            KernelChoices(self.memory.dtype),
            *receipt,
            *self.validation,
            *self.followed,
            *self.parts.on_step,
        ]

    def write(self, *, finished: bool) -> None:
        """What was trained, at the end or an interruption; and the best save, if that was an earlier one."""
        for account in self.followed:
            account.end(self.state)
        folder, trained = self.state.run, self.parts.trained

        def write(target: Path, step: int) -> None:
            there = (target / trained.marker).is_file() and is_noted(folder.path, target)
            if self.group.any(self.group.rank == 0 and there):
                return
            trained.write(self.state, self.start, self.model_name, self.mesh, target)
            self.group.on_rank0(lambda: note(folder.path, target, step))

        if finished or trained.when_interrupted:
            write(target_of(folder, self.parts), self.state.step)
        if finished:
            write_best(self.state, best_of(folder, self.parts), write)

    def spike_guard(self) -> SpikeGuard:
        """The judge of the steps.

        Its window is filled from the events of the steps before, so a resumed run judges as an unbroken one.
        """
        from unfreeze.train.guards import WINDOW, SpikeGuard

        state = self.state
        before = of_kind(read_events(state.run.path / "events.jsonl"), TrainEvent) if state.step else []
        history = [
            (loss, norm)
            for event in before
            if event["step"] <= state.step
            and (loss := event.get("loss")) is not None
            and (norm := event.get("grad_norm")) is not None
        ]
        # only process 0 has the events of the steps before, and all must judge alike
        history = json.loads(self.group.texts(json.dumps(history[-WINDOW:]))[0])
        return SpikeGuard(
            self.model,
            self.objective,
            state.run.path,
            recompute=self.recompute,
            on_spike=self.on_spike,
            max_norm=self.max_norm,
            step=state.step,
            describe=self.describe,
            history=history,
            shown=state.run.shown,
        )


def prepare(
    config: TrainingConfig,
    parts: Parts,
    common: Common,
    device: torch.device,
    group: Group,
    folder: Run,
    start: Manifest | None = None,
    plans: list[Plan] | None = None,
) -> Job:
    """From the config to a model, batches and a state: new, or as the folder's last save left them.

    What cannot work is refused by the cheapest check first: names and shapes, then the rows, then the plan.
    Only then is a weight read. plans: the plan is put there.
    """
    from unfreeze import models
    from unfreeze.generate.model import Model, end_ids
    from unfreeze.parallel.mesh import mesh_of
    from unfreeze.train.state import start_or_resume

    data, training, optimizer = config.data, config.training, config.optimizer
    tokens = config.tokens_per_micro_batch

    # names, dtypes, shapes; no tensor is read
    start = start or start_of(config, parts, common, group)
    base = group.of_first(weights_digest(start).encode() if group.rank == 0 else b"").decode()
    refuse_other_base(folder, config.model, base)
    parts.trained.check(start)
    shape = models.shape(start.config)
    tokenizer = open_tokenizer(folder, data, start.path)
    check_vocabulary(tokenizer, shape, start)
    if parts.second is not None:
        parts.second.check(start, tokenizer)
    possible_places(config, parts.trained, start, shape, device, group.size)  # refused before the rows

    # rows -> conversations -> tokens and weights
    dataset, followed = encode(
        folder,
        data,
        tokenizer,
        shape.max_positions,
        tokens,
        config.seed,
        training,
        group,
        quiet=common.quiet,
        **parts.encoding,
    )
    refuse_other_rows(folder, dataset.validation, data)
    second = parts.second
    if second is not None:
        second.known(dataset.examples)

    # bytes, with arithmetic; refuses what does not fit
    lengths = dataset.examples.document_lengths().tolist()
    settle_kernels(device, config.memory.dtype, lengths, shape, start, folder, group)
    length = sequence_length(data, document_tokens(parts.encoding, tokens), shape.max_positions)
    longest = None if dataset.stream is None else length  # of rows that are not encoded yet nobody knows
    plan = agreed_plan(config, parts.trained, start, shape, device, lengths, folder, group, longest, second)
    if plans is not None:
        plans.append(plan)
    if parts.rewrite is not None:
        refuse_answers(plan)
    memory = config.memory.model_copy(update={"recompute": plan.work.recompute})
    predicted = predicted_ops(device, config.memory.dtype)
    disk = disk_of(config, parts.trained, start, plan)
    lines = [*start_lines(config, parts.trained, start, shape, plan, disk, second), *parts.said]
    lines.append(dtype_line(config.memory.dtype, device))
    note = export_note(parts.trained.lora, start, shape)
    emit_plan(folder, plan, group, lines, predicted, disk=disk, note=note)
    group.on_rank0(lambda: check_room(disk, folder, parts.trained.name))
    warn_slow(folder, config, device)

    # the model, with what trains
    mesh = mesh_of(group, plan.work.split, shape.num_experts)
    held = mesh.held if mesh.split > 1 else None
    group.lockstep = held is not None or plan.work.divided or plan.work.rest == "peers"
    if plan.work.divided:
        model, held = load_divided(start, config.memory.dtype, config.seed, device, folder, common, group)
    else:
        model = load(start, config.memory.dtype, config.seed, device, folder, common, mesh, plan.work)
    keep_boundary(model, plan.work, device)
    parts.trained.attach(model)
    objective = second.objective(model, device, config.memory.dtype) if second else parts.objective

    # the order of the data, from where the last save was; and how many steps that is
    ordered = partial(batches_in, data, dataset, tokens=tokens, seed=config.seed, packing=training.packing)
    batches = ordered(start=folder.cursor)
    if second is not None:
        batches.fill = second.fill
    steps = num_steps(training, batches, config.memory.micro_batches)
    if folder.step == 0 and (few := few_steps(training, steps))[0]:
        folder.events.emit("warning", 0, message=": ".join(few))

    if parts.begin is not None:
        asked = steps * config.memory.micro_batches
        more = {"dtype": config.memory.dtype, "folder": folder.path, "group": group, "say": say(common)}
        first = ordered(start={**folder.cursor, "epoch": 0, "position": 0} if folder.cursor else None)
        first_asked(parts.begin, model, first, dataset, asked, **more)

    # weights, optimizer and schedule: new, or as the last save has them
    state = start_or_resume(
        folder,
        model,
        optimizer=optimizer_of(model, optimizer, plan.work, device, held),
        schedule=schedule_of(optimizer, steps),
        after_update=parts.after_update(model),
    )
    state.base = base
    write_resolved(folder, config, parts.recipe, steps=steps, sequence_length=length, device=str(device))
    if not state.finished:
        group.on_rank0(lambda: forget(folder.path))

    # what looks at steps: samples and validation
    speaker = Model(model, tokenizer, stop_ids=end_ids(start, tokenizer))
    watch = config.watch
    own = own_prompts(watch.prompts, tokenizer, chat=parts.chat)
    count = watch.samples
    if plan.work.experts != "device" or plan.work.rest != "device":
        refuse_samples(folder, plan, count, own, held_out=bool(data.validation or data.validation_fraction))
        count, own = 0, []
    held_out = dataset.validation  # what training never sees shows more than what it may know by heart
    samples = Samples(
        folder,
        speaker,
        tokenizer,
        data.files if not held_out else data.held_out or data.files,
        held_out or dataset.examples,
        count,
        own,
        group=group,
        columns=data.columns,
        answers=parts.encoding.get("answers", "taught"),
        source="held-out data" if held_out else "training data",
    )
    measured = parts.heldout
    validation = validation_of(
        state,
        dataset,
        tokenizer,
        samples,
        group,
        tokens=tokens,
        every=watch.validate_every,
        patience=watch.early_stop,
        saves=config.save,
        heldout_of=partial(measured, objective=objective) if measured else None,
    )
    return Job(
        parts,
        config.model,
        memory,
        config.save,
        watch.on_spike,
        optimizer.clip,
        mesh,
        device,
        start,
        dataset,
        batches,
        model,
        state,
        samples,
        validation,
        describer(dataset, tokenizer),
        followed,
        objective,
    )


def open_start(model: str, common: Common) -> Manifest:
    """Where training starts: a checkpoint (folder or id), or a folder with config.json and no weights.

    Of the latter the manifest has no tensors.
    """
    from unfreeze.checkpoint import Manifest, open_checkpoint
    from unfreeze.checkpoint.manifest import read_json

    path = Path(model)
    if (path / "config.json").is_file() and not list(path.glob("*.safetensors")):
        return Manifest(path=path, config=read_json(path / "config.json"), tensors={}, prefix="", files=())
    return open_checkpoint(model, progress=say(common))


def open_weights(model: str, common: Common) -> Manifest:
    """A checkpoint that has weights: a folder, or an id org/name."""
    from unfreeze.checkpoint import open_checkpoint

    return open_checkpoint(model, progress=say(common))
