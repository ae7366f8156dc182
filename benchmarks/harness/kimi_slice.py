"""One decoder layer of Kimi-K2-Thinking as one of eight GPUs would hold it.

That is 48 of 384 experts, the whole attention, and an eighth of the tokens.

65,536 tokens of a step choose 8 of 384 experts each: 65,536 rows for each GPU's 48 experts, and 8,192 tokens
for its attention. The slice gets the same rows from 8,192 tokens whose 8 experts all lie in it. Everything is
measured through the same modules and parts that training uses.

T tokens, K experts per token, E experts of the slice, D width, I expert width, n = T · K rows sorted by
expert, Q and P adapter columns.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from benchmarks.harness.synthetic import attach_random, fill_random, relative_error
from unfreeze import models
from unfreeze.adapters import LoraConfig
from unfreeze.core.batch import Batch
from unfreeze.kernels.expert_mlp.factors import adapters
from unfreeze.kernels.expert_mlp.grouped import Grouped
from unfreeze.kernels.expert_mlp.workspace import Base
from unfreeze.models.blocks.bytes import Block
from unfreeze.models.blocks.moe import MoE
from unfreeze.models.layer import Layer
from unfreeze.objectives.cross_entropy import cross_entropy
from unfreeze.quant.int4 import Int4

# config.json of moonshotai/Kimi-K2-Thinking, what the sizes of a layer depend on
KIMI: dict[str, Any] = {
    "model_type": "kimi_k2",
    "vocab_size": 163840,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "first_k_dense_replace": 1,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "rope_scaling": {
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "factor": 64.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
}
Routing = Literal["balanced", "zipf"]
ZIPF = 0.5


@dataclass(frozen=True)
class Slice:
    """Sizes of what is measured.

    config: config.json of the whole model, of which `experts` and one layer are built.
    """

    config: Mapping[str, Any]
    experts: int
    tokens: int
    sequence: int
    rank: int

    @property
    def rows(self) -> int:
        return self.tokens * int(self.config["num_experts_per_tok"])

    @property
    def whole(self) -> bool:
        """Whether this is the slice that the predictions are about."""
        return self.config is KIMI and (self.experts, self.tokens, self.sequence, self.rank) == (
            48,
            8192,
            2048,
            16,
        )

    def nbytes(self) -> int:
        """Give the bytes on the device at the worst moment, by which a slice is chosen.

        Packed and expanded experts, head and embedding, what a row and a token hold in forward and backward
        (bf16 copies of both GEMMs' inputs and outputs, float32 sums), and a float32 copy for the check.
        """
        hidden, width = int(self.config["hidden_size"]), int(self.config["moe_intermediate_size"])
        experts = self.experts * 3 * hidden * width * 2.6
        head = 2 * int(self.config["vocab_size"]) * hidden
        rows = self.rows * (14 * hidden + 14 * width)
        return int(experts + head + rows + self.tokens * hidden * 80 + 4 * 2**30)


def route(routing: Routing, tokens: int, top_k: int, experts: int, generator: torch.Generator) -> Tensor:
    """ids [T, K], K different experts per token, on the generator's device.

    balanced  random permutations of all experts end to end: every expert gets T K / E rows (experts a
              multiple of K).
    zipf      expert of popularity rank r with p ~ (r + 1)^-0.5, drawn without replacement (Gumbel top-k), the
              ranks shuffled over the experts. At 48 experts, top-8, the busiest gets about 3.2 times the mean
              and the idlest 0.6: the skew of a router without balancing.
    """
    device = generator.device
    if routing == "balanced":
        if experts % top_k:
            raise ValueError(f"{experts} experts are no multiple of {top_k} per token")
        blocks = -(-tokens * top_k // experts)
        order = torch.rand(blocks, experts, generator=generator, device=device).argsort(dim=1)
        return order.flatten()[: tokens * top_k].view(tokens, top_k)
    popularity = (
        -ZIPF
        * torch.arange(1, experts + 1, device=device).log()[
            torch.randperm(experts, generator=generator, device=device)
        ]
    )
    uniform = torch.rand(tokens, experts, generator=generator, device=device).clamp_(1e-20, 1 - 1e-7)
    return (popularity - (-uniform.log()).log()).topk(top_k, dim=1).indices


class GivenRouter(nn.Module):
    """A router that does all its work and then chooses the ids it was given."""

    def __init__(self, inner: Any, ids_TK: Tensor):
        super().__init__()
        self.inner, self.ids_TK = inner, ids_TK
        self.weigh = inner.weigh

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.inner(x_TD)

    def choose(self, scores_TE: Tensor) -> Tensor:
        self.inner.choose(scores_TE)
        return self.ids_TK[: scores_TE.shape[0]]


class _Shared(Block):
    """The shared expert as a layer's MLP: what of a layer is not split over the GPUs."""

    def __init__(self, mlp: nn.Module):
        super().__init__()
        self.mlp = mlp

    def forward(self, x_TD: Tensor, run: Any) -> Tensor:
        return self.mlp(x_TD)


class KimiSlice:
    """The slice built on a device, with random weights, LoRA on every linear layer, and inputs."""

    def __init__(self, sizes: Slice, device: torch.device, seed: int = 0):
        self.sizes, self.device = sizes, device
        config = {
            **sizes.config,
            "n_routed_experts": sizes.experts,
            "num_hidden_layers": 1,
            "first_k_dense_replace": 0,
            "tie_word_embeddings": True,
        }
        self.decoder = models.build(
            models.shape(config),
            dtype=torch.bfloat16,
            device=device,
            codec_for=lambda name: Int4(32) if ".experts." in name else None,
        )
        fill_random(self.decoder, seed)
        attach_random(self.decoder, LoraConfig(rank=sizes.rank, alpha=2.0 * sizes.rank), seed)
        self.generator = torch.Generator(device=device).manual_seed(seed + 1)
        self.layer: Layer = self.decoder.layers[0]
        assert isinstance(self.layer.mlp, MoE)
        self.moe = self.layer.mlp
        self.gate, self.shared = self.moe.gate, self.moe.shared_experts
        self.batch = self._batch().to(device)
        self.run = self.decoder.packed_pass(self.batch)
        self.x_TD, self.dy_TD = (self.random(sizes.tokens, int(config["hidden_size"])) for _ in range(2))

    def random(self, *shape: int) -> Tensor:
        """bf16 N(0, 1) on the device."""
        return torch.randn(*shape, generator=self.generator, device=self.device, dtype=torch.bfloat16)

    def _batch(self) -> Batch:
        tokens, sequence = self.sizes.tokens, min(self.sizes.sequence, self.sizes.tokens)
        ids = torch.randint(
            0, self.decoder.shape.vocab_size, (tokens,), generator=torch.Generator().manual_seed(3)
        )
        return Batch(
            ids,
            ids.roll(-1),
            torch.ones(tokens),
            torch.arange(tokens) % sequence,
            torch.arange(0, tokens, sequence),
        )

    def routed(self, routing: Routing) -> Tensor:
        """Send the tokens to experts by `routing` from here on; the ids [T, K]."""
        ids_TK = route(
            routing,
            self.sizes.tokens,
            self.decoder.shape.experts_per_token,
            self.sizes.experts,
            self.generator,
        )
        self.moe.gate = GivenRouter(self.gate, ids_TK)  # type: ignore[assignment]
        return ids_TK

    def dense_layer(self) -> Layer:
        """Build attention, shared expert and norms: what every GPU does for its own tokens.

        The same modules as the whole layer, without routed experts.
        """
        norms = {name: getattr(self.layer, name) for name in ("input_layernorm", "post_attention_layernorm")}
        assert self.shared is not None
        return Layer(self_attn=self.layer.self_attn, mlp=_Shared(self.shared), **norms)

    def routed_layer(self, x_TD: Tensor) -> Tensor:
        """The mixture of experts alone: router, sort, experts, combination."""
        self.moe.shared_experts = None
        try:
            return self.moe(x_TD, self.run)
        finally:
            self.moe.shared_experts = self.shared

    def forward(self, module: Callable[[Tensor], Tensor]) -> Callable[[], None]:
        """Work: one visit without gradients, as the first of a recomputed layer."""

        def work() -> None:
            with torch.no_grad():
                module(self.x_TD)

        return work

    def forward_backward(self, module: Callable[[Tensor], Tensor]) -> Callable[[], None]:
        """Work: a visit with gradients and its backward. Adapter gradients are dropped, as between steps."""

        def work() -> None:
            module(self.x_TD.detach().requires_grad_()).backward(self.dy_TD)
            self.decoder.zero_grad(set_to_none=True)

        return work

    def dense(self, x_TD: Tensor) -> Tensor:
        return self._dense(x_TD, self.run)

    @cached_property
    def _dense(self) -> Layer:
        return self.dense_layer()

    def recomputed(self, name: str) -> Callable[[Tensor], Tensor]:
        """The whole layer under a recompute policy, as in training."""
        return lambda x_TD: models.RECOMPUTE[name](self.layer, x_TD, self.run)

    def head(self) -> None:
        """Loss of the slice's tokens and its gradient: one pass over the whole vocabulary."""
        hidden = self.x_TD.detach().requires_grad_()
        cross_entropy(hidden, self.decoder.lm_head, self.batch).sum.backward()

    # ---- correctness

    def dense_errors(self) -> dict[str, float]:
        """Compare attention, shared expert and norms with the same modules and adapters in float32.

        The first document goes through both.
        """
        length = min(self.sizes.sequence, self.sizes.tokens)
        exact = copy.deepcopy(self._dense).float()
        names = ("tokens_T", "targets_T", "weights_T", "positions_T")
        batch = replace(
            self.batch,
            **{name: getattr(self.batch, name)[:length] for name in names},
            starts_S=self.batch.starts_S[:1],
        )
        run, results = self.decoder.packed_pass(batch), []
        for layer, dtype in ((self._dense, torch.bfloat16), (exact, torch.float32)):
            x = self.x_TD[:length].detach().to(dtype).requires_grad_()
            y = layer(x, run)
            y.backward(self.dy_TD[:length].to(dtype))
            results.append((y.detach(), x.grad))
        self.decoder.zero_grad(set_to_none=True)
        (y, dx), (y_exact, dx_exact) = results
        return {
            "attention, shared expert, norms: y against float32": relative_error(y, y_exact),
            "attention, shared expert, norms: dx against float32": relative_error(dx, dx_exact),
        }

    def expert_errors(self, ids_TK: Tensor, tokens: int = 8) -> dict[str, float]:
        """Compare y and dx of a few tokens with the experts merged with their adapters in float64.

        Both depend on a token's own rows only, so tokens are compared one by one.
        """
        chosen = torch.linspace(0, self.sizes.tokens - 1, tokens, device=self.device).long()
        x = self.x_TD.detach().requires_grad_()
        weights = torch.rand(ids_TK.shape, generator=self.generator, device=self.device)
        y = self.moe.experts(x, ids_TK, weights)
        (dx,) = torch.autograd.grad(y, x, self.dy_TD)
        x64 = self.x_TD[chosen].double().requires_grad_()
        rows, adapter = ids_TK[chosen], self.moe.experts.adapter
        assert adapter is not None  # every expert has one
        factors = adapter.factors()
        total = torch.zeros_like(x64)
        for expert in rows.unique().tolist():
            gate_up, down = _merged(self.moe.experts, factors, expert)
            gate, up = (x64 @ gate_up.T).chunk(2, dim=-1)
            share = (weights[chosen].double() * (rows == expert)).sum(dim=1, keepdim=True)
            total = total + share * ((torch.nn.functional.silu(gate) * up) @ down.T)
        (dx64,) = torch.autograd.grad(total, x64, self.dy_TD[chosen].double())
        return {
            "experts: y against float64": relative_error(y[chosen], total),
            "experts: dx against float64": relative_error(dx[chosen], dx64),
        }


def _merged(experts: Any, factors: Any, expert: int) -> tuple[Tensor, Tensor]:
    """(gate_up [2I, D], down [D, I]) of one expert with its LoRA added, float64."""
    gate_up, down = (
        stack.value()[expert].dequantize().double() for stack in (experts.gate_up_proj, experts.down_proj)
    )
    A, B, rank, half = (
        factors.gate_up_A[expert].double(),
        factors.gate_up_B[expert].double(),
        factors.gate_up_B.shape[2],
        experts.intermediate_size,
    )
    gate_up = gate_up + factors.scale * torch.cat((B[:half] @ A[:rank], B[half:] @ A[rank:]))
    return (
        gate_up,
        down + factors.down_scale * factors.down_B[expert].double() @ factors.down_A[expert].double(),
    )


class ExpertOps:
    """The GEMMs of the expert MLP one by one, on the slice's weights.

    Each runs through the same code as in training.
    """

    def __init__(self, built: KimiSlice, ids_TK: Tensor, part: Any = None):
        self.part = part or Grouped()
        experts, dtype = built.moe.experts, torch.bfloat16
        assert experts.adapter is not None  # every expert has one
        gate_up, down = adapters(experts.adapter.factors(), None, dtype, self.part.row_stride)
        assert gate_up is not None and down is not None
        self.gate_up, self.down = gate_up, down
        self.D, self.I, self.E, rows = (
            experts.hidden_size,
            experts.intermediate_size,
            experts.num_experts,
            ids_TK.numel(),
        )
        self.Q, self.P = self.gate_up.width, self.down.width
        weights = torch.rand(ids_TK.shape, device=built.device)
        routing = self.part.route(ids_TK, weights, self.E, dtype)
        self.expert_n = ids_TK.flatten().sort().values  # the expert of each row
        self.groups = list(self.part.groups(routing, (0, 0), 0, both=False))
        self.bases = [
            (
                Base(experts.gate_up_proj.value(), dtype, f"bench gate_up {i}"),
                Base(experts.down_proj.value(), dtype, f"bench down {i}"),
            )
            for i in range(len(self.groups))
        ]
        self.x, self.h = built.random(rows, self.D + self.Q), built.random(rows, self.I + self.P)
        self.dy, self.dgu = built.random(rows, self.D + self.P), built.random(rows, 2 * self.I + self.Q)
        self.out = torch.empty(rows, max(2 * self.I, self.D), dtype=dtype, device=built.device)
        self.gate_up_WS, self.down_WS = ([] for _ in range(2))
        self.expand()

    @torch.no_grad()
    def expand(self) -> None:
        """Expand all weights of the slice to bf16 in one workspace, with the adapters beside them.

        B as forward reads it, and A as backward does.
        """
        pairs = list(zip(self.groups, self.bases, strict=True))
        self.gate_up_WS = [base.stack(g.experts, base.name, self.Q)[0] for g, (base, _) in pairs]
        self.down_WS = [base.stack(g.experts, base.name, self.P)[0] for g, (_, base) in pairs]
        for group, gate_up, down in zip(self.groups, self.gate_up_WS, self.down_WS, strict=True):
            gate_up[:, 2 * self.I :, : self.D].copy_(self.gate_up.A[group.positions])
            gate_up[:, : 2 * self.I, self.D :].copy_(self.gate_up.B[group.positions])
            down[:, self.D :, : self.I].copy_(self.down.A[group.positions])
            down[:, : self.D, self.I :].copy_(self.down.B[group.positions])

    def _each(self) -> Iterator[tuple[Any, range, Tensor, Tensor]]:
        for group, gate_up, down in zip(self.groups, self.gate_up_WS, self.down_WS, strict=True):
            yield group, range(len(group.experts)), gate_up, down

    def gate_up_forward(self) -> None:
        for group, index, gate_up, _ in self._each():
            self.part.nt(
                self.x[group.rows], gate_up[:, : 2 * self.I], index, group, self.out[group.rows, : 2 * self.I]
            )

    def down_forward(self) -> None:
        for group, index, _, down in self._each():
            self.part.nt(self.h[group.rows], down[:, : self.D], index, group, self.out[group.rows, : self.D])

    def gate_up_input_gradient(self) -> None:
        for group, index, gate_up, _ in self._each():
            self.part.nn(
                self.dgu[group.rows], gate_up[:, :, : self.D], index, group, self.out[group.rows, : self.D]
            )

    def thin(self) -> None:
        """x Aᵀ, h Aᵀ, dy B, dgu B, and the gradients of A and B of both pairs."""
        D, I = self.D, self.I
        for group, index, _, _ in self._each():
            x, h, dy, dgu = (rows[group.rows] for rows in (self.x, self.h, self.dy, self.dgu))
            here = range(group.positions.start, group.positions.stop)
            self.part.nt(x[:, :D], self.gate_up.A[group.positions], index, group, x[:, D:])
            self.part.nt(h[:, :I], self.down.A[group.positions], index, group, h[:, I:])
            self.part.nt(dy[:, :D], self.down.Bt[group.positions], index, group, dy[:, D:])
            self.part.nt(dgu[:, : 2 * I], self.gate_up.Bt[group.positions], index, group, dgu[:, 2 * I :])
            new = partial(torch.empty, dtype=x.dtype, device=x.device)
            self.part.tn(dy[:, D:], h[:, :I], group, new(self.E, self.P, I), here)
            self.part.tn(h[:, I:], dy[:, :D], group, new(self.E, self.P, D), here)
            self.part.tn(dgu[:, 2 * I :], x[:, :D], group, new(self.E, self.Q, D), here)
            self.part.tn(x[:, D:], dgu[:, : 2 * I], group, new(self.E, self.Q, 2 * I), here)

    def error(
        self, product: Callable[[], None], rows_nM: Tensor, weight: Callable[[int], Tensor], count: int = 32
    ) -> float:
        """Give the error against float64 of `count` rows of `product`.

        Row i is rows_nM[i] @ weight(expert of row i).
        """
        product()
        chosen = torch.linspace(0, rows_nM.shape[0] - 1, count, device=rows_nM.device).long()
        exact = torch.stack(
            [rows_nM[i].double() @ weight(int(self.expert_n[i])).double() for i in chosen.tolist()]
        )
        return relative_error(self.out[chosen, : exact.shape[1]], exact)

    def errors(self) -> dict[str, float]:
        """Give the errors of the three large products, by row name of the table.

        The workspace's own codes are compared with the codec's by expand_error.
        """
        gate_up, down = (
            torch.cat(parts) if len(parts) > 1 else parts[0] for parts in (self.gate_up_WS, self.down_WS)
        )
        return {
            "gate/up forward": self.error(self.gate_up_forward, self.x, lambda e: gate_up[e, : 2 * self.I].T),
            "down forward": self.error(self.down_forward, self.h, lambda e: down[e, : self.D].T),
            "input gradient of gate/up": self.error(
                self.gate_up_input_gradient, self.dgu, lambda e: gate_up[e, :, : self.D]
            ),
        }

    def expand_error(self, built: KimiSlice) -> float:
        """Give the largest difference between an expanded expert and what its codec says; 0 means exact."""
        last = self.groups[-1]
        expert = last.experts[-1]
        exact = built.moe.experts.gate_up_proj.value()[expert].dequantize()
        found = self.gate_up_WS[-1][len(last.experts) - 1, : 2 * self.I, : self.D].detach()
        return float((found.double() - exact.double()).abs().max())
