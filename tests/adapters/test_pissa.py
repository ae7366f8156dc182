"""PiSSA starts against peft's, after peft's own conversion to LoRA; experts against singular values in float64."""

import json
import warnings

import peft
import pytest
import torch
from safetensors.torch import load_file

from unfreeze.adapters import LoraConfig, attach, load_adapter, pissa, save_adapter, sites, verify_adapter
from unfreeze.adapters.lora import Start
from unfreeze.adapters.pissa import KeptStarts, principal
from unfreeze.config.adapter import CONFIG, WEIGHTS
from unfreeze.core.errors import AdapterError
from unfreeze.train.optim import AdamW

CONFIGURED = LoraConfig(rank=4, alpha=8.0, start="pissa")
PROBE = torch.randn(61, generator=torch.Generator().manual_seed(1))
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def loss(logits):
    return (logits @ PROBE).square().mean()


def test_start_ten_steps_and_folder_equal_pefts_after_its_conversion(tiny, tmp_path):
    config = peft.LoraConfig(r=4, lora_alpha=8, init_lora_weights="pissa", target_modules=TARGETS)
    theirs = peft.get_peft_model(tiny.reference("llama"), config)
    theirs.peft_config[
        "default"
    ].init_lora_weights = True  # as peft's own guide does before it saves the start
    theirs.save_pretrained(tmp_path / "start")
    model = tiny.model("llama")
    base = tiny.logits(model).detach()
    attach(model, CONFIGURED, seed=0)
    assert torch.equal(tiny.logits(model), base)  # W is untouched, and ΔW is zero
    for site in sites(model):
        for half in "AB":
            want = theirs.get_parameter(f"base_model.model.{site.name}.lora_{half}.default.weight")
            assert (getattr(site.adapter, half) - want).abs().max() < 1e-5

    ours = AdamW(model, betas=(0.9, 0.95), eps=1e-8)
    trained = [p for p in theirs.parameters() if p.requires_grad]
    other = torch.optim.AdamW(trained, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    for step in range(10):
        a, b = tiny.logits(model), tiny.oracle_logits(theirs)
        assert (a - b).detach().abs().max() < 1e-5 * b.detach().abs().max()
        ours.zero_grad()
        other.zero_grad()
        loss(a).backward()
        loss(b).backward()
        if step == 0:
            for site in sites(model):
                for half in "AB":
                    name = f"base_model.model.{site.name}.lora_{half}.default.weight"
                    want = theirs.get_parameter(name).grad
                    assert (getattr(site.adapter, half).grad - want).abs().max() < 1e-5 * max(
                        1.0, float(want.abs().max())
                    )
        ours.update(1e-3, 0.0)
        other.step()

    # their conversion, read here on the base as published; and ours, read by peft there
    theirs.save_pretrained(
        tmp_path / "converted", path_initial_model_for_weight_conversion=str(tmp_path / "start")
    )
    read = tiny.model("llama")
    load_adapter(read, tmp_path / "converted")
    final = tiny.logits(model).detach()
    assert (tiny.logits(read) - final).abs().max() < 1e-5 * base.abs().max()
    save_adapter(model, tmp_path / "ours")
    assert verify_adapter(model, tmp_path / "ours").matrices == 14
    written = json.loads((tmp_path / "ours" / CONFIG).read_text())
    assert (written["r"], written["lora_alpha"], written["init_lora_weights"]) == (8, 16.0, True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        there = peft.PeftModel.from_pretrained(tiny.reference("llama"), tmp_path / "ours")
    assert (tiny.oracle_logits(there) - final).abs().max() < 1e-5 * base.abs().max()
    assert (final - base).abs().max() > 1e-2  # control: ten steps change something


@pytest.mark.parametrize("start", ["pissa", "pissa_niter_16"])
def test_each_expert_starts_from_its_own_singular_values(tiny, start, tmp_path):
    model = tiny.model("deepseek")
    base = tiny.logits(model).detach()
    attach(model, LoraConfig(rank=4, alpha=8.0, experts_rank=3, start=start), seed=0)
    assert torch.equal(tiny.logits(model), base)
    site = next(site for site in sites(model) if site.group == "experts")
    adapter, owner = site.adapter, site.owner
    first = {}
    for e in range(4):
        gate, up = owner.gate_up_proj.weight[e].double().chunk(2)
        pairs = [
            *zip(adapter.gate_up_A[e].chunk(2), adapter.gate_up_B[e].chunk(2), (gate, up), strict=True),
            (adapter.down_A[e], adapter.down_B[e], owner.down_proj.weight[e].double()),
        ]
        for place, (A, B, W) in enumerate(pairs):
            U, S, Vh = torch.linalg.svd(W.detach(), full_matrices=False)
            best = (U[:, :3] * S[:3]) @ Vh[:3]
            first[e, place] = adapter.scale * (B.double() @ A.double()).detach()
            # the fast one is as near to W as the best, to a thousandth
            if start == "pissa":
                assert (first[e, place] - best).abs().max() < 1e-5
            assert (W - first[e, place]).norm() < 1.001 * (W - best).norm()
            assert (W - first[e, place]).norm() > 0.999 * (W - best).norm()  # control: of this rank

    with torch.no_grad():
        for index, p in enumerate(adapter.parameters()):
            p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(index)))
    save_adapter(model, tmp_path)
    verify_adapter(model, tmp_path)
    # the file's ΔW is scale (B A − B₀ A₀) of every expert
    tensors = load_file(tmp_path / WEIGHTS)
    name = f"base_model.model.{site.name}.lora_"
    A = tensors[f"{name}A.weight"].double().unflatten(0, (4, -1))
    B = tensors[f"{name}B.weight"].double().unflatten(1, (-1, 4))
    for e in range(4):
        change = adapter.down_scale * (B[:, :, e] @ A[e])
        now = adapter.down_scale * (adapter.down_B[e].double() @ adapter.down_A[e].double())
        assert (change - (now - first[e, 2])).abs().max() < 1e-6


