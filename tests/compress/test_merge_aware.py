"""What merge-aware training computes with is what the merge writes: bit for bit, in every format."""

from __future__ import annotations

import pytest
import torch

from unfreeze.adapters import load_adapter, sites
from unfreeze.adapters.merge_aware import RoundedExperts, RoundedLowRank, begin, matrix
from unfreeze.checkpoint import open_checkpoint
from unfreeze.config.lora import LoraConfig
from unfreeze.generate.open import open_model
from unfreeze.job.merge_aware import adapted_of, roundings_of
from unfreeze.models.blocks.experts import Experts
from unfreeze.models.blocks.linear import Linear

CASES = [
    ("int4", "int4", "refit"),
    ("int4", "same", "keep"),
    ("fp8", "fp8", "refit"),
    ("fp8", "same", "keep"),
    ("moe", "int4", "refit"),
    ("llama", "int4", "refit"),
]


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
            base = site.owner.weight if site.owner.codec is None else site.owner.packed
            used[site.name] = site.adapter.merged(base, torch.float32).detach()
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


@pytest.mark.parametrize("base, merge_aware, scales", CASES)
def test_the_merged_folder_holds_the_weights_of_the_forward_pass_bit_for_bit(
    base, merge_aware, scales, bases, adapter, merging, tmp_path
):
    folder, _ = adapter(base)
    used = weights(aware(bases[base], folder, merge_aware, scales))
    to = "int4" if merge_aware == "int4" else "same"
    merging.run(bases[base], folder, tmp_path / "out", to, scales)
    merged = stored(tmp_path / "out", used)
    assert used and [name for name in used if not torch.equal(used[name], merged[name])] == []
