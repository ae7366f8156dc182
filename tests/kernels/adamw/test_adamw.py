"""adamw against torch.optim.AdamW in float64 and against its own reference: float32 and bf16 weights,
clipping, many tensors in one call."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from unfreeze.core.errors import ConfigError
from unfreeze.kernels.adamw import OP, AdamWRule, AdamWUpdate, adamw, bucket, numba_cpu

# on a CPU in Triton's interpreter (conftest.py)
DEVICE = {"triton": "cuda" if torch.cuda.is_available() else "cpu"}
IMPLEMENTATIONS = ["reference", "numba"] + (
    [] if OP.candidates["triton"].refuses(DEVICE["triton"], torch.float32) else ["triton"]
)
# within one vector, over pieces of 1,024 and over chunks, none of them whole
SIZES = [(3, 5), (1,), (33,), (1025, 3), (numba_cpu.CHUNK + 7,)]


def updates(half: bool, steps: int = 1, seed: int = 0, impl: str = "") -> list[AdamWUpdate]:
    g = torch.Generator().manual_seed(seed)
    made = []
    for number, size in enumerate(SIZES):
        master, gradient, m, v = (torch.randn(size, generator=g) for _ in range(4))
        m, v = (torch.zeros(size), torch.zeros(size)) if steps == 1 else (0.1 * m, v.square())
        master, gradient, m, v = (x.to(DEVICE.get(impl, "cpu")) for x in (master, gradient, m, v))
        weight = master.bfloat16() if half else None
        made.append(
            AdamWUpdate(
                master, gradient.bfloat16() if half else gradient, m, v, weight, 0.1 * (number % 2), steps
            )
        )
    return made


def towards_zero(x: Tensor) -> Tensor:
    """bf16 as Triton's interpreter rounds it; a GPU rounds to nearest even."""
    return (x.view(torch.int32) & -(1 << 16)).view(torch.float32).bfloat16()


def exact(u: AdamWUpdate, rule: AdamWRule) -> Tensor:
    """torch.optim.AdamW in float64, unfused, from the same state."""
    w = torch.nn.Parameter(u.master.double())
    oracle = torch.optim.AdamW(
        [w],
        lr=rule.learning_rate,
        betas=rule.betas,
        eps=rule.eps,
        weight_decay=u.weight_decay,
        foreach=False,
        fused=False,
    )
    oracle.state[w] = {
        "step": torch.tensor(u.step - 1.0),
        "exp_avg": u.exp_avg.double(),
        "exp_avg_sq": u.exp_avg_sq.double(),
    }
    w.grad = u.gradient.double() * rule.gradient_scale
    oracle.step()
    return w.detach()


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(("half", "steps", "scale"), itertools.product([False, True], [1, 7], [1.0, 0.25]))
def test_a_step_equals_torchs_in_float64(impl: str, half: bool, steps: int, scale: float):
    rule = AdamWRule(1e-2, (0.9, 0.95), 1e-8, scale)
    made = updates(half, steps, impl=impl)
    expected = [exact(u, rule) for u in made]
    before = [(u.gradient.clone(), u.exp_avg.abs() + (u.gradient * scale).abs()) for u in made]
    adamw(made, rule, impl)
    for u, want, (gradient, summed) in zip(made, expected, before, strict=True):
        # one rounding of the weight (6e-8 of it), and a few of what the first moment was summed from, which a
        # small second moment magnifies
        size = rule.learning_rate / (1 - 0.9**steps) * summed / (u.exp_avg_sq / (1 - 0.95**steps)).sqrt()
        assert ((u.master.double() - want).abs() <= 1.2e-7 * want.abs() + 4e-7 * size).all()
        assert torch.equal(u.gradient, gradient)
        rounded = (
            towards_zero(u.master) if impl == "triton" and DEVICE[impl] == "cpu" else u.master.bfloat16()
        )
        assert u.weight is None or torch.equal(u.weight, rounded)


def test_the_comparison_sees_a_forgotten_correction():
    """Control arm: without 1 - b2^t under the root the first steps are far too small."""
    (u, *_), rule = updates(False), AdamWRule(1e-2, (0.9, 0.95), 1e-8)
    before, want = u.master.clone(), exact(u, rule)
    adamw([u], AdamWRule(1e-2 * (1 - 0.95) ** 0.5, (0.9, 0.95), 1e-8), "numba")
    assert (u.master - want).norm() > 0.5 * (before - want).norm()


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("steps", [12, pytest.param(50, marks=pytest.mark.nightly)])
def test_implementations_agree_after_many_steps(half: bool, steps: int):
    kept = []
    for impl in IMPLEMENTATIONS:
        made = updates(half, impl=impl)
        for step in range(1, steps + 1):
            g = torch.Generator().manual_seed(step)
            made = [
                replace(u, gradient=torch.randn(u.master.shape, generator=g).to(u.gradient), step=step)
                for u in made
            ]
            adamw(made, AdamWRule(1e-3, (0.9, 0.95), 1e-8, 0.7), impl)
        kept.append([x.cpu() for u in made for x in (u.master, u.exp_avg, u.exp_avg_sq)])
    for a, b in ((kept[0][i], other[i]) for other in kept[1:] for i in range(len(other))):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("impl", [name for name in IMPLEMENTATIONS if name != "reference"])
def test_a_call_for_many_tensors_equals_calls_for_each(impl: str):
    """Of both kinds in one list, with rates and decays of their own."""
    (together, alone), rule = (
        (updates(True, 3, impl=impl) + updates(False, 7, impl=impl) for _ in range(2)),
        AdamWRule(1e-3, (0.9, 0.95), 1e-8),
    )
    adamw(together, rule, impl)
    for u in alone:
        adamw([u], rule, impl)
    assert all(
        torch.equal(a.master, b.master) and torch.equal(a.exp_avg_sq, b.exp_avg_sq)
        for a, b in zip(together, alone, strict=True)
    )


def test_autograd_is_told_that_weights_changed():
    weight = torch.nn.Parameter(torch.ones(4))
    y = (weight * weight).sum()
    state = AdamWUpdate(weight.detach(), torch.ones(4), torch.zeros(4), torch.zeros(4), None, 0.0, 1)
    adamw([state], AdamWRule(0.1, (0.9, 0.95), 1e-8), "numba")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_what_the_loop_cannot_read_is_refused():
    (u, *_), rule = updates(False), AdamWRule(1e-2, (0.9, 0.95), 1e-8)
    wide = AdamWUpdate(*(x.double() for x in (u.master, u.gradient, u.exp_avg, u.exp_avg_sq)), None, 0.0, 1)
    with pytest.raises(ConfigError, match="adamw cannot run as 'numba' here"):
        adamw([wide], rule, "numba")
    with pytest.raises(ValueError, match="not contiguous"):
        numba_cpu.step(
            [
                AdamWUpdate(
                    torch.zeros(4, 6).t(),
                    torch.zeros(6, 4),
                    torch.zeros(6, 4),
                    torch.zeros(6, 4),
                    None,
                    0.0,
                    1,
                )
            ],
            rule,
        )
    assert bucket(updates(True), rule) == "small tensors, half precision weights" and {
        "numba",
        "triton",
    } <= set(OP.candidates)
