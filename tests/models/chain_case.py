"""Chain of Experts in loops, float64, from the formulas of models/blocks/chain.py's docstring and of the papers:
attention per head, one token and one expert after the other. Nothing here is ours but the names of weights."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from unfreeze import models

CHAIN: dict[str, Any] = {
    "model_type": "chain_of_experts",
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "initializer_range": 0.125,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "inner_iter": 3,
}
PUBLISHED = {"inner_norm": False, "outer_residual": False}
VARIANTS: dict[str, dict[str, Any]] = {
    "norm and gate per pass": {},
    "one gate": {"use_igate": False, "n_shared_experts": 2},
    "published": {**PUBLISHED, "scoring_func": "softmax", "topk_method": "greedy", "norm_topk_prob": False},
    "published, one gate": {**PUBLISHED, "use_igate": False},
    "both residuals": {"inner_norm": False, "n_shared_experts": 1},
    "outer residual": {"inner_norm": False, "inner_residual": False, "routed_scaling_factor": 2.5},
    "dense first": {"first_k_dense_replace": 1, "inner_iter": 2, "use_qk_norm": True, "attention_bias": True},
}


def built(seed: int = 0, **fields: Any) -> models.Decoder:
    """A random model; gains of norms, biases and selection biases are random too."""
    model = models.build(models.shape({**CHAIN, **fields}), dtype=torch.float32, device="cpu")
    models.initialize(model, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in name:
                tensor.copy_(1 + 0.3 * torch.randn(tensor.shape, generator=generator))
            elif name.endswith(("e_score_correction_bias", ".bias")):
                tensor.copy_(0.2 * torch.randn(tensor.shape, generator=generator))
    return model


def weights_of(model: models.Decoder) -> dict[str, Tensor]:
    """Leaves in float64."""
    return {name: t.detach().double().requires_grad_() for name, t in model.state_dict().items()}


class Loops:
    """logits(document). `products` counts the weights that a token was multiplied with."""

    def __init__(self, config: Mapping[str, Any], weights: Mapping[str, Tensor]):
        self.config, self.weights, self.products = {**CHAIN, **config}, weights, 0

    def times(self, name: str, x: Tensor, expert: int | None = None, rows: slice = slice(None)) -> Tensor:
        weight = self.weights[f"{name}.weight"]
        weight = weight[rows] if expert is None else weight[expert][rows]
        self.products += weight.numel()
        bias = self.weights.get(f"{name}.bias")
        return weight @ x if bias is None else weight @ x + bias

    def norm(self, name: str, x: Tensor) -> Tensor:
        return x / (x.square().mean() + self.config["rms_norm_eps"]).sqrt() * self.weights[f"{name}.weight"]

    def turned(self, head: Tensor, position: int) -> Tensor:
        half = len(head) // 2
        angle = position * self.config["rope_theta"] ** (-torch.arange(half).double() / half)
        a, b = head[:half], head[half:]
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()))

    def attention(self, name: str, xs: list[Tensor]) -> list[Tensor]:
        heads, groups = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        q, k, v = ([self.times(f"{name}.{part}_proj", x) for x in xs] for part in "qkv")
        out = []
        q, k = (
            [
                [
                    self.turned(
                        self.norm(f"{name}.{part}_norm", head) if self.config.get("use_qk_norm") else head, t
                    )
                    for head in row.chunk(count)
                ]
                for t, row in enumerate(rows)
            ]
            for part, rows, count in (("q", q, heads), ("k", k, groups))
        )
        v = [row.chunk(groups) for row in v]
        for t in range(len(xs)):
            parts = []
            for h in range(heads):
                g = h * groups // heads
                scores = torch.stack([q[t][h] @ k[s][g] for s in range(t + 1)])
                share = (scores / math.sqrt(self.config["head_dim"])).softmax(0)
                parts.append(sum(share[s] * v[s][g] for s in range(t + 1)))
            out.append(self.times(f"{name}.o_proj", torch.cat(parts)))
        return out

    def gated(self, name: str, x: Tensor) -> Tensor:
        gate, up = self.times(f"{name}.gate_proj", x), self.times(f"{name}.up_proj", x)
        return self.times(f"{name}.down_proj", gate * gate.sigmoid() * up)

    def mixture(self, layer: str, gate: str, x: Tensor) -> Tensor:
        """MoE_t(x): the gate of a pass, the experts and shared experts of the layer."""
        config, width = self.config, self.config["moe_intermediate_size"]
        z = self.times(gate, x)
        scores = z.softmax(0) if config.get("scoring_func") == "softmax" else z.sigmoid()
        bias = self.weights.get(f"{gate}.e_score_correction_bias")
        chosen = (scores.detach() + (0 if bias is None else bias.detach())).topk(
            config["num_experts_per_tok"]
        )
        weights = {e: scores[e] for e in chosen.indices.tolist()}
        if config.get("norm_topk_prob", True):
            total = sum(weights.values())
            weights = {e: weight / total for e, weight in weights.items()}
        y = torch.zeros_like(x)
        for e, weight in weights.items():
            experts = f"{layer}.mlp.experts"
            gated = self.times(f"{experts}.gate_up_proj", x, e, slice(0, width))
            up = self.times(f"{experts}.gate_up_proj", x, e, slice(width, 2 * width))
            h = gated * gated.sigmoid() * up
            y = y + config.get("routed_scaling_factor", 1.0) * weight * self.times(
                f"{experts}.down_proj", h, e
            )
        return y + self.gated(f"{layer}.mlp.shared_experts", x) if config.get("n_shared_experts") else y

    def chain(self, layer: str, x: Tensor) -> Tensor:
        """x [D] after attention -> the layer's output."""
        config, own = self.config, self.config.get("use_igate", True)
        gates = [f"{layer}.mlp.gate"]
        gates += [
            f"{layer}.passes.{t}.gate" if own else gates[0] for t in range(1, self.config["inner_iter"])
        ]
        first = f"{layer}.post_attention_layernorm"
        if config.get("inner_norm", True):
            for t, gate in enumerate(gates):
                x = x + self.mixture(layer, gate, self.norm(f"{layer}.passes.{t}.norm" if t else first, x))
            return x
        z = self.norm(first, x)
        for gate in gates:
            y = self.mixture(layer, gate, z)
            z = y + z if config.get("inner_residual", True) else y
        return z + x if config.get("outer_residual", True) else z

    def logits(self, document: list[int]) -> Tensor:
        xs = [self.weights["model.embed_tokens.weight"][token] for token in document]
        for index in range(self.config["num_hidden_layers"]):
            layer = f"model.layers.{index}"
            normed = [self.norm(f"{layer}.input_layernorm", x) for x in xs]
            attended = self.attention(f"{layer}.self_attn", normed)
            xs = [x + y for x, y in zip(xs, attended, strict=True)]
            if index < self.config.get("first_k_dense_replace", 0):
                name = f"{layer}.post_attention_layernorm"
                xs = [x + self.gated(f"{layer}.mlp", self.norm(name, x)) for x in xs]
            else:
                xs = [self.chain(layer, x) for x in xs]
        return torch.stack([self.times("lm_head", self.norm("model.norm", x)) for x in xs])
