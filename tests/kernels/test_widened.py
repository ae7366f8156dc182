"""Products with weights in half precision under float32: equal to those with a float32 copy, in any number of panels."""

import pytest
import torch

from unfreeze.kernels import widened
from unfreeze.kernels.loops.scratch import release_scratch, scratch_bytes


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("panel", [1 << 20, 700, 1])  # one panel; several, the last shorter; a row each
def test_products_equal_those_in_float64(monkeypatch, stored, panel):
    monkeypatch.setattr(widened, "PANEL", panel)
    generator = torch.Generator().manual_seed(0)
    weight_OI = torch.randn(37, 96, generator=generator).to(stored)
    x_TI, dy_TO = torch.randn(2, 5, 96, generator=generator), torch.randn(2, 5, 37, generator=generator)

    y_TO = widened.times_transposed(x_TI, weight_OI)
    dx_TI = widened.times(dy_TO, weight_OI)

    wide = weight_OI.double()
    torch.testing.assert_close(y_TO.double(), x_TI.double() @ wide.t(), rtol=0, atol=3e-5)
    torch.testing.assert_close(dx_TI.double(), dy_TO.double() @ wide, rtol=0, atol=3e-5)
    assert y_TO.dtype == dx_TI.dtype == torch.float32 and weight_OI.dtype == stored


def test_a_large_weight_takes_one_panel_of_scratch():
    """Not a copy of all of it: 64 MiB here."""
    release_scratch()
    weight_OI = torch.zeros(1 << 14, 1 << 10, dtype=torch.bfloat16)
    widened.times_transposed(torch.zeros(1, 1 << 10), weight_OI)
    assert 0 < scratch_bytes() <= 1.2 * widened.panel_bytes(weight_OI, torch.float32) <= 5 << 20
    assert widened.panel_bytes(weight_OI, torch.bfloat16) == 0
    release_scratch()
