"""Steps of packed models: the logits of the packed pass over the same tokens with the same codes.

Both read the codes by themselves. That the packed pass reads them as other libraries do is tests/models.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import is_dataclass

import pytest
import torch
from exact import (
    HERE,
    SEEN,
    apart,
    checked,
    each_cpu_maker,
    each_maker,
    family,
    packed,
    rows_of,
    uncached,
    walked,
)
from family_cases import CASES

from unfreeze import quant
from unfreeze.generate.engine import batch_of
from unfreeze.generate.recorded import Recorded
from unfreeze.models.blocks.linear import Linear
from unfreeze.quant import Fp8, Int4, mxfp4, nvfp4
from unfreeze.quant.awq import Awq
from unfreeze.quant.bitsandbytes import Bits4, Bits8
from unfreeze.quant.codec import Packed
from unfreeze.quant.fp8_scaled import COLUMN, MATRIX, Fp8Scaled
from unfreeze.quant.gptq import Gptq
from unfreeze.quant.halves import Halves
from unfreeze.quant.integers import ROW, Integers
from unfreeze.quant.mxfp4 import Mxfp4
from unfreeze.quant.mxfp8 import Mxfp8
from unfreeze.quant.nvfp4 import Nvfp4

FORMATS = {
    "INT4": {"codec": Int4(32)},
    "INT4 with zero points": {"codec": Integers(4, 32, zeros=True)},
    "INT4 act-order": {"codec": Integers(4, 32, zeros=True, permuted=True)},
    "INT8": {"codec": Integers(8, 32)},
    "INT8 by rows": {"codec": Integers(8, ROW, packed=False)},
    "FP8 blocks of 128": {"codec": Fp8()},
    "FP8 blocks of 32": {"codec": Fp8((32, 32), "BF16")},
    "FP8 by rows": {"codec": Fp8Scaled(COLUMN)},
    "FP8 by matrix": {"codec": Fp8Scaled(MATRIX)},
    "MXFP4": {"codec": Mxfp4()},
    "MXFP4 as gpt-oss": {"codec": Mxfp4(mxfp4.BLOCKS)},
    "MXFP8": {"codec": Mxfp8()},
    "NVFP4": {"codec": Nvfp4()},
    "NVFP4 of modelopt": {"codec": Nvfp4(nvfp4.MODELOPT)},
    "AWQ": {"codec": Awq(32)},
    "GPTQ act-order": {"codec": Gptq(4, 32)},
    "GPTQ 8 bits": {"codec": Gptq(8, 32, minus_one=False)},
    "NF4": {"codec": Bits4()},
    "FP4": {"codec": Bits4("fp4", double=False, block=128, dtype="F16")},
    "LLM.int8": {"codec": Bits8()},
    "bf16 in float32": {"codec": None, "held": torch.bfloat16},
    "float16 in float32": {"codec": None, "held": torch.float16},
}
TWO = ("llama-3-rope-biases", "deepseek-v3-groups-yarn")
"""Linear layers with biases and grouped queries; latent attention, a dense layer, experts and a shared one."""
FIT = {
    "moe_intermediate_size": {24: 32, 48: 96},  # 64 would be square
    "intermediate_size": {48: 64},
    "intermediate_size_mlp": {80: 96},
    "shared_expert_intermediate_size": {80: 96},
    "q_lora_rank": {40: 64},
    "v_head_dim": {12: 16},
}
"""Sizes of the cases of tests/models -> the next of whole groups."""
each_format = pytest.mark.parametrize("format", FORMATS)


def fitted(name: str) -> dict[str, int]:
    """The sizes of a case that no whole groups fill, rounded up; 96 rows of the head, not 97."""
    fields = CASES[name].fields
    fields = fields.get("text_config", fields)
    return {"vocab_size": 96} | {
        key: sizes[fields[key]] for key, sizes in FIT.items() if fields.get(key) in sizes
    }


def codecs():
    """The classes of unfreeze.quant that read a format."""
    files = pkgutil.iter_modules(quant.__path__, "unfreeze.quant.")
    things = [thing for file in files for thing in vars(importlib.import_module(file.name)).values()]
    readers = {thing for thing in things if is_dataclass(thing) and hasattr(thing, "dequantize")}
    return readers - {Packed, Halves}  # a weight; two matrices of another codec


def test_every_format_is_here():
    assert codecs() == {type(how["codec"]) for how in FORMATS.values() if how["codec"]}


@each_maker
@pytest.mark.parametrize("name", TWO)
@each_format
def test_steps_are_the_packed_pass_with_the_same_codes(format, name, steps):
    """Over 256 tokens, of which the last 32 are steps; nightly all of them are."""
    _, model = family(name, **fitted(name), num_hidden_layers=2)
    checked(packed(model, **FORMATS[format]), steps, rows_of((224, 32), (100, 24), (7, 16), greedy=1))


@pytest.mark.parametrize("name", TWO)
@each_format
def test_a_step_is_one_program(format, name):
    """No part of it is called in between, as it runs in training: products read every format in place."""
    _, model = family(name, **fitted(name), num_hidden_layers=2)
    twin = packed(model, **FORMATS[format])
    cache = twin.new_cache(1, 8)
    twin.prefill(batch_of([[3, 5, 7]]), cache)
    steps = Recorded(twin, cache)
    steps([9])
    assert not steps.program._calls


@pytest.mark.nightly
@each_cpu_maker
@pytest.mark.parametrize("name", TWO)
@each_format
def test_256_steps_are_the_packed_pass_with_the_same_codes(format, name, steps):
    _, model = family(name, **fitted(name), num_hidden_layers=2)
    checked(packed(model, **FORMATS[format]), steps, rows_of((1, 256), (4, 192), (7, 128), greedy=1))


@pytest.mark.nightly
@each_cpu_maker
@pytest.mark.parametrize("name", HERE)
@each_format
def test_every_family_in_every_format(format, name, steps):
    _, model = family(name, **fitted(name))
    checked(packed(model, **FORMATS[format]), steps, rows_of((224, 32), (100, 24), (7, 16), greedy=1))


@each_maker
def test_gpt_oss_whose_rows_of_gate_and_up_are_in_turn(steps):
    """In MXFP4 as it is published, with biases; here attention too."""
    _, model = family("gpt-oss")
    twin = packed(model, Mxfp4(mxfp4.BLOCKS))
    assert twin.moe_layers()[0].experts.activation.interleaved
    checked(twin, steps, rows_of((20, 32), (7, 16), greedy=1))


@each_maker
@pytest.mark.parametrize("name", TWO)
def test_control_a_code_read_wrongly_is_seen(name, steps):
    """One code of one weight of the last layer, in the steps alone."""
    _, model = family(name, **fitted(name), num_hidden_layers=2)
    twin, planted = packed(model, Int4(32)), packed(model, Int4(32))
    down = planted.layers[-1].mlp
    down = getattr(down, "shared_experts", down).down_proj
    assert isinstance(down, Linear) and down.codec is not None
    down.weight_packed[3, 2] ^= 8
    walks = walked(planted, steps, rows_of((7, 32)))
    assert apart(walks, uncached(twin, walks)) > SEEN
