"""The operations of a mixture of experts in a step, against the blocks' own routers and the reference of the op."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from unfreeze import models
from unfreeze.kernels.decode_step import experts, mixture
from unfreeze.kernels.decode_step.mixture import Gated
from unfreeze.kernels.decode_step.program import Program, Row
from unfreeze.kernels.decode_step.rows import ACTIVATIONS
from unfreeze.kernels.expert_mlp import ExpertFactors
from unfreeze.kernels.expert_mlp.reference import reference_expert_mlp
from unfreeze.kernels.swiglu.activation import SWIGLU, ClampedSwiGLU, GeGLU, SwiGLU
from unfreeze.models.blocks.cache import Cache
from unfreeze.models.blocks.recording import CannotRecord, Recording
from unfreeze.models.blocks.routers import LinearRouter, NormedRouter, Router, RoutingRule, noaux_tc
from unfreeze.quant.codec import Packed
from unfreeze.quant.int4 import Int4

RULES = {
    "mistral4": (Router, RoutingRule(groups=4, topk_group=2, best=2, normalize=True, added=1e-20, scale=2.5)),
    "ernie4_5_moe": (Router, RoutingRule(correction="1 E", normalize=True, smallest=1e-12)),
    "ernie4_5_moe, small weights": (Router, RoutingRule(correction="1 E", normalize=True, smallest=0.9)),
    "lfm2_moe": (Router, RoutingRule("sigmoid", "E", normalize=True, added=1e-6, scale=1.5)),
    "llama4_text": (Router, RoutingRule("logits", after=True)),
    "gpt_oss": (LinearRouter, RoutingRule(normalize=True)),
    "minimax_m2": (Router, noaux_tc()),
    "deepseek_v2": (Router, RoutingRule(groups=4, topk_group=3, scale=16.0)),
    "deepseek_v3": (Router, noaux_tc(4, 2, scale=2.5)),
    "deepseek_v3, not normalised": (Router, noaux_tc(8, 4, normalize=False)),
    "gemma4_text": (NormedRouter, RoutingRule(normalize=True, eps=1e-3)),
    "qwen3_moe": (Router, RoutingRule(normalize=True)),
    "qwen3_moe, not normalised": (Router, RoutingRule()),
    "chain_of_experts": (Router, RoutingRule("softmax", "E", normalize=True, scale=1.5)),
}

NOT_RECORDED = {"deepseek_v4"}
"""Families whose rule the program lacks: steps call their routers."""


@pytest.mark.parametrize("score", ["sqrtsoftplus"])
def test_a_score_that_the_program_lacks_is_not_recorded(score):
    router = Router(8, 4, 2, RoutingRule(score), dtype=torch.float32, device="cpu")
    program = Program(1, torch.float32)
    with pytest.raises(CannotRecord, match=score):
        router.record(Recording(program, Cache(1, 4)), Row(torch.zeros(1, 8), program.pairs))


def test_every_family_that_has_a_rule_is_here():
    folder = Path(models.__file__).parent
    files = {
        path.stem for path in folder.glob("*.py") if re.search(r"RoutingRule\(|noaux_tc\(", path.read_text())
    }
    assert files == {name.partition(",")[0] for name in RULES} | NOT_RECORDED


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """The slowest of the operations, once."""
    for operation in (experts.choose, experts.sort, experts.up, experts.down):
        operation.address(pairs=False)


def router_of(kind, rule, num_experts=16, K=4, width=64):
    router = kind(width, num_experts, K, rule, dtype=torch.float32, device="cpu")
    generator = torch.Generator().manual_seed(0)
    for tensor in [*router.parameters(), *router.buffers()]:
        tensor.data.copy_(torch.randn(tensor.shape, generator=generator))
    router.weight.data *= 0.2
    return router.requires_grad_(False)


def chosen(router, x):
    """(ids, weights) by the recorded operations."""
    program = Program(len(x), torch.float32)
    routed = router.record(Recording(program, Cache(1, 1)), Row(x, False))
    program.finish()
    program.run(len(x))
    return routed


def by_expert(ids, weights):
    """Weights as [S, E], so that the order of the chosen does not matter."""
    return torch.zeros(len(ids), 16).scatter_add_(1, ids, weights)


@pytest.mark.parametrize("name", RULES)
def test_choose_equals_the_router(name):
    router, x = router_of(*RULES[name]), torch.randn(9, 64, generator=torch.Generator().manual_seed(1))
    routed, scores = chosen(router, x), router(x)
    ids = router.choose(scores)
    assert torch.equal(routed.ids.sort(1).values, ids.sort(1).values)
    want = by_expert(ids, router.weigh(scores, ids))
    torch.testing.assert_close(by_expert(routed.ids, routed.shares), want, rtol=1e-5, atol=1e-6)
    # control: the rule of every other family differs in ids or weights
    for other, (kind, rule) in RULES.items():
        if kind is type(router) is Router and rule.correction == router.routing.correction and other != name:
            router.routing = rule
            scores = router(x)
            ids = router.choose(scores)
            got = by_expert(ids, router.weigh(scores, ids))
            assert not torch.allclose(got, want, rtol=1e-3), other


@pytest.mark.parametrize("rule", [RULES["deepseek_v3"], RULES["qwen3_moe"], RULES["llama4_text"]])
def test_equal_and_infinite_scores_choose_each_expert_once(rule):
    router, x = router_of(*rule), torch.zeros(3, 64)
    x[1:] = torch.randn(2, 64, generator=torch.Generator().manual_seed(1))
    if router.e_score_correction_bias is not None:
        router.e_score_correction_bias.zero_()
        router.e_score_correction_bias[:14] = -torch.inf  # of four, two have to be chosen among these
    ids = chosen(router, x).ids
    assert all(len(set(row)) == 4 for row in ids.tolist())
    if router.e_score_correction_bias is None:
        assert ids[0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("rule", [RULES["deepseek_v3"], RULES["qwen3_moe"], RULES["llama4_text"]])
def test_a_router_with_nan_gives_weights_with_nan(rule):
    """Else generation would go on: it stops at logits that are not finite."""
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    for row in (0, 7):
        router = router_of(*rule)
        router.weight[row] = torch.nan
        routed = chosen(router, x)
        assert routed.shares.isnan().any(1).all()
        assert routed.ids.min() >= 0 and routed.ids.max() < 16


@pytest.mark.parametrize("S", [1, 3, 20])
def test_sort_gives_rows_by_expert(S):
    router, x = router_of(*RULES["qwen3_moe"]), torch.randn(S, 64, generator=torch.Generator().manual_seed(1))
    routed = chosen(router, x)
    flat = routed.ids.flatten()
    order = flat.argsort(stable=True)
    used, counts = flat.unique(return_counts=True)
    A = len(used)
    assert int(routed.used) == A and torch.equal(routed.experts[:A], used)
    assert torch.equal(
        routed.begins[: A + 1], torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0)))
    )
    assert torch.equal(routed.token, order // 4)
    assert torch.equal(routed.weight, routed.shares.flatten()[order])
    assert S > 3 or A < 16  # some experts are in no use


class Rounds(SwiGLU):
    """SwiGLU whose result is rounded to bf16, as the second product's input is in the arithmetic of pairs."""

    def forward(self, gate, up):
        return super().forward(gate, up).bfloat16().to(gate.dtype)


