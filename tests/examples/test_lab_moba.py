"""examples/lab/recall.py and block_gate.py: the task is the published one, and twins of seconds of both studies."""

import importlib.util
import sys
import tomllib
from pathlib import Path

import pytest
import torch

LAB = Path(__file__).parents[2] / "examples" / "lab"


def script(name, monkeypatch):
    monkeypatch.syspath_prepend(str(LAB))
    for module in ("studying", name):
        monkeypatch.delitem(sys.modules, module, raising=False)
    spec = importlib.util.spec_from_file_location(name, LAB / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_key_is_asked_once_more_and_its_value_follows(monkeypatch):
    recall = script("recall", monkeypatch)
    tokens, asked = recall.rows(16, torch.Generator().manual_seed(0))
    for row, places in zip(tokens.tolist(), asked.tolist(), strict=True):
        pairs = dict(zip(row[: 2 * recall.PAIRS : 2], row[1 : 2 * recall.PAIRS : 2], strict=True))
        asks = [place for place, here in enumerate(places) if here]
        assert len(pairs) == len(asks) == recall.PAIRS and min(asks) >= 2 * recall.PAIRS
        assert {row[place]: row[place + 1] for place in asks} == pairs
        assert max(pairs) < recall.KEYS <= min(pairs.values()) < recall.NOTHING
    batch = next(recall.batches(0, 4))
    taught = batch.weights_T.bool()
    assert taught.sum() == 4 * recall.PAIRS and (batch.targets_T[taught] >= recall.KEYS).all()


@pytest.mark.parametrize("arm", ["full", "moba", "sliding_window", "fresh"])
def test_an_arm_of_recall_learns(arm, monkeypatch):
    """A few steps: that the answer is a value; and what is exchanged keeps its weights."""
    recall = script("recall", monkeypatch)
    _, shares, at_once, curve = recall.study(arm, 0, steps=10, after=2)
    assert len(shares) == 256 and all(0 <= share <= 1 for share in shares)
    assert len(at_once) == (0 if arm == "fresh" else 256)
    assert [curve[0][0], curve[-1][0]] == [1, 12] and curve[-1][1] < curve[0][1] - 0.5
    full = recall.model_of("full", 0)
    part = recall.exchanged(full, "moba" if arm in ("full", "fresh") else arm)
    assert all(torch.equal(part.state_dict()[name], weight) for name, weight in full.state_dict().items())


def test_a_gate_of_full_rank_begins_as_the_mean_and_one_of_low_rank_learns(monkeypatch):
    gate = script("block_gate", monkeypatch)
    batch, found = next(gate.batches(gate.texts()[0], 0)), {}
    for arm in ("mean", "rank_16", "rank_4"):
        model = gate.with_gates(arm, 0)
        for parameter in (layer.self_attn.q_proj.weight for layer in model.layers):
            parameter.data.mul_(20)  # attention that is not even
        found[arm] = gate.recall(model, batch)
    assert found["rank_16"] == pytest.approx(found["mean"], abs=0.001) and found["rank_4"] < found["mean"]
    _, value, more, curve = gate.study("rank_4", 0, steps=2, gate_steps=6)
    assert 0 < value < 1 and more["parameters"] == 4 * 4 * 16 + 4 * 4 * 48
    assert min(loss for _, loss in curve) < curve[0][1]


def test_recall_of_the_true_mass_is_one(monkeypatch):
    """Control: a gate that is attention's own mass finds all; one that is its opposite finds next to none."""
    gate = script("block_gate", monkeypatch)
    model, batch = gate.with_gates("mean", 0), next(gate.batches(gate.texts()[0], 0))
    for parameter in (layer.self_attn.q_proj.weight for layer in model.layers):
        parameter.data.mul_(20)  # attention that is not even
    mass = [p.logical_not().float() * -1e9 + p for _, _, p in masses(gate, model, batch)]
    for sign, share in ((1, 1.0), (-1, 0.5)):
        scores = iter([sign * part for part in mass])
        monkeypatch.setattr(gate, "block_scores", lambda q, e, scores=scores: next(scores).clone())
        found = gate.recall(model, batch)
        assert found == share if sign > 0 else found < share


def masses(gate, model, batch):
    """As block_gate's, of every layer: those of slabs with more than K blocks."""
    taps = gate.Taps([gate.Tap(layer, name) for layer in range(2) for name in ("q", "k")])
    with torch.no_grad():
        model.hidden(batch, taps=taps)
    from unfreeze.kernels.compressed import Entries

    entries = Entries.build(tuple(batch.starts_S.tolist()), len(batch.tokens_T), gate.BLOCK, "cpu")
    for layer in range(2):
        q, k = taps.found[gate.Tap(layer, "q")], taps.found[gate.Tap(layer, "k")]
        for slab in gate.block_mass(q, k, q.shape[-1] ** -0.5, entries):
            if slab[2].shape[-1] > gate.K:
                yield slab


@pytest.mark.parametrize("name", ["recall", "block_gate"])
def test_the_study_names_arms_that_the_script_has(name, monkeypatch):
    study = tomllib.loads((LAB / f"{name}.toml").read_text())
    arms = {arm["flags"].removeprefix("--arm ") for arm in study["arms"]}
    assert arms <= set(script(name, monkeypatch).ARMS) and study["python"] == f"examples/lab/{name}.py"
