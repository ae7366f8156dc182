"""A swap in every family: the part stands, all else is in both models; or one line says why not."""

import pytest
import torch
from family_case import SMALL
from family_cases import CASES, NO_IDS

from unfreeze import models
from unfreeze.compress.swapped import Wish, built, difference, shape_with
from unfreeze.core.errors import UserError

OF_EACH_FAMILY = {case.model_type: name for name, case in reversed(CASES.items())}
LEAST = {"full": 25, "sliding_window": 20, "qk_norm": 9}


@pytest.fixture(scope="module")
def families():
    """family -> its model without values."""
    return {
        family: models.build(
            models.shape(CASES[name].made({**SMALL, **NO_IDS}).to_dict()), dtype=torch.float32, device="meta"
        )
        for family, name in OF_EACH_FAMILY.items()
    }


@pytest.mark.parametrize("part", LEAST)
def test_the_part_stands_in_every_family_whose_attention_it_takes(part, families):
    fit = 0
    for family, before in families.items():
        fits = []
        for layer in range(before.shape.num_layers):
            wish = Wish(f"layers.{layer}.self_attn", part)
            try:
                after = built(before, shape_with(before, wish))
                change = difference(before, after, wish)
            except UserError as error:
                assert error.next
                assert family in error.message or "Norm, and that of" in error.message
                continue
            fits.append(layer)
            own = f"model.layers.{layer}.self_attn."
            assert all(name.startswith(own) for name in (*change.copied, *change.drawn))
            assert not change.dropped
            assert set(change.copied) == {name for name in before.state_dict() if name.startswith(own)}
            assert after.state_dict().keys() - before.state_dict().keys() == set(change.drawn)
            assert bool(change.drawn) == (part == "qk_norm" and not change.same)
        fit += bool(fits)
    assert fit >= LEAST[part]


def test_full_is_the_same_where_a_family_has_no_window(families):
    def same(family: str, layer: int = 0) -> bool:
        wish = Wish(f"layers.{layer}.self_attn", "full")
        return difference(
            families[family], built(families[family], shape_with(families[family], wish)), wish
        ).same

    assert same("llama") and same("qwen3") and same("deepseek_v3") and same("mixtral")
    # control arm: a layer with a window changes
    assert not all(same("gemma3_text", layer) for layer in range(3))


def test_hybrids_name_a_layer_that_has_attention(families):
    before = families["qwen3_next"]
    with pytest.raises(UserError, match="has no self_attn; 1 of 4 have") as error:
        shape_with(before, Wish("layers.*.self_attn", "full"))
    assert '"layers.3.self_attn"' in error.value.next
