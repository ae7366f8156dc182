"""unfreeze sft run.toml: fine-tune a checkpoint on conversations with LoRA on every linear layer, routed experts included, or in full.

With adapters the base stays as it was published: 4-bit experts are trained in 4 bits. With train = "all" every weight moves, and the result is a
checkpoint in <out>/model. Loss on the assistant's turns only (on all of a `text`).
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

from pydantic import Field, model_validator

from unfreeze.adapters import LoraConfig
from unfreeze.core.command import Common
from unfreeze.recipes.config import parse
from unfreeze.recipes.device import pick_device, say
from unfreeze.recipes.first_step import receipt_of
from unfreeze.recipes.samples import Samples, own_prompts
from unfreeze.recipes.trained import Adapters, AllWeights, Trained
from unfreeze.recipes.training import (
    TrainingConfig,
    batches_of,
    check_vocabulary,
    describer,
    encode,
    finish,
    live,
    num_steps,
    open_tokenizer,
    refuse_absent,
    say_loaded,
    say_plan,
    say_warning,
    schedule_of,
    sequence_length,
    spike_guard,
    typed,
    write_resolved,
)
from unfreeze.recipes.validation import best_is_written, validation_of, write_best
from unfreeze.report.live import LoadProgress

ALL_RATE = 2e-5


class Config(TrainingConfig):
    """Everything a fine-tuning run depends on."""

    train: Literal["adapters", "all"] = Field(
        default="adapters", description="adapters: LoRA beside the frozen base; all: every weight of an unpacked checkpoint, without adapters"
    )
    learning_rate: float = Field(
        default=2e-4, gt=0, description="peak learning rate; for train = all the default is 2e-5 (a tenth, as TRL's SFT has it)"
    )
    turns: Literal["auto", "whole", "each", "last"] = Field(
        default="auto", description="examples of a conversation: one of the whole where the chat template leaves earlier turns "
        "as they were, else one per turn of the assistant (auto); always one (whole); one per turn (each); only the last turn (last)"
    )  # fmt: skip
    reasoning: Literal["auto", "inline", "drop"] = Field(
        default="auto", description="reasoning_content: taught as the release writes it, refused where it has no form (auto); as <think>…</think> in "
        "the answer (inline); left out (drop)"
    )  # fmt: skip
    lora: LoraConfig | None = Field(default_factory=lambda: LoraConfig(), description="the adapters")

    @model_validator(mode="before")
    @classmethod
    def _as_trained(cls, fields: Any) -> Any:
        """train = "all" has no adapters and another default rate; a field of the adapters beside it is a mistake, not to be passed over."""
        if not isinstance(fields, dict):
            return fields
        if fields.get("train") != "all":
            if fields.get("lora", True) is None:
                raise ValueError('train = "adapters" needs [lora]; its defaults are an empty table')
            return fields
        if fields.get("lora") is not None:
            raise ValueError('train = "all" trains every weight and has no adapters: remove [lora] and --lora flags, or give train = "adapters"')
        return {"learning_rate": ALL_RATE, **fields, "lora": None}


def main(arguments: list[str], common: Common) -> dict[str, Any]:
    """Parse, train, report. -> run, steps, loss_first, loss_last, tokens_per_second, peak_bytes, receipt."""
    config = parse(Config, arguments, command="sft", description=__doc__ or "")
    return train(config, common, typed("sft", arguments))


def train(config: Config, common: Common, command: str = "") -> dict[str, Any]:
    """The table of contents of a fine-tuning run; goes on where an unfinished run in the same folder stopped.

    `command` is what the user typed, to be shown where the run must be given again.
    """
    refuse_absent(config.files)
    trained = trained_of(config)
    device = pick_device(config.device, config.threads)

    from unfreeze import models
    from unfreeze.adapters.receipt import COPY_BYTES
    from unfreeze.checkpoint import open_checkpoint
    from unfreeze.generate.model import Model, end_ids
    from unfreeze.generate.open import dtype_of, open_model
    from unfreeze.objectives.cross_entropy import cross_entropy
    from unfreeze.parallel.collectives import open_group
    from unfreeze.parallel.plan import plan_training
    from unfreeze.train.fit import fit
    from unfreeze.train.memory import reset_peak_bytes
    from unfreeze.train.optim import AdamW
    from unfreeze.train.state import start_or_resume

    with open_group(device) as group, live(config, common, "sft", command, group) as run:
        target, best = run.path / trained.name, run.path / f"{trained.name}-best"
        if group.any(run.finished and (target / trained.marker).is_file() and best_is_written(run, best)):
            return group.lead(lambda: finish(config, common, command, already_finished=True, **trained.said(target))) or {}
        manifest = open_checkpoint(config.model, progress=say(common))
        trained.check(manifest)
        shape = models.shape(manifest.config)
        tokenizer = open_tokenizer(run, config, manifest.path)
        check_vocabulary(tokenizer, shape, manifest)
        dataset = encode(run, config, tokenizer, shape.max_positions, turns=config.turns, reasoning=config.reasoning)
        plan = plan_training(
            shape, manifest, config.lora, tokens=config.tokens_per_micro_batch, dtype=config.dtype, device=device,
            micro_batches=config.micro_batches, longest=sequence_length(config, shape.max_positions),
            recompute=config.recompute, keep_layers=config.keep_layers, optimizer_moments=config.optimizer_moments,
            receipt_bytes=COPY_BYTES,
        )  # fmt: skip
        say_plan(run, plan, group)

        with LoadProgress(quiet=common.quiet) as progress:
            model = open_model(manifest, dtype_of(config.dtype), device, progress, partial(say_loaded, run), partial(say_warning, run))
        trained.attach(model)

        batches = batches_of(config, dataset.examples, start=run.cursor)
        steps = num_steps(config, batches)
        state = start_or_resume(
            run, model, optimizer=AdamW(model, weight_decay=config.weight_decay, moments=config.optimizer_moments),
            schedule=schedule_of(config, steps),
        )  # fmt: skip
        write_resolved(run, config, "sft", steps=steps, sequence_length=sequence_length(config, shape.max_positions), device=str(device))
        speaker = Model(model, tokenizer, stop_ids=end_ids(manifest, tokenizer))
        samples = Samples(run, speaker, tokenizer, config.data, dataset.examples, config.samples, own_prompts(config.prompts, tokenizer, chat=True))
        validation = validation_of(config, state, dataset, tokenizer, samples, group)
        if state.step == 0:
            samples.say("before", 0)
        for hook in validation:
            hook.first()
        reset_peak_bytes(device)
        describe = describer(dataset, tokenizer)
        fitted = fit(
            state, batches, cross_entropy,
            through=models.through(config.recompute, model.layers, config.keep_layers),
            micro_batches=config.micro_batches, max_norm=config.clip, save_every=config.save_every, keep_saves=config.keep_saves,
            on_full_disk=config.on_full_disk,
            group=group, judge=spike_guard(config, state, cross_entropy, describe), describe=describe,
            on_step=[*receipt_of(state, dataset, group, stop=trained.strict), *validation],
        )  # fmt: skip
        if fitted.reason == "done":
            samples.say("after", state.step)
        write = partial(trained.write, state, manifest, config.model)
        if fitted.reason == "done" or trained.when_interrupted:
            group.lead(lambda: write(target))
        if fitted.reason == "done":
            group.lead(lambda: write_best(state, best, write))
        return group.lead(lambda: finish(config, common, command, best=state.best, **trained.said(target))) or {}


def trained_of(config: Config) -> Trained:
    """What `train` names."""
    return AllWeights() if config.lora is None else Adapters(config.lora, config.seed)
