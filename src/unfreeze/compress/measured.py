"""Measure the difference of a mixture's layers from the dense MLPs that they come from, read from the files.

T random inputs, D model width, E experts, K chosen per token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from unfreeze import models
from unfreeze.checkpoint.keymap import tensor_sources
from unfreeze.checkpoint.manifest import Manifest
from unfreeze.checkpoint.tensors import stored_tensor

TOKENS = 64
EXACT = 1e-5
"""Relative difference of a layer's output that float32 sums in another order stay well below."""


@torch.no_grad()
def largest_change(dense: Manifest, mixture: Manifest, seed: int = 0) -> float:
    """max over three layers of ‖mixture(x) - mlp(x)‖ / ‖mlp(x)‖ in float32, x as its norm would give it.

    The first, the middle and the last layer; x is N(0, 1) times the norm's gain, with a mean square of one.
    """
    shape = models.shape(mixture.config)
    layers = {0, shape.num_layers // 2, shape.num_layers - 1}
    generator = torch.Generator().manual_seed(seed)
    x_TD = torch.randn(TOKENS, shape.hidden_size, generator=generator)
    changes: list[float] = []
    for layer in sorted(layers):
        gain = _read(dense, f"model.layers.{layer}.post_attention_layernorm.weight")
        y_TD = _dense(dense, layer, x_TD * gain)
        changed = _mixture(mixture, shape, layer, x_TD * gain)
        changes.append(float((changed - y_TD).norm() / y_TD.norm().clamp(min=1e-30)))
    return max(changes)


def _read(manifest: Manifest, name: str) -> Tensor:
    return stored_tensor(manifest.by_model_name()[name]).float()


def _mlp(x_TD: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x_TD, gate)) * F.linear(x_TD, up), down)


def _dense(manifest: Manifest, layer: int, x_TD: Tensor) -> Tensor:
    names = [f"model.layers.{layer}.mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
    return _mlp(x_TD, *(_read(manifest, name) for name in names))


def _mixture(manifest: Manifest, shape: models.Shape, layer: int, x_TD: Tensor) -> Tensor:
    """Σ_k w_k expert_k(x), plus the gated shared expert; one expert in memory at a time."""
    rules, moe = models.rules(shape), shape.moe
    assert moe is not None
    module, E, D, width = (
        f"model.layers.{layer}.mlp",
        moe.num_experts,
        shape.hidden_size,
        moe.intermediate_size,
    )
    router = tensor_sources(f"{module}.gate.weight", (E, D), rules)[0].name
    chosen = F.linear(x_TD, _read(manifest, router)).softmax(-1).topk(moe.experts_per_token, -1)
    weights_TK = chosen.values / chosen.values.sum(-1, keepdim=True)
    share_TE = torch.zeros(len(x_TD), E).scatter(1, chosen.indices, weights_TK)
    gate_up = tensor_sources(f"{module}.experts.gate_up_proj.weight", (E, 2 * width, D), rules)
    down = tensor_sources(f"{module}.experts.down_proj.weight", (E, D, width), rules)
    y_TD = torch.zeros_like(x_TD)
    for expert in range(E):
        names = [gate_up[2 * expert].name, gate_up[2 * expert + 1].name, down[expert].name]
        y_TD += share_TE[:, expert, None] * _mlp(x_TD, *(_read(manifest, name) for name in names))
    if moe.num_shared_experts:
        own = [
            _read(manifest, f"{module}.shared_expert.{part}_proj.weight") for part in ("gate", "up", "down")
        ]
        gate = F.linear(x_TD, _read(manifest, f"{module}.shared_expert_gate.weight")).sigmoid()
        y_TD += gate * _mlp(x_TD, own[0], own[1], own[2])
    return y_TD
