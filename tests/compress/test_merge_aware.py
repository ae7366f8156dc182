"""What merge-aware training computes with is what the merge writes: bit for bit, in every format."""

from __future__ import annotations

import importlib.util
import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from unfreeze.adapters import load_adapter, sites
from unfreeze.adapters.merge_aware import RoundedExperts, RoundedLowRank, begin, matrix
from unfreeze.checkpoint import open_checkpoint
from unfreeze.config.lora import LoraConfig
from unfreeze.generate.engine import Engine
from unfreeze.generate.open import open_model
from unfreeze.generate.sampling import Sampling
from unfreeze.generate.steps import launched
from unfreeze.job.merge_aware import adapted_of, roundings_of
from unfreeze.models.blocks.experts import Experts
from unfreeze.models.blocks.linear import Linear
from unfreeze.quant.mxfp4 import Mxfp4
from unfreeze.quant.nvfp4 import Nvfp4

AT = Path(__file__).parents[1] / "models" / "packers.py"
SPEC = importlib.util.spec_from_file_location("packers", AT)
packers = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(packers)

CASES = [
    ("int4", "int4", "refit"),
    ("int4", "same", "keep"),
    ("int4", "int4", "keep-change"),
    ("fp8", "fp8", "refit"),
    ("fp8", "same", "keep"),
    ("fp8", "same", "keep-change"),
    ("moe", "int4", "refit"),
    ("llama", "int4", "refit"),
]


NF4 = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
}
NF4_PACKER = partial(packers.bits4, kind="nf4", block=64, dtype=torch.bfloat16, double=True)


def group(name: str, **weights) -> dict:
    weights |= {"num_bits": 4, "type": "float", "symmetric": True}
    own = {"targets": ["Linear"], "weights": weights, "format": name}
    return {"quant_method": "compressed-tensors", "format": name, "config_groups": {"group_0": own}}


PACKED = {
    "nvfp4": (
        group("nvfp4-pack-quantized", strategy="tensor_group", group_size=16),
        lambda weight: Nvfp4().quantize(weight),
    ),
    "mxfp4": (group("mxfp4-pack-quantized", strategy="group", group_size=32), lambda w: Mxfp4().quantize(w)),
    "nf4": (NF4, lambda weight: NF4_PACKER(weight)[0]),
}


def packed(name: str, base: Path, merging, folder: Path) -> Path:
    """A mixture with all its linear layers in that format."""
    table, packer = PACKED[name]
    tensors = {}
    for key, tensor in {
        k: t for file in base.glob("*.safetensors") for k, t in load_file(file).items()
    }.items():
        parts = packer(tensor.float()) if key.endswith("_proj.weight") else {"weight": tensor}
        tensors |= {key.removesuffix("weight") + part: value for part, value in parts.items()}
    config = json.loads((base / "config.json").read_text())
    return merging.sharded(folder, tensors, config | {"quantization_config": table})


def aware(base, adapter, merge_aware, scales):
    """A model with an adapter, at the step at which its rounding begins."""
    manifest = open_checkpoint(base)
    model = open_model(manifest)
    load_adapter(model, adapter)
    lora = LoraConfig(merge_aware=merge_aware, merge_aware_scales=scales)
    begin(model, roundings_of(lora, manifest, model, adapted_of(model)))
    return model


def weights(model) -> dict[str, torch.Tensor]:
    """site and projection -> the matrices of the forward pass that are rounded, in float32."""
    used = {}
    for site in sites(model):
        if isinstance(site.adapter, RoundedLowRank):
            assert site.owner.dtype == torch.float32
            used[site.name] = site.adapter.matrix(site.owner).detach()
        elif isinstance(site.adapter, RoundedExperts):
            for name, stack in zip(
                (site.owner.first, "down_proj"), site.adapter.merged(site.owner), strict=True
            ):
                used[f"{site.name}.{name}"] = torch.empty(stack.shape)
                stack.fill(range(stack.shape[0]), used[f"{site.name}.{name}"])
    return used


def stored(folder, names) -> dict[str, torch.Tensor]:
    """The same matrices of a checkpoint, dequantized."""
    model = open_model(open_checkpoint(folder))

    def matrix_of(name):
        module = model.get_submodule(name)
        if isinstance(module, Linear):
            return module.matrix().detach().float()
        value = module.value()
        return (value if isinstance(value, torch.Tensor) else value.dequantize()).detach().float()

    assert not isinstance(model, Experts)
    return {name: matrix_of(name) for name in names}


