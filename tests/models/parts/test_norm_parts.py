"""Places of the norms: each equal to models that others wrote with the same weights, logits and gradients.

transformers' Llama with its layers' parts called in the order of the formula; Gemma 2 and OLMo 2 themselves;
torch's encoder layer. T tokens, D width.
"""

import types

import pytest
import torch
import torch.nn.functional as F
import transformers
from family_cases import DOCUMENTS, NO_IDS, batch_of
from part_case import BASE, EXPERTS, LAYERS, built, config_of, entry, gradients
from torch import nn

from unfreeze import models
from unfreeze.models.blocks.attention import Attention
from unfreeze.models.blocks.mlp import MLP, PlainMLP
from unfreeze.models.blocks.moe import MoE, ReadMoE
from unfreeze.models.blocks.nonlinearity import SQUARED_RELU
from unfreeze.models.factory import Factory
from unfreeze.models.layer import Layer
from unfreeze.models.parts import At
from unfreeze.models.parts.norms import post_norm, pre_norm

L, D = BASE["num_hidden_layers"], BASE["hidden_size"]
ALPHA = (2 * L) ** 0.25


def in_order(name):
    """A decoder layer's forward: its attention and MLP, and the norms N by their place."""

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, **others):
        def attend(x):
            return self.self_attn(
                hidden_states=x,
                position_embeddings=position_embeddings,
                attention_mask=attention_mask,
                position_ids=others.get("position_ids"),
            )[0]

        def mlp(x):
            y = self.mlp(x)
            return y[0] if isinstance(y, tuple) else y

        N, x = self.norms, hidden_states
        for f, before, between, after in (
            (attend, "input_layernorm", "post_attention_layernorm", "attention_output_layernorm"),
            (mlp, "post_attention_layernorm", "output_layernorm", "mlp_output_layernorm"),
        ):
            if name == "pre_norm":
                x = x + f(N[before](x))
            elif name == "sandwich_norm":
                x = x + N[after](f(N[before](x)))
            elif name == "branch_norm":
                x = x + N[after](f(x))
            else:
                x = N[between]((ALPHA if name == "deep_norm" else 1.0) * x + f(x))
        return x

    return forward


def reference_of(model, name, kind):
    """transformers' model of the family, its layers in the order of the part; torch's own RMSNorm."""
    fields = {key: of for key, of in {**BASE, **KINDS[kind]}.items() if key != "base_model_type"}
    config = transformers.AutoConfig.for_model(kind, **fields, **NO_IDS)
    config._attn_implementation, config._experts_implementation = "eager", "eager"
    theirs = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    state = model.state_dict()
    for index, layer in enumerate(theirs.model.layers):
        names = [key.split(".")[3] for key in state if key.startswith(f"model.layers.{index}.")]
        kept = [of for of in dict.fromkeys(names) if of.endswith("layernorm")]
        layer.norms = nn.ModuleDict(
            {of: nn.RMSNorm(D, BASE["rms_norm_eps"], dtype=torch.float64) for of in kept}
        )
        layer.forward = types.MethodType(in_order(name), layer)
        for key in ("input_layernorm", "post_attention_layernorm"):
            delattr(layer, key)
    theirs.load_state_dict({spelled(key): tensor for key, tensor in state.items()}, strict=True)
    return theirs


def spelled(key):
    """Their name of our parameter: the norms lie in `norms`, experts end without .weight."""
    if ".layers." in key and key.split(".")[3].endswith("layernorm"):
        parts = key.split(".")
        return ".".join((*parts[:3], "norms", *parts[3:]))
    return key.removesuffix(".weight") if ".experts." in key else key


def compared(model, theirs, recompute=models.plain):
    """Largest difference of logits, and of gradients relative to the largest."""
    found = gradients(model, batch_of(DOCUMENTS), recompute)
    probe = torch.randn(97, generator=torch.Generator().manual_seed(1)).double()
    wanted = torch.cat([theirs(torch.tensor([document])).logits[0] for document in DOCUMENTS])
    (wanted.double().log_softmax(-1) * probe).sum().div(len(wanted)).backward()
    grads = {key: parameter.grad for key, parameter in theirs.named_parameters()}
    with torch.no_grad():
        logits = model.logits(model.hidden(batch_of(DOCUMENTS)))
    worst = max(
        float((grad - grads[spelled(key)]).abs().max() / grads[spelled(key)].abs().max().clamp(1e-3))
        for key, grad in found.items()
    )
    return float((logits - wanted).detach().abs().max()), worst, len(found)


def doubled(name, fields):
    return built(entry(name), dtype=torch.float64, **fields)


