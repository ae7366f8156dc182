"""Hybrids in training: documents of several chunks, recomputation, decays in float32, and configs that contradict."""

import json
from dataclasses import replace

import pytest
import torch
import transformers
from cases_kimi_lfm2 import CONFIGS
from family_cases import CASES, batch_of, oracle, ours
from safetensors.torch import load_file, save_file

from unfreeze import models
from unfreeze.adapters import LoraConfig, attach, load_adapter, save_adapter, sites, verify_adapter
from unfreeze.checkpoint import open_checkpoint
from unfreeze.compress.deltas import Deltas
from unfreeze.compress.merge import inputs_of, merge
from unfreeze.compress.work import MergeWork
from unfreeze.core.errors import CheckpointError
from unfreeze.generate.open import open_model
from unfreeze.models.blocks.recurrent import Decay
from unfreeze.models.configs import kimi_linear
from unfreeze.models.publish import published

HYBRIDS = ("qwen3-next", "qwen3.5", "qwen3.5-moe", "kimi-linear", "lfm2-biases-untied", "lfm2-moe")
LENGTHS = (150, 1, 70, 3, 66)
each_hybrid = pytest.mark.parametrize("name", HYBRIDS)


def documents() -> list[list[int]]:
    draw = torch.Generator().manual_seed(3)
    return [torch.randint(97, (length,), generator=draw).tolist() for length in LENGTHS]


def made(name):
    return ours(oracle(name), CASES[name])


def gradients(model, recompute):
    model.zero_grad()
    hidden = model.hidden(batch_of(documents()), recompute)
    hidden.square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("trained", ["all", "adapters"])
@each_hybrid
def test_gradients_do_not_depend_on_what_is_recomputed(name, trained):
    """Bit for bit, over several chunks and segments of the recurrence."""
    model = made(name)
    if trained == "adapters":
        for site in attach(model, LoraConfig(rank=4, alpha=8.0), seed=0):
            for key, factor in site.adapter.named_parameters():
                factor.data.normal_(std=0.1) if key.endswith("B") else None
    wanted = gradients(model, models.RECOMPUTE["nothing"])
    assert any("decay" in key or "conv" in key for key in wanted) or trained == "adapters"
    for policy in ("layers", "selective", "elementwise"):
        own = gradients(model, models.RECOMPUTE[policy])
        assert own.keys() == wanted.keys()
        assert [key for key in own if not torch.equal(own[key], wanted[key])] == [], policy


def across(model, starts=None):
    """Gradient of document 2's hidden states with respect to the embeddings, a number per token."""
    batch = batch_of(documents())
    if starts is not None:
        batch = replace(batch, starts_S=torch.tensor(starts))
    held = {}
    hook = model.model.embed_tokens.register_forward_hook(
        lambda _module, _inputs, out: held.setdefault("x", out.detach().requires_grad_())
    )
    hidden = model.hidden(batch)
    hook.remove()
    (gradient,) = torch.autograd.grad(hidden[151:221].square().sum(), held["x"])
    return gradient.abs().amax(1)


@each_hybrid
def test_the_gradient_across_documents_is_exactly_zero(name):
    of_tokens = across(made(name))
    assert of_tokens[151:220].all()
    assert not of_tokens[:151].any() and not of_tokens[221:].any()


@each_hybrid
def test_control_documents_that_run_into_each_other_are_seen(name):
    assert across(made(name), starts=[0, 150, 221, 224])[150] > 0


@pytest.mark.parametrize("name", [name for name in HYBRIDS if not name.startswith("lfm2")])
def test_decays_stay_in_float32_where_all_else_is_bf16(name):
    shape = made(name).shape
    model = models.build(shape, dtype=torch.bfloat16, device="cpu")
    models.initialize(model, seed=0)
    decays = [module for module in model.modules() if isinstance(module, Decay)]
    assert decays
    for decay in decays:
        assert {p.dtype for p in decay.parameters()} == {torch.float32}
        a = torch.full((2, decay.dt_bias.numel()), -9.0, dtype=torch.bfloat16)
        g = decay(a)
        assert g.dtype == torch.float32 and (g < 0).all() and g.isfinite().all()
        # Mamba-2's: A from 1 to 16, steps from .001 to .1
        assert decay.A_log.min() >= 0 and decay.A_log.max() <= torch.tensor(16.0).log()
        step = torch.nn.functional.softplus(decay.dt_bias)
        assert step.min() >= 0.0009 and step.max() <= 0.11
    files = dict(published(model, {**shape.config, "dtype": "bfloat16"}))
    kept = {key.rpartition(".")[2] for key, tensor in files.items() if tensor.dtype == torch.float32}
    assert {"A_log", "dt_bias"} <= kept <= {"A_log", "dt_bias", "e_score_correction_bias"}


