"""shape: what config.json lacks or asks for that isn't built is refused by name; nothing is filled in
silently."""

import copy
from dataclasses import replace

import pytest
import transformers

from unfreeze import models
from unfreeze.core.errors import CheckpointError

LLAMA = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
DEEPSEEK = LLAMA | {
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}


@pytest.mark.parametrize(
    "field", ["hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"]
)
def test_a_missing_field_is_named(field):
    with pytest.raises(CheckpointError, match=f"no '{field}', which model_type 'llama' needs"):
        models.shape({name: value for name, value in LLAMA.items() if name != field})
    with pytest.raises(CheckpointError, match=field):
        models.shape(LLAMA | {field: None})


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (LLAMA | {"hidden_act": "gelu"}, "hidden_act 'gelu' is not built"),
        (LLAMA | {"use_sliding_window": True}, "use_sliding_window true is not built"),
        (LLAMA | {"rope_scaling": {"rope_type": "dynamic"}}, "rope type 'dynamic'"),
        (
            LLAMA | {"model_type": "phi3", "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
            "rope type 'linear' is not built for model_type 'phi3'; built: default, longrope",
        ),
        (LLAMA | {"rope_scaling": {"rope_type": "longrope"}}, "type 'longrope' has no short_factor"),
        (
            LLAMA | {"model_type": "gemma3_text", "attn_logit_softcapping": 4.0},
            "attn_logit_softcapping 4.0 is not built",
        ),
        (
            LLAMA
            | {
                "model_type": "smollm3",
                "num_key_value_heads": 2,
                "sliding_window": 5,
                "layer_types": ["sliding_attention"] * LLAMA["num_hidden_layers"],
            },
            "use_sliding_window is false",
        ),
        (DEEPSEEK | {"scoring_func": "softmax"}, "scoring_func 'softmax' is not built"),
        (DEEPSEEK | {"topk_method": "greedy"}, "topk_method 'greedy' is not built"),
    ],
)
def test_what_would_compute_something_else_is_refused(config, said):
    with pytest.raises(CheckpointError, match=said):
        models.shape(config)


def test_what_is_optional_has_its_published_default():
    shape = models.shape(LLAMA)
    assert (shape.num_kv_heads, shape.head_dim, shape.tied, shape.moe, shape.num_experts) == (
        4,
        16,
        False,
        None,
        0,
    )
    assert (
        models.shape(LLAMA | {"head_dim": 24, "num_key_value_heads": 2, "tie_word_embeddings": True}).head_dim
        == 24
    )


def test_a_text_config_is_the_language_model():
    nested = models.shape({"model_type": "kimi_k25", "text_config": DEEPSEEK, "vision_config": {}})
    assert nested.model_type == "deepseek_v3" and [nested.is_moe(layer) for layer in range(3)] == [
        False,
        True,
        True,
    ]


