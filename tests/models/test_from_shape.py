"""config.json of a new model: transformers builds the same sizes from it, and what cannot be is one line."""

import pytest
import torch
import transformers

from unfreeze import models
from unfreeze.core.errors import ConfigError
from unfreeze.models.from_shape import NEW, config_of, count_parameters, padded

SIZES = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "tie_word_embeddings": True}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def made(family, more=None, **sizes):
    own = {**SIZES, **(EXPERTS if NEW[family].experts else {}), **sizes} if family in NEW else SIZES
    return config_of(family, own, more or {}, vocabulary=1001, positions=128, bos=None, eos=0)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", sorted(NEW.keys() - models.ONLY_HERE))
def test_transformers_makes_as_many_parameters_and_reads_the_same_logits(family, tied):
    config = made(
        family, num_key_value_heads=None if family == "deepseek_v3" else 2, tie_word_embeddings=tied
    )
    ours = models.from_config(config, torch.float32)
    counted = count_parameters(ours)
    options = transformers.AutoConfig.for_model(**config)
    theirs = transformers.AutoModelForCausalLM.from_config(options)
    assert type(theirs).__name__ == config["architectures"][0] == NEW[family].architecture
    assert counted.total == sum(parameter.numel() for parameter in theirs.parameters())
    assert theirs.get_input_embeddings().weight.shape == (1024, 64)
    assert counted.embeddings == 1024 * 64 * (1 if tied else 2)


def test_active_parameters_are_without_the_experts_that_a_token_leaves_out():
    counted = count_parameters(models.from_config(made("qwen3_moe"), torch.float32))
    expert = 3 * 64 * 32
    assert counted.total - counted.active == 2 * (4 - 2) * expert
    dense = count_parameters(models.from_config(made("qwen3"), torch.float32))
    assert dense.active == dense.total and "active" not in dense.words() and "active" in counted.words()


@pytest.mark.parametrize("passes, idle", [(1, 6), (2, 4), (5, 0)])
def test_active_parameters_of_a_chain_are_those_of_all_its_passes(passes, idle):
    sizes = {**SIZES, "vocab_size": 97, "intermediate_size": 64, "moe_intermediate_size": 32}
    chain = {"model_type": "chain_of_experts", "n_routed_experts": 8, "num_experts_per_tok": 2}
    counted = count_parameters(models.from_config({**sizes, **chain, "inner_iter": passes}, torch.float32))
    assert counted.total - counted.active == 2 * idle * 3 * 64 * 32


def test_a_chain_of_experts_is_made_with_its_own_fields():
    config = made("chain_of_experts", {"inner_iter": 3, "use_igate": False}, num_shared_experts=1)
    assert (config["n_routed_experts"], config["moe_intermediate_size"], config["inner_iter"]) == (4, 32, 3)
    model = models.from_config(config, torch.float32, device="cpu")
    models.initialize(model, 0)
    moe = model.shape.moe
    assert moe is not None and (moe.passes, moe.experts_per_token, moe.num_shared_experts) == (3, 2, 1)
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    assert made("chain_of_experts")["inner_iter"] == 2


def test_shared_experts_and_further_fields_are_the_familys_own():
    config = made("deepseek_v3", {"kv_lora_rank": 16, "n_group": 2}, num_shared_experts=1)
    assert (config["n_shared_experts"], config["n_routed_experts"], config["kv_lora_rank"]) == (1, 4, 16)
    assert made("mixtral")["intermediate_size"] == 32 and made("mixtral")["num_local_experts"] == 4
    assert made("qwen3", {"head_dim": 32})["head_dim"] == 32


def test_shared_experts_come_with_the_further_fields_too():
    assert made("deepseek_v3", {"num_shared_experts": 2}) == made("deepseek_v3", num_shared_experts=2)
    with pytest.raises(ConfigError, match="has no shared experts by number"):
        made("qwen3_moe", {"num_shared_experts": 1})
    with pytest.raises(ConfigError, match="n_shared_experts"):
        made("deepseek_v3", {"num_shared_experts": "two"})


def test_the_vocabulary_is_padded_to_a_multiple_of_64():
    assert [padded(n) for n in (1, 64, 65, 1001)] == [64, 64, 128, 1024]


@pytest.mark.parametrize(
    "family, more, sizes, words",
    [
        ("qwen4", {}, {}, r"'qwen4' cannot be made new; nearest: 'qwen\d'"),
        (
            "qwen3",
            {},
            {"num_attention_heads": 5},
            "hidden_size 64 is not a multiple of num_attention_heads 5",
        ),
        ("qwen3", {}, {"num_key_value_heads": 3}, "heads 4 is not a multiple of num_key_value_heads 3"),
        ("llama", {"head_dim": 15}, {}, "rotary width of 15 is odd"),
        ("llama", {}, {"num_experts": 4}, "num_experts 4: llama has no experts"),
        ("qwen3_moe", {}, {"num_experts": 0}, "has experts, and num_experts is not given"),
        ("qwen3_moe", {}, {"num_experts_per_tok": 9}, "num_experts_per_tok 9 is more than the 4 experts"),
        ("qwen3_moe", {}, {"num_shared_experts": 1}, "has no shared experts by number"),
        ("qwen3", {"head_dimm": 16}, {}, "head_dimm: qwen3 has no such field; nearest: 'head_dim'"),
        ("qwen3", {"use_cache": False}, {}, "use_cache has no effect"),
        ("qwen3", {"hidden_act": "relu"}, {}, "hidden_act 'relu' is not built"),
        ("qwen3", {"rope_theta": "big"}, {}, "rope_theta is 'big'"),
    ],
)
def test_what_cannot_be_is_one_line(family, more, sizes, words):
    with pytest.raises(ConfigError, match=words) as error:
        made(family, more, **sizes)
    message = error.value.message
    assert "\n" not in message and len(message) <= 140 and error.value.next, message
