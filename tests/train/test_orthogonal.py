"""Muon's arithmetic against torch.optim.Muon's and against the singular values that float64 gives."""

from __future__ import annotations

import pytest
import torch

from unfreeze.models.matrices import STEPS
from unfreeze.train.orthogonal import COEFFICIENTS, orthogonal, scale_of

torch_muon = pytest.importorskip("torch.optim._muon")


@pytest.mark.parametrize("shape", [(16, 16), (8, 40), (40, 8), (1, 7), (33, 1)])
def test_orthogonal_equals_torchs_to_the_bit(shape: tuple[int, int]):
    u = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    expected = torch_muon._zeropower_via_newtonschulz(u, COEFFICIENTS, STEPS, 1e-7)
    assert torch.equal(orthogonal(u, torch.bfloat16), expected)


def test_it_keeps_the_singular_vectors_and_makes_the_values_one():
    """In float64: O = U f(S) Vᵀ with f of each value by the same polynomial, and f(S) is in 0.65 .. 1.25."""
    u = torch.randn(24, 10, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    U, S, V = torch.linalg.svd(u, full_matrices=False)
    s = S / S.square().sum().sqrt()
    a, b, c = COEFFICIENTS
    for _ in range(STEPS):
        s = a * s + b * s**3 + c * s**5
    torch.testing.assert_close(orthogonal(u, torch.float64), U @ torch.diag(s) @ V, rtol=0, atol=1e-12)
    assert s.min() > 0.65 and s.max() < 1.25
    torch.testing.assert_close(
        orthogonal(u.float(), torch.float32).double(), U @ torch.diag(s) @ V, atol=1e-5, rtol=0
    )


def test_a_stack_is_orthogonalised_matrix_by_matrix():
    """Control arm: the same numbers as one tall matrix are another update."""
    stack = torch.randn(3, 12, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    stack[1] *= 1e-3  # an expert with few tokens moves as far as the others
    each = torch.stack([orthogonal(matrix, torch.float64) for matrix in stack])
    torch.testing.assert_close(orthogonal(stack, torch.float64), each, rtol=0, atol=1e-12)
    as_one = orthogonal(stack.flatten(0, 1), torch.float64).view_as(stack)
    assert (as_one - each).abs().max() > 0.1


def test_zeros_stay_zeros_and_nothing_is_nan():
    assert torch.equal(orthogonal(torch.zeros(4, 6), torch.bfloat16).float(), torch.zeros(4, 6))


@pytest.mark.parametrize(("name", "kind"), [("match_rms_adamw", "match_rms_adamw"), ("original", None)])
@pytest.mark.parametrize("shape", [(64, 16), (16, 64), (10, 10)])
def test_scales_equal_torchs(name: str, kind: str | None, shape: tuple[int, int]):
    assert scale_of(name, shape) == torch_muon._adjust_lr(1.0, kind, torch.Size(shape))  # type: ignore[arg-type]
    assert scale_of(name, (8, *shape)) == scale_of(name, shape)  # type: ignore[arg-type]


def test_match_rms_is_the_size_of_an_adamw_update():
    """Root mean square 0.2 to 0.4 of AdamW's usual update (arXiv:2502.16982, 2.2), for any shape."""
    for shape in ((256, 64), (64, 256), (128, 128)):
        o = orthogonal(torch.randn(shape, generator=torch.Generator().manual_seed(4)), torch.float32)
        rms = float((o * scale_of("match_rms_adamw", shape)).square().mean().sqrt())
        assert 0.13 < rms < 0.25
