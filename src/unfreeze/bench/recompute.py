"""Time LoRA on the Qwen3-0.6B shape in bf16: what is recomputed as a run chooses it, beside other choices.

`unfreeze bench recompute`, about 3 minutes, 8 GB.

The checkpoint is random: hidden 1,024, 28 layers, 16 heads of 128 over 8 key/value heads, intermediate 3,072,
vocabulary 151,936, tied; 596 M parameters.
Job: adapters of rank 16 on every linear layer, 1,024 tokens per step (2 documents of 512), clipping, AdamW.
Sides: auto (the choice of a run with the memory that is free now) and any of the choices by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from unfreeze.bench.training import (
    Trained,
    appended_to,
    both_sizes,
    command,
    float64,
    settings_of,
    show,
    step_in_turn,
)
from unfreeze.config.lora import LoraConfig
from unfreeze.config.parse import parse
from unfreeze.core.command import Common

Named = Literal["auto", "nothing", "elementwise", "selective", "layers"]
DOCUMENTS, LENGTH, RANK = 2, 512, 16
SIZES: dict[str, int] = {
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151936,
}
CHECKED = {"num_hidden_layers": 2, "vocab_size": 16384}
"""What is smaller in the model that the float64 comparison runs on."""


class Config(Trained):
    """What is measured."""

    sides: tuple[Named, ...] = Field(
        default=("auto", "selective"), min_length=1, description="what is recomputed on each side"
    )


def qwen3(**sizes: int) -> dict[str, Any]:
    """config.json of the model."""
    return {
        **SIZES,
        **sizes,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


def main(arguments: list[str], common: Common) -> dict[str, Any]:
    """-> rows, file."""
    return measure(parse(Config, arguments, command="bench recompute", description=__doc__ or ""), common)


def chosen(config: dict[str, Any], device: str, documents: int, length: int) -> str:
    """What a run of this job would choose on this machine now."""
    from pathlib import Path

    from unfreeze import models
    from unfreeze.checkpoint import Manifest
    from unfreeze.parallel.plan import plan_training

    manifest = Manifest(path=Path(), config=config, tensors={}, prefix="", files=())
    made = plan_training(
        models.shape(config),
        manifest,
        LoraConfig(rank=RANK),
        tokens=documents * length,
        dtype="bfloat16",
        device=device,
        recompute="auto",
        longest=length,
    )
    return made.work.recompute


def measure(
    config: Config,
    common: Common,
    sizes: Mapping[str, int] | None = None,
    checked: Mapping[str, int] | None = None,
    documents: int = DOCUMENTS,
    length: int = LENGTH,
) -> dict[str, Any]:
    """Run the benchmark at any size.

    `sizes` replace those of SIZES, `checked` those of the model for the float64 comparison.
    """
    from unfreeze.bench.checkpoints import checkpoints
    from unfreeze.bench.rows import Stamp
    from unfreeze.bench.sides import Side

    model, small = both_sizes(qwen3, sizes, CHECKED if checked is None else checked)
    stamp = Stamp.now(
        "recompute", command("recompute", config), config.device, threads=config.threads or None
    )
    settings = settings_of(model, small, SIZES, config, documents, length)
    settings |= {"rank": RANK}
    lora = {"rank": RANK}
    recompute = {
        name: chosen(model, config.device, documents, length) if name == "auto" else name
        for name in config.sides
    }
    with checkpoints(config.checkpoint, model, small) as (checkpoint, small_checkpoint):
        exact = float64(str(small_checkpoint), lora, length, common)
        job: dict[str, Any] = {"checked": str(small_checkpoint), "documents": documents, "length": length}
        job |= {"checkpoint": str(checkpoint), "dtype": "bfloat16", "lora": lora, "device": config.device}
        sides = [
            Side(
                name,
                "unfreeze.bench.job:trainer",
                job | {"recompute": recompute[name]},
                threads=config.threads,
            )
            for name in config.sides
        ]
        found = step_in_turn(sides, config, documents * length, exact, common)
    rows = [
        stamp.row(name, settings | {"recompute": recompute[name]}, entry) for name, entry in found.items()
    ]
    return show(rows, appended_to(config, config.device), common)
