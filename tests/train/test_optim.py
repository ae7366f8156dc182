"""AdamW against torch.optim.AdamW (the unfused loop) with torch's clipping; master weights and the finite
check with control arms."""

from __future__ import annotations

import copy
import math
import weakref
from dataclasses import replace

import pytest
import torch
from torch import nn

from unfreeze.core.errors import ConfigError, UserError
from unfreeze.train import optim
from unfreeze.train.optim import AdamW, NonFinite


def make_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model = nn.ModuleDict({"linear": nn.Linear(6, 5), "norm": nn.LayerNorm(5), "frozen": nn.Linear(3, 3)})
    model["stack"] = nn.ParameterList([nn.Parameter(torch.randn(3, 4, 2))])
    model["frozen"].requires_grad_(False)
    return model.to(dtype)


def set_gradients(model: nn.Module, step: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for p in model.parameters():
        if p.requires_grad:
            p.grad = (torch.randn(p.shape, generator=generator) * scale).to(p.dtype)


@pytest.mark.parametrize("max_norm", [0.0, 0.5, 1e3])
def test_twenty_updates_equal_torch(max_norm: float):
    model = make_model()
    reference = copy.deepcopy(model)
    trainable = [p for p in reference.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    oracle = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), foreach=False, fused=False)
    ours = AdamW(model, weight_decay=0.1)
    for step in range(20):
        rate = 1e-2 / (step + 1)
        for m in (model, reference):
            set_gradients(m, step)
        expected_norm = torch.nn.utils.clip_grad_norm_(trainable, max_norm or math.inf)
        for group in oracle.param_groups:
            group["lr"] = rate
        oracle.step()
        update = ours.update(rate, max_norm)
        assert update.grad_norm == pytest.approx(expected_norm.item(), rel=1e-6)
        assert update.clip_scale == pytest.approx(
            min(1.0, max_norm / update.grad_norm) if max_norm else 1.0, rel=1e-5
        )
        assert ours.learning_rate == rate
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7, msg=name)


@pytest.mark.parametrize("moments", ["float32", "int8"])
def test_the_rate_is_read_from_what_the_update_moved(moments, monkeypatch):
    """Control arm: a kernel that takes a tenth of the rate it is given shows, clipped or not; the number that
    was meant would hide it."""
    model = make_model()
    ours, kernel = AdamW(model, moments=moments), optim.kernel.adamw
    for step, (rate, max_norm) in enumerate([(3e-4, 0.0), (2e-5, 0.1), (1e-9, 1e-3)]):
        set_gradients(model, step)
        ours.update(rate, max_norm)
        assert ours.learning_rate == rate

    def a_tenth(updates, rule, *rest):
        return kernel(updates, replace(rule, learning_rate=rule.learning_rate / 10), *rest)

    monkeypatch.setattr(optim.kernel, "adamw", a_tenth)
    set_gradients(model, 3)
    ours.update(3e-4, 0.1)
    assert ours.learning_rate == pytest.approx(3e-5, rel=1e-5)


def test_frozen_weights_have_no_state_and_stay():
    model = make_model()
    before = model["frozen"].weight.clone()  # type: ignore[index]
    optimizer = AdamW(model)
    set_gradients(model, 0)
    optimizer.update(0.1, 0.0)
    assert not any("frozen" in name for name in optimizer.tensors())
    assert torch.equal(model["frozen"].weight, before)  # type: ignore[index]


def test_weight_decay_falls_on_matrices_and_stacks_only():
    """With gradients 0 the update is the decay alone: w -= lr * decay * w."""
    model = make_model()
    nn.init.ones_(model["linear"].bias)  # type: ignore[index]
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    set_gradients(model, 0, scale=0.0)
    AdamW(model, weight_decay=0.5).update(0.1, 0.0)
    for name, p in model.named_parameters():
        decayed = name in ("linear.weight", "stack.0")
        torch.testing.assert_close(p.detach(), before[name] * (0.95 if decayed else 1.0), msg=name)


def test_a_vector_of_many_dimensions_is_not_decayed_and_a_matrix_of_one_row_is():
    """Kimi Linear's A_log [1, 1, H, 1]; LoRA's A of rank 1, [1, K]; a short convolution [C, 1, 4]."""
    shapes = {"A_log": (1, 1, 3, 1), "lora_A": (1, 3), "conv": (3, 1, 4)}
    model = nn.ParameterDict({name: nn.Parameter(torch.ones(shape)) for name, shape in shapes.items()})
    for p in model.values():
        p.grad = torch.zeros_like(p)
    AdamW(model, weight_decay=0.5).update(0.1, 0.0)
    assert {name: p.flatten()[0].item() for name, p in model.items()} == pytest.approx(
        {"A_log": 1.0, "lora_A": 0.95, "conv": 0.95}
    )


