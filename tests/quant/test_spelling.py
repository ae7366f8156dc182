"""Claims about names: each spelling of a release is found under one name, and written as it was."""

from __future__ import annotations

import pytest

from unfreeze.quant.spelling import canonical, on_disk

EXPERTS, LINEAR = "model.layers.3.mlp.experts", "model.layers.3.self_attn.q_proj"
SPELLED = {
    f"{EXPERTS}.gate_up_proj_blocks": f"{EXPERTS}.gate_up_proj.blocks",
    f"{EXPERTS}.down_proj_scales": f"{EXPERTS}.down_proj.scales",
    f"{LINEAR}.weight.absmax": f"{LINEAR}.weight_absmax",
    f"{LINEAR}.weight.quant_map": f"{LINEAR}.weight_quant_map",
    f"{LINEAR}.weight.nested_absmax": f"{LINEAR}.weight_nested_absmax",
    f"{LINEAR}.weight.nested_quant_map": f"{LINEAR}.weight_nested_quant_map",
    f"{LINEAR}.weight.quant_state.bitsandbytes__nf4": f"{LINEAR}.weight_quant_state_nf4",
    f"{LINEAR}.weight.quant_state.bitsandbytes__fp4": f"{LINEAR}.weight_quant_state_fp4",
}
PLAIN = [
    f"{EXPERTS}.gate_up_proj_bias",
    f"{EXPERTS}.0.gate_proj.weight_scale",
    f"{EXPERTS}.0.gate_proj.scales",
    f"{LINEAR}.weight",
    f"{LINEAR}.weight_scale_inv",
    "model.layers.3.mlp.token_blocks",
    "vision.weight.something",
]


@pytest.mark.parametrize(("disk", "here"), SPELLED.items())
def test_a_spelling_is_read_and_written_back(disk, here):
    assert canonical(disk) == here and on_disk(here) == disk


@pytest.mark.parametrize("name", PLAIN)
def test_other_names_stay(name):
    assert canonical(name) == name == on_disk(name)
