"""bisect names the module an error was planted in, and none on a clean model; control arm: fed by its own
modules it would blame the wrong one."""

import sys
from dataclasses import replace

import pytest
import torch

from unfreeze import cli
from unfreeze.checkpoint import open_checkpoint
from unfreeze.commands.bisect import (
    WHOLE,
    compare_modules,
    difference,
    first,
    load_oracle_library,
    oracle,
    refuse_too_large,
)
from unfreeze.core.errors import ConfigError
from unfreeze.drill.sandbox import FAMILIES, Sandbox

TOLERANCE = 2e-5
IDS = torch.arange(3, 27)


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory):
    return Sandbox(tmp_path_factory.mktemp("bisect"))


@pytest.fixture(scope="module")
def oracles(sandbox):
    """family -> transformers' model, made once."""
    made = {}

    def get(family):
        if family not in made:
            made[family] = oracle(open_checkpoint(sandbox.checkpoint(family)), sandbox.model(family))
        return made[family]

    return get


@pytest.mark.parametrize("family", FAMILIES)
def test_every_module_of_a_clean_model_agrees(sandbox, oracles, family):
    found = compare_modules(sandbox.model(family), oracles(family), IDS)
    assert first(found, TOLERANCE) is None and found[-1].module == WHOLE
    names = [entry.module for entry in found]
    assert (
        "model.layers.1.self_attn" in names
        and "lm_head" in names
        and max(entry.relative for entry in found) < 1e-6
    )
    assert ("model.layers.1.mlp.experts" in names and "model.layers.1.mlp.gate" in names) == (
        "moe" in family or "deepseek" in family
    )


def perturb(name):
    def plant(model):
        with torch.no_grad():
            model.get_parameter(name).view(-1)[5] += 0.1

    return plant


def wrong_eps(model):
    model.layers[1].input_layernorm.eps = 1e-3


def wrong_scale(model):
    gate = model.layers[1].mlp.gate
    gate.routing = replace(gate.routing, scale=gate.routing.scale * 1.01)


def forgotten_residual(model):
    layer = model.layers[1]
    layer.forward = lambda x, run: (
        x + layer.mlp(layer.post_attention_layernorm(x + layer.self_attn(layer.input_layernorm(x), run)))
    )


@pytest.mark.parametrize(
    "family, plant, blamed",
    [
        ("llama", perturb("model.layers.1.self_attn.k_proj.weight"), "model.layers.1.self_attn.k_proj"),
        ("llama", wrong_eps, "model.layers.1.input_layernorm"),
        ("llama", forgotten_residual, "model.layers.1"),
        ("qwen3_moe", perturb("model.layers.0.mlp.experts.down_proj.weight"), "model.layers.0.mlp.experts"),
        ("deepseek_v3", wrong_scale, "model.layers.1.mlp.gate"),
        (
            "deepseek_v3",
            perturb("model.layers.0.self_attn.kv_a_layernorm.weight"),
            "model.layers.0.self_attn.kv_a_layernorm",
        ),
        ("deepseek_v3-int4", perturb("lm_head.weight"), "lm_head"),
    ],
)
def test_a_planted_error_is_named(sandbox, oracles, family, plant, blamed):
    model = sandbox.model(family)
    plant(model)
    worst = first(compare_modules(model, oracles(family), IDS), TOLERANCE)
    assert worst is not None and worst.module == blamed


def test_control_arm_run_by_themselves_the_models_would_blame_everything_after(sandbox, oracles):
    """Outputs of two whole runs compared, as a plain diff of activations does: the first module is right, and
    so many others are blamed too."""
    model, theirs = sandbox.model("llama"), oracles("llama")
    wrong_eps(model)
    fed = [entry.module for entry in compare_modules(model, theirs, IDS) if entry.relative > TOLERANCE]
    outputs = {"ours": {}, "theirs": {}}
    for side, module in (("ours", model), ("theirs", theirs)):
        for name, part in module.named_modules():
            if name.endswith("_proj"):
                part.register_forward_hook(
                    lambda m, i, o, s=side, n=name: outputs[s].__setitem__(n, o.reshape(len(IDS), -1))
                )
    from unfreeze.core.batch import Batch

    with torch.no_grad():
        model.hidden(
            Batch(IDS, IDS, torch.ones(len(IDS)), torch.arange(len(IDS)), torch.zeros(1, dtype=torch.int64))
        )
        theirs(input_ids=IDS[None])
    blamed = [
        name
        for name, ours in outputs["ours"].items()
        if difference(name, "", ours, outputs["theirs"][name]).relative > TOLERANCE
    ]
    assert fed == ["model.layers.1.input_layernorm", "model.layers.1", WHOLE]
    assert len(blamed) == 7  # every projection of layer 1, though none of them is wrong


def test_a_nan_on_one_side_counts(sandbox):
    assert (
        first([difference("m", "Linear", torch.tensor([float("nan")]), torch.tensor([1.0]))], TOLERANCE)
        is not None
    )


def test_the_command(sandbox, oracles, capsys):
    assert cli.main(["bisect", str(sandbox.checkpoint("llama")), "--against", "hf"]) == 0
    assert "modules and the logits agree within 2e-05" in capsys.readouterr().out
    assert (
        cli.main(["bisect", str(sandbox.checkpoint("llama")), "--tolerance", "1e-12", "--json", "--quiet"])
        == 1
    )


def test_without_transformers_the_command_to_install_it_is_given(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match="not installed") as caught:
        load_oracle_library()
    assert caught.value.next == "pip install transformers"


def test_a_model_too_large_for_two_copies_is_refused(sandbox, monkeypatch):
    from unfreeze.core.errors import DoesNotFit
    from unfreeze.parallel.machine import Hardware

    manifest = open_checkpoint(sandbox.checkpoint("deepseek_v3-int4"))
    refuse_too_large(manifest)
    monkeypatch.setattr(
        "unfreeze.parallel.machine.hardware", lambda device: Hardware("cpu", "small", 1, 2**20, 2**20)
    )
    with pytest.raises(DoesNotFit, match="in float32 need"):
        refuse_too_large(manifest)
