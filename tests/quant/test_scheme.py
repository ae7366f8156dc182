"""Claims about a scheme: each module has the codec that the library would give it, and the files decide where there
are files."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.utils.match import is_match, match_targets
from transformers.quantizers.quantizers_utils import should_convert_module

from unfreeze.core.errors import ConfigError
from unfreeze.quant import Fp8, Int4, not_followed, recognise
from unfreeze.quant.integers import MATRIX, ROW, Integers
from unfreeze.quant.scheme import Modules, Rule, Scheme, globs, not_converted

SIZES = {"Linear": 32, "re:.*mlp.*": 64, "re:.*down.*": 128, "model.layers.0.mlp.down_proj": 256}
IGNORE = ["lm_head", "re:.*self_attn.*"]
NAMES = [
    f"model.layers.{layer}.{name}"
    for layer in range(2)
    for name in ("self_attn.q_proj", "mlp.up_proj", "mlp.down_proj", "other.down_proj", "other.x")
]


def grouped(targets: list[str], size: int) -> dict[str, object]:
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": size}
    return {"targets": targets, "weights": weights}


@pytest.mark.parametrize("order", [1, -1])
def test_a_groups_targets_mean_what_they_mean_to_compressed_tensors(order):
    groups = {f"group_{i}": grouped([t], SIZES[t]) for i, t in enumerate(list(SIZES)[::order])}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    scheme = recognise({"quantization_config": config | {"ignore": IGNORE}})
    linear = torch.nn.Linear(1, 1)
    found = {name: scheme.codec_for(name) for name in [*NAMES, "lm_head"]}
    for name, codec in found.items():
        wanted = None
        if is_match(name, linear, SIZES, IGNORE):
            wanted = Int4(SIZES[match_targets(name, linear, SIZES)[0]])
        assert codec == wanted, name
    assert len(set(found.values())) == 5  # every rule is used, and the list of what is left out
    # control arm: by the order of the groups it would be another
    assert Scheme(scheme.rules[::-1]).codec_for("model.layers.0.mlp.down_proj") == Int4(32)


def test_globs_are_modules_with_what_is_in_them():
    some = globs(["model.layers.0*", "*.shared_expert.*", "model.layers.1.mlp", "lm_head"])
    has = ["model.layers.0.mlp.up_proj", "model.layers.9.mlp.shared_expert.up_proj", "lm_head"]
    has += ["model.layers.1.mlp.up_proj", "model.layers.1.mlp"]
    assert all(name in some for name in has)
    assert not any(name in some for name in ("model.layers.1.mlps", "model.layers.9.mlp.up_proj"))
    nested = globs(["language_model.model.layers.0*", "model.language_model.layers.1*"])
    assert (
        "model.layers.0.mlp" in nested and "model.layers.1.mlp" in nested and "model.layers.2" not in nested
    )


def test_what_is_not_converted_is_a_part_of_the_name_or_a_pattern():
    """gpt-oss-20b has this pattern."""
    some = not_converted(["model.layers.*.self_attn", "gate"], "here")
    has = [
        "model.layers.3.self_attn.q_proj",
        "model.layers.3.self_attn",
        "model.layers.0.mlp.gate",
        "lm_head",
    ]
    assert all(name in some for name in has)
    assert not any(
        name in some for name in ("model.layers.3.mlp.gate_proj", "model.layers.3.self_attn2.q_proj")
    )


NOT_CONVERTED = [
    r".*self_attn.*",
    r"model\.layers\.\d+\.mlp\.gate",
    r"model.layers.(0|2).mlp.down_proj$",
    "model.layers.1.mlp",
    "mlp.gate",
    "down_proj",
    r"re:.*shared_experts\.up_proj",
]


@pytest.mark.parametrize("entry", NOT_CONVERTED)
def test_what_is_not_converted_is_what_transformers_does_not_convert(entry):
    tails = ("self_attn.q_proj", "mlp.gate", "mlp.gate_proj", "mlp.down_proj", "mlp.shared_experts.up_proj")
    names = [f"model.layers.{layer}.{tail}" for layer in (0, 1, 2, 10) for tail in tails]
    some = not_converted([entry], "here")
    found = {name for name in names if name in some}
    keys = [entry.removeprefix("re:")]
    assert found == {name for name in names if not should_convert_module(name, keys)}
    assert 0 < len(found) < len(names)


def test_what_is_not_converted_may_stand_within_a_name_and_a_pattern_must_end():
    """autoawq's and bitsandbytes' word; transformers 4 looked for it in the whole name too."""
    some = not_converted(["self_attn", "*.mlp.gate", "layers.0."], "here")
    assert "model.layers.0.mlp.up_proj" in some and "model.layers.10.mlp.up_proj" not in some
    assert "model.layers.3.self_attn.q_proj" in some and "model.layers.3.mlp.gate" in some
    assert "model.layers.3.self_attn2.q_proj" not in some and "model.layers.3.mlp.gate_proj" not in some
    with pytest.raises(ConfigError, match=r"here: .* could take forever"):
        not_converted(["(a+)+b"], "here")


MIXED = Scheme(
    (Rule(Fp8(), Modules(patterns=(".*self_attn.*",))), Rule(Int4(32))), Modules(names=frozenset({"a.mlp"}))
)
FILES = {
    "a.self_attn.weight": "F8_E4M3",
    "a.self_attn.weight_scale_inv": "BF16",
    "b.self_attn.weight": "BF16",
    "a.mlp.weight_packed": "I32",
    "a.mlp.weight_scale": "F16",
}


def test_the_files_decide_what_is_packed():
    assert MIXED.stored("a.self_attn", FILES) == Fp8() and MIXED.stored("a.mlp", FILES) == Int4(32)
    assert MIXED.codec_for("a.mlp") is None and MIXED.codec_for("b.self_attn") == Fp8()
    assert MIXED.stored("b.self_attn", FILES) is None
    found = {name: MIXED.part_of(name, FILES) for name in FILES}
    assert found["b.self_attn.weight"] is None and found["a.mlp.weight_scale"] == Int4(32)
    assert MIXED.name == "fp8-block, int4-pack-quantized"


def test_each_codec_takes_the_dtype_of_its_own_scales():
    stored = MIXED.as_stored(FILES)
    assert stored.codecs == (Fp8(scale_dtype="BF16"), Int4(32, scale_dtype="F16"))
    assert stored.codec_for("b.self_attn") == Fp8(scale_dtype="BF16")


def test_of_two_codecs_with_parts_of_the_same_names_the_config_decides():
    two = Scheme((Rule(Int4(64), Modules(inside=frozenset({"b"}))), Rule(Int4(32))))
    files = ["b.mlp.weight_packed", "b.mlp.weight_scale", "c.weight_packed", "c.weight_scale"]
    assert two.stored("b.mlp", files) == Int4(64) and two.stored("c", files) == Int4(32)


def test_a_group_without_weights_is_about_activations():
    """Such as the cache of attention layers."""
    cache = {"targets": ["LlamaAttention"], "weights": None, "input_activations": {"num_bits": 8}}
    groups = {"group_0": grouped(["Linear"], 32), "group_1": cache}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    assert recognise({"quantization_config": config}).codecs == (Int4(32),)
    assert "group_1.input_activations: a server rounds" in not_followed({"quantization_config": config})
    cache["input_activations"] = None
    with pytest.raises(ConfigError, match="group_1 without weights"):
        recognise({"quantization_config": config})


def test_a_frozen_release_is_read_by_its_files_and_said():
    """Older releases of packed weights say so."""
    groups = {"group_0": grouped(["Linear"], 32)}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    said = not_followed({"quantization_config": config | {"quantization_status": "frozen"}})
    assert "quantization_status frozen: weights that the files hold unpacked" in said
    assert not_followed({"quantization_config": config | {"quantization_status": "compressed"}}) == ""


@pytest.mark.parametrize("size", [None, -1, 64])
def test_an_absent_strategy_is_what_the_library_takes_it_for(size):
    weights = {key: value for key, value in grouped([], 0)["weights"].items() if key != "strategy"}
    group = {"targets": ["Linear"], "weights": weights | {"group_size": size}}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"g": group}}
    (codec,) = recognise({"quantization_config": config}).codecs
    theirs = QuantizationArgs(num_bits=4, group_size=size).strategy
    assert theirs == {None: "tensor", -1: "channel", 64: "group"}[size]
    assert codec == {None: Integers(4, MATRIX), -1: Integers(4, ROW), 64: Int4(64)}[size]
