"""Claims about bitsandbytes' formats, against what 0.50.2 packed and expanded (tests/quant/vectors), and against
the library itself where it is installed."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unfreeze.core.errors import CheckpointError, ConfigError
from unfreeze.quant import Packed, not_followed, recognise
from unfreeze.quant.bitsandbytes import Bits4, Bits8
from unfreeze.quant.codec import texted
from unfreeze.quant.halves import Halves, stacked
from unfreeze.quant.spelling import canonical

NF4 = {
    "quant_method": "bitsandbytes",
    "_load_in_4bit": True,
    "_load_in_8bit": False,
    "load_in_4bit": True,
    "load_in_8bit": False,
    "bnb_4bit_compute_dtype": "bfloat16",
    "bnb_4bit_quant_storage": "uint8",
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "llm_int8_enable_fp32_cpu_offload": False,
    "llm_int8_has_fp16_weight": False,
    "llm_int8_skip_modules": None,
    "llm_int8_threshold": 6.0,
}
STATE = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [24, 64]}
DOUBLE = {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.05}


@pytest.fixture
def cases(recorded):
    return recorded("bitsandbytes", "0.50.2")


def loaded(name: str, case: dict[str, torch.Tensor]) -> Packed:
    """A weight of 4 bits as it is held, from the tensors of its file."""
    parts = {canonical(f"m.{part}").removeprefix("m."): tensor for part, tensor in case.items()}
    shape, codec = parts.pop("expanded").shape, Bits4(name.split()[0], "double" in name)
    raw = bytes(parts[codec.text].tolist())
    codec = codec.with_text(raw, "x")
    parts[codec.text] = torch.tensor(codec.parse(raw, "x", *shape))
    parts["weight"] = parts["weight"].view(shape[0], -1)
    assert {part: tuple(tensor.shape) for part, tensor in parts.items()} == {
        part: shape for part, (_, shape) in codec.parts(*shape).items()
    }
    return Packed(codec, parts)


def test_expanded_like_bitsandbytes_bit_for_bit(cases):
    """NF4 and FP4, absmax in float32 and quantized, three dtypes, two block sizes, a last block that is not
    whole, and rows that are not whole blocks."""
    int8 = cases.pop("int8")
    for name, case in cases.items():
        packed = loaded(name, case)
        assert packed.shape == case["expanded"].shape and packed.nbytes == packed.codec.nbytes(*packed.shape)
        found = packed.dequantize()
        assert found.dtype == case["expanded"].dtype and torch.equal(found, case["expanded"]), name
    assert len(cases) == 6 and any(case["expanded"].numel() % 64 for case in cases.values())
    packed = Packed(Bits8(), {part: int8[part] for part in ("weight", "SCB")})
    assert packed.shape == (24, 32) and packed.nbytes == Bits8().nbytes(24, 32)
    assert packed.dequantize().dtype == torch.float32 and torch.equal(packed.dequantize(), int8["expanded"])


def test_control_arm_the_halves_of_a_byte_the_other_way_round_are_not_equal(cases):
    for name, case in cases.items():
        if name != "int8":
            swapped = case | {"weight": (case["weight"] << 4) | (case["weight"] >> 4)}
            assert not torch.equal(loaded(name, swapped).dequantize(), case["expanded"])


def test_a_stack_is_read_like_its_matrices_and_gate_and_up_keep_blocks_of_their_own(cases):
    for name, case in cases.items():
        if name == "int8":
            assert stacked(Bits8(), 48, 32) == Bits8()
            continue
        one = loaded(name, case)
        two = {part: torch.stack((tensor, tensor.flip(0))) for part, tensor in one.parts.items()}
        stack = Packed(one.codec, two)
        assert stack.shape == (2, *one.shape) and torch.equal(stack.dequantize()[0], case["expanded"])
        assert torch.equal(stack[1].dequantize(), stack.dequantize()[1])
        codec = stacked(one.codec, 2 * one.shape[0], one.shape[1])
        assert isinstance(codec, Halves) and texted(one.codec)
        halves = {f"{half}_{part}": tensor for half in ("gate", "up") for part, tensor in one.parts.items()}
        assert torch.equal(
            Packed(codec, halves).dequantize(), torch.cat((case["expanded"], case["expanded"]))
        )


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("double", [True, False])
def test_the_library_itself_expands_a_large_matrix_the_same(kind, double):
    """Where bitsandbytes is installed; else the recorded ones above stand for it."""
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(256, 320, generator=torch.Generator().manual_seed(0)).bfloat16()
    codes, state = functional.quantize_4bit(weight, blocksize=64, compress_statistics=double, quant_type=kind)
    case = {f"weight.{part}": tensor for part, tensor in state.as_dict(packed=True).items()}
    oracle = functional.dequantize_4bit(codes, state)
    name = f"{kind} {'double' * double}"
    assert torch.equal(loaded(name, case | {"weight": codes, "expanded": oracle}).dequantize(), oracle)


def test_parts_that_do_not_belong_together_are_refused(cases):
    packed = loaded("nf4 double", cases["nf4 double bfloat16 block_64"])
    for part in packed.parts:
        wrong = {**packed.parts, part: packed.parts[part][:-1]}
        with pytest.raises(CheckpointError, match="blocks of 64 need"):
            Packed(packed.codec, wrong).dequantize()
    with pytest.raises(ConfigError, match="33 input columns, an odd number"):
        Bits4().parts(2, 33)
    with pytest.raises(CheckpointError, match=r"SCB \[2\]"):
        Bits8().dequantize({"weight": torch.zeros(3, 4, dtype=torch.int8), "SCB": torch.zeros(2)})
    packed.dequantize()  # control arm


def test_a_text_is_read():
    codec = Bits4("nf4", double=False)
    assert codec.with_text(json.dumps(STATE).encode(), "x") == codec
    assert codec.parse(json.dumps(STATE).encode(), "x", 24, 64) == [0.0]
    other = json.dumps(STATE | {"blocksize": 128, "dtype": "float16"}).encode()
    assert codec.with_text(other, "x") == Bits4("nf4", double=False, block=128, dtype="F16")
    nested = json.dumps(STATE | DOUBLE).encode()
    assert Bits4().parse(nested, "x", 24, 64) == [0.05] and Bits4().with_text(nested, "x") == Bits4()


@pytest.mark.parametrize(
    "change",
    [
        {"quant_type": "fp4"},
        {"shape": [64, 24]},
        {"shape": None},
        {"blocksize": 128},
        {"dtype": "float16"},
        {"nested_blocksize": 128},
        {"nested_offset": "0.05"},
        {"nested_offset": float("nan")},
        {"blocksize": 63},
        {"blocksize": "64"},
        {"blocksize": 64.0},
        {"dtype": "int8"},
    ],
)
def test_a_text_of_another_weight_or_format_is_refused(change):
    with pytest.raises(CheckpointError, match="q_proj says"):
        Bits4().parse(json.dumps(STATE | DOUBLE | change).encode(), "q_proj", 24, 64)


def test_a_text_that_is_none_is_refused():
    for raw in (b"", b"[]", b"\xff", b'{"blocksize": 64, "blocksize": 32}', b"[" * 4000):
        with pytest.raises(CheckpointError, match="q_proj"):
            Bits4().with_text(raw, "q_proj")
    with pytest.raises(
        CheckpointError, match="q_proj"
    ):  # without double quantization, beside a codec with it
        Bits4().parse(json.dumps(STATE).encode(), "q_proj", 24, 64)


def test_memory_is_half_a_byte_and_what_the_blocks_take():
    n, maps = 4096 * 4096, 4 * 16 + 4
    assert Bits4(double=False).nbytes(4096, 4096) == n // 2 + 4 * n // 64 + maps
    double = n // 64 + 4 * n // 64 // 256 + 4 * 256
    assert Bits4().nbytes(4096, 4096) == n // 2 + double + maps
    assert Bits8().nbytes(4096, 4096) == n + 4 * 4096


def test_a_config_is_read_with_what_stays_unquantized():
    for table, codec in (
        (NF4, Bits4()),
        (NF4 | {"bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": False}, Bits4("fp4", False)),
        (NF4 | {"load_in_4bit": False, "_load_in_4bit": False, "load_in_8bit": True}, Bits8()),
    ):
        assert recognise({"quantization_config": table}).codecs == (codec,)
        assert not_followed({"quantization_config": table}) == ""
        unnamed = {name: value for name, value in table.items() if name != "quant_method"}  # until 2023
        assert recognise({"quantization_config": unnamed}).codecs == (codec,)
        assert not_followed({"quantization_config": unnamed}) == ""
    scheme = recognise({"quantization_config": NF4 | {"llm_int8_skip_modules": ["multi_modal", "gate"]}})
    assert scheme.codec_for("model.layers.0.mlp.gate") is None is scheme.codec_for("lm_head")
    assert scheme.codec_for("model.layers.0.mlp.gate_proj") == Bits4()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage bfloat16"),
        ({"bnb_4bit_quant_type": "int4"}, 'bnb_4bit_quant_type "int4"'),
        ({"load_in_8bit": True}, "load_in_4bit True and load_in_8bit True"),
        ({"load_in_4bit": False, "_load_in_4bit": False}, "load_in_4bit False"),
    ],
)
def test_what_would_be_read_wrongly_is_refused_by_name(change, named):
    with pytest.raises(ConfigError) as error:
        recognise({"quantization_config": NF4 | change})
    assert named in error.value.message


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(
    st.one_of(
        st.binary(max_size=60),
        st.dictionaries(
            st.sampled_from([*STATE, *DOUBLE]),
            st.one_of(
                st.none(),
                st.integers(),
                st.floats(),
                st.text(max_size=5),
                st.lists(st.integers()),
                st.sampled_from([*(STATE | DOUBLE).values()]),
            ),
        ).map(lambda change: json.dumps(STATE | DOUBLE | change).encode()),
    )
)
def test_any_text_is_read_or_refused(raw):
    try:
        assert len(Bits4().parse(raw, "q_proj", 24, 64)) == 1
    except CheckpointError as error:
        assert "q_proj" in error.message
