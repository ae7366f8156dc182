"""Claims about AWQ, against what autoawq 0.2.9 packed and expanded (tests/quant/vectors)."""

from __future__ import annotations

import pytest
import torch

from unfreeze.core.errors import CheckpointError, ConfigError
from unfreeze.quant import Packed, awq, not_followed, recognise
from unfreeze.quant.awq import Awq
from unfreeze.quant.codec import ByRows
from unfreeze.quant.grids import unpack
from unfreeze.quant.halves import Halves, stacked

TABLE = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 128,
    "zero_point": True,
    "version": "gemm",
    "modules_to_not_convert": None,
}


@pytest.fixture
def cases(recorded):
    return recorded("awq", "0.2.9")


def test_expanded_like_autoawq_bit_for_bit(cases):
    for name, case in cases.items():
        parts = {part: tensor for part, tensor in case.items() if part != "weight"}
        packed = Packed(Awq(64 // len(parts["scales"])), parts)
        assert packed.shape == (32, 64) and packed.nbytes == packed.codec.nbytes(32, 64)
        assert torch.equal(packed.dequantize(), case["weight"].mT), name
        assert packed.dequantize().dtype == torch.float16
        if len(parts["scales"]) == 1:
            assert torch.equal(Awq(-1).dequantize(parts), case["weight"].mT)
    assert len(cases) == 3


def test_a_stack_is_read_like_its_matrices(cases):
    """Two cases as two experts; and as gate and up, which cannot lie below each other: the input comes first."""
    two = [{part: cases[name][part] for part in awq.SUFFIXES} for name in ("group_32", "any_bits")]
    stack = {part: torch.stack([parts[part] for parts in two]) for part in awq.SUFFIXES}
    packed = Packed(Awq(32), stack)
    assert packed.shape == (2, 32, 64)
    assert torch.equal(packed.dequantize()[1], Awq(32).dequantize(two[1]))
    codec = stacked(Awq(32), 64, 64)
    assert isinstance(codec, Halves)
    halves = {f"{half}_{part}": tensor for half in ("gate", "up") for part, tensor in stack.items()}
    found = Packed(codec, halves).dequantize()
    assert found.shape == (2, 64, 64) and torch.equal(found[:, :32], found[:, 32:])
    assert torch.equal(found[:, :32], packed.dequantize())


def test_some_rows_are_those_of_the_whole(cases):
    assert isinstance(Awq(), ByRows)
    for case in cases.values():
        codec = Awq(64 // len(case["scales"]))
        for first, last in ((0, 8), (8, 32), (24, 32)):
            found = codec.dequantize(codec.rows(case, first, last))
            assert torch.equal(found, case["weight"].mT[first:last])


def test_control_arm_the_columns_of_a_word_in_order_are_not_autoawqs(cases, monkeypatch):
    monkeypatch.setattr(awq, "_columns", lambda words: unpack(words, 4))
    for case in cases.values():
        assert not torch.equal(Awq(64 // len(case["scales"])).dequantize(case), case["weight"].mT)


def test_parts_that_do_not_belong_together_are_refused(cases):
    case = cases["group_32"]
    for part in awq.SUFFIXES:
        with pytest.raises((CheckpointError, ConfigError), match="groups of 32"):
            Awq(32).dequantize(case | {part: case[part][:-1]})
    with pytest.raises(CheckpointError, match="groups of 16 need") as error:
        Awq(16).dequantize(case)
    assert "group_size" in error.value.next
    with pytest.raises(ConfigError, match="20 x 64 does not divide"):
        Awq(32).parts(20, 64)
    Awq(32).dequantize(case)  # control arm


def test_scales_keep_the_dtype_of_the_files():
    assert Awq().as_stored({"a.qweight": "I32", "a.scales": "BF16"}).scale_dtype == "BF16"
    with pytest.raises(CheckpointError, match="2 dtypes"):
        Awq().as_stored({"a.qweight": "I32", "a.scales": "BF16", "b.qweight": "I32", "b.scales": "F16"})
    assert Awq().nbytes(4096, 4096) == 4096 * 4096 // 2 + 32 * 4096 // 2 + 2 * 32 * 4096


def test_a_config_is_read_with_what_stays_unquantized():
    scheme = recognise({"quantization_config": TABLE | {"modules_to_not_convert": ["gate"]}})
    assert scheme is not None and scheme.codec_for("model.layers.0.mlp.up_proj") == Awq(128)
    assert scheme.codec_for("model.layers.0.mlp.gate") is None is scheme.codec_for("lm_head")
    older = {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "zero_point": True, "version": "GEMM"}
    symmetric = TABLE | {"zero_point": False, "provider": "auto-round"}  # the files have qzeros
    for table, size in ((older, 64), (TABLE | {"group_size": -1}, -1), (symmetric, 128)):
        assert recognise({"quantization_config": table}).codecs == (Awq(size),)
        assert not_followed({"quantization_config": table}) == ""
    assert "smooth" in not_followed({"quantization_config": TABLE | {"smooth": 1}})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"bits": 8}, "AWQ with 8 bits"),
        ({"version": "gemv"}, 'AWQ version "gemv"'),
        ({"version": None, "format": "llm-awq"}, 'AWQ version "llm-awq"'),
        ({"group_size": 0}, "group_size 0"),
        ({"group_size": True}, "group_size True"),
        ({"dynamic": {"+:.*": {"bits": 8}}}, "modules with bits or groups of their own"),
    ],
)
def test_what_would_be_read_wrongly_is_refused_by_name(change, named):
    with pytest.raises(ConfigError) as error:
        recognise({"quantization_config": TABLE | change})
    assert named in error.value.message
