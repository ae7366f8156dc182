"""Compare runs on several processes with the run of one: outputs, gradients and ten losses, in float32.

`unfreeze dev bench equal`, about a minute. All processes are on this machine (gloo). tiny-k2 (INT4), LoRA
rank 4 on every linear layer with B not zero, as after some training; and every weight of a model of that
shape, unpacked and random, whole and divided (FSDP2). A step has 4 micro-batches, which the processes share.
    expert op          the experts of one layer, given the same rows: y, dx, dw and the gradients of A and B
    y                  the output of each micro-batch of the first step, after the last layer
    expert gradients   of the adapters of routed experts, in the first step; gradients: of all; losses: of ten
Differences are |a - b| / |b| of a tensor, the worst tensor of all processes counts. The op is equal to the
bit; whole runs are not: a sum in another order rounds otherwise.
"""

import tempfile
from dataclasses import asdict
from pathlib import Path

from pydantic import Field

from benchmarks.harness.case import Measured, Run
from benchmarks.harness.equality import COLUMNS, LORA, MICRO_BATCHES, Arm, run_arm, shown, unpacked, worst
from benchmarks.harness.shapes import TINY_K2
from unfreeze.config.parse import Folder

LENGTH = 48  # tokens of a document
ARMS = (
    Arm("1 process", 1),
    Arm("data 2", 2),
    Arm("experts split over 2", 2, 2),
    Arm("experts split over 4", 4, 4),
    Arm("experts over 2, data 2", 4, 2),
    Arm("experts over 2, from disk", 2, 2, "disk"),
    Arm("the rest from peers, 2", 2, rest="peers"),
    Arm("1 process, every weight", 1, train="all"),
    Arm("every weight divided, 2", 2, train="all"),
)
"""Each is compared with the first that trains the same."""


class Config(Measured):
    threads: int = Field(default=1, ge=1, description="torch's threads in each process")
    model: Folder = Field(default=str(TINY_K2), description="checkpoint with routed experts")
    steps: int = Field(default=10, ge=1, description="steps whose losses are compared")


def rows(config: Config, run: Run):
    settings = {"model": Path(config.model).name, "dtype": "float32", "rank": LORA["rank"]}
    settings |= {"micro_batches": MICRO_BATCHES, "length": LENGTH, "steps": config.steps}
    with tempfile.TemporaryDirectory(prefix="unfreeze-equal-") as temporary:
        folder, firsts = Path(temporary), dict[str, Arm]()
        unpacked(config.model, folder / "unpacked")
        for arm in ARMS:
            model = str(folder / "unpacked") if arm.train == "all" else config.model
            job = {"model": model, "steps": config.steps, "length": LENGTH, "threads": config.threads}
            seconds = run_arm(arm, job, folder)
            differences = worst(folder, arm, firsts.setdefault(arm.train, arm))
            note = ", ".join(f"{name} {shown(differences[name])}" for name in COLUMNS if name in differences)
            fields = {name: value for name, value in asdict(arm).items() if name != "name"}
            results = {"correctness": differences, "seconds": seconds, "note": note}
            yield run.row(arm.name, settings | fields, results)
