"""What a run is, once: `run(config, parts)` is the table of contents of every kind of training.

A recipe says in Parts what is its own: where training starts, what trains, what is minimised, how rows are read. Everything else (folder and
lock, plan, model, resuming, samples, validation, guards, receipt, report) is the same for all and stands here.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unfreeze.config.training import TrainingConfig
from unfreeze.core.command import Common
from unfreeze.core.units import format_bytes, format_count
from unfreeze.job.data import (
    batches_of,
    check_vocabulary,
    describer,
    encode,
    num_steps,
    open_tokenizer,
    schedule_of,
    sequence_length,
)  # fmt: skip
from unfreeze.job.device import allocator_line, pick_device, say
from unfreeze.job.end import finish
from unfreeze.job.folder import live, refuse_absent, refuse_other_data, write_json, write_resolved
from unfreeze.job.receipts import receipt_of
from unfreeze.job.samples import Samples, own_prompts
from unfreeze.job.trained import Trained
from unfreeze.job.validation import Validation, best_is_written, validation_of, write_best
from unfreeze.report.events import of_kind, read_events
from unfreeze.tracking.live import LoadProgress

if TYPE_CHECKING:
    import torch

    from unfreeze.checkpoint import Manifest
    from unfreeze.checkpoint.stream import LoadStats
    from unfreeze.data import Batches, Dataset
    from unfreeze.models import Decoder, Shape
    from unfreeze.parallel.collectives import Group
    from unfreeze.parallel.plan import Plan
    from unfreeze.train.fit import OnStep
    from unfreeze.train.guards import SpikeGuard
    from unfreeze.train.run import Run
    from unfreeze.train.state import AfterUpdate, State
    from unfreeze.train.step import Objective
    from unfreeze.train.suspects import Describe


FEW_STEPS = 20  # of a run whose number of steps follows from its data; the warm-up alone is about one


@dataclass(frozen=True)
class Parts:
    """What makes a kind of training.

    recipe        its name on the command line
    trained       what trains and is left behind: Adapters | AllWeights
    objective     what is minimised
    start         the model's name -> where training starts
    encoding      how rows become examples (data.encode_files: supervise, turns, reasoning)
    after_update  what changes the model after an update, such as the balancing bias
    chat          whether prompts of the user's own are asked as messages (else continued)
    on_step       called with (state, result) after each step, behind receipt and validation
    """

    recipe: str
    trained: Trained
    objective: Objective
    start: Callable[[str, Common], Manifest]
    encoding: Mapping[str, Any] = field(default_factory=dict)
    after_update: Callable[[Decoder], Sequence[AfterUpdate]] = lambda model: ()
    chat: bool = True
    on_step: Sequence[OnStep] = ()


def run(config: TrainingConfig, parts: Parts, common: Common, command: str = "") -> dict[str, Any]:
    """Train as the config says; goes on where an unfinished run in the same folder stopped. -> the run's result, as `finish` gives it.

    `command` is what the user typed, to be shown where the run must be given again.
    """
    from unfreeze.parallel.collectives import open_group

    refuse_absent(config.files)
    device = pick_device(config.device, config.threads)
    with open_group(device) as group, live(config, common, parts.recipe, command, group) as folder:
        end = partial(finish, config, common, command, **parts.trained.as_result(target_of(folder, parts)))
        if group.any(is_written(folder, parts)):
            group.lead(lambda: refuse_other_data(config, folder))
            return group.lead(lambda: end(already_finished=True)) or {}
        job = prepare(config, parts, common, device, group, folder)
        job.write(finished=job.fit())
        return group.lead(lambda: end(best=job.state.best)) or {}


def target_of(folder: Run, parts: Parts) -> Path:
    """Where what was trained is written."""
    return folder.path / parts.trained.name


def best_of(folder: Run, parts: Parts) -> Path:
    """Where the best of the validated saves is written, if it is not the last."""
    return folder.path / f"{parts.trained.name}-best"


def is_written(folder: Run, parts: Parts) -> bool:
    """Whether the run is finished and everything it leaves behind is there."""
    written = (target_of(folder, parts) / parts.trained.marker).is_file()
    return folder.finished and written and best_is_written(folder, best_of(folder, parts))


@dataclass
class Job:
    """A run that is ready for its next step."""

    config: TrainingConfig
    parts: Parts
    group: Group
    device: torch.device
    start: Manifest
    dataset: Dataset
    batches: Batches
    model: Decoder
    state: State
    samples: Samples
    validation: list[Validation]
    describe: Describe

    def fit(self) -> bool:
        """The loop, with everything that looks at a step. -> whether the run reached its last step (else it was interrupted, and saved)."""
        from unfreeze.models import through
        from unfreeze.train.fit import fit
        from unfreeze.train.memory import reset_peak_bytes

        config, state = self.config, self.state
        if state.step == 0:
            self.samples.say("before", 0)
        for hook in self.validation:
            hook.first()
        reset_peak_bytes(self.device)
        fitted = fit(
            state, self.batches, self.parts.objective,
            through=through(config.recompute, self.model.layers, config.keep_layers),
            micro_batches=config.micro_batches, max_norm=config.clip,
            save_every=config.save_every, keep_saves=config.keep_saves, on_full_disk=config.on_full_disk,
            group=self.group, judge=self.spike_guard(), describe=self.describe,
            on_step=self.hooks(),
        )  # fmt: skip
        if fitted.reason == "done":
            self.samples.say("after", state.step)
        return fitted.reason == "done"

    def hooks(self) -> list[OnStep]:
        """What looks at each finished step: the receipt, validation, then the recipe's own."""
        receipt = receipt_of(self.state, self.dataset, self.group, stop=self.parts.trained.strict)
        return [*receipt, *self.validation, *self.parts.on_step]

    def write(self, *, finished: bool) -> None:
        """What was trained, at the end or at an interruption; and the best save, where that was an earlier one."""
        folder, trained = self.state.run, self.parts.trained
        write = partial(trained.write, self.state, self.start, self.config.model)
        if finished or trained.when_interrupted:
            self.group.lead(lambda: write(target_of(folder, self.parts)))
        if finished:
            self.group.lead(lambda: write_best(self.state, best_of(folder, self.parts), write))

    def spike_guard(self) -> SpikeGuard:
        """The judge of the steps: its window is filled from the events of the steps before, so a resumed run judges as an unbroken one."""
        from unfreeze.models import through
        from unfreeze.train.guards import SpikeGuard

        config, state = self.config, self.state
        before = of_kind(read_events(config.run_dir / "events.jsonl"), "train") if state.step else []
        return SpikeGuard(
            self.model, self.parts.objective, state.run.path, through=through(config.recompute, self.model.layers, config.keep_layers),
            on_spike=config.on_spike, max_norm=config.clip, step=state.step, describe=self.describe,
            history=[(event["loss"], event["grad_norm"]) for event in before if event["step"] <= state.step],
        )  # fmt: skip


