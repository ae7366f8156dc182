"""Plans of machines that are not here, against arithmetic done by hand from published sizes."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from unfreeze import models
from unfreeze.commands import plan
from unfreeze.config.lora import LoraConfig
from unfreeze.core.layout import RESIDENT, Layout
from unfreeze.kernels.expert_mlp import WORKSPACE
from unfreeze.parallel.plan import Work, measure_sizes
from unfreeze.parallel.plan.choose import (
    CPU_SIZES,
    WAITING,
    PlanRequest,
    _choices,
    _layouts,
    choose_plan,
    proposals,
    too_large,
)
from unfreeze.parallel.plan.counts import counts
from unfreeze.parallel.plan.fleet import fleet
from unfreeze.parallel.plan.places import bytes_by_place
from unfreeze.parallel.plan.terms import USABLE

GB = 1e9
KIMI = {
    "model_type": "kimi_k2",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.827,
    "vocab_size": 163840,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "tie_word_embeddings": False,
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 4,
                    "group_size": 32,
                    "strategy": "group",
                    "symmetric": True,
                    "type": "int",
                },
            }
        },
        "ignore": [
            "lm_head",
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
        ],
    },
}
"""Kimi-K2-Thinking's published sizes."""


DENSE = {
    "model_type": "llama",
    "hidden_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def kimi():
    model = models.from_config(KIMI, torch.bfloat16)
    return measure_sizes(model, LoraConfig(rank=16), "cuda"), counts(model)


def asked(rank=16, tokens=None, **work):
    made = Work(tokens=1, rank=rank, loss_rows=1024, loss_bytes=2, longest=2048, **work)
    return PlanRequest(made, tokens, 2048)


def test_kimi_k2_from_its_config_alone(kimi):
    sizes, found = kimi
    # experts: 60 layers x 384 x 3 x 7168 x 2048 weights of 4 bits, a bf16 scale per 32
    experts = 60 * 384 * 3 * 7168 * 2048 * (0.5 + 2 / 32)
    assert found.experts_bytes == experts and experts / 8 / GB == pytest.approx(71.3, abs=0.05)
    assert (found.experts_bytes + found.rest_bytes) / GB == pytest.approx(594.2, abs=0.05)
    routed = 60 * 384 * 16 * ((7168 + 2048) * 2 + (2048 + 7168))
    assert sizes.experts_per_rank * 16 == routed and routed / 1e9 == pytest.approx(10.19, abs=0.005)
    assert sizes.adapter_parameters(16, None) / 1e9 == pytest.approx(10.28, abs=0.005)


@pytest.mark.parametrize(
    "hardware, rank, fits, over, experts",
    [
        ("8xH200", 16, True, "", "device"),
        ("1xH200+768GB", 16, False, "host", "host"),
        ("1xH200+768GB", 8, True, "", "host"),
        ("8xH100", 16, False, "device", "device"),
        ("8xH100+1TB", 16, True, "", "host"),
        ("16xH100", 16, True, "", "device"),
    ],
)
def test_machines_for_kimi_k2(kimi, hardware, rank, fits, over, experts):
    choice, fitting = choose_plan(*kimi, fleet(hardware), asked(rank))
    assert (fitting, choice.places.over, choice.layout.experts) == (fits, over, experts)
    assert sum(choice.places.device.values()) <= choice.places.device_usable or over == "device"


def test_one_h200_and_its_host_by_hand(kimi):
    """Experts, 16 bytes per adapter parameter, and of 61 layers' inputs of 65,536 tokens 60 lie in host memory."""
    machine, work = fleet("1xH200+768GB"), replace(asked(16).work, tokens=65536)
    layout = RESIDENT.but(experts="host", adapters="host", optimizer="host", boundary="host")
    found = bytes_by_place(*kimi, work, machine, layout)
    by_hand = 570.76e9 + 10.281e9 * 16 + 65536 * 7168 * 2 * 60
    assert sum(found.host.values()) == pytest.approx(by_hand, rel=1e-3)
    assert by_hand > found.host_usable == int(768 * 2**30 * USABLE)


def test_one_h200_and_its_host_run_at_rank_8_with_what_is_built(kimi):
    """The moments' 8 bytes a parameter lie in the host, factors and gradients on the device, with two slots for
    the moments of the largest factor on their way: gate and up's A of 384 experts."""
    machine = fleet("1xH200+768GB")
    choice, fits = choose_plan(*kimi, machine, asked(8))
    assert (
        fits
        and choice.not_built == ()
        and (choice.layout.adapters, choice.layout.optimizer) == ("device", "host")
    )
    parameters = 10.281e9 / 2
    assert choice.places.host["moments"] == pytest.approx(8 * parameters, rel=1e-3)
    device = choice.places.device
    assert device["adapter"] + device["gradients"] == pytest.approx(8 * parameters, rel=1e-3)
    assert device["moments on their way"] == 2 * 8 * 384 * 2 * 8 * 7168 and "optimizer" not in device
    # control arm: with the moments on the device it would not fit
    before = choice.layout.but(optimizer="device")
    assert not bytes_by_place(*kimi, replace(asked(8).work, tokens=choice.tokens), machine, before).fits


def test_what_would_fit_is_said(kimi):
    said = proposals(*kimi, fleet("1xH200+768GB"), asked(16))
    assert [line.split(" (")[0] for line in said][:2] == ["--lora.rank 8", "--optimizer.moments int8"]
    assert any("--hardware 8xH100+768GB (" in line for line in proposals(*kimi, fleet("8xH100"), asked(16)))


def test_what_runs_today_is_chosen_before_what_is_faster():
    config = KIMI | {"num_hidden_layers": 4, "n_routed_experts": 16}
    model = models.from_config(config, torch.bfloat16)
    measured = measure_sizes(model, LoraConfig(rank=16), "cuda"), counts(model)
    choice, fits = choose_plan(*measured, fleet("8xH200"), asked())
    assert fits and choice.not_built == () and choice.layout.split == 1


@pytest.mark.parametrize(
    "devices, splits", [(1, {1}), (4, {1, 4}), (8, {1, 8}), (9, {1, 9}), (12, {1, 12}), (16, {1, 8, 16})]
)
def test_experts_are_split_over_all_devices_or_over_each_host(kimi, devices, splits):
    """A host has eight; nine devices are no host and one more."""
    layouts = _layouts(kimi[1], fleet(f"{devices}xH200"), asked())
    assert {layout.split for layout in layouts} == splits


def test_experts_of_a_gpu_come_in_groups_that_keep_to_the_workspace(kimi):
    sizes, found = kimi
    whole = bytes_by_place(sizes, found, asked().work, fleet("1xH200+768GB"), RESIDENT.but(experts="host"))
    assert sizes.workspace == 77 * 2 * 7168 * 2048 * 2 < WORKSPACE
    assert sizes.workspace <= whole.device["expert workspace"] < 1.4 * WORKSPACE


def test_a_share_of_the_experts_has_the_rows_of_a_layer_of_so_many(kimi):
    """48 of 384 on each of eight devices go at once, not in five groups."""
    work = replace(asked().work, tokens=8192)
    model = models.build(models.shape(KIMI | {"n_routed_experts": 48}), dtype=torch.bfloat16)
    few = measure_sizes(model, LoraConfig(rank=16), "cuda")
    router = 4 * (384 - 48)  # its scores are of all experts
    rows = (
        4 * 8 * 7168 * 2 * 5 // 4
    )  # x as it came, dy sent and come, dx: K rows each, a quarter more than even
    for split, layer in ((1, kimi[0].layer), (8, few.layer + router + rows)):
        found = bytes_by_place(*kimi, work, fleet("8xH200"), RESIDENT.but(split=split)).device
        assert found["one layer's recompute"] == 8192 * layer
    assert few.layer > 1.2 * kimi[0].layer


def test_dense_experts_of_a_gpu_need_no_workspace_and_expanded_ones_keep_to_it():
    """In bf16 and in float32; packed ones are expanded in either."""
    dense = {name: value for name, value in KIMI.items() if name != "quantization_config"}
    for dtype in (torch.bfloat16, torch.float32):
        of_one = 3 * 7168 * 2048 * dtype.itemsize
        for config, packed in ((dense, False), (KIMI, True)):
            model = models.from_config(config | {"num_hidden_layers": 2}, dtype)
            measured = measure_sizes(model, LoraConfig(rank=1), "cuda"), counts(model)
            work = replace(asked(1).work, tokens=512)
            found = bytes_by_place(*measured, work, fleet("8xH200"), RESIDENT.but(split=8)).device[
                "expert workspace"
            ]
            if packed:
                assert 10 * of_one < found < 1.01 * WORKSPACE
            else:
                assert 0 < found < of_one / 2  # the adapter, cast to the dtype of the computation


def test_a_published_config_is_read(shared=Path(__file__).parents[4] / "shared" / "data" / "configs"):
    path = shared / "Kimi-K2-Thinking.json"
    if not path.is_file():
        pytest.skip("the published config is not on this machine")
    ours = counts(models.from_config(KIMI, torch.bfloat16))
    assert counts(models.from_config(json.loads(path.read_text()), torch.bfloat16)) == ours


def given(words):
    """Flag -> value of a proposal, "--lora.rank 8 --waiting 0.9"."""
    parts = words.split()
    return dict(zip(parts[::2], parts[1::2], strict=True))


def changed(before, words):
    """The Asked and host memory that a proposal's words name."""
    parts = given(words)
    work = replace(
        before.work,
        rank=int(parts.get("--lora.rank", before.work.rank)),
        optimizer_moments=parts.get("--optimizer.moments", before.work.optimizer_moments),
    )
    tokens = parts.get("--tokens-per-step", "")
    return replace(before, work=work, tokens=int(tokens) if tokens else before.tokens)


def test_where_no_single_change_is_enough_several_are_proposed_and_they_fit(kimi):
    """One 24 GB card for Kimi-K2 at rank 64: neither a rank nor a host alone is enough."""
    small, what = fleet("1xRTX4090"), asked(64)
    (line, *_) = proposals(*kimi, small, what)
    words = line.split(" (")[0]
    flags = given(words)
    assert list(flags) == ["--lora.rank", "--hardware", "--waiting"]
    both, larger = changed(what, words), fleet(flags["--hardware"])
    assert (larger.count, larger.memory) == (small.count, small.memory)
    # experts on disk: it fits, and waits, which choose_plan() takes only where it may
    assert both.work.rank < 64 and "of a step waits" in line
    alone = (larger, what), (small, both)
    for machine, fewer in alone:  # control arm: each of the two alone is not
        assert not any(c.places.fits for c in _choices(*kimi, machine, fewer))
    assert any(c.places.fits for c in _choices(*kimi, alone[0][0], both))
    patient = replace(both, waiting=float(flags["--waiting"]))
    assert [choose_plan(*kimi, alone[0][0], one)[1] for one in (both, patient)] == [False, True]
    # nor would a larger rank do
    twice = replace(both, work=replace(both.work, rank=2 * both.work.rank))
    assert not any(c.places.fits for c in _choices(*kimi, alone[0][0], twice))


def test_a_machine_without_a_gpu_is_told_the_memory_it_would_need(kimi):
    (line,) = proposals(*kimi, fleet("cpu:24GB"), asked(16))
    words = given(line.split(" (")[0])["--hardware"]
    assert choose_plan(*kimi, fleet(words), asked(16))[1]
    smaller = next(f"cpu:{a}GB" for a, b in pairwise(CPU_SIZES) if f"cpu:{b}GB" == words)
    assert not choose_plan(*kimi, fleet(smaller), asked(16))[
        1
    ]  # control arm: the size before it is too small


def test_a_device_too_small_for_every_weight_is_told_the_next_larger_one():
    """Every weight of a dense model trains whole on each device: more of them don't help, a larger one does."""
    model = models.from_config(DENSE, torch.bfloat16)
    dense = measure_sizes(model, None, "cuda"), counts(model)
    every = replace(asked(None), wish=Layout(weights="device"))
    card = replace(fleet("1xRTX4090"), memory=8 * dense[0].elements)
    found = proposals(*dense, card, every)
    named = next(line for line in found if line.startswith("--hardware 1x"))
    assert (
        choose_plan(*dense, fleet(given(named.split(" (")[0])["--hardware"]), every)[1]
        and not choose_plan(*dense, card, every)[1]
    )
    # where they may lie in parts, more devices do
    line = proposals(*dense, card, asked(None))[0]
    assert line.startswith("--hardware 4x") and "weights sharded" in line, line


def test_the_commands_default_is_the_planners():
    assert plan.Config().waiting == WAITING == asked().waiting


def test_what_is_too_large_by_itself_is_named(kimi):
    """A CPU of 1 GB: with the least that can be asked, the frozen rest alone is 21.8 GiB."""
    said = too_large(*kimi, fleet("cpu:1GB"), asked(16))
    assert said.startswith(
        "even with --lora.rank 1 --optimizer.moments int8 --tokens-per-step 512: the frozen rest"
    )
    assert "alone takes 21.8 GiB" in said and "a device has 942.1 MiB usable" in said
    # nothing alone is too large: the sum is said
    assert "a step " in too_large(*kimi, fleet("cpu:24GB"), asked(16))
