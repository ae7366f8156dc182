"""The CUDA candidates of attention. On CPU: flex's mask and padded's arithmetic against the explicit mask. On a GPU test_op holds all to it."""

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from unfreeze.kernels.attention import cuda, documents, reference_attention


def made(S, L, H, G, d, v):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(S, L, n, w, generator=g) for n, w in ((H, d), (G, d), (G, v))]


def exact(q, k, v, scale):
    starts = torch.arange(q.shape[0]) * q.shape[1]
    return reference_attention(*(x.double().flatten(0, 1) for x in (q, k, v)), starts, scale).unflatten(0, q.shape[:2])


@pytest.mark.filterwarnings("ignore:flex_attention called without")  # that is the point
@pytest.mark.parametrize("shape", [(2, 70, 4, 2, 24, 16), (1, 130, 2, 2, 32, 32)])
def test_padded_and_flex_equal_the_explicit_mask(shape, monkeypatch):
    monkeypatch.setattr(cuda, "_compiled", lambda: flex_attention)  # its CPU form: the same mask and scale, without compiling
    tensors = made(*shape)
    for function in (cuda.padded, cuda.flex):
        got = function(*tensors, 0.2)
        assert got.shape == (*shape[:3], shape[5])
        torch.testing.assert_close(got.double(), exact(*tensors, 0.2), atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_control_arm_a_mask_of_another_length_is_seen(monkeypatch):
    """With the diagonal one off the comparison above would fail."""
    monkeypatch.setattr(cuda, "_compiled", lambda: flex_attention)
    tensors = made(1, 70, 2, 2, 16, 16)
    shifted = cuda.flex(tensors[0], *(x.roll(1, 1) for x in tensors[1:]), 0.2)
    assert (shifted.double() - exact(*tensors, 0.2)).norm() > 0.1


def test_they_refuse_what_they_were_not_written_for():
    candidates = documents.OP.candidates
    for name in ("cudnn", "padded", "flex"):
        assert candidates[name].refuses("cpu", torch.bfloat16).startswith("device cpu")
    for name in ("cudnn", "padded"):
        assert candidates[name].refuses("cuda", torch.float32) and not candidates[name].refuses("cuda", torch.bfloat16)
    assert candidates["blocked"].refuses("cuda", torch.bfloat16) and candidates["blocked"].refuses("cpu", torch.float16)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("function", [cuda.cudnn, cuda.padded, cuda.flex])
@pytest.mark.parametrize("shape", [(2, 300, 8, 8, 192, 128), (1, 1000, 8, 2, 64, 64)])
def test_on_a_gpu_they_equal_the_explicit_mask(function, shape):
    tensors = [x.cuda().bfloat16() for x in made(*shape)]
    want = exact(*tensors, 0.1)
    assert (function(*tensors, 0.1).double() - want).norm() <= 0.01 * want.norm()