def prepare(config: TrainingConfig, parts: Parts, common: Common, device: torch.device, group: Group, folder: Run) -> Job:
    """From the config to a model, batches and a state: new, or as the folder's last save left them.

    Refuses what cannot work in the order of its cost: names and shapes, then the rows, then the plan, and only then reads a weight.
    """
    from unfreeze import models
    from unfreeze.generate.model import Model, end_ids
    from unfreeze.train.optim import AdamW
    from unfreeze.train.state import start_or_resume

    # names, dtypes, shapes; no tensor is read
    start = parts.start(config.model, common)
    parts.trained.check(start)
    shape = models.shape(start.config)
    tokenizer = open_tokenizer(folder, config, start.path)
    check_vocabulary(tokenizer, shape, start)

    # rows -> conversations -> tokens and weights
    dataset = encode(folder, config, tokenizer, shape.max_positions, **parts.encoding)

    # bytes, with arithmetic; refuses what does not fit
    plan = plan_of(config, parts.trained, start, shape, device)
    emit_plan(folder, plan, group, start_lines(config, parts.trained, start, shape, plan))

    model = load(start, config, device, folder, common)
    parts.trained.attach(model)

    batches = batches_of(config, dataset.examples, start=folder.cursor)
    steps = num_steps(config, batches)
    if folder.step == 0 and config.steps is None and steps < FEW_STEPS:
        more = f"--epochs {math.ceil(config.epochs * FEW_STEPS / steps):,}, or --tokens-per-step {max(2, config.tokens_per_step // 8):,}"
        message = f"{config.epochs:g} epochs of this data are only {steps} steps of {config.tokens_per_step:,} tokens, which teach little: {more}"
        folder.events.emit("warning", 0, message=message)
    state = start_or_resume(
        folder, model, optimizer=AdamW(model, weight_decay=config.weight_decay, moments=config.optimizer_moments),
        schedule=schedule_of(config, steps), after_update=parts.after_update(model),
    )  # fmt: skip
    length = sequence_length(config, shape.max_positions)
    write_resolved(folder, config, parts.recipe, steps=steps, sequence_length=length, device=str(device))

    speaker = Model(model, tokenizer, stop_ids=end_ids(start, tokenizer))
    own = own_prompts(config.prompts, tokenizer, chat=parts.chat)
    samples = Samples(folder, speaker, tokenizer, config.data, dataset.examples, config.samples, own)
    validation = validation_of(config, state, dataset, tokenizer, samples, group)
    return Job(config, parts, group, device, start, dataset, batches, model, state, samples, validation, describer(dataset, tokenizer))


