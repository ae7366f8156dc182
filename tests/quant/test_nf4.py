"""bitsandbytes written: the codes, scales and maps that 0.50.2 made of the same weights (tests/quant/vectors)."""

from __future__ import annotations

import pytest
import torch

from unfreeze.core.errors import CheckpointError, ConfigError
from unfreeze.quant import nf4
from unfreeze.quant.bitsandbytes import Bits4, Bits8
from unfreeze.quant.kept import can_keep, kept, refitted
from unfreeze.quant.nf4 import in_blocks
from unfreeze.quant.spelling import canonical

TIE = "fp4 double bfloat16 block_64"


@pytest.fixture
def cases(recorded):
    return recorded("bitsandbytes", "0.50.2")


def given(case: dict[str, torch.Tensor]) -> torch.Tensor:
    """The weight that the library was given (benchmarks/quant_vectors.py)."""
    rows, columns = case["expanded"].shape
    generator = torch.Generator().manual_seed(rows)
    return (torch.randn(rows, columns, generator=generator) * 0.02).to(case["expanded"].dtype)


def file_of(name: str, case: dict[str, torch.Tensor]) -> tuple[Bits4, dict[str, torch.Tensor]]:
    parts = {canonical(f"m.{part}").removeprefix("m."): part_ for part, part_ in case.items()}
    shape, codec = parts.pop("expanded").shape, Bits4(name.split()[0], "double" in name)
    raw = bytes(parts[codec.text].tolist())
    codec = codec.with_text(raw, "x")
    return codec, parts | {codec.text: torch.tensor(codec.parse(raw, "x", *shape))}


def test_four_bits_are_packed_as_bitsandbytes_packs_them_bit_for_bit(cases):
    """NF4 and FP4, absmax quantized or not; with the base's maps and offset too. The offset is a mean in float32,
    whose order of summing is the library's own. One weight of FP4 lies midway between two numbers, -0.2083 of its
    absmax: either is the nearest, the library takes the smaller and we the larger."""
    del cases["int8"]
    for name, case in cases.items():
        codec, parts = file_of(name, case)
        for made in (codec.quantize(given(case)), refitted(codec, given(case).float(), parts)):
            assert made.keys() == parts.keys()
            for suffix, part in made.items():
                if suffix == codec.text:
                    torch.testing.assert_close(part, parts[suffix], rtol=1e-6, atol=0)
                elif suffix != "weight":
                    assert torch.equal(part, parts[suffix]), (name, suffix)
            other = made["weight"].flatten() != parts["weight"].flatten()
            assert int(other.sum()) == (name == TIE), name
            left, right = codec.dequantize(made).double(), case["expanded"].double()
            weight = given(case).double()
            beside = (left != right) & (((left - weight).abs() - (right - weight).abs()).abs() > 1e-4)
            assert not beside.any() and int((left != right).sum()) == (name == TIE)
    assert len(cases) == 6


def test_control_arm_another_map_gives_other_codes(cases, monkeypatch):
    monkeypatch.setattr(nf4, "NF4", tuple(number * 0.98 for number in nf4.NF4))
    codec, parts = file_of("nf4 float32", cases["nf4 float32 block_128"])
    made = codec.quantize(given(cases["nf4 float32 block_128"]))
    assert not torch.equal(made["weight"].flatten(), parts["weight"].flatten())


def test_the_code_is_the_nearest():
    """Against the distance to all 16 numbers in float64; a map that a file brings need not be ordered."""
    row = torch.randn(300, generator=torch.Generator().manual_seed(0))
    numbers = torch.linspace(-1, 1, 16)[torch.randperm(16, generator=torch.Generator().manual_seed(1))]
    numbers[numbers.abs().argmin()] = 0.0
    codes, absmax = in_blocks(row, 64, numbers)
    scale = absmax.double().repeat_interleave(64)[:300]
    distance = (numbers.double() * scale[:, None] - row.double()[:, None]).abs()
    chosen = distance.gather(1, codes.long()[:, None])[:, 0]
    assert absmax.shape == (5,) and (chosen <= distance.amin(1) + 1e-6).all()
    assert (distance.gather(1, (codes.long()[:, None] + 1) % 16)[:, 0] > chosen).all()  # control arm


def test_eight_bits_are_packed_as_bitsandbytes_packs_them_bit_for_bit(cases):
    case = cases["int8"]
    weight = torch.randn(24, 32, generator=torch.Generator().manual_seed(0)).half()
    made = Bits8().quantize(weight)
    assert torch.equal(made["weight"], case["weight"]) and torch.equal(made["SCB"], case["SCB"])
    step = made["SCB"].double()[:, None] / 127
    error = (Bits8().dequantize(made).double() - weight.double()).abs()
    assert (error <= (0.5 + 1e-4) * step).all()  # 127 codes in float32
    assert torch.equal(Bits8().quantize(torch.zeros(2, 4))["weight"], torch.zeros(2, 4).to(torch.int8))


def test_eight_bits_on_kept_scales():
    codec, weight = Bits8(), torch.randn(24, 32, generator=torch.Generator().manual_seed(0))
    parts = codec.quantize(weight)
    W = codec.dequantize(parts)
    assert can_keep(codec) and not can_keep(Bits4())
    made, anew = kept(codec, W, parts, refitted(codec, W, parts))
    assert (
        anew == 0 and torch.equal(made["weight"], parts["weight"]) and torch.equal(made["SCB"], parts["SCB"])
    )
    W[3, 5] = 9.0
    made, anew = kept(codec, W, parts, refitted(codec, W, parts))
    assert anew == 1 and (made["SCB"] != parts["SCB"]).nonzero().tolist() == [[3]]
    assert abs(float(codec.dequantize(made)[3, 5]) - 9.0) < 1e-5
    clipped, _ = kept(codec, W, parts, parts)  # control arm
    assert abs(float(codec.dequantize(clipped)[3, 5]) - 9.0) > 1


def test_what_no_code_stands_for_is_refused():
    for codec in (Bits4(), Bits8()):
        with pytest.raises(CheckpointError, match="1 of 8 weights are NaN"):
            codec.quantize(torch.tensor([[1.0, 2, 3, float("inf")], [1, 2, 3, 4]]))
    with pytest.raises(ConfigError, match="an odd number"):
        Bits4().quantize(torch.zeros(2, 33))
    assert torch.equal(
        Bits4(double=False).dequantize(Bits4(double=False).quantize(torch.zeros(4, 32))).float(),
        torch.zeros(4, 32),
    )
    stack = torch.randn(2, 4, 32, generator=torch.Generator().manual_seed(0))
    parts = Bits4().quantize(stack)
    one = Bits4().quantize(stack[1])
    assert all(torch.equal(part[1], one[suffix]) for suffix, part in parts.items())
