"""Claims about GPTQ, against what gptqmodel 7.7.0 packed and expanded (tests/quant/vectors)."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from unfreeze.core.errors import CheckpointError, ConfigError
from unfreeze.quant import Packed, not_followed, recognise
from unfreeze.quant.codec import ByRows
from unfreeze.quant.gptq import SUFFIXES, Gptq
from unfreeze.quant.halves import Halves, stacked

TABLE = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 128,
    "desc_act": True,
    "sym": True,
    "lm_head": False,
    "checkpoint_format": "gptq",
    "pack_dtype": "int32",
    "meta": {"quantizer": ["gptqmodel:7.7.0"]},
}


@pytest.fixture
def cases(recorded):
    return recorded("gptq", "7.7.0")


def codec_of(name: str) -> Gptq:
    bits, group = map(int, re.findall(r"_(-?\d+)", name)[:2])
    return Gptq(bits, group, name.endswith("gptq"))


def parts_of(case):
    return {part: case[part] for part in SUFFIXES}


def test_expanded_like_gptqmodel_bit_for_bit(cases):
    """2, 4 and 8 bits, act-order or not, symmetric or not, both checkpoint formats, words of any bits."""
    for name, case in cases.items():
        packed = Packed(codec_of(name), parts_of(case))
        assert packed.shape == (24, 64) and packed.nbytes == packed.codec.nbytes(24, 64)
        assert torch.equal(packed.dequantize(), case["weight"].mT), name
    ordered = [bool((case["g_idx"].diff() < 0).any()) for case in cases.values()]
    assert len(cases) == 9 and 0 < sum(ordered) < 9


def test_a_stack_is_read_like_its_matrices_each_with_an_order_of_its_own(cases):
    names = ("bits_4 group_32 act_order gptq", "bits_4 group_32 any_bits gptq")
    two = [parts_of(cases[name]) for name in names]
    assert not torch.equal(two[0]["g_idx"], two[1]["g_idx"])
    stack = {part: torch.stack([parts[part] for parts in two]) for part in SUFFIXES}
    codec, packed = stacked(Gptq(4, 32), 48, 64), Packed(Gptq(4, 32), stack)
    assert packed.shape == (2, 24, 64) and isinstance(codec, Halves)
    for expert, parts in enumerate(two):
        assert torch.equal(packed.dequantize()[expert], Gptq(4, 32).dequantize(parts))
    halves = {f"gate_{part}": tensor for part, tensor in stack.items()}
    halves |= {f"up_{part}": tensor.flip(0) for part, tensor in stack.items()}
    oracle = torch.cat((packed.dequantize(), packed.dequantize().flip(0)), dim=1)
    assert torch.equal(Packed(codec, halves).dequantize(), oracle)


def test_some_rows_are_those_of_the_whole(cases):
    for name, case in cases.items():
        codec = codec_of(name)
        assert isinstance(codec, ByRows) and 24 % codec.rows_at in (0, 8)
        for first, last in ((0, codec.rows_at), (codec.rows_at, 24)):
            found = codec.dequantize(codec.rows(case, first, last))
            assert torch.equal(found, case["weight"].mT[first:last]), name


def test_control_arm_the_other_checkpoint_format_and_another_order_are_not_equal(cases):
    for name, case in cases.items():
        right = codec_of(name)
        wrong = Gptq(right.bits, right.group_size, not right.minus_one)
        assert not torch.equal(wrong.dequantize(parts_of(case)), case["weight"].mT), name
        if "act_order" in name:
            unordered = parts_of(case) | {"g_idx": case["g_idx"].sort().values}
            assert not torch.equal(right.dequantize(unordered), case["weight"].mT), name


def test_widths_that_fill_no_word_or_group_are_rounded_up():
    """in = 40 in groups of 32 and 5 words; out = 20 in 2.5 words of zero points. The oracle is the formula."""
    generator = torch.Generator().manual_seed(0)
    codec = Gptq(4, 32, minus_one=False)
    dtypes = {"I32": torch.int32, "F16": torch.float16}
    parts = {
        name: (torch.randint(-(2**31), 2**31, shape, generator=generator) % 2**27).to(dtypes[dtype])
        for name, (dtype, shape) in codec.parts(20, 40).items()
    }
    parts["scales"] = torch.randn(2, 20, generator=generator).half()
    parts["g_idx"] = torch.arange(40, dtype=torch.int32) // 32
    found = codec.dequantize(parts)
    assert found.shape == (20, 40)
    for i, o in ((0, 0), (39, 19), (33, 7), (8, 16)):
        code = int(parts["qweight"][i // 8, o]) >> 4 * (i % 8) & 15
        zero = int(parts["qzeros"][i // 32, o // 8]) >> 4 * (o % 8) & 15
        assert found[o, i] == ((code - zero) * parts["scales"][i // 32, o].float()).half()


def test_without_a_g_idx_groups_follow_one_another(cases):
    """Equal to gptqmodel's where its g_idx says the same; rows, stacks and the width come from the words."""
    equal = 0
    for name, case in cases.items():
        indexed = codec_of(name)
        codec = replace(indexed, indexed=False)
        parts = {part: case[part] for part in codec.suffixes}
        assert "g_idx" not in parts and Packed(codec, parts).shape == (24, 64)
        found = codec.dequantize(parts)
        in_order = not bool((case["g_idx"].diff() < 0).any())
        assert torch.equal(found, case["weight"].mT) == in_order, name  # act-order is the control arm
        equal += in_order
        assert torch.equal(codec.dequantize(codec.rows(parts, codec.rows_at, 24)), found[codec.rows_at :])
        assert codec.nbytes(24, 64) == indexed.nbytes(24, 64) - 4 * 64
    assert equal == 3
    with pytest.raises(ConfigError, match="not fill whole words"):
        Gptq(4, 32, indexed=False).parts(20, 36)


