"""AWQ's search against a plain float64 loop; what is folded, exactly; what is left alone, and counted."""

from __future__ import annotations

import json
import re
from itertools import islice

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.compress.calibrate.conftest import calibration, rows, run_calibrated
from tests.compress.calibrate.gptq_inputs import inputs as matrix_and_inputs
from tests.compress.conftest import LLAMA, MOE, random_model, sharded
from unfreeze.checkpoint import open_checkpoint
from unfreeze.checkpoint.tensors import stored_tensor
from unfreeze.compress.calibrate import awq
from unfreeze.compress.calibrate.calibration import rounded_states
from unfreeze.compress.calibrate.gptq import Hessian
from unfreeze.compress.calibrate.layers import Layers, hidden_states
from unfreeze.compress.quantize.formats import FORMATS, nearest
from unfreeze.core.errors import DataError

SHARED = {"shared_expert_intermediate_size": 32}
KINDS = {
    "llama": ("Llama", LLAMA | {"num_key_value_heads": 4}),
    "moe": ("Qwen2Moe", LLAMA | MOE | SHARED),
    "gemma": ("Gemma2", LLAMA | {"head_dim": 16}),
}


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Random models some of whose channels are large, as in trained ones: 8 of 64 gains are 12 times others."""
    root, made = tmp_path_factory.mktemp("large"), {}
    for name, (kind, settings) in KINDS.items():
        tensors, config = random_model(kind, settings)
        generator = torch.Generator().manual_seed(1)
        for key, tensor in tensors.items():
            if re.search(r"(input|post_attention|pre_feedforward)_layernorm.weight", key):
                tensor += 0.2 * torch.randn(len(tensor), generator=generator)
                tensor[::8] = tensor[::8] * 12 + 3
        half = {key: value.bfloat16() for key, value in tensors.items()}
        made[name] = sharded(root / name, half, config | {"dtype": "bfloat16"})
    return made


def quantizer(W: torch.Tensor) -> torch.Tensor:
    """Kimi's INT4, by hand: absmax / 7 of 32 columns in bf16, codes from -8 to 7, read as bf16."""
    groups = W.unflatten(1, (-1, 32))
    scale = (groups.abs().amax(-1, keepdim=True) / 7).bfloat16().to(W.dtype)
    return (groups / scale).round().clamp(-8, 7).mul(scale).flatten(1).bfloat16().to(W.dtype)


def by_a_loop(Ws, X):
    """(s, Σ‖X (Q(W s)/s − W)ᵀ‖² · 2/n) of the best α, from the inputs themselves, in float64."""
    X, Ws, best = X.double(), [W.double() for W in Ws], None
    m, v = X.abs().mean(0), torch.cat(Ws).abs().mean(0)
    ways = [m * 0 + 1]
    ways += [m ** (step / 20) for step in range(1, 21)]
    ways += [m ** (step / 20) / v ** (1 - step / 20) for step in range(20)]
    for s in ways:
        s = s / (s.max() * s.min()).sqrt()
        error = sum(float((X @ (quantizer(W * s) / s - W).T).square().sum()) for W in Ws) * 2 / len(X)
        if best is None or error < best[1]:
            best = s, error
    return best


def test_the_search_is_a_plain_loop():
    (W, X), (V, _) = matrix_and_inputs(1, rows=24), matrix_and_inputs(2, rows=40)
    X[:, 5] *= 30
    hessian = Hessian(X.shape[1])
    for part in X.split(250):
        hessian.add(part)
    choices = list(awq.grid(hessian.mean, torch.cat((W, V)).abs().mean(0)))
    each = [awq.errors_of(M, hessian.matrix, FORMATS["int4"], "", choices) for M in (W, V)]
    sums = [sum(errors) for errors in zip(*each, strict=True)]
    best = sums.index(min(sums))
    s, error = by_a_loop((W, V), X)
    torch.testing.assert_close(choices[best].double(), s, rtol=1e-4, atol=0)
    assert sums[best] == pytest.approx(error, rel=1e-3)
    assert best and sums[best] < 0.9 * sums[0]
    # control arm: another matrix alone has other scales, so the sum over both is what counted
    assert not torch.allclose(by_a_loop((V[:4],), X)[0], s, rtol=1e-3)


@pytest.fixture
def coarse(monkeypatch):
    """Every tenth of the choices, the first among them: the whole search is compared with a loop above."""
    grid = awq.grid
    monkeypatch.setattr(awq, "grid", lambda *means: islice(grid(*means), 0, None, 10))


def written(base, folder, to="int8", method="awq", modules=("all-linear",), batches=None):
    return run_calibrated(base, folder, batches or rows(0, 40), to, method=method, modules=modules)


