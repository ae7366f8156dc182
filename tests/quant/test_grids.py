"""AWQ and GPTQ written: the words of autoawq 0.2.9 and gptqmodel 7.7.0 (tests/quant/vectors), and on kept scales and
zero points the nearest codes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from unfreeze.core.errors import CheckpointError, ConfigError
from unfreeze.quant.awq import Awq
from unfreeze.quant.gptq import Gptq
from unfreeze.quant.grids import Gridded, pack, unpack
from unfreeze.quant.kept import can_keep, kept, refitted

CODECS = {
    "awq": Awq(32),
    "awq of a column": Awq(-1),
    "awq of bf16 scales": Awq(32, "BF16"),
    "gptq": Gptq(4, 32),
    "gptq v2": Gptq(4, 32, minus_one=False),
    "gptq 2 bits": Gptq(2, 32),
    "gptq 8 bits": Gptq(8, -1),
    "gptq without g_idx": Gptq(4, 32, indexed=False),
}
PUBLISHED = {
    "bits_4 group_32 sym gptq": (4, 32, False, True),
    "bits_4 group_32 act_order gptq": (4, 32, True, False),
    "bits_4 group_16 act_order sym gptq_v2": (4, 16, True, True),
    "bits_4 group_-1 gptq": (4, -1, False, False),
    "bits_8 group_32 sym gptq": (8, 32, False, True),
    "bits_8 group_16 act_order gptq_v2": (8, 16, True, False),
    "bits_2 group_32 act_order gptq": (2, 32, True, False),
}
"""Case -> bits, group, act-order, symmetric: how benchmarks/quant_vectors.py made it."""


def weights(rows: int = 48, columns: int = 96, seed: int = 0) -> torch.Tensor:
    return 0.05 * torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def linear(rows: int, columns: int, seed: int) -> torch.Tensor:
    """The weight that the library was given."""
    torch.manual_seed(seed)
    return torch.nn.Linear(columns, rows, bias=False).weight.data


def equal(left, right) -> dict[str, bool]:
    return {part: torch.equal(tensor, right[part]) for part, tensor in left.items()}


def steps_of(codec, parts) -> tuple[torch.Tensor, torch.Tensor]:
    """(what the codes stand for, the step of each) float64 [out, in], scales widened: one exact product each."""
    whole = replace(codec, scale_dtype="F32").dequantize({**parts, "scales": parts["scales"].float()})
    grid = codec.grid(parts)
    return whole.double(), grid.scales_OG.double().index_select(1, grid.groups_I)


def test_awq_is_packed_as_autoawq_packs_it(recorded):
    """It doesn't cut off a code above 15, which then adds 1 to the next column of the word: two codes differ."""
    cases = recorded("awq", "0.2.9")
    made = Awq(32).quantize(linear(32, 64, 32))
    assert equal(made, cases["group_32"]) == {"qweight": True, "qzeros": True, "scales": True}
    made, theirs = Awq(64).quantize(linear(32, 64, 64)), cases["channel"]
    assert equal(made, theirs) == {"qweight": False, "qzeros": True, "scales": True}
    ours, others = (steps_of(Awq(64), parts)[0] for parts in (made, theirs))
    assert (ours != others).nonzero().tolist() == [[26, 49], [28, 49]]
    weight = linear(32, 64, 64)
    assert ((ours - weight).abs() < (others - weight).abs())[ours != others].all()


@pytest.mark.parametrize("name", PUBLISHED)
def test_gptq_is_packed_as_gptqmodel_packs_it(name, recorded):
    """The scales of the symmetric cases were made otherwise: there the codes on them are compared, cut off alike."""
    bits, group, _, symmetric = PUBLISHED[name]
    theirs, codec = recorded("gptq", "7.7.0")[name], Gptq(bits, group, name.endswith("gptq"))
    weight = linear(24, 64, bits * group + symmetric)
    made = refitted(codec, weight, theirs)
    if symmetric:
        assert torch.equal(made["qzeros"], theirs["qzeros"])  # stay in the middle
        grid = codec.grid(theirs)
        assert grid.symmetric and codec.grid(made).symmetric
        made = codec.written(grid.codes(weight)[0], grid)
    assert all(equal(made, theirs).values()) and made.keys() == {"qweight", "qzeros", "scales", "g_idx"}
    plain = codec.quantize(weight)  # control arm: with no base to take the order from
    assert equal(plain, theirs)["g_idx"] == ("act_order" not in name)