def test_the_form_keeps_a_small_change_that_pefts_loses_in_bf16():
    """Why Start does not write [A; A₀] and [B, −B₀]: in bf16 that is a difference of large numbers."""
    generator = torch.Generator().manual_seed(0)
    A0, B0 = principal(torch.randn(64, 64, generator=generator), 8, 1.0, "w")
    A, B = (x + 1e-3 * torch.randn(x.shape, generator=generator) for x in (A0, B0))
    exact = B.double() @ A.double() - B0.double() @ A0.double()

    def error(a, b):
        product = b.bfloat16().double() @ a.bfloat16().double()
        return float((product - exact).norm() / exact.norm())

    assert error(*Start(A0, B0).pair(A, B)) < 0.01
    assert error(torch.cat((A, A0)), torch.cat((B, -B0), 1)) > 0.1


def test_dora_starts_there_too(tiny):
    model = tiny.model("llama")
    base = tiny.logits(model).detach()
    attach(model, LoraConfig(rank=4, alpha=8.0, start="pissa", dora=True), seed=0)
    assert torch.equal(tiny.logits(model), base)
    W = model.model.layers[0].self_attn.q_proj.weight
    assert torch.allclose(model.model.layers[0].self_attn.q_proj.adapter.m, W.norm(dim=1), rtol=1e-6)


def test_a_save_has_the_first_values_and_another_start_is_restored_from_it(tiny):
    model, other = tiny.model("llama"), tiny.model("llama")
    attach(model, CONFIGURED, seed=0)
    attach(other, LoraConfig(rank=4, alpha=8.0, start="pissa_niter_4"), seed=0)  # as on another machine
    kept, there = KeptStarts(model).tensors(), KeptStarts(other).tensors()
    assert kept.keys() == there.keys() and len(kept) == 28
    assert not all(torch.equal(kept[name], there[name]) for name in kept)
    for name, tensor in there.items():
        tensor.copy_(kept[name])
    for a, b in zip(pissa.starts(model), pissa.starts(other), strict=True):
        assert torch.equal(a[1].A, b[1].A) and torch.equal(a[1].B, b[1].B)


def test_a_rank_above_the_singular_values_is_refused(tiny):
    with pytest.raises(AdapterError, match="fewer than the rank 40") as error:
        attach(tiny.model("llama"), LoraConfig(rank=40, start="pissa"), seed=0)
    assert "--lora.rank 32" in error.value.next or "--lora.rank 16" in error.value.next
