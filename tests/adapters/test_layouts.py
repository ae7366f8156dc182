"""Both layouts against their own reader: peft over transformers gives our logits, and what peft writes loads
into ours."""

import json
import warnings
import weakref
from dataclasses import replace

import peft
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from unfreeze.adapters import LoraConfig, attach, layouts, load_adapter, save_adapter, sites, verify_adapter
from unfreeze.adapters.layouts import CONFIG, WEIGHTS
from unfreeze.core.errors import AdapterError

SETTINGS = {
    "one-rank": LoraConfig(rank=4, alpha=8.0),
    "rank-per-group": LoraConfig(rank=4, alpha=8.0, experts_rank=3),
    "rank-stabilised": LoraConfig(rank=6, alpha=8.0, scaling="alpha/sqrt(r)"),
    "experts-only": LoraConfig(rank=2, alpha=8.0, targets=("experts",)),
    "down-only": LoraConfig(rank=2, alpha=8.0, targets=("*.experts.down_proj", "attention")),
    "gate-up-only": LoraConfig(rank=2, alpha=8.0, targets=("*.experts.gate_up_proj",)),
    "one-layer": LoraConfig(rank=2, alpha=8.0, targets=("model.layers.1.*",)),
}


def state(model):
    return {
        f"{s.name}.{n}": p.detach().clone() for s in sites(model) for n, p in s.adapter.named_parameters()
    }


