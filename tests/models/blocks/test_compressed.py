"""DeepSeek-V4's layers: recomputation to the bit, documents apart, and what the comparison with transformers sees."""

import copy
from dataclasses import replace

import pytest
import torch
import transformers
from family_cases import (
    CASES,
    DOCUMENTS,
    NO_IDS,
    SMALL,
    apart,
    batch_of,
    difference,
    oracle,
    ours,
    randomized,
)
from safetensors.torch import load_file, save_file

from unfreeze import models
from unfreeze.adapters import LoraConfig, attach
from unfreeze.checkpoint import open_checkpoint
from unfreeze.checkpoint.keymap import disk_modules
from unfreeze.core.errors import AdapterError, CheckpointError, ConfigError
from unfreeze.core.longer import Longer
from unfreeze.generate.open import open_model
from unfreeze.models import decoder
from unfreeze.models.indexers import train_indexers
from unfreeze.models.longer import config_for
from unfreeze.models.publish import published

NAME = "deepseek-v4"
POLICIES = [name for name in models.RECOMPUTE if name != "nothing"]


def made():
    return ours(oracle(NAME), CASES[NAME])


def gradients(model, recompute=models.plain) -> dict[str, torch.Tensor]:
    model.zero_grad()
    logits = model.logits(model.hidden(batch_of(DOCUMENTS), recompute))
    logits.log_softmax(-1)[:, 3].sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("trained", ["all", "adapters"])
@pytest.mark.parametrize("policy", POLICIES)
def test_layers_computed_again_have_the_same_gradients(policy, trained, monkeypatch):
    model = made()
    if trained == "adapters":
        for site in attach(model, LoraConfig(rank=4, alpha=8.0), seed=0):
            for key, factor in site.adapter.named_parameters():
                factor.data.normal_(std=0.1) if key.endswith("B") else None
    expected = gradients(model)
    again = gradients(model, models.RECOMPUTE[policy])
    assert again.keys() == expected.keys() and len(again) > 40
    assert [name for name in again if not torch.equal(again[name], expected[name])] == []
    monkeypatch.setattr(decoder, "chunk_tokens", lambda *_: 9)  # documents in chunks, each with its tokens
    again = gradients(model, models.RECOMPUTE[policy])
    for name, wanted in expected.items():
        # a connection's scale is three sums over all tokens and channels, the head's is one
        limit = 1e-4 if name.endswith("hc.scale") else 1e-5 if name.endswith("hc_scale") else 5e-6
        assert (again[name] - wanted).norm() <= limit * wanted.norm(), name


def across(starts=None) -> torch.Tensor:
    """Gradient of document 1's hidden states with respect to the embeddings, a number per token."""
    model, held, batch = made(), {}, batch_of(DOCUMENTS)
    if starts is not None:
        batch = replace(batch, starts_S=torch.tensor(starts))
    model.model.embed_tokens.register_forward_hook(
        lambda _module, _inputs, out: held.setdefault("x", out.detach().requires_grad_())
    )
    (gradient,) = torch.autograd.grad(model.hidden(batch)[7:9].square().sum(), held["x"])
    return gradient.abs().amax(1)


def test_the_gradient_across_documents_is_exactly_zero():
    of_tokens = across()
    assert of_tokens[7:9].all() and not of_tokens[:7].any() and not of_tokens[9:].any()


def test_control_documents_that_run_into_each_other_are_seen():
    assert across(starts=[0, 9])[:7].any()


def test_a_longer_document_equals_transformers():
    """300 tokens: several blocks of queries, windows of 4 and 16, the best 20 of 75 entries."""
    case = CASES[NAME]
    fields = copy.deepcopy(case.fields) | {"index_topk": 20, "max_position_embeddings": 512}
    fields["compress_rates"] = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16}
    case = case._replace(fields=fields | {"sliding_window": 40})
    torch.manual_seed(0)
    config = case.made({**SMALL, **NO_IDS, "rms_norm_eps": 1e-5, "initializer_range": 0.125})
    tokens = torch.randint(0, 90, (300,), generator=torch.Generator().manual_seed(3)).tolist()
    reference = randomized(transformers.DeepseekV4ForCausalLM, config)
    logits, worst = apart(reference, case, documents=[tokens, tokens[:50]])
    assert logits <= 1e-4 and worst <= 1e-4


def other_tokens(model):
    """The planted bug: experts of another token."""
    model.layers[0].mlp.gate.tid2eid.copy_(model.layers[0].mlp.gate.tid2eid.roll(1, 0))


def choose_all(model):
    for layer in model.layers[1::2]:
        layer.self_attn.compressor.indexer.keys = 6


def no_bias(model):
    model.layers[2].self_attn.compressor.position_bias.weight.zero_()


def one_stream(model):
    """The planted bug: streams that are not mixed into each other."""
    model.layers[1].ffn_hc.scale[2] = 0


@pytest.mark.parametrize("bug", [other_tokens, choose_all, no_bias, one_stream])
def test_control_the_comparison_sees_a_planted_bug(bug):
    logits, _ = difference(NAME, change=lambda model: torch.no_grad()(bug)(model))
    assert logits > 1e-3


