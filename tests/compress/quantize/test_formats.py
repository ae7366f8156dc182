"""Every matrix that is written is bit for bit what the format's own library makes of it."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.compress.quantize.libraries import LAYOUTS, NF4, compressed, modules_of, tensors_of
from tests.quant.compressed_tensors_oracle import bits_of, weight_of
from unfreeze.compress.quantize.formats import FORMATS, nearest, stored_parts, stored_tensors
from unfreeze.core.errors import CheckpointError, ConfigError


def written(to: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    codec = FORMATS[to]
    return stored_tensors(codec, nearest(weight, codec, "m"), *weight.shape)


def differences(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> list[str]:
    bad = sorted(ours.keys() ^ theirs.keys())
    for name in ours.keys() & theirs.keys():
        left, right = ours[name], theirs[name]
        if name == "weight_shape":  # int32 in Kimi's files, int64 in the library's
            left, right = left.long(), right.long()
        bad += [] if bits_of(left) == bits_of(right) else [name]
    return bad


@pytest.mark.parametrize("to", LAYOUTS)
def test_a_matrix_is_compressed_tensors_bit_for_bit(to):
    for rows, columns in ((24, 64), (40, 160)):
        weight = weight_of(rows, columns, torch.float32)
        if to in ("int4", "int8", "fp8"):
            weight[3], weight[5, :32] = 1e-3, 2e-3  # a scale of 0 is each writer's own choice
        assert differences(written(to, weight), compressed(to, weight)) == []
        # control arm: one weight moved by half a step of the coarsest grid
        weight[0, 0] += weight[0].abs().max() / 4
        assert differences(written(to, weight), compressed(to, weight * 1.0)) == []
        other = weight.clone()
        other[0, 0] = 0
        assert differences(written(to, weight), compressed(to, other)) != []


@pytest.mark.parametrize("to", ["int8", "fp8"])
def test_control_arm_codes_of_a_scale_that_was_not_rounded_are_seen(to):
    weight = weight_of(24, 64, torch.float32)
    weight[3] = 1.0
    codes, scale = FORMATS[to].suffixes[:2]
    parts, theirs = FORMATS[to].quantize(weight), compressed(to, weight)
    assert torch.equal(parts[scale].bfloat16(), theirs[scale])
    assert bits_of(parts[codes]) != bits_of(theirs[codes])


@given(st.integers(0, 2**31), st.sampled_from([1e-4, 1.0, 300.0]))
@settings(max_examples=20, deadline=None)
def test_any_matrix_is_compressed_tensors_bit_for_bit(seed, size):
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(seed)) * size
    for to in LAYOUTS:
        assert differences(written(to, weight), compressed(to, weight)) == [], to


def test_nf4_is_bitsandbytes_bit_for_bit():
    """Where it is installed; else what 0.50.2 wrote stands for it in tests/quant/test_nf4.py.

    Its kernel for CPUs does not always take the nearest of the 256 numbers for an absmax: where we differ, ours is
    nearer."""
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(256, 320, generator=torch.Generator().manual_seed(0)).bfloat16() * 0.02
    codes, state = functional.quantize_4bit(
        weight, blocksize=64, compress_statistics=True, quant_type="nf4", quant_storage=torch.uint8
    )
    theirs = {"weight": codes} | {f"weight.{name}": part for name, part in state.as_dict(packed=True).items()}
    ours = {_spelled(name): part for name, part in written("nf4", weight.float()).items()}
    texts = [json.loads(bytes(parts.pop(NF4).tolist())) for parts in (ours, theirs)]
    offsets = [text.pop("nested_offset") for text in texts]
    assert texts[0] == texts[1] and offsets[0] == pytest.approx(offsets[1], rel=1e-6)
    assert differences(ours, theirs) in ([], ["weight.absmax"])
    absmax = weight.float().flatten().view(-1, 64).abs().amax(1) - state.offset
    scaled = absmax / theirs["weight.nested_absmax"].repeat_interleave(256)
    far = [
        (theirs["weight.nested_quant_map"][p["weight.absmax"].long()] - scaled).abs() for p in (ours, theirs)
    ]
    other = ours["weight.absmax"] != theirs["weight.absmax"]
    assert (far[0] < far[1])[other].all() and other.sum() < 0.01 * len(other)
    restored = functional.QuantState.from_dict(
        {name: part for name, part in ours.items() if name != "weight"}
        | {NF4: written("nf4", weight.float())["weight_quant_state_nf4"]},
        device=torch.device("cpu"),
    )
    read = functional.dequantize_4bit(ours["weight"], restored)
    codec = FORMATS["nf4"]
    assert torch.equal(read, codec.dequantize(nearest(weight.float(), codec, "m")))


def _spelled(name: str) -> str:
    from unfreeze.quant.spelling import on_disk

    return on_disk(f"m.{name}").removeprefix("m.")


@pytest.mark.parametrize("to", FORMATS)
def test_what_is_on_disk_has_the_planned_dtypes_and_shapes(to):
    from unfreeze.checkpoint.tensors import NAME

    parts = written(to, torch.randn(40, 96))
    facts = {name: (NAME[part.dtype], tuple(part.shape)) for name, part in parts.items()}
    assert facts == stored_parts(FORMATS[to], 40, 96)


@pytest.mark.parametrize("to", FORMATS)
def test_rows_at_a_time_give_the_bytes_of_the_whole_matrix(to, monkeypatch):
    weight = torch.randn(37, 96, generator=torch.Generator().manual_seed(1))
    whole = written(to, weight)
    monkeypatch.setattr("unfreeze.quant.requantize.BLOCK", 500)  # 5 rows
    assert differences(written(to, weight), whole) == []


@pytest.mark.parametrize("to", FORMATS)
def test_numbers_that_no_code_represents_and_shapes_without_groups_are_refused(to):
    weight = torch.randn(8, 64)
    weight[1, 2] = torch.nan
    with pytest.raises(CheckpointError, match="1 of 512 weights are NaN or infinite"):
        nearest(weight, FORMATS[to], "m")
    if to in ("int4", "mxfp4", "nvfp4"):
        with pytest.raises(ConfigError, match="72 input columns do not divide into groups"):
            nearest(torch.randn(8, 72), FORMATS[to], "m")
    nearest(weight.nan_to_num(), FORMATS[to], "m")  # control arm


@pytest.mark.parametrize("base", ["llama", "moe", "stacked"])
@pytest.mark.parametrize("to", LAYOUTS)
def test_every_module_of_a_folder_is_the_librarys(to, base, bases, quantized):
    before = tensors_of(bases[base])
    tensors = tensors_of(quantized(base, to, "all-linear"))
    modules = modules_of(tensors, to)
    assert len(modules) == (14 if base == "llama" else 2 * (4 + 3 * 4))
    others: list[str] = []
    for name, parts in modules.items():
        theirs = compressed(to, matrix(before, name).float())
        alone = theirs
        if to == "nvfp4":  # with what a server fuses, one below the other: one number for all
            theirs = of_rows(compressed(to, *together(before, name, modules)), len(parts["weight_packed"]))
        assert differences(parts, theirs) == [], name
        others += differences(parts, alone)
    assert bool(others) == (to == "nvfp4")  # control arm: a number for each matrix is seen
    # every other tensor byte for byte
    rest = {n for n in tensors if not n.startswith(tuple(f"{name}." for name in modules))}
    assert {n for n in rest if n.endswith("_proj.weight")} == set()
    assert all(bits_of(tensors[name]) == bits_of(before[name]) for name in rest)


FUSED = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gu", "up_proj": "gu"}


def together(tensors, name, modules) -> tuple[torch.Tensor]:
    """A matrix, and below it those that are fused with it."""
    parent, _, leaf = name.rpartition(".")
    others = [n for n, group in FUSED.items() if group == FUSED.get(leaf) and n != leaf]
    names = [name, *(f"{parent}.{n}" for n in others if f"{parent}.{n}" in modules)]
    return (torch.cat([matrix(tensors, n).float() for n in names]),)


def of_rows(parts: dict[str, torch.Tensor], count: int) -> dict[str, torch.Tensor]:
    return {suffix: part[:count] if part.dim() == 2 else part for suffix, part in parts.items()}


def matrix(tensors: dict[str, torch.Tensor], module: str) -> torch.Tensor:
    """A module's matrix; of stacked experts the rows of gate or up, or down."""
    if f"{module}.weight" in tensors:
        return tensors[f"{module}.weight"]
    stack, expert, projection = module.rsplit(".", 2)
    if projection == "down_proj":
        return tensors[f"{stack}.down_proj"][int(expert)]
    return tensors[f"{stack}.gate_up_proj"][int(expert)].chunk(2)[projection == "up_proj"]
