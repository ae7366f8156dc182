"""Layers without queries, keys and values per head are refused where those are compared; streams are compared whole."""

import pytest
from family_cases import CASES, batch_of, oracle, ours

from unfreeze.core.errors import ConfigError
from unfreeze.core.taps import Tap
from unfreeze.models.blocks.taps import Taps
from unfreeze.models.widths import tap_width


@pytest.mark.parametrize(
    ("name", "have"), [("qwen3-next", "4"), ("granite4", "2"), ("nemotron-h", "3"), ("deepseek-v4", "none")]
)
def test_a_layer_without_heads_to_compare_is_refused_and_those_with_them_are_named(name, have):
    model = ours(oracle(name), CASES[name])
    with pytest.raises(ConfigError, match=f"layer 1 of this .* model .* layers that have: {have}"):
        tap_width(model, Tap(0, "q"))
    if have != "none":
        taps = Taps([Tap(int(have) - 1, "q")])
        model.hidden(batch_of([[1, 2, 3]]), taps=taps)
        (q,) = taps.found.values()
        assert q.shape[1:].numel() == tap_width(model, Tap(int(have) - 1, "q"))


@pytest.mark.parametrize("name", ["qwen3-next", "deepseek-v4"])
def test_a_layers_input_is_as_wide_as_its_residual(name):
    model = ours(oracle(name), CASES[name])
    taps = Taps([Tap(1, "input")])
    model.hidden(batch_of([[1, 2, 3]]), taps=taps)
    (x,) = taps.found.values()
    assert x.shape == (3, tap_width(model, Tap(1, "input")))
