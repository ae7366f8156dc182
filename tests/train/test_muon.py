"""Muon against torch.optim.Muon over 20 steps, beside torch's AdamW for the other weights; stacks, half
precision, the rate it reads back, what it saves."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from unfreeze.core.errors import ConfigError
from unfreeze.train import muon as module
from unfreeze.train.muon import Muon
from unfreeze.train.optim import AdamW
from unfreeze.train.orthogonal import MuonRule, scale_of

MATRICES = ("up.weight", "down.weight", "experts")
AS_TORCH = MuonRule(dtype=torch.bfloat16)


class Small(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embed = nn.Embedding(11, 8)
        self.up, self.down = nn.Linear(8, 20), nn.Linear(20, 8, bias=False)
        self.experts = nn.Parameter(torch.empty(3, 6, 8))
        self.norm = nn.LayerNorm(8)
        for p in self.parameters():
            p.data = torch.randn(p.shape, generator=generator).to(dtype)


def set_gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def torchs(model: nn.Module, *, decay: float, kind: str | None) -> list[torch.optim.Optimizer]:
    """torch's Muon of the matrices, of which each expert is one, and its AdamW of the others."""
    matrices = [p for n, p in model.named_parameters() if n in MATRICES and p.dim() == 2]
    others = [p for n, p in model.named_parameters() if n not in MATRICES]
    muon = torch.optim.Muon(matrices, lr=1.0, weight_decay=decay, momentum=0.95, adjust_lr_fn=kind)
    experts = torch.optim.Muon(
        [nn.Parameter(matrix.clone()) for matrix in model.experts.detach()],
        lr=1.0,
        weight_decay=decay,
        adjust_lr_fn=kind,
    )
    groups = [
        {"params": [p for p in others if p.dim() >= 2], "weight_decay": decay},
        {"params": [p for p in others if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [muon, experts, torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), foreach=False, fused=False)]


@pytest.mark.parametrize(
    ("scale", "kind"), [("match_rms_adamw", "match_rms_adamw"), ("original", "original")]
)
@pytest.mark.parametrize("max_norm", [0.0, 0.5])
def test_twenty_updates_equal_torchs(scale: str, kind: str, max_norm: float):
    model = Small()
    reference = copy.deepcopy(model)
    oracles = torchs(reference, decay=0.1, kind=kind)
    ours = Muon(model, MATRICES, rule=replace(AS_TORCH, scale=scale), weight_decay=0.1)  # type: ignore[arg-type]
    for step in range(20):
        rate = 1e-2 / (step + 1)
        for m in (model, reference):
            set_gradients(m, step)
        norm = torch.nn.utils.get_total_norm([p.grad for p in reference.parameters()])
        update = ours.update(rate, max_norm)
        assert update.clip_scale == pytest.approx(
            min(1.0, max_norm / float(norm)) if max_norm else 1.0, rel=1e-5
        )
        assert ours.learning_rate == rate
        for p in reference.parameters():
            p.grad.mul_(update.clip_scale)
        experts = oracles[1].param_groups[0]["params"]
        for matrix, gradient in zip(experts, reference.experts.grad, strict=True):
            matrix.grad = gradient
        for oracle in oracles:
            for group in oracle.param_groups:
                group["lr"] = rate
            oracle.step()
    reference.experts.data = torch.stack([matrix.detach() for matrix in oracles[1].param_groups[0]["params"]])
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        if name == "experts":  # batched products may round to the next bfloat16: 2^-7 of an entry below 1.2
            moved = 1.2 * scale_of(scale, p.shape) * sum(1e-2 / (step + 1) for step in range(20))  # type: ignore[arg-type]
            torch.testing.assert_close(p, q, rtol=0, atol=2**-7 * moved, msg=name)
        elif name in MATRICES:
            assert torch.equal(p, q), name  # the same operations in the same order
        else:
            torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7, msg=name)


def test_a_stack_taken_for_one_matrix_would_show():
    """Control arm of the test above: the experts as one tall matrix [18, 8] differ at once."""
    model, as_one = Small(), Small()
    for m in (model, as_one):
        set_gradients(m, 0)
    as_one.experts = nn.Parameter(as_one.experts.detach().flatten(0, 1))
    as_one.experts.grad = model.experts.grad.flatten(0, 1)
    for m in (model, as_one):
        Muon(m, MATRICES, rule=AS_TORCH).update(1e-2, 0.0)
    assert (as_one.experts.view(3, 6, 8) - model.experts).abs().max() > 1e-3


