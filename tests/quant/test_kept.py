"""Codes on given scales are the nearest ones, and a scale that cannot hold a weight is made anew."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import quantize

from unfreeze.quant import Fp8, Int4, nvfp4
from unfreeze.quant.fp8_scaled import Fp8Scaled
from unfreeze.quant.integers import MATRIX, ROW, Integers
from unfreeze.quant.kept import can_keep, kept, refitted
from unfreeze.quant.mxfp4 import BLOCKS, PACKED, Mxfp4
from unfreeze.quant.mxfp8 import Mxfp8
from unfreeze.quant.nvfp4 import Nvfp4

CODECS = {
    "int4": Int4(32),
    "int4 of f32 scales": Int4(32, "F32"),
    "fp8": Fp8((16, 32)),
    "fp8 of bf16 scales": Fp8((16, 32), "BF16"),
    "fp8 of powers of two": Fp8((16, 32), "F8_E8M0"),
    "fp8 of a matrix": Fp8Scaled(()),
    "fp8 of rows": Fp8Scaled(scale_dtype="BF16"),
    "nvfp4": Nvfp4(nvfp4.PACKED),
    "nvfp4 of modelopt": Nvfp4(nvfp4.MODELOPT),
    "mxfp8": Mxfp8(),
    "int8 of rows": Integers(8, ROW, packed=False),
    "int8 of a matrix": Integers(8, MATRIX, packed=False, scale_dtype="F32"),
    "int8 packed": Integers(8, 32),
    "mxfp4": Mxfp4(PACKED),
    "mxfp4 blocks": Mxfp4(BLOCKS),
}
DTYPES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.uint8,
}


def published(codec, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """The parts of a file: scales in the codec's dtype."""
    parts = codec.quantize(weight)
    dtype = DTYPES[getattr(codec, "scale_dtype", "F8_E4M3")]
    return {**parts, codec.suffixes[1]: parts[codec.suffixes[1]].to(dtype)}


def weights(seed: int = 0) -> torch.Tensor:
    return 0.05 * torch.randn(48, 96, generator=torch.Generator().manual_seed(seed))


def noise(name: str) -> float:
    """Less than most groups' largest weight can be moved by without a new scale: half a step."""
    return 0.0002 if "int8" in name else 0.002


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    bytes_ = [part.reshape(-1).view(torch.uint8) for part in (left, right)]
    return left.dtype == right.dtype and torch.equal(*bytes_)


@pytest.mark.parametrize("name", CODECS)
def test_a_weight_that_did_not_change_keeps_its_codes_and_scales(name):
    codec = CODECS[name]
    parts = published(codec, weights())
    W = codec.dequantize(parts).float()
    made, anew = kept(codec, W, parts, refitted(codec, W, parts))
    assert anew == 0 and can_keep(codec)
    assert torch.equal(codec.dequantize(made), codec.dequantize(parts))
    for suffix, part in parts.items():  # NVFP4 has two codes for 0
        assert same(made[suffix], part) or ("nvfp4" in name and suffix == codec.suffixes[0])


@pytest.mark.parametrize("name", CODECS)
def test_a_small_change_is_rounded_to_the_nearest_codes_on_the_scales_that_are_there(name):
    """No code one step up or down is nearer, whatever W' is: the change of any code cannot lessen the error."""
    codec = CODECS[name]
    parts = published(codec, weights())
    W = codec.dequantize(parts).float() + noise(name) * torch.randn(
        48, 96, generator=torch.Generator().manual_seed(1)
    )
    fresh = refitted(codec, W, parts)
    assert {suffix: part.dtype for suffix, part in fresh.items()} == {s: p.dtype for s, p in parts.items()}
    made, anew = kept(codec, W, parts, fresh)
    scale = codec.suffixes[1]
    changed = (made[scale].float() != parts[scale].float()).sum() if scale != "scales" else anew
    assert changed <= anew <= made[scale].numel() / 4
    error = (codec.dequantize(made).float() - W).abs()
    # against every value that the format can stand for in the same place
    for value in range(256):
        codes = torch.full_like(made[codec.suffixes[0]].view(torch.uint8), value)
        if codes.dtype != made[codec.suffixes[0]].dtype == torch.float8_e4m3fn and value & 0x7F == 0x7F:
            continue  # NaN
        other = codec.dequantize(
            {**made, codec.suffixes[0]: codes.view(made[codec.suffixes[0]].dtype)}
        ).float()
        assert (error <= (other - W).abs() + W.abs() * 2**-7 + 1e-6).all(), value  # both are read as bf16


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


OTHER_PLACES = {
    "fp8": [0, 1],
    "fp8 of bf16 scales": [0, 1],
    "fp8 of powers of two": [0, 1],
    "fp8 of a matrix": [],
    "fp8 of rows": [3, 0],
    "nvfp4": [3, 2],
    "nvfp4 of modelopt": [3, 2],
    "int8 of rows": [3, 0],
    "int8 of a matrix": [0],
}
"""Where the scale of row 3, column 40 stands, if not at [3, 1]."""


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("name", CODECS)
def test_only_the_scale_that_cannot_hold_a_weight_is_made_anew(name, sign):
    codec = CODECS[name]
    parts = published(codec, weights())
    W = codec.dequantize(parts).float()
    # sixty times the others; in NVFP4 no more than the matrix's own number allows, at least twice its group's
    value = sign * (float(W.abs().max()) if "nvfp4" in name else 3.0)
    W[3, 40] = value
    fresh = refitted(codec, W, parts)
    made, anew = kept(codec, W, parts, fresh)
    scale = codec.suffixes[1]
    differs = made[scale].reshape(-1, 1).view(torch.uint8) != parts[scale].reshape(-1, 1).view(torch.uint8)
    where = differs.any(-1).reshape(made[scale].shape).nonzero().tolist()
    assert anew == 1 and where == [OTHER_PLACES.get(name, [3, 1])]
    assert abs(codec.dequantize(made)[3, 40].float() - value) < abs(value) / 6
    clipped, _ = kept(codec, W, parts, parts)  # control arm: without the new scale it is cut off
    if "nvfp4" not in name:  # which makes its own
        assert abs(codec.dequantize(clipped)[3, 40].float() - value) > abs(value) / 5


def test_a_group_of_zeros_that_gets_a_change_gets_a_scale():
    codec, zeros = CODECS["int4"], torch.zeros(2, 64)
    parts = published(codec, zeros)
    W = zeros.clone()
    W[1, 5] = 0.01
    made, anew = kept(codec, W, parts, refitted(codec, W, parts))
    assert anew == 1 and abs(codec.dequantize(made)[1, 5].float() - 0.01) < 1e-4
