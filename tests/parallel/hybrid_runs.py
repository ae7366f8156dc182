"""A script for test_fsdp.py's hybrids: one process forks two that train every weight of a hybrid, divided by FSDP2.
Prints one JSON object."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "train"))
import test_collectives as small
from fsdp_runs import gradients, opened, step
from safetensors.torch import save_file
from sharding import forked

from unfreeze import models
from unfreeze.checkpoint.manifest import Manifest
from unfreeze.checkpoint.save import save_checkpoint
from unfreeze.core.rows import gathered
from unfreeze.generate.open import open_sharded
from unfreeze.models.blocks.recurrent import Decay
from unfreeze.models.blocks.streams import HyperConnection
from unfreeze.models.publish import published
from unfreeze.parallel.processes.collectives import ALONE, Group
from unfreeze.train.optim import AdamW

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
COMMON = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "dtype": "float32",
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        "head_dim": 8,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 3,  # A_log and dt_bias in uneven parts
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "shared_expert_intermediate_size": 16,
        "full_attention_interval": 2,
    },
    "kimi_linear": {
        "num_experts": 4,
        "num_experts_per_token": 2,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "linear_num_heads": 2,
        "linear_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "deepseek_v4": {  # without an indexer, which is frozen: only trained weights are divided
        "num_key_value_heads": 1,
        "moe_intermediate_size": 48,
        "head_dim": 16,
        "q_lora_rank": 16,
        "o_lora_rank": 8,
        "o_groups": 2,
        "index_head_dim": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "hc_mult": 2,
        "qk_rope_head_dim": 8,
        "sliding_window": 4,
        "compress_rate_hca": 2,
        "layer_types": ["sliding_attention", "heavily_compressed_attention"],
        "mlp_layer_types": ["moe", "moe"],
    },
    "chain_of_experts": {
        "head_dim": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "inner_iter": 3,
    },
    "lfm2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_dense_layers": 1,
        "layer_types": ["conv", "full_attention"],
        "tie_word_embeddings": False,
    },
}


def files(folder: Path, family: str) -> Path:
    config = {**COMMON, **CONFIGS[family], "model_type": family}
    model = models.build(models.shape(config), dtype=torch.float32, device="cpu")
    models.initialize(model, 0)
    save_checkpoint(folder, config, published(model, config))
    return folder


def watched(model: models.Decoder) -> set[str]:
    """The dtypes of decays while layers are computed: of their parameters as gathered, and of what they give."""
    seen: set[str] = set()

    def note(part: Any, _inputs: Any, out: Any) -> None:
        first = next(part.parameters()), out[0] if isinstance(out, tuple) else out
        seen.update(str(tensor.dtype) for tensor in first)

    for module in model.modules():
        if isinstance(module, (Decay, HyperConnection)):
            module.register_forward_hook(note)
    return seen


def compared(folder: Path, group: Group) -> dict[str, Any]:
    """Losses and norms of some steps, of the decays what is gathered, and the first gradients as files."""
    facts: dict[str, Any] = {"drawn": drawn(folder, group)}
    for family in CONFIGS:
        for kind, dtype in DTYPES.items():
            model, held = opened(folder / family, group, dtype)
            seen = watched(model)
            optimizer, results = AdamW(model, held=held), []
            for number in range(2 if kind == "float32" else 1):
                results.append(step((model, optimizer), small.cut(4, True), group))
                if number == 0:
                    first = gradients(optimizer)
                    if group.rank == 0:
                        save_file(first, folder / f"{family}-{kind}-{group.size}.safetensors")
            losses, norms = ([getattr(r, field) for r in results] for field in ("loss", "grad_norm"))
            facts[f"{family} {kind}"] = {"losses": losses, "norms": norms, "decays": sorted(seen)}
    return facts


def drawn(folder: Path, group: Group) -> list[float]:
    """Sums of a model's first weights, without files: the same random numbers on any number of processes."""
    config = {**COMMON, **CONFIGS["kimi_linear"], "model_type": "kimi_linear"}
    if group.size == 1:
        model = models.build(models.shape(config), dtype=torch.bfloat16, device="cpu")
        models.initialize(model, 0)
    else:
        model, _ = open_sharded(Manifest(folder, config, {}, "", ()), group, torch.bfloat16, "cpu")
    named = {name: p for name, p in model.named_parameters() if "decay" in name}
    return [float(gathered(p).detach().double().sum()) for _, p in sorted(named.items())]


def work(folder: Path) -> dict[str, Any]:
    for family in CONFIGS:
        files(folder / family, family)
    one = compared(folder, ALONE)

    def two(group: Group) -> None:
        (folder / f"facts-{group.rank}.json").write_text(json.dumps(compared(folder, group)))

    codes = forked(2, two, 120)
    return {
        "codes": codes,
        "1": one,
        "2": [json.loads((folder / f"facts-{rank}.json").read_text()) for rank in (0, 1)],
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(work(Path(sys.argv[1]))))
