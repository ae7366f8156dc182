"""Bytes of operations against what tensors really hold, as the profiler records them."""

import pytest
import torch
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from benchmarks.harness import traffic

A, B, C = torch.randn(64, 32).bfloat16(), torch.randn(32, 16).bfloat16(), torch.randn(64, 16).bfloat16()
HEADS = torch.randn(4, 8, 6)


@pytest.mark.parametrize(
    ("name", "work", "expected"),
    [
        ("aten::mm", lambda: torch.mm(A, B), A.nbytes + B.nbytes + C.nbytes),
        ("aten::mm", lambda: torch.mm(A, B, out=torch.empty_like(C)), A.nbytes + B.nbytes + C.nbytes),
        ("aten::bmm", lambda: torch.bmm(HEADS, HEADS.mT), 2 * HEADS.nbytes + 4 * 8 * 8 * 4),
        ("aten::addmm", lambda: torch.addmm(C, A, B), A.nbytes + B.nbytes + 2 * C.nbytes),
        ("aten::copy_", lambda: A.float(), 3 * A.nbytes),
        ("aten::add", lambda: A + A, 3 * A.nbytes),
        ("aten::add", lambda: A + 1.0, 2 * A.nbytes),
        ("aten::mul", lambda: A * A[:1].float(), A.nbytes + 32 * 4 + 2 * A.nbytes),
        ("aten::mul_", lambda: A.clone().mul_(2.0), 2 * A.nbytes),
        # what repeats is read once
        (
            "aten::copy_",
            lambda: torch.empty(64, 32).copy_(torch.ones(64, 1).expand(64, 32)),
            64 * 32 * 4 + 64 * 4,
        ),
        ("aten::zero_", lambda: torch.empty_like(A).zero_(), A.nbytes),
        ("aten::cat", lambda: torch.cat([A, A]), 0),  # lists of tensors aren't recorded
        ("aten::sum", lambda: A.sum(-1), 0),  # the output doesn't follow from the inputs
    ],
)
def test_bytes_are_those_of_inputs_and_output(name, work, expected):
    with torch_profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        work()
    assert recorded.profiler is not None
    assert traffic.by_op(recorded.profiler.kineto_results.events()).get(name, 0) == expected


def test_inputs_that_were_not_recorded_count_nothing():
    assert (
        traffic.moved("aten::mm", [[], []], ["", ""], [[], []]) == 0
        and traffic.moved("aten::copy_", [], [], []) == 0
    )


def test_a_copy_has_a_rate(monkeypatch):
    monkeypatch.setattr(traffic, "COPIED", 2**20)
    assert 1e8 < traffic.copy_rate() < 1e13
