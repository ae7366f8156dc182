"""The scan of states against a loop over documents in float64, and the Triton candidate against the reference; on
a CPU through Triton's interpreter."""

import importlib.util

import pytest
import torch

from unfreeze.kernels.state_scan import OP, WIDEST, Steps, reference, state_scan

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
COUNTS = (3, 3, 2, 1)
FEW = (2, 2, 1)  # in Triton's interpreter


def inputs(delta=True, channel=False, sizes=(5, 7, 6), dtype=torch.float64, device="cpu", counts=COUNTS):
    """(u, w, k, a, state, steps): two heads' chunks with C, k, v = sizes."""
    torch.manual_seed(0)
    (C, K, V), H, n = sizes, 2, sum(counts)
    drawn = [torch.randn(n, H, C, width, dtype=dtype) for width in (V, K, K)]
    a = torch.rand(n, H, K if channel else 1, 1, dtype=dtype)
    state = torch.randn(counts[0], H, K, V, dtype=dtype)
    learnt = [x.to(device).requires_grad_() for x in (*drawn, a, state)]
    learnt[1] = learnt[1] if delta else None
    return (*learnt, Steps.of(counts, device))


def by_document(u, w, k, a, state, steps):
    """The same, one document and one chunk after the other."""
    before, own, after = {}, {}, []
    first = [sum(COUNTS[:step]) for step in range(len(COUNTS))]
    for document in range(COUNTS[0]):
        S = state[document]
        for step in range(sum(count > document for count in COUNTS)):
            chunk = first[step] + document
            before[chunk] = S
            own[chunk] = u[chunk] if w is None else u[chunk] - w[chunk] @ S
            S = a[chunk] * S + k[chunk].mT @ own[chunk]
        after.append(S)
    order = range(sum(COUNTS))
    return torch.stack([before[c] for c in order]), torch.stack([own[c] for c in order]), torch.stack(after)


def gradients(function, arguments):
    """Gradients of a random function of all three results."""
    results = function(*arguments)
    torch.manual_seed(1)
    loss = sum((part * torch.randn(part.shape, dtype=torch.float64).to(part)).sum() for part in results)
    learnt = [x for x in arguments[:5] if x is not None]
    return [part.detach() for part in results], torch.autograd.grad(loss, learnt)


@pytest.mark.parametrize("channel", [False, True])
@pytest.mark.parametrize("delta", [True, False])
def test_equals_a_loop_over_documents(delta, channel):
    arguments = inputs(delta, channel)
    for got, want in zip(gradients(state_scan, arguments), gradients(by_document, arguments), strict=True):
        torch.testing.assert_close(got, list(want) if isinstance(got, list) else want, rtol=1e-10, atol=1e-10)


def test_control_a_state_that_goes_into_the_next_document_is_seen():
    arguments = inputs()
    wrong = Steps.of((3, 3, 3))  # the third document's state also takes the last chunk of the first
    with torch.no_grad():
        right, leaked = by_document(*arguments), reference.forward(*arguments[:5], wrong)
    assert (right[2] - leaked[2]).abs().max() > 1e-2


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize(
    "delta, channel, sizes",
    [
        (*kind, sizes)
        for kind in ((True, False), (True, True), (False, False))
        for sizes in ((16, 16, 16), (5, 7, 40), (20, 70, 17))  # the last: two halves of keys
    ]
    + [(True, True, (64, 100, 33))],
)
def test_triton_equals_the_reference(delta, channel, sizes):
    from unfreeze.kernels.state_scan import triton_cuda

    u, w, k, a, state, steps = inputs(delta, channel, sizes, torch.float32, DEVICE, FEW)
    with torch.no_grad():
        scaled = (u, None if w is None else w / sizes[1], k / sizes[1], a, state)
        got, want = (part.forward(*scaled, steps) for part in (triton_cuda, reference))
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        grads = [torch.randn_like(part) for part in want]
        got, want = (part.backward(*grads, *scaled[1:4], steps) for part in (triton_cuda, reference))
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_states_wider_than_the_kernels_two_halves_run_by_the_reference():
    """More than 128 keys would be left out of every product."""
    from unfreeze.kernels.state_scan.triton_cuda import KEYS

    can = OP.candidates["triton"].can
    assert not can("cuda", torch.float32, "wide") and WIDEST == 2 * KEYS
    refused = OP.candidates["triton"].refuses("cuda", torch.float32)
    assert can("cuda", torch.float32, "delta") or refused  # control
    arguments = inputs(sizes=(5, WIDEST + 1, 6))
    for got, want in zip(state_scan(*arguments), by_document(*arguments), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
