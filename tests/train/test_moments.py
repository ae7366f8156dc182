"""8-bit moments: what a code loses, that rounding is unbiased, that training follows float32's, and that a
resumed run draws the same numbers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from unfreeze.parallel.plan import MOMENT_BYTES
from unfreeze.train.moments import BLOCK, OCTAVES, PIECE, Int8, decode_m, decode_v, encode_m, encode_v
from unfreeze.train.optim import AdamW


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("count", [1, BLOCK, 3 * BLOCK + 5])
def test_a_code_is_within_one_step_of_its_number(count: int):
    m = torch.randn(count, generator=generator()) * torch.logspace(-6, 0, count)
    codes, largest = encode_m(m, generator(1))
    back, scale = decode_m(codes, largest), largest.repeat_interleave(BLOCK)[:count]
    # steps of c²: (2c + 1) / 127² of the largest, c = 127 sqrt(m / largest)
    assert ((back - m).abs() <= scale * (2 * 127 * (m.abs() / scale).sqrt() + 2.01) / 127**2 + 1e-12).all()
    v = m.square()
    codes, largest = encode_v(v, generator(1))
    back, scale = decode_v(codes, largest), largest.repeat_interleave(BLOCK)[:count]
    held = v > scale * 2.0**-OCTAVES
    assert ((back[held] / v[held]).log2().abs() <= OCTAVES / 254 * 1.01).all()
    assert (
        back[~held] >= v[~held]
    ).all()  # the floor is above: a second moment that is too small would be an update that is too large


def test_zero_stays_zero_and_the_largest_is_exact():
    x = torch.zeros(2 * BLOCK)
    x[3] = 0.7
    for encode, decode in ((encode_m, decode_m), (encode_v, decode_v)):
        assert torch.equal(decode(*encode(x, generator())), x)


def test_rounding_is_unbiased_and_to_nearest_would_stand_still():
    """v · 0.999 is 0.015 of a step: 2,000 decays make it e^-2."""
    v = torch.linspace(0.01, 1.0, BLOCK)
    v[-1] = 1e3  # the block's largest, whose scale the others share
    start, draw = v.clone(), generator(2)
    for _ in range(2000):
        v = decode_v(*encode_v(v, draw)) * 0.999
        v[-1] = 1e3
    ratio = (v / start)[:-1].log().mean().item()
    assert ratio == pytest.approx(-2.0, abs=0.1)
    codes = (
        255 + (start[:-1] / 1e3).log2() * (254 / OCTAVES)
    ).round()  # control arm: to nearest, a decayed number has the code it had
    assert torch.equal(
        (255 + (torch.exp2((codes - 255) * (OCTAVES / 254)) * 0.999).log2() * (254 / OCTAVES)).round(), codes
    )
    m = torch.full((BLOCK,), 0.01234)
    m[0] = 1.0
    drawn = torch.stack([decode_m(*encode_m(m, draw)) for _ in range(400)])[:, 1:]
    assert drawn.mean().item() == pytest.approx(0.01234, rel=0.005)


def fitted(
    moments, steps: int, model: nn.Module, optimizer: AdamW | None = None, first: int = 0
) -> tuple[AdamW, float]:
    optimizer = optimizer or AdamW(model, moments=moments)
    loss = torch.zeros(())
    for step in range(first, steps):
        x = torch.randn(64, 12, generator=generator(step))
        loss = (model(x) - torch.stack([x[:, 0] * x[:, 1], x[:, 2].sin()], 1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.collect()
        optimizer.update(5e-3, 1.0)
    return optimizer, loss.item()


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 64), nn.Tanh(), nn.Linear(64, 2)).to(dtype)


def test_training_follows_float32():
    (_, exact), (optimizer, ours) = fitted("float32", 400, network()), fitted("int8", 400, network())
    start = fitted("float32", 1, network())[1]
    assert exact < 0.3 * start and ours < exact + 0.05 * start
    assert (
        optimizer.settings["moments"] == "int8"
        and "moments" not in fitted("float32", 1, network())[0].settings
    )


def test_a_resumed_run_has_the_same_bits():
    whole = network()
    fitted("int8", 20, whole)
    model = network()
    optimizer, _ = fitted("int8", 11, model)
    saved = copy.deepcopy(optimizer.tensors())
    again = network()
    again.load_state_dict(model.state_dict())
    resumed = AdamW(again, moments="int8")
    for name, tensor in resumed.tensors().items():
        tensor.copy_(saved[name])
    fitted("int8", 20, again, resumed, first=11)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), again.parameters(), strict=True))


def test_it_takes_the_bytes_the_plan_says():
    state = Int8("w", torch.zeros(PIECE["cpu"] + BLOCK))
    held = sum(t.nbytes for name, t in state.tensors().items() if name != "step")
    assert held == MOMENT_BYTES["int8"] * (PIECE["cpu"] + BLOCK)
