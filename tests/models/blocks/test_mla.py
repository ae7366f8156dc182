"""Latent attention absorbed into the space of its latents, against the same layer with keys and values
expanded, in float64's neighbourhood."""

import pytest
import torch
from torch.utils._pytree import tree_leaves

from unfreeze import models
from unfreeze.adapters import LoraConfig, attach
from unfreeze.core.batch import Batch
from unfreeze.evaluate.gap import TOLERANCE, log_probability_gap
from unfreeze.generate.engine import Engine, batch_of
from unfreeze.generate.sampling import Sampling
from unfreeze.kernels import packed_attention
from unfreeze.kernels.attention import reference_attention
from unfreeze.kernels.packed_attention import varlen
from unfreeze.models.blocks.attention import attention_bytes
from unfreeze.models.blocks.bytes import AttentionShape
from unfreeze.models.blocks.mla import MLA
from unfreeze.models.blocks.saved import Saved

CONFIG = {
    "model_type": "deepseek_v3",
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.2,
    "routed_scaling_factor": 1.5,
    "n_group": 1,
    "topk_group": 1,
}
PROMPTS = [[5, 17, 3, 42, 9, 8], [11], [7, 7, 23]]


def made(lora: bool, dtype: torch.dtype = torch.float32) -> models.Decoder:
    model = models.build(models.shape(CONFIG), dtype=dtype, device="cpu")
    models.initialize(model, 0)
    if lora:
        generator = torch.Generator().manual_seed(1)
        for site in attach(model, LoraConfig(rank=4, alpha=8), seed=0):
            for name, factor in site.adapter.named_parameters():
                if name.endswith("B"):  # zero at the start: it would add nothing
                    factor.data.copy_(torch.randn(factor.shape, generator=generator) * 0.3)
    return model


def packed(model: models.Decoder, sequences: list[list[int]]) -> torch.Tensor:
    """Logits at the last token of each sequence, all packed."""
    batch: Batch = batch_of(sequences)
    last = batch.starts_S + torch.tensor([len(s) - 1 for s in sequences])
    return model.logits(model.hidden(batch)[last])


def stepped(model: models.Decoder, sequences: list[list[int]]) -> torch.Tensor:
    """The same through the cache: all but the last token as prompts, then one step."""
    cache = model.new_cache(len(sequences), 16)
    model.prefill(batch_of([s[:-1] for s in sequences]), cache)
    return model.logits(model.step(torch.tensor([s[-1] for s in sequences]), cache))


