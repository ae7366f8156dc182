"""Saving and going on: bit for bit, atomically, and only with what fits (FAILURES R1 and R2), a control arm for each part of the state."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from unfreeze.core.errors import CheckpointError, ConfigError, UserError
from unfreeze.objectives.cross_entropy import cross_entropy
from unfreeze.train import state as state_module
from unfreeze.train.balance import LossFreeBalance
from unfreeze.train.fit import fit
from unfreeze.train.optim import AdamW
from unfreeze.train.run import Run, latest
from unfreeze.train.schedule import Schedule
from unfreeze.train.state import State, save, start_or_resume


def begin(tiny: SimpleNamespace, run: Run, *, steps: int = 10, dtype: torch.dtype = torch.float32, seed: int = 0, **settings: Any) -> State:
    model = tiny.Model(dtype=dtype, seed=seed)
    return start_or_resume(
        run, model, optimizer=AdamW(model, weight_decay=0.01, **settings),
        schedule=Schedule(1e-2, steps, "cosine", 3), after_update=[LossFreeBalance(model, 0.05)],
    )  # fmt: skip


def train(
    tiny: SimpleNamespace, folder: Path, *, until: int = 10, dtype: torch.dtype = torch.float32, after_start: Callable[[State], None] | None = None
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """One session in `folder` up to step `until` of 10, stopped there as by Ctrl-C. Returns its losses and the tensors at its end.

    Dropout with torch's RNG stands for whatever draws random numbers in training.
    """
    losses: list[float] = []

    def look(state: State, result: Any) -> None:
        losses.append(result.loss)
        if state.step == until:
            os.kill(os.getpid(), signal.SIGINT)

    def noisy(layer: Any, x_TD: torch.Tensor, routes: Any) -> torch.Tensor:
        return tiny.plain(layer, torch.nn.functional.dropout(x_TD, 0.1), routes)

    with Run(folder, {"seed": 0}) as run:
        # another seed on resume: what the save holds must win over what the model was made with
        state = begin(tiny, run, dtype=dtype, seed=run.step)
        if after_start is not None:
            after_start(state)
        fit(state, tiny.endless(state.cursor), cross_entropy, through=noisy, micro_batches=2, on_step=[look])
        return losses, {name: tensor.clone() for name, tensor in state.tensors().items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ten_steps_equal_five_and_five_bit_for_bit(tiny: SimpleNamespace, tmp_path: Path, dtype: torch.dtype):
    straight, expected = train(tiny, tmp_path / "straight", dtype=dtype)
    first, _ = train(tiny, tmp_path / "broken", until=5, dtype=dtype)
    second, tensors = train(tiny, tmp_path / "broken", dtype=dtype)
    assert first + second == straight and len(first) == 5
    assert tensors.keys() == expected.keys()
    assert any(name.startswith("optimizer.exp_avg_sq.") for name in tensors) and "after_update.balance.0" in tensors
    for name, tensor in expected.items():
        assert torch.equal(tensors[name], tensor), name
    events = [json.loads(line) for line in (tmp_path / "broken" / "events.jsonl").read_text().splitlines()]
    assert [e["step"] for e in events if e["kind"] == "train"] == list(range(1, 11))
    assert [e["loss"] for e in events if e["kind"] == "train"] == straight
    assert [(e["step"], e["resumed"]) for e in events if e["kind"] == "start"] == [(0, False), (5, True)]


def fresh_optimizer(state: State) -> None:
    for tensor in state.optimizer.tensors().values():
        tensor.zero_()


def lost_cursor(state: State) -> None:
    state.cursor = None


def lost_rng(state: State) -> None:
    torch.manual_seed(1)


def lost_balance(state: State) -> None:
    for part in state.after_update:
        for tensor in part.tensors().values():
            tensor.zero_()


def other_step(state: State) -> None:
    state.step -= 1


@pytest.mark.parametrize("bug", [fresh_optimizer, lost_cursor, lost_rng, lost_balance, other_step])
def test_control_arms_any_lost_part_of_the_state_is_noticed(tiny: SimpleNamespace, tmp_path: Path, bug: Callable[[State], None]):
    straight, expected = train(tiny, tmp_path / "straight")
    first, _ = train(tiny, tmp_path / "broken", until=5)
    second, tensors = train(tiny, tmp_path / "broken", after_start=bug)
    assert first + second != straight
    assert any(not torch.equal(tensors[name], tensor) for name, tensor in expected.items())


def test_a_save_is_safetensors_and_json_and_the_last_two_are_kept(tiny: SimpleNamespace, tmp_path: Path):
    with Run(tmp_path, {}) as run:
        state = begin(tiny, run)
        fit(state, tiny.endless(), cross_entropy, through=tiny.plain, save_every=3)
    assert sorted(p.name for p in (tmp_path / "state").iterdir()) == ["step-000009", "step-000010"]
    assert sorted(p.name for p in (tmp_path / "state" / "step-000010").iterdir()) == ["state.json", "tensors.safetensors"]
    record = json.loads((tmp_path / "state" / "step-000010" / "state.json").read_text())
    assert (record["step"], record["cursor"], record["config"]) == (10, {"position": 10}, {})
    with Run(tmp_path, {}) as run:
        assert run.finished
        finished = fit(begin(tiny, run), tiny.endless(run.cursor), cross_entropy, through=tiny.plain)
        assert (finished.reason, finished.steps, finished.loss_last) == ("done", 10, None)


def test_other_schedule_or_optimizer_settings_are_refused(tiny: SimpleNamespace, tmp_path: Path):
    with Run(tmp_path, {}) as run:
        save(begin(tiny, run))
    with Run(tmp_path, {}) as run:
        with pytest.raises(ConfigError, match=r"schedule\.steps: 10 -> 12\n"):
            begin(tiny, run, steps=12)
        with pytest.raises(ConfigError, match=r"optimizer\.betas: \[0.9, 0.95\] -> \[0.9, 0.999\]\n"):
            begin(tiny, run, betas=(0.9, 0.999))
    with Run(tmp_path, {}, allow_changed=["schedule.steps"]) as run:
        assert begin(tiny, run, steps=12).schedule.steps == 12


def test_a_save_of_another_model_is_refused_before_anything_is_copied(tiny: SimpleNamespace, tmp_path: Path):
    with Run(tmp_path, {}) as run:
        save(begin(tiny, run))
    with Run(tmp_path, {}) as run:
        larger = tiny.Model(layers=3, seed=9)
        with pytest.raises(CheckpointError, match=r"tensors missing, 2 unexpected; first: model\.layers\.2\.experts") as caught:
            start_or_resume(run, larger, optimizer=AdamW(larger, weight_decay=0.01), schedule=Schedule(1e-2, 10, "cosine", 3))
        assert "model.layers.2.experts" in str(caught.value)
        other = tiny.Model(dtype=torch.float64)
        with pytest.raises(CheckpointError, match=r"is torch\.float32 .*, this model has torch\.float64"):
            start_or_resume(
                run, other, optimizer=AdamW(other, weight_decay=0.01), schedule=Schedule(1e-2, 10, "cosine", 3),
                after_update=[LossFreeBalance(other)],
            )  # fmt: skip


def test_truncated_tensors_are_named(tiny: SimpleNamespace, tmp_path: Path):
    with Run(tmp_path, {}) as run:
        path = save(begin(tiny, run)) / "tensors.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with Run(tmp_path, {}) as run, pytest.raises(CheckpointError, match=r"tensors\.safetensors cannot be read"):
        begin(tiny, run)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_failed_save_leaves_the_one_before(tiny: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int):
    with Run(tmp_path, {}) as run:
        state = begin(tiny, run)
        kept = save(state)
        state.step = 1

        def half_written(path: Path, tensors: Any) -> None:
            path.write_bytes(b"half")
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(state_module, "write_safetensors", half_written)
        with pytest.raises(UserError, match="the disk is full" if number == errno.ENOSPC else "Input/output error") as caught:
            save(state)
        assert "Earlier saves are untouched" in str(caught.value)
    assert latest(tmp_path) == kept and not list((tmp_path / "state").glob("*.tmp"))


MOMENTS = ("write_safetensors", "write_file", "sync_folder", "_remove")
KILLS = """
import os, signal, sys
sys.path.insert(0, {here!r})
import conftest as tiny
from unfreeze.objectives.cross_entropy import cross_entropy
from unfreeze.train import state as module
from unfreeze.train.fit import fit
from unfreeze.train.optim import AdamW
from unfreeze.train.run import Run
from unfreeze.train.schedule import Schedule

