"""The sum of a token's rows that came back from their experts goes through the op token_permute."""

from types import SimpleNamespace

import pytest
import torch

from unfreeze.kernels import token_permute
from unfreeze.parallel.placement import dispatch
from unfreeze.parallel.placement.dispatch import Home
from unfreeze.parallel.processes.collectives import Alone

T, K, D = 21, 4, 70


def home(device="cpu"):
    """Of T K rows in any order."""
    place_TK = torch.randperm(T * K, generator=torch.Generator().manual_seed(0)).view(T, K).to(device)
    token_n = torch.div(place_TK.flatten().argsort(), K, rounding_mode="floor")
    return Home(Alone(), token_n, place_TK, place_TK, token_n[:, None], [T * K], [T * K], T * K)


def rows(dtype):
    return torch.randn(T * K, D, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_on_a_cpu_k_rows_are_added_one_after_the_other(dtype):
    """The same bits as the expert op on one process, which adds experts in ascending order."""
    there, rows_nD = home(), rows(dtype)
    y_TD = torch.zeros(T, D, dtype=torch.promote_types(dtype, torch.float32))
    for place_T in there.place_TK.unbind(1):
        y_TD = y_TD + rows_nD[place_T].to(y_TD.dtype)
    assert torch.equal(there.combine(rows_nD), y_TD.to(dtype))


def test_what_is_chosen_combines(monkeypatch, interpreted):
    """Triton's kernel, as on a GPU: one launch for the sums of all tokens."""
    triton = token_permute.OP.candidates["triton"]
    if triton.refuses("cpu", torch.float32):
        pytest.skip("the interpreter is not on")
    asked, combined = [], []
    functions = triton.load().functions

    def combine(*args):
        combined.append(args[1].shape)
        functions.combine(*args)

    def choose(op, device, dtype, bucket):
        asked.append((op.name, dtype, bucket))
        return token_permute.TokenPermute(SimpleNamespace(combine=combine))

    monkeypatch.setattr(dispatch, "choose", choose)
    there, rows_nD = home(), rows(torch.float32)
    exact = rows_nD.double()[there.place_TK].sum(1)
    found = there.combine(rows_nD)
    assert asked == [("token_order", torch.float32, "under 1k")]
    assert combined == [(T * K,)]
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=1e-5)
