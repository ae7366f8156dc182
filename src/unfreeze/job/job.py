"""`run(config, parts)` runs every kind of training, from start to end.

A recipe defines its own parts (Parts): the starting model, the trained weights, the loss, the encoding of
rows. Everything else is common and here: folder and lock, plan, model, resuming, samples, validation, guards,
receipt, report.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unfreeze.config.training import TrainingConfig
from unfreeze.core.command import Common
from unfreeze.core.errors import ConfigError
from unfreeze.core.garbage import take_up
from unfreeze.core.run_folder import refuse_other_files
from unfreeze.core.torchrun import started
from unfreeze.job.data import describer
from unfreeze.job.end.folder import live, refuse_other_data
from unfreeze.job.end.result import finish
from unfreeze.job.end.written import is_noted, note
from unfreeze.job.merge_aware import MergeAware
from unfreeze.job.opening.device import pick_device, say
from unfreeze.job.opening.kernels import KernelChoices
from unfreeze.job.opening.precision import expected, settled
from unfreeze.job.opening.processes import agreed_together, alone, opened_start, refuse_uneven
from unfreeze.job.opening.streaming import saved_before
from unfreeze.job.parts import Parts
from unfreeze.job.planning.plan import as_it_began
from unfreeze.job.planning.residency import transfers_of
from unfreeze.job.planning.shortage import refused_when_short
from unfreeze.job.setup import EncodedData, Placed, Setup, begun, encoded, opened, placed, planned, watched
from unfreeze.job.watch.forecast import ForecastOnce
from unfreeze.job.watch.receipts import receipt_of
from unfreeze.job.watch.validation import best_is_written, write_best

if TYPE_CHECKING:
    import torch

    from unfreeze.checkpoint import Manifest
    from unfreeze.core.layout import Layout
    from unfreeze.data import Source
    from unfreeze.job.watch.evaluation import Evaluation
    from unfreeze.job.watch.samples import Samples
    from unfreeze.job.watch.validation import Validation
    from unfreeze.kernels.precision import Precision
    from unfreeze.models.recompute import RecomputePolicy
    from unfreeze.parallel.plan import Plan
    from unfreeze.parallel.processes.collectives import Group
    from unfreeze.train.fit import OnStep
    from unfreeze.train.run import Run
    from unfreeze.train.state import State
    from unfreeze.train.suspects import Describe


def run(config: TrainingConfig, parts: Parts, common: Common, command: str = "") -> dict[str, Any]:
    """Train, or resume an unfinished run in the same folder.

    command: the user's command, shown when it must be repeated.
    -> the run's result, from `finish`.
    """
    # refuse early: without torch, before creating a folder
    refuse_other_files(config.run_dir)
    refuse_uneven(config)
    manifest = alone(config, parts, common)

    from unfreeze.kernels.choice.ahead import compiling

    memory = config.memory
    with compiling(memory.device, memory.threads, expected(config)):  # before torch is imported
        device = pick_device(memory.device, memory.threads)

        from unfreeze.parallel.processes.collectives import open_group

        plans: list[Plan] = []
        with refused_when_short(plans), ExitStack() as stack:
            stack.callback(parts.close)
            group = stack.enter_context(open_group(device, config.run_dir))
            config, start = manifest or agreed_together(config, parts, common, group)
            config, dtype = settled(as_it_began(config, group), start, device, group)
            with no_target_first(config, parts, common):
                folder = stack.enter_context(live(config, common, parts.recipe, command, group))
            end = partial(
                finish, folder.path, common, command, **parts.trained.as_result(target_of(folder, parts))
            )
            if group.any(is_written(folder, parts)):
                group.on_rank0(lambda: refuse_other_data(config.data, folder))
                return group.on_rank0(lambda: end(already_finished=True)) or {}
            job = open_job(config, parts, common, device, group, folder, dtype, start, plans)
            job.write(finished=job.fit())
            return group.on_rank0(lambda: end(best=job.state.best)) or {}


@contextmanager
def no_target_first(config: TrainingConfig, parts: Parts, common: Common) -> Generator[None]:
    """When new lora.targets are refused for this folder, report first those that match no module."""
    try:
        yield
    except ConfigError as error:
        lora = parts.trained.lora
        if lora is not None and "lora.targets" in error.message and started().size == 1:
            import torch

            from unfreeze import models
            from unfreeze.models.targets import resolve

            start = opened_start(config, parts, common)
            resolve(models.meta_model(models.shape(start.config), start, torch.float32), lora.targets)
        raise


def target_of(folder: Run, parts: Parts) -> Path:
    """Folder for the trained adapter or model."""
    return folder.path / parts.trained.name


def best_of(folder: Run, parts: Parts) -> Path:
    """Folder for the best validated save, used if it is not the last."""
    return folder.path / f"{parts.trained.name}-best"


def is_written(folder: Run, parts: Parts) -> bool:
    """True if the run is finished and all its results are written and up to date."""
    target = target_of(folder, parts)
    written = (target / parts.trained.marker).is_file() and is_noted(folder.path, target)
    return folder.finished and written and best_is_written(folder, best_of(folder, parts))


@dataclass
class Job:
    """A run, ready for its next step."""

    setup: Setup
    rows: EncodedData
    layout: Layout
    placed: Placed
    source: Source
    state: State
    samples: Samples
    validation: list[Validation | Evaluation]
    first: list[MergeAware]

    @property
    def config(self) -> TrainingConfig:
        return self.setup.config

    @property
    def group(self) -> Group:
        """All processes of the run."""
        return self.setup.group

    @cached_property
    def describe(self) -> Describe:
        """Function that describes a document for suspects.jsonl."""
        return describer(self.rows.dataset, self.setup.tokenizer)

    def fit(self) -> bool:
        """Run the training loop with all hooks.

        -> True if the run reached its last step, False if it was interrupted and saved.
        """
        from unfreeze.train.fit import fit
        from unfreeze.train.memory import reset_peak_bytes
        from unfreeze.train.timer import Saves

        state, saves = self.state, self.config.save
        if state.step == 0:
            self.samples.say("before", 0)
        for hook in self.validation:
            hook.first()
        for measure in self.setup.parts.before if state.step == 0 else ():
            measure(self)
        reset_peak_bytes(self.setup.device)
        take_up()  # all imports are done
        with saved_before(state, saves.keep, self.rows.dataset.stream is not None, self.group):
            fitted = fit(
                state,
                self.source,
                self.placed.objective,
                recompute=self.recompute,
                max_norm=self.config.optimizer.clip,
                saves=Saves(saves.every, saves.minutes, saves.keep, saves.on_full_disk),
                group=self.group,
                judge=self.setup.parts.judge(self),
                describe=self.describe,
                on_step=self.hooks(),
            )
        if fitted.reason == "done":
            self.samples.say("after", state.step)
        return fitted.reason == "done"

    @cached_property
    def recompute(self) -> RecomputePolicy:
        """Activation recompute policy: which activations a layer keeps for backward."""
        from unfreeze.models import recompute_policy

        return recompute_policy(self.layout.recompute, self.state.model.layers, self.layout.keep_layers)

    def hooks(self) -> list[OnStep]:
        """Hooks called after each step: transfers, kernels, receipt, validation, then the recipe's own."""
        parts = self.setup.parts
        receipt = receipt_of(self.state, self.rows.dataset, self.group, stop=parts.trained.strict)
        return [
            *self.first,
            *transfers_of(self.state.model),
            KernelChoices(self.config.memory.dtype),
            *receipt,
            *self.validation,
            *self.rows.followed,
            *parts.on_step,
            ForecastOnce(self.config.save, self.config.watch, validates=bool(self.validation)),
        ]

    def write(self, *, finished: bool) -> None:
        """Write the result at the end or on interruption, and the best save if it was an earlier one."""
        for account in self.rows.followed:
            account.end(self.state)
        setup, folder, trained = self.setup, self.state.run, self.setup.parts.trained

        def write(target: Path, step: int) -> None:
            there = (target / trained.marker).is_file() and is_noted(folder.path, target)
            if self.group.any(self.group.rank == 0 and there):
                return
            trained.write(self.state, setup.start, setup.config.model, self.placed.mesh, target)
            self.group.on_rank0(lambda: note(folder.path, target, step))

        if finished or trained.when_interrupted:
            write(target_of(folder, setup.parts), self.state.step)
        if finished:
            write_best(self.state, best_of(folder, setup.parts), write)