@dataclass
class Layer:
    """Numbers of an expert layer: E = 5 experts, one of them never chosen, D = 70 or 64, I = 96."""

    kind: str
    D: int = 64

    def __post_init__(self):
        generator = torch.Generator().manual_seed(0)

        def draw(*shape, scale=1.0):
            return (scale * torch.randn(shape, generator=generator)).bfloat16().float()

        E, I, D, R = 5, 96, self.D, 3
        self.gate_up, self.down = draw(E, 2 * I, D, scale=0.2), draw(E, D, I, scale=0.2)
        if self.kind == "bf16":
            self.gate_up, self.down = self.gate_up.bfloat16(), self.down.bfloat16()
        if self.kind == "int4":
            self.gate_up, self.down = (
                Packed(Int4(32), Int4(32).quantize(w)) for w in (self.gate_up, self.down)
            )
        self.factors = ExpertFactors(
            draw(E, 2 * R, D, scale=0.3),
            draw(E, 2 * I, R),
            draw(E, 2, I, scale=0.3),
            draw(E, D, 2),
            0.5,
            0.25,
        )
        self.biases = draw(E, 2 * I), draw(E, D)
        self.x = draw(9, D)
        self.ids = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(9)])
        self.weights = torch.rand(9, 2, generator=generator)
        self.added = draw(9, D)


