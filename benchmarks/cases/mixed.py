"""Time answers of mixed lengths, as rollouts have them, beside transformers' generate.

`unfreeze dev bench mixed`, about 10 minutes on two cores. Lengths are drawn from a geometric distribution
whose mean is a third of the longest and cut there; both sides end each row at the same length. Ours lets rows
leave; transformers pads them until the last one ends. useful tokens/s: all lengths together over the seconds
of the whole generation, prompts included. Models: tiny-k2; dense, the Qwen3-0.6B shape in bf16 with --layers
of its 28 layers. transformers runs in the faster of bfloat16 and float32, by a generation of each that does
not count, with its default implementation of experts: `decode` tries others.
"""

from typing import Any, Literal, get_args

from pydantic import Field

from benchmarks.harness.case import Computed, OnCheckpoint, Run, pick
from benchmarks.harness.generation import prompts_of
from benchmarks.harness.mixed import checkpoints, lengths_of, results
from benchmarks.harness.sides import Sides

Named = Literal["tiny-k2", "dense"]
THEIRS = "transformers"


class Config(Computed, OnCheckpoint):
    """Flags of this benchmark."""

    models: tuple[Named, ...] = Field(default=get_args(Named), min_length=1, description="which models")
    rows: int = Field(default=64, ge=1, description="answers at once")
    prompt: int = Field(default=64, ge=1, description="tokens of a prompt")
    longest: int = Field(default=96, ge=3, description="tokens of the longest answer")
    layers: int = Field(default=28, ge=1, le=28, description="layers of the dense model")
    rounds: int = Field(default=3, ge=1, description="timed generations of each side; the median counts")


def rows(config: Config, run: Run):
    lengths = lengths_of(config.rows, config.longest)
    with checkpoints(config.checkpoint, config.models, config.layers) as folders:
        for name, (folder, vocab_size) in folders.items():
            request: dict[str, Any] = {"prompts": prompts_of(config.rows, config.prompt, vocab_size)}
            request["lengths"] = lengths
            where = {"checkpoint": str(folder), "device": config.device}
            sides = [
                run.side("unfreeze", "harness.mixed:ours", dtype=config.computed, **where),
                run.side(THEIRS, "harness.peers:mixed", **where),
            ]
            with Sides(sides, run.say) as running:
                fastest = running[THEIRS].call("choose", **request)["dtype"]
                running.take_turns("generate", warmup=1, rounds=config.rounds, **request)
                timed = [results(side, lengths) for side in running]
            timed[0]["of_transformers"] = timed[0]["useful_per_second"] / timed[1]["useful_per_second"]
            settings = {"model": name, "dtype": config.computed, "mean_length": sum(lengths) / len(lengths)}
            settings |= pick(config, "rows", "prompt", "longest", "layers", "rounds", "device")
            timed[0]["note"] = f"{name}: {timed[0]['of_transformers']:.2f} × transformers in {fastest}"
            timed[1]["note"] = f"{name}: in {fastest}"
            for side, entry in zip(sides, timed, strict=True):
                yield run.row(side.name, settings, entry)
