"""Steps held against the packed pass over the same tokens: who makes them, small models of every family, the walk.

S sequences, V vocabulary, n steps.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from family_case import SMALL
from family_cases import CASES, NO_IDS, ours, randomized
from torch import Tensor

from unfreeze import models
from unfreeze.adapters import Site, attach, sites
from unfreeze.config.lora import LoraConfig
from unfreeze.generate.engine import batch_of
from unfreeze.generate.recorded import Recorded
from unfreeze.generate.steps import Replayed, Steps, launched
from unfreeze.models import Decoder
from unfreeze.models.blocks.linear import Linear, PackedHolder
from unfreeze.quant.codec import Codec

# a line per maker of steps on a CPU: every test of the files test_exact_*.py runs with each of them
STEPS: dict[str, Steps] = {"recorded": Recorded}
NIGHTLY_STEPS: dict[str, Steps] = {
    "launched": launched,
    "within a width": partial(Replayed, impl="reference"),
}
"""Steps of streamed or split weights, and CUDA's, launched here. test_steps.py has smaller tests of both."""

_STEPS = [pytest.param(maker, id=name) for name, maker in STEPS.items()]
_NIGHTLY = [pytest.param(maker, id=name, marks=pytest.mark.nightly) for name, maker in NIGHTLY_STEPS.items()]
each_maker = pytest.mark.parametrize("steps", _STEPS + _NIGHTLY)
each_cpu_maker = pytest.mark.parametrize("steps", _STEPS)

EXACT = 1e-5
"""Of the largest logit of the row, in float32. Rounding alone: 0.3e-6 to 3.5e-6 in these models."""


# ---- models


HERE = """llama-3-rope-biases qwen2-untied-yarn qwen3 mistral-window ministral-mixed granite-biases-tied
    seed-oss-biases smollm3-window olmo2-gqa-biases nanochat-gqa-biases phi3-longrope-tied
    ministral3-grows-and-slides qwen3-vl gemma2-window gemma3-linear-softcap olmo3-yarn
    gemma4-values-are-keys qwen3-moe-mixed deepseek-v3-groups-yarn glm4-moe-norms-groups-yarn qwen2-moe
    mixtral-window deepseek-v2-groups-yarn ernie4-5-moe-interval gpt-oss-window-all-full minimax-m2
    granitemoe-biases-tied llama4-text mistral4 mimo-v2-flash
    deepseek-v32 glm-moe-dsa-shared deepseek-v4
    qwen3-vl-moe-mixed-tied gemma4-experts kimi-linear
    lfm2-biases-untied lfm2-moe qwen3-next qwen3.5 qwen3.5-moe
    granite4 granite4-dense-rotated-limits-tied nemotron-h nemotron-h-latent-groups-limits""".split()
"""One case of every family in each run of the suite; the others of tests/models nightly."""

ONE_MORE = ("Gemma2", "Gemma3", "Qwen3Next", "Qwen3_5", "Qwen3_5Moe")

WIDE = {
    "mistral-window": {"sliding_window": 100},
    "gemma3-window": {"sliding_window": 100},
    "gpt-oss-window-all-full": {"sliding_window": 100},
    "llama4-text": {"attention_chunk_size": 100},
    "phi3-longrope-tied": {"original_max_position_embeddings": 100},
    "mimo-v2-flash": {"sliding_window": 100},
    "deepseek-v32": {"index_topk": 100},
    "glm-moe-dsa-shared": {"index_topk": 100},
    "deepseek-v4": {"index_topk": 50, "sliding_window": 100},
}
"""Borders that rows of 256 tokens pass in steps, at 100, 128 and 200. In CASES they are at 3 to 8."""


@functools.cache
def family(name: str, wide: bool = False, **sizes: Any) -> tuple[Any, Decoder]:
    """-> (a model of transformers, random, float32; ours with its weights). `sizes` stand above the case's."""
    fields = copy.deepcopy(CASES[name].fields)  # transformers writes into the rotary table of a config
    fields.get("text_config", fields).update({**(WIDE[name] if wide else {}), **sizes})
    case = CASES[name]._replace(fields=fields)
    torch.manual_seed(0)
    # 1 / sqrt(width): activations keep their size, and rounding does not grow from layer to layer
    usual = (
        SMALL | NO_IDS | {"max_position_embeddings": 512, "rms_norm_eps": 1e-5, "initializer_range": 0.125}
    )
    reference = randomized(getattr(transformers, case.model_class), case.made(usual))
    with torch.no_grad():
        for key, parameter in reference.named_parameters():
            # Gemma 2 and 3 and Qwen's hybrids multiply by 1 + w, and Gemma 4 does not divide its scores by sqrt(head_dim): scores
            # of 20 and more, which the packed pass too has 1e-5 away from float64
            if case.name in ONE_MORE and "norm" in key and "linear_attn" not in key:
                parameter.sub_(1)
            if case.name == "Gemma4" and key.endswith("q_norm.weight"):
                parameter.mul_(0.25)
    model = ours(reference, case).eval().requires_grad_(False)
    return reference, model


