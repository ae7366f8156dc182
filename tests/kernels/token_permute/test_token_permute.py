"""Sort, gather and combine against numpy's stable argsort and plain sums: every implementation that runs
here, with ragged and empty experts."""

from itertools import product

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from unfreeze.kernels.choice.choose import implementation_of
from unfreeze.kernels.token_permute import OP, bucket, reference, token_permute

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = (torch.float32, torch.bfloat16)


def part(name, dtype=torch.float32):
    reason = "" if name == "reference" else OP.candidates[name].refuses(DEVICE.type, dtype)
    if reason:
        pytest.skip(reason)
    return implementation_of(OP, name, DEVICE, dtype).functions


def random_ids(tokens, per_token, experts, used=None):
    """Distinct experts per token, of the first `used` only."""
    g = torch.Generator().manual_seed(tokens + experts)
    return torch.rand((tokens, used or experts), generator=g).topk(per_token, dim=1).indices.to(DEVICE)


SHAPES = [
    (1, 1, 1, None),
    (7, 2, 5, None),
    (130, 3, 70, None),
    (65, 4, 200, 5),
    (128, 2, 4, 2),
    (0, 2, 3, None),
]


@pytest.mark.parametrize("impl", ["reference", *OP.candidates])
@pytest.mark.parametrize("tokens, per_token, experts, used", SHAPES)
def test_sort_is_numpys_stable_argsort(tokens, per_token, experts, used, impl):
    ids = random_ids(tokens, per_token, experts, used)
    slot_n, row_of_slot, offsets = part(impl).sort(ids, experts)
    flat = ids.cpu().reshape(-1).numpy()
    want = np.argsort(flat, kind="stable")
    np.testing.assert_array_equal(slot_n.cpu().numpy(), want)
    np.testing.assert_array_equal(row_of_slot.cpu().numpy()[want], np.arange(flat.size))
    np.testing.assert_array_equal(offsets.cpu().numpy(), np.bincount(flat, minlength=experts).cumsum())
    assert offsets.dtype == torch.int32 and offsets.is_contiguous()


@pytest.mark.parametrize("weighted", [True, False])
def test_slabs_of_tokens_combine_to_the_same_bits_and_hold_no_rows_in_float32(weighted, monkeypatch):
    tokens, per_token, width = 300, 3, 40
    ids = random_ids(tokens, per_token, 20)
    _, row_of_slot, _ = reference.sort(ids, 20)
    rows = torch.randn(tokens * per_token, width, device=DEVICE).bfloat16()
    weight = torch.rand(tokens * per_token, device=DEVICE) if weighted else None
    whole, slabs = (torch.ones(tokens, width, device=DEVICE) for _ in range(2))
    reference.combine(rows, row_of_slot, weight, whole)
    monkeypatch.setattr(reference, "SLAB_BYTES", 7 * per_token * width * 4)  # 7 does not divide 300
    with LargestFloat32() as seen:
        reference.combine(rows, row_of_slot, weight, slabs)
    assert torch.equal(whole, slabs) and seen.bytes <= reference.SLAB_BYTES


def test_slabs_of_rows_go_back_to_the_same_bits_and_hold_no_rows_in_float32(monkeypatch):
    tokens, per_token, width = 300, 3, 40
    slot_n, _, _ = reference.sort(random_ids(tokens, per_token, 20), 20)
    n = tokens * per_token
    dy, rows = (torch.randn(count, width, device=DEVICE).bfloat16() for count in (tokens, n))
    weight = torch.rand(n, device=DEVICE)
    whole, slabs = ((torch.empty_like(rows), torch.empty(n, device=DEVICE)) for _ in range(2))
    reference.combine_backward(dy, rows, slot_n, per_token, weight, *whole)
    monkeypatch.setattr(reference, "SLAB_BYTES", 7 * width * 4)  # 7 does not divide 900
    with LargestFloat32() as seen:
        reference.combine_backward(dy, rows, slot_n, per_token, weight, *slabs)
    assert all(map(torch.equal, whole, slabs)) and seen.bytes <= reference.SLAB_BYTES


