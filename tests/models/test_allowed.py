"""Every field of config.json is read, refused, known to be without effect, or named; and what is absent is
what transformers takes it for."""

import json
from dataclasses import replace

import pytest
import transformers

from unfreeze import models
from unfreeze.core.errors import CheckpointError
from unfreeze.models import allowed, deepseek_v3, glm_moe_dsa, llama
from unfreeze.models.blocks.rope import rope_parameters

LLAMA = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
MLA = {
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}
DEEPSEEK = LLAMA | MLA | {"model_type": "deepseek_v3", "num_key_value_heads": 4}
QWEN3 = LLAMA | {"model_type": "qwen3", "num_key_value_heads": 2}
MOE = QWEN3 | {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}


def refused(config: dict) -> str:
    with pytest.raises(CheckpointError) as caught:
        models.shape(config)
    return caught.value.message


ELSEWHERE = [model_type for model_type in models.FAMILIES if model_type not in models.ONLY_HERE]


@pytest.mark.parametrize("model_type", ELSEWHERE)
def test_what_is_absent_is_what_transformers_takes_it_for(model_type, bench):
    theirs = transformers.CONFIG_MAPPING[bench.transformers_name(model_type)]()
    theirs.allow_global_per_layer_attribute_access = True  # Gemma 4's head_dim, which is that of most layers
    table = models.FAMILIES[model_type].FIELDS
    if model_type == "granitemoehybrid":  # the class replaces "auto" by the width itself
        theirs.mamba_d_head = "auto"
    for name, value in table.absent.items():
        if name != "rope_theta":
            # Qwen3-VL's text class leaves tie_word_embeddings to the config around it
            default = getattr(theirs, name, False)
            lists = isinstance(value, tuple) and not isinstance(default, tuple)
            assert default == (list(value) if lists else value), name
    if table.per_kind:
        instead = PUBLISHED_INSTEAD.get(model_type, {})
        defaults = {**theirs.to_dict(), "model_type": model_type, **instead}
        without = {name: value for name, value in defaults.items() if name != "rope_parameters"}
        ours, spelled = models.shape(without), models.shape(defaults)
        assert (ours.rope, ours.ropes) == (spelled.rope, spelled.ropes)
        return
    if not hasattr(theirs, "rope_parameters"):  # nothing rotates (Kimi Linear, Nemotron-H)
        return
    rotary = {"rope_parameters": getattr(models.FAMILIES[model_type], "ROTARY", None), **table.absent}
    assert rope_parameters(rotary)["rope_theta"] == theirs.rope_parameters["rope_theta"]


# defaults that no release has: GLM's heads would be 42 wide and rotate 21 elements, half a pair too many;
# DeepSeek-V2 would choose None experts, Ministral's heads would have no width, LFM2-MoE's layers no kind
PUBLISHED_INSTEAD = {
    "glm4_moe": {"head_dim": 128},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "ministral": {"head_dim": 128},
    "gemma4_text": {"hidden_size_per_layer_input": 0},
    "lfm2_moe": {"layer_types": ["conv"] * 32},
}


NAMED = {  # what a config class has by default and nobody follows here
    "seed_oss": ("config.json: attention_dropout = 0.1, residual_dropout = 0.1: unknown and ignored")
}


@pytest.mark.parametrize("model_type", ELSEWHERE)
def test_no_field_of_the_config_class_is_unknown(model_type, bench):
    """Written by transformers with every default spelled out: nothing to name, and nothing to refuse but
    sizes."""
    theirs = transformers.CONFIG_MAPPING[bench.transformers_name(model_type)]().to_dict()
    theirs |= {"model_type": model_type, **PUBLISHED_INSTEAD.get(model_type, {})}
    unread = models.not_followed(theirs)
    assert unread == NAMED.get(model_type, ""), (
        "name each field in FIELDS of the family's file (models/allowed.py says how)"
    )
    models.shape(theirs)


@pytest.mark.parametrize("base", [LLAMA, QWEN3, MOE, DEEPSEEK], ids=lambda base: base["model_type"])
@pytest.mark.parametrize(
    "field, value, said",
    [
        ("is_causal", False, "is_causal false is not built"),
        ("layer_types", ["full_attention", "sliding_attention", "full_attention"], "layer_types"),
        ("layer_types", ["full_attention"], "one per layer"),
        ("partial_rotary_factor", 0.5, "partial_rotary_factor 0.5"),
        ("use_sliding_window", True, "use_sliding_window true"),
        ("hidden_act", "gelu", "hidden_act 'gelu'"),
        ("per_layer_config", {"0": {"rms_norm_eps": 1.0}}, "per_layer_config"),
        ("use_bidirectional_attention", True, "use_bidirectional_attention true"),
        (
            "rope_parameters",
            {"rope_type": "default", "partial_rotary_factor": 0.5},
            r"rope_parameters.partial_rotary_factor 0.5",
        ),
        ("rope_parameters", {"full_attention": {"rope_type": "default"}}, "a table per kind of layer"),
    ],
)
def test_what_changes_the_numbers_is_refused_by_name(base, field, value, said):
    models.shape(base)
    assert said in refused({**base, field: value})


