"""The central claims of train/ once more with the real Decoder: a deepseek_v3 with routed experts, all
weights trained."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from unfreeze import models
from unfreeze.adapters import LoraConfig, attach
from unfreeze.core.batch import Batch
from unfreeze.models import Decoder
from unfreeze.objectives.cross_entropy import cross_entropy
from unfreeze.train.balance import LossFreeBalance
from unfreeze.train.fit import fit
from unfreeze.train.optim import AdamW
from unfreeze.train.run import Run
from unfreeze.train.schedule import Schedule
from unfreeze.train.state import start_or_resume
from unfreeze.train.step import train_step

CONFIG = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 32,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "initializer_range": 0.1,
}


def make_decoder(seed: int = 0) -> Decoder:
    model = models.build(models.shape(CONFIG), dtype=torch.float32, device="cpu")
    models.initialize(model, seed)
    return model


def session(
    tiny: SimpleNamespace, folder: Path, recompute: Any, until: int = 6
) -> tuple[list[float], dict[str, torch.Tensor], LossFreeBalance, list]:
    losses: list[float] = []
    loads: list[dict[int, list[int]]] = []

    def look(state: Any, result: Any) -> None:
        losses.append(result.loss)
        loads.append(result.expert_load)
        with torch.no_grad():
            state.model.hidden(tiny.make_batch([50], [50], 0))  # an evaluation between steps counts nowhere
        if state.step == until:
            os.kill(os.getpid(), signal.SIGINT)

    with Run(folder, {}) as run:
        model = make_decoder(seed=run.step)
        balance = LossFreeBalance(model, 0.01)
        state = start_or_resume(
            run, model, optimizer=AdamW(model), schedule=Schedule(1e-2, 6), after_update=[balance]
        )
        fit(state, tiny.endless(state.cursor, 2), cross_entropy, recompute=recompute, on_step=[look])
        return losses, {name: tensor.clone() for name, tensor in state.tensors().items()}, balance, loads


@pytest.mark.parametrize("recompute", [models.plain, models.keep_inputs])
def test_resume_is_exact_and_balance_acts_once_per_step(
    tiny: SimpleNamespace, tmp_path: Path, recompute: Any
):
    straight, expected, balance, loads = session(tiny, tmp_path / "straight", recompute)
    first, _, _, _ = session(tiny, tmp_path / "broken", recompute, until=3)
    second, tensors, _, _ = session(tiny, tmp_path / "broken", recompute)
    assert first + second == straight and len(first) == 3
    for name, tensor in expected.items():
        assert torch.equal(tensors[name], tensor), name
    assert straight[-1] < straight[0]
    assert balance.num_updates == 6
    assert [sum(load[1]) for load in loads] == [
        2 * 28 * 2
    ] * 6  # 2 micro-batches of 28 tokens, top-2; layer 0 is dense
    moved = sum(0.01 * (sum(load[1]) / 8 - torch.tensor(load[1])).sign() for load in loads)
    torch.testing.assert_close(balance.biases[1], moved, atol=1e-6, rtol=0)


def test_recompute_gives_the_gradients_and_the_routing_of_plain(tiny: SimpleNamespace):
    batches = [tiny.make_batch([9, 14, 5], [3, 6, 5], seed=i) for i in range(2)]
    results, gradients = [], []
    for recompute in (models.plain, models.keep_inputs):
        model = make_decoder()
        results.append(
            train_step(
                model,
                AdamW(model),
                batches,
                cross_entropy,
                learning_rate=1e-3,
                max_norm=0.0,
                recompute=recompute,
            )
        )
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert results[0].expert_load == results[1].expert_load and results[0].loss == results[1].loss
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-6, atol=1e-9, msg=name)


def test_the_blocked_loss_is_that_of_the_models_own_logits(tiny: SimpleNamespace):
    model, batch = make_decoder(), tiny.make_batch([9, 14, 5], [3, 6, 5], seed=1)
    loss = cross_entropy(model.hidden(batch), model.lm_head, batch, block_rows=4)
    loss.sum.backward()
    ours = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    expected = (
        F.cross_entropy(model.logits(model.hidden(batch)), batch.targets_T, reduction="none")
        * batch.weights_T
    ).sum()
    expected.backward()
    assert loss.sum.item() == pytest.approx(expected.item(), rel=1e-6)
    for name, p in model.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(ours[name], p.grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("recompute", [models.plain, models.keep_inputs])
@pytest.mark.parametrize("pieces", [2, 4])
def test_one_packed_batch_equals_its_documents_accumulated(
    tiny: SimpleNamespace, recompute: Any, pieces: int
):
    """docs/why/trust.md N3: packed or one by one, 1 to 4 micro-batches, skewed lengths, recomputed or not: one
    gradient to 1e-6."""
    lengths, supervised = [3, 30, 6, 17], [1, 29, 2, 4]
    documents = [
        tiny.make_batch([n], [k], seed=i) for i, (n, k) in enumerate(zip(lengths, supervised, strict=True))
    ]
    size = len(documents) // pieces
    gradients = []
    for batches in ([join(documents)], [join(documents[i : i + size]) for i in range(0, 4, size)]):
        model = make_decoder()
        train_step(
            model, AdamW(model), batches, cross_entropy, learning_rate=1e-3, max_norm=0.0, recompute=recompute
        )
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    for name, expected in gradients[0].items():
        assert (gradients[1][name] - expected).norm() <= 1e-6 * expected.norm() + 1e-9, name


def join(documents: list[Batch]) -> Batch:
    lengths = [d.num_tokens for d in documents]
    parts = [
        torch.cat([getattr(d, name) for d in documents])
        for name in ("tokens_T", "targets_T", "weights_T", "positions_T")
    ]
    return Batch(*parts, torch.tensor([sum(lengths[:i]) for i in range(len(lengths))]))


def lora_session(
    tiny: SimpleNamespace, folder: Path, until: int = 4, bug: bool = False
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """A bf16 base with fp32 adapters on every linear layer, as `unfreeze sft` trains it; its save holds no
    base weight."""
    losses: list[float] = []

    def look(state: Any, result: Any) -> None:
        losses.append(result.loss)
        assert all(
            p.grad is None or p.grad.dtype == torch.float32 for p in state.optimizer.parameters.values()
        )
        if state.step == until:
            os.kill(os.getpid(), signal.SIGINT)

    with Run(folder, {}) as run:
        model = models.build(models.shape(CONFIG), dtype=torch.bfloat16, device="cpu")
        models.initialize(model, 0)
        # the save's adapters must win over freshly made ones
        attach(model, LoraConfig(rank=4), seed=run.step)
        state = start_or_resume(run, model, optimizer=AdamW(model), schedule=Schedule(1e-2, 4))
        assert all("adapter." in name for name in state.optimizer.parameters)
        if bug and run.saved is not None:
            with torch.no_grad():
                for adapter in state.optimizer.parameters.values():
                    adapter.mul_(1 + 2**-10)
        fit(state, tiny.endless(state.cursor), cross_entropy, recompute=models.keep_inputs, on_step=[look])
        return losses, {name: tensor.clone() for name, tensor in state.tensors().items()}


def test_lora_on_a_bfloat16_base_resumes_bit_for_bit(tiny: SimpleNamespace, tmp_path: Path):
    straight, expected = lora_session(tiny, tmp_path / "straight")
    first, _ = lora_session(tiny, tmp_path / "broken", until=2)
    second, tensors = lora_session(tiny, tmp_path / "broken")
    assert first + second == straight and len(first) == 2
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())
    assert {name.split(".")[0] for name in tensors} == {"model", "optimizer"} and not any(
        "master" in name for name in tensors
    )
    lora_session(tiny, tmp_path / "control", until=2)
    # control arm: adapters off by a thousandth are noticed
    _, moved = lora_session(tiny, tmp_path / "control", bug=True)
    assert any(not torch.equal(moved[name], tensor) for name, tensor in expected.items())
