"""unfreeze sft run.toml: fine-tune a checkpoint on conversations with LoRA on every linear layer, routed experts included.

The base stays as it was published: 4-bit experts are trained in 4 bits. Loss on the assistant's turns only (on all of a `text`).
"""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from unfreeze.adapters import LoraConfig
from unfreeze.core.command import Common
from unfreeze.recipes.config import parse
from unfreeze.recipes.training import TrainingConfig, encode, finish, live, pick_device, portable, refuse_absent, schedule_of, write_json
from unfreeze.report.live import LoadProgress

if TYPE_CHECKING:
    from unfreeze.checkpoint.stream import LoadStats
    from unfreeze.data import Dataset, Tokenizer
    from unfreeze.generate.model import Model
    from unfreeze.train.run import Run
    from unfreeze.train.state import State
    from unfreeze.train.step import StepResult


class Config(TrainingConfig):
    """Everything a fine-tuning run depends on."""

    lora: LoraConfig = Field(default_factory=lambda: LoraConfig(), description="the adapters")


def main(arguments: list[str], common: Common) -> dict[str, Any]:
    """Parse, train, report. -> run, steps, loss_first, loss_last, tokens_per_second, peak_bytes, receipt."""
    config = parse(Config, arguments, command="sft", description=__doc__ or "")
    return train(config, common)


def train(config: Config, common: Common) -> dict[str, Any]:
    """The table of contents of a fine-tuning run; goes on where an unfinished run in the same folder stopped."""
    refuse_absent(config.data, "data")
    device = pick_device(config.device)

    from unfreeze import models
    from unfreeze.adapters import attach, save_adapter, verify_adapter
    from unfreeze.checkpoint import open_checkpoint
    from unfreeze.data import Batches, check_vocab, load_tokenizer
    from unfreeze.generate.model import Model, end_ids
    from unfreeze.generate.open import dtype_of, open_model
    from unfreeze.objectives.cross_entropy import cross_entropy
    from unfreeze.parallel.plan import plan_training
    from unfreeze.train.fit import fit
    from unfreeze.train.memory import reset_peak_bytes
    from unfreeze.train.optim import AdamW
    from unfreeze.train.state import start_or_resume

    with live(config, common, "sft") as run:
        if run.finished and (run.path / "adapter" / "adapter_config.json").is_file():
            return finish(config, common, "", {"already_finished": True})
        manifest = open_checkpoint(config.model)
        shape = models.shape(manifest.config)
        tokenizer = load_tokenizer(manifest.path)
        check_vocab(tokenizer, shape.vocab_size)
        dataset = encode(config, tokenizer, shape.max_positions, supervise="assistant")
        run.events.emit("data", run.step, **dataset.stats.as_dict(), summary=dataset.stats.summary())

        plan = plan_training(
            shape, manifest, config.lora, tokens=config.tokens_per_micro_batch, dtype=config.dtype, device=device,
            recompute=config.recompute == "layers",
        )  # fmt: skip
        write_json(run.path / "plan.json", plan.as_dict())
        run.events.emit("plan", run.step, **plan.as_dict())
        plan.refuse_if_too_large()

        with LoadProgress(quiet=common.quiet) as progress:
            model = open_model(manifest, dtype_of(config.dtype), device, progress, loaded=partial(say_loaded, run))
        attach(model, config.lora, config.seed)

        batches = Batches(dataset.examples, config.tokens_per_micro_batch, config.seed, start=run.cursor)
        steps = config.steps or max(1, -(-batches.len_steps(config.epochs) // config.micro_batches))
        state = start_or_resume(
            run, model, optimizer=AdamW(model, weight_decay=config.weight_decay), schedule=schedule_of(config, steps)
        )  # fmt: skip
        speaker = Model(model, tokenizer, stop_ids=end_ids(manifest, tokenizer))
        prompts = sample_prompts(config.data, tokenizer, config.samples)
        if state.step == 0:
            say_samples(run, speaker, prompts, "before", 0)
        reset_peak_bytes(device)
        fitted = fit(
            state, batches, cross_entropy,
            through=models.recompute if config.recompute == "layers" else models.plain,
            micro_batches=config.micro_batches, max_norm=config.clip, save_every=config.save_every, keep_saves=config.keep_saves,
            on_step=[FirstStepReceipt(state, dataset)] if state.step == 0 else [],
        )  # fmt: skip
        if fitted.reason == "done":
            say_samples(run, speaker, prompts, "after", state.step)
        verify_adapter(model, save_adapter(model, run.path / "adapter", base_name=portable(config.model), prefix=manifest.prefix))
    return finish(config, common, f"unfreeze sft --model {config.model} --data {config.data} --out {config.run_dir} …", {})


def say_loaded(run: Run, stats: LoadStats) -> None:
    """The load event: bytes read, seconds, and the size the packed weights would have had expanded."""
    run.events.emit("load", run.step, **asdict(stats))


class FirstStepReceipt:
    """After the first update: which groups learned, by how much, and what it changed in the output. A group that stood still stops the run."""

    def __init__(self, state: State, dataset: Dataset):
        from unfreeze.adapters.receipt import Receipt
        from unfreeze.data import pack

        self._receipt = Receipt(state.model)
        self._probe = pack(dataset.examples[:8])

    def __call__(self, state: State, result: StepResult) -> None:
        if state.step != 1:
            return
        self._receipt.after_backward(state.model)
        groups = self._receipt.after_update(state.model, self._probe.to(state.model.device))
        for entry in groups.values():  # gradients were looked at after clipping; the receipt states them as they came
            entry["grad_norm"] = (entry["grad_norm"] or 0.0) / result.clip_scale
        write_json(state.run.path / "receipt.json", {"groups": groups})
        state.run.events.emit("receipt", state.step, groups=groups)


def sample_prompts(data: str, tokenizer: Tokenizer, count: int) -> list[tuple[str, list[int]]]:
    """The first `count` prompts of the data: (text shown, ids): conversations up to the first answer, texts up to their eighth word."""
    from itertools import islice

    from unfreeze.data import Conversation, encode_chat, encode_prompt, read_rows

    prompts = []
    for row in islice(read_rows(Path(data), lambda bad: None), count):
        if isinstance(row, Conversation):
            before = row.messages[: next(i for i, message in enumerate(row.messages) if message["role"] == "assistant")]
            if before:
                prompts.append((str(before[-1]["content"]), encode_chat(tokenizer, before, row.tools)))
        else:
            opening = " ".join(row.text.split()[:8])
            prompts.append((opening, encode_prompt(tokenizer, opening)))
    return prompts


def say_samples(run: Run, speaker: Model, prompts: list[tuple[str, list[int]]], when: str, step: int) -> None:
    """Greedy answers to the sample prompts, as events."""
    fitting = [(text, ids) for text, ids in prompts if len(ids) + 64 <= speaker.decoder.shape.max_positions]
    if not fitting:
        return
    for (text, _), said in zip(fitting, speaker.complete([ids for _, ids in fitting], max_new_tokens=64), strict=True):
        run.events.emit("sample", step, when=when, prompt=text, text=said.text)
