"""Claims about INT4 pack-quantized, against compressed-tensors itself (the program that wrote the releases)."""

from __future__ import annotations

import time

import pytest
import torch
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor, pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from hypothesis import given, settings
from hypothesis import strategies as st

from unfreeze.core.errors import CheckpointError, ConfigError
from unfreeze.quant import Int4, Packed, from_quantization_config, is_ignored, not_followed
from unfreeze.quant.int4 import (
    MAX_SCALE,
    ONLY,
    ONLY_OF_WEIGHTS,
    SILENT,
    SILENT_OF_GROUP,
    SILENT_OF_WEIGHTS,
    pack_int4,
    unpack_int4,
)

# (group, in): groups that are and are not multiples of a word, rows whose last int32 is not full.
SHAPES = [(32, 128), (128, 256), (8, 64), (16, 48), (4, 12), (3, 21), (1, 5), (64, 64)]


def scheme(group: int) -> QuantizationScheme:
    return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(num_bits=4, strategy="group", group_size=group))


def random_weight(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(*shape, generator=generator)
    return (rows * torch.rand(*shape[:-1], 1, generator=generator)).bfloat16()


def every_scale() -> torch.Tensor:
    """All bf16 numbers from 0 (subnormals included) to the largest whose 7-fold is finite: 32,274 of them."""
    scale = torch.arange(0, 2**15, dtype=torch.int16).view(torch.bfloat16)
    return scale[scale.isfinite() & (scale.double() <= MAX_SCALE)]


@pytest.mark.parametrize(("group", "columns"), SHAPES)
def test_pack_and_unpack_equal_compressed_tensors(group: int, columns: int) -> None:
    codes = torch.randint(-8, 8, (6, columns), dtype=torch.int8, generator=torch.Generator().manual_seed(columns))
    packed = pack_int4(codes)
    assert torch.equal(packed, pack_to_int32(codes, 4))
    assert torch.equal(unpack_int4(packed, columns), unpack_from_int32(packed, 4, codes.shape))
    assert torch.equal(unpack_int4(packed, columns), codes)


def test_nibbles_are_offset_binary_lowest_first() -> None:
    """Codes -8..-1 pack to 0x76543210. Control: two's complement would give 0xfedcba98."""
    codes = torch.arange(-8, 0, dtype=torch.int8)[None]
    assert pack_int4(codes).item() == 0x76543210
    twos_complement = sum((int(code) & 0xF) << (4 * i) for i, code in enumerate(codes[0]))
    assert twos_complement == 0xFEDCBA98


@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("group", "columns"), SHAPES)
def test_dequantize_equals_compressed_tensors_bit_for_bit(group: int, columns: int, scale_dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(group)
    parts = {
        "weight_packed": pack_int4(torch.randint(-8, 8, (10, columns), dtype=torch.int8, generator=generator)),
        "weight_scale": torch.rand(10, columns // group, generator=generator).to(scale_dtype),
    }
    state = {**parts, "weight_shape": torch.tensor([10, columns])}
    expected = PackedQuantizationCompressor.decompress(state, scheme(group))["weight"]
    assert torch.equal(Int4(group).dequantize(parts), expected)
    exact = unpack_int4(parts["weight_packed"], columns).double() * parts["weight_scale"].double().repeat_interleave(group, 1)
    assert torch.equal(expected, exact.to(scale_dtype))  # one rounding of the exact product


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("group", "columns"), SHAPES)
def test_quantize_equals_compressed_tensors_at_kimis_scale(group: int, columns: int, dtype: torch.dtype) -> None:
    weight = random_weight(12, columns, seed=group).to(dtype)
    parts = Int4(group).quantize(weight)
    scale = (weight.unflatten(-1, (-1, group)).abs().amax(-1).float() / 7).bfloat16()
    assert torch.equal(parts["weight_scale"], scale)
    theirs = PackedQuantizationCompressor.compress({"weight": weight, "weight_scale": scale}, scheme(group))
    assert torch.equal(parts["weight_packed"], theirs["weight_packed"])
    assert torch.equal(Int4(group).disk_extras(12, columns)["weight_shape"].long(), theirs["weight_shape"])


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31), group=st.sampled_from([4, 8, 32, 128]), exponent=st.integers(-125, 120), dtype=st.sampled_from(["bf16", "f32"])
)
def test_dequantize_then_quantize_is_the_identity(seed: int, group: int, exponent: int, dtype: str) -> None:
    """From weights of any size, tiny and huge, in bf16 or float32, with a zero group among them."""
    weight = torch.randn(8, 4 * group, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    weight[0, :group] = 0
    weight = weight.bfloat16() if dtype == "bf16" else weight
    codec = Int4(group)
    once = codec.quantize(weight)
    expanded = codec.dequantize(once)
    twice = codec.quantize(expanded)
    assert torch.equal(once["weight_scale"], twice["weight_scale"])
    assert torch.equal(once["weight_packed"], twice["weight_packed"])
    assert bool((expanded[0, :group] == 0).all())


def test_identity_holds_for_every_bf16_scale() -> None:
    """Exhaustive over scales. Control: plain absmax / 7 without `_exact_neighbour` fails, and only where 7 m is half-way."""
    scale = every_scale()
    assert scale.numel() == 32_274
    codes = torch.randint(-7, 8, (scale.numel(), 32), dtype=torch.int8, generator=torch.Generator().manual_seed(1))
    codes[:, 0] = 7
    codes[:, 1] = -1
    codes[scale == 0] = 0
    parts = {"weight_packed": pack_int4(codes), "weight_scale": scale[:, None].clone()}
    weight = Int4(32).dequantize(parts)
    assert bool(weight.isfinite().all())
    again = Int4(32).quantize(weight)
    assert torch.equal(again["weight_scale"], parts["weight_scale"])
    assert torch.equal(again["weight_packed"], parts["weight_packed"])

    plain = (weight.abs().amax(-1).float() / 7).bfloat16()
    lost = plain != scale
    mantissa = (scale.view(torch.int16) & 0x7F) + 128
    normal = scale.double() >= 2.0**-126
    assert 0 < int(lost.sum()) < scale.numel() // 8
    assert bool((mantissa[lost & normal] % 8 == 4).all()) and bool((mantissa[lost & normal] >= 148).all())


def test_identity_holds_for_groups_of_every_absmax() -> None:
    """Every bf16 absmax there is, the other weights of the group at random below it. Control: among normal numbers plain absmax / 7 is
    already a fixed point (a release needs no correction), among subnormal ones it is not."""
    absmax = torch.arange(0, 2**15, dtype=torch.int16).view(torch.bfloat16)
    absmax = absmax[absmax.isfinite()]
    weight = (torch.rand(absmax.numel(), 16, generator=torch.Generator().manual_seed(2)) * 2 - 1) * absmax[:, None].float()
    weight[:, 3] = absmax.float()
    codec = Int4(16)
    once = codec.quantize(weight.bfloat16())
    expanded = codec.dequantize(once)
    assert bool(expanded.isfinite().all())
    twice = codec.quantize(expanded)
    assert torch.equal(once["weight_scale"], twice["weight_scale"])
    assert torch.equal(once["weight_packed"], twice["weight_packed"])
    plain = (expanded.abs().amax(-1).float() / 7).bfloat16()
    lost = plain != once["weight_scale"][:, 0]
    assert 0 < int(lost.sum()) < 10 and bool((absmax[lost].double() < 2.0**-126).all())


def test_requantizing_with_another_grid_loses_the_property() -> None:
    """Control for the two above: absmax / 7.5 with codes to -8 (other quantizers) does not return the release it was given."""
    codec = Int4(32)
    once = codec.quantize(random_weight(16, 128))
    weight = codec.dequantize(once)
    scale = (weight.unflatten(-1, (-1, 32)).abs().amax(-1).float() / 7.5).bfloat16()
    assert not torch.equal(scale, once["weight_scale"])


def test_leading_dims_and_indexing() -> None:
    weight = random_weight(3, 16, 64)
    codec = Int4(32)
    packed = Packed(codec, codec.quantize(weight))
    assert packed.shape == (3, 16, 64)
    assert packed.nbytes == 3 * codec.nbytes(16, 64) == 3 * (16 * 32 + 16 * 2 * 2)
    assert torch.equal(packed[1].dequantize(), packed.dequantize()[1])
    assert packed[1].parts["weight_packed"].data_ptr() == packed.parts["weight_packed"][1].data_ptr()  # a view
    for suffix, (dtype, shape) in codec.parts(16, 64).items():
        assert (packed[0].parts[suffix].dtype, tuple(packed[0].parts[suffix].shape)) == (dtype, shape)


def test_quantize_handles_millions_of_weights_a_second() -> None:
    weight = random_weight(1024, 1024)
    started = time.perf_counter()
    Int4(32).quantize(weight)
    assert time.perf_counter() - started < 2.0  # 0.02 s measured; the limit is loose because machines are shared


def test_weights_that_are_not_finite_are_refused() -> None:
    weight = random_weight(4, 32)
    weight[2, 3] = float("nan")
    with pytest.raises(CheckpointError, match="1 of 128 weights are NaN"):
        Int4(32).quantize(weight)


def test_the_largest_bf16_weights_stay_finite() -> None:
    weight = torch.full((1, 32), torch.finfo(torch.bfloat16).max, dtype=torch.bfloat16)
    codec = Int4(32)
    once = codec.quantize(weight)
    assert bool(codec.dequantize(once).isfinite().all())
    plain = (weight[0, :1].float() / 7).bfloat16()
    assert not bool((plain * 7).isfinite())  # control: without the clamp the weight would become infinite


def test_parts_that_disagree_are_refused() -> None:
    codec = Int4(32)
    parts = codec.quantize(random_weight(4, 64))
    with pytest.raises(CheckpointError, match="group 16"):
        Int4(16).dequantize(parts)
    with pytest.raises(ConfigError, match="groups of 32"):
        codec.parts(4, 40)


def kimi_config(**changes: object) -> dict[str, object]:
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "dynamic": False, "actorder": None}
    weights.update({key: value for key, value in changes.items() if key in weights})
    group = {"targets": ["Linear"], "input_activations": changes.get("input_activations"), "output_activations": None, "weights": weights}
    return {
        "quant_method": changes.get("quant_method", "compressed-tensors"),
        "format": changes.get("format", "pack-quantized"),
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*self_attn.*"],
    }


