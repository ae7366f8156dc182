"""Saving and going on: bit for bit, atomically, and only with what fits (docs/why/trust.md R1 and R2), a control
arm for each part of the state."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from unfreeze.core.errors import CheckpointError, ConfigError, UserError
from unfreeze.objectives.cross_entropy import cross_entropy
from unfreeze.train import state as state_module
from unfreeze.train.balance import LossFreeBalance
from unfreeze.train.fit import fit
from unfreeze.train.optim import AdamW
from unfreeze.train.run import Run, latest, saves
from unfreeze.train.schedule import Schedule
from unfreeze.train.shards import SavedShards
from unfreeze.train.state import State, load_best, save, start_or_resume
from unfreeze.train.timer import Saves


def begin(
    tiny: SimpleNamespace,
    run: Run,
    *,
    steps: int = 10,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **settings: Any,
) -> State:
    model = tiny.Model(dtype=dtype, seed=seed)
    return start_or_resume(
        run,
        model,
        optimizer=AdamW(model, weight_decay=0.01, **settings),
        schedule=Schedule(1e-2, steps, "cosine", 3),
        after_update=[LossFreeBalance(model, 0.05)],
    )


def train(
    tiny: SimpleNamespace,
    folder: Path,
    *,
    until: int = 10,
    dtype: torch.dtype = torch.float32,
    after_start: Callable[[State], None] | None = None,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """One session in `folder` up to step `until` of 10, stopped there as by Ctrl-C. Returns its losses and
    the tensors at its end.

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
        fit(state, tiny.endless(state.cursor, 2), cross_entropy, recompute=noisy, on_step=[look])
        return losses, {name: tensor.clone() for name, tensor in state.tensors().items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ten_steps_equal_five_and_five_bit_for_bit(tiny: SimpleNamespace, tmp_path: Path, dtype: torch.dtype):
    straight, expected = train(tiny, tmp_path / "straight", dtype=dtype)
    first, _ = train(tiny, tmp_path / "broken", until=5, dtype=dtype)
    second, tensors = train(tiny, tmp_path / "broken", dtype=dtype)
    assert first + second == straight and len(first) == 5
    assert tensors.keys() == expected.keys()
    assert (
        any(name.startswith("optimizer.exp_avg_sq.") for name in tensors)
        and "after_update.balance.0" in tensors
    )
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


def other_schedule(state: State) -> None:
    state.schedule = Schedule(2e-2, 10, "cosine", 3)


@pytest.mark.parametrize(
    "bug", [fresh_optimizer, lost_cursor, lost_rng, lost_balance, other_step, other_schedule]
)
def test_control_arms_any_lost_part_of_the_state_is_noticed(
    tiny: SimpleNamespace, tmp_path: Path, bug: Callable[[State], None]
):
    straight, expected = train(tiny, tmp_path / "straight")
    first, _ = train(tiny, tmp_path / "broken", until=5)
    second, tensors = train(tiny, tmp_path / "broken", after_start=bug)
    assert first + second != straight
    assert any(not torch.equal(tensors[name], tensor) for name, tensor in expected.items())


def drop_from_the_save(folder: Path, part: str) -> None:
    """Takes a part out of the latest save, as if it had never been written."""
    path = folder / "state" / "step-000005"
    record, tensors = json.loads((path / "state.json").read_text()), load_file(path / "tensors.safetensors")
    record = {name: value for name, value in record.items() if name != part}
    (path / "state.json").write_text(json.dumps(record))
    save_file(
        {name: tensor for name, tensor in tensors.items() if not name.startswith(part)},
        path / "tensors.safetensors",
    )


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("model.", "does not fit this model: 7 of 30 tensors missing"),
        ("optimizer.exp_avg", r"14 of 30 tensors missing, 0 unexpected; first: optimizer\.exp_avg\."),
        ("optimizer.step", r"7 of 30 tensors missing.* first: optimizer\.step\."),
        ("after_update.", r"2 of 30 tensors missing.* first: after_update\.balance\.0"),
        ("rng.", r"1 of 30 tensors missing.* first: rng\.cpu"),
        ("cursor", r"state\.json is damaged"),
        ("schedule", r"state\.json is damaged"),
        ("optimizer", r"state\.json is damaged"),
        ("config_hash", r"state\.json is damaged"),
        ("config", r"state\.json is damaged"),
        ("step", r"state\.json is damaged"),
    ],
)
def test_a_save_without_one_of_its_parts_is_refused(
    tiny: SimpleNamespace, tmp_path: Path, part: str, words: str
):
    train(tiny, tmp_path, until=5)
    drop_from_the_save(tmp_path, part)
    with pytest.raises(CheckpointError, match=words):
        train(tiny, tmp_path)


