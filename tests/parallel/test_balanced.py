"""Two processes with drawn experts and the auxiliary loss: the step of one. This file is also their script."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[1] / "train"))
sys.path.insert(0, str(Path(__file__).parent))
import test_collectives as small

from unfreeze import models
from unfreeze.core.draws import Draw, number
from unfreeze.job.experts import routed
from unfreeze.objectives.balanced import Balanced
from unfreeze.objectives.cross_entropy import cross_entropy
from unfreeze.parallel.processes.collectives import ALONE, Group
from unfreeze.train.optim import AdamW
from unfreeze.train.step import train_step

ARMS = ("drawn", "best", "other keys", "own shares")


def stepped(group: Group, arm: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Gradients and facts of one step. other keys, own shares: planted bugs."""
    model = small.decoder()
    objective: Any = Balanced(cross_entropy, routed(model, "balance_loss"), 0.5)
    if arm == "own shares":  # each process with the choices of its own documents

        class Own(Balanced):
            def begin(self, micro_batches: Any, load: Any) -> None:
                for moe in model.moe_layers().values():
                    moe.counts_E.zero_()
                own = {
                    layer: 2 * n_E - 2 * self.theirs[layer] if group.rank else 2 * self.theirs[layer]
                    for layer, n_E in load.items()
                }
                super().begin(micro_batches, own)

        objective = Own(cross_entropy, routed(model, "balance_loss"), 0.5)
        with torch.no_grad(), model.looking():
            model.hidden(small.cut(2, True)[0])
            objective.theirs = {
                layer: moe.counts_E.double().clone() for layer, moe in model.moe_layers().items()
            }
            for moe in model.moe_layers().values():
                moe.counts_E.zero_()
    place = group.rank if arm == "other keys" else 0
    batches = [
        batch if arm in ("best", "own shares") else replace(batch, draw=Draw(number(0, 0, place + i), 1.0))
        for i, batch in enumerate(small.cut(2, True))
    ]
    optimizer = AdamW(model)
    result = train_step(
        model,
        optimizer,
        batches,
        objective,
        learning_rate=0.0,
        max_norm=0.0,
        recompute=models.keep_inputs,
        group=group,
    )
    grads = {name: optimizer.gradient(name).clone() for name in optimizer.parameters}
    facts = {"loss": result.loss, "balance_loss": result.metrics["balance_loss"]}
    return grads, {**facts, "load": {str(layer): load for layer, load in result.expert_load.items()}}


def all_arms(folder: Path, group: Group) -> None:
    for arm in ARMS:
        grads, facts = stepped(group, arm if group.size > 1 or arm in ("drawn", "best") else "drawn")
        save_file(grads, folder / f"{arm}-{group.size}-{group.rank}.safetensors")
        (folder / f"{arm}-{group.size}-{group.rank}.json").write_text(json.dumps(facts))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, forkserver: Any) -> Path:
    made = tmp_path_factory.mktemp("balanced")
    path = os.pathsep.join([str(Path(__file__).parents[1]), *(p for p in sys.path if p)])
    process = forkserver.run(
        [Path(__file__), made], env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, timeout=120
    )
    assert process.returncode == 0, process.stderr
    return made


def apart(folder: Path, arm: str, rank: int, other: str) -> float:
    """The gradient of two processes against that of one, all parameters as one vector, relative."""
    one, two = (
        load_file(folder / f"{other}-1-0.safetensors"),
        load_file(folder / f"{arm}-2-{rank}.safetensors"),
    )
    a, b = (torch.cat([grads[name].flatten() for name in sorted(one)]) for grads in (two, one))
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("arm", ["drawn", "best"])
@pytest.mark.parametrize("rank", [0, 1])
def test_two_processes_make_the_step_of_one(folder: Path, arm: str, rank: int):
    one, two = (json.loads((folder / f"{arm}-{name}.json").read_text()) for name in ("1-0", f"2-{rank}"))
    assert two["load"] == one["load"]
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-6)
    assert two["balance_loss"] == pytest.approx(one["balance_loss"], rel=1e-6)
    assert apart(folder, arm, rank, arm) <= 1e-5


def test_control_other_keys_and_shares_of_one_process_are_seen(folder: Path):
    assert apart(folder, "other keys", 0, "drawn") > 1e-2
    assert apart(folder, "own shares", 0, "best") > 1e-3


if __name__ == "__main__":
    from sharding import forked

    torch.set_num_threads(1)
    all_arms(Path(sys.argv[1]), ALONE)
    sys.exit(int(any(forked(2, lambda group: all_arms(Path(sys.argv[1]), group)))))
