"""unfreeze pretrain run.toml: train all weights on text, from nothing (a folder with config.json and a tokenizer) or from a checkpoint.

Loss on every token. The result is written to <out>/model in the format its config.json declares: with a quantization_config, the modules it
names are packed to INT4 on Kimi's grid at the end.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from unfreeze.core.command import Common
from unfreeze.core.errors import ConfigError
from unfreeze.recipes.config import parse
from unfreeze.recipes.sft import sample_prompts, say_samples
from unfreeze.recipes.training import TrainingConfig, encode, finish, live, pick_device, refuse_absent, schedule_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch import Tensor

    from unfreeze.models import Decoder

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tiktoken.model", "chat_template.jinja", "generation_config.json",
                   "special_tokens_map.json")  # fmt: skip


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
    """Parse, train, save. -> run, model, steps, loss_first, loss_last, tokens_per_second, peak_bytes."""
    config = parse(Config, arguments, command="pretrain", description=__doc__ or "")
    return train(config, common)


def train(config: Config, common: Common) -> dict[str, Any]:
    """The table of contents of a pretraining run; goes on where an unfinished run in the same folder stopped."""
    refuse_absent(config.data, "data")
    device = pick_device(config.device)

    from unfreeze import models
    from unfreeze.data import Batches, check_vocab, load_tokenizer
    from unfreeze.generate.model import Model
    from unfreeze.generate.open import dtype_of
    from unfreeze.objectives.cross_entropy import cross_entropy
    from unfreeze.train.balance import LossFreeBalance
    from unfreeze.train.fit import fit
    from unfreeze.train.memory import reset_peak_bytes
    from unfreeze.train.optim import AdamW
    from unfreeze.train.state import start_or_resume

    with live(config, common, "pretrain") as run:
        if run.finished and (run.path / "model" / "config.json").is_file():
            return finish(config, common, "", {"already_finished": True, "model": str(run.path / "model")})
        model = start_model(Path(config.model), dtype_of(config.dtype), device, config.seed)
        tokenizer = load_tokenizer(Path(config.model))
        check_vocab(tokenizer, model.shape.vocab_size)
        dataset = encode(config, tokenizer, model.shape.max_positions, supervise="all")
        run.events.emit("data", run.step, **dataset.stats.as_dict(), summary=dataset.stats.summary())
        batches = Batches(dataset.examples, config.tokens_per_micro_batch, config.seed, start=run.cursor)
        steps = config.steps or max(1, -(-batches.len_steps(config.epochs) // config.micro_batches))
        biased = any(hasattr(moe.gate, "e_score_correction_bias") for moe in model.moe_layers().values())
        state = start_or_resume(
            run, model, optimizer=AdamW(model, weight_decay=config.weight_decay), schedule=schedule_of(config, steps),
            after_update=(LossFreeBalance(model, config.balance_rate),) if biased and config.balance_rate else (),
        )  # fmt: skip
        reset_peak_bytes(device)
        fitted = fit(
            state, batches, cross_entropy,
            through=models.recompute if config.recompute == "layers" else models.plain,
            micro_batches=config.micro_batches, max_norm=config.clip, save_every=config.save_every, keep_saves=config.keep_saves,
        )  # fmt: skip
        if fitted.reason == "done":
            publish(model, Path(config.model), run.path / "model")
            say_samples(run, Model(model, tokenizer), sample_prompts(config.data, tokenizer, config.samples), "after", state.step)
    return finish(config, common, "unfreeze pretrain …", {"model": str(run.path / "model")})


def start_model(folder: Path, dtype: torch.dtype, device: torch.device, seed: int) -> Decoder:
    """Random weights where the folder holds none, else the checkpoint's. Every weight trains, so packed checkpoints are refused."""
    from unfreeze import models
    from unfreeze.checkpoint import open_checkpoint
    from unfreeze.generate.open import open_model

    if list(folder.glob("*.safetensors")):
        manifest = open_checkpoint(folder)
        if any(name.endswith("weight_packed") for name in manifest.tensors):
            raise ConfigError(f"{folder} is packed in 4 bits; its codes cannot be moved by gradients", next="train adapters: unfreeze sft")
        return open_model(manifest, dtype, device)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model = {str(folder)!r} has no config.json", next="give a folder with config.json and a tokenizer")
    model = models.build(models.shape(json.loads((folder / "config.json").read_text())), dtype=dtype, device=device)
    models.initialize(model, seed)
    return model


def publish(model: Decoder, source: Path, target: Path) -> None:
    """Write `model` to `target` in the format that source/config.json declares, tokenizer files beside it. bf16 but for the packed."""
    from unfreeze import models
    from unfreeze.checkpoint import save_checkpoint
    from unfreeze.checkpoint.keymap import disk_tensors
    from unfreeze.quant import from_quantization_config

    config = json.loads((source / "config.json").read_text())
    quantization = from_quantization_config(config)
    codec = quantization[0] if quantization else None
    tensors = disk_tensors(published_tensors(model, quantization), models.rules(model.shape), codec)
    save_checkpoint(target, config, tensors)
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def published_tensors(model: Decoder, quantization: Any) -> Iterator[tuple[str, Tensor]]:
    """(parameter name, tensor) of the model as it is stored: linear weights that the config quantizes as codes and scales, others in bf16.

    fp32 is kept where the format has it: the router's selection bias.
    """
    import torch

    from unfreeze.models.blocks.experts import ExpertWeight
    from unfreeze.models.blocks.linear import Linear
    from unfreeze.quant import is_ignored

    quantized = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, (Linear, ExpertWeight)) and quantization and not is_ignored(disk_name(name), quantization[1])
    }
    tied = models_tied(model)
    for name, tensor in model.state_dict().items():
        if name in tied:
            continue
        if name in quantized:
            yield from ((f"{name.removesuffix('.weight')}.{suffix}", part) for suffix, part in quantization[0].quantize(tensor.float()).items())
        else:
            yield name, tensor if name.endswith("e_score_correction_bias") else tensor.to(torch.bfloat16)


def disk_name(module: str) -> str:
    """The checkpoint's name of a module, for the config's ignore list: stacked experts stand for their first."""
    return module.replace(".experts.gate_up_proj", ".experts.0.gate_proj").replace(".experts.down_proj", ".experts.0.down_proj")


def models_tied(model: Decoder) -> set[str]:
    """Parameters that are another's memory and so not stored."""
    from unfreeze import models

    return set(models.tied(model.shape))
