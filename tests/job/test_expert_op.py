"""The expert op of a run beside the reference, on the run's own rows: right ones pass, a wrong one is told."""

import json
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch

from unfreeze import cli
from unfreeze.adapters import LoraConfig, attach
from unfreeze.commands.demo import TINY_K2
from unfreeze.core.conform import violations
from unfreeze.drill.sandbox import Sandbox
from unfreeze.job.watch import expert_op
from unfreeze.job.watch.expert_op import LIMIT, ExpertOp, error_of, is_wrong
from unfreeze.kernels.expert_mlp import ClampedSwiGLU
from unfreeze.models.blocks import experts as blocks
from unfreeze.models.blocks.experts import BiasedExperts, Experts
from unfreeze.report import guards

pytestmark = pytest.mark.usefixtures("whole_looks")


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory):
    return Sandbox(tmp_path_factory.mktemp("sandbox"))


def looked(sandbox, family, dtype="float32"):
    model = sandbox.model(family, dtype)
    attach(model, LoraConfig(rank=2), seed=0)
    for name, parameter in model.named_parameters():
        if name.endswith("_B"):  # as after some steps: zero factors would prove little
            torch.nn.init.normal_(parameter, std=0.02)
    watch = ExpertOp(model)
    with torch.no_grad():
        model.hidden(sandbox.batch([40, 20, 60]))
    return watch.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["deepseek_v3-int4", "qwen3_moe"])
def test_the_op_equals_the_reference_on_the_runs_rows(sandbox, family, dtype):
    result = looked(sandbox, family, dtype)
    assert result["rows"] == 64 and result["gradients"]
    assert 0 < result["error"] < LIMIT[getattr(torch, dtype)] / 2 and result["limit"] < 0.04


def test_experts_with_biases_and_another_activation_are_compared_too():
    activation = ClampedSwiGLU(interleaved=True)
    experts = BiasedExperts(4, 32, 16, codec=None, dtype=torch.float32, device="cpu", activation=activation)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    ids = torch.stack([torch.randperm(4)[:2] for _ in range(20)])
    assert error_of(experts, torch.randn(20, 32), ids, torch.rand(20, 2), 20) < 1e-5


def test_a_dense_model_has_nothing_to_compare(sandbox):
    assert looked(sandbox, "llama") is None


def test_of_experts_elsewhere_nothing_is_compared(sandbox):
    """Ids of another process's experts: their weights count as zero."""
    model = sandbox.model("qwen3_moe")
    experts = next(module for module in model.modules() if isinstance(module, Experts))
    ids = torch.tensor([[0, 1], [1, experts.num_experts + 5]])
    x, weights = torch.randn(2, experts.hidden_size), torch.rand(2, 2)
    assert error_of(experts, x, ids, weights, 2) < 1e-5


def test_what_is_wrong_for_many_rows_alone_is_seen(sandbox, monkeypatch):
    """The run computes thousands of rows by other kernels than 64."""
    real = blocks.expert_mlp
    monkeypatch.setattr(
        blocks, "expert_mlp", lambda x, *a, **m: real(x, *a, **m) * (1.2 if len(x) > 64 else 1)
    )
    assert looked(sandbox, "qwen3_moe")["error"] == pytest.approx(0.2, rel=1e-3)


def test_wrong_gradients_of_the_adapters_are_seen(sandbox, monkeypatch):
    """Output and gradients of x are right; the adapters would learn the opposite."""
    real = blocks.expert_mlp

    def planted(x, ids, weights, gate_up, down, factors=None, **more):
        turned = replace(
            factors, **{f.name: Turned.apply(getattr(factors, f.name)) for f in fields(factors)[:4]}
        )
        return real(x, ids, weights, gate_up, down, turned, **more)

    monkeypatch.setattr(blocks, "expert_mlp", planted)
    assert looked(sandbox, "qwen3_moe")["error"] == pytest.approx(2.0, rel=1e-3)


class Turned(torch.autograd.Function):
    """The identity, with its gradient turned round."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -grad


def test_a_library_without_memory_costs_the_comparison_and_a_broken_card_ends_the_run(sandbox, monkeypatch):
    def fails(*_, **__):
        raise error

    monkeypatch.setattr(expert_op, "reference_expert_mlp", fails)
    error = RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
    assert looked(sandbox, "qwen3_moe")["rows"] == 0
    error = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(torch.AcceleratorError):
        looked(sandbox, "qwen3_moe")


WRONG = {
    "one expert's rows": lambda y, ids: torch.where((ids == ids[0, 0]).any(1)[:, None], 1.1 * y, y),
    "a constant": lambda y, ids: y * 1.05,
    "NaN": lambda y, ids: y * torch.nan,
}


def test_a_full_card_costs_the_comparison_and_not_the_run(sandbox, monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(expert_op, "reference_expert_mlp", full)
    result = looked(sandbox, "qwen3_moe")
    assert result["rows"] == 0 and "error" not in result and not is_wrong(result)


def test_numbers_that_are_not_finite_are_a_fault_and_not_a_missing_one(sandbox, monkeypatch):
    """An event has no infinity: it would be left out, and the report would be silent."""
    real = blocks.expert_mlp
    monkeypatch.setattr(blocks, "expert_mlp", lambda *a, **more: real(*a, **more) * torch.nan)
    result = looked(sandbox, "qwen3_moe")
    assert result["error"] is None and is_wrong(result)
    event = {"kind": "receipt", "step": 1, "time": 0.0, "groups": {}, "expert_op": result}
    assert not violations(event)
    row = guards._expert_op(SimpleNamespace(events=[event]))
    assert row.state == "fault" and "not finite" in row.result
    del result["error"]
    assert not is_wrong(result) and guards._expert_op(SimpleNamespace(events=[event])) is None


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_kernel_is_a_warning_and_a_red_line_of_the_report(
    kind, monkeypatch, tmp_path, chat_rows, capsys
):
    real = blocks.expert_mlp
    monkeypatch.setattr(
        blocks, "expert_mlp", lambda x, ids, *rest, **more: WRONG[kind](real(x, ids, *rest, **more), ids)
    )
    words = ["sft", "--model", TINY_K2, "--data", chat_rows, "--out", tmp_path / "run", "--steps", 2]
    words += ["--tokens-per-step", 128, "--watch.samples", 0, "--lora.rank", 1, "--dtype", "float32"]
    code = cli.main([*map(str, words), "--optimizer.warmup", "0", "--quiet"])
    if kind == "NaN":
        assert code != 0
        return
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    (receipt,) = [event for event in events if event["kind"] == "receipt"]
    assert receipt["expert_op"]["error"] > 100 * receipt["expert_op"]["limit"]
    assert any("unfreeze doctor --gpu" in event.get("message", "") for event in events)
    assert cli.main(["report", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out + (tmp_path / "run" / "report.html").read_text()
    assert "Expert op against the reference" in said and "unfreeze doctor --gpu" in said
