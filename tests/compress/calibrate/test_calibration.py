"""Inputs against those that transformers' own layers get; the order of the layers; experts by their own tokens;
what is kept by a kill; refusals."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch
import transformers

from tests.compress.calibrate.conftest import calibration, rows, run_calibrated
from tests.compress.quantize.test_loads import ours, theirs
from unfreeze.checkpoint import open_checkpoint
from unfreeze.compress.calibrate import calibration as module
from unfreeze.compress.calibrate import walk
from unfreeze.compress.calibrate.calibration import rounded_states
from unfreeze.compress.calibrate.gptq import Hessian, inverse_factor, rounded_in_order
from unfreeze.compress.calibrate.inputs import Inputs, inner
from unfreeze.compress.calibrate.layers import Layers, hidden_states, memory_of
from unfreeze.compress.calibrate.matrices import enough, parts_in
from unfreeze.compress.quantize.formats import KIMI, nearest
from unfreeze.compress.quantize.work import quantize_work
from unfreeze.core.errors import ConfigError, DataError
from unfreeze.generate.open import open_model
from unfreeze.models.blocks.experts import Experts
from unfreeze.quant.columns import columns_of


def hidden(model, batches):
    with torch.no_grad():
        return torch.cat([model.hidden(batch) for batch in batches])


@pytest.mark.parametrize("base", ["llama", "moe", "stacked", "int4", "fp8"])
def test_layer_by_layer_is_the_whole_model(base, bases):
    manifest, batches = open_checkpoint(bases[base]), rows(1, 12)
    layers = Layers(manifest)
    held = [name for name, tensor in layers.model.named_parameters() if not tensor.is_meta]
    assert not any(".layers." in name for name in held) and "lm_head.weight" in held
    states = torch.cat(hidden_states(layers, batches))
    whole = open_model(manifest, as_stored=True)
    assert torch.equal(states, hidden(whole, batches))
    assert [name for name, tensor in layers.model.named_parameters() if not tensor.is_meta] == held
    # one layer was in memory at a time: what was said before counts it
    largest = max(sum(t.nbytes for t in layer.state_dict().values()) for layer in whole.layers)
    assert memory_of(manifest, 100) > largest + sum(t.nbytes for t in whole.model.embed_tokens.parameters())


def their_inputs(base: Path, batches, names) -> dict[str, torch.Tensor]:
    """H float64 of transformers' modules, from a forward hook on each."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    inputs: dict[str, list[torch.Tensor]] = {name: [] for name in names}
    for name in names:
        model.get_submodule(name).register_forward_pre_hook(
            lambda _, arguments, name=name: inputs[name].append(arguments[0].double().flatten(0, -2))
        )
    with torch.no_grad():
        for batch in batches:
            for document in batch.tokens_T.tensor_split(batch.starts_S[1:]):
                model(document[None])
    return {name: 2 / len(x := torch.cat(inputs[name])) * x.T @ x for name in names}


def test_inputs_are_those_of_transformers_own_layers(bases):
    batches, layers = rows(2, 20), Layers(open_checkpoint(bases["llama"]))
    leaves = [f"self_attn.{name}_proj" for name in "qkvo"] + [
        f"mlp.{name}_proj" for name in ("gate", "up", "down")
    ]
    names = [f"model.layers.0.{leaf}" for leaf in leaves]
    states = layers.begin(batches)
    with layers.loaded(0) as layer, torch.no_grad():
        with Inputs({name: layers.model.get_submodule(name) for name in names}) as inputs:
            for state in states:
                layer(state.x_TD, state.run)
                inputs.next_batch()
        layer(states[0].x_TD, states[0].run)  # after the context nothing is counted
    for name, expected in their_inputs(bases["llama"], batches, names).items():
        own = inputs.linear(name)
        assert own.rows == 20 * 40
        assert (own.matrix - expected).norm() < 1e-5 * expected.norm(), name
    assert inputs.linear(names[0]) is inputs.linear(names[2])  # q, k and v read one tensor: one H
    assert inputs.linear(names[0]) is not inputs.linear(names[3])
    assert inputs.linear("another") is None