def test_kimis_decay_is_that_of_transformers_forget_gate():
    reference = oracle("kimi-linear")
    gate = reference.model.layers[0].self_attn.forget_gate
    decay = ours(reference, CASES["kimi-linear"]).layers[0].self_attn.decay
    x_TD = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = gate(x_TD[None])[0]
        assert (decay(gate.f_b_proj(gate.f_a_proj(x_TD))) - wanted).abs().max() <= 1e-5
        assert wanted.flatten(1).std(1).min() > 0  # a number per channel


KIMI = {**CONFIGS["kimi_linear"], "model_type": "kimi_linear"}
LFM2 = {**CONFIGS["lfm2"], "model_type": "lfm2", "hidden_size": 64, "num_attention_heads": 4}
TABLE = KIMI["linear_attn_config"]


def refused(config) -> str:
    with pytest.raises(CheckpointError) as caught:
        models.shape(config)
    assert "\n" not in caught.value.message and caught.value.next
    return caught.value.message


@pytest.mark.parametrize(
    ("base", "fields", "message"),
    [
        (KIMI, {"layer_types": ["linear_attention"] * 3}, "layer_types and linear_attn_config differ"),
        (KIMI, {"layer_types": ["mamba"] * 3}, "layer_types holds 'mamba', which is not built"),
        (KIMI, {"mlp_layer_types": ["dense", "moe", "moe"]}, "mlp_layer_types holds 'moe'"),
        (KIMI, {"mlp_layer_types": ["dense"]}, "mlp_layer_types has 1 entries, num_hidden_layers is 3"),
        (KIMI, {"linear_attn_config": {**TABLE, "kda_layers": [1]}}, "must hold each layer from 1 to 3 once"),
        (KIMI, {"linear_attn_config": {**TABLE, "kda_layers": [1, 2, 3]}}, "each layer from 1 to 3 once"),
        (KIMI, {"linear_attn_config": {**TABLE, "kda_layers": [0, 1]}}, "each layer from 1 to 3 once"),
        (KIMI, {"linear_attn_config": {**TABLE, "kda_layers": "all"}}, "linear_attn_config.kda_layers 'all'"),
        (KIMI, {"linear_attn_config": {**TABLE, "head_dim": 0}}, "linear_attn_config.head_dim 0"),
        (KIMI, {"linear_attn_config": {**TABLE, "gate_lower_bound": -5.0}}, "gate_lower_bound -5.0"),
        (KIMI, {"linear_attn_config": [1]}, "linear_attn_config is [1]; it must be an object"),
        (KIMI, {"mla_use_nope": False}, "mla_use_nope false is not built"),
        (KIMI, {"moe_router_activation_func": "softmax"}, "moe_router_activation_func 'softmax'"),
        (KIMI, {"num_experts_per_tok": 4}, "num_experts_per_tok 4 is not built"),
        (LFM2, {"full_attn_idxs": [3]}, "full_attn_idxs holds 3, and layers are numbered 0 to 2"),
        (LFM2, {"full_attn_idxs": [-1]}, "full_attn_idxs holds an entry that is not a layer number"),
        (LFM2, {"layer_types": ["conv"] * 3}, "full_attn_idxs and layer_types differ"),
        (LFM2, {"layer_types": ["conv", "ssm", "conv"]}, "layer_types holds 'ssm', which is not built"),
        (LFM2, {"conv_L_cache": 0}, "conv_L_cache is 0; it must be a whole number from 1"),
        (LFM2, {"conv_dim": 32}, "conv_dim 32 is not built"),
        (LFM2, {"block_multiple_of": 0}, "block_multiple_of is 0"),
        (LFM2, {"block_use_swiglu": False}, "block_use_swiglu false is not built"),
    ],
)
def test_a_config_that_contradicts_itself_is_refused_in_one_line(base, fields, message):
    models.shape(base)
    assert message in refused({**base, **fields})


def test_deepseeks_names_of_kimis_sizes_are_read_and_the_defaults_are_transformers():
    theirs = transformers.KimiLinearConfig().to_dict()
    for name, (own, usual) in kimi_linear.OTHER_NAMES.items():
        assert theirs[own] == usual
        without = {field: value for field, value in KIMI.items() if field not in (name, own)}
        one, other = (models.shape({**without, spelled: KIMI[own]}) for spelled in (name, own))
        assert replace(one, config={}) == replace(other, config={})
        assert one.config[name] == other.config[name] == KIMI[own]