@pytest.mark.parametrize("lora", [False, True])
@torch.no_grad()
def test_a_step_equals_the_packed_pass(lora):
    """float32, two layers: the order of a hundred-term sums differs, 1e-5 of logits of size 1 to 10."""
    model, sequences = made(lora), [[5, 17, 3, 42, 9, 8], [11, 2], [7, 7, 23, 1]]
    want = packed(model, sequences)
    assert want.abs().max() > 0.3
    torch.testing.assert_close(stepped(model, sequences), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lora", [False, True])
def test_sampled_log_probabilities_are_those_of_the_packed_pass(lora):
    gap = log_probability_gap(
        Engine(made(lora)), PROMPTS, Sampling(max_new_tokens=8, temperature=1.0, seed=3)
    )
    assert gap.max <= TOLERANCE <= 1e-4


@torch.no_grad()
def test_without_the_adapter_or_its_scale_the_step_is_another_model(monkeypatch):
    """Control arms: kv_b_proj's adapter left out, added without its scale, and only to the keys."""
    model, sequences = made(lora=True), [[5, 17, 3, 42, 9, 8], [11, 2], [7, 7, 23, 1]]
    want, right = packed(model, sequences), MLA._kv_b

    def unscaled(self):
        base, (out_HOq, in_qc) = right(self)
        return [base, (out_HOq / self.kv_b_proj.adapter.scale, in_qc)]

    def keys_only(self):
        base, (out_HOq, in_qc) = right(self)
        return [base, (out_HOq.index_fill(1, torch.arange(self.nope, out_HOq.shape[1]), 0.0), in_qc)]

    for wrong in (lambda self: right(self)[:1], unscaled, keys_only):
        monkeypatch.setattr(MLA, "_kv_b", wrong)
        assert (stepped(model, sequences) - want).abs().max() > 1e-3


@torch.no_grad()
def test_bf16_differs_from_float32_no_more_than_the_packed_pass_does():
    """Both round: the step must not round more than the form that training uses, up to half as much again for
    chance."""
    exact, sequences = made(lora=True), [[5, 17, 3, 42, 9, 8], [11, 2], [7, 7, 23, 1]]
    rounded = made(lora=True, dtype=torch.bfloat16)
    for (name, parameter), source in zip(rounded.named_parameters(), exact.parameters(), strict=True):
        parameter.data.copy_(source.data)
        source.data.copy_(parameter.data.float())  # the same numbers in both
        assert name
    want = packed(exact, sequences)
    assert (stepped(rounded, sequences) - want).norm() <= 1.5 * (packed(rounded, sequences) - want).norm()


@torch.no_grad()
def test_the_cache_holds_latents_only():
    """kv_lora_rank + qk_rope_head_dim numbers per token and layer: no head is in it."""
    model = made(lora=False)
    cache = model.new_cache(3, 10)
    model.prefill(batch_of(PROMPTS), cache)
    assert cache.nbytes == 2 * 3 * 10 * (32 + 8) * 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@torch.no_grad()
def test_a_step_on_cuda_equals_the_host():
    model, sequences = made(lora=True), [[5, 17, 3, 42, 9, 8], [11, 2], [7, 7, 23, 1]]
    want = packed(model, sequences)
    model = model.cuda()
    cache = model.new_cache(3, 16)
    model.prefill(batch_of([s[:-1] for s in sequences], "cuda"), cache)
    y = model.logits(model.step(torch.tensor([s[-1] for s in sequences], device="cuda"), cache))
    torch.testing.assert_close(y.cpu(), want, rtol=1e-3, atol=1e-3)


def test_attention_on_cuda_keeps_its_output_in_one_call_and_nothing_by_torchs_own_function():
    """kernels/packed_attention/varlen.py takes `reuse`, attention/sdpa.py computes it again there."""
    shape, output = AttentionShape(64, 64, 192, 128), 64 * 128 * 2 + 64 * 4
    assert attention_bytes(shape, torch.bfloat16, "cuda").expensive == 0
    assert attention_bytes(shape._replace(one_call=True), torch.bfloat16, "cuda").expensive == output
    assert attention_bytes(shape, torch.bfloat16, "cpu").expensive == output
    of_kimi = models.build(models.shape(CONFIG), dtype=torch.bfloat16, device="meta").layers[0].self_attn
    assert of_kimi.bytes(torch.bfloat16, "cuda").attention.one_call
    assert not of_kimi.bytes(torch.float32, "cuda").attention.one_call
    assert not of_kimi.bytes(torch.bfloat16, "cpu").attention.one_call


class Flash:
    """The two functions of attention in one call; the gradients are of no interest here."""

    @staticmethod
    def forward(q, k, v, documents):
        o = reference_attention(q, k, v, documents.bounds_S1[:-1].long(), documents.scale)
        return o, torch.zeros(q.shape[1], q.shape[0])

    @staticmethod
    def backward(do, q, k, v, o, lse, documents):
        return torch.ones_like(q), torch.ones_like(k), torch.ones_like(v)


PROJECTIONS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")


@pytest.mark.parametrize(
    "recompute, attends, multiplies",
    [("layers", 2, 2), ("selective", 1, 2), ("elementwise", 1, 1), ("nothing", 1, 1)],
)
def test_a_recomputed_layer_attends_and_multiplies_as_often_as_the_plan_counts(
    recompute, attends, multiplies, monkeypatch
):
    """`again` and `dense_visits` of parallel/plan/seconds.py. Attention runs as on CUDA, with plain torch in the place of
    the kernel."""
    model = made(lora=False)
    layer, counts = model.layers[0], dict.fromkeys(("attention", *PROJECTIONS), 0)
    names = {getattr(layer.self_attn, name).weight.data_ptr(): name for name in PROJECTIONS}

    class Counted(Flash):
        @staticmethod
        def forward(*given):
            counts["attention"] += 1
            return Flash.forward(*given)

    def counted(x, weight, bias=None):
        if weight.data_ptr() in names:
            counts[names[weight.data_ptr()]] += 1
        return linear(x, weight, bias)

    linear = torch.nn.functional.linear
    monkeypatch.setattr(packed_attention, "choose", lambda *_: varlen.by(Counted))
    monkeypatch.setattr(torch.nn.functional, "linear", counted)
    x_TD = torch.randn(10, 64, requires_grad=True)
    models.RECOMPUTE[recompute](layer, x_TD, model.packed_pass(batch_of(PROMPTS))).sum().backward()
    assert counts == {"attention": attends, **dict.fromkeys(PROJECTIONS, multiplies)}


@pytest.mark.parametrize("linear", [False, True])
def test_what_a_first_visit_keeps_is_what_the_block_counts(linear, monkeypatch):
    model = made(lora=False, dtype=torch.bfloat16)
    monkeypatch.setattr(packed_attention, "choose", lambda *_: varlen.by(Flash))
    mla, run = model.layers[0].self_attn, model.packed_pass(batch_of(PROMPTS))
    saved, counted = Saved(expensive=True, linear=linear), mla.bytes(torch.bfloat16, "cuda")
    with torch.no_grad(), run.visiting(saved):
        mla(torch.randn(10, 64).bfloat16(), run)
    kept = sum(tensor.nbytes for tensor in tree_leaves(saved.values))
    assert kept == 10 * (counted.expensive + linear * counted.linear)
