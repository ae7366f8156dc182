"""Time greedy generation in turn with transformers' cached generate, beside the limit of the machine.

`unfreeze dev bench decode`, about 12 minutes on two cores. Models: moe, a random checkpoint of 0.9 GB with
INT4 experts (harness/shapes.py: SIZES; transformers expands them when it loads); adapters, the same with LoRA
of rank 16 on every linear layer and expert, beside the same without, and merged by peft; dense, the
Qwen3-0.6B shape in bf16; tiny-k2; formats, a smaller moe with experts in INT4, FP8, MXFP4, NVFP4, AWQ and
GPTQ.
tokens/s counts decoding only: all rows, a number of steps a round, sides in turn within one generation. The
limit of a step is the bytes that it must read at this machine's read rate, or its arithmetic at its GEMM rate
(harness/limits.py). transformers runs in the fastest of a few ways (harness/ways.py). Correctness: our model
in float32 on the CPU, without a cache, scores each chosen token after that side's own text. Reported are the
share of tokens that are not float32's first choice, and the largest gap in log probability, in nats.
Sides: unfreeze (steps launched one by one or replayed as a CUDA graph, as records or a prediction say),
unfreeze-launched, unfreeze-graphs (on a GPU only), transformers.
"""

from typing import Literal, get_args

from pydantic import Field

from benchmarks.harness.case import Computed, OnCheckpoint, Run
from benchmarks.harness.decoding import measured

Named = Literal["moe", "adapters", "dense", "tiny-k2", "formats"]


class Config(Computed, OnCheckpoint):
    sides: tuple[Literal["unfreeze", "unfreeze-launched", "unfreeze-graphs", "transformers"], ...] = Field(
        default=("unfreeze", "transformers"), min_length=1, description="which sides"
    )
    models: tuple[Named, ...] = Field(default=get_args(Named), min_length=1, description="which models")
    cases: tuple[str, ...] = Field(
        default=(), description="BATCHxPROMPT; default: each model's own, 1 to 64 rows, 64 and 512 tokens"
    )
    new: int = Field(
        default=32, ge=1, description="steps of a round at one row; at more rows fewer, but at least 4"
    )
    rounds: int = Field(default=3, ge=1, description="timed rounds of each side; the median counts")
    compile_seconds: float = Field(
        default=60.0, ge=0, description="longest trial of transformers' compiled step; 0: not tried"
    )


def rows(config: Config, run: Run):
    yield from measured(config, run)