def test_the_files_say_whether_there_is_a_g_idx():
    names = {"a.qweight": "I32", "a.scales": "F16"}
    assert not Gptq().as_stored(names).indexed and Gptq(act_order=True).as_stored(names).indexed
    assert Gptq(indexed=False).as_stored(names | {"a.g_idx": "I32"}).indexed


def test_parts_that_do_not_belong_together_are_refused(cases):
    case = parts_of(cases["bits_4 group_32 act_order gptq"])
    for part in ("qweight", "qzeros", "scales"):
        with pytest.raises(CheckpointError, match="4 bits in groups of 32 need"):
            Gptq(4, 32).dequantize(case | {part: case[part][:-1]})
    for codec in (Gptq(8, 32), Gptq(4, 16)):
        with pytest.raises(CheckpointError, match="bits in groups of"):
            codec.dequantize(case)
    for wrong in (-1, 2):
        damaged = case["g_idx"].clone()
        damaged[3] = wrong
        with pytest.raises(CheckpointError, match="there are 2"):
            Gptq(4, 32).dequantize(case | {"g_idx": damaged})
    Gptq(4, 32).dequantize(case)  # control arm


def test_scales_keep_the_dtype_of_the_files():
    assert Gptq().as_stored({"a.qweight": "I32", "a.scales": "F32"}).scale_dtype == "F32"
    with pytest.raises(CheckpointError, match="2 dtypes"):
        Gptq().as_stored({"a.qweight": "I32", "a.scales": "BF16", "b.qweight": "I32", "b.scales": "F16"})
    assert Gptq().nbytes(4096, 4096) == 4096 * 4096 // 2 + 32 * 4096 // 2 + 2 * 32 * 4096 + 4 * 4096


def test_a_config_is_read():
    wide = TABLE | {"bits": 8, "group_size": -1, "checkpoint_format": "gptq_v2"}
    # "lm_head": {} as in the releases of Qwen
    left_out = TABLE | {"dynamic": {"-:.*down.*": {}, "lm_head": {}, "+:.*up.*": {"bits": 4}}}
    for table, codec in ((TABLE, Gptq()), (wide, Gptq(8, -1, False)), (left_out, Gptq())):
        assert recognise({"quantization_config": table}).codecs == (codec,)
        assert not_followed({"quantization_config": table}) == ""
    bare = {"quant_method": "gptq", "bits": 4}
    assert recognise({"quantization_config": bare}).codecs == (Gptq(),)
    assert "smooth" in not_followed({"quantization_config": TABLE | {"smooth": 1}})


def test_a_config_alone_says_which_modules_are_quantized():
    """As Optimum and gptqmodel write it; the files decide where there are any."""

    def packed(**changes):
        scheme = recognise({"quantization_config": TABLE | changes})
        return {name for name in NAMES if scheme.codec_for(f"model.layers.3.{name}") is not None}

    assert packed() == set(NAMES)
    assert packed(modules_in_block_to_quantize=[["self_attn.q_proj"], ["mlp.up_proj"]]) == {
        "self_attn.q_proj",
        "mlp.up_proj",
    }
    assert packed(dynamic={r"-:.*\.self_attn\..*": {}}) == {"mlp.up_proj", "mlp.down_proj"}
    assert packed(dynamic={r"-:model\.layers\.4\..*": {}}) == set(NAMES)
    with pytest.raises(ConfigError, match=r"dynamic: .* could take forever"):
        packed(dynamic={"-:(a+)+": {}})


NAMES = ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"bits": 3}, "GPTQ with 3 bits"),
        ({"bits": None}, "GPTQ with None bits"),
        ({"checkpoint_format": "marlin"}, 'GPTQ checkpoint_format "marlin"'),
        ({"is_marlin_format": True}, "codes in another order"),
        ({"pack_dtype": "int16"}, "pack_dtype int16"),
        ({"group_size": "128"}, "group_size '128'"),
        ({"dynamic": {"+:.*down.*": {"bits": 8}}}, "modules with bits or groups of their own"),
        ({"rotation": "hadamard"}, "rotation hadamard"),
    ],
)
def test_what_would_be_read_wrongly_is_refused_by_name(change, named):
    with pytest.raises(ConfigError) as error:
        recognise({"quantization_config": TABLE | change})
    assert named in error.value.message
