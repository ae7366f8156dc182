"""An adapter is loaded whole or not at all: every misfit is one AdapterError that counts, names the first and
leaves the model as it was."""

import json
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file

from unfreeze.adapters import LoraConfig, attach, load_adapter, save_adapter, sites
from unfreeze.adapters.layouts import CONFIG, WEIGHTS
from unfreeze.config.adapter import lora_of
from unfreeze.core.errors import AdapterError

EXPERT = "base_model.model.model.layers.1.mlp.experts.2.up_proj"
O_PROJ = "base_model.model.model.layers.1.self_attn.o_proj"


@pytest.fixture
def saved(tiny, tmp_path):
    save_adapter(
        tiny.trained(tiny.model("deepseek"), LoraConfig(rank=4, alpha=8.0)),
        tmp_path,
        "per-expert",
        base_name="the/base",
    )
    return tmp_path


def edit(directory, change):
    tensors = load_file(directory / WEIGHTS)
    change(tensors)
    save_file(tensors, directory / WEIGHTS)


def rename(old, new):
    def change(tensors):
        for half in "AB":
            tensors[f"{new}.lora_{half}.weight"] = tensors.pop(f"{old}.lora_{half}.weight")

    return change


def cut(name):
    return lambda tensors: tensors.update({name: tensors[name][:, :-1].contiguous()})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            rename(O_PROJ, O_PROJ.replace("o_proj", "o_prj")),
            ["o_prj", "is unknown", "nearest: 'model.layers.1.self_attn.o_proj'"],
        ),
        (lambda t: t.pop(f"{O_PROJ}.lora_B.weight"), ["o_proj has lora_A but no lora_B"]),
        (lambda t: [t.pop(f"{EXPERT}.lora_{h}.weight") for h in "AB"], ["experts.2.up_proj is missing"]),
        (cut(f"{O_PROJ}.lora_A.weight"), ["o_proj has A (4, 15)", "maps 16 -> 32"]),
        (cut(f"{EXPERT}.lora_A.weight"), ["experts.2.up_proj has A (4, 31)", "maps 32 -> 24"]),
        (cut(f"{O_PROJ}.lora_B.weight"), ["rank 4 in adapter_config.json"]),
        (rename(EXPERT, EXPERT.replace(".2.", ".7.")), ["experts.7.up_proj", "is unknown"]),
        (
            lambda t: t.update({f"{O_PROJ}.lora_magnitude_vector.weight": torch.ones(32)}),
            ["o_proj has a lora_magnitude_vector, but use_dora is false"],
        ),
    ],
)
def test_a_misfit_is_counted_and_named_and_the_model_stays_as_it_was(tiny, saved, change, said):
    edit(saved, change)
    model = tiny.model("deepseek")
    with pytest.raises(AdapterError, match="factors of the adapter do not fit") as error:
        load_adapter(model, saved)
    assert all(part in str(error.value) for part in said) and "the/base" in str(error.value)
    assert not sites(model)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"use_dora": True}, "has no lora_magnitude_vector, though use_dora is true"),
        ({"use_dora": "yes"}, "use_dora is 'yes'"),
        ({"bias": "all"}, "bias = 'all'"),
        ({"r": None}, "r is None"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"init_lora_weights": "lora_ga"}, "changed the base's weights too"),
        ({"r": 8}, "rank 8 in adapter_config"),
    ],
)
def test_a_config_of_another_kind_is_refused_by_name(tiny, saved, change, said):
    config = json.loads((saved / CONFIG).read_text())
    (saved / CONFIG).write_text(json.dumps(config | change))
    with pytest.raises(AdapterError, match="adapter") as error:
        load_adapter(tiny.model("deepseek"), saved)
    assert said in str(error.value)


@pytest.mark.parametrize("start", [True, False, "gaussian", "eva", "orthogonal", "mica"])
def test_a_start_that_leaves_the_base_as_it_was_is_loaded(tiny, saved, start):
    """Control arm."""
    config = json.loads((saved / CONFIG).read_text())
    (saved / CONFIG).write_text(json.dumps(config | {"init_lora_weights": start}))
    assert load_adapter(tiny.model("deepseek"), saved)


@pytest.mark.parametrize(("place", "what"), [("model.layers.1.mlp.gate", "a router")])
def test_factors_of_a_router_are_named(tiny, saved, place, what):
    load_adapter(tiny.model("deepseek"), saved)  # control arm
    pair = {f"base_model.model.{place}.lora_{half}.weight": torch.ones(4, 4) for half in "AB"}
    edit(saved, lambda tensors: tensors.update(pair))
    for read in (lambda: load_adapter(tiny.model("deepseek"), saved), lambda: lora_of(saved)):
        with pytest.raises(AdapterError, match=f"2 of .* tensors adapt {what}") as error:
            read()
        assert f"that name each module, without {place.split('.')[-1]}:" in error.value.next


def test_an_adapter_of_another_model_and_missing_or_damaged_files(tiny, saved, tmp_path):
    with pytest.raises(AdapterError, match="do not fit this model"):
        load_adapter(tiny.model("llama"), saved)
    with pytest.raises(AdapterError, match=r"has no adapter_config\.json"):
        load_adapter(tiny.model("llama"), tmp_path / "nowhere")
    (saved / WEIGHTS).write_bytes((saved / WEIGHTS).read_bytes()[:-100])
    with pytest.raises(AdapterError, match="damaged file"):
        load_adapter(tiny.model("deepseek"), saved)


@pytest.mark.parametrize("settings", [{"rank": 2}, {"alpha": 16.0}, {"targets": ("attention",)}])
def test_an_attached_adapter_that_differs_is_refused_and_untouched(tiny, saved, settings):
    model = tiny.model("deepseek")
    attach(model, LoraConfig(**{"rank": 4, "alpha": 8.0, **settings}), seed=0)
    with pytest.raises(
        AdapterError, match="differences between the adapter attached and the one in the file"
    ):
        load_adapter(model, saved)
    assert not any(p.any() for s in sites(model) for n, p in s.adapter.named_parameters() if n.endswith("B"))


def test_a_layer_that_the_file_lost_is_named_and_one_that_was_never_adapted_is_not(tiny, saved):
    """Control arm: layers_to_transform says that only some layers are adapted."""
    edit(saved, lambda t: [t.pop(f"{O_PROJ}.lora_{half}.weight") for half in "AB"])
    with pytest.warns(UserWarning, match=r"1 modules of target_modules have no factors.*model\.layers\.1\."):
        load_adapter(tiny.model("deepseek"), saved)
    path = saved / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"layers_to_transform": [0]}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_adapter(tiny.model("deepseek"), saved)