def test_bfloat16_weights_move_through_their_float32_master():
    """A rate of 1e-4 on weights of 1: each update is 1/40 of a bfloat16 ulp below 1. The master keeps it,
    bfloat16 alone doesn't."""
    with_master, without = nn.Linear(4, 4, bias=False).bfloat16(), nn.Linear(4, 4, bias=False).bfloat16()
    ours = AdamW(with_master, weight_decay=0.0)
    for p in (with_master.weight, without.weight):
        nn.init.ones_(p)
    ours.tensors()["master.weight"].fill_(1.0)
    control = torch.optim.AdamW(without.parameters(), lr=1e-4, weight_decay=0.0)
    for _ in range(200):
        for p in (with_master.weight, without.weight):
            p.grad = torch.ones_like(p)
        ours.collect()
        ours.update(1e-4, 0.0)
        control.step()
        ours.zero_grad()
    assert with_master.weight.dtype == torch.bfloat16
    assert with_master.weight.float().mean().item() == pytest.approx(0.98, abs=2**-8)
    assert without.weight.eq(1.0).all()


def test_bfloat16_gradients_are_accumulated_in_float32():
    model = nn.Linear(2, 2, bias=False).bfloat16()
    optimizer = AdamW(model)
    for _ in range(1000):
        model.weight.grad = torch.full_like(model.weight, 0.5)
        optimizer.collect()
    gradient = optimizer.gradient("weight")
    assert gradient is not None and gradient.dtype == torch.float32 and gradient.eq(500.0).all()
    # control arm: stuck at 128, where 0.5 is half a unit in the last place
    running = torch.zeros((), dtype=torch.bfloat16)
    for _ in range(1000):
        running += 0.5
    assert running.item() < 200


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_non_finite_gradient_is_named_and_nothing_moves(value: float):
    model = make_model()
    before = copy.deepcopy(model.state_dict())
    optimizer = AdamW(model)
    set_gradients(model, 0)
    model["norm"].weight.grad[2] = value  # type: ignore[index]
    with pytest.raises(NonFinite, match=r"1 of 5 parameters have a non-finite gradient; first: norm\.weight"):
        optimizer.update(0.1, 1.0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(
        not tensor.any() for name, tensor in optimizer.tensors().items() if not name.startswith("master")
    )


def test_overflow_of_the_norm_is_told_apart():
    model = make_model()
    set_gradients(model, 0, scale=1e30)
    with pytest.raises(NonFinite, match="their squares overflow"):
        AdamW(model).update(0.1, 1.0)


def test_nothing_to_train_is_refused():
    with pytest.raises(ConfigError, match="no parameter is trainable"):
        AdamW(nn.Linear(2, 2).requires_grad_(False))
    with pytest.raises(UserError, match="no gradient reached any of 2"):
        AdamW(nn.Linear(2, 2)).update(0.1, 1.0)


class Two:
    """A group of two processes that hold the same gradients; `look` is called at each exchange."""

    rank, size = 0, 2

    def __init__(self, look):
        self.look = look

    def sum_(self, tensors):
        self.look(tensors)
        for tensor in tensors:
            tensor.mul_(2)


def test_half_precision_gradients_make_room_for_their_sums(monkeypatch):
    """Bucket by bucket: when the last bucket is exchanged, the gradients of the first are gone."""
    monkeypatch.setattr("unfreeze.parallel.processes.collectives.BUCKET", 64)
    model = make_model(torch.bfloat16)
    ours = AdamW(model)
    set_gradients(model, 0)
    expected = {n: p.grad.float() * 2 for n, p in model.named_parameters() if p.grad is not None}
    gradients = [weakref.ref(p.grad) for p in model.parameters() if p.grad is not None]
    ours.collect()
    alive: list[int] = []
    ours.sum_gradients(Two(lambda tensors: alive.append(sum(ref() is not None for ref in gradients))))
    assert alive[0] == len(gradients) and alive[-1] <= 1 and alive == sorted(alive, reverse=True)
    for name, gradient in expected.items():
        assert torch.equal(ours.gradient(name), gradient) and ours.gradient(name).dtype == torch.float32
