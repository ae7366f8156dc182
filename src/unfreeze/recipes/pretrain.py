"""unfreeze pretrain run.toml: train all weights on text, from nothing (a folder with config.json and a tokenizer) or from a checkpoint.

Loss on every token. The result is written to <out>/model in the format its config.json declares: with a quantization_config, the modules it
names are packed to INT4 on Kimi's grid at the end.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from unfreeze.core.command import Common
from unfreeze.recipes.config import parse
from unfreeze.recipes.device import pick_device, say
from unfreeze.recipes.first_step import receipt_of
from unfreeze.recipes.samples import Samples, own_prompts
from unfreeze.recipes.trained import AllWeights
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

if TYPE_CHECKING:
    import torch

    from unfreeze.checkpoint import Manifest
    from unfreeze.models import Decoder
    from unfreeze.train.run import Run


class Config(TrainingConfig):
    """Everything a pretraining run depends on."""

    learning_rate: float = Field(default=3e-3, gt=0, description="peak learning rate; 3e-3 for models of a few million parameters, less for larger")
    weight_decay: float = Field(default=0.1, ge=0, description="decoupled weight decay on matrices; 0.1 as in GPT-3 and Llama")
    dtype: Literal["bfloat16", "float32"] = Field(default="float32", description="dtype of weights and computation; bfloat16 keeps float32 masters")
    truncation: Literal["tail", "error", "drop", "split"] = Field(default="split", description="texts longer than sequence_length are split")
    balance_rate: float = Field(
        default=0.001, ge=0, description="step of the loss-free balancing bias per optimizer step; 0: none (DeepSeek-V3: 0.001)"
    )


def main(arguments: list[str], common: Common) -> dict[str, Any]:
    """Parse, train, save. -> run, model, steps, loss_first, loss_last, tokens_per_second, peak_bytes, receipt."""
    config = parse(Config, arguments, command="pretrain", description=__doc__ or "")
    return train(config, common, typed("pretrain", arguments))


def train(config: Config, common: Common, command: str = "") -> dict[str, Any]:
    """The table of contents of a pretraining run; goes on where an unfinished run in the same folder stopped."""
    refuse_absent(config.files)
    trained = AllWeights()
    device = pick_device(config.device, config.threads)

    from unfreeze import models
    from unfreeze.adapters.receipt import COPY_BYTES
    from unfreeze.generate.model import Model, end_ids
    from unfreeze.generate.open import dtype_of
    from unfreeze.objectives.cross_entropy import cross_entropy
    from unfreeze.parallel.collectives import open_group
    from unfreeze.parallel.plan import plan_training
    from unfreeze.train.balance import LossFreeBalance
    from unfreeze.train.fit import fit
    from unfreeze.train.memory import reset_peak_bytes
    from unfreeze.train.optim import AdamW
    from unfreeze.train.state import start_or_resume

    with open_group(device) as group, live(config, common, "pretrain", command, group) as run:
        target, best = run.path / trained.name, run.path / f"{trained.name}-best"
        if group.any(run.finished and (target / trained.marker).is_file() and best_is_written(run, best)):
            return group.lead(lambda: finish(config, common, command, already_finished=True, **trained.said(target))) or {}
        start = open_start(config.model, common)
        trained.check(start)
        shape = models.shape(start.config)
        tokenizer = open_tokenizer(run, config, start.path)
        check_vocabulary(tokenizer, shape, start)
        dataset = encode(run, config, tokenizer, shape.max_positions, supervise="all")
        plan = plan_training(
            shape, start, None, tokens=config.tokens_per_micro_batch, dtype=config.dtype, device=device, recompute=config.recompute,
            keep_layers=config.keep_layers, micro_batches=config.micro_batches, optimizer_moments=config.optimizer_moments,
            receipt_bytes=COPY_BYTES, longest=sequence_length(config, shape.max_positions),
        )  # fmt: skip
        say_plan(run, plan, group)
        model = start_model(start, dtype_of(config.dtype), device, config.seed, run, common)

        batches = batches_of(config, dataset.examples, start=run.cursor)
        steps = num_steps(config, batches)
        biased = any(hasattr(moe.gate, "e_score_correction_bias") for moe in model.moe_layers().values())
        state = start_or_resume(
            run, model, optimizer=AdamW(model, weight_decay=config.weight_decay, moments=config.optimizer_moments),
            schedule=schedule_of(config, steps),
            after_update=(LossFreeBalance(model, config.balance_rate),) if biased and config.balance_rate else (),
        )  # fmt: skip
        write_resolved(run, config, "pretrain", steps=steps, sequence_length=sequence_length(config, shape.max_positions), device=str(device))
        speaker = Model(model, tokenizer, stop_ids=end_ids(start, tokenizer))
        samples = Samples(run, speaker, tokenizer, config.data, dataset.examples, config.samples, own_prompts(config.prompts, tokenizer, chat=False))
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
            write = partial(trained.write, state, start, config.model)
            group.lead(lambda: write(target))
            group.lead(lambda: write_best(state, best, write))
        return group.lead(lambda: finish(config, common, command, best=state.best, **trained.said(target))) or {}


def open_start(model: str, common: Common) -> Manifest:
    """Where training starts: a checkpoint (folder or id), or a folder with config.json and no weights: a manifest without tensors."""
    from unfreeze.checkpoint import Manifest, open_checkpoint
    from unfreeze.checkpoint.manifest import read_json

    folder = Path(model)
    if (folder / "config.json").is_file() and not list(folder.glob("*.safetensors")):
        return Manifest(path=folder, config=read_json(folder / "config.json"), tensors={}, prefix="", files=())
    return open_checkpoint(model, progress=say(common))


def start_model(start: Manifest, dtype: torch.dtype, device: torch.device, seed: int, run: Run, common: Common) -> Decoder:
    """The checkpoint's weights, or random ones where it has none."""
    from unfreeze import models
    from unfreeze.generate.open import notes, open_model

    if start.tensors:
        with LoadProgress(quiet=common.quiet) as progress:
            return open_model(start, dtype, device, progress, partial(say_loaded, run), partial(say_warning, run))
    for note in notes(start.config):
        say_warning(run, note)
    model = models.build(models.shape(start.config), dtype=dtype, device=device)
    models.initialize(model, seed)
    return model