def test_float32_newton_schulz_is_the_same_update_but_for_bfloat16s_rounding():
    models = [Small(), Small()]
    before = copy.deepcopy(models[0])
    for model, dtype in zip(models, (torch.float32, torch.bfloat16), strict=True):
        set_gradients(model, 0)
        Muon(model, MATRICES, rule=MuonRule(dtype=dtype)).update(1e-2, 0.0)
    for name in MATRICES:
        exact, rounded, was = (m.get_parameter(name).detach() for m in (*models, before))
        assert 0 < (exact - rounded).norm() < 0.02 * (exact - was).norm()


def test_the_matrices_have_one_moment_and_the_others_two():
    ours = Muon(Small(), MATRICES)
    names = set(ours.tensors())
    for name, _ in Small().named_parameters():
        kinds = {"momentum"} if name in MATRICES else {"exp_avg", "exp_avg_sq"}
        assert {kind for kind in ("momentum", "exp_avg", "exp_avg_sq") if f"{kind}.{name}" in names} == kinds
        assert f"step.{name}" in names
    assert ours.settings["kind"] == "muon" and "kind" not in AdamW(Small()).settings


def test_bfloat16_weights_move_through_their_float32_master():
    """400 updates far below a bfloat16 unit in the last place: the master keeps them. Control arm: torch's
    Muon on the bfloat16 weight stays where it was."""
    model = nn.Linear(4, 4, bias=False).bfloat16()
    control = copy.deepcopy(model)
    for m in (model, control):
        nn.init.ones_(m.weight)
    ours = Muon(model, ["weight"], rule=AS_TORCH)
    alone = torch.optim.Muon(control.parameters(), lr=1e-5, weight_decay=0.0)
    for _ in range(400):
        for m in (model, control):
            m.weight.grad = torch.eye(4).bfloat16()
        ours.collect()
        ours.update(1e-5, 0.0)
        ours.zero_grad()
        alone.step()
    # 400 · 1e-5 · 0.2 · sqrt(4) · 0.7 .. 1.2, on the diagonal
    assert 0.9982 < ours.masters["weight"].diagonal().mean() < 0.9999
    assert ours.masters["weight"].dtype == torch.float32 and model.weight.dtype == torch.bfloat16
    assert torch.equal(model.weight, ours.masters["weight"].bfloat16())
    assert control.weight.eq(1.0).all()


def test_the_rate_is_read_from_what_the_update_moved(monkeypatch):
    """Control arms: matrices, and the others, that take a tenth of the rate they are given."""
    model, rule = Small(), MuonRule(adamw_rate=0.3)
    ours, apply = Muon(model, MATRICES, rule=rule), module.apply
    for step, rate in enumerate((3e-4, 2e-5, 1e-9)):
        set_gradients(model, step)
        ours.update(rate, 0.1)
        assert ours.learning_rate == pytest.approx(rate, rel=1e-12)
    with monkeypatch.context() as patch:
        patch.setattr(module, "apply", lambda m, o, rate, *more: apply(m, o, rate / 10, *more))
        set_gradients(model, 3)
        ours.update(3e-4, 0.1)
    assert ours.learning_rate == pytest.approx(3e-5, rel=1e-5)
    kernel = module.AdamW._apply
    monkeypatch.setattr(
        module.AdamW,
        "_apply",
        lambda self, due, others, rule: kernel(
            self, due, others, replace(rule, learning_rate=rule.learning_rate / 10)
        ),
    )
    set_gradients(model, 4)
    ours.update(3e-4, 0.1)
    assert ours.learning_rate == pytest.approx(3e-5, rel=1e-5)


def test_a_matrix_that_no_token_reached_stays():
    model = Small()
    before = model.down.weight.detach().clone()
    ours = Muon(model, MATRICES, weight_decay=0.5)
    set_gradients(model, 0)
    model.down.weight.grad = None
    ours.update(1e-2, 0.0)
    assert torch.equal(model.down.weight, before) and not ours.tensors()["momentum.down.weight"].any()


def test_refusals():
    with pytest.raises(ConfigError, match="no matrix for Muon"):
        Muon(Small(), ())
    with pytest.raises(ConfigError, match=r"norm\.weight is no matrix"):
        Muon(Small(), ["norm.weight"])
