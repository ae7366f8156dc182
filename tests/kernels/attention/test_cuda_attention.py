"""The CUDA candidates of attention. On CPU: flex's mask and padded's arithmetic against the explicit mask. On
a GPU test_op holds all to it."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from unfreeze.kernels.attention import cuda, documents, reference_attention, sdpa


def made(S, L, H, G, d, v):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(S, L, n, w, generator=g) for n, w in ((H, d), (G, d), (G, v))]


def exact(q, k, v, scale):
    starts = torch.arange(q.shape[0]) * q.shape[1]
    return reference_attention(*(x.double().flatten(0, 1) for x in (q, k, v)), starts, scale).unflatten(
        0, q.shape[:2]
    )


@pytest.mark.filterwarnings("ignore:flex_attention called without")  # that is the point
@pytest.mark.parametrize("shape", [(2, 70, 4, 2, 24, 16), (1, 130, 2, 2, 32, 32)])
def test_padded_and_flex_equal_the_explicit_mask(shape, monkeypatch):
    # its CPU form: the same mask and scale, without compiling
    monkeypatch.setattr(cuda, "_compiled", lambda: flex_attention)
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


@pytest.mark.parametrize("length", [1, 100, 128, 129, 500, 1024])
def test_the_causal_mask_is_torchs_own(length):
    want = create_block_mask(lambda b, h, q, k: q >= k, None, None, length, length, device="cpu")
    got = cuda._causal(length, torch.device("cpu"))
    assert got.shape == want.shape and got.BLOCK_SIZE == want.BLOCK_SIZE
    for kind in ("kv", "full_kv", "q", "full_q"):
        ours, theirs = (blocks(mask, kind) for mask in (got, want))
        assert ours == theirs, kind
    assert torch.equal(got.to_dense(), want.to_dense())


def blocks(mask, kind):
    """The blocks that count, of each row of blocks."""
    numbers, indices = (getattr(mask, f"{kind}_{part}")[0, 0] for part in ("num_blocks", "indices"))
    return [sorted(row[:count].tolist()) for row, count in zip(indices, numbers.tolist(), strict=True)]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_mask_of_16384_tokens_takes_no_memory_by_their_square():
    """create_block_mask holds 10 bytes per pair: 2.7 GB here."""
    program = """if True:
        import torch
        from unfreeze.kernels.attention import cuda
        def peak():
            lines = open("/proc/self/status").read().splitlines()
            return int(next(line for line in lines if line.startswith("VmHWM")).split()[1])
        cuda._causal(256, torch.device("cpu"))
        before = peak()
        cuda._causal(16384, torch.device("cpu"))
        print(peak() - before)
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 100_000


class Squares(TorchDispatchMode):
    """Whether a tensor has two dimensions of `length`."""

    def __init__(self, length):
        super().__init__()
        self.length, self.seen = length, False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        shapes = [t.shape for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        self.seen |= any(list(shape).count(self.length) > 1 for shape in shapes)
        return out


def as_on_a_gpu(q, k, v, *, is_causal, scale, enable_gqa):
    """Which kernel torch takes in float32 on CUDA: flash never, the efficient one only where no heads are
    grouped (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp)."""
    if enable_gqa:
        return torch.ops.aten._scaled_dot_product_attention_math(
            q, k, v, None, 0.0, is_causal, scale=scale, enable_gqa=True
        )[0]
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        q, k, v, None, False, 0.0, is_causal, scale=scale
    )[0]


def test_grouped_heads_in_float32_hold_no_scores(monkeypatch):
    monkeypatch.setattr(F, "scaled_dot_product_attention", as_on_a_gpu)
    q, k, v = (torch.empty(2, 300, n, 64, device="meta") for n in (8, 2, 2))
    with Squares(300) as seen:
        assert sdpa.sdpa(q, k, v, 0.1).shape == q.shape
    assert not seen.seen
    with Squares(300) as seen:  # control arm: grouped
        sdpa.torch_attention(q, k, v, 0.1)
    assert seen.seen


def test_they_refuse_what_they_were_not_written_for():
    candidates = documents.OP.candidates
    for name in ("cudnn", "padded", "flex"):
        assert candidates[name].refuses("cpu", torch.bfloat16).startswith("device cpu")
    for name in ("cudnn", "padded"):
        assert candidates[name].refuses("cuda", torch.float32) and not candidates[name].refuses(
            "cuda", torch.bfloat16
        )
    assert candidates["blocked"].refuses("cuda", torch.bfloat16) and candidates["blocked"].refuses(
        "cpu", torch.float16
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("function", [cuda.cudnn, cuda.padded, cuda.flex])
@pytest.mark.parametrize("shape", [(2, 300, 8, 8, 192, 128), (1, 1000, 8, 2, 64, 64)])
def test_on_a_gpu_they_equal_the_explicit_mask(function, shape):
    tensors = [x.cuda().bfloat16() for x in made(*shape)]
    want = exact(*tensors, 0.1)
    assert (function(*tensors, 0.1).double() - want).norm() <= 0.01 * want.norm()