def test_an_experts_inputs_are_the_tokens_it_was_chosen_for(bases):
    batches, layers = rows(3, 20), Layers(open_checkpoint(bases["moe"]))
    states, name = layers.begin(batches), "model.layers.0.mlp.experts"
    chosen = []
    with layers.loaded(0) as layer, torch.no_grad():
        with Inputs({name: layers.model.get_submodule(name)}) as inputs:
            for state in states:
                layer(state.x_TD, state.run)
                chosen.append(state.run)
                inputs.next_batch()
        experts = layers.model.get_submodule(name)
        assert isinstance(experts, Experts)
        own = [inputs.expert(name, expert) for expert in range(4)]
        assert sum(len(x) for x in own) == 2 * 20 * 40  # two of the four for each token
        model = transformers.AutoModelForCausalLM.from_pretrained(bases["moe"], dtype=torch.float32)
        mlp, seen = model.model.layers[0].mlp, []
        mlp.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0].flatten(0, 1)))
        for batch in batches:
            for document in batch.tokens_T.tensor_split(batch.starts_S[1:]):
                model(document[None])
        x_TD = torch.cat(seen)
        scores_TE = torch.nn.functional.linear(x_TD, mlp.gate.weight).softmax(-1)
        for expert, x_nD in enumerate(own):
            mine_T = scores_TE.topk(2, -1).indices.eq(expert).any(1)
            assert torch.allclose(x_nD, x_TD[mine_T], atol=1e-5)
            gate, up = mlp.experts.gate_up_proj[expert].chunk(2)
            h_nI = torch.nn.functional.silu(x_nD @ gate.T) * (x_nD @ up.T)
            assert torch.allclose(inner(experts, expert, x_nD), h_nI, atol=1e-5)


def parts_of(folder: Path, layer: int, name: str) -> torch.Tensor:
    stored = parts_in(folder / f"layer-{layer:05d}.safetensors")[name]
    return KIMI.dequantize({suffix: module.stored_tensor(info) for suffix, info in stored.items()}).float()


@pytest.mark.parametrize("base", ["llama", "moe"])
def test_a_layers_inputs_come_from_the_rounded_layers_before_it(base, bases, calibrated):
    """The second layer's matrices, from a whole model whose first layer is the written one."""
    batches, own, _ = calibrated(base)
    model = open_model(open_checkpoint(bases[base]), as_stored=True)
    site = "model.layers.1.self_attn.q_proj"
    before = model.get_submodule(site).weight.float()

    def corrected(model) -> torch.Tensor:
        hessian = Hessian(before.shape[1])
        hook = model.get_submodule(site).register_forward_pre_hook(
            lambda _, arguments: hessian.add(arguments[0])
        )
        hidden(model, batches)
        hook.remove()
        U = inverse_factor(hessian.matrix)
        return rounded_in_order(before, U, columns_of(KIMI, before))[0]

    original = corrected(model)  # control arm: inputs of the base itself
    with torch.no_grad():
        for matrix in own.matrices:
            if Layers.layer_of(matrix.place.site) == 0:
                value = KIMI.dequantize({s: part for s, part in own.round(None, KIMI, matrix.name).items()})
                module.place_of(model, matrix).copy_(value)
    expected, stored = corrected(model), parts_of(own.folder, 1, site)
    assert (stored != expected).float().mean() < 0.01  # a tie aside
    assert (stored != original).float().mean() > 0.05


