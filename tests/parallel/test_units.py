"""Claims about what comes into a buffer at once: as few even groups as fit it, which cover a layer's experts."""

import pytest
import torch

from unfreeze.core.errors import ConfigError
from unfreeze.parallel.placement.units import ALIGN, layout_bytes, layout_of, units_of

PARAMS = {"up": (torch.float32, (7, 4, 8)), "scale": (torch.bfloat16, (7, 4))}  # of an expert 128 and 8 bytes


def test_a_layer_that_fits_is_one_unit():
    layer, whole = object(), layout_of(list(PARAMS), PARAMS)
    for buffer in (None, layout_bytes(whole)):
        (unit,) = units_of(layer, list(PARAMS), PARAMS, buffer)
        assert unit.key is layer and unit.rows is None and unit.layout == whole


@pytest.mark.parametrize("largest, groups", [(4, 2), (3, 3), (2, 4), (1, 7)])
def test_as_few_even_groups_as_fit(largest: int, groups: int):
    buffer = -(-128 * largest // ALIGN) * ALIGN + ALIGN  # the scales take less than ALIGN
    units = units_of(object(), list(PARAMS), PARAMS, buffer)
    rows = [unit.rows for unit in units if unit.rows is not None]
    assert len(units) == len(rows) == groups and len({id(unit.key) for unit in units}) == groups
    assert [expert for each in rows for expert in range(each.first, each.last)] == list(range(7))
    assert max(map(len, rows)) == largest and min(map(len, rows)) >= largest - 1
    assert max(layout_bytes(unit.layout) for unit in units) <= buffer


def test_a_buffer_smaller_than_an_expert_is_refused():
    with pytest.raises(ConfigError, match="one expert of a layer takes 192 B, and a buffer may have 191 B"):
        units_of(object(), list(PARAMS), PARAMS, 191)
