"""Scratch: the same bytes at each call, the same tensor for the same request, flat once it has grown."""

import pytest
import torch

from unfreeze.kernels.loops import scratch as module
from unfreeze.kernels.loops.scratch import release_scratch, scratch, scratch_bytes

CPU = torch.device("cpu")


def of(*shape):
    return scratch("test of scratch", shape, torch.float32, CPU)


def test_the_same_request_gets_the_same_tensor_and_others_the_same_bytes():
    release_scratch()
    wide = of(64, 64)
    assert of(64, 64) is wide and of(32, 64).data_ptr() == wide.data_ptr()
    assert of(64, 64) is wide  # two shapes in turn


def test_a_larger_request_leaves_no_view_of_the_old_bytes():
    release_scratch()
    small, held = of(8, 8), scratch_bytes()
    large = of(512, 512)
    assert scratch_bytes() > held and of(8, 8) is not small and of(8, 8).data_ptr() == large.data_ptr()
    grown = scratch_bytes()
    for rows in range(1, 512):
        of(rows, 512)
    assert scratch_bytes() == grown
    release_scratch()
    assert scratch_bytes() == 0


def test_after_release_nothing_of_the_old_bytes_is_handed_out():
    release_scratch()
    old = of(64, 64)
    release_scratch()
    assert of(64, 64) is not old and scratch_bytes() >= old.nbytes


def test_a_buffer_keeps_few_views():
    release_scratch()
    for rows in range(1, 3 * module.VIEWS):
        of(rows, 8)
    assert all(len(views) <= module.VIEWS for views in module._views.values())


def test_the_mode_of_the_first_caller_is_not_the_next_ones():
    release_scratch()
    with torch.inference_mode():
        of(4, 4)
    assert not of(4, 4).is_inference()
    of(4, 4).copy_(torch.ones(4, 4))


def test_a_write_that_autograd_would_record_is_refused_and_leaves_nothing():
    release_scratch()
    with pytest.raises(RuntimeError, match="no_grad"):
        of(4, 4).copy_(torch.ones(4, 4, requires_grad=True))
    assert not of(4, 4).requires_grad and not of(2, 4).requires_grad