@pytest.mark.parametrize(
    "field, value, said",
    [
        ("scoring_func", "softmax", "scoring_func 'softmax'"),
        ("topk_method", "greedy", "topk_method 'greedy'"),
        ("moe_layer_freq", 2, "moe_layer_freq 2"),
        ("head_dim", 24, "head_dim 24 is not built for model_type 'deepseek_v3'; built: 8"),
        ("num_key_value_heads", 2, "num_key_value_heads 2"),
        ("qk_head_dim", 8, "qk_head_dim 8"),
        ("num_local_experts", 8, "num_local_experts 8"),
        ("norm_topk_prob", None, "norm_topk_prob is null"),
        ("rope_interleave", None, "rope_interleave is null"),
        ("n_group", 16, "n_group 16 is one expert per group"),
    ],
)
def test_deepseeks_own(field, value, said):
    assert said in refused({**DEEPSEEK, field: value})


SPARSE = DEEPSEEK | {"model_type": "glm_moe_dsa", "q_lora_rank": 40, "index_head_dim": 16}


@pytest.mark.parametrize(
    "field, value, said",
    [
        ("q_lora_rank", None, "no 'q_lora_rank'"),
        ("index_head_dim", 4, "index_head_dim 4 is less than qk_rope_head_dim 8"),
        ("index_topk", 0, "index_topk is 0; it must be a whole number"),
        ("indexer_types", ["full", "shared"], "indexer_types has 2 entries, num_hidden_layers is 3"),
        ("indexer_types", ["full", "none", "full"], "indexer_types holds 'none'; built: full, shared"),
        ("indexer_types", ["shared", "full", "full"], "indexer_types begins with a shared layer"),
        ("index_topk_pattern", "FSX", "index_topk_pattern holds 'X'"),
        ("layer_types", ["full_attention"] * 3, "layer_types ['full_attention', "),
        ("indexer_rope_interleave", False, "indexer_rope_interleave false"),
        ("rope_interleave", False, "rope_interleave false"),
        ("num_experts", 8, "num_experts 8"),
        ("mlp_layer_types", ["dense"] * 2, "mlp_layer_types has 2 entries"),
        ("attention_value_scale", 0.5, "values of another width and scale than keys (attention_value_scale)"),
    ],
)
def test_sparse_attentions_own(field, value, said):
    models.shape(SPARSE)
    assert said in refused({**SPARSE, field: value})


def test_the_choices_that_layers_share_in_each_spelling():
    """GLM-5.2's three spellings, and one for each layer where nothing is said."""
    kinds = glm_moe_dsa.indexer_types
    six = {"num_hidden_layers": 6}
    theirs = transformers.GlmMoeDsaConfig
    for fields in (
        {},
        {"index_topk_freq": 2, "index_skip_topk_offset": 3},
        {"index_topk_freq": 4},
        {"index_topk_pattern": "FFSFSS"},
        {"index_topk_pattern": ["full", "shared", "full", "full", "shared", "shared"]},
        {"indexer_types": ["full", "shared"] * 3, "index_topk_freq": 3},
    ):
        assert kinds(six | fields) == theirs(**six, **fields).indexer_types


