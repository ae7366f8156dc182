"""Muon where processes hold rows of a matrix: one process's update to the bit, whatever number of processes goes
on with a save. Processes are started once, by muon_runs.py."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from unfreeze.train.shards import SavedShards

LIMIT = 0.4
MATRICES = ("up", "down", "square", "experts")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, forkserver: Any) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("muon")
    path = os.pathsep.join([str(Path(__file__).parents[1]), *(p for p in sys.path if p)])
    process = forkserver.run(
        [Path(__file__).with_name("muon_runs.py"), folder],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        timeout=240,
    )
    assert process.returncode == 0, process.stderr
    found = json.loads(process.stdout.splitlines()[-1])
    assert found["codes"] == [0] * 19, process.stderr
    return folder, found


def saved(folder: Path, step: int) -> SavedShards:
    path = folder / "state" / f"step-{step:06d}"
    return SavedShards(path, json.loads((path / "state.json").read_text()).get("files"))


@pytest.mark.parametrize("kind", ["float32", "half"])
def test_rows_on_3_then_1_then_4_processes_are_the_unbroken_run_to_the_bit(runs, kind: str):
    """Of 4 rows on 3 processes one holds none; a matrix that no token reached is left out by all."""
    folder = runs[0] / kind
    straight = load_file(folder / "straight/state/step-000006/tensors.safetensors")
    broken = saved(folder / "broken", 6)
    assert broken.names == straight.keys()
    assert {f"optimizer.momentum.{name}" for name in MATRICES} <= straight.keys()
    assert straight["optimizer.step.square"] == 5 and straight["optimizer.step.up"] == 6
    for name, whole in straight.items():
        assert torch.equal(broken.read(name, whole), whole), name


def test_control_arm_rows_that_are_orthogonalised_alone_are_another_update(runs):
    """Whole experts are each process's own, and need no exchange."""
    whole, alone = (saved(runs[0] / name, 6) for name in ("float32/broken", "bug"))
    like = load_file(runs[0] / "float32/straight/state/step-000006/tensors.safetensors")
    furthest = {
        name: float((whole.read(name, like[name]) - alone.read(name, like[name])).abs().max())
        for name in (f"model.{matrix}" for matrix in MATRICES)
    }
    assert furthest.pop("model.experts") == 0.0
    assert min(furthest.values()) > 1e-3, furthest


@pytest.mark.parametrize("family", ["deepseek_v3", "llama"])
def test_five_steps_under_fsdp2_are_one_processs(runs, family: str):
    """Losses, norms, largest logits; a mixture with a head of its own, and a dense model with a tied one. Heads
    are clipped after each step (tests/train/test_qk_clip.py)."""
    one, *two = runs[1][family]
    assert two[0] == two[1] and len(one) == 15 and one[12] < one[0]
    assert two[0] == pytest.approx(one, rel=1e-5)
    assert one[2] > 1.2 * LIMIT