def codes(model) -> dict[str, torch.Tensor]:
    """As `weights`, from the codes that generation reads."""
    kept = {}
    with model.looking():
        for site in sites(model):
            if isinstance(site.adapter, RoundedLowRank):
                kept[site.name] = site.adapter.kept(site.owner).dequantize().float()
            elif isinstance(site.adapter, RoundedExperts):
                gate_up, down, factors = site.adapter.kept(site.owner)
                kept[f"{site.name}.{site.owner.first}"] = gate_up.dequantize().float()
                kept[f"{site.name}.down_proj"] = down.dequantize().float()
                assert factors.gate_up_A is None and factors.down_B is None
    assert all(
        site.adapter.kept(site.owner) is None for site in sites(model) if hasattr(site.adapter, "kept")
    )
    return kept


def others(base, folder, out, merge_aware, scales, merging) -> tuple[int, list[str]]:
    """(number of rounded weights, those that the merged folder has otherwise)."""
    model = aware(base, folder, merge_aware, scales)
    used, kept = weights(model), codes(model)
    assert used.keys() == kept.keys() and all(torch.equal(used[name], kept[name]) for name in used)
    merging.run(base, folder, out, "int4" if merge_aware == "int4" else "same", scales)
    merged = stored(out, used)
    return len(used), [name for name in used if not torch.equal(used[name], merged[name])]


@pytest.mark.parametrize("base, merge_aware, scales", CASES)
def test_the_merged_folder_holds_the_weights_of_the_forward_pass_bit_for_bit(
    base, merge_aware, scales, bases, adapter, merging, tmp_path
):
    count, differ = others(bases[base], adapter(base)[0], tmp_path / "out", merge_aware, scales, merging)
    assert count and differ == []


@pytest.mark.parametrize(
    "name, scales", [("nvfp4", "refit"), ("nvfp4", "keep"), ("mxfp4", "keep-change"), ("nf4", "refit")]
)
def test_so_do_formats_whose_gate_and_up_are_rounded_apart(name, scales, bases, merging, tmp_path):
    base = packed(name, bases["moe"], merging, tmp_path / "base")
    folder = merging.adapter_for(base, tmp_path / "adapter", size=0.1)
    count, differ = others(base, folder, tmp_path / "out", name, scales, merging)
    assert count == 2 * (4 + 2) and differ == []


PLANTED = {
    "not rounded": lambda base, change, scales, out, *own: out.copy_(base.dequantize() + change),
    "the base's scales": lambda base, change, scales, out, *own: IN_PLACE(base, change, "keep", out, *own),
}
IN_PLACE = matrix._in_place


@pytest.mark.nightly  # 16 s, most of it compiling; tests/recipes/test_merge_aware.py samples too
def test_a_generation_is_that_of_the_merged_folder(bases, merging, tmp_path):
    """With adapters on the experts: all else is as in the base, also in bf16 files."""
    folder = merging.adapter_for(bases["int4"], tmp_path / "adapter", targets=("experts",), size=0.1)
    model = aware(bases["int4"], folder, "int4", "refit")
    merging.run(bases["int4"], folder, tmp_path / "out", "same")
    merged = open_model(open_checkpoint(tmp_path / "out"))
    prompts, sampling = [[5, 6, 7, 8], [80, 3, 90]], Sampling(max_new_tokens=12)
    with model.looking():
        ours = Engine(model).generate(prompts, sampling)
    slow = Engine(model, steps=launched).generate(prompts, sampling)
    theirs = Engine(merged).generate(prompts, sampling)
    for one, two, three in zip(ours, theirs, slow, strict=True):
        assert one.tokens == two.tokens == three.tokens
        assert one.logprobs == two.logprobs and one.logprobs == pytest.approx(three.logprobs, abs=1e-5)


@pytest.mark.parametrize("fault", PLANTED)
def test_control_arm_another_rounding_is_seen(fault, bases, adapter, merging, tmp_path, monkeypatch):
    monkeypatch.setattr(matrix, "_in_place", PLANTED[fault])
    used = weights(aware(bases["int4"], adapter("int4")[0], "int4", "refit"))
    merging.run(bases["int4"], adapter("int4")[0], tmp_path / "out", "same")
    merged = stored(tmp_path / "out", used)
    assert used and not any(torch.equal(used[name], merged[name]) for name in used)