def test_the_indexer_is_frozen_and_the_grouped_projection_carries_no_adapter():
    model = made()
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert (
        frozen == {name for name, _ in model.named_parameters() if ".indexer." in name} and len(frozen) == 12
    )
    names = {site.name for site in attach(model, LoraConfig(rank=2), seed=0)}
    assert any(name.endswith("compressor.gate_proj") for name in names)
    with pytest.raises(AdapterError, match="'indexer' matches nothing"):
        attach(made(), LoraConfig(rank=2, targets=("indexer",)), seed=0)
    for target in ("o_a_proj", "*.indexer.q_b_proj"):
        with pytest.raises(AdapterError, match="names layers that can carry no adapter here"):
            attach(made(), LoraConfig(rank=2, targets=(target,)), seed=0)
    with pytest.raises(ConfigError, match="no indexer that can train"):
        train_indexers(made())
    with pytest.raises(ConfigError, match="yarn is not built for deepseek_v4: it has several tables"):
        config_for({**made().shape.config, "model_type": "deepseek_v4"}, Longer("yarn", 4.0))
    assert not any("indexer" in name or name.endswith("o_a_proj") for name in names)


def test_what_stays_in_float32_in_a_bf16_model():
    model = models.build(made().shape, dtype=torch.bfloat16, device="cpu")
    models.initialize(model, seed=0)
    wide = {name.rpartition(".")[2] for name, p in model.named_parameters() if p.dtype == torch.float32}
    assert wide == {
        "fn",
        "base",
        "scale",
        "hc_fn",
        "hc_base",
        "hc_scale",
        "weight",
    }  # the last: position_bias
    for layer in model.layers:
        for part in (layer.attn_hc, layer.ffn_hc):
            _, comb, _ = part(torch.randn(3, 4 * 64).bfloat16())
            assert (comb.sum(-2) - 1).abs().max() < 1e-4  # of few iterations: columns come last
    assert gradients(model, models.keep_inputs)


@pytest.mark.parametrize("spelling", ["transformers", "release", "in memory"])
def test_three_spellings_of_its_names_are_read(spelling, tmp_path):
    reference = oracle(NAME)
    reference.save_pretrained(tmp_path)
    if spelling == "release":
        model = ours(reference, CASES[NAME])
        tensors = dict(published(model, {**model.shape.config, "dtype": "float32"}))
        assert "layers.1.attn.indexer.compressor.ape" in tensors and "head.weight" in tensors
    else:
        tensors = load_file(tmp_path / "model.safetensors")
        assert "model.layers.1.attn.norm.weight" in tensors
        rules = models.rules(made().shape)
        names = disk_modules("model.layers.1.mlp.experts.down_proj", rules)
        assert {"layers.1.ffn.experts.0.w2", "model.layers.1.ffn.experts.0.w2"} <= {*names}
    if spelling == "in memory":
        tensors = {name: tensor.contiguous() for name, tensor in reference.state_dict().items()}
    save_file(tensors, tmp_path / "model.safetensors")
    read = open_model(open_checkpoint(tmp_path))
    logits = read.logits(read.hidden(batch_of(DOCUMENTS[2:])))
    assert (logits - reference(torch.tensor(DOCUMENTS[2:])).logits[0]).abs().max() <= 1e-4
    if spelling == "release":  # and transformers reads what was written
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
        assert (
            again(torch.tensor(DOCUMENTS[2:])).logits - reference(torch.tensor(DOCUMENTS[2:])).logits
        ).abs().max() <= 1e-5


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_table_of_experts_is_read_in_32_bits_and_refused_where_it_names_one_that_is_not_there(
    dtype, tmp_path
):
    oracle(NAME).save_pretrained(tmp_path)
    file, name = tmp_path / "model.safetensors", "model.layers.2.ffn.gate.tid2eid"
    tensors = load_file(file)
    wanted = tensors[name].clone()
    for wrong in (None, -1, 8):
        tensors[name] = wanted.to(dtype).clone()
        if wrong is not None:
            tensors[name][5, 1] = wrong
        save_file(tensors, file)
        if wrong is None:
            model = open_model(open_checkpoint(tmp_path))
            assert torch.equal(model.layers[2].mlp.gate.tid2eid, wanted)
            continue
        with pytest.raises(CheckpointError, match=f"names expert {wrong}; the experts are 0 to 7"):
            open_model(open_checkpoint(tmp_path))


def test_a_new_model_names_different_experts_for_each_token():
    model = models.build(made().shape, dtype=torch.float32, device="cpu")
    models.initialize(model, seed=0)
    table = model.layers[0].mlp.gate.tid2eid
    assert (table[:, 0] != table[:, 1]).all() and table.unique().tolist() == list(range(8))


def test_matrices_of_experts_are_held_as_stored_in_the_spelling_of_transformers(tmp_path):
    """bf16 under float32, as a packed format is found by the same names."""
    oracle(NAME).bfloat16().save_pretrained(tmp_path)
    model = open_model(open_checkpoint(tmp_path), as_stored=True)
    for matrix in (model.layers[1].mlp.experts.gate_up_proj, model.layers[1].self_attn.o_a_proj):
        assert matrix.weight.dtype == torch.bfloat16
    assert torch.isfinite(model.hidden(batch_of(DOCUMENTS))).all()


def test_two_shares_of_a_head_that_rotate_are_refused():
    config = made().shape.config
    tables = {
        name: {**config["rope_parameters"][name], "partial_rotary_factor": 0.5}
        for name in ("main", "compress")
    }
    with pytest.raises(CheckpointError, match=r"partial_rotary_factor is 0\.25, and 0\.5 in rope_parameters"):
        models.shape({**config, "rope_parameters": tables})
    assert models.shape(
        {**config, "rope_parameters": tables, "partial_rotary_factor": 0.5, "qk_rope_head_dim": 16}
    )
