"""linear_cross_entropy against F.cross_entropy on all logits in float64: each implementation, its gradients,
log-probabilities and blocks."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unfreeze.core.errors import ConfigError
from unfreeze.kernels import linear_cross_entropy as linear_cross_entropy_folder
from unfreeze.kernels.choice.choose import Choice
from unfreeze.kernels.linear_cross_entropy import (
    OP,
    DenseHead,
    block_cost,
    head_cross_entropy,
    linear_cross_entropy,
    numba_cpu,
    reference,
)
from unfreeze.kernels.linear_cross_entropy.blocks import (
    CPU_BLOCK_BYTES,
    MAX_BLOCK_ROWS,
    MIN_BLOCK_ROWS,
    least_rows,
    rows_per_block,
)
from unfreeze.kernels.loops import triton_options

N, D, V = 37, 24, 333  # 333 words: 20 whole vectors of 16 and 13 more
IMPLEMENTATIONS = ["reference", "numba"]


def inputs(
    dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    hidden, weight, bias = (torch.randn(size, generator=g) for size in ((N, D), (V, D), (V,)))
    # weights of both signs, as a policy gradient has
    targets, weights = (torch.randint(0, V, (N,), generator=g), torch.randn(N, generator=g))
    return (
        hidden.to(dtype).requires_grad_(),
        weight.to(dtype).requires_grad_(),
        bias.to(dtype).requires_grad_(),
        targets,
        weights,
    )


def exact(
    hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, list[Tensor]]:
    leaves = [x.detach().double().requires_grad_() for x in (hidden, weight, bias)]
    loss_N = F.cross_entropy(F.linear(*leaves), targets, reduction="none")
    total = (loss_N * weights.double()).sum()
    return total.detach(), -loss_N.detach(), list(torch.autograd.grad(total, leaves))


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("block_rows", [5, 37, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_log_probabilities_and_gradients_equal_float64(
    impl: str, block_rows: int | None, dtype: torch.dtype
):
    args = inputs(dtype)
    total, log_p, grads = exact(*args)
    loss, correct, got_log_p = linear_cross_entropy(*args, block_rows=block_rows, impl=impl)
    got = torch.autograd.grad(loss, args[:3])
    # bf16: logits of size 5 are rounded to 2^-9 of themselves, which is 1 % of a probability; float32: sums
    # of 333 numbers
    limit = 2e-2 if dtype == torch.bfloat16 else 2e-6
    assert abs(loss.item() - total.item()) <= limit * args[4].abs().sum().item() * 5
    assert (got_log_p.double() - log_p).norm() <= limit * log_p.norm()
    for ours, theirs in zip(got, grads, strict=True):
        assert ours.dtype == dtype
        assert (ours.double() - theirs).norm() <= limit * theirs.norm()
    wins = F.linear(*(x.detach() for x in args[:3])).argmax(-1) == args[3]
    assert correct.item() == pytest.approx((wins * args[4]).sum().item(), abs=1e-5)


def test_the_comparison_sees_a_wrong_gradient():
    """Control arm: softmax without its -1 at the target is far outside the tolerance of bf16."""
    args = inputs()
    _, _, grads = exact(*args)
    planted = (F.linear(*args[:3]).softmax(-1) * args[4][:, None]) @ args[1]
    assert (planted.double() - grads[0]).norm() > 0.1 * grads[0].norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_numba_loop_equals_the_reference_on_extreme_logits(dtype: torch.dtype):
    """Rows whose exponentials overflow float32 unless shifted, a masked word of -inf, and a target that is
    the largest."""
    z = torch.tensor(
        [[500.0, -500.0, 499.0] + [0.0] * 20, [-1e4] * 23, [3.0, float("-inf"), 1.0] + [0.5] * 20]
    ).to(dtype)
    targets, weights = torch.tensor([0, 5, 2]), torch.tensor([1.0, 0.5, -2.0])
    theirs, ours = (
        part.softmax_gradient(z.clone(), targets, weights, True) for part in (reference, numba_cpu)
    )
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-6, atol=1e-6)
    assert torch.equal(ours[1], theirs[1])
    torch.testing.assert_close(ours[2], theirs[2], rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("place", [0, 7, V - 1])
def test_a_nan_in_the_head_is_not_hidden(impl: str, place: int):
    hidden, weight, bias, targets, weights = inputs()
    with torch.no_grad():
        weight[place] = math.nan
    targets[targets == place] = (place + 1) % V
    loss, _, _ = linear_cross_entropy(hidden, weight, bias, targets, weights, impl=impl)
    assert math.isnan(loss.item()) and torch.autograd.grad(loss, hidden)[0].isnan().all()


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_many_blocks_lose_nothing_of_a_bfloat16_gradient(impl: str):
    """2048 rows with the same hidden state and target: each block adds the same small number to the head's
    gradient."""
    hidden, weight = (
        torch.full((2048, 8), 0.5).bfloat16(),
        (torch.randn(64, 8) * 0.02).bfloat16().requires_grad_(),
    )
    targets, weights = torch.zeros(2048, dtype=torch.int64), torch.ones(2048)
    (many,), (one,) = (
        torch.autograd.grad(
            linear_cross_entropy(hidden, weight, None, targets, weights, rows, impl)[0], weight
        )
        for rows in (1, 2048)
    )
    torch.testing.assert_close(many, one, rtol=2**-7, atol=0)
    running = torch.zeros((), dtype=torch.bfloat16)  # control arm: the same sum in bf16 stands still
    for _ in range(2048):
        running += one[1, 0] / 2048
    assert abs(running.item() - one[1, 0].item()) > 0.3 * abs(one[1, 0].item())


def test_no_rows_give_zero():
    hidden, weight, bias, targets, weights = inputs(torch.bfloat16)
    loss, correct, log_p = linear_cross_entropy(
        hidden[:0], weight, bias, targets[:0], weights[:0], impl="numba"
    )
    loss.backward()
    assert (
        (loss.item(), correct.item(), log_p.numel()) == (0.0, 0.0, 0)
        and weight.grad is not None
        and not weight.grad.any()
    )


class Bounded(nn.Module):
    """A head that is more than W h + b, and whose backward reads its own output (tanh's does)."""

    def __init__(self, weight: Tensor):
        super().__init__()
        self.weight, self.out_features = nn.Parameter(weight.detach().clone()), V

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight).tanh()


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_any_head_goes_by_its_own_backward(impl: str):
    hidden, weight, _, targets, weights = inputs()
    head = Bounded(weight)
    loss, _, _ = head_cross_entropy(hidden, head, targets, weights, 8, impl)
    got = torch.autograd.grad(loss, [hidden, head.weight])
    h, w = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    total = (F.cross_entropy((h @ w.T).tanh(), targets, reduction="none") * weights.double()).sum()
    for ours, theirs in zip(got, torch.autograd.grad(total, [h, w]), strict=True):
        assert (ours.double() - theirs).norm() <= 2e-6 * theirs.norm()