@pytest.mark.parametrize("part", ["optimizer.", "after_update.", "rng."])
def test_control_arm_a_loader_that_forgives_a_missing_part_gives_other_losses(
    tiny: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
):
    """What the refusal above is for: the usual "load what is there" goes on without a word, with other
    numbers."""

    def forgiving(source: SavedShards, live: dict[str, torch.Tensor], parts: object) -> None:
        saved = load_file(source.path)
        with torch.no_grad():
            for name in saved.keys() & live.keys():
                live[name].copy_(saved[name])
        if "rng.cpu" in saved:
            torch.set_rng_state(saved["rng.cpu"])

    monkeypatch.setattr(state_module, "_load_tensors", forgiving)
    straight, _ = train(tiny, tmp_path / "straight")
    first, _ = train(tiny, tmp_path / "whole", until=5)
    assert first + train(tiny, tmp_path / "whole")[0] == straight
    first, _ = train(tiny, tmp_path / "broken", until=5)
    drop_from_the_save(tmp_path / "broken", part)
    assert first + train(tiny, tmp_path / "broken")[0] != straight


def test_the_best_save_stays_beside_the_newest_and_its_weights_come_back(
    tiny: SimpleNamespace, tmp_path: Path
):
    with Run(tmp_path, {}) as run:
        state = begin(tiny, run)
        for step in range(1, 6):
            state.step = step
            with torch.no_grad():
                state.model.lm_head.bias.fill_(step)  # type: ignore[union-attr]
            if step == 2:
                state.best = {"step": 2, "loss": 0.5}
            save(state, keep=2)
        assert [path.name for path in saves(tmp_path)] == ["step-000002", "step-000004", "step-000005"]
        moments = {name: tensor.clone() for name, tensor in state.optimizer.tensors().items()}
        assert load_best(state) == 2 and bool((state.model.lm_head.bias == 2).all())  # type: ignore[union-attr]
        assert all(torch.equal(tensor, moments[name]) for name, tensor in state.optimizer.tensors().items())
    with Run(tmp_path, {}) as run:
        state = begin(tiny, run, seed=3)
        assert state.best == {"step": 2, "loss": 0.5} and bool((state.model.lm_head.bias == 5).all())  # type: ignore[union-attr]
        state.step, state.best = 6, {"step": 6, "loss": 0.4}
        save(state, keep=1)
        assert [path.name for path in saves(tmp_path)] == ["step-000006"] and load_best(
            state
        ) is None  # the old best has gone


