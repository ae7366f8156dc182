"""packed_attention against an explicit float64 masked softmax, forward and gradients; no gradient across
documents (control arm)."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from unfreeze.kernels.attention import Bucket, DocumentLayout, reference_attention
from unfreeze.kernels.packed_attention import packed_attention

LENGTHS = {
    "one": [13],
    "single tokens": [1, 1, 1],
    "equal": [9, 9, 9],
    "unequal": [1, 70, 33, 2, 5, 120, 1],
    "short and long": [3, 200],
    "long": [300, 7, 260],
}


def inputs(lengths, heads, groups, d, v, dtype, seed=0):
    g = torch.Generator().manual_seed(seed)
    starts = torch.tensor([0, *lengths[:-1]]).cumsum(0)
    tensors = [
        torch.randn(sum(lengths), h, w, generator=g).to(dtype).requires_grad_()
        for h, w in [(heads, d), (groups, d), (groups, v)]
    ]
    return starts, tensors, torch.randn(sum(lengths), heads, v, generator=g).to(dtype)


def forward_backward(function, tensors, grad):
    output = function(*tensors)
    return output, torch.autograd.grad(output, tensors, grad)


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize(
    "heads, groups, d, v", [(2, 2, 16, 16), (4, 2, 16, 16), (4, 1, 24, 16), (2, 2, 8, 16)]
)
def test_packed_equals_float64_masked_softmax(name, heads, groups, d, v):
    starts, tensors, grad = inputs(LENGTHS[name], heads, groups, d, v, torch.float32)
    layout, scale = DocumentLayout.build(starts, sum(LENGTHS[name])), d**-0.5
    ours, our_grads = forward_backward(lambda *x: packed_attention(*x, layout, scale), tensors, grad)
    exact = [x.detach().double().requires_grad_() for x in tensors]
    want, want_grads = forward_backward(
        lambda *x: reference_attention(*x, starts, scale), exact, grad.double()
    )
    # float32 sums of at most 300 terms of size 1: 1e-5 is ten times what was observed
    torch.testing.assert_close(ours.double(), want, atol=1e-5, rtol=1e-5)
    for got, wanted in zip(our_grads, want_grads, strict=True):
        torch.testing.assert_close(got.double(), wanted, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["unequal", "one", "long"])
def test_bfloat16_stays_within_its_rounding(name):
    starts, tensors, grad = inputs(LENGTHS[name], 4, 2, 192, 128, torch.bfloat16)
    layout, scale = DocumentLayout.build(starts, sum(LENGTHS[name])), 192**-0.5
    ours, our_grads = forward_backward(lambda *x: packed_attention(*x, layout, scale), tensors, grad)
    exact = [x.detach().double().requires_grad_() for x in tensors]
    want, want_grads = forward_backward(
        lambda *x: reference_attention(*x, starts, scale), exact, grad.double()
    )
    # bf16 keeps 8 bits (2**-9 = 0.2 % per rounding); probabilities and outputs are rounded once, gradients a
    # few times: 1 % of the norm
    for got, wanted in zip([ours, *our_grads], [want, *want_grads], strict=True):
        assert (got.double() - wanted).norm() <= 0.01 * wanted.norm()


def leak(layout, lengths):
    """Largest gradient of document 1's output with respect to the tokens of every other document."""
    _, tensors, _ = inputs(lengths, 2, 2, 8, 8, torch.float32)
    begin, end = lengths[0], lengths[0] + lengths[1]
    output = packed_attention(*tensors, layout, 0.3)[begin:end]
    grads = torch.autograd.grad(
        output, tensors, torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    )
    inside = max(float(g[begin:end].abs().max()) for g in grads)
    outside = max(float(torch.cat([g[:begin], g[end:]]).abs().max()) for g in grads)
    return inside, outside


def test_no_gradient_crosses_documents():
    lengths = [7, 20, 90, 3]
    inside, outside = leak(DocumentLayout.build([0, 7, 27, 117], 120), lengths)
    assert inside > 0 and outside == 0.0


def test_control_arm_without_boundaries_gradient_crosses():
    inside, outside = leak(DocumentLayout(120, (Bucket(1, 120),), None, None), [7, 20, 90, 3])
    assert inside > 0 and outside > 0


@pytest.mark.parametrize("d, v, groups", [(64, 64, 4), (192, 128, 4), (64, 64, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cpu_takes_the_flash_path_without_the_score_matrix(d, v, groups, dtype, attention_runs):
    attention_runs("reference")
    starts, tensors, grad = inputs([5, 30], 4, groups, d, v, dtype)
    layout = DocumentLayout.build(starts, 35)
    with profile(activities=[ProfilerActivity.CPU]) as record:
        packed_attention(*tensors, layout, 0.1).backward(grad)
    names = {event.key for event in record.key_averages()}
    assert "aten::_scaled_dot_product_flash_attention_for_cpu_backward" in names
    assert "aten::_scaled_dot_product_attention_math" not in names
    with profile(
        activities=[ProfilerActivity.CPU]
    ) as record:  # control arm: torch itself, given unequal widths, takes the other path
        q, k = (torch.randn(1, 2, 4, 16) for _ in range(2))
        torch.nn.functional.scaled_dot_product_attention(q, k, torch.randn(1, 2, 4, 8), is_causal=True)
    assert "aten::_scaled_dot_product_attention_math" in {event.key for event in record.key_averages()}


def test_a_layout_of_another_batch_is_refused():
    _, tensors, _ = inputs([4], 2, 2, 8, 8, torch.float32)
    with pytest.raises(ValueError, match="built for 5"):
        packed_attention(*tensors, DocumentLayout.build([0], 5), 1.0)
