"""Rows times INT4 experts against float64 products with the codec's own weights: ragged, empty experts, sizes
that fill no tile."""

import time

import pytest
import torch

from unfreeze.core.errors import ConfigError
from unfreeze.kernels.int4_grouped_mm import OP, bucket, expands, int4_grouped_mm
from unfreeze.quant.codec import Packed
from unfreeze.quant.int4 import Int4

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# float32: sums of some hundred terms. bf16: the result is rounded once
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-8}


def problem(sizes, N, M, group=32, dtype=torch.float32):
    g = torch.Generator().manual_seed(sum(sizes) + N)
    codes = torch.randint(-(2**31), 2**31 - 1, (len(sizes), N, M // 8), dtype=torch.int32, generator=g)
    scales = torch.randn((len(sizes), N, M // group), generator=g).bfloat16()
    packed = Packed(Int4(group), {"weight_packed": codes.to(DEVICE), "weight_scale": scales.to(DEVICE)})
    offsets = torch.tensor(sizes).cumsum(0).to(DEVICE, torch.int32)
    return torch.randn((sum(sizes), M), generator=g).to(DEVICE, dtype), packed, offsets


def by_float64(x, packed, sizes):
    weights = packed.dequantize().double()
    return torch.cat([rows @ weights[e].t() for e, rows in enumerate(x.double().split(sizes))])


@pytest.mark.parametrize("impl", ["reference", *OP.candidates])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "sizes, N, M, group",
    [
        ([1], 1, 32, 32),
        ([3, 0, 1], 70, 96, 32),
        ([0, 0, 17, 2, 0], 64, 64, 32),
        ([40, 1, 0, 19], 33, 160, 16),
        ([5, 2], 24, 256, 128),
        ([0, 0], 8, 32, 32),
    ],
)
def test_equals_float64(sizes, N, M, group, dtype, impl):
    reason = "" if impl == "reference" else OP.candidates[impl].refuses(DEVICE.type, dtype)
    if reason:
        pytest.skip(reason)
    x, packed, offsets = problem(sizes, N, M, group, dtype)
    y = int4_grouped_mm(x, packed, offsets, impl)
    want = by_float64(x, packed, sizes)
    assert y.shape == want.shape and y.dtype == dtype
    assert float((y.double() - want).norm()) <= TOLERANCE[dtype] * float(want.norm())


def test_rows_of_a_wider_buffer():
    sizes = [3, 0, 6]
    x, packed, offsets = problem(sizes, 16, 64)
    wide = torch.randn(9, 80, device=DEVICE)
    wide[:, :64] = x
    for impl in (
        "reference",
        *(name for name in OP.candidates if not OP.candidates[name].refuses(DEVICE.type, torch.float32)),
    ):
        torch.testing.assert_close(
            int4_grouped_mm(wide[:, :64], packed, offsets, impl).double(),
            by_float64(x, packed, sizes),
            rtol=1e-4,
            atol=1e-3,
        )


def test_control_arm_weights_that_were_not_rounded_are_seen():
    """A kernel that multiplied with code · scale in float32 would train and sample different models."""
    sizes = [64]
    x, packed, _ = problem(sizes, 32, 64)
    want = by_float64(x, packed, sizes)
    scales = packed.parts["weight_scale"].double().repeat_interleave(32, -1)
    codes = (packed.dequantize().double() / scales).round()
    wrong = x.double() @ (codes * scales)[0].t()
    assert float((wrong - want).norm() / want.norm()) > 100 * TOLERANCE[torch.float32]


def test_buckets_what_is_refused_and_who_expands():
    generator = torch.Generator().manual_seed(0)
    for case in OP.cases:
        x, packed, offsets = case.inputs(torch.device("cpu"), torch.float32, generator)
        assert bucket(x, packed, offsets) == case.bucket and int(offsets[-1]) == len(x)
    assert expands(x, packed, offsets)  # no record
    odd = problem([2], 4, 48, 24)
    assert bucket(*odd) == "other"
    with pytest.raises(ConfigError, match="int4_grouped_mm cannot run"):
        int4_grouped_mm(x.double(), packed, offsets, "triton")


def test_a_gpus_inputs_are_drawn_where_they_lie():
    """The host would need 8 s of a core for them; meta stands for the GPU."""
    meta = torch.device("meta")
    OP.cases[0].inputs(meta, torch.bfloat16, torch.Generator())  # torch imports what meta needs
    case, begun = OP.cases[-1], time.process_time()
    x, packed, offsets = case.inputs(meta, torch.bfloat16, torch.Generator())
    assert packed.shape == (48, 4096, 7168) and x.shape == (48 * 1024, 7168) and offsets.shape == (48,)
    assert {t.device.type for t in (x, offsets, *packed.parts.values())} == {"meta"}
    assert time.process_time() - begun < 0.3
