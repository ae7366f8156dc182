"""`dev bench decode`: its models, their sides in turn, and what a row says beside its speed.

A row's results: tokens_per_second (median round), fastest, slowest, step_seconds; prompt_seconds; peak_bytes;
correctness; read_bytes, flop, weights_read and experts_read of a step; limit_seconds, limit, limit_share and
the rates behind them (limits.py). Ours: python_calls_per_token; with adapters their cost over the same model
without. Theirs: the way that was chosen and the attempts (ways.py), first_side_speed, first_side_memory.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from benchmarks.harness import shapes
from benchmarks.harness.case import Run, pick
from benchmarks.harness.checkpoints import made
from benchmarks.harness.generation import STEPS, make_adapter, prompts_of, read_cases, scored
from benchmarks.harness.limits import limited
from benchmarks.harness.rows import Row
from benchmarks.harness.sides import Side, Sides
from benchmarks.harness.training import compare
from benchmarks.harness.ways import Key, Trial, key_of, trials
from unfreeze.checkpoint.manifest import read_json
from unfreeze.core.errors import ConfigError

SHORT = ("1x64", "4x64", "16x64", "64x64", "1x512")
CASES = {
    "moe": (*SHORT, "64x512"),
    "adapters": ("1x64", "16x64", "64x64"),
    "dense": SHORT,
    "tiny-k2": (*SHORT, "64x512"),
    "formats": ("1x64", "16x64"),
}
"""Model -> its cases without --cases. 32,000 tokens of prompt take the dense model minutes on two cores."""
THEIRS, MERGED, PLAIN, INT4 = "transformers", "peft, merged", "without adapters", "int4"
FORMATS = {"num_hidden_layers": 3, "n_routed_experts": 48, "vocab_size": 1024}
"""Sizes of the model in other formats: a layer's experts in INT4 take 42 MB, more than the last cache."""
LEAST_STEPS, COUNTED = 4, 3  # steps of a round at many rows; steps whose Python calls are counted
SCORED = 2  # rows of a batch that float32 scores: it is slow without a cache, and the rows are alike


class Timed(NamedTuple):
    """A side, and the folder of the checkpoint or adapter that judges its tokens."""

    side: Side
    judged: Path


class Decoded(NamedTuple):
    """A row before the run's rates are known."""

    side: str
    settings: dict[str, Any]
    entry: dict[str, Any]


