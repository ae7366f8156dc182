"""The demo's guards: what it may overwrite, and that CI's thresholds see bad results. (The demo itself runs
in .ci/run.)"""

import json
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest

from unfreeze.commands import demo
from unfreeze.commands.demo import TINY_K2, move_finished
from unfreeze.core.command import Common
from unfreeze.core.errors import ConfigError

THRESHOLDS = Path(__file__).resolve().parents[2] / ".ci" / "demo_thresholds.py"
GOOD = {
    "style_before": 0.0,
    "style_after": 97.0,
    "facts_before": 100.0,
    "facts_after": 98.0,
    "known": 115.0,
    "asked": 117.0,
    "loss_first": 5.0,
    "loss_last": 0.1,
    "seconds": 60.0,
}


def test_a_folder_that_is_no_demo_is_not_touched(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="is not a demo run"):
        move_finished(tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"
    with pytest.raises(ConfigError, match="is a file"):
        move_finished(tmp_path / "thesis.txt")


def demo_at(out, step):
    """What of a demo of 10 steps is looked at, saved after `step`."""
    from unfreeze.train.run import config_hash

    save = out / "state" / f"step-{step:06d}"
    save.mkdir(parents=True)
    (out / "resolved_config.json").write_text(json.dumps({"model": str(TINY_K2)}))
    record = {
        "step": step,
        "cursor": None,
        "schedule": {"steps": 10},
        "optimizer": {},
        "config": {},
        "config_hash": config_hash({}),
    }
    (save / "state.json").write_text(json.dumps(record))
    return out


def test_an_unfinished_demo_stays_and_goes_on(tmp_path):
    out = demo_at(tmp_path / "demo", 3)
    move_finished(out)
    assert [path.name for path in tmp_path.iterdir()] == ["demo"] and (out / "state").is_dir()


class Stopped(Exception):
    pass


@pytest.fixture
def trained(monkeypatch):
    """demo.main with stand-ins for asking and training: the run is finished, interrupted, or raises."""

    def run(out, outcome):
        def train(config, common):
            if outcome is Stopped:
                raise Stopped
            demo_at(Path(config.out), 10 if outcome else 3)
            return {
                "finished": outcome,
                **dict.fromkeys(("loss_first", "loss_last", "receipt", "steps", "run")),
            }

        monkeypatch.setattr(demo.sft, "train", train)
        monkeypatch.setattr(demo, "ask_heldout", lambda *_: ([], None))
        monkeypatch.setattr(demo, "compare_style", lambda *_: {})
        monkeypatch.setattr(demo, "write_samples", lambda *_: None)
        demo.main(["--out", str(out)], Common(quiet=True))

    return run


def test_a_finished_demo_is_removed_only_when_the_new_one_is_finished(tmp_path, trained, capsys):
    out = demo_at(tmp_path / "demo", 10)
    (out / "report.html").write_text("the first")
    old = tmp_path / "demo.before" / "report.html"
    with pytest.raises(Stopped):
        trained(out, Stopped)
    assert old.read_text() == "the first" and str(old.parent) in capsys.readouterr().err
    trained(out, False)  # interrupted
    assert old.read_text() == "the first"
    demo_at(out, 10)  # the same command again: it goes on to its end
    trained(tmp_path / "other", True)
    assert old.exists()  # control arm: another demo's end removes nothing of this one
    move_finished(out)
    assert not old.exists()  # a second finished one takes its place
    trained(out, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["demo", "other"]


def test_what_is_in_the_way_of_the_old_demo_is_not_touched(tmp_path, monkeypatch):
    out, way = demo_at(tmp_path / "demo", 10), tmp_path / "demo.before"
    way.mkdir()
    (way / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="is in the way"):
        move_finished(out)
    assert (way / "thesis.txt").read_text() == "years of work" and (out / "state").is_dir()
    shutil.rmtree(way)
    monkeypatch.chdir(out)
    with pytest.raises(ConfigError, match="it is the current directory"):
        move_finished(Path())


@pytest.mark.parametrize(
    "change, code",
    [
        ({}, 0),
        ({"style_before": 5.1}, 1),
        ({"style_after": 94.0}, 1),
        ({"facts_after": 96.9}, 1),
        ({"known": 100.0}, 1),
        ({"loss_last": 4.0}, 1),
    ],
)
def test_the_thresholds_of_ci_see_a_bad_demo(monkeypatch, change, code):
    def run(command, **_):
        folder = Path(command[command.index("--out") + 1])
        folder.mkdir()
        (folder / "report.html").write_text("x" * 20_000)
        return subprocess.CompletedProcess(command, 0, stdout=json.dumps({**GOOD, **change}))

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(THRESHOLDS))
    assert ended.value.code == code


def test_the_package_carries_a_kimi_format_model_of_at_most_8_mb():
    files = [path for path in TINY_K2.iterdir() if path.suffix in (".safetensors", ".model", ".json")]
    assert sum(path.stat().st_size for path in files) <= 8_000_000
    config = json.loads((TINY_K2 / "config.json").read_text())
    assert config["model_type"] == "kimi_k2" and config["n_routed_experts"] >= 16
    assert config["quantization_config"]["format"] == "pack-quantized"
