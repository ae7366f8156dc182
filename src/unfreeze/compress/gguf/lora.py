"""An adapter as GGUF-LoRA, beside any GGUF of its base: NAME.lora_a [R, in], NAME.lora_b [out, R], float32.

llama.cpp adds alpha / R · B A x, with one alpha for the file; a site of another scale has its B multiplied.
Stacked experts have [E, R, in] and [E, out, R]. Source: llama.cpp, src/llama-adapter.cpp and llama-graph.cpp.

E experts, R rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial

from torch import Tensor

from unfreeze.compress.deltas import GATE, Deltas
from unfreeze.compress.gguf.families import Family, Value
from unfreeze.compress.gguf.tensors import Planned, gguf_name, paired
from unfreeze.compress.gguf.weights import Weights
from unfreeze.core.errors import ConfigError

EXPERTS = {"down_proj": "ffn_down_exps", GATE: "ffn_gate_exps", 1: "ffn_up_exps"}
_LAYER = re.compile(r"layers\.(\d+)\.")
MERGE = "without --adapter-only, which merges it, or unfreeze merge"


def planned_lora(weights: Weights, deltas: Deltas, family: Family) -> tuple[list[Planned], dict[str, Value]]:
    """The adapter's tensors and settings. Raises ConfigError for a module that GGUF-LoRA cannot hold."""
    if deltas.rows or deltas.embeddings is not None:
        raise ConfigError("GGUF-LoRA holds no rows of new tokens and no adapter of embeddings", next=MERGE)
    if deltas.whole:
        raise ConfigError(
            f"GGUF-LoRA holds no {next(iter(deltas.whole))}, which trained fully beside the adapters",
            next=MERGE,
        )
    scales = {
        site: [scale * A.shape[-2] for A, _, scale in deltas.factors(site).values()]
        for site in deltas.projections
    }
    alpha = next(iter(scales.values()))[0]
    tensors: list[Planned] = []
    for site in deltas.projections:
        for name, A, B in _pairs(weights, deltas, family, site, alpha):
            tensors.append(Planned(f"{name}.lora_a", tuple(A.shape), "F32", partial(_once, A)))
            tensors.append(Planned(f"{name}.lora_b", tuple(B.shape), "F32", partial(_once, B)))
    settings: dict[str, Value] = {
        "general.type": "adapter",
        "adapter.type": "lora",
        "adapter.lora.alpha": alpha,
    }
    return tensors, settings


def _once(tensor: Tensor) -> Iterator[Tensor]:
    yield tensor


def _pairs(
    weights: Weights, deltas: Deltas, family: Family, site: str, alpha: float
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(tensor of the base, A, B) of a site, B in the order of the base's rows there."""
    shape = weights.shape
    for (projection, half), (A, B, scale) in deltas.factors(site).items():
        A, B = A.float(), B.float() * (scale * A.shape[-2] / alpha)
        if not projection:
            if site == "lm_head" and shape.tied:
                raise ConfigError("a GGUF of a tied head has no tensor for an adapter of lm_head", next=MERGE)
            name = gguf_name(weights, family, f"{site}.weight")
            if name.endswith("_shexp.weight") and "gate_inp" in name:
                raise ConfigError(f"llama.cpp applies no adapter of {site}", next=MERGE)
            if family.pairs and re.search(r"\.attn_[qk]\.", name):
                B = paired(B, shape.num_heads if ".attn_q." in name else shape.num_kv_heads)
            yield name, A, B
            continue
        layer = _LAYER.search(site)
        assert layer is not None
        if projection != "down_proj" and family.arch == "gemma4":
            raise ConfigError(
                f"GGUF-LoRA cannot hold {site}: gate and up are one tensor there, with a pair each here",
                next=MERGE,
            )
        yield f"blk.{layer[1]}.{EXPERTS[projection if half is None else half]}.weight", A, B
