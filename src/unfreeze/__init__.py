"""unfreeze trains any open-weight language model, every weight of it, in the format it was published in.

    import unfreeze
    unfreeze.TINY_K2                       # folder of the built-in model, to try things with
    run = unfreeze.sft(model="DIR_OR_ID", data="chat.jsonl", rank=16, epochs=2)
    run.loss, run.receipt, run.chat("What is the capital of France?"), run.report()
    model = unfreeze.load("DIR_OR_ID_OR_RUN", dtype="float32")
    model.chat([{"role": "user", "content": "…"}]), model.generate("Once upon", max_new_tokens=50)

The public nouns are imported on first use (PEP 562), so that `import unfreeze` and `unfreeze --help` do not
import torch.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from unfreeze.core.lazy import on_first_use

if TYPE_CHECKING:
    from unfreeze.api import Evaluation as Evaluation
    from unfreeze.api import FinishedRun as FinishedRun
    from unfreeze.api import distill as distill
    from unfreeze.api import evaluate as evaluate
    from unfreeze.api import grpo as grpo
    from unfreeze.api import prefer as prefer
    from unfreeze.api import prepare as prepare
    from unfreeze.api import pretrain as pretrain
    from unfreeze.api import sft as sft
    from unfreeze.api import swap as swap
    from unfreeze.api import train_tokenizer as train_tokenizer
    from unfreeze.core.built_in import TINY_K2 as TINY_K2
    from unfreeze.generate.model import Model as Model
    from unfreeze.job.opening.load import load as load

__all__ = [
    "TINY_K2",
    "Evaluation",
    "FinishedRun",
    "Model",
    "__version__",
    "distill",
    "evaluate",
    "grpo",
    "load",
    "prefer",
    "prepare",
    "pretrain",
    "sft",
    "swap",
    "train_tokenizer",
]

_HOME = {
    "load": "unfreeze.job.opening.load",
    "Model": "unfreeze.generate.model",
    "TINY_K2": "unfreeze.core.built_in",
    **dict.fromkeys(
        (
            "Evaluation",
            "FinishedRun",
            "distill",
            "grpo",
            "prefer",
            "prepare",
            "pretrain",
            "sft",
            "swap",
            "train_tokenizer",
        ),
        "unfreeze.api",
    ),
}

__version__ = "0.1.0"

if "UNFREEZE_CPU_CLASS" in os.environ:  # before anything imports torch or numba
    from unfreeze.core import cpu

    cpu.restrict_cpu_class()

# Torch's threads spin for some milliseconds after each parallel operator, and keep their cores from the loops
# of kernels/: a step of generation took 13.5 ms, and 8.6 with 10,000 turns (about 0.2 ms). libgomp reads this
# when torch is imported.
if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
    os.environ["GOMP_SPINCOUNT"] = "10000"

__getattr__ = on_first_use(__name__, _HOME, rooms=("evaluate",))


def __dir__() -> list[str]:
    return sorted(__all__)