def test_all_of_a_save_is_on_the_disk_before_its_name_is(
    tiny: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """What a power cut needs, which kill -9 cannot show: every file synced, then the folder, then the rename,
    then the parent."""
    trace = traced(tiny, tmp_path / "a", monkeypatch)
    assert unsafe(trace) == []
    assert trace[-1] == ("fsync", "state") and trace[-2] == ("rename", "step-000000.tmp", "step-000000")
    # control arms: nothing synced; the folder alone; the parent not
    without = [entry for entry in trace if entry[0] != "fsync"]
    assert unsafe(without) == ["tensors.safetensors", "state.json", "step-000000.tmp", "state"]
    assert unsafe([entry for entry in trace if "unfinished" not in str(entry[1]) or entry[0] != "fsync"]) == [
        "tensors.safetensors",
        "state.json",
    ]
    assert unsafe(trace[:-1]) == ["state"]


def traced(tiny: SimpleNamespace, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The syncs and renames of one save, by the names of what they are done to."""
    trace: list[tuple[str, ...]] = []
    fsync, rename, replace = os.fsync, os.rename, os.replace

    def seen(name: str, do: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            paths = [os.readlink(f"/proc/self/fd/{arguments[0]}")] if name == "fsync" else arguments
            trace.append((name, *(Path(path).name for path in paths)))
            do(*arguments)

        return call

    with Run(folder, {}) as run:
        state = begin(tiny, run)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", seen("fsync", fsync))
            patch.setattr(os, "rename", seen("rename", rename))
            patch.setattr(os, "replace", seen("rename", replace))
            save(state)
    return trace


def unsafe(trace: list[tuple[str, ...]]) -> list[str]:
    """What a power cut at the end of the trace could lose of a save whose name is there: files and folders
    not synced in time."""
    bad, synced, dirty = [], set(), set()
    for operation, *names in trace:
        if operation == "fsync":
            synced.add(names[0])
            dirty.discard(names[0])
        elif names[1].startswith("step-"):
            bad += [folder for folder in ("step-000000.tmp",) if folder in dirty]
            dirty.add("state")
        else:
            bad += [names[1]] if names[0] not in synced else []
            dirty.add("step-000000.tmp")
    return bad + (["state"] if "state" in dirty else [])


def test_a_save_is_safetensors_and_json_and_the_last_two_are_kept(tiny: SimpleNamespace, tmp_path: Path):
    with Run(tmp_path, {}) as run:
        state = begin(tiny, run)
        fit(state, tiny.endless(), cross_entropy, recompute=tiny.plain, saves=Saves(every=3))
    assert sorted(p.name for p in (tmp_path / "state").iterdir()) == ["step-000009", "step-000010"]
    assert sorted(p.name for p in (tmp_path / "state" / "step-000010").iterdir()) == [
        "state.json",
        "tensors.safetensors",
    ]
    record = json.loads((tmp_path / "state" / "step-000010" / "state.json").read_text())
    assert (record["step"], record["cursor"], record["config"]) == (10, {"position": 10}, {})
    with Run(tmp_path, {}) as run:
        assert run.finished
        finished = fit(begin(tiny, run), tiny.endless(run.cursor), cross_entropy, recompute=tiny.plain)
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
        with pytest.raises(
            CheckpointError, match=r"tensors missing, 2 unexpected; first: model\.layers\.2\.experts"
        ) as caught:
            start_or_resume(
                run,
                larger,
                optimizer=AdamW(larger, weight_decay=0.01),
                schedule=Schedule(1e-2, 10, "cosine", 3),
            )
        assert "model.layers.2.experts" in str(caught.value)
        other = tiny.Model(dtype=torch.float64)
        with pytest.raises(CheckpointError, match=r"is torch\.float32 .*, this model has torch\.float64"):
            start_or_resume(
                run,
                other,
                optimizer=AdamW(other, weight_decay=0.01),
                schedule=Schedule(1e-2, 10, "cosine", 3),
                after_update=[LossFreeBalance(other)],
            )


def test_truncated_tensors_are_named(tiny: SimpleNamespace, tmp_path: Path):
    with Run(tmp_path, {}) as run:
        path = save(begin(tiny, run)) / "tensors.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with (
        Run(tmp_path, {}) as run,
        pytest.raises(CheckpointError, match=r"tensors\.safetensors cannot be read"),
    ):
        begin(tiny, run)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_failed_save_leaves_the_one_before(
    tiny: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
):
    with Run(tmp_path, {}) as run:
        state = begin(tiny, run)
        kept = save(state)
        state.step = 1

        def half_written(path: Path, tensors: Any) -> None:
            path.write_bytes(b"half")
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(state_module, "write_safetensors", half_written)
        with pytest.raises(
            UserError, match="the disk is full" if number == errno.ENOSPC else "Input/output error"
        ) as caught:
            save(state)
        assert "Earlier saves are untouched" in str(caught.value)
    assert latest(tmp_path) == kept and not list((tmp_path / "state").glob("*.tmp"))


def test_a_save_over_the_limit_of_a_files_size_names_that_limit(tiny: SimpleNamespace, tmp_path: Path):
    """`ulimit -f` of the system itself: there is room on the disk, so none is to be freed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Run(tmp_path, {}) as run:
        state = begin(tiny, run)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20 * 1024, hard))
        try:
            with pytest.raises(UserError) as caught:
                save(state)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert re.fullmatch(
        r"could not save .*/step-000000: the limit on a file's size \(ulimit -f\) is 20\.0 KiB; [\d.]+ [KM]iB needed\."
        r" There is no earlier save\n"
        r"  next: ulimit -f unlimited, then run the same command again: it starts at step 1",
        str(caught.value),
    )
    assert not list((tmp_path / "state").glob("*.tmp"))
