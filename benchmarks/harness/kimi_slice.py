"""One decoder layer of Kimi-K2-Thinking as one of eight GPUs would hold it.

That is 48 of 384 experts, the whole attention, and an eighth of the tokens.

65,536 tokens of a step choose 8 of 384 experts each: 65,536 rows for each GPU's 48 experts, and 8,192 tokens
for its attention. The slice gets the same rows from 8,192 tokens whose 8 experts all lie in it. Everything is
measured through the modules that training uses.

T tokens, K experts per token, E experts of the slice, D width.
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
from unfreeze.core.errors import DoesNotFit
from unfreeze.core.units import format_bytes
from unfreeze.models.blocks.bytes import Block
from unfreeze.models.blocks.moe import MoE
from unfreeze.models.layer import Layer
from unfreeze.objectives.cross_entropy import cross_entropy
from unfreeze.parallel.machine import Hardware
from unfreeze.parallel.plan import USABLE
from unfreeze.quant.int4 import Int4

Routing = Literal["balanced", "zipf"]
ZIPF = 0.5
NODE_TOKENS, GPUS, LAYERS, MOE_LAYERS, TRANSFERS, OPTIMIZER = 65536, 8, 61, 60, 300, 0.03
DENSE, HEAD = "attention, shared expert and norms, all passes", "head and loss"


@dataclass(frozen=True)
class Slice:
    """Sizes of the measured slice.

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

    def nbytes(self) -> int:
        """Return the peak bytes on the device; `fitting` chooses the slice by them.

        Packed and expanded experts, head and embedding, what a row and a token hold in forward and backward
        (bf16 copies of both GEMMs' inputs and outputs, float32 sums), and a float32 copy for the check.
        """
        hidden, width = int(self.config["hidden_size"]), int(self.config["moe_intermediate_size"])
        experts = self.experts * 3 * hidden * width * 2.6
        head = 2 * int(self.config["vocab_size"]) * hidden
        rows = self.rows * (14 * hidden + 14 * width)
        return int(experts + head + rows + self.tokens * hidden * 80 + 4 * 2**30)


def fitting(sizes: Slice, gpu: Hardware) -> Slice:
    """The largest slice that fits; tokens are halved before experts.

    Raises DoesNotFit if not even 8 experts and 1,024 tokens do.
    """
    usable, smaller = gpu.available * USABLE, sizes
    for experts in (48, 24, 16, 8):
        for tokens in (8192, 4096, 2048, 1024):
            smaller = replace(sizes, experts=experts, tokens=tokens)
            if smaller.nbytes() <= usable:
                return smaller
    raise DoesNotFit(
        f"the smallest slice (8 experts, 1,024 tokens) takes {format_bytes(smaller.nbytes())},"
        f" {format_bytes(int(usable))} usable on {gpu.name}",
        next="free the GPU's memory, or take a larger one",
    )


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
        return Layer(self_attn=self.layer.attention, mlp=_Shared(self.shared), **norms)

    def routed_layer(self, x_TD: Tensor) -> Tensor:
        """The mixture of experts alone: router, sort, experts, combination."""
        self.moe.shared_experts = None
        try:
            return self.moe(x_TD, self.run)
        finally:
            self.moe.shared_experts = self.shared

    def forward(self, module: Callable[[Tensor], Tensor]) -> None:
        """One visit without gradients, as the first of a recomputed layer."""
        with torch.no_grad():
            module(self.x_TD)

    def forward_backward(self, module: Callable[[Tensor], Tensor]) -> None:
        """A visit with gradients and its backward. Adapter gradients are dropped, as between steps."""
        module(self.x_TD.detach().requires_grad_()).backward(self.dy_TD)
        self.decoder.zero_grad(set_to_none=True)

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

    def parts(self) -> Iterator[tuple[str, Routing, list[Callable[[], None]], dict[str, float | str]]]:
        """Yield (name, routing, works whose times are added, errors) of each timed part."""
        dense = self.dense_errors()
        routings: tuple[Routing, ...] = ("balanced", "zipf")
        for routing in routings:
            ids_TK = self.routed(routing)
            exact: dict[str, float | str] = dict(self.expert_errors(ids_TK))
            load = ids_TK.flatten().bincount(minlength=self.sizes.experts).max().item()
            both = (
                exact
                | dense
                | {"busiest expert, times the mean": load * self.sizes.experts / self.sizes.rows}
            )
            through = partial(self.forward_backward, self.recomputed("layers"))
            kept = partial(self.forward_backward, self.recomputed("selective"))
            yield "MoE layer forward", routing, [partial(self.forward, self.routed_layer)], exact
            yield (
                "MoE layer recompute + backward",
                routing,
                [partial(self.forward_backward, self.routed_layer)],
                exact,
            )
            yield "one whole layer", routing, [through], both
            yield "one whole layer, attention and gate/up kept", routing, [kept], both
        once, again = partial(self.forward, self.dense), partial(self.forward_backward, self.dense)
        yield DENSE, "balanced", [once, again], {**dense}
        yield HEAD, "balanced", [self.head], {"compared": "tests/objectives"}

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


def derive(ms: Mapping[tuple[str, str], float]) -> list[dict[str, Any]]:
    """The step time of eight GPUs from the slice's (name, routing) -> ms, over a grid of assumptions.

    t = 60 t_moe imbalance + 61 t_attention + t_head + 300 (T 7/8 14,336 B) / BW (1 - overlap) + 0.03 s

    t_moe is forward + recompute + backward, of balanced and of skewed rows; T = 65,536 tokens per step of
    eight GPUs; 14,336 bytes are a token's width in bf16.
    """
    grid, sent = [], TRANSFERS * NODE_TOKENS * (GPUS - 1) / GPUS * 14336
    for routing in ("balanced", "zipf"):
        moe = ms["MoE layer forward", routing] + ms["MoE layer recompute + backward", routing]
        for bandwidth in (300, 350, 400):
            for imbalance in (1.0, 1.1, 1.3):
                for overlap in (0.0, 0.65):
                    dense = LAYERS * ms[DENSE, "balanced"] + ms[HEAD, "balanced"]
                    compute = (MOE_LAYERS * moe * imbalance + dense) / 1e3
                    seconds = compute + sent / (bandwidth * 1e9) * (1 - overlap) + OPTIMIZER
                    entry: dict[str, Any] = {"routing": routing, "gb_per_second_between_gpus": bandwidth}
                    entry |= {"imbalance": imbalance, "overlap": overlap, "seconds": seconds}
                    grid.append(entry | {"derived_tokens_per_second": NODE_TOKENS / seconds})
    return grid
