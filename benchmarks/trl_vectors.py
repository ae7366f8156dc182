"""Make tests/objectives/recorded/gkd.json: TRL's own losses and their gradients, on small logits.

TRL takes eight seconds to import, so its results are recorded, with the version that made them, and compared
with again in `make nightly`:

    python benchmarks/trl_vectors.py --write
    python benchmarks/trl_vectors.py --check
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import torch

GKD = Path(__file__).resolve().parents[1] / "tests" / "objectives" / "recorded" / "gkd.json"
ROWS, WORDS = 5, 7
BETAS, TEMPERATURES = (0.0, 0.1, 0.5, 0.9, 1.0), (1.0, 0.9, 2.5)
LABELS = [3, -100, 0, 6, -100]


def gkd() -> dict[str, Any]:
    """Loss (mean over labels) and gradient of trl.experimental.gkd.GKDTrainer.generalized_jsd_loss."""
    from trl.experimental.gkd import GKDTrainer

    generator = torch.Generator().manual_seed(0)
    student, teacher = (2 * torch.randn(ROWS, WORDS, generator=generator) for _ in range(2))
    cases: list[dict[str, Any]] = []
    for beta, temperature in product(BETAS, TEMPERATURES):
        logits = student.clone().requires_grad_()
        loss = GKDTrainer.generalized_jsd_loss(
            logits[None], teacher[None], torch.tensor([LABELS]), beta=beta, temperature=temperature
        )
        (gradient,) = torch.autograd.grad(loss, logits)
        outputs = {"loss": loss.item(), "gradient": gradient.tolist()}
        cases.append({"beta": beta, "temperature": temperature, **outputs})
    inputs = {"student": student.tolist(), "teacher": teacher.tolist(), "labels": LABELS}
    return {"trl": version("trl"), "torch": torch.__version__, **inputs, "cases": cases}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    current = gkd()
    if arguments.write:
        GKD.parent.mkdir(exist_ok=True)
        GKD.write_text(json.dumps(current, indent=1) + "\n", encoding="utf-8")
    if arguments.check:
        recorded = json.loads(GKD.read_text(encoding="utf-8"))
        for now, then in zip(current["cases"], recorded["cases"], strict=True):
            if abs(now["loss"] - then["loss"]) > 1e-6:
                sys.exit(f"trl {current['trl']} gives {now}, recorded was {then} by trl {recorded['trl']}")
        print(f"{len(current['cases'])} losses of trl {current['trl']} are as recorded")


if __name__ == "__main__":
    main()