@pytest.mark.parametrize("base", ["llama", "moe", "stacked"])
def test_what_is_written_is_closer_to_the_original_than_the_nearest(base, bases, tmp_path):
    own, record = run_calibrated(bases[base], tmp_path / "out", rows(0, 40))
    manifest, held = open_checkpoint(bases[base]), rows(9, 10)
    original, written = (
        hidden(open_model(each), held) for each in (manifest, open_checkpoint(tmp_path / "out"))
    )
    plain = torch.cat(rounded_states(manifest, own.matrices, held).states)
    assert (written - original).norm() < 0.95 * (plain - original).norm()
    assert sum(tally.matrices for tally in own.tallies.values()) == len(own.matrices)
    assert all(tally.few == tally.other == 0 for tally in own.tallies.values())
    if base != "stacked":  # there gate and up are one matrix of the base
        tallied = {group: tally.matrices for group, tally in own.tallies.items()}
        assert {group: moved.matrices for group, moved in record.moved.items()} == tallied


def test_rounding_every_matrix_to_the_nearest_is_what_the_command_writes(bases, tmp_path):
    from tests.compress.quantize.conftest import run_quantize

    run_quantize(bases["moe"], tmp_path / "out", "nf4", ("all-linear", "lm_head"))
    manifest, held = open_checkpoint(bases["moe"]), rows(9, 10)
    matrices = list(module.matrices_of(quantize_work(manifest, "nf4", ("all-linear", "lm_head"))))
    states, model = rounded_states(manifest, matrices, held)
    written = open_model(open_checkpoint(tmp_path / "out"))
    assert torch.allclose(torch.cat(states), hidden(written, held), atol=1e-5)
    x_TD = states[0]
    assert torch.allclose(model.logits(x_TD), written.logits(x_TD), atol=1e-4)


def test_an_expert_with_few_tokens_is_rounded_to_the_nearest_and_counted(bases, tmp_path, monkeypatch):
    base = bases["moe"]
    own = calibration(base, tmp_path / "own", rows(0, 40))
    own.run()
    counts = {}
    monkeypatch.setattr(walk, "enough", lambda width: counts.setdefault(width, enough(width)) * 4)
    monkeypatch.setattr(module, "check_rows", lambda *_: None)
    fewer = calibration(base, tmp_path / "fewer", rows(0, 40))
    fewer.run()
    few = fewer.tallies["experts"].few
    assert 0 < few < fewer.tallies["experts"].matrices == 2 * 4 * 3
    assert own.tallies["experts"].few == 0
    stored = open_checkpoint(base).by_model_name()
    same = 0
    for matrix in own.matrices:
        W = module.stored_tensor(stored[f"{matrix.name}.weight"]).float()
        plain, made = nearest(W, KIMI, ""), fewer.round(W, KIMI, matrix.name)
        same += ".experts." in matrix.name and all(
            torch.equal(plain[suffix], made[suffix]) for suffix in plain
        )
    assert same == few


def test_the_head_is_corrected_on_what_it_reads(bases, tmp_path):
    batches, manifest = rows(0, 20), open_checkpoint(bases["llama"])
    own = calibration(bases["llama"], tmp_path / "own", batches, modules=("lm_head",))
    own.run()
    assert [file.index for file in own.files] == [0, 1, 2] and own.tallies["lm_head"].corrected == 1
    model, hessian = open_model(manifest, as_stored=True), Hessian(64)
    with torch.no_grad():
        for matrix in own.matrices:
            if matrix.name != "lm_head":  # it reads what the rounded layers hand on
                module.place_of(model, matrix).copy_(KIMI.dequantize(own.round(None, KIMI, matrix.name)))
    hessian.add(hidden(model, batches))
    W = model.lm_head.weight.detach().float()
    expected, _ = rounded_in_order(W, inverse_factor(hessian.matrix), columns_of(KIMI, W))
    assert (parts_of(own.folder, 2, "lm_head") != expected).float().mean() < 0.01
    assert (KIMI.dequantize(nearest(W, KIMI, "")).float() != expected).float().mean() > 0.05


def test_a_matrix_outside_of_the_calibration_is_rounded_to_the_nearest(calibrated):
    _, own, _ = calibrated("llama")
    W = torch.randn(8, 64)
    made, plain = own.round(W, KIMI, "lm_head"), nearest(W, KIMI, "lm_head")
    assert all(torch.equal(made[suffix], plain[suffix]) for suffix in plain)