@dataclass
class Decoding:
    """One run. root: folder of the checkpoints. rate: measures the machine once more."""

    config: Any
    run: Run
    root: Path
    rate: Callable[[], object]
    trials: dict[Path, dict[Key, Trial]] = field(default_factory=dict)

    def model(self, name: str) -> Iterator[Decoded]:
        """Measure one of CASES."""
        cases, timed = read_cases(self.config.cases or CASES[name]), self.sides(name)
        ways = {}
        if any(one.side.name in (THEIRS, MERGED) for one in timed):
            ways = self.ways(self.folder(name), [key_of(*case) for case in cases])
        played = []
        with Sides([one.side for one in timed], self.run.say) as running:
            for batch, prompt in cases:
                self.rate()
                self.run.say(f"{name}: {batch} rows, prompts of {prompt} tokens")
                played.append(self.case(name, running, batch, prompt, ways.get(key_of(batch, prompt))))
        for folder in dict.fromkeys(one.judged for one in timed):
            here = [one.side.name for one in timed if one.judged == folder]
            self.judge(folder, [{side: case[side] for side in here} for case in played])
        for case in played:
            decoded = [case[one.side.name].decoded for one in timed]
            beside(name, decoded)
            yield from decoded

    def folder(self, name: str) -> Path:
        """The checkpoint of a model; "adapters": of the model that has them."""
        if name == "tiny-k2":
            return shapes.TINY_K2
        if name == "dense":
            return made(self.root / name, shapes.qwen("qwen3", shapes.QWEN3_06B))
        return made(self.root / "moe", shapes.kimi())

    def sides(self, name: str) -> list[Timed]:
        """The sides of a model, the first of which the others are compared with."""
        own = [side for side in self.config.sides if side in STEPS]
        peer = THEIRS in self.config.sides
        if name == "formats":
            folders = {
                kind: made(self.root / kind, shapes.kimi(**FORMATS) | _quantized(kind))
                for kind in (shapes.EXPERTS_IN if own else ())
            }
            return [Timed(self.ours(kind, folder), folder) for kind, folder in folders.items()]
        folder = self.folder(name)
        if name != "adapters":
            timed = [Timed(self.ours(side, folder, STEPS[side]), folder) for side in own]
            return timed + ([Timed(self.theirs(THEIRS, folder), folder)] if peer else [])
        adapter = self.root / "adapter"
        if not adapter.is_dir():
            make_adapter(folder, adapter)
        timed = [Timed(self.ours(side, adapter, STEPS[side]), adapter) for side in own]
        timed += [Timed(self.ours(PLAIN, folder, STEPS[own[0]]), folder)] if own else []
        merged = self.theirs(MERGED, folder, adapter=str(adapter))
        return timed + ([Timed(merged, adapter)] if peer else [])

    def ours(self, side: str, folder: Path, steps: str = "by_record") -> Side:
        options = {"device": self.config.device, "dtype": self.config.computed, "steps": steps}
        return self.run.side(side, "harness.generation:ours", checkpoint=str(folder), **options)

    def theirs(self, side: str, folder: Path, **more: Any) -> Side:
        options = {"device": self.config.device, "dtype": "bfloat16", **more}
        return self.run.side(side, "harness.peers:generator", checkpoint=str(folder), **options)

    def ways(self, folder: Path, keys: Sequence[Key]) -> dict[Key, Trial]:
        """The trials, each made once for a checkpoint."""
        tried, model = self.trials.setdefault(folder, {}), read_json(folder / "config.json")
        if missing := sorted({*keys} - tried.keys()):
            copied = None
            if "n_routed_experts" in model:
                weights = 3 * model["hidden_size"] * model["moe_intermediate_size"]
                copied = model["num_experts_per_tok"] * weights * 4.0
            prompts = {key: prompts_of(*key, model["vocab_size"]) for key in missing}
            seconds = 0.0 if tried else self.config.compile_seconds
            trial = self.theirs("trial", folder)
            tried |= trials(trial, self.run.say, prompts, copied, seconds)
        return tried

    def case(
        self, name: str, running: Sides, batch: int, prompt: int, trial: Trial | None
    ) -> dict[str, Played]:
        """Time all sides in turn. -> side -> what it did."""
        count, rounds = max(LEAST_STEPS, self.config.new // batch), self.config.rounds
        model = self.shape_of(name)
        prompts = prompts_of(batch, prompt, model["vocab_size"])
        new = 1 + (1 + rounds) * count + COUNTED
        for side in running:
            side.replies.clear()
            if trial and trial.best and side.name in (THEIRS, MERGED):
                side.call("prepare", **trial.best._asdict())
            side.replies["start"] = [side.call("start", prompts=prompts, new=new, fresh_peak=True)]
        running.take_turns("steps", warmup=1, rounds=rounds, count=count)
        settings = {"model": name, "shape": model, "dtype": self.config.computed, "batch": batch}
        settings |= {
            "prompt": prompt,
            "steps": count,
            "warmup": count,
            **pick(self.config, "rounds", "device"),
        }
        played = {}
        for side in running:
            entry = timings(side, batch, count)
            if side.name in (THEIRS, MERGED):
                entry["peer"] = {"way": str(trial.best), "tried": trial.tried} if trial else {}
            else:
                entry["python_calls_per_token"] = side.call("calls", count=COUNTED)["calls"] / batch
            tokens = side.call("finish")["tokens"]
            length = prompt + count + (rounds * count + 1) / 2
            played[side.name] = Played(prompts, tokens, length, Decoded(side.name, settings, entry))
        if name != "formats":  # all sides are ours there
            compare([one.decoded.entry for side, one in played.items() if side != PLAIN])
        return played

    def judge(self, folder: Path, cases: Sequence[dict[str, Played]]) -> None:
        """Add correctness and work to the entries. Work is counted once a case, from the first side."""
        judge = self.run.side("float32", "harness.generation:judge", checkpoint=str(folder))
        with Sides([judge], self.run.say):
            for case in cases:
                first = next(iter(case.values()))
                request = {"length": first.length, "dtype": self.config.computed}
                work = judge.call("work", prompts=first.prompts, tokens=first.tokens, **request)
                counted = pick(work, "read_bytes", "flop", "weights_read", "experts_read")
                for one in case.values():
                    some: dict[str, Any] = {"prompts": one.prompts[:SCORED], "tokens": one.tokens[:SCORED]}
                    one.decoded.entry["correctness"] = scored(judge.call("score", **some))
                    one.decoded.entry.update(counted)

    def shape_of(self, name: str) -> dict[str, Any]:
        """The sizes that rows list."""
        if name == "dense":
            return dict(shapes.QWEN3_06B)
        if name == "tiny-k2":
            return pick(read_json(shapes.TINY_K2 / "config.json"), *shapes.SIZES)
        return pick(shapes.kimi(**(FORMATS if name == "formats" else {})), *shapes.SIZES)


class Played(NamedTuple):
    """The text that a side generated in one case; length: cached positions of a timed step, the mean."""

    prompts: list[list[int]]
    tokens: list[list[int]]
    length: float
    decoded: Decoded


def _quantized(kind: str) -> dict[str, Any]:
    table = shapes.EXPERTS_IN[kind]
    return {} if table is None else {"quantization_config": table}


def timings(side: Side, batch: int, count: int) -> dict[str, Any]:
    """Speed over the rounds, time of the prompts with the first token, and peak memory."""
    seconds, tokens = sorted(side.values("steps", "seconds")), batch * count
    median = statistics.median(seconds)
    return {
        "tokens_per_second": tokens / median,
        "fastest": tokens / seconds[0],
        "slowest": tokens / seconds[-1],
        "step_seconds": median / count,
        "prompt_seconds": side.replies["start"][0]["seconds"],
        "peak_bytes": max(side.values("start", "peak") + side.values("steps", "peak")),
        "load_peak_bytes": side.loaded["load_peak"],
    }


def beside(name: str, decoded: Sequence[Decoded]) -> None:
    """Add what a model's sides are measured for: the cost of adapters, the time of other formats."""
    entries = {one.side: one.entry for one in decoded}
    if name == "adapters" and PLAIN in entries:
        decoded[0].entry["adapters_cost"] = decoded[0].entry["step_seconds"] / entries[PLAIN]["step_seconds"]
    if name == "formats":
        first = entries[INT4]["step_seconds"] / entries[INT4]["weights_read"]
        for entry in entries.values():
            entry["of_int4"] = entry["step_seconds"] / entry["weights_read"] / first


def measured(config: Any, run: Run) -> Iterator[Row]:
    """All models of a config; each row with the best rates of the run."""
    if config.device == "cpu" and "unfreeze-graphs" in config.sides:
        raise ConfigError(
            "sides: unfreeze-graphs records CUDA graphs, and this runs on the CPU",
            next="--device cuda, or leave that side out",
        )
    read_cases(config.cases)
    machine = run.side("machine", "harness.limits:machine", device=config.device, dtype=config.computed)
    rates: list[dict[str, float]] = []
    with ExitStack() as stack:
        root = config.checkpoint or stack.enter_context(TemporaryDirectory(prefix="unfreeze-bench-"))
        stack.enter_context(Sides([machine], run.say))

        def rate() -> None:
            rates.append(pick(machine.call("measure"), "read_rate", "gemm_rate"))

        decoding = Decoding(config, run, Path(root), rate)
        decoded = [one for name in config.models for one in decoding.model(name)]
    best = {name: max(rate[name] for rate in rates) for name in ("read_rate", "gemm_rate")}
    for side, settings, entry in decoded:
        results = entry | limited(entry, best)
        yield run.row(side, settings, results | {"note": note(settings, results)})


def note(settings: dict[str, Any], entry: dict[str, Any]) -> str:
    """A row in a sentence: case, limit and share, errors, and what its model is measured for."""
    other, nats = entry["correctness"].values()
    words = [
        f"{settings['model']} {settings['batch']}x{settings['prompt']}: {1e3 * entry['step_seconds']:.2f} ms"
        f" a step, {entry['limit_share']:.0%} of the limit ({1e3 * entry['limit_seconds']:.2f} ms by"
        f" {entry['limit']})",
        f"prompt {entry['prompt_seconds']:.2f} s",
        f"{other:.1%} other than float32's choice, at worst {nats:.3f} nats",
    ]
    if "python_calls_per_token" in entry:
        words.append(f"{entry['python_calls_per_token']:,.0f} Python calls a token")
    if "adapters_cost" in entry:
        words.append(f"{entry['adapters_cost']:.2f} of the time without adapters")
    if "of_int4" in entry:
        words.append(f"{entry['of_int4']:.2f} of INT4's time per weight read")
    if entry.get("peer"):
        words.append(f"in its fastest way, {entry['peer']['way']}")
    return "; ".join(words)
