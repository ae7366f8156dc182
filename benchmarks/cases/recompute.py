"""Time LoRA on the Qwen3-0.6B shape, as a run chooses what to recompute, beside transformers + peft.

`unfreeze dev bench recompute`, about 6 minutes, 20 GB.

The checkpoint is random: hidden 1,024, 28 layers, 16 heads of 128 over 8 key/value heads, intermediate 3,072,
vocabulary 151,936, tied; 596 M parameters.
Job: adapters of rank 16 on every linear layer, 1,024 tokens per step (2 documents of 512), clipping, AdamW.
In bf16, or float32 on a CPU without bf16 units.
Sides: auto (the choice of a run with the memory that is free now), any of the choices by name, peft
(transformers + peft, the same adapters) and peft-checkpointing (the same with gradient checkpointing).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from benchmarks.harness.training import (
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

Named = Literal["auto", "nothing", "elementwise", "selective", "layers", "peft", "peft-checkpointing"]
PEERS = ("peft", "peft-checkpointing")
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
        default=("auto", "selective", *PEERS), min_length=1, description="which sides"
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
    return measure(parse(Config, arguments, command="dev bench recompute", description=__doc__ or ""), common)


def chosen(config: dict[str, Any], device: str, documents: int, length: int, dtype: str) -> str:
    """What a run of this job would choose on this machine now."""
    from pathlib import Path

    from unfreeze import models
    from unfreeze.checkpoint import Manifest
    from unfreeze.core.layout import RESIDENT
    from unfreeze.parallel.plan import plan_here

    manifest = Manifest(path=Path(), config=config, tensors={}, prefix="", files=())
    made = plan_here(
        models.shape(config),
        manifest,
        LoraConfig(rank=RANK),
        tokens=documents * length,
        dtype=dtype,
        device=device,
        layout=RESIDENT.but(recompute="auto"),
        longest=length,
    )
    return made.layout.recompute


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
    from benchmarks.harness.checkpoints import checkpoints
    from benchmarks.harness.rows import Stamp
    from benchmarks.harness.sides import Side

    model, small = both_sizes(qwen3, sizes, CHECKED if checked is None else checked)
    stamp = Stamp.now(
        "recompute", command("recompute", config), config.device, threads=config.threads or None
    )
    settings = settings_of(model, small, SIZES, config, documents, length)
    settings |= {"rank": RANK}
    lora = {"rank": RANK}
    recompute = {
        name: chosen(model, config.device, documents, length, config.computed) if name == "auto" else name
        for name in config.sides
        if name not in PEERS
    }
    with checkpoints(config.checkpoint, model, small) as (checkpoint, small_checkpoint):
        exact = float64(str(small_checkpoint), lora, length, common)
        job: dict[str, Any] = {"checked": str(small_checkpoint), "documents": documents, "length": length}
        job |= {"dtype": config.computed, "device": config.device}
        ours = job | {"checkpoint": str(checkpoint), "lora": lora}
        theirs = job | {"config": str(checkpoint), "rank": RANK}
        sides = [
            Side(
                name,
                "benchmarks.harness.peers:dense_lora" if name in PEERS else "benchmarks.harness.job:trainer",
                theirs | {"checkpointing": name != "peft"}
                if name in PEERS
                else ours | {"recompute": recompute[name]},
                threads=config.threads,
            )
            for name in config.sides
        ]
        found = step_in_turn(sides, config, documents * length, exact, common)
    rows = [
        stamp.row(name, settings | {"recompute": recompute.get(name, "")}, entry)
        for name, entry in found.items()
    ]
    return show(rows, appended_to(config, config.device), common)
