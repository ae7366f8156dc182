"""The receipt in a run: taken at the first step that has a gradient, once, also where the run is cut off
before it; none is said."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from unfreeze.adapters import LoraConfig, attach
from unfreeze.core.batch import Loss
from unfreeze.core.errors import AdapterError
from unfreeze.core.events import EventLog
from unfreeze.drill.loading import lose_gradients
from unfreeze.drill.sandbox import Sandbox
from unfreeze.job.watch.receipts import receipt_of
from unfreeze.models.recompute import RECOMPUTE
from unfreeze.objectives.cross_entropy import cross_entropy
from unfreeze.parallel.processes.collectives import ALONE
from unfreeze.train.optim import AdamW
from unfreeze.train.step import train_step


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory):
    return Sandbox(tmp_path_factory.mktemp("sandbox"))


def state_of(sandbox, folder, steps=3):
    model = sandbox.model("deepseek_v3")
    attach(model, LoraConfig(rank=2), seed=0)
    folder.mkdir(exist_ok=True)
    run = SimpleNamespace(path=folder, events=EventLog(folder / "events.jsonl"))
    return SimpleNamespace(
        model=model, optimizer=AdamW(model), step=0, run=run, schedule=SimpleNamespace(steps=steps)
    )


def taught_by(teacher):
    """KL(teacher || student) per token, from logits [T, V] that a teacher gave: exactly 0, with gradient
    exactly 0, where both are equal."""

    def objective(hidden_TD, lm_head, batch):
        student = lm_head(hidden_TD).float().log_softmax(-1)
        target = student.detach() if teacher == "itself" else teacher
        kl_T = torch.nn.functional.kl_div(student, target, log_target=True, reduction="none").sum(-1)
        # softmax backward leaves roundings of sum(p) - 1; a student equal to its teacher owes nothing at all
        if teacher == "itself":
            kl_T = kl_T * 0.0
        return Loss((kl_T * batch.weights_T).sum(), float(batch.weights_T.sum()), {})

    return objective


def step(sandbox, state, hooks, objective=cross_entropy):
    batch = sandbox.batch([40, 20, 60])
    result = train_step(
        state.model,
        state.optimizer,
        [batch],
        objective,
        learning_rate=1e-3,
        max_norm=1.0,
        recompute=RECOMPUTE["selective"],
    )
    state.step += 1
    for hook in hooks:
        hook(state, result)
    return result


def hooks_of(sandbox, state):
    return receipt_of(state, SimpleNamespace(examples=sandbox.examples([40, 20, 60])), ALONE, stop=True)


def events(state):
    return [json.loads(line) for line in (state.run.path / "events.jsonl").read_text().splitlines()]


def test_a_step_that_teaches_nothing_is_passed_over_and_the_next_one_proves(sandbox, tmp_path):
    state = state_of(sandbox, tmp_path / "run")
    hooks = hooks_of(sandbox, state)
    assert step(sandbox, state, hooks, taught_by("itself")).grad_norm == 0
    assert not (state.run.path / "receipt.json").exists()
    step(sandbox, state, hooks)
    receipt = json.loads((state.run.path / "receipt.json").read_text())
    assert (
        receipt["step"] == 2
        and receipt["exceptions"] == []
        and receipt["groups"]["experts"]["sites_moved"] > 0
    )
    step(sandbox, state, hooks)
    assert [event["kind"] for event in events(state)] == ["receipt"]  # once


def test_a_run_without_any_gradient_says_that_it_has_no_receipt(sandbox, tmp_path):
    state = state_of(sandbox, tmp_path / "run", steps=2)
    hooks = hooks_of(sandbox, state)
    for _ in range(2):
        step(sandbox, state, hooks, taught_by("itself"))
    (warning,) = events(state)
    assert warning["message"].startswith("no receipt: no gradient moved a weight in any of the 2 steps")


def test_a_teacher_that_is_nearly_its_student_raises_no_alarm(sandbox, tmp_path):
    """Its gradient is nothing but rounding: small, and there for every matrix whose output has one."""
    state = state_of(sandbox, tmp_path / "run")
    batch = sandbox.batch([40, 20, 60])
    with torch.no_grad():
        teacher = state.model.lm_head(state.model.hidden(batch)).float().log_softmax(-1)
    found = step(sandbox, state, hooks_of(sandbox, state), taught_by(teacher))
    assert 0 < found.grad_norm < 1e-4
    assert not [
        entry
        for entry in json.loads((state.run.path / "receipt.json").read_text())["exceptions"]
        if entry["why"] == "no gradient"
    ]


def test_a_run_that_goes_on_takes_it_only_where_it_is_missing(sandbox, tmp_path):
    state = state_of(sandbox, tmp_path / "run")
    state.step = 1
    assert len(hooks_of(sandbox, state)) == 1  # cut off after a step that taught nothing
    (state.run.path / "receipt.json").write_text("{}")
    assert hooks_of(sandbox, state) == []
    state.step = 0
    assert len(hooks_of(sandbox, state)) == 1  # cut off before its first save: it begins anew


def test_the_receipt_is_written_before_it_stops_the_run(sandbox, tmp_path):
    state = state_of(sandbox, tmp_path / "run")
    lose_gradients(state.optimizer, "mlp.experts.*down")
    with pytest.raises(AdapterError, match="down_proj"):
        step(sandbox, state, hooks_of(sandbox, state))
    exception, *_ = json.loads((state.run.path / "receipt.json").read_text())["exceptions"]
    assert exception["why"] == "no gradient" and exception["sites"].endswith(".down_proj")