def peft_logits(tiny, case, directory):
    """Logits of transformers + peft with the adapter of a folder, and the warnings on the way."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = peft.PeftModel.from_pretrained(tiny.reference(case), directory)
    with torch.no_grad():
        return tiny.oracle_logits(model.eval()), [
            str(w.message) for w in caught if "is_gradient_checkpointing" not in str(w.message)
        ]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("case", ["deepseek", "qwen3-moe"])
def test_peft_over_transformers_gives_our_logits(tiny, case, settings, tmp_path):
    model = tiny.trained(tiny.model(case), SETTINGS[settings])
    save_adapter(model, tmp_path, "peft", base_name="tiny")
    theirs, said = peft_logits(tiny, case, tmp_path)
    ours = tiny.logits(model).detach()
    assert (ours - theirs).abs().max() < 1e-4
    assert (ours - tiny.logits(tiny.model(case))).abs().max() > 1e-2  # control: the adapter does something
    # two ranks among parameters: peft honours the pattern and says it did not (layouts._padded)
    if settings != "rank-per-group":
        assert said == []


def test_peft_refuses_or_drops_shared_experts_named_as_target_modules(tiny, tmp_path):
    """Why layouts.REWRITTEN exists: with the names every tutorial uses, peft takes them for the routed
    experts and doubles their rank."""
    model = tiny.trained(tiny.model("deepseek"), SETTINGS["one-rank"])
    save_adapter(model, tmp_path, "peft")
    config = json.loads((tmp_path / CONFIG).read_text())
    config["target_modules"] += [
        "shared_experts.gate_proj",
        "shared_experts.up_proj",
        "shared_experts.down_proj",
    ]
    config["target_parameters"] = [name for name in config["target_parameters"] if "shared" not in name]
    (tmp_path / CONFIG).write_text(json.dumps(config))
    with pytest.raises(RuntimeError, match=r"experts\.base_layer\.lora_A"):
        peft_logits(tiny, "deepseek", tmp_path)


@pytest.mark.parametrize("case", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("layout", ["per-expert", "peft"])
def test_dense_models_are_the_same_in_both_layouts_and_load_in_peft(tiny, case, layout, tmp_path):
    model = tiny.trained(tiny.model(case), LoraConfig(rank=4, alpha=8.0))
    save_adapter(model, tmp_path, layout)
    theirs, said = peft_logits(tiny, case, tmp_path)
    assert (tiny.logits(model).detach() - theirs).abs().max() < 1e-5 and said == []


def test_dense_forward_and_gradient_equal_peft_with_the_same_factors(tiny, tmp_path):
    model = tiny.trained(tiny.model("llama"), LoraConfig(rank=4, alpha=8.0))
    save_adapter(model, tmp_path)
    theirs = peft.PeftModel.from_pretrained(tiny.reference("llama"), tmp_path, is_trainable=True)
    probe = torch.randn(61, generator=torch.Generator().manual_seed(1))
    (tiny.logits(model) @ probe).mean().backward()
    (tiny.oracle_logits(theirs) @ probe).mean().backward()
    oracle = {
        n.removeprefix("base_model.model."): p.grad for n, p in theirs.named_parameters() if p.requires_grad
    }
    for site in sites(model):
        for half in "AB":
            ours = getattr(site.adapter, half).grad
            expected = oracle[f"{site.name}.lora_{half}.default.weight"]
            assert (ours - expected).abs().max() <= 1e-5 * max(1.0, expected.abs().max().item())


def merged(oracle, directory):
    """The transformers model with the adapter of a folder added to its weights.

    By a reader that knows two-dimensional pairs and, of adapter_config.json, r, lora_alpha and use_rslora
    alone: vLLM up to 0.25, and SGLang without the last.
    """
    config = json.loads((directory / CONFIG).read_text())
    assert not config["use_rslora"]
    scale = config["lora_alpha"] / config["r"]
    tensors = load_file(directory / WEIGHTS)
    with torch.no_grad():
        for name in [name for name in tensors if name.endswith(".lora_A.weight")]:
            site = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            assert tensors[name].shape[0] == config["r"]
            change = scale * tensors[name.replace("lora_A", "lora_B")] @ tensors[name]
            if ".experts." not in site:
                oracle.get_submodule(site).weight += change
                continue
            experts, number, projection = site.rsplit(".", 2)
            stacked = oracle.get_submodule(experts)
            if projection == "down_proj":
                stacked.down_proj[int(number)] += change
            else:
                half = stacked.gate_up_proj[int(number)].chunk(2)[projection == "up_proj"]
                half += change
    return oracle


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("case", ["deepseek", "qwen3-moe"])
def test_a_reader_that_knows_one_r_and_one_alpha_gets_our_logits(tiny, case, settings, tmp_path):
    model = tiny.trained(tiny.model(case), SETTINGS[settings])
    save_adapter(model, tmp_path, "per-expert")
    with torch.no_grad():
        theirs = tiny.oracle_logits(merged(tiny.reference(case), tmp_path))
    assert (tiny.logits(model).detach() - theirs).abs().max() < 1e-4
    verify_adapter(model, tmp_path)


def test_with_a_rank_and_a_scale_for_each_that_reader_is_far_off(tiny, tmp_path, monkeypatch):
    """Control arm: why the per-expert layout has one rank and one scale."""

    def padded(entries):
        rank = max(entry.rank for entry in entries)
        pad = torch.nn.functional.pad
        more = [rank - entry.rank for entry in entries]
        return [
            replace(e, A=pad(e.A, (0, 0, 0, n)), B=pad(e.B, (0, n)), scale=entries[0].scale)
            for e, n in zip(entries, more, strict=True)
        ]

    monkeypatch.setattr(layouts, "_uniform", padded)
    model = tiny.trained(tiny.model("deepseek"), SETTINGS["rank-per-group"])
    save_adapter(model, tmp_path, "per-expert")
    with torch.no_grad():
        theirs = tiny.oracle_logits(merged(tiny.reference("deepseek"), tmp_path))
    assert (tiny.logits(model).detach() - theirs).abs().max() > 1e-2
    with pytest.raises(AdapterError, match="ΔW differs"):
        verify_adapter(model, tmp_path)


@pytest.mark.parametrize("layout", ["per-expert", "peft"])
def test_one_rank_or_scale_folded_in_gives_the_same_logits_and_the_same_ranks(tiny, layout, tmp_path):
    model = tiny.trained(tiny.model("deepseek"), SETTINGS["rank-per-group"])
    save_adapter(model, tmp_path, layout)
    again = tiny.model("deepseek")
    load_adapter(again, tmp_path)
    assert (tiny.logits(again) - tiny.logits(model)).abs().max() < 1e-5
    shapes = [[(n, p.shape) for n, p in s.adapter.named_parameters()] for s in sites(model)]
    assert shapes == [[(n, p.shape) for n, p in s.adapter.named_parameters()] for s in sites(again)]
    verify_adapter(again, tmp_path)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("layout", ["per-expert", "peft"])
def test_saved_and_loaded_is_the_same_to_the_bit(tiny, settings, layout, tmp_path):
    if (settings, layout) == ("rank-per-group", "per-expert"):
        pytest.skip("another scale is folded into B, which rounds: the test above")
    model = tiny.trained(tiny.model("deepseek"), SETTINGS[settings])
    save_adapter(model, tmp_path, layout)
    again = tiny.model("deepseek")
    load_adapter(again, tmp_path)
    before, after = state(model), state(again)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(tiny.logits(again), tiny.logits(model))
    assert verify_adapter(again, tmp_path).nonzero > 0


def test_the_per_expert_layout_has_a_pair_per_expert_and_names_itself(tiny, tmp_path):
    model = tiny.trained(tiny.model("deepseek"), SETTINGS["one-rank"])
    save_adapter(model, tmp_path, "per-expert", base_name="some/base")
    tensors = load_file(tmp_path / WEIGHTS)
    prefix = "base_model.model.model.layers.1.mlp.experts."
    assert {k for k in tensors if k.startswith(prefix)} == {
        f"{prefix}{e}.{p}.lora_{half}.weight"
        for e in range(4)
        for p in ("gate_proj", "up_proj", "down_proj")
        for half in "AB"
    }
    assert tensors[prefix + "3.up_proj.lora_A.weight"].shape == (4, 32) and tensors[
        prefix + "3.up_proj.lora_B.weight"
    ].shape == (24, 4)
    experts = model.moe_layers()[1].experts.adapter
    assert torch.equal(tensors[prefix + "3.up_proj.lora_A.weight"], experts.gate_up_A[3, 4:])
    config = json.loads((tmp_path / CONFIG).read_text())
    assert (config["layout"], config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (
        "per-expert",
        4,
        8.0,
        "some/base",
    )
    assert config["rank_pattern"] == config["alpha_pattern"] == {}
    with safe_open(tmp_path / WEIGHTS, "pt") as file:
        assert file.metadata()["layout"] == "per-expert"


@pytest.mark.parametrize("at_once", [False, True])
def test_padded_tensors_are_made_one_at_a_time(at_once, tiny, tmp_path, monkeypatch):
    model = tiny.trained(tiny.model("qwen3-moe"), LoraConfig(rank=8, experts_rank=2))
    made, most, real = [], [0], layouts.Entry.tensor

    def watched(entry, half):
        most[0] = max(most[0], sum(before() is not None for before in made))
        tensor = real(entry, half)
        made.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(layouts.Entry, "tensor", watched)
    if at_once:  # control arm
        made_anew = layouts.Tensors
        monkeypatch.setattr(layouts, "Tensors", lambda *given: dict(made_anew(*given)))
    save_adapter(model, tmp_path, "per-expert")
    assert (most[0] > 50) == at_once and most[0] <= (2 if not at_once else len(made))


def test_a_prefix_is_written_and_read_over(tiny, tmp_path):
    model = tiny.trained(tiny.model("deepseek"), SETTINGS["one-rank"])
    save_adapter(model, tmp_path, prefix="language_model.")
    assert all(
        name.startswith("base_model.model.language_model.model.") for name in load_file(tmp_path / WEIGHTS)
    )
    again = tiny.model("deepseek")
    load_adapter(again, tmp_path)
    assert torch.equal(tiny.logits(again), tiny.logits(model)) and verify_adapter(
        again, tmp_path
    ).sites == len(sites(model))


def test_files_are_replaced_whole_and_nothing_else_stays(tiny, tmp_path):
    model = tiny.trained(tiny.model("llama"), LoraConfig(rank=4))
    save_adapter(model, tmp_path)
    save_adapter(model, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [CONFIG, WEIGHTS]
    with pytest.raises(AdapterError, match="no adapter to save"):
        save_adapter(tiny.model("llama"), tmp_path)


def peft_made(tiny, case, directory, **settings):
    """An adapter that peft itself made and saved, with random B; -> its logits."""
    config = peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, task_type="CAUSAL_LM", **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(tiny.reference(case), config).eval()
        torch.manual_seed(1)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(0, 0.1)
        model.save_pretrained(directory)
    with torch.no_grad():
        return tiny.oracle_logits(model)


FUSED = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}


@pytest.mark.parametrize(
    ("case", "settings"),
    [
        ("llama", {"target_modules": ["q_proj", "down_proj"]}),
        ("llama", {"target_modules": "all-linear", "use_rslora": True}),
        ("deepseek", {"target_modules": ["o_proj"], **FUSED}),
        ("deepseek-square", {"target_modules": ["o_proj"], **FUSED}),
        (
            "deepseek",
            {
                "target_modules": [],
                **FUSED,
                "rank_pattern": {"mlp.experts.down_proj": 3},
                "alpha_pattern": {"experts.down_proj": 5},
            },
        ),
        ("deepseek", {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj"]}),
        ("deepseek", {"target_modules": [], "target_parameters": ["mlp.experts.down_proj"]}),
        # another weight of the experts in each layer
        (
            "qwen3-moe",
            {
                "target_modules": ["q_proj"],
                "target_parameters": ["layers.0.mlp.experts.gate_up_proj", "layers.1.mlp.experts.down_proj"],
            },
        ),
        # rewritten by peft to the fused experts
        ("deepseek", {"target_modules": ["q_a_proj", "gate_proj", "up_proj", "down_proj"]}),
        ("qwen3-moe", {"target_modules": ["q_proj", "v_proj"], **FUSED}),
    ],
)
def test_what_peft_made_loads_into_ours_with_its_logits(tiny, case, settings, tmp_path):
    theirs = peft_made(tiny, case, tmp_path, **settings)
    model = tiny.model(case)
    load_adapter(model, tmp_path)
    assert (tiny.logits(model).detach() - theirs).abs().max() < 1e-4
    assert (theirs - tiny.logits(tiny.model(case))).abs().max() > 1e-2
    verify_adapter(model, tmp_path)


@pytest.mark.parametrize("case", ["deepseek", "deepseek-square"])
def test_the_swapped_dimensions_of_peft_018_are_read_with_a_warning(tiny, case, tmp_path):
    """0.18 took in and out from (E, out, in) in the wrong order: A (E·r, out), B (in, r·E), ΔW_e = (B[:, :,
    e] A[e])ᵀ."""
    theirs = peft_made(tiny, case, tmp_path, target_modules=[], **FUSED)
    tensors = load_file(tmp_path / WEIGHTS)
    for name in [n for n in tensors if "lora_A" in n]:
        A, B = (
            tensors[name].unflatten(0, (4, -1)),
            tensors[name.replace("lora_A", "lora_B")].unflatten(1, (-1, 4)).permute(2, 0, 1),
        )
        tensors[name] = B.transpose(1, 2).flatten(0, 1).contiguous()
        tensors[name.replace("lora_A", "lora_B")] = A.transpose(1, 2).permute(1, 2, 0).flatten(1).contiguous()
    save_file(tensors, tmp_path / WEIGHTS)
    model = tiny.model(case)
    with pytest.warns(UserWarning, match=r"swapped, as peft 0\.18"):
        load_adapter(model, tmp_path)
    assert (tiny.logits(model).detach() - theirs).abs().max() < 1e-4


def test_loading_over_an_attached_adapter_overwrites_it_in_place(tiny, tmp_path):
    model = tiny.trained(tiny.model("deepseek"), SETTINGS["one-rank"])
    save_adapter(model, tmp_path)
    again = tiny.model("deepseek")
    attach(again, SETTINGS["one-rank"], seed=5)
    parameters = [p for s in sites(again) for p in s.adapter.parameters()]
    load_adapter(again, tmp_path)
    assert all(
        a is b
        for a, b in zip(parameters, [p for s in sites(again) for p in s.adapter.parameters()], strict=True)
    )
    assert torch.equal(tiny.logits(again), tiny.logits(model))
