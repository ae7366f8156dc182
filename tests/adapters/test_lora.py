"""LowRank and ExpertLowRank against the merged weight in float64, and against peft's initial distribution."""

import hashlib
import math

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from unfreeze.adapters import lora
from unfreeze.adapters.lora import ExpertLowRank, LowRank
from unfreeze.config.lora import scale_of
from unfreeze.kernels.loops.cores import spread
from unfreeze.models.blocks.experts import Experts
from unfreeze.models.blocks.linear import Linear
from unfreeze.models.blocks.saved import Saved
from unfreeze.quant.int4 import Int4


def randomize(module: nn.Module) -> None:
    with torch.no_grad():
        for index, parameter in enumerate(module.parameters()):
            parameter.copy_(
                0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index))
            )


def test_linear_equals_the_merged_weight_in_float64_forward_and_gradient():
    linear = Linear(24, 40, dtype=torch.float32, device="cpu")
    linear.adapter = LowRank(24, 40, 4, 1.5)
    randomize(linear)
    x = torch.randn(9, 24, generator=torch.Generator().manual_seed(9), requires_grad=True)
    probe = torch.randn(9, 40, generator=torch.Generator().manual_seed(8))
    (linear(x) * probe).sum().backward()
    x64 = x.detach().double().requires_grad_()
    A, B = (p.detach().double().requires_grad_() for p in (linear.adapter.A, linear.adapter.B))
    y64 = x64 @ (linear.weight.detach().double() + 1.5 * B @ A).T
    (y64 * probe.double()).sum().backward()
    assert (linear(x) - y64).abs().max() < 1e-5  # fp32 sums of 24 products near 1
    for ours, oracle in (
        (x.grad, x64.grad),
        (linear.adapter.A.grad, A.grad),
        (linear.adapter.B.grad, B.grad),
    ):
        assert (ours - oracle).abs().max() < 2e-5


def experts_with_adapter(gate_up=True, down=True) -> Experts:
    experts = Experts(5, 16, 12, codec=None, dtype=torch.float32, device="cpu")
    experts.impl = "reference"
    experts.adapter = ExpertLowRank(
        5,
        16,
        12,
        gate_up_rank=3 if gate_up else None,
        down_rank=2 if down else None,
        scale=1.5,
        down_scale=0.5,
    )
    randomize(experts)
    for holder in (experts.gate_up_proj, experts.down_proj):
        holder.weight.requires_grad_(False)
    return experts


def merged_output(experts: Experts, x, ids, weights, swap_gate_and_up=False):
    """The float64 oracle: every expert's weights merged, one token at a time. -> (y, adapter leaves)."""
    leaves = {name: p.detach().double().requires_grad_() for name, p in experts.adapter.named_parameters()}
    gate_up, down = experts.gate_up_proj.weight.double(), experts.down_proj.weight.double()
    if "gate_up_A" in leaves:
        A, B = leaves["gate_up_A"], leaves["gate_up_B"]
        halves = (slice(3, 6), slice(0, 3)) if swap_gate_and_up else (slice(0, 3), slice(3, 6))
        gate_up = gate_up + 1.5 * torch.cat((B[:, :12] @ A[:, halves[0]], B[:, 12:] @ A[:, halves[1]]), dim=1)
    if "down_A" in leaves:
        down = down + 0.5 * leaves["down_B"] @ leaves["down_A"]
    rows = []
    for token in range(len(x)):
        row = 0
        for k in range(ids.shape[1]):
            gate, up = (gate_up[ids[token, k]] @ x[token]).chunk(2)
            row = row + weights[token, k] * (down[ids[token, k]] @ (nn.functional.silu(gate) * up))
        rows.append(row)
    return torch.stack(rows), leaves


