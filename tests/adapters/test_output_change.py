"""Claims about output_changes: all groups side by side, layer by layer, give the numbers of one whole pass after
another to the bit; so weights that stream come once."""

from __future__ import annotations

import pytest
import torch

from unfreeze import models
from unfreeze.adapters import LoraConfig, attach, sites
from unfreeze.adapters.output_change import AMPLIFY, Groups, first_tokens, output_changes
from unfreeze.adapters.snapshot import Snapshot, snapshot, trained_parameters
from unfreeze.checkpoint import open_checkpoint
from unfreeze.commands.demo import TINY_K2
from unfreeze.core.batch import Batch
from unfreeze.core.layout import RESIDENT
from unfreeze.generate.open import open_model
from unfreeze.models.blocks.saved import Saved
from unfreeze.models.groups import group_of
from unfreeze.parallel.placement.residency import Streamed

GROUPS = ["attention", "mlp", "shared_experts", "experts"]


def probe() -> Batch:
    ids = torch.randint(0, 256, (96,), generator=torch.Generator().manual_seed(1))
    starts = torch.arange(0, 96, 24)
    return first_tokens(Batch(ids, ids.roll(-1), torch.ones(96), torch.arange(96) % 24, starts), 80)


def with_adapters(dtype: torch.dtype, experts: str = "device") -> models.Decoder:
    """B is not zero, but that of the dense MLP, which so changes nothing."""
    model = open_model(open_checkpoint(TINY_K2), dtype, layout=RESIDENT.but(experts=experts))
    attach(model, LoraConfig(rank=4), 0)
    for site in sites(model):
        for name, parameter in site.adapter.named_parameters():
            if name.endswith("B") and site.group != "mlp":
                torch.nn.init.normal_(parameter, std=0.05, generator=torch.Generator().manual_seed(3))
            elif name.endswith("B"):  # too little to show in bf16, enough 4,096 times as strong
                torch.nn.init.constant_(parameter, 1e-9)
    return model


def copies(model: models.Decoder) -> Snapshot:
    return snapshot(dict(trained_parameters(model)))


def one_after_another(model: models.Decoder, before: Snapshot, groups: list[str], given: Batch) -> Groups:
    """Each group by a whole pass through the model, with every other group's training taken out."""
    chosen: dict[object, list[object]] = {}

    def same(layer, x_TD, run):
        saved = Saved()
        saved.second, saved.values = layer in chosen, list(chosen.get(layer, ()))
        with run.visiting(saved):
            y_TD = layer(x_TD, run)
        chosen.setdefault(layer, saved.values)
        return y_TD

    def logits(group: str, amplify: float = 1.0) -> torch.Tensor:
        scales = [(s.adapter, s.adapter.scale, getattr(s.adapter, "down_scale", 0.0)) for s in sites(model)]
        kept = {}
        for site in sites(model):
            factor = amplify if site.group == group else 0.0
            site.adapter.scale *= factor
            if hasattr(site.adapter, "down_scale"):
                site.adapter.down_scale *= factor
        for name, parameter in trained_parameters(model):
            if ".adapter." not in name and group_of(name) != group:
                kept[name] = parameter.data
                copy = before.kept[name]
                parameter.data = torch.zeros_like(parameter) if copy is None else copy.to(parameter.dtype)
        found = model.logits(model.hidden(given, same))
        for adapter, scale, down in scales:
            adapter.scale = scale
            if hasattr(adapter, "down_scale"):
                adapter.down_scale = down
        for name, parameter in trained_parameters(model):
            parameter.data = kept.get(name, parameter.data)
        return found

    result: Groups = {}
    with model.looking():
        nothing = logits("")
        rounding = nothing.abs().max().item() * torch.finfo(model.model.embed_tokens.weight.dtype).eps / 2
        for group in groups:
            change = (logits(group) - nothing).abs().max().item()
            connected = change > 0
            if not connected and ".adapter." in next(iter(dict(trained_parameters(model)))):
                connected = (logits(group, AMPLIFY) - nothing).abs().max().item() > 0
            result[group] = {"output_change": change, "rounding": rounding, "connected": connected}
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters(dtype: torch.dtype) -> None:
    model, given = with_adapters(dtype), probe()
    wanted = one_after_another(model, copies(model), GROUPS, given)
    found = output_changes(model, copies(model), GROUPS, given)
    assert found == wanted and found["experts"]["output_change"] > 0
    if dtype == torch.bfloat16:
        assert found["mlp"]["output_change"] == 0 and found["mlp"]["connected"]  # amplified


def test_weights_trained_in_full_and_a_tied_head() -> None:
    config = {
        "model_type": "qwen3", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
        "max_position_embeddings": 128, "tie_word_embeddings": True,
    }  # fmt: skip
    model = models.build(models.shape(config), dtype=torch.float32, device="cpu")
    models.initialize(model, 0)
    before = copies(model)
    for _, parameter in trained_parameters(model):
        parameter.data = parameter.data * 1.01
    groups = ["attention", "mlp", "embeddings", "norms"]
    wanted = one_after_another(model, before, groups, probe())
    assert output_changes(model, before, groups, probe()) == wanted
    assert all(entry["output_change"] > 0 for entry in wanted.values())


def test_streamed_layers_come_once() -> None:
    """And twice where a group changed nothing, so that it is amplified."""
    model, resident = with_adapters(torch.bfloat16, "disk"), with_adapters(torch.bfloat16)
    assert isinstance(model.residency, Streamed)
    layers = len(model.moe_layers())
    some = [group for group in GROUPS if group != "mlp"]
    assert output_changes(model, copies(model), some, probe()) == output_changes(
        resident, copies(resident), some, probe()
    )
    assert model.residency.reads == layers
    output_changes(model, copies(model), GROUPS, probe())
    assert model.residency.reads == 3 * layers - 2  # the first two of the next pass find one here


def test_control_arm_another_groups_training_left_in_effect_is_seen(monkeypatch) -> None:
    model, given = with_adapters(torch.float32), probe()
    wanted = one_after_another(model, copies(model), GROUPS, given)
    monkeypatch.setattr("unfreeze.adapters.output_change._set_scale", lambda adapter, scale, down: None)
    assert output_changes(model, copies(model), GROUPS, given) != wanted