KINDS = {"llama": {}, "qwen3_moe": EXPERTS}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LAYERS)
def test_the_formula_in_float64_with_transformers_parts(name, kind):
    model = doubled(name, KINDS[kind])
    logits, grads, count = compared(model, reference_of(model, name, kind))
    assert logits <= 2e-5 and grads <= 1e-5 and count == len(list(model.parameters()))


@pytest.mark.parametrize("name, other", [("post_norm", "deep_norm"), ("branch_norm", "sandwich_norm")])
def test_control_another_place_is_seen(name, other):
    model = doubled(name, {})
    theirs = reference_of(model, name, "llama")
    for layer in theirs.model.layers:
        for key in ("input_layernorm", "post_attention_layernorm"):
            if key not in layer.norms:
                layer.norms[key] = nn.RMSNorm(D, BASE["rms_norm_eps"], dtype=torch.float64)
        layer.forward = types.MethodType(in_order(other), layer)
    with torch.no_grad():
        wanted = torch.cat([theirs(torch.tensor([document])).logits[0] for document in DOCUMENTS])
        logits = model.logits(model.hidden(batch_of(DOCUMENTS)))
    assert float((logits - wanted).abs().max()) > 0.1


@pytest.mark.parametrize("recompute", [models.keep_inputs, models.selective, models.elementwise])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LAYERS)
def test_recomputation_gives_the_same_gradients(name, kind, recompute):
    model, batch = built(entry(name), **KINDS[kind]), batch_of(DOCUMENTS)
    plain, again = gradients(model, batch), gradients(model, batch, recompute)
    assert plain.keys() == again.keys()
    for key, gradient in plain.items():
        torch.testing.assert_close(again[key], gradient, msg=key)


@pytest.mark.parametrize("kind", KINDS)
def test_control_a_norm_behind_a_product_that_is_not_computed_again(kind, monkeypatch):
    monkeypatch.setattr(MLP, "read", MLP.forward)
    monkeypatch.setattr(ReadMoE, "forward", MoE.forward)
    model, batch = built(entry("post_norm"), **KINDS[kind]), batch_of(DOCUMENTS)
    plain, again = gradients(model, batch), gradients(model, batch, models.selective)
    key = "model.layers.1.output_layernorm.weight"
    assert float((again[key] - plain[key]).abs().max() / plain[key].abs().max()) > 1e-2


def test_sandwich_norm_is_gemma_2s_block():
    """Its embedding is scaled by 8 = sqrt(64), and its norms multiply by 1 + w: the weights are ours less these."""
    model = built(entry("sandwich_norm"))
    fields = BASE | NO_IDS | {"tie_word_embeddings": False, "query_pre_attn_scalar": 16}
    config = transformers.Gemma2Config(
        **fields,
        hidden_activation="silu",
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        sliding_window=512,
    )
    config._attn_implementation = "eager"
    theirs = transformers.Gemma2ForCausalLM(config).eval()
    renamed = {
        "post_attention_layernorm": "pre_feedforward_layernorm",
        "attention_output_layernorm": "post_attention_layernorm",
        "mlp_output_layernorm": "post_feedforward_layernorm",
    }
    state = {}
    for key, tensor in model.state_dict().items():
        name = key.split(".")[-2]
        tensor = tensor - 1 if "norm" in name else tensor / 8 if name == "embed_tokens" else tensor
        state[key.replace(name, renamed.get(name, name))] = tensor
    theirs.load_state_dict(state, strict=True)
    assert apart(model, theirs) <= 5e-5


def test_branch_norm_is_olmo_2s_block():
    """Without the norms that OLMo 2 has on q and k."""
    model = built(entry("branch_norm"))
    config = transformers.Olmo2Config(**(BASE | NO_IDS), tie_word_embeddings=False)
    config._attn_implementation = "eager"
    theirs = transformers.Olmo2ForCausalLM(config).eval()
    for layer in theirs.model.layers:
        layer.self_attn.q_norm = layer.self_attn.k_norm = nn.Identity()
    renamed = {
        "attention_output_layernorm": "post_attention_layernorm",
        "mlp_output_layernorm": "post_feedforward_layernorm",
    }
    state = {}
    for key, tensor in model.state_dict().items():
        name = key.split(".")[-2]
        state[key.replace(name, renamed.get(name, name))] = tensor
    theirs.load_state_dict(state, strict=True)
    assert apart(model, theirs) <= 5e-5


def apart(model, theirs):
    with torch.no_grad():
        wanted = torch.cat([theirs(torch.tensor([document])).logits[0] for document in DOCUMENTS])
        return float((model.logits(model.hidden(batch_of(DOCUMENTS))) - wanted).abs().max())