def packed(
    model: Decoder,
    codec: Codec | None,
    *,
    held: torch.dtype | None = None,
    dtype: torch.dtype = torch.float32,
    tensors: Mapping[str, Tensor] | None = None,
) -> Decoder:
    """The model with every linear layer and every expert in a codec's format, kv_b_proj and a free head too.

    Gates of a router or a shared expert stay as they are, as in releases.

    Where the format has a g_idx, columns have the groups of other columns, as act-order leaves them.
    held: without a codec, the dtype of the frozen matrices. dtype: of the computation. tensors: the weights,
    if they are not the model's.
    """

    def codec_for(module: str) -> Codec | None:
        dense = module.endswith("gate") or (module == "lm_head" and model.shape.tied)
        return None if dense else codec

    options: dict[str, Any] = {"codec_for": codec_for, "held_for": lambda module: held}
    twin = models.build(model.shape, dtype=dtype, device="cpu", **options)
    left = dict(tensors or model.state_dict())
    for name, module in twin.named_modules():
        if isinstance(module, PackedHolder) and module.codec is not None:
            for suffix, part in module.codec.quantize(left.pop(f"{name}.weight").float()).items():
                if suffix.endswith("g_idx"):
                    order = torch.Generator().manual_seed(part.shape[-1])
                    part = part[..., torch.randperm(part.shape[-1], generator=order)]
                getattr(module, suffix).copy_(part)
    _, unknown = twin.load_state_dict(left, strict=False)
    assert not unknown
    return twin.eval().requires_grad_(False)


# ---- steps and the packed pass

RECENT = 16


class Row(NamedTuple):
    """A row of the batch: its prompt, and the tokens of its steps; a number: so many of its own greedy ones."""

    prompt: list[int]
    fed: list[int] | int

    @property
    def count(self) -> int:
        return self.fed if isinstance(self.fed, int) else len(self.fed)


@dataclass
class Walk:
    """A row after its steps: all its tokens, and the logits [V] of the prefill and of every step."""

    prompt: int
    tokens: list[int]
    logits: list[Tensor]