def open_job(
    config: TrainingConfig,
    parts: Parts,
    common: Common,
    device: torch.device,
    group: Group,
    folder: Run,
    dtype: Precision,
    start: Manifest | None = None,
    plans: list[Plan] | None = None,
) -> Job:
    """Build model, source and state from the config, new or restored from the folder's last save.

    The steps are those of setup.py. dtype: the resolved dtype and its reason. plans: the plan is appended to
    it.
    """
    setup = opened(config, parts, common, device, group, folder, dtype, start)
    rows = encoded(setup)
    parts.rows_check(setup, rows)
    plan, model = planned(setup, rows)
    if plans is not None:
        plans.append(plan)
    at = placed(setup, plan, model)
    source, state = begun(setup, rows, plan, at)
    first = parts.trained.hooks(setup.start)
    for hook in first:
        hook.first(state)
    samples, validation = watched(setup, rows, plan, at, state)
    return Job(setup, rows, plan.layout, at, source, state, samples, validation, first)


def open_start(model: str, common: Common) -> Manifest:
    """Open the starting model: a checkpoint (folder or id), or a folder with config.json and no weights.

    In the latter case the manifest has no tensors.
    """
    from unfreeze.checkpoint import Manifest, open_checkpoint
    from unfreeze.checkpoint.manifest import read_json

    path = Path(model)
    if (path / "config.json").is_file() and not list(path.glob("*.safetensors")):
        return Manifest(path=path, config=read_json(path / "config.json"), tensors={}, prefix="", files=())
    return open_checkpoint(model, progress=say(common))


def open_weights(model: str, common: Common) -> Manifest:
    """Open a checkpoint with weights: a folder, or an id org/name."""
    from unfreeze.checkpoint import open_checkpoint

    return open_checkpoint(model, progress=say(common))
