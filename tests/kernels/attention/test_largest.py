"""The largest scores against every score in float64, document by document."""

from __future__ import annotations

import pytest
import torch

from unfreeze.kernels.attention import CAUSAL, DocumentLayout, Mask, largest
from unfreeze.kernels.attention.largest import largest_scores


@pytest.mark.parametrize("mask", [CAUSAL, Mask(window=3), Mask(chunk=4)])
@pytest.mark.parametrize("at_once", [1 << 22, 7])
def test_largest_scores_equal_all_scores_in_float64(
    mask: Mask, at_once: int, monkeypatch: pytest.MonkeyPatch
):
    """Control arm: without the mask, tokens behind a query and of other documents would count."""
    monkeypatch.setattr(largest, "SCORES", at_once)
    starts, total, generator = (0, 5, 6), 17, torch.Generator().manual_seed(0)
    q, k = (torch.randn(total, heads, 8, generator=generator) for heads in (6, 2))
    layout = DocumentLayout.build(torch.tensor(starts), total, "cpu")
    scores_HTN = torch.einsum("thd,nhd->htn", q.double(), k.double().repeat_interleave(3, 1)) * 0.3
    document_T = torch.bucketize(torch.arange(total), torch.tensor(starts), right=True)
    place_T = torch.arange(total) - torch.tensor(starts)[document_T - 1]
    seen = mask.allowed(place_T[:, None], place_T) & (document_T[:, None] == document_T)
    expected = scores_HTN.masked_fill(~seen, -torch.inf).amax(-1).T
    found = largest_scores(q, k, layout, 0.3, mask)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)
    assert (scores_HTN.amax(-1).T - expected).max() > 0.1
