"""Windows, chunks, softcapped scores and sinks against an explicit float64 masked softmax, forward and gradients;
the sinks against gpt-oss' own function in transformers."""

import pytest
import torch
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from unfreeze.kernels.attention import DocumentLayout, Mask, by_blocks, reference_attention
from unfreeze.kernels.attention.form import CAUSAL
from unfreeze.kernels.packed_attention import packed_attention

LENGTHS = [1, 70, 33, 2, 5, 300, 1, 129]
FORMS = {
    "window": (Mask(window=20), None, False),
    "window of a block": (Mask(window=128), None, False),
    "window of one": (Mask(window=1), None, False),
    "chunks": (Mask(chunk=50), None, False),
    "softcap": (CAUSAL, 3.0, False),
    "sinks": (CAUSAL, None, True),
    "all of them": (Mask(window=33), 2.0, True),
    "chunks and sinks": (Mask(chunk=64), None, True),
}


def inputs(dtype, heads=4, groups=2, d=16, v=16):
    g = torch.Generator().manual_seed(0)
    shapes = [(sum(LENGTHS), heads, d), (sum(LENGTHS), groups, d), (sum(LENGTHS), groups, v), (heads,)]
    tensors = [torch.randn(shape, generator=g).to(dtype).requires_grad_() for shape in shapes]
    starts = torch.tensor([0, *LENGTHS[:-1]]).cumsum(0)
    return starts, tensors, torch.randn(sum(LENGTHS), heads, v, generator=g).to(dtype)


def compared(name, dtype, d=16, v=16, change=None, reuse=None):
    """(ours, exact): output and gradients of q, k, v and the sinks."""
    mask, softcap, has_sinks = FORMS[name]
    starts, tensors, grad = inputs(dtype, d=d, v=v)
    used = tensors if has_sinks else tensors[:3]

    def run(function, where, given, output_grad, mask=mask):
        sinks = given[3] if has_sinks else None
        o = function(*given[:3], where, d**-0.5, mask=mask, softcap=softcap, sinks_H=sinks)
        return [o, *torch.autograd.grad(o, given, output_grad)]

    exact = [x.detach().double().requires_grad_() for x in used]
    layout = DocumentLayout.build(starts, sum(LENGTHS))
    return (
        run(packed_attention, layout, used, grad, mask if change is None else change),
        run(reference_attention, starts, exact, grad.double()),
    )


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("d, v", [(16, 16), (24, 16)])
def test_equals_a_float64_masked_softmax(name, d, v, monkeypatch):
    monkeypatch.setattr(by_blocks, "SCORE_BYTES", 1 << 19)  # several documents, and one at a time
    for ours, exact in zip(*compared(name, torch.float32, d, v), strict=True):
        # float32 sums of at most 300 terms of size 1; a sink's gradient sums over all tokens
        torch.testing.assert_close(ours.double(), exact, atol=5e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["window", "all of them"])
def test_bfloat16_stays_within_its_rounding(name):
    for ours, exact in zip(*compared(name, torch.bfloat16), strict=True):
        assert (ours.double() - exact).norm() <= 0.01 * exact.norm()  # 2^-9 of each rounding


@pytest.mark.parametrize("name, bug", [("window", Mask(window=21)), ("chunks", Mask(chunk=51))])
def test_control_arm_a_window_one_too_wide_is_seen(name, bug):
    ours, exact = compared(name, torch.float32, change=bug)
    assert (ours[0].double() - exact[0]).abs().max() > 1e-2


def test_sinks_equal_those_of_transformers():
    starts, (q, k, v, sinks), _ = inputs(torch.float32)
    begin, end = 111, 411  # the document of 300 tokens
    module = torch.nn.Module()
    module.num_key_value_groups, module.sinks, module.training = 2, sinks, False
    hidden = torch.full((300, 300), -torch.inf).triu(1)[None, None]
    batched = [x[begin:end].transpose(0, 1)[None] for x in (q, k, v)]
    theirs, _ = eager_attention_forward(module, *batched, hidden, scaling=0.25)
    ours = packed_attention(q, k, v, DocumentLayout.build(starts, sum(LENGTHS)), 0.25, sinks_H=sinks)
    torch.testing.assert_close(ours[begin:end], theirs[0], atol=1e-5, rtol=1e-5)


def test_no_gradient_leaves_the_window_or_the_document():
    starts, (q, k, v, _), _ = inputs(torch.float32)
    o = packed_attention(q, k, v, DocumentLayout.build(starts, sum(LENGTHS)), 0.25, mask=Mask(window=20))
    row = 300
    dk, dv = torch.autograd.grad(o[row].sum(), (k, v))
    for gradient in (dk, dv):
        seen = gradient.flatten(1).abs().amax(1).nonzero().flatten().tolist()
        assert seen == list(range(row - 19, row + 1))


def test_a_second_visit_uses_what_the_first_made():
    starts, (q, k, v, _), _ = inputs(torch.float32)
    layout, kept = DocumentLayout.build(starts, sum(LENGTHS)), []

    def first(compute):
        kept.append(compute())
        return kept[-1]

    def attend(reuse):
        return packed_attention(q, k, v, layout, 0.25, mask=Mask(window=20), reuse=reuse)

    with torch.no_grad():
        attend(first)
    again = iter(kept)
    plain, reused = attend(None), attend(lambda compute: next(again))
    grads = [torch.autograd.grad(o.square().sum(), (q, k, v)) for o in (plain, reused)]
    assert torch.equal(plain, reused)
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_a_layout_is_cut_once_and_not_where_documents_are_short():
    layout = DocumentLayout.build([0, 10], 30)
    assert layout.cut(20) is layout
    assert layout.cut(8) is layout.cut(8)
    assert layout.cut(8).starts == (0, 8, 10, 18, 26)


def test_scratch_is_what_backward_takes():
    """The tensors of backward are counted by torch's own allocator hook on a window of a long document."""
    from torch.profiler import ProfilerActivity, profile

    L, H, G, d, window = 1024, 8, 2, 32, 200
    q, k, v = (torch.randn(1, L, heads, d).requires_grad_() for heads in (H, G, G))
    o = by_blocks.attend_by_blocks(q, k, v, 0.2, window=window)
    grad = torch.randn_like(o)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        torch.autograd.grad(o, (q, k, v), grad)
    held = peak = 0
    for event in sorted(record.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    results = 4 * L * d * (H + 2 * G)
    planned = by_blocks.scratch_bytes(H, G, d, d, tokens=L, length=L, window=window) + results
    assert 0.9 * peak <= planned <= 1.25 * peak
