"""config.json: each field its type and range, sizes that fit each other and the files."""

import json
from pathlib import Path

import pytest

from unfreeze import models
from unfreeze.checkpoint.manifest import Manifest
from unfreeze.commands.demo import TINY_K2
from unfreeze.core.errors import CheckpointError
from unfreeze.models.fields import FIELDS, ROPE_FIELDS, check_against_files, check_fields, without_nulls

GOOD = json.loads((Path(TINY_K2) / "config.json").read_text())
LLAMA = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 30,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}


def refused(config: dict) -> str:
    with pytest.raises(CheckpointError) as caught:
        models.shape(config)
    assert caught.value.next
    return caught.value.message


@pytest.mark.parametrize("value", [[], {}, "x", float("nan"), float("inf"), -1, 10**30, True, -1.5])
@pytest.mark.parametrize("field", sorted(name for name in FIELDS if name in GOOD))
def test_every_field_refuses_other_types_and_sizes_by_name(field, value):
    if not FIELDS[field](value):
        assert f"config.json: {field} is " in refused({**GOOD, field: value}) or field == "model_type"


@pytest.mark.parametrize("value", [[], "x", float("nan"), -1, 0, True])
@pytest.mark.parametrize("field", ["factor", "beta_fast", "original_max_position_embeddings", "rope_theta"])
def test_the_rotary_tables_too(field, value):
    assert f"rope_scaling.{field} is " in refused(
        {**LLAMA, "rope_scaling": {"type": "yarn", "factor": 2.0, field: value}}
    )


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"num_attention_heads": 3, "num_key_value_heads": 2}, "not a multiple of num_key_value_heads 2"),
        ({"head_dim": 7}, "odd"),
        ({"num_attention_heads": 32}, "leaves no head_dim"),
        ({"rope_scaling": {"type": "linear"}}, "has no factor"),
        (
            {
                "rope_scaling": {
                    "type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 4.5,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                }
            },
            "above high_freq_factor",
        ),
    ],
)
def test_sizes_that_do_not_fit_each_other(fields, words):
    assert words in refused({**LLAMA, **fields})


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"n_group": 5}, "n_group 5"),
        ({"num_experts_per_tok": 60_000}, "num_experts_per_tok 60,000"),
        ({"topk_group": 9}, "topk_group 9"),
    ],
)
def test_experts_that_do_not_fit(fields, words):
    assert words in refused({**GOOD, **fields})


def test_good_ones_pass_and_a_null_is_an_absent_field():
    check_fields(without_nulls(GOOD))
    nulls = {
        **LLAMA,
        "initializer_range": None,
        "rope_theta": None,
        "head_dim": None,
        "rope_scaling": None,
        "attention_bias": None,
    }
    assert models.shape(nulls).rope == models.shape(LLAMA).rope
    assert set(ROPE_FIELDS) >= {"factor", "rope_type"}


def test_a_config_far_larger_than_its_files_is_refused_with_the_sum():
    files = Manifest(Path("x"), LLAMA, {}, "", ())
    check_against_files(models.shape(LLAMA), files)  # nothing to compare a tiny one with: the slack
    with pytest.raises(
        CheckpointError,
        match=r"vocab_size 16,000,000 x hidden_size 16 = 256 M.*the files hold 0 bytes in 0 tensors",
    ):
        check_against_files(models.shape({**LLAMA, "vocab_size": 16_000_000}), files)