def some(count: int, seed: int, vocab: int = 88) -> list[int]:
    """Random ids. None is 0: transformers' generate masks the id of padding in a prompt."""
    return torch.randint(1, vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def likeliest(logits_V: Tensor, before: Sequence[int]) -> int:
    """The greedy choice among the ids that are none of the last RECENT.

    A small random model, above all one with a tied head, soon says one token for ever; its cache would hold
    one key and one value.
    """
    recent = torch.tensor(before[-RECENT:])
    return int(logits_V.index_fill(0, recent, -torch.inf).argmax())


def rows_of(*sizes: tuple[int, int], greedy: int = 0) -> list[Row]:
    """(tokens of the prompt, steps) -> rows of random tokens; the first `greedy` choose their own."""
    return [
        Row(some(prompt, 2 * seed), steps if seed < greedy else some(steps, 2 * seed + 1))
        for seed, (prompt, steps) in enumerate(sizes)
    ]


@torch.no_grad()
def walked(model: Decoder, steps: Steps, rows: Sequence[Row], spare: int = 0) -> list[Walk]:
    """Prefill, then step after step as the engine does; a row leaves the cache when its steps are done.

    spare: positions of the cache beyond the longest row.
    """
    cache = model.new_cache(len(rows), spare + max(len(row.prompt) + row.count for row in rows))
    batch = batch_of([row.prompt for row in rows])
    ends_S = batch.starts_S + torch.tensor(batch.lengths()) - 1
    logits_SV = model.logits(model.prefill(batch, cache)[ends_S])
    walks = [
        Walk(len(row.prompt), [*row.prompt], [logits]) for row, logits in zip(rows, logits_SV, strict=True)
    ]
    step, running = steps(model, cache), list(range(len(rows)))
    for turn in range(max(row.count for row in rows)):
        stay = [place for place, row in enumerate(running) if turn < rows[row].count]
        if len(stay) < len(running):
            running = [running[place] for place in cache.keep(stay)]
        for row in running:
            fed, walk = rows[row].fed, walks[row]
            own = isinstance(fed, int)
            walk.tokens.append(likeliest(walk.logits[-1], walk.tokens) if own else fed[turn])
        logits_SV = step([walks[row].tokens[-1] for row in running])
        for row, logits in zip(running, logits_SV, strict=True):
            walks[row].logits.append(logits.clone())  # a maker may use its buffer again
    # what a plan and the engine count with
    assert cache.nbytes == cache.rows * (cache.capacity * model.cache_bytes() + model.state_bytes())
    return walks


@torch.no_grad()
def uncached(model: Decoder, walks: Sequence[Walk]) -> list[Tensor]:
    """Logits [n, V] of the same places, of one packed pass over all tokens of all rows.

    With longrope a document beyond the border has other frequencies from its first token on. A step before
    the border is the pass over a document that ends there.
    """

    def once(documents: Sequence[list[int]]) -> tuple[Tensor, ...]:
        return model.logits(model.hidden(batch_of(documents))).split([len(tokens) for tokens in documents])

    rope, whole = model.shape.rope, once([walk.tokens for walk in walks])
    if rope.long is not None:
        short = once([walk.tokens[: rope.short_until] for walk in walks])
        whole = [torch.cat((head, all[len(head) :])) for head, all in zip(short, whole, strict=True)]
    return [logits_TV[walk.prompt - 1 :] for walk, logits_TV in zip(walks, whole, strict=True)]


def apart(walks: Sequence[Walk], wanted: Sequence[Tensor]) -> float:
    """Largest difference of a logit, over that row's largest logit: of all rows, all places and all V."""
    pairs = [(torch.stack(walk.logits), wanted_nV) for walk, wanted_nV in zip(walks, wanted, strict=True)]
    gaps = [(found - wanted).abs().max() / wanted.abs().max() for found, wanted in pairs]
    return float(torch.stack(gaps).max())  # a NaN stays one


def assert_exact(walks: Sequence[Walk], wanted: Sequence[Tensor]) -> None:
    """`apart` is at most EXACT; else the first place beyond it is named."""
    for row, (walk, wanted_nV) in enumerate(zip(walks, wanted, strict=True)):
        gap_n = (torch.stack(walk.logits) - wanted_nV).abs().amax(1) / wanted_nV.abs().max()
        beyond = [step for step, gap in enumerate(gap_n.tolist()) if not gap <= EXACT]
        assert not beyond, (
            f"row {row}: {len(beyond)} of {len(gap_n)} places differ, first after step {beyond[0]} (position"
            f" {walk.prompt + beyond[0] - 1}) by {gap_n[beyond[0]]:.1e} of the largest logit, at most by"
            f" {gap_n.max():.1e}; where only one differs, two experts may score alike"
        )


def greedy_tokens(walk: Walk, wanted_nV: Tensor) -> bool:
    """True if every token of the steps is the greedy choice of the packed pass over those before it."""
    places = enumerate(range(walk.prompt, len(walk.tokens)))
    return all(likeliest(wanted_nV[i], walk.tokens[:place]) == walk.tokens[place] for i, place in places)


def checked(model: Decoder, steps: Steps, rows: Sequence[Row]) -> list[Walk]:
    """The rows after their steps: exact, and greedy tokens are those of the packed pass."""
    walks = walked(model, steps, rows)
    wanted = uncached(model, walks)
    assert_exact(walks, wanted)
    for row, walk, logits_nV in zip(rows, walks, wanted, strict=True):
        assert not isinstance(row.fed, int) or greedy_tokens(walk, logits_nV)
    return walks


SEEN = 100 * EXACT
"""A control arm's bug moves some logit by more."""


# ---- adapters


def adapted(model: Decoder, *targets: str) -> Decoder:
    """A copy with adapters of rank 4 on these targets, as after training: neither factor is zero."""
    twin = copy.deepcopy(model)
    for number, site in enumerate(attach(twin, LoraConfig(rank=4, alpha=8.0, targets=targets), seed=0)):
        generator = torch.Generator().manual_seed(number)
        for name, factor in site.adapter.named_parameters():
            if name.endswith("B"):
                factor.data.copy_(0.1 * torch.randn(factor.shape, generator=generator))
    return twin


@torch.no_grad()
def merged(model: Decoder) -> Decoder:
    """The dense model of W + scale · B A, summed in float64; packed weights are expanded first."""
    weights = {
        f"{name}.weight": module.packed.dequantize() if module.codec is not None else module.weight
        for name, module in model.named_modules()
        if isinstance(module, PackedHolder)
    }
    for site in sites(model):
        for name, delta in changes(site).items():
            weights[name] = (weights[name].double() + delta).float()
    plain = models.build(model.shape, dtype=torch.float32, device="cpu")
    if model.shape.tied:  # the adapter of a tied head is none of the embedding
        plain.lm_head.weight = torch.nn.Parameter(weights["lm_head.weight"].clone())
    plain.load_state_dict({name: {**model.state_dict(), **weights}[name] for name in plain.state_dict()})
    return plain.eval().requires_grad_(False)


def changes(site: Site) -> dict[str, Tensor]:
    """Name of a weight -> scale · B A in float64, of an adapter's matrices."""
    if isinstance(site.owner, Linear):
        A, B, scale = site.owner.adapter.factors()
        return {f"{site.name}.weight": scale * B.double() @ A.double()}
    factors, found = site.adapter.factors(), {}
    if factors.gate_up_A is not None:
        pairs = zip(factors.gate_up_A.chunk(2, 1), factors.gate_up_B.chunk(2, 1), strict=True)
        gate, up = (factors.scale * B.double() @ A.double() for A, B in pairs)
        in_turn = site.owner.activation.interleaved
        both = torch.stack((gate, up), 2).flatten(1, 2) if in_turn else torch.cat((gate, up), 1)
        found[f"{site.name}.gate_up_proj.weight"] = both
    if factors.down_A is not None:
        delta = factors.down_scale * factors.down_B.double() @ factors.down_A.double()
        found[f"{site.name}.down_proj.weight"] = delta
    return found