def want(layer: Layer, rows: int, options: dict):
    """In float64, by the reference of the op."""
    x, ids, weights = layer.x[:rows].double(), layer.ids[:rows], layer.weights[:rows].double()
    factors = options.get("factors")
    if factors is not None:
        tensors = (factors.gate_up_A, factors.gate_up_B, factors.down_A, factors.down_B)
        factors = ExpertFactors(*(t.double() for t in tensors), factors.scale, factors.down_scale)
    gate_up_bias, down_bias = options.get("biases", (None, None))
    if options.get("scales_input"):
        x = (x[:, None] * weights[..., None]).flatten(0, 1)
        ids, weights = ids.flatten()[:, None], torch.ones(2 * rows, 1, dtype=torch.float64)
    y = reference_expert_mlp(
        x,
        ids,
        weights,
        layer.gate_up,
        layer.down,
        factors,
        None,
        options.get("activation", SWIGLU),
        gate_up_bias,
    )
    if down_bias is not None:
        y = y + (weights[..., None] * down_bias.double()[ids]).sum(1)
    if options.get("scales_input"):
        y = y.unflatten(0, (rows, 2)).sum(1)
    return y + layer.added[:rows].double() if options.get("add") else y


def got(layer: Layer, rows: int, dtype, options: dict):
    program = Program(rows, dtype)
    activation = options.get("activation", SWIGLU)
    numbers = (activation.alpha, activation.limit) if isinstance(activation, ClampedSwiGLU) else (0.0, 0.0)
    # the choice: logits whose largest two are the ids; the weights are overwritten below
    logits = torch.zeros(rows, 5).scatter_(1, layer.ids[:rows], layer.weights[:rows].logit())
    rule = mixture.Choice(2, 0, None, 1, 1, 1, False, False, None, 0.0, 0.0, 1.0)
    logits.masked_fill_(logits == 0, -50.0)
    routed = mixture.route(program, Row(logits, program.pairs), rule)
    y = mixture.expert_mlp(
        program,
        Row(layer.x[:rows].clone(), program.pairs),
        routed,
        layer.gate_up,
        layer.down,
        options.get("factors"),
        gated=Gated(ACTIVATIONS[activation.kind], *numbers, activation.interleaved),
        biases=options.get("biases", (None, None)),
        scales_input=options.get("scales_input", False),
        add=Row(layer.added[:rows].clone(), program.pairs) if options.get("add") else None,
    )
    program.finish()
    program.run(rows)
    return y.tensor.clone()


CASES = {
    "plain": [],
    "adapters": ["factors"],
    "biases": ["biases"],
    "input scaled": ["scales_input", "factors"],
    "input scaled, biases": ["scales_input", "biases"],
    "all": ["factors", "biases", "add"],
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", ["float32", "bf16", "int4"])
def test_expert_mlp(dtype, name, kind):
    layer = Layer(kind, D=64 if kind == "int4" else 70)
    values = {"factors": layer.factors, "biases": layer.biases, "scales_input": True, "add": True}
    options = {option: values[option] for option in CASES[name]}
    for rows in (1, 4, 9):
        result = got(layer, rows, dtype, options)
        if dtype == torch.float32:
            expected, tolerance = want(layer, rows, options), {"rtol": 1e-5, "atol": 2e-5}
        else:  # a number of h next to the middle of two bf16 may be rounded to the other: 2^-8 of it
            expected, tolerance = (
                want(layer, rows, options | {"activation": Rounds()}),
                {"rtol": 1e-5, "atol": 2e-2},
            )
        torch.testing.assert_close(result.double(), expected, **tolerance)
        for left_out in options:  # control: each part matters
            others = {option: value for option, value in options.items() if option != left_out}
            assert not torch.allclose(result.double(), want(layer, rows, others), rtol=1e-1, atol=1e-1)


@pytest.mark.parametrize(
    "activation", [GeGLU(), ClampedSwiGLU(), ClampedSwiGLU(interleaved=True), SwiGLU(True)]
)
def test_activations_and_interleaved_rows(activation):
    layer = Layer("float32")
    for name in ("plain", "all"):
        values = {"factors": layer.factors, "biases": layer.biases, "add": True}
        options = {option: values[option] for option in CASES[name]} | {"activation": activation}
        result = got(layer, 9, torch.float32, options).double()
        torch.testing.assert_close(result, want(layer, 9, options), rtol=1e-5, atol=2e-5)
        assert not torch.allclose(
            result, want(layer, 9, options | {"activation": SWIGLU}), rtol=1e-2, atol=1e-2
        )