@pytest.mark.parametrize(
    "name, modules", [("llama", "all-linear"), ("moe", "experts"), ("gemma", "all-linear")]
)
def test_a_folder_with_scales_computes_what_its_base_does(name, modules, large, tmp_path, monkeypatch):
    """In INT8; the scales, drawn at random here, move weights by a factor of 4."""

    def drawn(mean_I, _):
        yield torch.ones(len(mean_I))
        generator = torch.Generator().manual_seed(len(mean_I))
        yield 2 ** (2 * torch.rand(len(mean_I), generator=generator) - 1)

    monkeypatch.setattr(awq, "grid", drawn)
    monkeypatch.setattr(awq, "errors_of", lambda *_: [1.0, 0.0])  # the second choice is taken everywhere
    own, _ = written(large[name], tmp_path / "out", modules=(modules,))
    base, held = open_checkpoint(large[name]), rows(9, 4)
    original = torch.cat(hidden_states(Layers(base), held))
    after = torch.cat(hidden_states(Layers(open_checkpoint(tmp_path / "out")), held))
    plain = torch.cat(rounded_states(base, own.matrices, held, nearest).states)
    bound = 2 * (plain - original).norm()  # rounding without scales; a row's range is wider with them
    assert (after - original).norm() < bound < 0.1 * original.norm()
    assert all(tally.scaled for tally in own.tallies.values())
    # the same names, shapes and dtypes as without scales: an ordinary release
    written(large[name], tmp_path / "gptq", method="gptq", modules=(modules,))
    one, two = (
        {n: (i.dtype, i.shape) for n, i in open_checkpoint(tmp_path / f).tensors.items()}
        for f in ("out", "gptq")
    )
    assert one == two
    # control arm: one tensor as in the base, and it is another function
    others = [name for entry in own.record.shards.values() for name in entry["others"]]
    file = tmp_path / "out" / "model.safetensors"
    tensors, before = load_file(file), base.tensors[others[0]]
    tensors[others[0]] = stored_tensor(before).clone()
    save_file(tensors, file, metadata={"format": "pt"})
    wrong = torch.cat(hidden_states(Layers(open_checkpoint(tmp_path / "out")), held))
    assert (wrong - original).norm() > 0.1 * original.norm()


def test_scales_that_a_router_takes_are_powers_of_two(large, tmp_path, coarse):
    """So the router and the shared expert, in bf16, are the same function bit for bit."""
    own, _ = written(large["moe"], tmp_path / "out", "int4", modules=("experts",))
    base, out = open_checkpoint(large["moe"]).tensors, open_checkpoint(tmp_path / "out").tensors
    assert own.changed_groups == {"norms": 2, "router": 4, "shared_experts": 4}
    for layer in range(2):
        mlp = f"model.layers.{layer}.mlp"
        gain, given = (
            stored_tensor(t[f"model.layers.{layer}.post_attention_layernorm.weight"]) for t in (base, out)
        )
        s = gain.float() / given.float()
        assert torch.equal(s.log2(), s.log2().round()) and s.max() > s.min()
        for reader in ("gate", "shared_expert_gate", "shared_expert.gate_proj", "shared_expert.up_proj"):
            before, after = (stored_tensor(t[f"{mlp}.{reader}.weight"]).float() for t in (base, out))
            assert torch.equal(after, before * s)


@pytest.mark.parametrize("name", ["llama", "moe"])
def test_with_large_channels_it_is_closer_than_the_nearest(name, large, tmp_path, coarse):
    base, held = open_checkpoint(large[name]), rows(9, 10)
    original = torch.cat(hidden_states(Layers(base), held))
    off = {}
    for method in ("awq", "awq-gptq", "gptq"):
        own, _ = written(large[name], tmp_path / method, "int4", method)
        after = torch.cat(hidden_states(Layers(open_checkpoint(tmp_path / method)), held))
        off[method] = float((after - original).norm())
    off["nearest"] = float(
        (torch.cat(rounded_states(base, own.matrices, held, nearest).states) - original).norm()
    )
    assert off["awq"] < 0.95 * off["nearest"] and off["awq-gptq"] < off["awq"], off
    # the gain in front is in bf16: what it lost by rounding is in the scales of its readers
    scaled = calibration(large[name], tmp_path / "again", rows(0, 40), method="awq")
    scaled.run()
    gain = stored_tensor(base.tensors["model.layers.0.input_layernorm.weight"])
    given = scaled.change("model.layers.0.input_layernorm.weight")(gain)
    s = stored_tensor(scaled._stored["model.layers.0.self_attn.q_proj"]["columns"])
    torch.testing.assert_close(given.float() * s, gain.float(), rtol=1e-6, atol=0)


def test_what_nothing_takes_the_scales_of_is_counted(bases, tmp_path, coarse):
    """Of llama's 2 heads of values 4 heads of queries read one each twice."""
    own, _ = written(bases["llama"], tmp_path / "out", "int4")
    assert own.left == {"o_proj": 2}
    tally = own.tallies["attention"]
    assert tally.other == 2 and tally.matrices == 8
    with_heads, _ = written(bases["moe"], tmp_path / "experts", "int4", modules=("experts",))
    assert with_heads.left == {}


def test_few_rows_keep_scales_of_one(bases, tmp_path, monkeypatch, coarse):
    monkeypatch.setattr(awq, "FEWEST", 10)
    own, _ = written(bases["moe"], tmp_path / "out", "int4", batches=rows(0, 16), modules=("experts",))
    assert own.tallies["experts"].few and own.tallies["experts"].matrices == 24
    monkeypatch.setattr(awq, "FEWEST", 100)
    with pytest.raises(DataError, match=r"calibration tokens; model\.layers\.0"):
        calibration(bases["moe"], tmp_path / "none", rows(0, 16), method="awq")


def test_the_record_has_what_a_rerun_needs(large, tmp_path, coarse):
    """A second run keeps the first layer's file, and goes on behind it with its norms as they were written."""
    whole = calibration(large["moe"], tmp_path / "whole", rows(0, 20), method="awq")
    whole.run()
    stopped = calibration(large["moe"], tmp_path / "stopped", rows(0, 20), method="awq")

    def progress(done: int, total: int) -> None:
        if list((tmp_path / "stopped").glob("*.safetensors")):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped.run(progress)
    assert len(list((tmp_path / "stopped").glob("*.safetensors"))) == 1
    calibration(large["moe"], tmp_path / "stopped", rows(0, 20), method="awq").run()
    for file in ("layer-00000.safetensors", "layer-00001.safetensors"):
        assert (tmp_path / "stopped" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
    records = [
        json.loads((tmp_path / name / "calibration.json").read_text()) for name in ("whole", "stopped")
    ]
    assert records[0]["shards"] == records[1]["shards"]
