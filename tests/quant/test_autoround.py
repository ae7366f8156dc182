"""Claims about AutoRound's quantization_config. The bits themselves: test_gptq.py and test_awq.py, of the same
codecs, and tests/models/test_quantized_models.py with a model of this config."""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random

import pytest

from unfreeze.core.errors import ConfigError
from unfreeze.quant import not_followed, recognise
from unfreeze.quant.autoround import METHODS
from unfreeze.quant.awq import Awq
from unfreeze.quant.formats import WRITERS
from unfreeze.quant.gptq import Gptq

sys.path.append(str(Path(__file__).resolve().parents[1] / "fuzz"))
from fuzzers import altered

TABLE = {
    "quant_method": "auto-round",
    "bits": 4,
    "group_size": 128,
    "sym": True,
    "data_type": "int",
    "packing_format": "auto_round:auto_gptq",
    "autoround_version": "0.9.4",
    "block_name_to_quantize": "model.language_model.layers",
}
PLAIN = Gptq(4, 128, minus_one=True, indexed=False)


def scheme_of(**changes):
    return recognise({"quantization_config": TABLE | changes})


@pytest.mark.parametrize(
    ("layout", "codec"),
    [
        ("auto_round:auto_gptq", PLAIN),
        ("auto_round:gptq", PLAIN),
        (None, PLAIN),
        ("auto_round", Gptq(4, 128, minus_one=False, indexed=False)),
        ("auto_round:gptqmodel", Gptq(4, 128, minus_one=False)),
        ("auto_round:auto_awq", Awq(128)),
    ],
)
def test_the_packing_format_says_whose_layout_it_is(layout, codec):
    assert scheme_of(packing_format=layout).codecs == (codec,)
    assert not_followed({"quantization_config": TABLE | {"packing_format": layout}}) == ""


def test_each_spelling_of_the_method_is_read():
    for method in METHODS:
        assert scheme_of(quant_method=method).codecs == (PLAIN,)
    assert {"auto-round", "autoround"} <= WRITERS.keys() & set(METHODS)


def test_layers_with_bits_of_their_own():
    """Written by auto-round: names of layers, and patterns that are found anywhere in a name."""
    own = {
        "model.language_model.layers.0.mlp.gate": {"bits": 16, "data_type": "float"},
        "model.language_model.layers.1.mlp.down_proj": {"bits": 8, "group_size": 32},
        r".*self_attn\.(q|k)_proj.*": {"bits": 16},
    }
    scheme = scheme_of(extra_config=own)
    found = {
        name: scheme.codec_for(f"model.layers.{name}")
        for name in (
            "0.mlp.gate",
            "1.mlp.down_proj",
            "0.mlp.down_proj",
            "0.self_attn.q_proj",
            "0.self_attn.v_proj",
        )
    }
    assert found == {
        "0.mlp.gate": None,
        "1.mlp.down_proj": Gptq(8, 32, indexed=False),
        "0.mlp.down_proj": PLAIN,
        "0.self_attn.q_proj": None,
        "0.self_attn.v_proj": PLAIN,
    }
    assert scheme.codec_for("lm_head") is None
    with_head = scheme_of(extra_config={"lm_head": {"bits": 8}})
    assert with_head.codec_for("lm_head") == Gptq(8, 128, indexed=False)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"bits": 3}, "with 3 bits"),
        ({"bits": 4.0}, "with 4.0 bits"),
        ({"packing_format": "auto_round:llm_compressor"}, 'packing_format "auto_round:llm_compressor"'),
        ({"packing_format": "auto_round:auto_awq", "bits": 8}, "with 8 bits"),
        ({"data_type": "mx_fp"}, "data_type mx_fp"),
        ({"extra_config": {"a.b": {"bits": 4, "data_type": "fp"}}}, "extra_config.a.b.data_type fp"),
        ({"rotation_config": {"a": 1}}, "rotated"),
        ({"super_bits": 6}, "super_bits 6"),
        ({"desc_act": True}, "columns permuted"),
        ({"extra_config": {"(a+)+": {"bits": 16}}}, "could take forever"),
    ],
)
def test_what_would_be_read_wrongly_is_refused_by_name(change, named):
    with pytest.raises(ConfigError) as error:
        scheme_of(**change)
    assert named in error.value.message


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"-:a": {}}}
AWQ = {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "modules_to_not_convert": ["a.", "x.*y"]}
OWN = TABLE | {"extra_config": {"a.b": {"bits": 16}, ".*c.*": {"bits": 8, "group_size": 32}}}


@pytest.mark.parametrize("table", [OWN, GPTQ, AWQ, {"quant_algo": None, "quant_method": "modelopt"}])
def test_a_mutated_table_is_read_or_refused(table):
    random = Random(0)
    for _ in range(400):
        config = {"quantization_config": altered(random, table, random.choice((1, 1, 2)))}
        try:
            scheme = recognise(config)
            not_followed(config)
        except ConfigError:
            continue
        assert scheme is None or scheme.codecs


def test_an_unknown_field_is_named():
    assert "smooth = 1" in not_followed({"quantization_config": TABLE | {"smooth": 1}})
