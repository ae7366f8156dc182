"""The registry of parts: places, options, errors of one line; the listing of --help parts."""

import re
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from part_case import built, config_of, entry

from unfreeze import models
from unfreeze.core.errors import CheckpointError, ConfigError
from unfreeze.models.from_shape import config_of as new_config
from unfreeze.models.parts import PARTS, places
from unfreeze.models.parts.listing import text

ATTENTION = "layers.*.self_attn"


def test_places_name_layers_and_slots():
    assert places("layers.*.self_attn", 3) == ("self_attn", [0, 1, 2])
    assert places("model.layers.1", 3) == ("", [1])
    assert places("layers.0-1", 3) == ("", [0, 1])


WRONG = [
    ({"at": ATTENTION, "part": "sliding_windw"}, "'sliding_windw' is no part; nearest: 'sliding_window'"),
    ({"at": ATTENTION, "part": "sliding_window", "windw": 4}, "no option 'windw'; nearest: 'window'"),
    (
        {"at": ATTENTION, "part": "sliding_window", "window": 0},
        "window is 0; it must be a whole number from 1",
    ),
    ({"at": ATTENTION, "part": "sliding_window", "window": 4.5}, "window is 4.5; it must be a whole number"),
    (
        {"at": ATTENTION, "part": "sliding_window", "window": 10**23},
        "window is 100000000000000000000000; it must be a whole number from 1 to 2,147,483,647",
    ),
    ({"at": ATTENTION, "part": "sliding_window", "window": "9" * 500}, "window is '9999"),
    ({"at": "layers.\u0660", "part": "deep_norm"}, "'layers.\u0660' names no place"),
    ({"at": "layers.*", "part": "sliding_window"}, "sliding_window cannot stand at 'layers.*'"),
    ({"at": ATTENTION, "part": "deep_norm"}, "deep_norm cannot stand at 'layers.*.self_attn'"),
    ({"at": "layer.*", "part": "deep_norm"}, "'layer.*' names no place"),
    ({"at": "layers.3-9", "part": "deep_norm"}, "the model has layers 0 to 2"),
    ({"at": "layers.*"}, "is no entry"),
]


@pytest.mark.parametrize("wrong, words", WRONG)
def test_what_cannot_be_is_one_line(wrong, words):
    with pytest.raises(CheckpointError, match=re.escape(words)) as error:
        models.shape(config_of(wrong))
    assert "\n" not in error.value.message and len(error.value.message) <= 140 and error.value.next
    sizes = {"num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4}
    with pytest.raises(ConfigError, match=re.escape(words)) as error:
        new_config("llama", sizes, {}, vocabulary=90, positions=64, parts=[wrong])
    assert error.value.message.startswith("shape.parts: ") and len(error.value.message) <= 140


@pytest.mark.parametrize(
    "kind, more, part, words",
    [
        ("gemma2", {}, "post_norm", "takes the place of a pre-norm layer"),
        ("granite", {}, "deep_norm", "takes the place of a pre-norm layer"),
        ("phi3", {"pad_token_id": None}, "deep_norm", "whose attention has v_proj and o_proj"),
        ("phi3", {"pad_token_id": None}, "qk_norm", "grouped-query attention"),
        ("olmo2", {}, "qk_norm", "grouped-query attention"),
        (
            "qwen2_moe",
            {
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 32,
                "shared_expert_intermediate_size": 32,
            },
            "sandwich_norm",
            "a layer with an MLP or plain experts",
        ),
    ],
)
def test_a_family_whose_block_does_not_fit_is_refused(kind, more, part, words):
    with pytest.raises(CheckpointError, match=words) as error:
        models.from_config(config_of(entry(part), base_model_type=kind, **more), torch.float32)
    assert len(error.value.message) <= 140 and error.value.next


def test_a_refusal_is_one_line_whatever_the_class():
    """The longest names of a family and of an attention."""
    own = type("CompressedAttention", (), {})()
    place = SimpleNamespace(
        shape=SimpleNamespace(model_type="mimo_v2_flash"), module="model.layers.10.self_attn"
    )
    for part in ("moba", "sliding_window", "full", "qk_norm", "gated_delta"):
        path, _, function = PARTS[part].builder.partition(":")
        options = {name: of.default for name, of in PARTS[part].options.items()}
        with pytest.raises(CheckpointError, match=f"{part} takes the place of") as error:
            getattr(import_module(path), function)(own, place, **options)
        assert len(error.value.message) <= 140


@pytest.mark.parametrize("kind", ["phi3", "qwen2", "mistral", "glm4_moe"])
def test_other_families_take_a_sandwich(kind):
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1}
    experts |= {"topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1}
    fields = experts if kind == "glm4_moe" else {"pad_token_id": None} if kind == "phi3" else {}
    model = built(entry("sandwich_norm"), base_model_type=kind, **fields)
    assert {type(layer).__name__ for layer in model.layers} == {"NormedBranches"}
    assert bool(model.moe_layers()) == (kind == "glm4_moe")


def test_a_config_without_its_parts_is_refused():
    for missing in ("parts", "base_model_type"):
        config = {name: of for name, of in config_of(entry("full")).items() if name != missing}
        with pytest.raises(CheckpointError, match="needs base_model_type"):
            models.shape(config)


def test_the_listing_has_every_part_with_place_formula_options_and_source():
    page = text()
    assert max(map(len, page.splitlines())) <= 80
    flat = " ".join(page.split())
    for name, part in PARTS.items():
        assert f" {name} " in flat and " ".join(part.formula.split()) in flat
        assert f"Source: {part.source}" in flat
        for option, of in part.options.items():
            assert f"{option} = " in flat and " ".join(of.about.split()) in flat


def test_a_model_says_its_parts():
    kind = models.shape(config_of(entry("deep_norm"), entry("sliding_window"))).kind
    assert kind == "llama with deep_norm, sliding_window"
    assert models.shape({**config_of(), "parts": []}).kind == "llama"