@pytest.mark.parametrize("base", ["llama", "moe"])
def test_transformers_computes_the_same_from_a_calibrated_folder(base, calibrated):
    _, _, out = calibrated(base)
    torch.testing.assert_close(theirs(out), ours(out), rtol=0, atol=1e-4)


def test_too_few_rows_are_refused(bases, tmp_path):
    with pytest.raises(DataError, match=r"40 calibration tokens; model\.layers\.0\.\S+ needs 256") as refused:
        calibration(bases["llama"], tmp_path / "out", rows(0, 1))
    assert "more rows with --calibrate" in refused.value.next
    calibration(bases["llama"], tmp_path / "out", rows(0, 7))  # 280 tokens
    # an expert of four gets half the tokens: down_proj with 32 inputs needs 128, so 256 in all
    with pytest.raises(DataError, match=r"240 calibration tokens; .*down_proj needs 256"):
        calibration(bases["moe"], tmp_path / "out", rows(0, 6), modules=("experts",))
    calibration(bases["moe"], tmp_path / "out", rows(0, 7), modules=("experts",))
    assert not (tmp_path / "out").exists()


class Stop(Exception):
    pass


def test_a_stopped_calibration_goes_on_and_gives_the_same_bytes(bases, tmp_path, calibrated):
    """Stopped in the second layer; a finished layer is kept, and the rows go through it as it was written."""
    batches, whole, _ = calibrated("moe")
    own = calibration(bases["moe"], tmp_path / "own", batches)
    first = tmp_path / "own" / "layer-00000.safetensors"

    def stop(done: int, total: int) -> None:
        if first.exists():
            raise Stop

    with pytest.raises(Stop):
        own.run(stop)
    node = first.stat().st_ino
    stale = tmp_path / "own" / ".layer-00001.safetensors.unfinished-1"  # a kill leaves it
    stale.write_bytes(b"half")
    assert not (tmp_path / "own" / "layer-00001.safetensors").exists()
    again = calibration(bases["moe"], tmp_path / "own", batches)
    again.run()
    assert first.stat().st_ino == node and not stale.exists()
    for file in again.files:
        assert (tmp_path / "own" / file.name).read_bytes() == (whole.folder / file.name).read_bytes()
    assert again.tallies == whole.tallies
    with pytest.raises(ConfigError, match="holds a calibration with --rows"):
        calibration(bases["moe"], tmp_path / "own", rows(5, 40))


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path[:0] = [sys.argv[1]]
import torch
torch.set_num_threads(1)
from tests.compress.calibrate.conftest import rows, run_calibrated
base, out = map(Path, sys.argv[2:4])
folder = out.with_name(out.name + ".calibration")

def progress(done, total):  # in the middle of the second layer
    if list(folder.glob("*.safetensors")) and list(folder.glob(".*.unfinished-*")):
        os.kill(os.getpid(), signal.SIGKILL)

run_calibrated(base, out, rows(0, 40), progress=progress, method=sys.argv[4])
"""


@pytest.mark.nightly
@pytest.mark.parametrize("method", ["gptq", "awq", "awq-gptq"])
def test_a_killed_calibration_goes_on(method, bases, tmp_path, forkserver):
    out, root = tmp_path / "out", Path(__file__).parents[3]
    assert forkserver.run(["-c", KILLED, root, bases["llama"], out, method]).returncode == -signal.SIGKILL
    folder = tmp_path / "out.calibration"
    assert [path.name for path in folder.glob("*.safetensors")] == ["layer-00000.safetensors"]
    assert list(folder.glob(".*.unfinished-*")) and not out.exists()
    batches, whole = rows(0, 40), tmp_path / "whole"
    run_calibrated(bases["llama"], whole, batches, method=method)
    run_calibrated(bases["llama"], out, batches, method=method)
    for file in whole.glob("*.safetensors"):
        assert file.read_bytes() == (out / file.name).read_bytes()
    assert json.loads((folder / "calibration.json").read_text())["finished"]
