"""Codes on given scales are the nearest ones, and a scale that cannot hold a weight is made anew."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import quantize

from unfreeze.quant import Fp8, Int4
from unfreeze.quant.kept import can_keep, kept, refitted
from unfreeze.quant.mxfp4 import BLOCKS, PACKED, Mxfp4

CODECS = {
    "int4": Int4(32),
    "int4 of f32 scales": Int4(32, "F32"),
    "fp8": Fp8((16, 32)),
    "fp8 of bf16 scales": Fp8((16, 32), "BF16"),
    "fp8 of powers of two": Fp8((16, 32), "F8_E8M0"),
    "mxfp4": Mxfp4(PACKED),
    "mxfp4 blocks": Mxfp4(BLOCKS),
}
DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "F8_E8M0": torch.float8_e8m0fnu, "U8": torch.uint8}


def published(codec, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """The parts of a file: scales in the codec's dtype."""
    parts = codec.quantize(weight)
    return {**parts, codec.suffixes[1]: parts[codec.suffixes[1]].to(DTYPES[codec.scale_dtype])}


def weights(seed: int = 0) -> torch.Tensor:
    return 0.05 * torch.randn(48, 96, generator=torch.Generator().manual_seed(seed))


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(left.view(torch.uint8), right.view(torch.uint8))


@pytest.mark.parametrize("name", CODECS)
def test_a_weight_that_did_not_change_keeps_its_codes_and_scales(name):
    codec = CODECS[name]
    parts = published(codec, weights())
    W = codec.dequantize(parts).float()
    made, anew = kept(codec, W, parts, refitted(codec, W, parts))
    assert anew == 0 and can_keep(codec)
    assert all(same(made[suffix], part) for suffix, part in parts.items())


@pytest.mark.parametrize("name", CODECS)
def test_a_small_change_is_rounded_to_the_nearest_codes_on_the_scales_that_are_there(name):
    """No code one step up or down is nearer, whatever W' is: the change of any code cannot lessen the error."""
    codec = CODECS[name]
    parts = published(codec, weights())
    W = codec.dequantize(parts).float() + 0.002 * torch.randn(
        48, 96, generator=torch.Generator().manual_seed(1)
    )
    fresh = refitted(codec, W, parts)
    assert {suffix: part.dtype for suffix, part in fresh.items()} == {s: p.dtype for s, p in parts.items()}
    made, anew = kept(codec, W, parts, fresh)
    scale = codec.suffixes[1]
    changed = (made[scale].float() != parts[scale].float()).sum() if scale != "scales" else anew
    assert changed <= anew < made[scale].numel() / 4
    error = (codec.dequantize(made).float() - W).abs()
    # against every value that the format can stand for in the same place
    for value in range(256):
        codes = torch.full_like(made[codec.suffixes[0]].view(torch.uint8), value)
        if codec.name == "fp8-block" and value & 0x7F == 0x7F:
            continue  # NaN
        other = codec.dequantize(
            {**made, codec.suffixes[0]: codes.view(made[codec.suffixes[0]].dtype)}
        ).float()
        assert (error <= (other - W).abs() + W.abs() * 2**-8 + 1e-6).all(), value  # what is read is bf16


def test_int4_codes_are_those_of_compressed_tensors_on_the_same_scales():
    codec = CODECS["int4 of f32 scales"]
    parts = published(codec, weights())
    W = codec.dequantize(parts).float() + 0.02 * torch.randn(
        48, 96, generator=torch.Generator().manual_seed(1)
    )
    made, _ = kept(codec, W, parts, parts)  # without new scales: what is beyond the last code is cut off
    args = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32)
    wanted = quantize(W, made["weight_scale"], torch.zeros_like(made["weight_scale"]), args, dtype=torch.int8)
    ours = codec.dequantize({**made, "weight_scale": torch.ones_like(made["weight_scale"])})
    assert torch.equal(ours, wanted.float()) and (wanted == -8).any()


@pytest.mark.parametrize("name", CODECS)
def test_only_the_scale_that_cannot_hold_a_weight_is_made_anew(name):
    codec = CODECS[name]
    parts = published(codec, weights())
    W = codec.dequantize(parts).float()
    W[3, 40] = 3.0  # sixty times the others
    fresh = refitted(codec, W, parts)
    made, anew = kept(codec, W, parts, fresh)
    scale = codec.suffixes[1]
    differs = made[scale].view(torch.uint8) != parts[scale].view(torch.uint8)
    where = differs.view(*made[scale].shape, -1).any(-1).nonzero().tolist()
    assert anew == 1 and where == [[3 // 16 if "fp8" in name else 3, 1]]
    assert abs(codec.dequantize(made)[3, 40].float() - 3.0) < 0.5
    clipped, _ = kept(codec, W, parts, parts)  # control arm: without the new scale it is cut off
    assert abs(codec.dequantize(clipped)[3, 40].float() - 3.0) > 1.5


def test_a_group_of_zeros_that_gets_a_change_gets_a_scale():
    codec, zeros = CODECS["int4"], torch.zeros(2, 64)
    parts = published(codec, zeros)
    W = zeros.clone()
    W[1, 5] = 0.01
    made, anew = kept(codec, W, parts, refitted(codec, W, parts))
    assert anew == 1 and abs(codec.dequantize(made)[1, 5].float() - 0.01) < 1e-4
