"""Time greedy generation from the 0.9 GB INT4 checkpoint, in turn with transformers' cached generate.

`unfreeze dev bench decode`, about 2 minutes. bf16 on both sides (transformers dequantizes the experts when it
loads). tokens/s counts decoding only: all rows, from the first new token of each to the last; reading the
prompt has a time of its own. Correctness: our model in float32 on the CPU, without a cache, scores each
chosen token after that side's own text. Reported are the share of tokens that are not float32's first choice,
and the largest gap in log probability, in nats.
Sides: unfreeze (steps launched one by one or replayed as a CUDA graph, as records or a prediction say),
unfreeze-launched, unfreeze-graphs (on a GPU only), transformers.
"""

from typing import Literal

from pydantic import Field

from benchmarks.harness import shapes
from benchmarks.harness.case import Computed, OnCheckpoint, Run, pick
from benchmarks.harness.checkpoints import checkpoints
from benchmarks.harness.generation import STEPS, note, prompts_of, read_cases, scored, timings
from benchmarks.harness.sides import Sides
from benchmarks.harness.training import compare

SCORED = 2  # rows of a batch: float32 without a cache is slow, and the rows are alike


class Config(Computed, OnCheckpoint):
    sides: tuple[Literal["unfreeze", "unfreeze-launched", "unfreeze-graphs", "transformers"], ...] = Field(
        default=("unfreeze", "transformers"), min_length=1, description="which sides"
    )
    cases: tuple[str, ...] = Field(default=("1x64", "16x64", "1x512"), description="BATCHxPROMPT")
    new: int = Field(default=32, ge=2, description="new tokens of each row")
    rounds: int = Field(default=2, ge=1, description="timed generations of each side; the median counts")


def rows(config: Config, run: Run):
    cases, model, generated = read_cases(config), shapes.kimi(), []
    with checkpoints(config.checkpoint, model, shapes.kimi(**shapes.CHECKED)) as (folder, _):
        job, sides = {"checkpoint": str(folder), "device": config.device, "dtype": config.computed}, []
        for name in config.sides:
            function = "harness.generation:ours" if name in STEPS else "harness.peers:generator"
            sides.append(run.side(name, function, **job, **({"steps": STEPS[name]} if name in STEPS else {})))
        with Sides(sides, run.say) as running:
            for batch, prompt in cases:
                run.say(f"{batch} rows, prompts of {prompt} tokens, {config.new} new")
                request = {"prompts": prompts_of(batch, prompt, model["vocab_size"]), "new": config.new}
                settings = {"shape": {name: model[name] for name in shapes.SIZES}, "dtype": config.computed}
                settings |= {"batch": batch, "prompt": prompt, "warmup": 1}
                settings |= pick(config, "new", "rounds", "device")
                for side in running:
                    side.replies.clear()
                running.take_turns("generate", warmup=1, rounds=config.rounds, fresh_peak=True, **request)
                compare(entries := [timings(side, batch, config.new) for side in running])
                for side, entry in zip(running, entries, strict=True):
                    text = side.values("generate", "tokens")[-1][:SCORED]
                    generated.append((side.name, settings, entry, request["prompts"][:SCORED], text))
        judge = run.side("float32", "harness.generation:judge", checkpoint=str(folder))
        with Sides([judge], run.say):
            for name, settings, entry, prompts, tokens in generated:
                entry["correctness"] = scored(judge.call("score", prompts=prompts, tokens=tokens))
                yield run.row(name, settings, entry | {"note": note(settings, entry)})
