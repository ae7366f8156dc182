"""Time greedy generation from the 0.9 GB INT4 checkpoint, in turn with transformers' cached generate.

`unfreeze dev bench decode`, about 2 minutes.

bf16 on both sides (transformers dequantizes the experts when it loads). tokens/s counts decoding only: all
rows, from the first new token of each to the last; reading the prompt has a time of its own.
Correctness: our model in float32 on the CPU, without a cache, scores each chosen token after that side's own
text. Reported are the share of tokens that are float32's first choice too, and how much less likely the
chosen token is at worst, in nats.
Sides: unfreeze (steps launched one by one or replayed as a CUDA graph, as records say), unfreeze-launched
(always launched), unfreeze-graphs (always replayed; on a GPU only), transformers.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

from pydantic import Field

from benchmarks.harness.training import Computed, Measured, appended_to, command, say, show
from unfreeze.config.parse import Folder, parse
from unfreeze.core.command import Common
from unfreeze.core.errors import ConfigError
from unfreeze.core.units import format_bytes

Named = Literal["unfreeze", "unfreeze-launched", "unfreeze-graphs", "transformers"]
SCORED_ROWS = 2  # of a batch: float32 without a cache is slow, and the rows are alike
STEPS = {"unfreeze": "by_record", "unfreeze-launched": "launched", "unfreeze-graphs": "graphs"}


class Config(Computed, Measured):
    """What is measured."""

    sides: tuple[Named, ...] = Field(
        default=("unfreeze", "transformers"), min_length=1, description="which sides"
    )
    cases: tuple[str, ...] = Field(
        default=("1x64", "16x64", "1x512"), min_length=1, description="batch x tokens of the prompt"
    )
    new: int = Field(default=32, ge=2, description="new tokens of each row")
    rounds: int = Field(
        default=2,
        ge=1,
        description="timed generations of each side and case, after one that isn't; the median counts",
    )
    checkpoint: Folder = Field(
        default="",
        description="folder where the random checkpoint is, or is made and kept; default: a temporary one",
    )


def main(arguments: list[str], common: Common) -> dict[str, Any]:
    """-> rows, file."""
    return measure(parse(Config, arguments, command="dev bench decode", description=__doc__ or ""), common)


def parse_case(text: str) -> tuple[int, int]:
    """ "16x64" -> (16, 64)."""
    batch, _, prompt = text.partition("x")
    if not (batch.isdigit() and prompt.isdigit() and int(batch) and int(prompt)):
        raise ConfigError(f"cases: {text!r} is not BATCHxPROMPT, such as 16x64", next="mend --cases")
    return int(batch), int(prompt)


def measure(config: Config, common: Common, sizes: Mapping[str, int] | None = None) -> dict[str, Any]:
    """The benchmark at any size: `sizes` replace those of kimi.SIZES."""
    from benchmarks.harness import kimi
    from benchmarks.harness.checkpoints import checkpoints
    from benchmarks.harness.rows import Row, Stamp
    from benchmarks.harness.sides import Side, Sides

    if config.device == "cpu" and "unfreeze-graphs" in config.sides:
        raise ConfigError(
            "sides: unfreeze-graphs records CUDA graphs, and this runs on the CPU",
            next="--device cuda, or leave that side out",
        )
    cases = [parse_case(text) for text in config.cases]
    model = kimi.config(**(sizes or {}))
    tiny = kimi.config(**{**(sizes or {}), **kimi.CHECKED})
    stamp = Stamp.now("decode", command("decode", config), config.device, threads=config.threads or None)
    rows: list[Row] = []
    with checkpoints(config.checkpoint, model, tiny) as (checkpoint, _):
        job = {"checkpoint": str(checkpoint), "device": config.device, "dtype": config.computed}
        measured = [
            (
                Side(
                    name, "benchmarks.cases.decode:ours", job | {"steps": STEPS[name]}, threads=config.threads
                )
                if name in STEPS
                else Side(name, "benchmarks.harness.peers:generator", job, threads=config.threads)
            )
            for name in config.sides
        ]
        judge = Side(
            "float32",
            "benchmarks.cases.decode:judge",
            {"checkpoint": str(checkpoint)},
            threads=config.threads,
        )
        with Sides(measured, say(common)) as running:
            texts: dict[tuple[str, str], Any] = {}
            for (batch, prompt), case in zip(cases, config.cases, strict=True):
                prompts = prompts_of(batch, prompt, model["vocab_size"])
                say(common)(f"{batch} rows, prompts of {prompt} tokens, {config.new} new")
                for side in running:
                    side.replies.clear()
                running.take_turns(
                    "generate",
                    warmup=1,
                    rounds=config.rounds,
                    prompts=prompts,
                    new=config.new,
                    fresh_peak=True,
                )
                settings = {
                    "shape": {name: model[name] for name in kimi.SIZES},
                    "dtype": config.computed,
                    "batch": batch,
                    "prompt": prompt,
                    "new": config.new,
                    "rounds": config.rounds,
                    "warmup": 1,
                    "device": config.device,
                }
                for side in running:
                    texts[side.name, case] = (
                        settings,
                        timings(side, batch, config.new),
                        prompts,
                        side.values("generate", "tokens")[-1],
                    )
        with Sides([judge], say(common)):
            for (name, case), (settings, found, prompts, tokens) in texts.items():
                said = judge.call("score", prompts=prompts[:SCORED_ROWS], tokens=tokens[:SCORED_ROWS])
                found["correctness"] = {
                    "tokens that are not float32's first choice": said["other"],
                    "worst of them, nats less likely": said["nats"],
                }
                first = texts[config.sides[0], case][1]
                if name != config.sides[0]:
                    found["first_side_speed"] = first["tokens_per_second"] / found["tokens_per_second"]
                    found["first_side_memory"] = first["peak_bytes"] / found["peak_bytes"]
                found["note"] = note(case, found)
                rows.append(stamp.row(name, settings, found))
    return show(rows, appended_to(config, config.device), common)


def prompts_of(batch: int, prompt: int, vocab_size: int) -> list[list[int]]:
    """Random ids, the same for every side."""
    draw = random.Random(batch * 100_003 + prompt)
    return [[draw.randrange(2, vocab_size) for _ in range(prompt)] for _ in range(batch)]


def timings(side: Any, batch: int, new: int) -> dict[str, Any]:
    """Time one generation: tokens_per_second of decoding, prompt_seconds, and the peak of memory.

    The first token of each row comes with the prompt, so decoding doesn't count it.
    """
    decode = sorted(side.values("generate", "decode_seconds"))
    middle, tokens = statistics.median(decode), batch * (new - 1)
    return {
        "tokens_per_second": tokens / middle,
        "fastest": tokens / decode[0],
        "slowest": tokens / decode[-1],
        "prompt_seconds": statistics.median(
            reply["seconds"] - reply["decode_seconds"] for reply in side.replies["generate"]
        ),
        "peak_bytes": max(side.values("generate", "peak")),
        "load_peak_bytes": side.loaded["load_peak"],
    }


def note(case: str, found: Mapping[str, Any]) -> str:
    other, nats = found["correctness"].values()
    ratio = ""
    if "first_side_speed" in found:
        ratio = (
            f", the first side is {found['first_side_speed']:.2f} x at {found['first_side_memory']:.2f} of"
            " its memory"
        )
    return (
        f"{case}: {found['tokens_per_second']:.1f} tokens/s ({found['slowest']:.1f} to"
        f" {found['fastest']:.1f}), prompt {found['prompt_seconds']:.2f} s, peak"
        f" {format_bytes(found['peak_bytes'])}; {other:.1%} other than float32's choice, at worst {nats:.3f}"
        f" nats{ratio}"
    )


def ours(checkpoint: str, device: str = "cpu", steps: str = "by_record", dtype: str = "bfloat16") -> Any:
    """Our engine. calls: generate(prompts, new) -> tokens, decode_seconds."""
    import unfreeze
    from benchmarks.harness.sides import Worker
    from unfreeze.generate.engine import Engine
    from unfreeze.generate.sampling import Sampling
    from unfreeze.generate.steps import Replayed, launched, step_by_record

    ways = {"by_record": step_by_record, "launched": launched, "graphs": partial(Replayed, impl="cuda_graph")}
    decoder = unfreeze.load(checkpoint, dtype=dtype, device=device).decoder
    engine = Engine(decoder, steps=ways[steps])  # without stop ids: every row gets all its tokens

    def generate(prompts: list[list[int]], new: int) -> dict[str, Any]:
        tokens: list[list[int]] = [[] for _ in prompts]
        times = []
        for pieces in engine.stream(prompts, Sampling(max_new_tokens=new, temperature=0.0)):
            times.append(time.perf_counter())
            for piece in pieces:
                tokens[piece.row].append(piece.token)
        return {"tokens": tokens, "decode_seconds": times[-1] - times[0]}

    return Worker({"generate": generate})


def judge(checkpoint: str) -> Any:
    """Load our model in float32, without a cache, to score what the sides wrote.

    calls: score(prompts, tokens) -> other (share of tokens that aren't the likeliest), nats (at worst).
    """
    import unfreeze
    from benchmarks.harness.sides import Worker

    model = unfreeze.load(checkpoint, dtype="float32")

    def score(prompts: Sequence[list[int]], tokens: Sequence[list[int]]) -> dict[str, Any]:
        import torch

        other, nats, count = 0, 0.0, 0
        for prompt, said in zip(prompts, tokens, strict=True):
            logits_TV = model.logits([[*prompt, *said[:-1]]])[0][len(prompt) - 1 :]
            short_T = logits_TV.amax(-1) - logits_TV.gather(1, torch.tensor(said)[:, None])[:, 0]
            other, nats, count = (
                other + int(short_T.gt(0).sum()),
                max(nats, float(short_T.max())),
                count + len(said),
            )
        return {"other": other / count, "nats": nats}

    return Worker({"score": score})
