"""The steps of a run before training, from the cheapest to the most expensive.

    opened   names, dtypes, shapes: Setup. Reads no row and no weight
    encoded  rows -> conversations -> tokens and loss weights: EncodedData
    planned  memory arithmetic; refuses a run that does not fit
    placed   model and adapters, loaded to their planned places: Placed
    begun    data order, optimizer, schedule: new, or restored from the last save
    watched  samples and validation, to run between steps

Each fault is reported by the first step that can find it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from unfreeze.checkpoint.same import weights_digest
from unfreeze.config.training import TrainingConfig
from unfreeze.core.command import Common
from unfreeze.job.data import (
    both_given,
    check_vocabulary,
    document_tokens,
    encode,
    few_steps,
    num_steps,
    open_tokenizer,
    schedule_of,
    sequence_length,
)
from unfreeze.job.end.folder import write_resolved
from unfreeze.job.end.resume import refuse_other_base
from unfreeze.job.end.written import forget_written
from unfreeze.job.opening.added import unused_tokens, with_new_tokens
from unfreeze.job.opening.device import say
from unfreeze.job.opening.kernels import predicted_ops, settle_kernels
from unfreeze.job.opening.loading import load_divided, load_weights
from unfreeze.job.opening.precision import dtype_line, warn_device
from unfreeze.job.opening.processes import start_of
from unfreeze.job.opening.streaming import Followed
from unfreeze.job.parts import Parts
from unfreeze.job.planning.plan import (
    Planning,
    agreed_plan,
    check_room,
    disk_of,
    emit_plan,
    export_hint,
    if_packed,
    start_lines,
    time_line,
)
from unfreeze.job.planning.residency import clips_of, keep_boundary, optimizer_of, refuse_samples
from unfreeze.job.source import with_second
from unfreeze.job.watch.evaluation import Evaluation, refuse_far, tasks_of_run
from unfreeze.job.watch.samples import Samples, of_the_first, own_prompts
from unfreeze.job.watch.validation import Validation, refuse_other_rows, validation_of

if TYPE_CHECKING:
    import torch

    from unfreeze.checkpoint import Manifest
    from unfreeze.data import Dataset, Source, Tokenizer
    from unfreeze.evaluate.tasks import Task
    from unfreeze.generate.model import Model
    from unfreeze.kernels.precision import Precision
    from unfreeze.models import Decoder, Shape
    from unfreeze.parallel.plan import Plan
    from unfreeze.parallel.processes.collectives import Group
    from unfreeze.parallel.processes.mesh import HeldPart, Mesh
    from unfreeze.train.run import Run
    from unfreeze.train.state import State
    from unfreeze.train.step import Objective


@dataclass(frozen=True)
class Setup:
    """Config and environment of a run.

    config   resolved: no "auto" except in `place`
    dtype    the config's dtype and its reason
    group    all processes of the run
    folder   the run folder, with its events
    start    manifest of the starting model: names, dtypes, shapes
    base     digest of its weights
    """

    config: TrainingConfig
    parts: Parts
    common: Common
    device: torch.device
    dtype: Precision
    group: Group
    folder: Run
    start: Manifest
    base: str
    shape: Shape
    tokenizer: Tokenizer

    @property
    def planning(self) -> Planning:
        """Inputs of the plan that are known before the rows."""
        subject = self.config, self.parts.trained, self.start, self.shape, self.device
        second, answers = self.parts.second, self.parts.answers
        return Planning(*subject, processes=self.group.size, second=second, answers=answers)


@dataclass(frozen=True)
class EncodedData:
    """The run's documents. followed: hooks that emit statistics of rows encoded during training.

    tasks: of [watch] eval, checked
    """

    dataset: Dataset
    followed: list[Followed]
    tasks: Sequence[Task] = ()


@dataclass(frozen=True)
class Placed:
    """The model in memory, with its trained parts.

    speaker  the same model, for generating answers
    held     name -> this process's part of a sharded weight
    """

    model: Decoder
    speaker: Model
    mesh: Mesh
    held: Callable[[str], HeldPart] | None
    objective: Objective


def opened(
    config: TrainingConfig,
    parts: Parts,
    common: Common,
    device: torch.device,
    group: Group,
    folder: Run,
    dtype: Precision,
    start: Manifest | None,
) -> Setup:
    """Open names, dtypes and shapes; read no tensor. Raises UserError for incompatible parts."""
    from unfreeze import models

    start = start or start_of(config, parts, common, group)
    base = group.of_first(weights_digest(start).encode() if group.rank == 0 else b"").decode()
    refuse_other_base(folder, config.model, base)
    parts.trained.check(start)
    shape = models.shape(start.config)
    tokenizer = open_tokenizer(folder, config.data, start.path)
    check_vocabulary(tokenizer, shape, start)
    tokenizer, start = with_new_tokens(parts.trained, tokenizer, start, folder, config.data)
    if parts.second is not None:
        parts.second.check(start, tokenizer)
    setup = Setup(config, parts, common, device, dtype, group, folder, start, base, shape, tokenizer)
    setup.planning.layouts()  # refuses an impossible layout before reading rows
    return setup


def encoded(setup: Setup) -> EncodedData:
    """Encode the rows to tokens and loss weights, with statistics."""
    config, parts = setup.config, setup.parts
    tasks = tasks_of_run(config.watch, config.data, setup.folder, setup.group)
    dataset, followed = encode(
        setup.folder,
        config.data,
        setup.tokenizer,
        setup.shape.max_positions,
        config.tokens_per_micro_batch,
        config.seed,
        config.training,
        setup.group,
        quiet=setup.common.quiet,
        **parts.encoding,
    )
    refuse_other_rows(setup.folder, dataset.validation, config.data)
    if parts.second is not None:
        parts.second.known(dataset.examples)
    return EncodedData(dataset, followed, tasks)


def planned(setup: Setup, rows: EncodedData) -> tuple[Plan, Decoder]:
    """Return (plan, the same on all processes; model on meta). Raises DoesNotFit with the arithmetic."""
    config, parts, folder, group = setup.config, setup.parts, setup.folder, setup.group
    dtype = setup.dtype.name
    lengths = rows.dataset.examples.document_lengths().tolist()
    settle_kernels(setup.device, dtype, lengths, setup.shape, setup.start, folder, group, say(setup.common))
    longest = (
        None if rows.dataset.stream is None else longest_of(setup)
    )  # later rows are unknown: assume the longest
    planning = replace(setup.planning, lengths=lengths, longest=longest)
    plan, model = agreed_plan(planning, folder, group), planning.model.meta
    parts.plan_check(plan)
    parts.trained.check_plan(plan, setup.start)
    refuse_far(plan, rows.tasks)
    if config.muon.qk_clip:
        from unfreeze.models.queries import scalable

        scalable(model)  # refuses a model whose heads cannot be scaled, before weights are loaded

    disk = disk_of(config, parts.trained, setup.start, plan)
    lines = start_lines(config, parts.trained, setup.start, setup.shape, plan, disk, model, parts.second)
    lines += time_line(config, setup.start, plan, sum(lengths))
    lines += [*parts.start_lines, dtype_line(setup.dtype)]
    export = export_hint(parts.trained.lora, setup.start, model)
    ops, others = predicted_ops(setup.device, dtype), if_packed(planning, plan)
    emit_plan(folder, plan, group, lines, ops, disk=disk, export=export, others=others)
    group.on_rank0(lambda: check_room(disk, folder, parts.trained.name))
    warn_device(folder, config, setup.device)
    return plan, model


def placed(setup: Setup, plan: Plan, model: Decoder) -> Placed:
    """Load the weights into the model on meta, each where the plan puts it, and attach the trained parts."""
    from unfreeze.generate.model import Model, end_ids
    from unfreeze.models.indexers import trained_indexers
    from unfreeze.models.queries import scalable
    from unfreeze.objectives.following import Following
    from unfreeze.parallel.placement.dispatch import make_room
    from unfreeze.parallel.plan.places import room
    from unfreeze.parallel.processes.mesh import mesh_of
    from unfreeze.parallel.processes.numa import bind
    from unfreeze.train.qk_clip import LargestLogits

    config, parts, layout, group = setup.config, setup.parts, plan.layout, setup.group
    mesh = mesh_of(group, layout.sharing, setup.shape.num_experts)
    held = mesh.held if mesh.split > 1 else None
    group.lockstep = held is not None or layout.sharded or layout.rest == "peers"
    if layout.experts == "host" and group.size > 1:
        bind(setup.device, group.rank)
    where = setup.device, setup.folder, setup.common
    if layout.sharded:
        model, held = load_divided(setup.start, config, *where, group)
    else:
        model = load_weights(setup.start, config, *where, mesh, layout, model)
    if mesh.split > 1:
        make_room(model, room(setup.planning.model.counts, plan.work.tokens, mesh.split))
    keep_boundary(model, layout, setup.device)
    parts.trained.attach(model, quiet=setup.common.quiet, restored=setup.folder.step > 0)
    parts.trained.agree(model, group)
    objective = parts.objective
    if parts.second is not None:
        objective = parts.second.objective(model, setup.device, config.memory.dtype)
    if layers := trained_indexers(model):
        objective = Following(objective, layers)
    objective = parts.beside(model, objective)
    if config.muon.qk_clip:
        objective = LargestLogits(objective, list(scalable(model)))
    speaker = Model(model, setup.tokenizer, stop_ids=end_ids(setup.start, setup.tokenizer))
    if group.lockstep:
        speaker.engine.agreed = partial(of_the_first, group, model.device)
    return Placed(model, speaker, mesh, held, objective)


def begun(setup: Setup, rows: EncodedData, plan: Plan, at: Placed) -> tuple[Source, State]:
    """Create data order, optimizer and schedule, or restore them from the last save."""
    from unfreeze.train.state import start_or_resume

    config, parts, folder, model = setup.config, setup.parts, setup.folder, at.model
    training = config.training
    source = parts.source(setup, rows, at, folder.cursor)
    steps = num_steps(training, source)
    if folder.step == 0 and (few := few_steps(config, steps, source.len_steps(1)))[0]:
        folder.events.emit("warning", 0, message=": ".join(few))
    if folder.step == 0 and (both := both_given(training)):
        folder.events.emit("warning", 0, message=both)
    if folder.step == 0 and (unused := unused_tokens(parts.trained, rows.dataset.examples)):
        folder.events.emit("warning", 0, message=unused)
    source = with_second(setup, rows, at, source, steps)  # can run the starting model

    optimizer = optimizer_of(model, config, plan.layout, setup.device, at.held, setup.group)
    clips = clips_of(model, config, optimizer, at.objective, setup.group)
    state = start_or_resume(
        folder,
        model,
        optimizer=optimizer,
        schedule=schedule_of(config.optimizer, steps),
        after_update=[*parts.after_update(model), *clips, *parts.trained.after_update(model)],
    )
    state.base, state.metrics = setup.base, (*parts.metrics, *getattr(at.objective, "metrics", ()))
    state.kept, state.interrupt = parts.kept, parts.interrupt
    length, device = longest_of(setup), str(setup.device)
    write_resolved(folder, config, parts.recipe, steps=steps, sequence_length=length, device=device)
    if not state.finished:
        setup.group.on_rank0(lambda: forget_written(folder.path))
    return source, state


def watched(
    setup: Setup, rows: EncodedData, plan: Plan, at: Placed, state: State
) -> tuple[Samples, list[Validation | Evaluation]]:
    """Create samples, validation and evaluation, which run between steps.

    With an evaluation its first measure chooses the best save, else the held-out loss.
    """
    from unfreeze.train.together import save_together

    config, parts, dataset = setup.config, setup.parts, rows.dataset
    data, watch, tokenizer, group = config.data, config.watch, setup.tokenizer, setup.group
    own, count = own_prompts(watch.prompts, tokenizer, chat=parts.chat), watch.samples
    if plan.layout.experts != "device" or plan.layout.rest != "device":
        holds_out = bool(data.validation or data.validation_fraction)
        refuse_samples(setup.folder, plan, count, own, held_out=holds_out)
        count, own = 0, []
    held_out = dataset.validation  # prefer unseen rows: training rows may be memorised
    samples = Samples(
        setup.folder,
        at.speaker,
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

    def keep(state: State) -> bool:
        return save_together(state, config.save.keep, config.save.on_full_disk, group) is not None

    patience = watch.early_stop
    evaluation: list[Validation | Evaluation] = []
    if rows.tasks:
        hook = Evaluation(
            state, rows.tasks, at.speaker, every=watch.eval_every, keep=keep, patience=patience, group=group
        )
        evaluation.append(hook)
    validation = validation_of(
        state,
        dataset,
        tokenizer,
        samples,
        group,
        tokens=config.tokens_per_micro_batch,
        every=watch.validate_every,
        patience=patience,
        keep=None if evaluation else keep,
        heldout_of=partial(parts.heldout, objective=at.objective) if parts.heldout else None,
    )
    return samples, [*validation, *evaluation]


def longest_of(setup: Setup) -> int:
    """Longest document in tokens that the run can take."""
    config = setup.config
    most = document_tokens(setup.parts.encoding, config.tokens_per_micro_batch)
    return sequence_length(config.data, most, setup.shape.max_positions)
