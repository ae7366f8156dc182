"""Blocks recorded into a step: one that no operation computes runs as in training, in between."""

import weakref

import pytest
import torch
from torch import nn

from unfreeze.kernels.decode_step.program import CannotRecord, Program, Row
from unfreeze.models.blocks.cache import Cache
from unfreeze.models.blocks.experts import Experts
from unfreeze.models.blocks.recording import Recording


class Doubles(nn.Module):
    """2 x + 1. It appends an operation, notes a choice, and then finds that it cannot be recorded."""

    def __init__(self, failure=CannotRecord):
        super().__init__()
        self.failure = failure

    def forward(self, x_SD, run):
        assert run == "the pass"
        return 2 * x_SD + 1

    def record(self, to, x, *, add=None, factor=1.0):
        to.chosen[0] = torch.zeros(1)
        to.program.combine(x)
        raise self.failure("this format")


def recording(rows=2, dtype=torch.float32):
    to = Recording(Program(rows, dtype), Cache(rows, 1))
    to.present.run = "the pass"
    return to


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("factor", [1.0, 0.5])
@pytest.mark.parametrize("added", [True, False])
def test_a_block_that_cannot_be_recorded_is_called(dtype, factor, added):
    to, x = recording(dtype=dtype), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    add = Row(torch.full((2, 2), 10.0), to.program.pairs) if added else None
    y = to.of(Doubles(), Row(x, to.program.pairs), add=add, factor=factor)
    assert to.chosen == {}
    to.program.finish()
    for _ in range(2):
        to.program.run(1)
        assert torch.equal(y.tensor, torch.stack((10.0 * added + factor * (2 * x[0] + 1), torch.zeros(2))))
        y.tensor.zero_()
        x += 1


def test_other_errors_are_raised():
    with pytest.raises(KeyError):
        recording().of(Doubles(KeyError), Row(torch.zeros(2, 2), False))


def test_experts_that_are_not_all_here_cannot_be_recorded():
    experts = Experts(2, 32, 32, codec=None, dtype=torch.float32, device="cpu")
    experts.dispatch = lambda *arguments: None
    with pytest.raises(CannotRecord):
        experts.record(recording(), Row(torch.zeros(2, 32), False), None)


def test_a_program_and_its_cache_are_freed_at_once():
    """Not when garbage is searched for: they are gigabytes."""
    to = recording()
    to.of(Doubles(), Row(torch.zeros(2, 2), False))
    program, cache = weakref.ref(to.program), weakref.ref(to.cache)
    assert program() is not None
    del to
    assert program() is None and cache() is None