def test_kimis_quantization_config_is_read_at_the_top_or_under_text_config() -> None:
    assert from_quantization_config({"quantization_config": kimi_config()}) == (Int4(32), ["lm_head", "re:.*self_attn.*"])
    assert from_quantization_config({"text_config": {"quantization_config": kimi_config(group_size=128)}}) == (
        Int4(128),
        ["lm_head", "re:.*self_attn.*"],
    )
    assert from_quantization_config({"model_type": "llama"}) is None
    assert from_quantization_config({"quantization_config": kimi_config(actorder="weight")}) is not None  # same layout on disk
    assert is_ignored("model.layers.0.self_attn.q_proj", ["re:.*self_attn.*"]) and is_ignored("lm_head", ["lm_head"])
    assert not is_ignored("model.layers.1.mlp.experts.0.up_proj", ["lm_head", "re:.*self_attn.*", "re:.*mlp\\.(gate|up)_proj.*"])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"symmetric": False}, "asymmetric"),
        ({"input_activations": {"num_bits": 8}}, "quantized activations"),
        ({"actorder": "group"}, "actorder"),
        ({"actorder": True}, "actorder"),
        ({"num_bits": 8}, "num_bits 8"),
        ({"type": "float"}, "float weights"),
        ({"strategy": "channel"}, 'strategy "channel"'),
        ({"dynamic": True}, "dynamic"),
        ({"group_size": -1}, "group_size -1"),
        ({"format": "int-quantized"}, 'format "int-quantized"'),
        ({"format": "nvfp4-pack-quantized"}, "nvfp4"),
        ({"quant_method": "awq"}, 'quant_method "awq"'),
        ({"quant_method": "gptq"}, 'quant_method "gptq"'),
        ({"quant_method": "fp8"}, 'quant_method "fp8"'),
        ({"quant_method": None, "quant_algo": "NVFP4"}, 'quant_method "modelopt", quant_algo "NVFP4"'),
        ({"transform_config": {"config_groups": {"v": {"type": "hadamard", "apply": []}}}}, "transform_config"),
        ({"sparsity_config": {"format": "sparse-24-bitmask", "ignore": []}}, "sparsity_config"),
        ({"moe_sparsity_config": {"method": "reap"}}, "moe_sparsity_config"),
        ({"quantization_status": "frozen"}, "quantization_status frozen (weights are quantized anew at run time)"),
        ({"block_structure": [128, 128]}, "weights.block_structure [128, 128]"),
        ({"zero_point": True}, "weights.zero_point True"),
    ],
)
def test_other_quantizations_are_refused_by_name(change: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_quantization_config({"quantization_config": changed(**change)})
    assert named in caught.value.message
    assert caught.value.next


OF_WEIGHTS = ("block_structure", "zero_point", "observer_kwargs", "scale_dtype", "rounding")


def changed(**change: object) -> dict[str, object]:
    """Kimi's table with fields changed where they stand: in the table, or in its group's weights."""
    config = kimi_config(**change)
    config |= {name: value for name, value in change.items() if name not in kimi_config() and name not in OF_WEIGHTS and name != "actorder"}
    weights = config["config_groups"]["group_0"]["weights"]
    weights |= {name: value for name, value in change.items() if name in OF_WEIGHTS}
    return config


def test_fields_without_effect_are_taken_and_unknown_ones_named() -> None:
    quiet = changed(
        transform_config={}, sparsity_config={"format": "dense", "ignore": []}, kv_cache_scheme=None, quantization_status="compressed",
        version="0.9", global_compression_ratio=None, block_structure=None, observer_kwargs={}, scale_dtype=None,
    )  # fmt: skip
    assert from_quantization_config({"quantization_config": quiet}) is not None
    assert not_followed({"quantization_config": quiet}) == "" == not_followed({"model_type": "llama"})
    loud = changed(kv_cache_scheme={"num_bits": 8}, smooth=0.5, rounding="up")
    assert from_quantization_config({"quantization_config": loud}) is not None
    assert not_followed({"text_config": {"quantization_config": loud}}) == (
        "quantization_config: smooth = 0.5, config_groups.group_0.weights.rounding = 'up': not known here and not followed; "
        "kv_cache_scheme is for a server's cache: training and generation here keep the cache unquantized"
    )


def test_every_field_that_compressed_tensors_writes_is_known() -> None:
    written = QuantizationConfig(config_groups={"group_0": scheme(32)}, format="pack-quantized", quantization_status="compressed").model_dump()
    assert from_quantization_config({"quantization_config": written}) is not None
    assert not_followed({"quantization_config": written}) == ""
    known = SILENT | ONLY.keys() | {"kv_cache_scheme"}
    assert set(QuantizationConfig.model_fields) <= known and set(QuantizationScheme.model_fields) <= SILENT_OF_GROUP
    assert set(QuantizationArgs.model_fields) <= SILENT_OF_WEIGHTS | ONLY_OF_WEIGHTS.keys()


@pytest.mark.parametrize("table", [{"load_in_8bit": True, "llm_int8_threshold": 6.0}, {"group_size": 64, "bits": 4}])
def test_a_table_without_a_method_is_refused_with_the_fields_it_has(table):
    """bitsandbytes before it wrote its name, and MLX."""
    with pytest.raises(ConfigError, match=f"names no quant_method; it has {', '.join(table)}"):
        from_quantization_config({"quantization_config": table})
    assert from_quantization_config({"quantization_config": {}}) is None