def test_mimos_own_words_must_say_what_transformers_reads():
    """The release's config.json, which transformers reads by its own fields and defaults."""
    release = LLAMA | {
        "model_type": "mimo_v2_flash",
        "num_attention_heads": 8,
        "num_hidden_layers": 6,
        "sliding_window": 128,
        "sliding_window_size": 128,
        "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0],
        "moe_layer_freq": [0, 1, 1, 1, 1, 1],
        "rope_theta": 5000000,
        "swa_rope_theta": 10000,
        "partial_rotary_factor": 0.334,
        "layernorm_epsilon": 1e-5,
        "routed_scaling_factor": None,
        "n_shared_experts": None,
        "add_full_attention_sink_bias": False,
        "add_swa_attention_sink_bias": True,
        "swa_num_key_value_heads": 8,
    }
    shape = models.shape(release)
    assert models.not_followed(release) == "" and shape.moe.dense_layers == {0}
    assert shape.config["sliding_window"] == 129  # the query itself counts
    for field, value in {
        "hybrid_layer_pattern": [1, 1, 1, 1, 1, 0],
        "moe_layer_freq": [1, 1, 1, 1, 1, 1],
        "rope_theta": 640000,
        "swa_rope_theta": 500,
        "layernorm_epsilon": 1e-6,
        "swa_num_key_value_heads": 4,
        "n_shared_experts": 1,
        "add_full_attention_sink_bias": True,
    }.items():
        assert f"{field} " in refused({**release, field: value})
    assert "2 x num_key_value_heads" in refused(
        {**release, "num_key_value_heads": 8, "swa_num_key_value_heads": 16}
    )
    assert "mlp_layer_types holds 'x'" in refused({**release, "mlp_layer_types": ["x"] * 6})
    assert "mlp_layer_types has 1 entries" in refused({**release, "mlp_layer_types": ["dense"]})


def test_absent_and_null_are_told_apart_where_null_says_something():
    without = {name: value for name, value in DEEPSEEK.items() if name != "q_lora_rank"}
    assert models.shape(DEEPSEEK).mla.q_lora_rank is None and models.shape(without).mla.q_lora_rank == 1536
    assert models.shape({**QWEN3, "num_key_value_heads": None}).num_kv_heads == 4
    assert models.shape({**DEEPSEEK, "num_key_value_heads": None}).num_kv_heads == 4
    headless = {name: value for name, value in DEEPSEEK.items() if name != "num_key_value_heads"}
    assert "num_key_value_heads 128 is not built" in refused(headless)
    bare = {name: value for name, value in QWEN3.items() if name != "num_key_value_heads"}
    assert (
        "not a multiple of num_key_value_heads 32" in refused(bare)
        and models.shape({**bare, "num_attention_heads": 64}).num_kv_heads == 32
    )
    # Qwen3's class has a width, Qwen3-MoE's takes hidden over heads
    assert models.shape(QWEN3).head_dim == 128 and models.shape(MOE).head_dim == 16


def test_an_unknown_field_is_named_and_a_known_one_is_not():
    said = models.not_followed(
        {
            **LLAMA,
            "clip_qkv": 8.0,
            "attention_dropout": 0.1,
            "eos_token_id": 5,
            "temperature": 0.2,
            "logits_scaling": 1,
            "sliding_window": None,
            "rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta": 3},
        }
    )
    assert (
        said
        == "config.json: clip_qkv = 8.0, attention_dropout = 0.1, rope_scaling.beta = 3: unknown and ignored"
    )
    assert models.not_followed({**QWEN3, "sliding_window": 4096, "max_window_layers": 28}) == ""
    assert "sliding_window = 4,096" in models.not_followed({**LLAMA, "sliding_window": 4096})


PUBLISHED = [
    # Falcon3-7B, SmolLM2, salamandra-2b, LLaMA-7B as converted in 2023, OpenLLaMA,
    # DeepSeek-R1-Distill-Qwen-7B,
    # Qwen3-Coder, Llama-2 as first published
    (LLAMA, {"activation": "swiglu"}),
    (LLAMA, {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"dtype": "q4"}}),
    (LLAMA, {"num_layers": 3}),
    (LLAMA, {"max_sequence_length": 2048}),
    (LLAMA, {"use_memorry_efficient_attention": False}),
    (QWEN3, {"use_mrope": False}),
    (MOE, {"use_qk_norm": True, "qkv_bias": False, "shared_expert_intermediate_size": 0}),
    (LLAMA, {"pretraining_tp": 2, "return_dict": True}),
    (DEEPSEEK, {"auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"}}),
]


@pytest.mark.parametrize("base, fields", PUBLISHED)
def test_what_publishers_write_beside_the_sizes_is_not_named(base, fields):
    assert models.not_followed({**base, **fields}) == ""


@pytest.mark.parametrize(
    "base, field, value",
    [
        (LLAMA, "activation", "relu2"),
        (LLAMA, "rope_interleaved", True),
        (LLAMA, "num_layers", 4),
        (QWEN3, "use_mrope", True),
        (LLAMA, "use_qk_norm", True),
        (DEEPSEEK, "qk_norm", True),
        (MOE, "use_qk_norm", False),
        (LLAMA, "log_scale", True),
        (LLAMA, "auto_map", {"AutoModel": "modeling_llama_encoder.LlamaEncoderModel"}),
    ],
)
def test_the_same_fields_at_another_value_are_named(base, field, value):
    assert f"{field} = " in models.not_followed({**base, field: value})


