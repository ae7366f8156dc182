"""Attention over packed documents in one call, with plain torch in the place of the GPU's kernel: against the explicit
float64 mask and against the path by buckets. Its operators' arguments are seen on meta."""

import functools
import itertools
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from unfreeze.kernels import cards
from unfreeze.kernels.attention import CAUSAL, DocumentLayout, Mask, reference_attention
from unfreeze.kernels.choice import predicted
from unfreeze.kernels.packed_attention import FORMS, OP, bucket, flash_cuda, in_one_call, packed_attention
from unfreeze.kernels.packed_attention.by_buckets import by_buckets
from unfreeze.kernels.packed_attention.varlen import Documents, by

LENGTHS = [1, 70, 33, 2, 5, 300, 1, 129]
STARTS = torch.tensor([0, *LENGTHS[:-1]]).cumsum(0)
BF16, CPU = torch.bfloat16, torch.device("cpu")


class Plain:
    """The two functions of a kernel, by all scores; like the kernel's they take equal widths and whole tensors only."""

    def __init__(self, off_by=0):
        self.calls, self.off_by = [], off_by

    def scores(self, q, k, documents):
        bounds, T = documents.bounds_S1.tolist(), len(q)
        assert bounds[0] == 0 and bounds[-1] == T and documents.bounds_S1.dtype == torch.int32
        assert documents.longest == max(b - a for a, b in itertools.pairwise(bounds))
        document = torch.bucketize(torch.arange(T), torch.tensor(bounds[1:]), right=True)
        apart = torch.arange(T)[:, None] - torch.arange(T)
        seen = (document[:, None] == document) & (apart >= 0)
        if documents.window is not None:
            seen &= apart < documents.window + self.off_by
        wide = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        c = documents.scale * torch.einsum("thd,shd->hts", q.to(self.exact(q)), wide.to(self.exact(q)))
        return c.masked_fill(~seen, -math.inf)

    def exact(self, q):
        return torch.promote_types(q.dtype, torch.float32)

    def forward(self, q, k, v, documents):
        assert q.shape[-1] == k.shape[-1] == v.shape[-1] and not torch.is_grad_enabled()
        self.calls.append("forward")
        c = self.scores(q, k, documents)
        lse = c.logsumexp(-1)
        wide = v.repeat_interleave(q.shape[1] // v.shape[1], 1).to(c.dtype)
        return torch.einsum("hts,shd->thd", (c - lse[..., None]).exp(), wide).to(q.dtype), lse

    def backward(self, do, q, k, v, o, lse, documents):
        assert do.shape == o.shape == q.shape and v.shape == k.shape
        self.calls.append("backward")
        rep, kind = q.shape[1] // k.shape[1], self.exact(q)
        P = (self.scores(q, k, documents) - lse[..., None]).exp()
        do_, o_, q_ = (x.to(kind) for x in (do, o, q))
        k_, v_ = (x.to(kind).repeat_interleave(rep, 1) for x in (k, v))
        dP = torch.einsum("thd,shd->hts", do_, v_)
        dc = documents.scale * P * (dP - (do_ * o_).sum(-1).t()[..., None])
        dq, dk = torch.einsum("hts,shd->thd", dc, k_), torch.einsum("hts,thd->shd", dc, q_)
        dv = torch.einsum("hts,thd->shd", P, do_)
        dk, dv = (x.unflatten(1, (-1, rep)).sum(2) for x in (dk, dv))
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


MASKS = {
    "causal": CAUSAL,
    "window": Mask(window=20),
    "window of one": Mask(window=1),
    "window of the longest": Mask(window=300),
    "chunks": Mask(chunk=50),
}
SIZES = {  # heads, key heads, width of keys, of values
    "all heads": (4, 4, 16, 16),
    "grouped": (6, 2, 16, 16),
    "latent": (3, 3, 24, 16),
}


def drawn(size, dtype=torch.float64):
    heads, groups, d, v = SIZES[size]
    g = torch.Generator().manual_seed(0)
    shapes = [(sum(LENGTHS), heads, d), (sum(LENGTHS), groups, d), (sum(LENGTHS), groups, v), (heads,)]
    tensors = [torch.randn(shape, generator=g).to(dtype).requires_grad_() for shape in shapes]
    return tensors, torch.randn(sum(LENGTHS), heads, v, generator=g).to(dtype)


def results(function, where, tensors, grad, mask, sinks, **more):
    """Output and gradients of q, k, v and the sinks."""
    used = tensors if sinks else tensors[:3]
    sink = {"sinks_H": tensors[3]} if sinks else {}
    o = function(*tensors[:3], where, 0.3, mask=mask, **sink, **more)
    return [o, *torch.autograd.grad(o, used, grad)]


@pytest.fixture
def one_call(monkeypatch):
    """packed_attention in one call, by plain torch."""
    made = Plain()
    monkeypatch.setattr("unfreeze.kernels.packed_attention.choose", lambda *_: by(made))
    return made


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mask", MASKS)
def test_equals_the_explicit_mask_in_float64(mask, size, sinks, one_call):
    tensors, grad = drawn(size)
    layout = DocumentLayout.build(STARTS, sum(LENGTHS))
    ours = results(packed_attention, layout, tensors, grad, MASKS[mask], sinks)
    want = results(reference_attention, STARTS, tensors, grad, MASKS[mask], sinks)
    assert one_call.calls == ["forward", "backward"], "one call for all documents"
    for got, exact in zip(ours, want, strict=True):
        torch.testing.assert_close(got, exact, atol=1e-12, rtol=1e-10)


def test_the_path_by_buckets_computes_the_same():
    tensors, grad = drawn("grouped")
    layout = DocumentLayout.build(STARTS, sum(LENGTHS))
    for mask, sinks in ((CAUSAL, False), (Mask(window=20), True)):
        ours = results(by(Plain()), layout, tensors, grad, mask, sinks)
        for got, want in zip(ours, results(by_buckets, layout, tensors, grad, mask, sinks), strict=True):
            torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-10)


