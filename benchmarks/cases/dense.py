"""Time full fine-tuning of the Qwen2-0.5B shape in bf16, step by step in turn with transformers.

`unfreeze dev bench dense`, about 4 minutes, 18 GB.

The checkpoint is random: hidden 896, 24 layers, 14 heads over 2 key/value heads, intermediate 4864,
vocabulary 151,936, tied; 494 M parameters.
Job: every weight trains, 1,024 tokens per step (2 documents of 512), clipping, AdamW. unfreeze updates bf16
weights through float32 masters and moments (16 bytes per parameter with the gradient); transformers does all
in bf16 (8 bytes). "above state" is the peak less these, each side's own.
Sides: unfreeze, transformers, transformers-liger (with Liger-Kernel, on a GPU only).
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
from unfreeze.config.parse import parse
from unfreeze.core.command import Common

Named = Literal["unfreeze", "transformers", "transformers-liger"]
DOCUMENTS, LENGTH = 2, 512
SIZES: dict[str, int] = {
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "vocab_size": 151936,
}
CHECKED = {"num_hidden_layers": 2, "vocab_size": 16384}
"""What is smaller in the model that the float64 comparison runs on."""


class Config(Trained):
    """What is measured."""

    sides: tuple[Named, ...] = Field(
        default=("unfreeze", "transformers", "transformers-liger"), min_length=1, description="which sides"
    )
    recompute: Literal["layers", "selective", "elementwise", "nothing"] = Field(
        default="elementwise",
        description=(
            "of unfreeze: what is computed twice; elementwise: no GEMM is, the choice for dense models"
        ),
    )


def qwen2(**sizes: int) -> dict[str, Any]:
    """config.json of the model."""
    return {
        **SIZES,
        **sizes,
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": 32768,
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
    return measure(parse(Config, arguments, command="dev bench dense", description=__doc__ or ""), common)


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
    from benchmarks.harness.peers import liger_refuses
    from benchmarks.harness.rows import Stamp
    from benchmarks.harness.sides import Side

    model, small = both_sizes(qwen2, sizes, CHECKED if checked is None else checked)
    stamp = Stamp.now("dense", command("dense", config), config.device, threads=config.threads or None)
    settings = settings_of(model, small, SIZES, config, documents, length)
    settings |= {"recompute": config.recompute}
    refused = {"transformers-liger": liger_refuses(config.device)}
    with checkpoints(config.checkpoint, model, small) as (checkpoint, small_checkpoint):
        exact = float64(str(small_checkpoint), None, length, common)
        job: dict[str, Any] = {"checked": str(small_checkpoint), "documents": documents, "length": length}
        ours = job | {
            "checkpoint": str(checkpoint),
            "dtype": config.computed,
            "lora": None,
            "recompute": config.recompute,
            "device": config.device,
        }
        theirs = job | {"config": str(checkpoint), "device": config.device, "dtype": config.computed}
        known = {
            "unfreeze": Side("unfreeze", "benchmarks.harness.job:trainer", ours, threads=config.threads),
            "transformers": Side(
                "transformers",
                "benchmarks.harness.peers:dense",
                theirs | {"liger": False},
                threads=config.threads,
            ),
            "transformers-liger": Side(
                "transformers-liger",
                "benchmarks.harness.peers:dense",
                theirs | {"liger": True},
                threads=config.threads,
            ),
        }
        sides = [known[name] for name in config.sides if not refused.get(name)]
        found = step_in_turn(sides, config, documents * length, exact, common)
    rows = [stamp.row(name, settings, entry) for name, entry in found.items()]
    rows += [
        stamp.row(name, settings, not_run=reason)
        for name, reason in refused.items()
        if name in config.sides and reason
    ]
    return show(rows, appended_to(config, config.device), common)
