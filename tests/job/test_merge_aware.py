"""The parts of merge-aware training that a run is told of before it begins."""

from types import SimpleNamespace

import pytest
import torch

import unfreeze
from unfreeze import models
from unfreeze.checkpoint import open_checkpoint
from unfreeze.config.adapter import RoundedAs, lora_of
from unfreeze.config.lora import LoraConfig
from unfreeze.core.errors import ConfigError
from unfreeze.core.layout import RESIDENT
from unfreeze.job import merge_aware
from unfreeze.job.trained import Adapters
from unfreeze.job.watch.best import forget_best
from unfreeze.parallel.plan import model_of
from unfreeze.quant.bitsandbytes import Bits4
from unfreeze.quant.fp8 import Fp8
from unfreeze.quant.int4 import Int4


def manifest():
    return open_checkpoint(unfreeze.TINY_K2)


@pytest.mark.parametrize("targets, codes", [(("experts",), 3 * 16 * 3), (("all-linear",), 3 * 16 * 3)])
def test_the_plan_counts_one_matrix_a_core_and_the_codes_of_all(targets, codes):
    """tiny-k2: 3 layers of 16 experts of 3 matrices [64, 128]; attention stays in bf16 and is not rounded."""
    start, device = manifest(), torch.device("cpu")
    lora = LoraConfig(targets=targets, merge_aware="same")
    plain = model_of(models.shape(start.config), start, lora, torch.bfloat16, device)
    rounding = Adapters(lora, 0).planned(plain).sizes.rounding
    packed = codes * (64 * 128 // 2 + 64 * 128 // 32 * 2)
    matrix = 2 * 64 * 128 * (6 + 2 + 24)
    assert rounding == packed + torch.get_num_threads() * matrix
    assert Adapters(LoraConfig(targets=targets), 0).planned(plain).sizes.rounding == 0  # control arm


@pytest.mark.parametrize(
    "name, place", [("experts", "host"), ("experts", "disk"), ("rest", "peers"), ("adapters", "host")]
)
def test_streamed_weights_are_refused_by_name(name, place):
    sizes = SimpleNamespace(compute_bytes=4)
    with pytest.raises(ConfigError, match=f"place.{name} = {place} is not built") as refused:
        merge_aware.check_plan(SimpleNamespace(layout=RESIDENT.but(**{name: place}), sizes=sizes), manifest())
    assert len(refused.value.message) <= 140
    merge_aware.check_plan(SimpleNamespace(layout=RESIDENT, sizes=sizes), manifest())


def test_float32_files_are_not_rounded_from_bf16():
    wide = SimpleNamespace(
        tensors={"a.weight": SimpleNamespace(dtype="F32", shape=(4, 4))}, scheme=lambda: None
    )
    for size in (2, 4):
        plan = SimpleNamespace(layout=RESIDENT, sizes=SimpleNamespace(compute_bytes=size))
        if size == 4:
            merge_aware.check_plan(plan, wide)
            continue
        with pytest.raises(ConfigError, match="float32 there"):
            merge_aware.check_plan(plan, wide)


RUN, KEEP = RoundedAs("int4", "refit"), RoundedAs("same", "keep")


@pytest.mark.parametrize(
    "trained, to, scales, packed, other",
    [
        (RUN, "int4", "refit", True, False),
        (RUN, "same", "refit", True, False),
        (RUN, "int4", "refit", False, False),
        (RUN, "same", "refit", False, True),  # of a bf16 base that is bf16
        (RUN, "bf16", "refit", True, True),
        (RUN, "int4", "keep", True, True),
        (RUN, "int4", "keep-change", False, False),
        (KEEP, "same", "keep", True, False),
        (KEEP, "same", "refit", True, True),
        (KEEP, "int4", "keep", True, True),  # of FP8, say
        (None, "bf16", "refit", True, False),
    ],
)
def test_another_merge_than_was_trained_for_is_told_from_the_same(trained, to, scales, packed, other):
    words = merge_aware.other_merge(trained, to, scales, packed=packed)
    assert bool(words) == other and len(words) <= 140
    flags = {RUN: "--to int4", KEEP: "--to same --scales keep", None: ""}[trained]
    assert words == other * f"this run was trained for another merge: {flags}"


@pytest.mark.parametrize(
    "trained, flags, packed",
    [
        (RoundedAs("int4", "refit"), "--to int4", False),
        (RoundedAs("int4", "refit"), "--to int4", True),
        (RoundedAs("int4", "keep-change"), "--to int4 --scales keep-change", True),
        (RoundedAs("same", "refit"), "--to same", True),
        *((RoundedAs(name, "keep"), "--to same --scales keep", True) for name in ("fp8", "mxfp4", "nvfp4")),
        (RoundedAs("nf4", "refit"), "--to same", True),
    ],
)
def test_the_flags_of_a_run_are_its_formats_and_no_other_merge(trained, flags, packed):
    assert merge_aware.merge_flags(trained) == flags
    to, scales = flags.split()[1], flags.split()[-1] if "--scales" in flags else "refit"
    assert merge_aware.other_merge(trained, to, scales, packed=packed) == ""


def test_it_begins_after_a_share_of_the_steps_before_the_last():
    for share, steps, begins in ((0.0, 10, 0), (0.8, 10, 8), (0.8, 3, 2), (0.999, 4, 3)):
        lora = LoraConfig(merge_aware="same", merge_aware_from=share)
        assert merge_aware.MergeAware(lora, manifest()).begins_at(steps) == begins
    with pytest.raises(ValueError, match="less than 1"):
        LoraConfig(merge_aware="same", merge_aware_from=1.0)


def test_the_best_save_of_before_is_forgotten():
    state = SimpleNamespace(best={"step": 3, "loss": 1.0}, stale=2, heldout={"first": {}, "lowest": {}})
    forget_best(state)
    assert (state.best, state.stale, state.heldout) == (None, 0, {"first": {}})


def test_an_adapter_is_continued_without_its_runs_rounding(tmp_path):
    import json

    (tmp_path / "adapter").mkdir()
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(config))
    (tmp_path / "adapter/adapter_model.safetensors").write_bytes(b"")
    fields = {"lora.rank": 4, "lora.merge_aware": "int4", "lora.merge_aware_from": 0.5}
    (tmp_path / "resolved_config.json").write_text(json.dumps(fields))
    assert lora_of(tmp_path) == {"rank": 4}


@pytest.mark.parametrize(
    "own, in_place, scales",
    [
        ("int4", True, "keep-change"),
        ("int4", False, "refit"),
        ("nf4", True, "refit"),
        ("fp8", True, "keep-change"),
    ],
)
def test_unset_scales_are_keep_change_where_the_bases_own_format_has_it(own, in_place, scales):
    codec = {"int4": Int4(32), "nf4": Bits4("nf4"), "fp8": Fp8((32, 32))}[own]
    work = SimpleNamespace(codecs={codec: SimpleNamespace(in_place=in_place)})
    assert merge_aware.scales_of(LoraConfig(merge_aware="same"), work) == scales
    assert merge_aware.scales_of(LoraConfig(merge_aware="same", merge_aware_scales="keep"), work) == "keep"