def test_in_bfloat16_sinks_round_the_output_once_more_and_nothing_else():
    tensors, grad = drawn("grouped", BF16)
    layout = DocumentLayout.build(STARTS, sum(LENGTHS))
    ours = results(by(Plain()), layout, tensors, grad, Mask(window=33), True)
    exact = [x.detach().double().requires_grad_() for x in tensors]
    want = results(reference_attention, STARTS, exact, grad.double(), Mask(window=33), True)
    for got, wanted in zip(ours, want, strict=True):
        assert got.dtype == BF16 and (got.double() - wanted).norm() <= OP.tolerance[BF16] * wanted.norm()


@pytest.mark.parametrize("case", OP.cases, ids=lambda case: case.bucket)
def test_its_check_before_the_first_use_passes_what_is_right_and_nothing_else(case):
    """In bf16 against the reference in float64, on the cases of a GPU's check."""

    def fault(off_by):
        return predicted.fault(OP, case, lambda: by(Plain(off_by)), CPU, BF16, OP.tolerance[BF16])

    assert fault(0) == ""
    if "window" in case.bucket:
        assert fault(1).startswith("error")


@pytest.mark.parametrize("fault", ["a window one too wide", "sinks forgotten"])
def test_control_arm_a_wrong_call_is_seen(fault):
    tensors, grad = drawn("grouped")
    layout, wide = DocumentLayout.build(STARTS, sum(LENGTHS)), fault.startswith("a window")
    ours = results(by(Plain(off_by=int(wide))), layout, tensors, grad, Mask(window=20), wide)
    want = results(reference_attention, STARTS, tensors, grad, Mask(window=20), True)
    assert (ours[0] - want[0]).norm() > 0.01 * want[0].norm()


def test_a_recomputed_layer_attends_once(one_call):
    """The second visit, with gradients, takes output and log-sum-exp of the first: the same bits."""
    tensors, grad = drawn("latent", BF16)
    layout, kept = DocumentLayout.build(STARTS, sum(LENGTHS)), []

    def first(compute):
        kept.append(compute())
        return kept[-1]

    plain = results(packed_attention, layout, tensors, grad, CAUSAL, True)
    one_call.calls.clear()
    with torch.no_grad():
        packed_attention(*tensors[:3], layout, 0.3, sinks_H=tensors[3], reuse=first)
    again = results(packed_attention, layout, tensors, grad, CAUSAL, True, reuse=lambda _: kept.pop())
    assert one_call.calls == ["forward", "backward"] and not kept
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_what_is_kept_is_not_padded(one_call):
    """q, k, v, the output and its log-sum-exp, at the width of values: what attention_bytes counts."""
    tensors, _ = drawn("latent", BF16)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        packed_attention(*tensors[:3], DocumentLayout.build(STARTS, sum(LENGTHS)), 0.3)
    T, (H, _, d, v) = sum(LENGTHS), SIZES["latent"]
    stored = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
    assert sum(stored.values()) == T * H * (2 * (2 * d + 2 * v) + 4)


