"""The run folder: one process at a time (R8), a changed configuration refused by field (R2), unfinished saves
never looked at (R1)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from unfreeze.core.errors import CheckpointError, ConfigError, UserError
from unfreeze.train import run as run_module
from unfreeze.train.run import Run, changed_fields, config_hash, latest

CONFIG = {"model": "m", "lora": {"rank": 8, "targets": ["all-linear"]}, "learning_rate": 1e-4}


def write_save(run_dir: Path, step: int, config: dict = CONFIG, steps: int = 100) -> Path:
    path = run_dir / "state" / f"step-{step:06d}"
    path.mkdir(parents=True)
    record = {
        "step": step,
        "cursor": {"position": step},
        "schedule": {"steps": steps},
        "optimizer": {},
        "config": config,
    }
    (path / "state.json").write_text(json.dumps(record | {"config_hash": config_hash(config)}))
    return path


def test_a_second_run_in_the_folder_is_refused_with_the_pid(tmp_path: Path):
    with (
        Run(tmp_path, CONFIG),
        pytest.raises(UserError, match=f"in use by process {os.getpid()}: two runs in one folder"),
    ):
        Run(tmp_path, CONFIG)
    Run(tmp_path, CONFIG).close()  # free again


def test_another_process_holds_the_lock_until_it_is_killed(tmp_path: Path):
    code = (
        f"import time; from unfreeze.train.run import Run; run = Run({str(tmp_path)!r}, {{}}); print('held',"
        " flush=True); time.sleep(60)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None and process.stdout.readline().strip() == "held"
    try:
        with pytest.raises(UserError, match=f"in use by process {process.pid}"):
            Run(tmp_path, {})
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    Run(tmp_path, {}).close()


def test_control_arm_without_the_lock_the_second_run_takes_the_firsts_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(run_module.fcntl, "flock", lambda *arguments: None)
    with Run(tmp_path, CONFIG) as one, Run(tmp_path, CONFIG) as two:
        for step in (1, 2):
            one.events.emit("train", step, loss=1.0, grad_norm=1.0)
            two.events.emit("train", step, loss=2.0, grad_norm=1.0)
    assert [json.loads(line)["loss"] for line in (tmp_path / "events.jsonl").read_text().splitlines()] == [
        2.0,
        2.0,
    ]


def test_a_lock_file_that_a_killed_run_left_is_no_lock(tmp_path: Path):
    (tmp_path / "lock").write_text("999999")
    with Run(tmp_path, CONFIG):
        assert (tmp_path / "lock").read_text() == str(os.getpid())
        (tmp_path / "lock").write_text("")  # a holder that has not written its number yet
        with pytest.raises(
            UserError,
            match=r"in use by process \(just starting\).*\n  next: wait for it, try again in a second",
        ):
            Run(tmp_path, CONFIG)


def test_a_fixed_field_is_refused_even_if_it_is_allowed(tmp_path: Path):
    write_save(tmp_path, 10)
    changed = CONFIG | {"lora": {"rank": 16, "targets": ["all-linear"]}, "learning_rate": 1e-3}
    with pytest.raises(
        ConfigError,
        match=r"1 field differs .*: lora\.rank: 8 -> 16; lora\.rank can never change within a run: a shape\n",
    ) as caught:
        Run(tmp_path, changed, allow_changed=["lora", "learning_rate"], fixed={"lora.rank": "a shape"})
    assert "--save.allow-changed" not in caught.value.next


def test_an_allowed_change_is_said_and_the_run_is_not_finished(tmp_path: Path):
    write_save(tmp_path, 10, steps=10)
    with Run(tmp_path, CONFIG) as run:
        assert run.finished and run.changed == []
    with Run(tmp_path, CONFIG | {"learning_rate": 1e-3}, allow_changed=["learning_rate"]) as run:
        assert not run.finished and run.changed == ["learning_rate: 0.0001 -> 0.001"]
    (event,) = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert event["kind"] == "warning" and event["message"].endswith(
        "as allowed: learning_rate: 0.0001 -> 0.001"
    )


def test_a_fresh_folder_starts_at_zero(tmp_path: Path):
    with Run(tmp_path / "new" / "run", CONFIG) as run:
        assert (run.step, run.cursor, run.saved, run.finished) == (0, None, None, False)


def test_the_latest_complete_save_is_found_and_unfinished_ones_are_not(tmp_path: Path):
    assert latest(tmp_path) is None
    for step in (5, 20, 1_000_000):
        write_save(tmp_path, step)
    for name in ("step-2000000.tmp", "step-9999999.old.tmp", "step-3", "notes"):
        (tmp_path / "state" / name).mkdir()
    (tmp_path / "adapter").mkdir()
    leftovers = [
        tmp_path / ".model.unfinished-17",
        tmp_path / "adapter" / ".adapter_model.safetensors.unfinished-17",
    ]
    leftovers[0].mkdir()
    leftovers[1].write_bytes(b"half")
    assert latest(tmp_path) == tmp_path / "state" / "step-1000000"
    with Run(tmp_path, CONFIG) as run:
        assert (run.step, run.cursor, run.finished) == (1_000_000, {"position": 1_000_000}, True)
    # removed under the lock
    assert not list((tmp_path / "state").glob("*.tmp")) and not any(path.exists() for path in leftovers)
    assert (tmp_path / "state" / "notes").is_dir()


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"learning_rate": 2e-4}, "learning_rate: 0.0001 -> 0.0002"),
        ({"lora": {"rank": 16, "targets": ["all-linear"]}}, "lora.rank: 8 -> 16"),
        ({"lora": {"rank": 8, "targets": ["experts"]}}, r'lora.targets: \["all-linear"\] -> \["experts"\]'),
        ({"seed": 1}, "seed: absent -> 1"),
        ({"model": None}, 'model: "m" -> null'),
    ],
)
def test_a_changed_configuration_is_refused_with_its_fields(tmp_path: Path, change: dict, line: str):
    write_save(tmp_path, 10)
    with pytest.raises(
        ConfigError, match=f"trained to step 10 with another configuration; 1 field differs .*{line}\n"
    ) as caught:
        Run(tmp_path, CONFIG | change)
    assert "--out" in caught.value.next
    Run(
        tmp_path, CONFIG, allow_changed=()
    ).close()  # the refusal freed the lock, and the same configuration goes on
    Run(tmp_path, CONFIG | change, allow_changed=[next(iter(change))]).close()


def test_every_changed_field_is_listed():
    now = {"lora": {"rank": 4, "targets": ["all-linear"]}, "learning_rate": 1e-4, "seed": 3}
    assert changed_fields(CONFIG, now) == [
        ("lora.rank", "8", "4"),
        ("model", '"m"', "absent"),
        ("seed", "absent", "3"),
    ]


def test_tuples_and_paths_compare_as_json(tmp_path: Path):
    write_save(tmp_path, 1, {"targets": ["a"], "data": "x/y"})
    Run(tmp_path, {"targets": ("a",), "data": Path("x/y")}).close()


def test_events_after_the_save_are_dropped(tmp_path: Path):
    with Run(tmp_path, CONFIG) as run:
        for step in range(1, 6):
            run.events.emit("train", step, loss=1.0, grad_norm=1.0)
    write_save(tmp_path, 3)
    Run(tmp_path, CONFIG).close()
    *kept, said = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    assert [event["step"] for event in kept] == [1, 2, 3]
    assert said["message"] == "2 steps were not saved and are lost; step 4 is next"
    Run(tmp_path, CONFIG).close()  # nothing more is lost
    assert (tmp_path / "events.jsonl").read_text().count("are lost") == 1


def test_a_run_killed_before_its_first_save_says_what_is_lost(tmp_path: Path):
    with Run(tmp_path, CONFIG) as run:
        run.events.emit("train", 1, loss=1.0, grad_norm=1.0)
    Run(tmp_path, CONFIG).close()
    (said,) = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    assert said["message"] == "1 step was not saved and is lost; step 1 is next"


@pytest.mark.parametrize("damage", ["{", "[]", '{"config": {}}', None])
def test_a_damaged_record_is_named(tmp_path: Path, damage: str | None):
    path = write_save(tmp_path, 3) / "state.json"
    path.write_text(damage if damage is not None else path.read_text().replace('"rank": 8', '"rank": 9'))
    with pytest.raises(CheckpointError, match=r"step-000003/state\.json"):
        Run(tmp_path, CONFIG)
    Run(tmp_path / "other", CONFIG).close()


@pytest.mark.parametrize("best", [7, {"step": "2", "loss": 1.0}, {"step": 2}])
def test_a_best_that_names_no_step_is_damage(tmp_path: Path, best: object):
    path = write_save(tmp_path, 3) / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"best": best}))
    with pytest.raises(CheckpointError, match=r"state\.json is damaged"):
        Run(tmp_path, CONFIG)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"best": {"step": 2, "loss": 1.5}}))
    Run(tmp_path, CONFIG).close()


@pytest.mark.parametrize(
    "started, there, stays", [(False, False, False), (True, False, True), (False, True, True)]
)
def test_a_refused_run_leaves_no_folder_unless_it_began_or_was_there(tmp_path, started, there, stays):
    folder = tmp_path / "run"
    if there:
        folder.mkdir()
    with pytest.raises(ConfigError), Run(folder, {}) as run:
        run.events.emit("warning", 0, message="a line before the refusal")
        if started:
            run.events.emit("start", 0, steps=1, resumed=False, model="m", data="d")
        raise ConfigError("no")
    assert folder.exists() == stays


def test_a_fault_of_ours_leaves_the_folder_to_look_at(tmp_path):
    with pytest.raises(ZeroDivisionError), Run(tmp_path / "run", {}):
        raise ZeroDivisionError
    assert (tmp_path / "run" / "events.jsonl").exists()
