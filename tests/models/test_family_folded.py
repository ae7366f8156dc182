"""Each family folded: scales moved into what comes before leave its logits as they are, in float64."""

from __future__ import annotations

import pytest
import torch
from family_cases import CASES, DOCUMENTS, batch_of, oracle, ours
from test_family_merges import FIRST

from unfreeze.compress.calibrate.folds import changed, folds_of, parameters_of, width_of
from unfreeze.compress.calibrate.layers import State

SOME = ("llama", "gemma3-window", "qwen2-moe")
UNFOLDED = {"nemotron-h": "up_proj", "nanochat": "up_proj", "gpt-oss": "experts"}
"""Families with something between up and down that is not linear in up: a square, or a clamp."""


def scales_of(model, fold, seed: int) -> torch.Tensor:
    """Random s of a fold, 1/4 to 15/4."""
    reader = model.get_submodule(fold.readers[0])
    size = (reader.num_experts, reader.intermediate_size) if fold.inner else (width_of(reader),)
    return torch.rand(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3.5 + 0.25


def folds_in(model, batch):
    """The folds of every layer, each found in the layer's own state."""
    run, x_TD = model.packed_pass(batch), model.model.embed_tokens(batch.tokens_T)
    for index, layer in enumerate(model.layers):
        yield from folds_of(layer, f"model.layers.{index}", State(batch, run, x_TD))
        x_TD = layer(x_TD, run)


@torch.no_grad()
def folded(name: str, leave: str = ""):
    """(the largest change of the logits by all folds, the folds). leave: a kind of change that is left out."""
    model, batch = ours(oracle(name), CASES[name]).double().eval(), batch_of(DOCUMENTS)
    before = model.logits(model.hidden(batch))
    folds, parameters = list(folds_in(model, batch)), dict(model.named_parameters())
    for seed, fold in enumerate(folds):
        for parameter, kind, s in parameters_of(model, fold, scales_of(model, fold, seed)):
            if kind != leave:
                parameters[parameter].copy_(changed(parameters[parameter], kind, s))
    after = model.logits(model.hidden(batch))
    assert after.dtype == torch.float64
    return float((after - before).abs().max() / before.abs().max()), folds


@pytest.mark.parametrize(
    "name",
    [
        name if name in SOME else pytest.param(name, marks=pytest.mark.nightly)
        for name in sorted(FIRST.values())
    ],
)
def test_a_folded_family_computes_what_it_did(name, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)  # routers and logits are in float32
    off, folds = folded(name)
    assert off < 1e-9
    assert len(folds) >= 3
    if name in UNFOLDED:
        assert not any(fold.producer.endswith(UNFOLDED[name]) for fold in folds)
    if name == SOME[-1]:  # control arm: without one kind of change it is another function
        for kind in ("gain", "columns", "rows"):
            assert folded(name, leave=kind)[0] > 1e-2


def test_the_readers_of_a_mixtures_norm_are_all_that_read_it():
    model = ours(oracle("qwen2-moe"), CASES["qwen2-moe"]).eval()
    with torch.no_grad():
        folds = {fold.producer: fold for fold in folds_in(model, batch_of(DOCUMENTS))}
    mlp = "model.layers.0.mlp"
    assert set(folds["model.layers.0.post_attention_layernorm"].readers) == {
        f"{mlp}.gate",
        f"{mlp}.experts",
        f"{mlp}.shared_expert_gate",
        f"{mlp}.shared_expert.gate_proj",
        f"{mlp}.shared_expert.up_proj",
    }
    assert folds[f"{mlp}.experts"].inner and folds[f"{mlp}.shared_expert.up_proj"].readers
    # 4 query heads share 2 value heads: no channel of o_proj has one of v_proj for itself
    assert "model.layers.0.self_attn.v_proj" not in folds


def test_a_reader_that_was_not_seen_keeps_the_norm_as_it_is(monkeypatch):
    """The layer adds what its norm gives to its output: then the norm has no fold, and the others stay."""
    model = ours(oracle("llama"), CASES["llama"]).eval()
    kind = type(model.layers[0])
    own = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x, run: own(self, x, run) + self.input_layernorm(x))
    with torch.no_grad():
        producers = [fold.producer for fold in folds_in(model, batch_of(DOCUMENTS))]
    assert not any(name.endswith("input_layernorm") for name in producers)
    assert sum(name.endswith("post_attention_layernorm") for name in producers) == len(model.layers)