def plan_of(config: TrainingConfig, trained: Trained, start: Manifest, shape: Shape, device: torch.device) -> Plan:
    """What the run will take, term by term. The doctor asks the same."""
    from unfreeze.adapters.receipt import COPY_BYTES
    from unfreeze.parallel.plan import plan_training

    return plan_training(
        shape, start, trained.lora, tokens=config.tokens_per_micro_batch, dtype=config.dtype, device=device,
        micro_batches=config.micro_batches, longest=sequence_length(config, shape.max_positions),
        recompute=config.recompute, keep_layers=config.keep_layers, optimizer_moments=config.optimizer_moments,
        receipt_bytes=COPY_BYTES,
    )  # fmt: skip


def emit_plan(folder: Run, plan: Plan, group: Group, lines: Sequence[str] = ()) -> None:
    """Write and show the plan, then refuse what does not fit. On CUDA it says how the allocator was set (docs/trust.md L2).

    lines: what a terminal shows instead of the whole plan (start_lines).
    """
    fields = plan.as_dict() | ({"start": list(lines)} if lines else {})
    if group.size > 1:
        fields["lines"] = [*fields["lines"], f"  {group.size} processes, each with this plan; process 0 speaks, and what it measures is its own"]
    if plan.hardware.kind == "cuda":
        line, grows = allocator_line()
        fields["lines"] = [*fields["lines"], f"  {line}"]
        fields |= {} if grows else {"warning": line}
    write_json(folder.path / "plan.json", fields)
    folder.events.emit("plan", folder.step, **fields)
    plan.refuse_if_too_large()


def start_lines(config: TrainingConfig, trained: Trained, start: Manifest, shape: Shape, plan: Plan) -> list[str]:
    """The plan in three lines: what is trained on what, and what that takes."""
    experts = f", {shape.experts_per_token} of {shape.num_experts} experts a token" if shape.num_experts else ""
    files = f"{format_bytes(start.nbytes)} in files" if start.tensors else "no weights yet"
    written, free = disk_bytes(config, trained, start, plan)
    if trained.lora is None:
        what = "every weight"
    else:
        ranks = f"rank {trained.lora.rank}" + (f", experts {trained.lora.experts_rank}" if trained.lora.experts_rank else "")
        what = f"adapters of {ranks} on {', '.join(trained.lora.targets)}, {format_count(plan.adapter_parameters)} parameters"
    return [
        f"model: {Path(config.model).name}, {shape.model_type}, {shape.num_layers} layers{experts}; {files}",
        f"memory: {format_bytes(plan.total)} planned, {format_bytes(plan.usable)} usable; disk: {format_bytes(written)} of {format_bytes(free)} free",
        f"trains: {what}; {config.tokens_per_step:,} tokens a step",
    ]


def disk_bytes(config: TrainingConfig, trained: Trained, start: Manifest, plan: Plan) -> tuple[int, int]:
    """(what the run writes at most, what is free where it writes): saves of the state, one more than are kept, and the result."""
    folder = config.run_dir.absolute()
    existing = next(path for path in (folder, *folder.parents) if path.is_dir())
    each = (plan.terms["adapter"] or plan.terms["base"]) + plan.terms["optimizer"]
    written = (config.keep_saves + 1) * each + trained.written_bytes(start, plan.terms["adapter"])  # a save is whole before an old one goes
    return written, shutil.disk_usage(existing).free


def load(start: Manifest, config: TrainingConfig, device: torch.device, folder: Run, common: Common) -> Decoder:
    """The checkpoint's weights, or random ones from the config's seed where it has none. Bytes and seconds as a "load" event."""
    from unfreeze import models
    from unfreeze.generate.open import dtype_of, notes, open_model

    def loaded(stats: LoadStats) -> None:
        folder.events.emit("load", folder.step, **asdict(stats))

    def warn(message: str) -> None:
        if folder.step == 0:  # a resumed run doesn't repeat the warnings of its start
            folder.events.emit("warning", 0, message=message)

    dtype = dtype_of(config.dtype)
    if start.tensors:
        with LoadProgress(quiet=common.quiet) as progress:
            return open_model(start, dtype, device, progress, loaded, warn)
    for note in notes(start.config):
        warn(note)
    model = models.build(models.shape(start.config), dtype=dtype, device=device)
    models.initialize(model, config.seed)
    return model


def open_start(model: str, common: Common) -> Manifest:
    """Where training starts: a checkpoint (folder or id), or a folder with config.json and no weights: a manifest without tensors."""
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