def test_a_hook_on_the_head_is_called():
    hidden, _, _, targets, weights = inputs()
    head, seen = nn.Linear(D, V, bias=False), []
    head.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    head_cross_entropy(hidden, head, targets, weights, 10)
    assert seen == [(10, V)] * 3 + [(7, V)]


def test_block_rows_follow_the_byte_budget_of_the_device():
    assert rows_per_block(10**6, 151_936, 2, "cpu", trained=False) == MIN_BLOCK_ROWS
    # one block: no float32 sum of the head's gradient
    assert rows_per_block(1024, 151_936, 2, "cpu", trained=True) == 1024
    assert rows_per_block(1200, 151_936, 2, "cpu", trained=True) == 600  # two even ones, not 1,104 and 96
    assert rows_per_block(10**6, 8192, 2, "cpu", trained=False) * 2 * 8192 <= CPU_BLOCK_BYTES["frozen"]
    assert rows_per_block(10**6, 163_840, 2, "cuda", trained=True) <= MAX_BLOCK_ROWS
    # float32 lays out the head anew for each block
    least = [
        least_rows(dtype, device) for dtype in (torch.float32, torch.bfloat16) for device in ("cpu", "cuda")
    ]
    assert least == [512, 128, 128, 128]
    assert rows_per_block(10**6, 151_936, 4, "cpu", False, least[0]) == 512
    assert block_cost(151_936, torch.float32, torch.device("cpu"), trained=False)[0] == 512


