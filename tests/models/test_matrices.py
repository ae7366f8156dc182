"""What Muon moves in every family: matrices of hidden layers, and nothing whose rows are tokens or experts."""

from __future__ import annotations

import math

import pytest
import torch
from family_cases import CONFIGS

from unfreeze import models
from unfreeze.models.groups import group_of
from unfreeze.models.matrices import PIECE, STEPS, flop, hidden_matrices, workspace

UNEVEN = {"lfm2", "mimo_v2_flash", "qwen3_vl_moe_text"}  # their configs are built in other sizes only
NEVER = {"router", "lm_head", "embeddings", "norms", "indexer", "hyper_connections"}


def on_meta(name: str) -> models.Decoder:
    config = CONFIGS[name]
    config = config if "text_config" in config else {**config, "model_type": name}
    return models.build(models.shape(config), dtype=torch.float32, device="meta")


@pytest.mark.parametrize("name", sorted(CONFIGS.keys() - UNEVEN))
def test_every_large_weight_of_a_layer_is_a_matrix_and_ends_and_routers_are_none(name: str):
    model = on_meta(name)
    matrices = hidden_matrices(model)
    assert matrices and all(weight.dim() in (2, 3) for weight in matrices.values())
    for other, parameter in model.named_parameters():
        if other in matrices:
            assert parameter is matrices[other] and group_of(other) not in NEVER
        elif parameter.dim() >= 2 and min(parameter.shape[-2:]) > 16:
            # a bias of each expert; a table of positions that is added to keys
            added = other.endswith("_bias") or "position_bias" in other
            assert added or group_of(other) in NEVER or not parameter.requires_grad, other


def test_stacks_of_experts_are_stacks():
    model = on_meta("qwen3_moe")
    stacked = [name for name, weight in hidden_matrices(model).items() if weight.dim() == 3]
    assert stacked and all(".experts." in name for name in stacked)


def test_workspace_and_flop_by_hand():
    """[64, 256] in bfloat16. A stack has the workspace of as many matrices as are done at once."""
    one = 64 * 256 * (8 + 6) + 2 * 64 * 64 * 2
    assert workspace((64, 256), 2) == workspace((256, 64), 2) == one
    assert workspace((4, 64, 256), 2) == 4 * one
    assert workspace((10**6, 64, 256), 2) == math.floor(PIECE / (64 * 256)) * one
    each = 2 * 64 * 64 * 256 + 2 * 64**3 + 2 * 64 * 64 * 256  # Gram, its square, its product with X
    assert flop((64, 256)) == STEPS * each and flop((7, 256, 64)) == 7 * STEPS * each
