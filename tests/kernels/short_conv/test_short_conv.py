"""The short convolution against torch's conv1d in float64, document by document. T tokens, C channels, K taps."""

import pytest
import torch
import torch.nn.functional as F

from unfreeze.kernels.short_conv import conv_step, packed_conv, tail_of

LENGTHS, C = (5, 1, 9, 2), 6
OFFSETS_T = torch.cat([torch.arange(n) for n in LENGTHS])


def made(taps, bias):
    random = torch.Generator().manual_seed(0)
    sizes = ((sum(LENGTHS), C), (C, taps), *(((C,),) if bias else ()))
    tensors = [torch.randn(*size, generator=random, dtype=torch.float64).requires_grad_() for size in sizes]
    return tensors if bias else [*tensors, None]


def theirs(x_TC, weight_CK, bias_C, silu):
    """conv1d of each document behind K - 1 zeros."""
    outputs = []
    for document in x_TC.split(LENGTHS):
        padded = F.pad(document.t()[None], (weight_CK.shape[1] - 1, 0))
        outputs.append(F.conv1d(padded, weight_CK[:, None], bias_C, groups=C)[0].t())
    y_TC = torch.cat(outputs)
    return F.silu(y_TC) if silu else y_TC


@pytest.mark.parametrize("taps", [1, 3, 4])
@pytest.mark.parametrize(("bias", "silu"), [(False, True), (True, False)])
def test_it_is_conv1d_of_each_document(taps, bias, silu):
    inputs = made(taps, bias)
    leaves = [x for x in inputs if x is not None]
    ours, wanted = packed_conv(*inputs, OFFSETS_T, silu), theirs(*inputs, silu)
    assert (ours - wanted).abs().max() <= 1e-12
    probe = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    pairs = zip(*(torch.autograd.grad((y * probe).sum(), leaves) for y in (ours, wanted)), strict=True)
    assert all((a - b).abs().max() <= 1e-12 for a, b in pairs)


def before(offsets_T):
    """Gradient of the third document's outputs with respect to the tokens before it."""
    inputs = made(4, False)
    y_TC = packed_conv(*inputs, offsets_T, True)
    return torch.autograd.grad(y_TC[6:15].sum(), inputs[0])[0][:6]


def test_the_gradient_across_documents_is_exactly_zero():
    assert not before(OFFSETS_T).any()


def test_control_a_window_that_reaches_into_the_document_before_is_seen():
    assert before(torch.arange(len(OFFSETS_T))).any()


@pytest.mark.parametrize("taps", [1, 3, 4])
def test_steps_behind_the_tail_go_on_as_the_packed_convolution(taps):
    x_TC, weight_CK, bias_C = (x.detach() for x in made(taps, True))
    heads = [document[:-1] for document in x_TC.split(LENGTHS) if len(document) > 1]
    last_S = torch.tensor([len(head) for head in heads]).cumsum(0) - 1
    offsets_T = torch.cat([torch.arange(len(head)) for head in heads])
    window_SKC = tail_of(torch.cat(heads), offsets_T, last_S, taps)
    news_SC = torch.stack([document[-1] for document in x_TC.split(LENGTHS) if len(document) > 1])
    y_SC, moved_SKC = conv_step(news_SC, window_SKC, weight_CK, bias_C, True)
    ends_S = (torch.tensor(LENGTHS).cumsum(0) - 1)[[0, 2, 3]]
    assert (y_SC - theirs(x_TC, weight_CK, bias_C, True)[ends_S]).abs().max() <= 1e-12
    assert moved_SKC.shape == window_SKC.shape and (taps == 1 or torch.equal(moved_SKC[:, -1], news_SC))