@pytest.mark.parametrize("factor, softcap, bias", [(1.0, None, False), (2.0, 3.0, True)])
def test_a_frozen_head_in_fewer_bits_is_multiplied_as_its_float32_copy_is(factor, softcap, bias):
    """By blocks, without a copy of the head or of the logits."""
    hidden, weight, bias_V, targets, weights = inputs()
    answers = []
    for held in (torch.bfloat16, torch.float32):
        rows = hidden.detach().float().requires_grad_()
        W = weight.detach().to(torch.bfloat16).to(held)
        head = nn.Module()
        head.dense_head = lambda W=W: DenseHead(W, bias_V.detach().float() if bias else None, factor, softcap)
        loss, correct, log_p = head_cross_entropy(rows, head, targets, weights, 10)
        loss.backward()
        answers.append((loss.detach(), correct, log_p, rows.grad))
    for held, copied in zip(*answers, strict=True):
        torch.testing.assert_close(held, copied, rtol=1e-5, atol=1e-6)


def test_the_plan_is_told_the_rows_and_bytes_of_a_block(monkeypatch):
    cpu = torch.device("cpu")
    for name, extra in (("numba", 0), ("reference", 8)):
        planted = Choice(name, "as planted", "as asked")
        monkeypatch.setattr(linear_cross_entropy_folder, "by_record", lambda *key, c=planted: c)
        assert block_cost(151_936, torch.bfloat16, cpu, trained=True) == (
            CPU_BLOCK_BYTES["trained"] // (2 * 151_936),
            2 + extra,
        )


def test_an_implementation_that_cannot_run_is_refused_by_name():
    args = tuple(x.double() if x.is_floating_point() else x for x in inputs())
    with pytest.raises(ConfigError, match="linear_cross_entropy cannot run as 'numba' here"):
        linear_cross_entropy(*args, impl="numba")
    assert set(OP.candidates) == {"numba", "triton"}


INTERPRETED = """
import torch
from unfreeze.kernels.linear_cross_entropy import reference, triton_cuda
g = torch.Generator().manual_seed(1)
z, targets, weights = torch.randn(6, 5000, generator=g) * 9, torch.randint(0, 5000, (6,), generator=g), torch.randn(6, generator=g)
theirs, ours = (part.softmax_gradient(z.clone(), targets, weights, True) for part in (reference, triton_cuda))
torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=1e-5)
assert torch.equal(ours[1], theirs[1])
torch.testing.assert_close(ours[2], theirs[2], rtol=1e-5, atol=1e-7)
"""


@pytest.mark.skipif(not triton_options.installed(), reason="triton is not installed")
def test_the_triton_kernel_equals_the_reference_in_its_interpreter():
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    if os.environ.get("TRITON_INTERPRET") == "1":  # without a GPU all tests of this process have it
        exec(INTERPRETED, {})
        return
    subprocess.run([sys.executable, "-c", INTERPRETED], check=True, env=environment, timeout=120)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_on_cuda_each_implementation_equals_float64(impl: str):
    args = inputs(torch.bfloat16)
    _, log_p, grads = exact(*args)
    there = [x.detach().cuda().requires_grad_(x.requires_grad) for x in args]
    loss, _, got_log_p = linear_cross_entropy(*there, impl=impl)
    assert (got_log_p.double().cpu() - log_p).norm() <= 2e-2 * log_p.norm()
    for ours, theirs in zip(torch.autograd.grad(loss, there[:3]), grads, strict=True):
        assert (ours.double().cpu() - theirs).norm() <= 2e-2 * theirs.norm()
