"""A step on a device never makes the host wait but once, at its end.

On a CPU the device is "meta": it runs every branch that is not the CPU's, and it has no values, so whatever
asks for one (item, tolist, nonzero, a boolean mask, bincount, a copy to the host) raises. A dispatch mode
watches what "meta" lets pass: copies from the host that block, and the operations that synchronise only with
a shape that depends on values. On a GPU the same step runs under torch's own watch.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from unfreeze import models
from unfreeze.adapters import LoraConfig, attach
from unfreeze.core.batch import Batch
from unfreeze.kernels.expert_mlp import fused_expert_mlp
from unfreeze.kernels.expert_mlp.grouped import Grouped
from unfreeze.models.blocks import experts
from unfreeze.models.blocks.taps import Taps
from unfreeze.models.matrices import hidden_matrices
from unfreeze.models.queries import scalable
from unfreeze.objectives.cross_entropy import cross_entropy
from unfreeze.parallel.processes.collectives import ALONE
from unfreeze.quant.int4 import Int4
from unfreeze.train import step as step_module
from unfreeze.train.muon import Muon
from unfreeze.train.optim import AdamW
from unfreeze.train.qk_clip import LargestLogits, QkClip
from unfreeze.train.step import train_step

KIMI = {
    "model_type": "kimi_k2",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "routed_scaling_factor": 2.0,
}
QWEN = {
    "model_type": "qwen3_moe",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
}
WAITS = (
    "_local_scalar_dense",
    "item",
    "nonzero",
    "masked_select",
    "unique",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "bincount",
    "is_nonzero",
    "equal",
    "nonzero_static",
    "repeat_interleave",
)


class Watch(TorchDispatchMode):
    """Collects operations on `device` that make a CUDA host wait."""

    def __init__(self, device: str):
        super().__init__()
        self.device, self.found = device, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = function._schema.name.removeprefix("aten::")
        there = [
            t
            for t in tree_leaves((args, kwargs))
            if isinstance(t, torch.Tensor) and t.device.type == self.device
        ]
        if there and name in WAITS:
            self.found.append(name)
        out = function(*args, **kwargs)
        if self.device != "cpu" and name in ("_to_copy", "copy_") and isinstance(out, torch.Tensor):
            devices = {t.device.type for t in [*tree_leaves(args), out] if isinstance(t, torch.Tensor)}
            waits = not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
            if len(devices) > 1 and waits:
                self.found.append(f"{name} between {sorted(devices)}")
        return out


def batch_of(lengths: tuple[int, ...]) -> Batch:
    tokens = torch.arange(sum(lengths)) * 7 % 128
    starts = torch.tensor([sum(lengths[:i]) for i in range(len(lengths))])
    return Batch(
        tokens,
        tokens.roll(-1),
        torch.ones(len(tokens)),
        torch.cat([torch.arange(n) for n in lengths]),
        starts,
    )


def build(config: dict, device: str):
    shape = models.shape(config)
    model = models.build(
        shape,
        dtype=torch.bfloat16,
        device="cpu",
        codec_for=lambda name: Int4(32) if ".experts." in name else None,
    )
    models.initialize(model, 0)
    for name, buffer in model.named_buffers():  # codes and scales: any will do, NaN and infinity apart
        if name.endswith("weight_scale"):
            buffer.fill_(0.01)
        elif name.endswith("weight_packed"):
            buffer.random_(-(2**31), 2**31 - 1, generator=torch.Generator().manual_seed(1))
    attach(model, LoraConfig(rank=8), seed=0)
    return model.to(device)


@pytest.fixture
def grouped(monkeypatch):
    """The part for CUDA, on any device."""
    monkeypatch.setattr(experts, "expert_mlp", partial(with_part, Grouped()))


def with_part(part, x_TD, ids_TK, weights_TK, gate_up, down, factors=None, impl="auto", reuse=None, **rest):
    return fused_expert_mlp(x_TD, ids_TK, weights_TK, gate_up, down, factors, part, reuse, **rest)


class Two:
    """A group of two processes, of which the other one is not there."""

    rank, size = 0, 2

    def __init__(self):
        self.exchanges = 0

    def share(self, items):
        return list(items)

    def sum_(self, tensors):
        self.exchanges += 1


def dense(config: dict) -> models.Decoder:
    """A model whose every weight trains, without values."""
    return models.build(models.shape(config), dtype=torch.bfloat16, device="cpu").to("meta")


def meta_step(
    config, monkeypatch, recompute: str, objective=cross_entropy, group=ALONE, made=None
) -> tuple[list[str], list[int]]:
    """One step of a model without values -> (what would have waited, sizes of what was read)."""
    model, read = build(config, "meta") if made is None else dense(config), []
    optimizer = AdamW(model) if made is None else made(model)

    def numbers(tensor):
        read.append(tensor.numel())
        found = [1.0] * tensor.numel()
        tokens = float(sum(int(b.tokens_T.sum()) for b in batches))
        found[:4] = [20.0, 24.0 + 31.0, 0.0, group.size * tokens]
        return found

    monkeypatch.setattr(step_module, "_numbers", numbers)
    batches = [batch_of((16, 8)), batch_of((20, 4, 7))]
    watch = Watch("meta")
    with watch:
        train_step(
            model,
            optimizer,
            batches,
            objective,
            learning_rate=1e-3,
            max_norm=0.5,
            recompute=models.RECOMPUTE[recompute],
            group=group,
        )
    return watch.found, read


@pytest.mark.parametrize("recompute", ["layers", "selective", "nothing"])
@pytest.mark.parametrize("config", [KIMI, QWEN], ids=["kimi_k2", "qwen3_moe"])
def test_a_step_reads_once(config, recompute, grouped, monkeypatch):
    meta_step(config, monkeypatch, recompute)  # tables that are made once per process
    found, read = meta_step(config, monkeypatch, recompute)
    assert found == [] and len(read) == 1


def test_muon_and_qk_clip_never_wait(grouped, monkeypatch):
    """The update is part of the step; the clip comes after it, with the logits that the step left."""

    def muon(model):
        return Muon(model, hidden_matrices(model))

    meta_step(QWEN, monkeypatch, "selective", made=muon)
    found, read = meta_step(QWEN, monkeypatch, "selective", made=muon)
    assert found == [] and len(read) == 1

    model = dense(KIMI)
    heads = scalable(model)
    logits = LargestLogits(cross_entropy, list(heads))
    clip = QkClip(model, muon(model), logits, 100.0, ALONE)
    batch, watch = batch_of((16, 8)).to("meta"), Watch("meta")
    model.hidden(batch, taps=Taps(logits.taps))  # tables that are made once per process
    with watch:
        taps = Taps(logits.taps)
        logits(model.hidden(batch, taps=taps), model.lm_head, batch, taps.found)
        clip({})
    assert watch.found == []
    with watch, pytest.raises(RuntimeError, match="meta"):  # control arm: a clip that asks for a head over it
        bool((torch.ones(2, device="meta") > 1).any())


def test_a_step_of_several_processes_reads_once_too(grouped, monkeypatch):
    """Which parameters were reached, and whether a process was told to stop, come with the one read."""
    meta_step(KIMI, monkeypatch, "selective", group=Two())
    group = Two()
    found, read = meta_step(KIMI, monkeypatch, "selective", group=group)
    assert found == [] and len(read) == 1 and group.exchanges == 2  # a bucket of gradients, and the rest
    summed = AdamW.sum_gradients

    def waits(self, group):  # control arm: an exchange of its own that the host waits for
        reached = summed(self, group)
        torch.ones(len(reached), device="meta").tolist()
        return reached

    monkeypatch.setattr(AdamW, "sum_gradients", waits)
    with pytest.raises(NotImplementedError, match="meta"):
        meta_step(KIMI, monkeypatch, "selective", group=Two())


@pytest.mark.parametrize(
    "planted",
    [
        lambda hidden: float(hidden.sum()),
        lambda hidden: hidden.sum().tolist(),
        lambda hidden: hidden[hidden > 0],
        lambda hidden: torch.bincount(hidden.argmax(-1)),
        lambda hidden: hidden.cpu(),
        lambda hidden: hidden.argmax(-1).unique(),
        lambda hidden: (
            torch.tensor([1.0], device=hidden.device)
            if hidden.device.type != "meta"
            else torch.ones(1).to(hidden.device)
        ),
    ],
    ids=["float", "tolist", "mask", "bincount", "cpu", "unique", "blocking copy"],
)
def test_the_control_arm_is_seen(planted, grouped, monkeypatch):
    def objective(hidden_TD, lm_head, batch):
        planted(hidden_TD.detach())
        return cross_entropy(hidden_TD, lm_head, batch)

    try:
        found, _ = meta_step(KIMI, monkeypatch, "selective", objective)
    except (RuntimeError, NotImplementedError) as error:
        assert "meta" in str(error).lower()
    else:
        assert found


def generation_step(config) -> list[str]:
    """What would have waited in one step of generation within a fixed width, on a device without values."""
    model, watch = build(config, "meta"), Watch("meta")
    cache = model.new_cache(3, 32)
    with torch.no_grad():
        model.prefill(batch_of((6, 4, 9)).to("meta"), cache)
        tokens, positions = (torch.zeros(3, dtype=torch.int64, device="meta") for _ in range(2))
        with watch:
            model.step_within(tokens, positions, cache, 16)
    return watch.found


@pytest.mark.parametrize("config", [KIMI, QWEN], ids=["kimi_k2", "qwen3_moe"])
def test_a_step_of_generation_within_a_width_never_waits(config, grouped, monkeypatch):
    """What a CUDA graph needs. Control arm: positions that come back to the host on their way are seen."""
    generation_step(config)  # tables that are made once per process
    assert generation_step(config) == []
    within = models.Decoder.step_within
    monkeypatch.setattr(
        models.Decoder,
        "step_within",
        lambda self, t, p, cache, width: within(self, t, p.cpu().to(p.device), cache, width),
    )
    with pytest.raises(NotImplementedError, match="meta"):
        generation_step(config)


def test_the_expert_op_of_cuda_asks_for_no_value(grouped):
    """Forward and backward in bf16 with values, on the CPU."""
    model, batch = build(KIMI, "cpu"), batch_of((16, 8))
    mlp, watch = model.layers[1].mlp.experts, Watch("cpu")
    x = torch.randn(batch.num_tokens, 64, dtype=torch.bfloat16, requires_grad=True)
    ids = torch.randint(0, 8, (batch.num_tokens, 2))
    with watch:
        mlp(x, ids, torch.rand(batch.num_tokens, 2)).sum().backward()
    assert watch.found == [] and x.grad is not None and x.grad.isfinite().all()
    with watch:
        x.detach().nonzero()
    assert watch.found == ["nonzero"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.gpu
@pytest.mark.parametrize("config", [KIMI, QWEN], ids=["kimi_k2", "qwen3_moe"])
def test_a_step_on_a_gpu_waits_once(config, monkeypatch):
    model = build(config, "cuda")
    optimizer, batches = AdamW(model), [batch_of((16, 8)), batch_of((20, 4, 7))]
    arguments = {"learning_rate": 1e-3, "max_norm": 0.5, "recompute": models.selective}
    train_step(model, optimizer, batches, cross_entropy, **arguments)  # tables, self-checks, allocations

    def numbers(tensor):
        torch.cuda.set_sync_debug_mode("default")
        return tensor.tolist()

    monkeypatch.setattr(step_module, "_numbers", numbers)
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = train_step(model, optimizer, batches, cross_entropy, **arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert result.applied
