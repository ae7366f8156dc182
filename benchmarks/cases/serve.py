"""Time `unfreeze serve` beside `transformers serve`: tokens a second that one client receives.

`unfreeze dev bench serve`, about 30 minutes on two cores. A client of /v1/completions keeps 16, then 64
streams open until all prompts are answered. Lengths are drawn evenly from a third of the longest to the
longest; no token ends an answer, and each side's usage is counted. The servers run one after the other, in
rounds of both (A B B A …), each started anew and warmed up with short answers. Models: tiny-k2's shape, with
experts expanded to bf16 for transformers; dense, the Qwen3-0.6B shape with --layers of its 28 layers.

transformers needs `pip install "transformers[serving]"`. --their-flags are tried for one round each; the
fastest runs. Without continuous batching its answers come one after the other.
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, get_args

from pydantic import Field

from benchmarks.harness.case import Measured, OnCheckpoint, Run, pick
from benchmarks.harness.serving import Load, Server, checkpoint, fastest
from unfreeze.checkpoint.manifest import read_json

Named = Literal["tiny-k2", "dense"]
THEIRS = "transformers"
WAYS = ("--continuous-batching --attn-implementation sdpa", "--continuous-batching", "")


class Config(Measured, OnCheckpoint):
    """Flags of this benchmark."""

    models: tuple[Named, ...] = Field(default=get_args(Named), min_length=1, description="which models")
    streams: tuple[int, ...] = Field(default=(16, 64), min_length=1, description="answers at once")
    requests: int = Field(default=2, ge=1, description="answers, for each at once")
    prompt: int = Field(default=64, ge=1, description="tokens of a prompt")
    longest: int = Field(default=96, ge=3, description="tokens of the longest answer; the shortest: a third")
    layers: int = Field(default=28, ge=1, le=28, description="layers of the dense model")
    rounds: int = Field(default=3, ge=1, description="timed rounds of each side; the median counts")
    their_flags: tuple[str, ...] = Field(
        default=WAYS, min_length=1, description="flags of transformers serve"
    )


def rows(config: Config, run: Run):
    with TemporaryDirectory(prefix="unfreeze-bench-") as temporary:
        for name in config.models:
            folders, best, tried = (
                checkpoint(Path(config.checkpoint or temporary), name, config.layers),
                "",
                {},
            )
            words = read_json(folders["unfreeze"] / "config.json")["vocab_size"]
            for streams in config.streams:
                load = Load.draw(streams * config.requests, config.prompt, config.longest, streams, words)
                if not tried:
                    best, tried = fastest(folders[THEIRS], config.their_flags, load, config.threads)
                    run.say(f"{name}: transformers serve {best}, of {tried}")
                ours = Server("unfreeze", folders["unfreeze"], (), config.threads)
                theirs = Server(THEIRS, folders[THEIRS], best.split(), config.threads)
                for turn in range(config.rounds):
                    for side in (ours, theirs) if turn % 2 == 0 else (theirs, ours):
                        run.say(f"{name}, {streams} streams: {side.side} {side.round(load):.1f} tokens/s")
                results = [ours.results(load), theirs.results(load) | {"tried": tried}]
                times = results[0]["of_transformers"] = ours.speed(load) / theirs.speed(load)
                results[0]["note"] = f"{name}, {streams} streams: {times:.2f} × transformers serve {best}"
                settings = {"model": name, "streams": streams, "their_flags": best}
                settings |= pick(config, "requests", "prompt", "longest", "layers", "rounds")
                for side, result in zip((ours, theirs), results, strict=True):
                    yield run.row(side.side, settings, result)