@pytest.mark.parametrize("part, first", [(pre_norm, True), (post_norm, False)])
def test_torchs_encoder_layer(part, first):
    """Attention without rotation and a plain MLP, relu²: what nn.TransformerEncoderLayer has."""
    shape, make = models.shape(config_of(num_key_value_heads=4)), Factory(torch.float64, "cpu")
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    linears = {name: make.linear(name, D, D) for name in names}
    layer = Layer(
        self_attn=Attention(0, 16, rope=None, **linears),
        mlp=PlainMLP(fc1=make.linear("a", D, 96), fc2=make.linear("b", 96, D), activation=SQUARED_RELU),
        input_layernorm=make.norm(D, 1e-5),
        post_attention_layernorm=make.norm(D, 1e-5),
    )
    layer = part(layer, At(shape, 0, make, "model.layers.0"))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for key, parameter in layer.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(1 + 0.3 * drawn if "norm" in key else drawn / 8)
    theirs = nn.TransformerEncoderLayer(
        D,
        4,
        96,
        dropout=0,
        activation=lambda x: F.relu(x) ** 2,
        batch_first=True,
        norm_first=first,
        bias=False,
    ).double()
    norms = [module for key, module in layer.named_children() if "norm" in key]
    for place, norm in enumerate(norms, 1):
        twin = nn.RMSNorm(D, 1e-5, dtype=torch.float64)
        twin.weight.data.copy_(norm.weight)
        setattr(theirs, f"norm{place}", twin)
    attention = layer.self_attn
    parts = [getattr(attention, name).weight for name in names[:3]]
    theirs.self_attn.in_proj_weight.data.copy_(torch.cat(parts))
    theirs.self_attn.out_proj.weight.data.copy_(attention.o_proj.weight)
    theirs.linear1.weight.data.copy_(layer.mlp.fc1.weight)
    theirs.linear2.weight.data.copy_(layer.mlp.fc2.weight)
    x = torch.randn(9, D, generator=generator, dtype=torch.float64)
    decoder = built()  # for a pass over one document
    run = decoder.packed_pass(batch_of([list(range(9))]))
    mask = nn.Transformer.generate_square_subsequent_mask(9, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(layer(x, run), theirs(x[None], src_mask=mask, is_causal=True)[0])


# --- DeepNorm


def test_deep_norm_has_the_papers_alpha_and_beta():
    """Table of figure 2: a decoder of 100 layers, alpha (2 · 100)^(1/4), beta (8 · 100)^(-1/4)."""
    model = models.from_config(config_of(entry("deep_norm"), num_hidden_layers=100), torch.float32)
    layer = model.layers[7]
    assert layer.alpha == pytest.approx(3.760603) and layer.beta == pytest.approx(0.188030)


@pytest.mark.parametrize("kind", KINDS)
def test_deep_norm_begins_smaller_where_the_paper_says(kind):
    fields = {**KINDS[kind], "num_hidden_layers": 8, "hidden_size": 256, "moe_intermediate_size": 128}
    plain, deep = (
        models.from_config(config_of(entry(name), **fields), torch.float32, "cpu")
        for name in ("post_norm", "deep_norm")
    )
    for model in (plain, deep):
        models.initialize(model, 0)
    before, after = dict(plain.named_parameters()), dict(deep.named_parameters())
    assert before.keys() == after.keys()
    scaled = set()
    for key in before:
        ratio = float(after[key].std() / before[key].std()) if before[key].dim() > 1 else 1.0
        if ratio != pytest.approx(1, abs=0.1):
            assert ratio == pytest.approx((8 * 8) ** -0.25, rel=0.05), key
            scaled.add(key.removesuffix(".weight").rsplit(".", 1)[-1])
    own = {"gate_proj", "up_proj"} if kind == "llama" else {"gate_up_proj"}
    assert scaled == {"v_proj", "o_proj", "down_proj"} | own
    o_proj = float(before["model.layers.0.self_attn.o_proj.weight"].std())
    assert o_proj == pytest.approx(BASE["initializer_range"], rel=0.05)  # not divided by sqrt(2 · layers)


@pytest.mark.parametrize("seed", range(3))
def test_a_gradient_of_100_layers_explodes_behind_norms_and_not_with_deep_norm(seed):
    """At the beginning. examples/lab/deep_norm.py trains them."""
    sizes = {"hidden_size": 32, "head_dim": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    fields = {**sizes, "num_hidden_layers": 100, "intermediate_size": 64, "initializer_range": 32**-0.5}

    def largest(name):
        model = models.from_config(config_of(entry(name), **fields), torch.float32, "cpu")
        models.initialize(model, seed)
        found = gradients(model, batch_of(DOCUMENTS))
        return float(torch.stack([gradient.norm() for gradient in found.values()]).norm())

    assert largest("post_norm") > 1e5 * largest("deep_norm")