def test_what_stands_on_a_grid_is_written_as_it_was_read_bit_for_bit(recorded):
    """Every recorded weight, words of any bits too: zero points of 0 whose neighbours paid, negative scales."""
    count = 0
    for library, version in (("awq", "0.2.9"), ("gptq", "7.7.0")):
        for name, case in recorded(library, version).items():
            if library == "awq":
                codec = Awq(64 // len(case["scales"]))
            else:
                bits, group = (int(part.rpartition("_")[2]) for part in name.split()[:2])
                codec = Gptq(bits, group, name.endswith("gptq"))
            parts = {suffix: case[suffix] for suffix in codec.suffixes}
            made, anew = kept(codec, codec.dequantize(parts).float(), parts, parts)
            assert anew == 0 and all(equal(made, parts).values()), name
            count += 1
    assert count == 12


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_packing_is_the_inverse_of_unpacking(bits):
    numbers = torch.randint(0, 2**bits, (5, 67), generator=torch.Generator().manual_seed(0)).byte()
    words = pack(numbers, bits)
    assert words.dtype == torch.int32 and words.shape == (5, -(-67 * bits // 32))
    assert torch.equal(unpack(words, bits)[:, :67], numbers) and not unpack(words, bits)[:, 67:].any()
    # the first word by arithmetic
    first = sum(int(code) << bits * place for place, code in enumerate(numbers[0, : 32 // bits]))
    assert int(words[0, 0]) % 2**32 == first


@pytest.mark.parametrize("name", CODECS)
def test_new_scales_are_at_most_half_a_step_off(name):
    """Half a step, and what rounding the scale to its dtype takes from the end of a group: 2^-11 of its range in
    float16, 2^-9 in bf16. A group whose weights are all positive, or zero, is one of them."""
    codec, weight = CODECS[name], weights()
    weight[3] = weight[3].abs() + 0.01
    weight[5] = 0
    parts = codec.quantize(weight)
    needed = codec.parts(48, 96)
    assert {suffix: tuple(part.shape) for suffix, part in parts.items()} == {
        s: p[1] for s, p in needed.items()
    }
    assert parts["scales"].dtype == (torch.bfloat16 if codec.scale_dtype == "BF16" else torch.float16)
    top = 2 ** getattr(codec, "bits", 4) - 1
    half = 0.5 + top * (2**-9 if codec.scale_dtype == "BF16" else 2**-11)
    found, step = steps_of(codec, parts)
    assert ((found - weight).abs() <= half * step).all() and not found[5].any()
    # control arm: of codes one step beside, whose errors are even between 0.5 and 1.5, this share is off by more
    assert ((found + step - weight).abs() > half * step).float().mean() > 0.9 * (1.5 - half)


@pytest.mark.parametrize("name", CODECS)
def test_a_small_change_on_kept_scales_takes_the_nearest_codes(name):
    codec = CODECS[name]
    assert isinstance(codec, Gridded) and can_keep(codec)
    parts = codec.quantize(weights())
    W = codec.dequantize(parts).float()
    W += 0.1 * (W.abs().amax() / 2 ** getattr(codec, "bits", 4)) * weights(seed=1) / 0.05
    fresh = refitted(codec, W, parts)
    made, anew = kept(codec, W, parts, fresh)
    grid, before, other = (codec.grid(found) for found in (made, parts, fresh))
    same = (grid.scales_OG == before.scales_OG) & (grid.zeros_OG == before.zeros_OG)
    assert anew >= (~same).sum() and anew <= same.numel() / 2
    assert ((grid.scales_OG == other.scales_OG) & (grid.zeros_OG == other.zeros_OG))[~same].all()
    found, step = steps_of(codec, made)
    within = (found - W).abs() <= (0.5 + 1e-3) * step
    assert within[same.index_select(1, grid.groups_I)].all()


@pytest.mark.parametrize("name", CODECS)
def test_only_the_group_that_cannot_hold_a_weight_gets_a_scale_and_a_zero_point(name):
    codec = CODECS[name]
    parts = codec.quantize(weights())
    W = codec.dequantize(parts).float()
    W[3, 40] = 3.0
    fresh = refitted(codec, W, parts)
    made, anew = kept(codec, W, parts, fresh)
    grid, before = codec.grid(made), codec.grid(parts)
    group = int(before.groups_I[40])
    for left, right in ((grid.scales_OG, before.scales_OG), (grid.zeros_OG, before.zeros_OG)):
        assert (left != right).nonzero().tolist() == [[3, group]]
    assert anew == 1 and abs(float(codec.dequantize(made)[3, 40]) - 3.0) < 0.5 * 3.2 / 3
    clipped, _ = kept(codec, W, parts, parts)  # control arm: without the new ones it is cut off
    assert abs(float(codec.dequantize(clipped)[3, 40]) - 3.0) > 2


def test_a_symmetric_base_stays_symmetric_and_another_does_not():
    """Servers' kernels for symmetric GPTQ don't read zero points."""
    codec = Gptq(4, 32)
    grid = codec.grid(codec.quantize(weights()))
    symmetric = replace(grid, zeros_OG=torch.full_like(grid.zeros_OG, 8))
    base = codec.written(torch.zeros(48, 96), symmetric)
    made = refitted(codec, weights(seed=1), base)
    assert torch.equal(made["qzeros"], base["qzeros"])
    found, step = steps_of(codec, made)
    assert ((found - weights(seed=1)).abs() <= (0.5 + 15 * 2**-11) * step).all()
    assert (
        codec.grid(refitted(codec, weights(seed=1), codec.quantize(weights()))).zeros_OG.unique().numel() > 2
    )


def test_a_group_of_zeros_that_gets_a_change_gets_a_scale():
    for codec in (Awq(32), Gptq(4, 32)):
        parts = codec.quantize(torch.zeros(8, 64))
        assert (parts["scales"] > 0).all()
        nothing = {**parts, "scales": torch.zeros_like(parts["scales"])}
        for base in (parts, nothing):
            W = torch.zeros(8, 64)
            W[1, 5] = 0.01
            made, anew = kept(codec, W, base, refitted(codec, W, base))
            assert anew == 1 and abs(float(codec.dequantize(made)[1, 5]) - 0.01) < 1e-4


def test_widths_that_fill_no_word_or_group_and_stacks_are_written():
    """40 inputs in groups of 32 and 20 outputs; each matrix of a stack like itself."""
    codec, weight = Gptq(4, 32), torch.stack([weights(20, 40), weights(20, 40, 1)])
    stack = codec.quantize(weight)
    assert stack["qzeros"].shape == (2, 2, 3) and stack["g_idx"].shape == (2, 40)
    for expert in range(2):
        one = codec.quantize(weight[expert])
        assert all(equal(one, {s: part[expert] for s, part in stack.items()}).values())
        found, step = steps_of(codec, one)
        assert ((found - weight[expert]).abs() <= (0.5 + 15 * 2**-11) * step).all()


def test_what_no_code_stands_for_is_refused():
    for codec in (Awq(32), Gptq(4, 32)):
        wrong = weights()
        wrong[3, 4] = float("nan")
        with pytest.raises(CheckpointError, match="1 of 4608 weights are NaN"):
            codec.quantize(wrong)
    with pytest.raises(ConfigError, match="20 x 64 does not divide"):
        Awq(32).quantize(weights(20, 64))