def test_widths_of_lfm2s_releases():
    """LFM2-350M, 700M and 1.2B: block_ff_dim 6,656, 10,240 and 12,288 give MLPs of 4,608, 6,912 and 8,192."""
    adjusted = {"block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256}
    widths = {6656: 4608, 10240: 6912, 12288: 8192}
    for written, width in widths.items():
        assert models.shape({**LFM2, **adjusted, "block_ff_dim": written}).intermediate_size == width


@pytest.mark.parametrize(
    ("name", "inner"),
    [
        ("kimi-linear", ("mlp", "shared_experts")),
        ("lfm2-moe", ("mlp",)),
        ("lfm2-biases-untied", ("mlp",)),
        ("qwen3-next", ("shared_experts",)),
    ],
)
def test_a_file_for_vllm_has_the_releases_names_and_is_read_again(name, inner, tmp_path):
    """Not transformers' ones in memory (forget_gate), nor ours; peft's: tests/models/test_family_files.py."""
    reference = oracle(name)
    reference.save_pretrained(tmp_path / "base")
    stored = set(load_file(tmp_path / "base" / "model.safetensors"))
    stored |= {key.replace("block_sparse_moe", "mlp") for key in stored}  # the release's name of a dense MLP
    model = made(name)
    attach(model, LoraConfig(rank=4, alpha=8.0, targets=("attention", *inner)), seed=0)
    with torch.no_grad():
        for index, site in enumerate(sites(model)):
            site.adapter.B.normal_(generator=torch.Generator().manual_seed(index))
    verify_adapter(model, save_adapter(model, tmp_path / "adapter", "per-expert"))
    modules = {
        key.removeprefix("base_model.model.").split(".lora_")[0]
        for key in load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    }
    assert len(modules) == len(sites(model)) and {f"{module}.weight" for module in modules} <= stored
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert set(config["target_modules"]) == {module.rpartition(".")[2] for module in modules}
    again = made(name)
    load_adapter(again, tmp_path / "adapter")
    batch = batch_of(documents())
    assert torch.equal(again.hidden(batch), model.hidden(batch))


@torch.no_grad()
def test_a_quantized_dense_layer_of_kimi_is_read_under_both_of_its_names(tmp_path):
    """The release says mlp, transformers writes block_sparse_moe; FP8 with a scale for each row."""
    reference, config_groups = (
        oracle("kimi-linear"),
        {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 8,
                    "type": "float",
                    "strategy": "channel",
                    "symmetric": True,
                    "dynamic": False,
                },
            }
        },
    )
    whole = tmp_path / "whole"
    reference.save_pretrained(whole)
    packed, expanded = {}, {}
    for key, tensor in load_file(whole / "model.safetensors").items():
        packed[key] = expanded[key] = tensor
        if key.startswith("model.layers.0.block_sparse_moe."):
            scale = tensor.abs().amax(1, keepdim=True) / 448
            packed[key] = (tensor / scale).to(torch.float8_e4m3fn)
            packed[key.replace(".weight", ".weight_scale")] = scale
            expanded[key] = packed[key].float() * scale
    assert len(packed) == len(expanded) + 3
    save_file(expanded, whole / "model.safetensors", {"format": "pt"})
    theirs = type(reference).from_pretrained(whole, attn_implementation="eager", dtype=torch.float32).eval()
    expected = torch.cat([theirs(torch.tensor([document])).logits[0] for document in documents()])
    config = json.loads((whole / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": config_groups,
        "ignore": ["lm_head"],
    }
    for written in ("block_sparse_moe", "mlp"):
        folder = tmp_path / written
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        own = {
            key.replace("layers.0.block_sparse_moe", f"layers.0.{written}"): t for key, t in packed.items()
        }
        save_file(own, folder / "model.safetensors", {"format": "pt"})
        model = open_model(open_checkpoint(folder))
        assert model.get_submodule("model.layers.0.mlp.gate_proj").codec is not None
        logits = model.logits(model.hidden(batch_of(documents())))
        assert (logits - expected).abs().max() <= 1e-4


def test_kimis_decays_stay_in_float32_in_a_merge_to_bf16(tmp_path):
    """A_log is [1, 1, H, 1]: a vector, with the dimensions of a matrix."""
    oracle("kimi-linear").save_pretrained(tmp_path / "base")
    model = made("kimi-linear")
    attach(model, LoraConfig(rank=2, alpha=4.0), seed=0)
    save_adapter(model, tmp_path / "adapter", base_name="base")
    manifest = open_checkpoint(tmp_path / "base")
    meta = models.meta_model(model.shape, manifest, torch.float32)
    deltas = Deltas(meta, tmp_path / "adapter")
    given = inputs_of(manifest, tmp_path / "adapter", "bf16", "refit")
    merge(MergeWork(manifest, meta, deltas, "bf16"), deltas, tmp_path / "out", given, "refit", None)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "out"))
    for key, tensor in after.items():
        if key.endswith(("A_log", "dt_bias")):
            assert torch.equal(tensor, before[key]) and tensor.dtype == torch.float32
    assert after["model.layers.0.self_attn.q_conv1d.weight"].dtype == torch.bfloat16
