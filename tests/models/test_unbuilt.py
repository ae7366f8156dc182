"""What is not built is refused by name, with the part that is missing; every published config loads or says which."""

import json
import re

import pytest
import transformers

from unfreeze import models
from unfreeze.core.errors import CheckpointError, ConfigError
from unfreeze.models import unbuilt
from unfreeze.quant.formats import recognise

LLAMA = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}


def refused(config: dict) -> str:
    with pytest.raises(CheckpointError) as caught:
        models.shape(config)
    return caught.value.message


@pytest.mark.parametrize("other", ["made_up", "llava", *unbuilt.NAMED])
def test_an_unknown_family_is_refused_and_no_other_is_suggested(other):
    said = refused({"model_type": other})
    parts = unbuilt.NAMED.get(other)
    what = rf": {re.escape(parts)} is not built" if parts else " is not built"
    assert re.fullmatch(
        rf"config\.json: model_type '{other}'{what}; [0-9]+ families are [(]docs/reference/families.md[)]",
        said,
    )
    assert "nearest" not in said


@pytest.mark.parametrize("words, fields", unbuilt.PARTS, ids=[words for words, _ in unbuilt.PARTS])
def test_a_field_that_asks_for_a_missing_part_is_refused_whatever_the_model_calls_itself(words, fields):
    models.shape(LLAMA)
    for field in fields:
        assert f"{words} ({field}) is not built" in refused({**LLAMA, field: 4})
        models.shape({**LLAMA, field: None})


def test_kimi_k3_is_not_taken_for_what_its_text_part_calls_itself():
    text = {
        **LLAMA,
        "model_type": "kimi_linear",
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "attn_res_block_size": 12,
    }
    said = refused({"model_type": "kimi_k3", "text_config": text})
    assert "model_type 'kimi_k3' (its text part: 'kimi_linear'): attention residuals" in said
    assert "the activation SiTU (activation_situ_beta) are not built" in said


def test_a_text_part_without_a_type_of_its_own_is_refused_by_its_parts():
    """MiniMax-M3's NVFP4 release has no model_type in its text_config."""
    text = {name: value for name, value in LLAMA.items() if name != "model_type"}
    said = refused({"model_type": "minimax_m3", "text_config": text | {"sparse_attention_config": {"a": 1}}})
    assert "sparse attention by blocks (sparse_attention_config) is not built" in said
    assert "made_up" in refused({"model_type": "made_up", "text_config": text})


def test_a_config_without_a_type_says_so():
    assert refused({"hidden_size": 64}) == "config.json has no model_type"


def test_each_type_named_is_one_and_is_not_built():
    assert not unbuilt.NAMED.keys() & (models.FAMILIES.keys() | models.WRAPPERS.keys())


@pytest.mark.parametrize(
    "kind, words",
    [
        ("jamba", "layers with a recurrent state (Mamba)"),
        ("mamba", "layers with a recurrent state (Mamba)"),
        ("bamba", "layers with a recurrent state (Mamba)"),
        ("recurrent_gemma", "layers with a recurrent state (RG-LRU)"),
        ("rwkv", "layers with a recurrent state (RWKV)"),
        ("zamba2", "layers with a recurrent state (Mamba)"),
        ("xlstm", "layers with a recurrent state (xLSTM)"),
        ("minimax", "layers with a recurrent state (linear attention)"),
        ("olmo_hybrid", "layers with a recurrent state (linear attention)"),
        ("lfm3", "layers of short convolutions"),
        ("gemma3n", "embeddings for each layer"),
        ("mllama", "layers that attend to an image (cross attention)"),
        ("qwen2_vl", "a vision tower"),
        ("longcat_flash", "experts that return their input"),
        ("falcon", "attention and MLP side by side"),
        ("gpt_neox", "attention and MLP side by side"),
        ("mpt", "layer norms with biases"),
        ("t5", "an encoder"),
        ("bert", "an encoder"),
        ("whisper", "an encoder"),
        ("gpt2", "positions that are added to the embeddings"),
        ("opt", "positions that are added to the embeddings"),
        ("stablelm", "layer norms with biases"),
        ("starcoder2", "layer norms with biases"),
    ],
)
def test_the_fields_of_a_release_say_what_is_missing(kind, words):
    """By the fields alone: under a made-up name the same is said."""
    config = transformers.CONFIG_MAPPING[kind]().to_dict()
    assert re.search(rf"{re.escape(words)} \(\w", refused(config))
    assert re.search(rf"{re.escape(words)} \(\w", refused({**config, "model_type": "made_up"}))


def test_zamba_is_not_said_to_be_rwkv():
    assert "RWKV" not in refused(transformers.CONFIG_MAPPING["zamba2"]().to_dict())


def test_the_nearest_family_is_by_fields_and_only_where_they_tell():
    config = {**transformers.CONFIG_MAPPING["qwen3_moe"]().to_dict(), "model_type": "made_up"}
    with pytest.raises(CheckpointError) as caught:
        models.shape(config)
    assert "resemble 'qwen3_moe' most, but that computes something else" in caught.value.next
    with pytest.raises(CheckpointError) as caught:
        models.shape({"model_type": "made_up"})
    assert "nearest" not in caught.value.next


def published(pytestconfig) -> dict[str, dict]:
    folder = pytestconfig.rootpath.parent / "shared" / "data" / "configs"
    if not folder.is_dir():
        pytest.skip("the published configs are not here")
    found = {file.name: json.loads(file.read_text(encoding="utf-8")) for file in folder.glob("*.json")}
    return {name: config for name, config in found.items() if "model_type" in config}


def test_every_published_config_is_built_or_says_which_part_is_not(pytestconfig):
    configs, built = published(pytestconfig), 0
    for name, config in sorted(configs.items()):
        try:
            models.shape(config)
            built += 1
        except CheckpointError as error:
            part = re.search(
                r"model_type '.*?'(.*?): (.*) (is|are) not built; [0-9]+ families are", error.message
            )
            assert part, f"{name}: {error.message}"
        try:
            recognise(config)
        except ConfigError as error:
            assert error.next, name
    assert len(configs) >= 60 and built >= 37