def test_mlx_quantization_is_refused_by_name():
    assert "quantization {'group_size': 64, 'bits': 4} is not built" in refused(
        {**LLAMA, "quantization": {"group_size": 64, "bits": 4}}
    )


def test_published_configs_have_nothing_to_name(pytestconfig):
    folder = pytestconfig.rootpath.parent / "shared" / "data" / "configs"
    if not folder.is_dir():
        pytest.skip("the published configs are not here")
    seen = 0
    for file in sorted(folder.glob("*.json")):
        config = json.loads(file.read_text(encoding="utf-8"))
        try:
            models.shape(config)
        except CheckpointError:
            continue
        assert models.not_followed(config) == "", file.name
        seen += 1
    assert seen >= 15


WRAPPED = {
    "model_type": "kimi_k25",
    "text_config": DEEPSEEK,
    "vision_config": {"hidden_size": 8},
    "media_placeholder_token_id": 3,
}


@pytest.mark.parametrize(
    "outer", ["llava", "internvl_chat", "voxtral", "kimi_vl", "deepseek_v3", None, ["kimi_k25"]]
)
def test_an_outer_model_type_that_is_not_known_is_refused(outer):
    said = refused({**WRAPPED, "model_type": outer})
    assert (
        f"model_type {str(outer)!r} around a text_config is not built, though its text part 'deepseek_v3' is"
        in said
    )
    assert "'made_up' (its text part: 'made_up_text') is not built" in refused(
        {"model_type": "made_up", "text_config": {"model_type": "made_up_text"}}
    )


def test_the_outer_fields_are_judged_too():
    models.shape(WRAPPED)
    assert models.not_followed(WRAPPED) == ""
    assert models.not_followed({**WRAPPED, "logits_scaling": 8.0}).startswith(
        "config.json: logits_scaling = 8.0 (outside text_config): unknown"
    )
    assert "is_causal false" in refused({**WRAPPED, "is_causal": False})
    assert "tie_word_embeddings and text_config.tie_word_embeddings differ" in refused(
        {**WRAPPED, "tie_word_embeddings": True, "text_config": {**DEEPSEEK, "tie_word_embeddings": False}}
    )
    assert models.shape({**WRAPPED, "tie_word_embeddings": True}).tied


def test_two_spellings_of_the_rotary_table_that_disagree_are_refused():
    old, new = (
        {"type": "linear", "factor": 2.0},
        {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
    )
    assert (
        models.shape({**LLAMA, "rope_scaling": old, "rope_parameters": new}).rope
        == models.shape({**LLAMA, "rope_scaling": old}).rope
    )
    assert "disagree: factor 2.0 and 4.0" in refused(
        {**LLAMA, "rope_scaling": old, "rope_parameters": {**new, "factor": 4.0}}
    )
    assert "disagree: rope_theta 500 and 10000.0" in refused(
        {**LLAMA, "rope_theta": 500, "rope_scaling": old, "rope_parameters": new}
    )


def test_a_family_that_transformers_does_not_know_is_said(bench, monkeypatch):
    monkeypatch.setitem(models.FAMILIES, "made_up", allowed)
    with pytest.raises(KeyError, match=r"no model_type 'made_up'.* name the family's file"):
        bench.transformers_name("made_up")


def test_control_an_emptied_list_lets_them_through(monkeypatch):
    """The tables are what refuses and names: without them the same configs pass in silence."""
    monkeypatch.setattr(allowed, "ONLY", {})
    monkeypatch.setattr(llama, "FIELDS", replace(llama.FIELDS, silent=frozenset({"clip_qkv"})))
    monkeypatch.setattr(deepseek_v3, "FIELDS", replace(deepseek_v3.FIELDS, only={}))
    models.shape({**LLAMA, "is_causal": False})
    models.shape({**DEEPSEEK, "scoring_func": "softmax"})
    assert models.not_followed({**LLAMA, "clip_qkv": 8.0}) == ""


@pytest.mark.parametrize("model_type", ["glm4_moe", "minimax_m2", "phi3"])
def test_proportional_tables_are_refused_where_a_part_of_the_head_turns(model_type):
    """transformers turns half of the pairs of a whole head there; a table of half the head halved is another."""
    theirs = transformers.CONFIG_MAPPING[model_type](head_dim=64).to_dict()
    models.shape(theirs)
    theirs["rope_parameters"] = {
        "rope_type": "proportional",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
    }
    assert "'proportional' is not built" in refused(theirs)