class Seen(TorchDispatchMode):
    """The operators with their arguments by name."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        names = [argument.name for argument in function._schema.arguments]
        self.calls.append((function._schema.name, dict(zip(names, args, strict=False)) | (kwargs or {})))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("window, wanted", [(None, (-1, 0)), (128, (127, 0)), (4096, (-1, 0))])
def test_torchs_operators_get_what_they_document(window, wanted):
    """Of the window (left, right): keys beside its own that a query sees, -1 for all. Causal without one."""
    assert flash_cuda.missing() == ""
    T, layout = 700, DocumentLayout.build([0, 100, 400], 700)
    q, k, v = (torch.empty(T, n, w, dtype=BF16, device="meta") for n, w in ((8, 192), (2, 192), (2, 128)))
    for tensor in (q, k, v):
        tensor.requires_grad_()
    with Seen() as seen:
        o = by(flash_cuda)(q, k, v, layout, 0.1, Mask(window=window))
        grads = torch.autograd.grad(o, (q, k, v), torch.empty_like(o))
    assert o.shape == (T, 8, 128) and [g.shape for g in grads] == [q.shape, k.shape, v.shape]
    ours = [(name, given) for name, given in seen.calls if "flash" in name]
    assert [name for name, _ in ours] == ["aten::_flash_attention_forward", "aten::_flash_attention_backward"]
    for _, given in ours:
        assert given["is_causal"] == (wanted == (-1, 0)) and given["dropout_p"] == 0
        assert (given["window_size_left"], given["window_size_right"]) == wanted
        assert given["max_q"] == given["max_k"] == 300 and given["scale"] == 0.1
        assert given["cum_seq_q"] is given["cum_seq_k"] and len(given["cum_seq_q"]) == 4
        assert given["key"].shape == given["value"].shape == (T, 2, 192), "padded, and not repeated"
    assert ours[1][1]["logsumexp"].shape == (8, T)


def test_a_card_older_than_the_flash_kernel_is_refused_by_its_capability(monkeypatch):
    """Else the table of a T4 would call a right kernel wrong."""
    for capability, runtime, why in (
        ((7, 5), "CUDA 13.0", "compute capability 7.5; flash attention needs 8.0"),
        ((8, 0), "CUDA 13.0", ""),
        ((9, 0), "ROCm 6.4", ""),
    ):
        card = cards.Card("Mock 9000", capability, 16 << 30, "580.65", runtime)
        monkeypatch.setattr(cards, "here", lambda card=card: card)
        assert OP.candidates["varlen"].refuses("cuda", BF16) == why


@pytest.mark.parametrize("window", [None, 128])
def test_the_operators_are_those_behind_torchs_own_function_with_the_same_arguments(window):
    """Of varlen_attn and of its backward, seen on meta, with grouped keys as in gpt-oss."""
    from torch.nn.attention import varlen

    def flash(function, *given):
        with Seen() as seen:
            function(*given)
        (call,) = ((name, given) for name, given in seen.calls if "flash" in name)
        return call

    bounds = torch.empty(4, dtype=torch.int32, device="meta")
    q, k, v = (torch.empty(700, n, 64, dtype=BF16, device="meta") for n in (64, 8, 8))
    lse, rng = torch.empty(64, 700, device="meta"), torch.empty(2, dtype=torch.uint64, device="meta")
    shared, size = (bounds, bounds, 300, 300, window is None), [-1 if window is None else window - 1, 0]
    documents, saved = Documents(bounds, 300, 0.1, window), (q, q, k, v, q, lse)
    pairs = [
        (
            flash(flash_cuda.forward, q, k, v, documents),
            flash(varlen._varlen_attn._init_fn, q, k, v, *shared, 0.1, size, True),
        ),
        (
            flash(flash_cuda.backward, *saved, documents),
            flash(varlen._varlen_attn_backward._init_fn, *saved, *shared, rng, 0.1, size),
        ),
    ]
    for (name, ours), (wanted, theirs) in pairs:
        assert name == wanted and all(theirs[key] is None for key in theirs.keys() - ours.keys())
        for key in ours.keys() - {"rng_state", "unused"}:
            assert ours[key] is theirs[key] or ours[key] == theirs[key], key


@pytest.mark.parametrize("lacks", ["an argument", "an operator"])
def test_what_torch_lacks_is_named(lacks, monkeypatch):
    name = "_flash_attention_forward" if lacks == "an argument" else "_flash_attention_of_tomorrow"
    monkeypatch.setitem(flash_cuda.OPERATORS, name, {"sinks"})
    flash_cuda.missing.cache_clear()
    why = f"{name} has no sinks" if lacks == "an argument" else f"has no {name}"
    assert why in flash_cuda.missing() and why in OP.candidates["varlen"].refuses("cuda", BF16)
    assert not in_one_call("cuda", BF16, "causal")
    flash_cuda.missing.cache_clear()


def test_what_runs_in_one_call_on_cuda_and_what_does_not():
    plain = functools.partial(bucket, window=False, softcap=False, sinks=False)
    assert {case.bucket for case in OP.cases} == set(FORMS)
    assert bucket(64, 64, window=True, softcap=False, sinks=True) == "window and sinks"
    assert plain(192, 128) == "causal, v < d" and plain(256, 256) == plain(8, 8) == "causal"
    assert bucket(64, 64, window=True, softcap=True, sinks=True) == "softcap"
    assert plain(264, 264) == plain(12, 12) == plain(200, 128) == "width that flash kernels do not take"
    assert plain(64, 80) == "v > d"
    for name in FORMS:
        assert in_one_call("cuda", BF16, name)
    assert not in_one_call("cuda", BF16, "softcap") and not in_one_call("cpu", BF16, "causal")
    assert not in_one_call("cuda", torch.float32, "causal")


def test_bounds_are_sent_to_a_device_once():
    layout = DocumentLayout.build([0, 3, 10], 12)
    bounds = layout.bounds(torch.device("cpu"))
    assert bounds.tolist() == [0, 3, 10, 12] and bounds is layout.bounds(torch.device("cpu"))
    assert layout.longest == 7 and layout.cut(4).longest == 4