@pytest.mark.parametrize(("gate_up", "down"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("impl", ["reference", "auto"])
def test_experts_equal_the_merged_weights_in_float64_forward_and_gradient(gate_up, down, impl):
    experts = experts_with_adapter(gate_up, down)
    experts.impl = impl
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(11, 16, generator=generator)
    ids = torch.stack([torch.randperm(5, generator=generator)[:2] for _ in range(11)])
    weights, probe = torch.rand(11, 2, generator=generator), torch.randn(11, 16, generator=generator)
    y = experts(x, ids, weights)
    (y * probe).sum().backward()
    y64, leaves = merged_output(experts, x.double(), ids, weights.double())
    (y64 * probe.double()).sum().backward()
    assert (y - y64).abs().max() < 2e-5
    for name, parameter in experts.adapter.named_parameters():
        assert (parameter.grad - leaves[name].grad).abs().max() < 5e-5, name
    if gate_up:  # control: gate's A taken for up's is seen
        wrong, _ = merged_output(experts, x.double(), ids, weights.double(), swap_gate_and_up=True)
        assert (y - wrong).abs().max() > 1e-2


@pytest.mark.parametrize("impl", ["reference", "auto"])
def test_expert_lora_on_int4_equals_merged_float64(impl):
    """The base stays packed; the oracle merges the adapter into the dequantized codes in float64."""
    codec, E, D, I, R = Int4(32), 4, 64, 32, 3
    experts = Experts(E, D, I, codec=codec, dtype=torch.float32, device="cpu")
    experts.impl = impl
    generator = torch.Generator().manual_seed(0)
    for holder, shape in ((experts.gate_up_proj, (E, 2 * I, D)), (experts.down_proj, (E, D, I))):
        for suffix, part in codec.quantize(0.2 * torch.randn(shape, generator=generator)).items():
            getattr(holder, suffix).copy_(part)
    experts.adapter = ExpertLowRank(E, D, I, gate_up_rank=R, down_rank=R, scale=2.0, down_scale=2.0)
    randomize(experts.adapter)
    x = torch.randn(9, D, generator=generator, requires_grad=True)
    ids = torch.stack([torch.randperm(E, generator=generator)[:2] for _ in range(9)])
    weights, probe = torch.rand(9, 2, generator=generator), torch.randn(9, D, generator=generator)
    y = experts(x, ids, weights)
    (y * probe).sum().backward()

    leaves = {name: p.detach().double().requires_grad_() for name, p in experts.adapter.named_parameters()}
    A, B = leaves["gate_up_A"], leaves["gate_up_B"]
    delta = 2.0 * torch.cat((B[:, :I] @ A[:, :R], B[:, I:] @ A[:, R:]), dim=1)
    gate_up = experts.gate_up_proj.value().dequantize().double() + delta
    down = experts.down_proj.value().dequantize().double() + 2.0 * leaves["down_B"] @ leaves["down_A"]
    x64 = x.detach().double().requires_grad_()
    gate, up = torch.einsum("tkod,td->tko", gate_up[ids], x64).chunk(2, dim=-1)
    y64 = torch.einsum("tkdi,tki,tk->td", down[ids], nn.functional.silu(gate) * up, weights.double())
    (y64 * probe.double()).sum().backward()
    for ours, oracle in [
        (y, y64),
        (x.grad, x64.grad),
        *((p.grad, leaves[n].grad) for n, p in experts.adapter.named_parameters()),
    ]:
        assert (ours - oracle).norm() < 1e-5 * oracle.norm()  # fp32 sums, relative to the whole


def test_initial_A_is_drawn_as_peft_draws_it_and_B_is_zero():
    ours = LowRank(256, 64, 16, 1.0)
    ours.reset(0, "model.layers.0.self_attn.q_proj")
    theirs = (
        get_peft_model(nn.Sequential(nn.Linear(256, 64)), PeftConfig(r=16, target_modules=["0"]))
        .base_model.model[0]
        .lora_A["default"]
        .weight
    )
    bound = 1 / math.sqrt(256)
    for A in (ours.A, theirs):
        assert A.abs().max() <= bound and A.abs().max() > 0.98 * bound
        # uniform; 4,096 draws: three standard errors are 0.015 bound
        assert abs(A.std().item() - bound / math.sqrt(3)) < 0.03 * bound
    assert not ours.B.any()


def test_initial_values_depend_on_seed_and_name_and_differ_between_experts():
    first, again, other = (
        ExpertLowRank(4, 8, 8, gate_up_rank=2, down_rank=2, scale=1.0, down_scale=1.0) for _ in range(3)
    )
    first.reset(1, "model.layers.1.mlp.experts")
    again.reset(1, "model.layers.1.mlp.experts")
    other.reset(1, "model.layers.2.mlp.experts")
    assert torch.equal(first.gate_up_A, again.gate_up_A) and not torch.equal(first.gate_up_A, other.gate_up_A)
    matrices = [*first.gate_up_A.unflatten(1, (2, 2)).flatten(0, 1)]
    assert all(not torch.equal(a, b) for i, a in enumerate(matrices) for b in matrices[:i])


class Copies(TorchDispatchMode):
    """Counts copies to another device, for each of which a GPU's host would wait."""

    def __init__(self):
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function._schema.name == "aten::copy_" and args[0].device != args[1].device:
            self.number += 1
        return function(*args, **(kwargs or {}))


def test_a_layer_is_drawn_by_all_cores_and_copied_once(monkeypatch):
    """Each matrix has the numbers of its own generator, however many cores draw; a device gets two copies."""
    name, E, ranks = "model.layers.1.mlp.experts", 6, {"gate_up_rank": 2, "down_rank": 3}
    monkeypatch.setattr(lora, "NUMBERS_PER_CORE", 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    adapter = ExpertLowRank(E, 8, 12, **ranks, scale=1.0, down_scale=1.0)
    adapter.reset(1, name)
    for e in range(E):
        parts = {
            "gate_proj": adapter.gate_up_A[e, :2],
            "up_proj": adapter.gate_up_A[e, 2:],
            "down_proj": adapter.down_A[e],
        }
        for matrix, A in parts.items():
            alone = LowRank(A.shape[1], 4, A.shape[0], 1.0)
            alone.reset(1, f"{name}.{e}.{matrix}")
            assert torch.equal(A, alone.A)

    elsewhere = ExpertLowRank(E, 8, 12, **ranks, scale=1.0, down_scale=1.0, device="meta")
    with Copies() as copies:
        elsewhere.reset(1, name)
    assert copies.number == 2
    with Copies() as copies:  # control arm: one by one
        for A in elsewhere.down_A.detach():
            A.copy_(torch.zeros(A.shape))
    assert copies.number == E


def test_one_thread_and_two_draw_the_numbers_of_each_matrix_own_generator(monkeypatch):
    """uniform within ±1/sqrt(in) from a generator seeded by the first 63 bits of sha256("seed:name")."""
    name, shares = "model.layers.1.mlp.experts", []
    monkeypatch.setattr(lora, "NUMBERS_PER_CORE", 8)
    monkeypatch.setattr(lora, "spread", lambda parts, work: (shares.append(len(parts)), spread(parts, work)))
    drawn, threads = {}, torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            adapter = ExpertLowRank(5, 8, 12, gate_up_rank=2, down_rank=3, scale=1.0, down_scale=1.0)
            adapter.reset(7, name)
            drawn[count] = adapter
    finally:
        torch.set_num_threads(threads)
    assert shares == [1, 1, 2, 2]  # two threads did draw

    for e in range(5):
        for matrix, rows in (("gate_proj", slice(2)), ("up_proj", slice(2, 4)), ("down_proj", slice(3))):
            digest = hashlib.sha256(f"7:{name}.{e}.{matrix}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            bound = 1 / math.sqrt(12 if matrix == "down_proj" else 8)
            found = [a.down_A[e] if matrix == "down_proj" else a.gate_up_A[e, rows] for a in drawn.values()]
            alone = torch.empty(found[0].shape).uniform_(-bound, bound, generator=generator)
            assert all(torch.equal(A, alone) for A in found)


def test_scale_is_alpha_over_r_or_its_root():
    assert scale_of(16, 32, "alpha/r") == 2 and scale_of(16, 32, "alpha/sqrt(r)") == 8


def test_bf16_activations_get_fp32_gradients():
    linear = Linear(8, 8, dtype=torch.bfloat16, device="cpu")
    torch.nn.init.zeros_(linear.weight)
    linear.adapter = LowRank(8, 8, 2, 1.0)
    linear.adapter.reset(0, "x")
    y = linear(torch.ones(3, 8, dtype=torch.bfloat16))
    y.float().sum().backward()
    gradient = linear.adapter.B.grad
    assert y.dtype == torch.bfloat16 and gradient.dtype == torch.float32 and gradient.any()


@pytest.mark.parametrize("kept", ["nothing", "output", "unread"])
def test_a_recomputed_linear_has_the_gradients_of_one_visit(kept):
    """The first visit saves y with its update, or leaves it out; the second makes the gradients."""
    linear = Linear(24, 40, dtype=torch.float32, device="cpu")
    linear.adapter = LowRank(24, 40, 4, 1.5)
    randomize(linear)
    linear.weight.requires_grad_(False)
    x = torch.randn(9, 24, generator=torch.Generator().manual_seed(9))
    probe = torch.randn(9, 40, generator=torch.Generator().manual_seed(8))
    saved = Saved(linear=True, unread=kept == "unread")
    reuse = {"nothing": None, "output": saved.reuse, "unread": saved.skip}[kept]

    def gradients(reuse):
        leaf = x.clone().requires_grad_()
        linear.zero_grad()
        y = linear(leaf, reuse)
        (y * probe).sum().backward()
        return y.detach(), leaf.grad, linear.adapter.A.grad.clone(), linear.adapter.B.grad.clone()

    want = gradients(None)
    with torch.no_grad():
        first = linear(x, reuse)
    saved.second = True
    again = gradients(reuse)
    assert torch.equal(first, want[0])
    assert torch.equal(again[0], torch.zeros_like(first) if kept == "unread" else first)
    for ours, oracle in zip(again[1:], want[1:], strict=True):
        assert torch.equal(ours, oracle)
    assert not saved.values