def test_a_nested_config_leaves_out_what_is_its_classs_default():
    """The text_config of google/gemma-3-4b-it, all of it."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    shape = models.shape({"model_type": "gemma3", "text_config": text})
    theirs = transformers.Gemma3TextConfig(**text)
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.vocab_size) == (8, 4, 256, 262208)
    assert shape.num_heads == theirs.num_attention_heads and shape.vocab_size == theirs.vocab_size
    assert shape.layer_types == tuple(theirs.layer_types)


SPARSE = ("gemma3", "llama4", "mistral3", "qwen3_vl")


@pytest.mark.parametrize("outer", SPARSE)
@pytest.mark.parametrize("given", [{}, {"vocab_size": 320, "num_hidden_layers": 3}], ids=["none", "some"])
def test_a_text_config_may_leave_out_its_type_and_all_that_is_its_classs_default(outer, given):
    theirs = transformers.CONFIG_MAPPING[outer](text_config=dict(given)).text_config.to_dict()
    shape = models.shape({"model_type": outer, "text_config": given})
    spelled = models.shape({"model_type": outer, "text_config": theirs})
    assert replace(shape, config={}) == replace(spelled, config={})
    assert shape.hidden_size == theirs["hidden_size"] and shape.vocab_size == theirs["vocab_size"]
    named = models.shape({"model_type": outer, "text_config": given | {"model_type": theirs["model_type"]}})
    assert replace(named, config={}) == replace(shape, config={})


def test_a_release_of_its_own_may_not_leave_out_its_sizes():
    for config in ({"model_type": "mistral"}, {"model_type": "mistral", "vocab_size": 320}):
        with pytest.raises(CheckpointError, match="has no 'hidden_size'"):
            models.shape(config)


def test_ministral_3_inside_mistral_3_may_leave_out_its_sizes_too():
    text = {"model_type": "ministral3"}
    spelled = transformers.Ministral3Config().to_dict()
    found = [models.shape({"model_type": "mistral3", "text_config": config}) for config in (text, spelled)]
    assert replace(found[0], config={}) == replace(found[1], config={})


def test_every_wrapper_has_the_text_model_that_transformers_takes():
    for outer, wrapper in models.WRAPPERS.items():
        assert transformers.CONFIG_MAPPING[outer](text_config={}).text_config.model_type == wrapper.text


KINDS = {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}}


@pytest.mark.parametrize(
    ("model_type", "field", "table", "read"),
    [
        ("olmo3", "rope_parameters", {"rope_type": "default", "rope_theta": 500000.0}, True),
        ("olmo3", "rope_parameters", {"rope_type": "default", "rope_theta": 1e6}, False),
        ("olmo3", "rope_parameters", {"rope_type": "yarn", "factor": 8.0}, False),
        ("olmo3", "rope_scaling", KINDS, True),
        ("gemma3_text", "rope_scaling", KINDS, True),
        ("gemma3_text", "rope_scaling", {"full_attention": {"rope_type": "linear", "factor": 8.0}}, False),
        ("gemma3_text", "rope_parameters", {"rope_type": "default"}, True),
        ("gemma3_text", "rope_parameters", {"rope_type": "linear", "factor": 8.0}, False),
        ("gemma3_text", "rope_parameters", {"rope_type": "default", "rope_theta": 1e6}, False),
    ],
)
def test_rotary_tables_of_kinds_in_the_wrong_place_are_read_where_passing_them_over_is_no_loss(
    model_type, field, table, read
):
    """transformers computes with the defaults of both kinds, whatever such a table says."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 4}
    sizes |= {"vocab_size": 97, "model_type": model_type, "max_position_embeddings": 64}
    theirs = transformers.CONFIG_MAPPING[model_type](**copy.deepcopy(sizes | {field: table})).rope_parameters
    assert all(theirs[kind]["rope_type"] == "default" for kind in KINDS)
    if not read:
        with pytest.raises(
            CheckpointError, match=r"is not followed by transformers' .* reads rope_parameters"
        ):
            models.shape(sizes | {field: table})
        return
    shape = models.shape(sizes | {field: table})
    ropes = {"full_attention": shape.rope, **shape.ropes}
    assert ropes.keys() == KINDS.keys()
    for kind, rope in ropes.items():
        width = shape.head_dim
        assert rope.inverse_frequency[1] == pytest.approx(theirs[kind]["rope_theta"] ** (-2 / width))


def test_a_release_that_sees_needs_its_text_config():
    for config in ({"model_type": "gemma3"}, {"model_type": "qwen3_vl", "text_config": None}):
        with pytest.raises(CheckpointError, match="has no text_config"):
            models.shape(config)


def test_what_releases_write_without_effect_is_not_named():
    """Fields of SmolLM3-3B, Phi-4-mini, Gemma 2 9B and the first configs of Llama 4 Scout."""
    for fields in (
        {"model_type": "smollm3", "num_key_value_heads": 2, "max_window_layers": 28},
        {"model_type": "phi3", "full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False},
        {"model_type": "gemma2", "sliding_window": 4096, "sliding_window_size": 4096},
        {
            "model_type": "llama4_text",
            "num_key_value_heads": 2,
            "attn_temperature_tuning": 4,
            "cache_implementation": "hybrid",
        },
    ):
        config = {name: value for name, value in LLAMA.items() if name != "hidden_act"} | fields
        models.shape(config)
        assert models.not_followed(config) == ""
    assert "lm_head_bias" in models.not_followed(LLAMA | {"model_type": "phi3", "lm_head_bias": True})
    assert "sliding_window_size" in models.not_followed(
        LLAMA | {"model_type": "gemma2", "sliding_window": 4096, "sliding_window_size": 8}
    )