def killed_in(moment):
    run = Run({folder!r} + "/" + moment, {{}})
    model = tiny.TinyModel()
    state = module.start_or_resume(run, model, optimizer=AdamW(model), schedule=Schedule(1e-2, 10))
    part = getattr(module, moment)
    def die(*arguments):
        if state.step == 3:
            if moment == "write_safetensors":
                arguments[0].write_bytes(b"half")
            if moment == "_remove":
                arguments[0].rename(arguments[0].with_name(arguments[0].name + ".old.tmp"))
            os.kill(os.getpid(), signal.SIGKILL)
        return part(*arguments)
    setattr(module, moment, die)
    fit(state, tiny.endless(), cross_entropy, through=tiny.plain, save_every=1)

for moment in {moments!r}:
    child = os.fork()
    if child == 0:
        killed_in(moment)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL, moment
"""


def test_kill_9_inside_a_save_leaves_one_that_can_be_read(tiny: SimpleNamespace, tmp_path: Path):
    """A process kills itself inside its third save: half a tensor file, files not yet synced, half an old save removed. Each resumes."""
    code = KILLS.format(here=str(Path(__file__).parent), folder=str(tmp_path), moments=MOMENTS)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    process = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    for moment in MOMENTS:
        with Run(tmp_path / moment, {}) as run:
            assert run.step == (3 if moment in ("sync_folder", "_remove") else 2)
            model = tiny.Model(seed=5)
            state = start_or_resume(run, model, optimizer=AdamW(model), schedule=Schedule(1e-2, 10))
            fit(state, tiny.endless(state.cursor), cross_entropy, through=tiny.plain)
            assert state.step == 10