class LargestFloat32(TorchDispatchMode):
    """Bytes of the largest float32 tensor that holds rows."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dtype == torch.float32 and out.shape[1:] > (1,):
            self.bytes = max(self.bytes, out.nbytes)
        return out


def test_control_arm_an_unstable_order_is_seen():
    flat = random_ids(130, 3, 70).cpu().reshape(-1).numpy()
    reversed_ties = np.lexsort((-np.arange(flat.size), flat))
    assert (flat[reversed_ties] == np.sort(flat)).all() and (
        reversed_ties != np.argsort(flat, kind="stable")
    ).any()


@pytest.mark.parametrize(
    "tokens, per_token, experts, used, width, impl",
    [
        # Triton's interpreter takes a second a shape: here one with a block's edge in each direction
        pytest.param(*shape, width, impl, marks=[pytest.mark.nightly] * (impl == "triton" and not kept))
        for shape, width, impl in product(SHAPES, (1, 37, 1030), ["reference", *OP.candidates])
        for kept in [(shape, width) in (((65, 4, 200, 5), 37), ((0, 2, 3, None), 37))]
    ],
)
def test_gather_combine_and_their_gradients(tokens, per_token, experts, used, width, impl):
    here = part(impl)
    torch.manual_seed(0)
    ids, x = random_ids(tokens, per_token, experts, used), torch.randn(tokens, width, device=DEVICE)
    slot_n, row_of_slot, _ = here.sort(ids, experts)
    token_n = slot_n // per_token
    wide = torch.full((len(slot_n), width + 3), 7.0, device=DEVICE)
    here.gather(x, slot_n, per_token, wide)
    assert torch.equal(wide[:, :width], x[token_n]) and bool((wide[:, width:] == 7).all())

    weights, rows = torch.rand(tokens, per_token, device=DEVICE), wide[:, :width]
    rows64, weights64 = (t.double().requires_grad_() for t in (rows, weights))
    y64 = torch.zeros(tokens, width, dtype=torch.float64, device=DEVICE).index_add(
        0, token_n, rows64 * weights64.reshape(-1)[slot_n, None]
    )
    y = torch.ones(tokens, width, device=DEVICE)
    here.combine(rows, row_of_slot, weights.reshape(-1)[slot_n], y)  # adds to what is there
    torch.testing.assert_close(y - 1, y64.float(), rtol=1e-5, atol=1e-5)
    plain = torch.zeros(tokens, width, device=DEVICE)
    here.combine(rows, row_of_slot, None, plain)
    torch.testing.assert_close(
        plain, torch.zeros_like(plain).index_add(0, token_n, rows), rtol=1e-5, atol=1e-5
    )

    dy = torch.randn_like(x)
    drows64, dweights64 = torch.autograd.grad(y64, (rows64, weights64), dy.double())
    drows, dweight_n = torch.empty_like(rows), torch.empty(len(slot_n), device=DEVICE)
    here.combine_backward(dy, rows, slot_n, per_token, weights.reshape(-1)[slot_n], drows, dweight_n)
    torch.testing.assert_close(drows, drows64.float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        dweight_n[row_of_slot].view(tokens, per_token), dweights64.float(), rtol=1e-5, atol=2e-5
    )


@pytest.mark.parametrize("impl", ["reference", *OP.candidates])
@pytest.mark.parametrize("dtype", DTYPES)
def test_there_and_back_is_the_sum_of_weights_and_repeats_its_bits(impl, dtype):
    part(impl, dtype)
    torch.manual_seed(0)
    ids, x = random_ids(20, 4, 9), torch.randn(20, 33).to(DEVICE, dtype).requires_grad_()
    weights, dy = torch.rand(20, 4, device=DEVICE, requires_grad=True), torch.randn(20, 33).to(DEVICE, dtype)
    y, offsets = token_permute(x, ids, weights, 9, impl)
    again, _ = token_permute(x, ids, weights, 9, impl)
    assert torch.equal(y, again) and int(offsets[-1]) == 80
    dx, dweights = torch.autograd.grad(y, (x, weights), dy)
    step = 2**-7 if dtype == torch.bfloat16 else 1e-6  # rows, and their sum, are rounded once each
    torch.testing.assert_close(
        y.double(), x.double() * weights.double().sum(1, keepdim=True), rtol=step, atol=step
    )
    torch.testing.assert_close(
        dx.double(), dy.double() * weights.double().sum(1, keepdim=True), rtol=step, atol=step
    )
    torch.testing.assert_close(
        dweights.double(), (dy.double() * x.double()).sum(1, keepdim=True).expand(20, 4), rtol=1e-5, atol=1e-5
    )


def test_the_reference_is_exact_in_float64_and_buckets_cover_the_cases():
    ids, x = random_ids(5, 2, 3), torch.randn(5, 3, dtype=torch.float64, device=DEVICE, requires_grad=True)
    weights = torch.rand(5, 2, dtype=torch.float64, device=DEVICE, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: token_permute(x, ids, w, 3, "reference")[0], (x, weights))
    generator = torch.Generator().manual_seed(0)
    for case in OP.cases[:2]:
        assert bucket(*case.inputs(torch.device("cpu"), torch.float32, generator)) == case.bucket


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("impl", ["reference", *OP.candidates])
def test_on_a_gpu_nothing_waits_for_the_device(impl):
    ids, x = random_ids(64, 4, 9), torch.randn(64, 40, device=DEVICE, requires_grad=True)
    weights = torch.rand(64, 4, device=DEVICE, requires_grad=True)
    token_permute(x, ids, weights, 9, impl)[0].sum().backward()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        token_permute(x, ids, weights, 9, impl)[0].sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
