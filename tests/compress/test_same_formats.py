"""--to same into formats that others' libraries write: W + ΔW within half a step, and logits of the bf16 merge."""

from __future__ import annotations

import importlib.util
import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from unfreeze.checkpoint import open_checkpoint
from unfreeze.core.errors import ConfigError
from unfreeze.data import Example, pack
from unfreeze.generate.open import open_model
from unfreeze.quant.grids import Gridded

AT = Path(__file__).parents[1] / "models" / "packers.py"
SPEC = importlib.util.spec_from_file_location("packers", AT)
packers = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(packers)

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": False}
FORMATS = {
    "awq": ("llama", AWQ, partial(packers.awq, group=32)),
    "gptq act-order": (
        "moe",
        GPTQ | {"checkpoint_format": "gptq"},
        partial(packers.gptq, bits=4, group=32, act_order=True, minus_one=True),
    ),
}
BITS4 = {"quant_method": "bitsandbytes", "load_in_4bit": True}
NF4 = BITS4 | {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
BITSANDBYTES = {
    "nf4 double": (
        "moe",
        NF4,
        partial(packers.bits4, kind="nf4", block=64, dtype=torch.bfloat16, double=True),
    ),
    "fp4": ("llama", BITS4, partial(packers.bits4, kind="fp4", block=64, dtype=torch.bfloat16, double=False)),
    "int8": ("llama", {"quant_method": "bitsandbytes", "load_in_8bit": True}, packers.int8),
}
IDS = [5, 6, 7, 8, 9, 10, 30, 41, 77]


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: part for file in folder.glob("*.safetensors") for name, part in load_file(file).items()}


def logits(folder: Path) -> torch.Tensor:
    model = open_model(open_checkpoint(folder))
    with torch.no_grad():
        return model.logits(model.hidden(pack([Example(IDS, [0.0] + [1.0] * (len(IDS) - 1))])))


@pytest.fixture(params=[*FORMATS, *BITSANDBYTES])
def packed_base(request, bases, merging, tmp_path):
    """-> (name, folder of the packed base, its codec, an adapter)."""
    name, table, packer = (FORMATS | BITSANDBYTES)[request.param]
    packed = {}
    for key, tensor in tensors_of(bases[name]).items():
        parts = packer(tensor.float())[0] if key.endswith("_proj.weight") else {"weight": tensor}
        packed |= {key.removesuffix("weight") + part: value for part, value in parts.items()}
    config = json.loads((bases[name] / "config.json").read_text())
    base = merging.sharded(tmp_path / "base", packed, config | {"quantization_config": table})
    codec = open_checkpoint(base).scheme().codecs[0]
    # rank 4 of some 2 % of the weight: several steps of 4 bits
    return request.param, base, codec, merging.adapter_for(base, tmp_path / "adapter", size=0.1)


@pytest.mark.parametrize("packed_base", FORMATS, indirect=True)
@pytest.mark.parametrize("scales", ["refit", "keep"])
def test_a_base_is_merged_into_the_format_it_came_in(packed_base, scales, merging, tmp_path):
    _, base, codec, adapter = packed_base
    assert isinstance(codec, Gridded)
    record = merging.run(base, adapter, tmp_path / "out", "same", scales)
    merging.run(base, adapter, tmp_path / "bf16", "bf16")
    before, made, dense = (tensors_of(folder) for folder in (base, tmp_path / "out", tmp_path / "bf16"))
    facts = [{name: (t.dtype, t.shape) for name, t in tensors.items()} for tensors in (before, made)]
    assert facts[0] == facts[1]
    assert (base / "config.json").read_bytes() == (tmp_path / "out/config.json").read_bytes()
    modules = {name.removesuffix(".qweight") for name in made if name.endswith("qweight")}
    assert len(record.rows) == len(modules) > 10
    changed = 0
    for module in modules:
        parts, old = ({s: t[f"{module}.{s}"] for s in codec.suffixes} for t in (made, before))
        grid, wanted = codec.grid(parts), dense[f"{module}.weight"].float()
        step = grid.scales_OG.float().index_select(1, grid.groups_I)
        # half a step; float16's rounding of scale and weight; bf16's of the other merge
        allowed = (0.5 + 15 * 2**-10) * step + wanted.abs() * 2**-8 + 1e-6
        assert ((codec.dequantize(parts).float() - wanted).abs() <= allowed).all(), module
        # control arm: the base is not the merge
        changed += bool(((codec.dequantize(old).float() - wanted).abs() > allowed).any())
        assert torch.equal(parts.get("g_idx", step), old.get("g_idx", step))
    assert changed == len(modules)
    rows = [row.ways[scales] for row in record.rows]
    assert {row.written for row in record.rows} == {scales}
    assert all(set(row.ways) == {"refit", "keep", "BF16"} for row in record.rows)
    assert sum(row.kept for row in rows) / len(rows) > 0.9
    # the logits move towards the bf16 merge's: rounding is what remains
    found, exact, without = (logits(folder) for folder in (tmp_path / "out", tmp_path / "bf16", base))
    assert (found - exact).norm() < 0.3 * (without - exact).norm()


@pytest.mark.parametrize("packed_base", BITSANDBYTES, indirect=True)
def test_a_bitsandbytes_base_is_merged_with_its_texts_and_maps(packed_base, merging, tmp_path):
    """Texts, maps and the offset stay, byte for byte; codes and absmax are new."""
    name, base, _, adapter = packed_base
    record = merging.run(base, adapter, tmp_path / "out")
    merging.run(base, adapter, tmp_path / "bf16", "bf16")
    before, made = tensors_of(base), tensors_of(tmp_path / "out")
    facts = [{part: (t.dtype, t.shape) for part, t in tensors.items()} for tensors in (before, made)]
    assert facts[0] == facts[1]
    still = [part for part in made if part.endswith(("quant_map", "weight_format")) or "quant_state" in part]
    assert still and all(torch.equal(made[part], before[part]) for part in still)
    packed = [part for part in made if part.endswith(("SCB", "weight.absmax"))]
    assert packed and not any(torch.equal(made[part], before[part]) for part in packed)
    assert len(record.rows) == len(packed)
    rows = [row.ways["refit"] for row in record.rows]
    assert all(("keep" in row.ways) == (name == "int8") for row in record.rows)
    assert sum(row.kept for row in rows) / len(rows) > 0.9
    found, exact, without = (logits(folder) for folder in (tmp_path / "out", tmp_path / "bf16", base))
    assert (found - exact).norm() < (0.05 if name == "int8" else 0.3) * (without - exact).norm()
    if name != "int8":
        with pytest.raises(ConfigError, match="scales = keep is not built for bitsandbytes"):
            merging.run(base, adapter, tmp_path / "kept", "same", "keep")
