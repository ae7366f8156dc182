"""A script for test_muon_processes.py: one process that imports everything once, then forks the processes of
runs whose matrices move by Muon. Prints one JSON object.

`rows`: no forward pass. A gradient is a function of step and name, each process holds rows of every parameter,
and what it saves is one process's to the bit. `divided`: real models under FSDP2.
"""

from __future__ import annotations

import json
import sys
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "parallel"))
import fsdp_runs
import test_collectives as small
from sharding import forked

from unfreeze.core.rows import Rows
from unfreeze.models.matrices import hidden_matrices
from unfreeze.models.queries import scalable
from unfreeze.objectives.cross_entropy import cross_entropy
from unfreeze.parallel.placement.fsdp import chunk
from unfreeze.parallel.processes.collectives import ALONE, Group
from unfreeze.parallel.processes.mesh import HeldPart
from unfreeze.train import together
from unfreeze.train.follower import Follower, open_run
from unfreeze.train.muon import Muon
from unfreeze.train.orthogonal import MuonRule
from unfreeze.train.qk_clip import LargestLogits, QkClip
from unfreeze.train.run import Run
from unfreeze.train.schedule import Schedule
from unfreeze.train.state import start_or_resume

SHAPES = {"embed": (5, 4), "up": (7, 4), "down": (4, 7), "square": (6, 6), "experts": (5, 4, 3)}
MATRICES = ("up", "down", "square", "experts")
FAMILIES = ("deepseek_v3", "llama")
LIMIT = 0.4  # below the logits that these models have


class Parts(nn.Module):
    """The rows of SHAPES that this process holds."""

    device = torch.device("cpu")

    def __init__(self, rows: dict[str, Rows], dtype: torch.dtype):
        super().__init__()
        for name, shape in SHAPES.items():
            whole = torch.randn(shape, generator=torch.Generator().manual_seed(len(name)))
            self.register_parameter(name, nn.Parameter(whole[rows[name].slice].to(dtype)))


def gradient(name: str, step: int) -> Tensor:
    seed = zlib.crc32(f"{name} {step}".encode())
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(seed))


def rows(
    folder: Path, group: Group, until: int, dtype: torch.dtype = torch.float32, exchanging: bool = True
) -> None:
    """Steps to `until`, a save after each. exchanging False: the planted bug, each orthogonalises its rows."""
    held = {name: chunk(shape[0], group.rank, group.size) for name, shape in SHAPES.items()}
    of_process = (lambda name: HeldPart(held[name], ALONE, 1)) if group.size > 1 else None
    with open_run(group, lambda: Run(folder, {}), lambda: Follower(folder, {})) as run:
        model = Parts(held, dtype)
        optimizer = Muon(
            model,
            MATRICES,
            rule=MuonRule(dtype=torch.bfloat16),
            weight_decay=0.1,
            held=of_process,
            group=group if exchanging else ALONE,
        )
        state = start_or_resume(run, model, optimizer=optimizer, schedule=Schedule(1e-2, 10))  # type: ignore[arg-type]
        for step in range(state.step + 1, until + 1):
            for name, parameter in optimizer.parameters.items():
                whole = gradient(name, step).to(dtype)
                if not (name == "square" and step == 2):  # no token reached it in that step
                    parameter.grad = whole[held[name].slice].clone()
            optimizer.collect()
            optimizer.update(1e-2, 0.0, norm=1.0)
            optimizer.zero_grad()
            state.step = step
            together.save_together(state, group=group)


def divided(folder: Path, group: Group, family: str) -> list[float]:
    """Losses and norms of five steps of a model whose weights FSDP2 divides, and whose heads are clipped."""
    model, held = fsdp_runs.opened(folder / family, group, torch.float32)
    rule = MuonRule(dtype=torch.float32)
    optimizer = Muon(model, hidden_matrices(model), rule=rule, weight_decay=0.1, held=held, group=group)
    logits = LargestLogits(cross_entropy, list(scalable(model)))
    clip = QkClip(model, optimizer, logits, LIMIT, group)
    numbers: list[float] = []
    for n in range(5):
        batches = small.cut(8, False) if n % 2 else small.cut(4, True)
        result = fsdp_runs.step((model, optimizer), batches, group, objective=logits)
        clip({})
        numbers += [result.loss, result.grad_norm, result.metrics["largest_logit"]]
    return numbers


def work(folder: Path) -> dict[str, Any]:
    codes: list[int] = []
    for kind, dtype in (("float32", torch.float32), ("half", torch.bfloat16)):
        rows(folder / kind / "straight", ALONE, 6, dtype)
        broken = folder / kind / "broken"
        codes += forked(3, lambda group, to=broken, d=dtype: rows(to, group, 2, d))
        rows(broken, ALONE, 4, dtype)
        codes += forked(4, lambda group, to=broken, d=dtype: rows(to, group, 6, d))
    codes += forked(3, lambda group: rows(folder / "bug", group, 6, exchanging=False))
    found: dict[str, Any] = {}
    for family in FAMILIES:
        fsdp_runs.checkpoint(folder / family, family)
        found[family] = [divided(folder, ALONE, family)]

    def two(group: Group) -> None:
        losses = {family: divided(folder, group, family) for family in FAMILIES}
        (folder / f"losses-{group.rank}.json").write_text(json.dumps(losses))

    codes += forked(2, two)
    for rank in (0, 1):
        losses = json.loads((folder / f"losses-{rank}.json").read_text())
        for family in FAMILIES:
            found[family].append(losses[family])
    return {"codes": codes, **found}


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(work(Path(sys.argv[1]))))
