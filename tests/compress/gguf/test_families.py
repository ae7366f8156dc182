"""What llama.cpp has fixed in its code is refused at any other value, before a byte is written."""

from dataclasses import replace

import pytest
import transformers

from tests.compress.gguf.made import MADE, SMALL, YARN
from unfreeze import models
from unfreeze.compress.gguf.families import FAMILIES, context_length, family_of, remarks, settings
from unfreeze.core.errors import ConfigError


def shape_of(name, **fields):
    made = MADE[name]
    config = getattr(transformers, made.config or f"{made.name}Config")(**{**SMALL, **made.fields, **fields})
    return models.shape(config.to_dict())


ALIKE = ["sliding_attention", "sliding_attention"]


@pytest.mark.parametrize(
    "name, fields, says",
    [
        ("qwen2", {"rope_parameters": {**YARN, "beta_fast": 16.0}}, "beta_fast 16.0: it has 32 fixed"),
        ("qwen2_moe", {"norm_topk_prob": True}, "norm_topk_prob true: it has false fixed"),
        ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob false: it has true fixed"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, "layers without experts (layer 1)"),
        ("gemma2", {"query_pre_attn_scalar": 20}, "query_pre_attn_scalar 20: it has 32 fixed"),
        ("gemma3", {"query_pre_attn_scalar": 20}, "query_pre_attn_scalar 20: it has 32 fixed"),
        ("gemma2", {"tie_word_embeddings": False}, "a head of its own"),
        ("gemma2", {"attn_logit_softcapping": None}, "attn_logit_softcapping null"),
        ("gemma2", {"layer_types": ALIKE}, "layer_types"),
        ("gpt_oss", {"layer_types": ALIKE}, "layer_types"),
        (
            "qwen3",
            {
                "rope_parameters": {
                    **YARN,
                    "rope_type": "llama3",
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                }
            },
            "rope type llama3",
        ),
    ],
)
def test_a_value_that_llama_cpp_has_fixed_otherwise(name, fields, says):
    with pytest.raises(ConfigError, match=r"llama\.cpp cannot hold") as raised:
        family_of(shape_of(name, **fields))
    assert says in raised.value.message and len(raised.value.message) <= 140
    family_of(shape_of(name))  # control


def test_other_families_are_refused_with_the_list():
    shape = replace(shape_of("llama"), model_type="olmo2")
    with pytest.raises(ConfigError, match="GGUF of model type olmo2 is not written; written: llama, mistral"):
        family_of(shape)


def test_a_window_that_llama_cpp_does_not_have_ends_the_context():
    shape = shape_of("mistral", sliding_window=40)
    family = family_of(shape)
    assert context_length(shape, family) == 40 and dict(settings(shape, family))["context_length"] == 40
    assert "no sliding window" in next(iter(remarks(shape, family)))
    gemma = shape_of("gemma3")
    assert context_length(gemma, family_of(gemma)) == 256 and not list(remarks(gemma, family_of(gemma)))


def test_yarn_s_factor_is_what_llama_cpp_multiplies_with_its_own():
    shape = shape_of("qwen2", rope_parameters={**YARN, "attention_factor": 1.5})
    table = dict(settings(shape, family_of(shape)))
    assert table["rope.scaling.attn_factor"] == pytest.approx(1.5 / (0.1 * 1.3862943611 + 1))
    assert table["rope.scaling.factor"] == 4.0 and table["rope.scaling.original_context_length"] == 64
    assert "rope.scaling.attn_factor" not in dict(settings(shape_of("qwen2"), FAMILIES["qwen2"]))
