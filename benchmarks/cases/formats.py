"""Time training steps with experts in INT4, FP8 with block scales and MXFP4, in turn.

`unfreeze dev bench formats`, about 5 minutes. The model and the job of `unfreeze dev bench moe`. Rows also
have the resident memory of the process after the first and after the last step.
"""

import statistics
from contextlib import ExitStack

from benchmarks.cases import moe
from benchmarks.harness import shapes
from benchmarks.harness.case import Run, Trained
from benchmarks.harness.checkpoints import checkpoints
from benchmarks.harness.training import float64, job

TRAINED = ("int4", "fp8", "mxfp4")

Config = Trained


def rows(config: Config, run: Run):
    model, small = shapes.kimi(), shapes.kimi(**shapes.CHECKED)
    of = shapes.SIZES, moe.LORA, moe.DOCUMENTS, moe.LENGTH
    with ExitStack() as stack, job(run, model, small, *of) as training:
        sides, exact = [training.ours("int4", "selective")], {"int4": training.exact}
        for name, table in ((name, shapes.EXPERTS_IN[name]) for name in TRAINED):
            if table is not None:
                change = {"quantization_config": table}
                place, checked = stack.enter_context(checkpoints("", model | change, small | change))
                sides.append(training.ours(name, "selective", checkpoint=str(place), checked=str(checked)))
                exact[name] = float64(run, str(checked), moe.LORA, moe.LENGTH)
        entries = training.in_turn(sides, own=exact)
        for side in sides:
            seconds, first = side.values("step", "seconds"), sides[0].values("step", "seconds")
            entries[side.name] |= {
                "of_int4": statistics.median(one / other for one, other in zip(seconds, first, strict=True)),
                "resident_first": side.values("step", "resident")[0],
                "resident_last": side.values("step", "resident")[-1],
            }
            settings = training.settings | {"rank": moe.RANK, "recompute": "selective"}
            yield run.row(side.name, settings, entries[side.name])
