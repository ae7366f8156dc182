"""The dense half of a layer as one op: what the reference of kernels/dense_mlp says is what the blocks do,
and who may not be one op says why."""

import copy
import json
import logging
from dataclasses import replace
from functools import partial

import pytest
import torch

from unfreeze import models
from unfreeze.adapters import LoraConfig, attach
from unfreeze.core.batch import Batch
from unfreeze.core.errors import ConfigError
from unfreeze.kernels import dense_mlp
from unfreeze.kernels.choice import choose, record
from unfreeze.kernels.dense_mlp.torch_compiled import Compiled
from unfreeze.models.blocks import mlp as mlp_file
from unfreeze.models.blocks.mlp import MLP, refuses
from unfreeze.quant.int4 import Int4

QWEN2 = {
    "model_type": "qwen2",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
MOE = QWEN2 | {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 1,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(choose, "_CHOSEN", {})
    mlp_file._say.cache_clear()
    yield
    torch._dynamo.reset()


def made(config=QWEN2, lora=True, **how):
    model = models.build(models.shape(config), dtype=torch.float32, device="cpu", **how)
    models.initialize(model, 0)
    if lora:
        attach(model, LoraConfig(rank=4), seed=0)
        for name, parameter in model.named_parameters():
            if name.endswith("adapter.B"):
                torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(len(name)))
    return model


def batch_of(total):
    tokens, positions = torch.arange(total) * 7 % 61, torch.arange(total)
    return Batch(tokens, tokens.roll(-1), torch.ones(total), positions, torch.tensor([0]))


def result(model, total, recompute):
    """Hidden states and every gradient."""
    for parameter in model.parameters():
        parameter.grad = None
    hidden = model.hidden(batch_of(total), recompute)
    (hidden * torch.linspace(-1, 1, hidden.numel()).view_as(hidden)).sum().backward()
    return hidden.detach(), {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


def use(monkeypatch, implementation):
    monkeypatch.setattr(dense_mlp, "implementation", lambda *given: implementation)


@pytest.mark.parametrize("lora", [True, False])
def test_the_reference_is_the_blocks_own_arithmetic_to_the_bit(lora, monkeypatch):
    model = made(lora=lora)
    eager = result(model, 260, models.plain)
    calls = []
    use(monkeypatch, lambda *given: calls.append(1) or dense_mlp.reference.dense_mlp(*given))
    restated = result(model, 260, models.plain)
    assert len(calls) == 3 and torch.equal(eager[0], restated[0]) and eager[1].keys() == restated[1].keys()
    assert all(torch.equal(eager[1][name], restated[1][name]) for name in eager[1])


@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.parametrize(
    "recompute, graphs_wanted",
    [(models.plain, 1), (models.keep_inputs, 2), (models.selective, 2), (models.elementwise, 0)],
)
def test_training_by_the_compiled_block_equals_eager_with_every_recompute(
    recompute, graphs_wanted, lora, monkeypatch
):
    """Against float64 as exact as eager. Three layers and three numbers of tokens: a graph for gradients, one
    for recomputation's first visit;
    "elementwise" keeps to the blocks."""
    model, graphs = made(lora=lora), []
    float64 = copy.deepcopy(model).double()
    block = Compiled(lambda graph, _: graphs.append(graph) or graph.forward)
    for total in (256, 300, 411):
        eager_hidden, eager = result(model, total, models.plain)
        with monkeypatch.context() as patch:
            use(patch, block)
            hidden, gradients = result(model, total, recompute)
        # eager is 6e-6 of the norm off with adapters: two float32 runs differ by as much
        exact, _ = result(float64, total, models.plain)
        assert (hidden - exact).norm() <= 1.2 * (eager_hidden - exact).norm()
        assert gradients.keys() == eager.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(
                gradient, eager[name], rtol=1e-4, atol=1e-5 * float(eager[name].abs().max()), msg=name
            )
    assert len(graphs) == graphs_wanted


def test_control_arm_a_block_that_forgets_its_adapters_is_seen(monkeypatch):
    model = made()
    _, eager = result(model, 256, models.plain)

    def forgets(x, norm, eps, *parts):
        return dense_mlp.reference.dense_mlp(x, norm, eps, *(replace(part, scale=0.0) for part in parts))

    use(monkeypatch, forgets)
    _, gradients = result(model, 256, models.plain)
    assert any(not torch.allclose(gradients[name], eager[name], rtol=1e-4, atol=1e-5) for name in eager)


def faster(path, candidate="compiled"):
    rows = [
        {
            "op": "dense_mlp",
            "device": path.stem,
            "dtype": "float32",
            "bucket": "adapters",
            "candidate": candidate,
            "error_forward": 1e-7,
            "error_backward": 1e-7,
            "median_us": 100.0,
            "reference_median_us": 200.0,
            "spread_us": 1.0,
            "reference_spread_us": 1.0,
            "repeats": 9,
            "threads": 1,
            "torch": torch.__version__,
            "date": "2026-01-01",
        }
    ]
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(rows))
    record.read.cache_clear()


def test_it_runs_where_a_record_says_so_and_never_without_one(tmp_path, monkeypatch):
    calls = []

    def candidate(*given):
        calls.append(1)
        return dense_mlp.reference.dense_mlp(*given)

    planted = replace(dense_mlp.OP.candidates["compiled"], load=lambda: candidate, refuses=lambda *_: "")
    anywhere = replace(planted, named_on=())
    monkeypatch.setattr(record, "user_folder", lambda: tmp_path / "own")
    monkeypatch.setattr(record, "COMMITTED", tmp_path / "none")
    monkeypatch.setattr(choose, "_loaded", lambda op, name, load: load())
    model, cpu = made(), torch.device("cpu")

    def runs(op):
        monkeypatch.setattr(dense_mlp, "OP", op)
        choose._CHOSEN.clear(), calls.clear()
        result(model, 256, models.plain)
        return len(calls)

    assert runs(replace(dense_mlp.OP, candidates={"compiled": anywhere})) == 0, "no record: the blocks"
    faster(tmp_path / "own" / f"{record.device_key(cpu)}.json")
    assert runs(replace(dense_mlp.OP, candidates={"compiled": anywhere})) == 3
    assert runs(replace(dense_mlp.OP, candidates={"compiled": planted})) == 0, (
        "on a CPU only where it is named"
    )
    for layer in model.layers:
        layer.mlp.impl = "compiled"
    assert runs(replace(dense_mlp.OP, candidates={"compiled": planted})) == 3
    record.read.cache_clear()


def test_a_step_of_generation_goes_op_by_op(monkeypatch):
    model = made()
    monkeypatch.setattr(dense_mlp, "implementation", lambda *given: pytest.fail("asked for few rows"))
    with torch.no_grad():
        model.hidden(batch_of(12))


def test_who_cannot_be_one_op_is_refused_by_name(caplog):
    model = made(MOE, lora=False)
    run = model.packed_pass(batch_of(256))
    assert "mixture of experts" in refuses(model.layers[0].mlp, run)
    with caplog.at_level(logging.INFO, logger="unfreeze.models"):
        for _ in range(2):
            model.hidden(batch_of(256))
    assert sum("mixture of experts" in entry.message for entry in caplog.records) == 1
    model.layers[0].mlp.impl = "compiled"
    with pytest.raises(ConfigError, match="cannot run as 'compiled' here: a mixture of experts"):
        model.hidden(batch_of(256))

    packed = models.build(
        models.shape(QWEN2),
        dtype=torch.float32,
        device="cpu",
        codec_for=lambda name: Int4(32) if ".mlp." in name else None,
    )
    assert "packed weights" in refuses(packed.layers[0].mlp, run)
    plain = made(lora=False)
    assert isinstance(plain.layers[0].mlp, MLP) and refuses(plain.layers[0].mlp, run) == ""
    plain.layers[0].mlp.impl = "compiled"
    with pytest.raises(ConfigError, match="elementwise"):
        result(plain, 256, partial(models.elementwise))
