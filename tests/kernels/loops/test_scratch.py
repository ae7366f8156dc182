"""Scratch: the same bytes at each call, the same tensor for the same request, flat once it has grown."""

import torch

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
