"""Time `unfreeze serve` beside `transformers serve`: tokens a second that one client receives.

`unfreeze dev bench serve`, about 30 minutes on two cores. A client of /v1/completions keeps 16, then 64
streams open until all prompts are answered. Lengths are drawn evenly from a third of the longest to the
longest; no token ends an answer, and each side's usage is counted. The servers run one after the other, in
rounds of both (A B B A …), each started anew and warmed up with short answers. Models: tiny-k2's shape, with
experts expanded to bf16 for transformers; dense, the Qwen3-0.6B shape with --layers of its 28 layers.

transformers needs `pip install "transformers[serving]"`. Its flags are tried with one answer a stream, the
fastest runs: --their-flags='--continuous-batching | …'. Without it answers come one after the other.
"""

from tempfile import TemporaryDirectory
from typing import Literal, get_args

from pydantic import Field

from benchmarks.harness.case import OnCheckpoint, Run, pick
from benchmarks.harness.serving import Load, Server, checkpoint, fastest, take_turns

Named = Literal["tiny-k2", "dense"]
OURS, THEIRS = "unfreeze", "transformers"
CACHE = "--cb-num-blocks 1024 --cb-block-size 32"  # without them it takes nearly all memory of the machine
WAYS = (f"--continuous-batching {CACHE}", f"--continuous-batching --cb-max-batch-tokens 128 {CACHE}", "")


class Config(OnCheckpoint):
    """Flags of this benchmark."""

    models: tuple[Named, ...] = Field(default=get_args(Named), min_length=1, description="which models")
    streams: tuple[int, ...] = Field(default=(16, 64), min_length=1, description="answers at once")
    requests: int = Field(default=2, ge=1, description="answers, for each at once")
    prompt: int = Field(default=64, ge=1, description="tokens of a prompt")
    longest: int = Field(default=96, ge=3, description="tokens of the longest answer; the shortest: a third")
    layers: int = Field(default=28, ge=1, le=28, description="layers of the dense model")
    rounds: int = Field(default=3, ge=1, description="timed rounds of each side; the median counts")
    their_flags: str = Field(default=" | ".join(WAYS), description="of transformers serve; | between ways")


def rows(config: Config, run: Run):
    ways = tuple(way.strip() for way in config.their_flags.split("|"))
    with TemporaryDirectory(prefix="unfreeze-bench-") as temporary:
        for name in config.models:
            folders, best, tried = checkpoint(config.checkpoint or temporary, name, config.layers), "", {}
            for streams in config.streams:
                load = Load.draw(
                    streams * config.requests, config.prompt, config.longest, streams, folders[OURS]
                )
                if not tried:
                    best, tried = fastest(folders[THEIRS], ways, load, config.threads, run.say)
                ours = Server(OURS, folders[OURS], (), config.threads)
                theirs = Server(THEIRS, folders[THEIRS], best.split(), config.threads)
                take_turns((ours, theirs), load, config.rounds, run.say)
                results = [ours.results(load), theirs.results(load) | {"tried": tried}]
                times = results[0]["of_transformers"] = ours.speed(load) / theirs.speed(load)
                results[0]["note"] = f"{name}, {streams} streams: {times:.2f} × transformers serve {best}"
                settings = {"model": name, "streams": streams, "their_flags": best}
                settings |= pick(config, "requests", "prompt", "longest", "layers", "rounds")
                yield run.row(OURS, settings, results[0])
                yield run.row(THEIRS, settings, results[1])
