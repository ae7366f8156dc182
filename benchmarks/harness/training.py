"""Whole training steps of several sides in turn, each checked against float64, as rows.

A side's results: tokens_per_second (median step), fastest, slowest, steps; peak_bytes while training,
load_peak_bytes, load_seconds; the bytes of weights, gradients and optimizer (state_bytes) and the peak above
them; losses; correctness. A peer's row also says how many times as fast the first side is, and the share of
its memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.case import Run
from benchmarks.harness.checkpoints import checkpoints
from benchmarks.harness.job import errors
from benchmarks.harness.sides import Side, Sides
from unfreeze.core.errors import ConfigError

STATE = ("weights", "gradients", "optimizer")


@dataclass(frozen=True)
class Job:
    """The work of every side: a checkpoint, the small one of the float64 comparison, documents of a length.

    settings: of each row. exact: the result of `job.check` in float64.
    """

    run: Run
    checkpoint: str
    checked: str
    lora: Mapping[str, Any] | None
    documents: int
    length: int
    settings: dict[str, Any]
    exact: Mapping[str, Any]

    def ours(self, name: str, recompute: str, **more: Any) -> Side:
        return self._side(name, "job:trainer", **{"lora": self.lora, "recompute": recompute} | more)

    def theirs(self, name: str, function: str, **more: Any) -> Side:
        """A peer's side. function: its name in peers.py."""
        return self._side(name, f"peers:{function}", **more)

    def _side(self, name: str, function: str, **more: Any) -> Side:
        arguments = {"checkpoint": self.checkpoint, "checked": self.checked, "documents": self.documents}
        arguments |= {"length": self.length, "device": self.run.device, "dtype": self.settings["dtype"]}
        return self.run.side(name, f"harness.{function}", **arguments | more)

    def in_turn(
        self,
        sides: Sequence[Side],
        own: Mapping[str, Mapping[str, Any]] | None = None,
        tokens: Mapping[str, int] | None = None,
        **turns: Any,
    ) -> dict[str, dict[str, Any]]:
        """Load all sides, let them step in turn, check each; side -> results.

        own: side -> float64 result to compare it with, if sides have checkpoints of their own.
        tokens: side -> tokens of its step, if they differ.
        Sides without a call "check" (the GEMM rate) return their replies only.
        """
        config, entries = self.run.config, dict[str, dict[str, Any]]()
        with Sides(sides, self.run.say) as running:
            running.take_turns("step", warmup=config.warmup, rounds=config.steps, **turns)
            for side in running:
                entries[side.name] = (
                    results(
                        side,
                        (tokens or {}).get(side.name, self.documents * self.length),
                        (own or {}).get(side.name, self.exact),
                    )
                    if "trained_parameters" in side.loaded
                    else {"replies": side.replies["step"]}
                )
        if tokens is None:
            compare([entry for entry in entries.values() if "tokens_per_second" in entry])
        return entries


@contextmanager
def job(
    run: Run,
    model: Mapping[str, Any],
    small: Mapping[str, Any],
    shape: Iterable[str],
    lora: Mapping[str, Any] | None,
    documents: int,
    length: int,
) -> Iterator[Job]:
    """Make the checkpoints and the float64 result. shape: the sizes of config.json that rows list."""
    config, shape = run.config, tuple(shape)
    settings = {
        "shape": {name: model[name] for name in shape},
        "checked": {name: small[name] for name in shape if small[name] != model[name]},
        "dtype": config.computed,
        "documents": documents,
        "length": length,
        "tokens_per_step": documents * length,
        "steps": config.steps,
        "warmup": config.warmup,
        "device": config.device,
    }
    with checkpoints(config.checkpoint, dict(model), dict(small)) as (folder, checked):
        exact = float64(run, str(checked), lora, length)
        yield Job(run, str(folder), str(checked), lora, documents, length, settings, exact)


def whole(sizes: Iterable[int], length: int) -> None:
    """Raises ConfigError if the tokens of a step are not whole documents of `length`."""
    for tokens in sizes:
        if tokens % length or tokens < length:
            raise ConfigError(
                f"tokens: {tokens} is not a multiple of {length}, the length of a document",
                next="mend --tokens",
            )


def float64(run: Run, checked: str, lora: Mapping[str, Any] | None, length: int) -> dict[str, Any]:
    """The result of `job.check` in float64, from a process that has ended when this returns."""
    side = run.side("float64", "harness.job:exact", checked=checked, lora=lora, length=length)
    with Sides([side], run.say):
        return side.loaded


def compare(entries: Sequence[dict[str, Any]]) -> None:
    """Add the ratios to the first entry to every other entry."""
    for other in entries[1:]:
        first = entries[0]
        other["first_side_speed"] = first["tokens_per_second"] / other["tokens_per_second"]
        other["first_side_memory"] = first["peak_bytes"] / other["peak_bytes"]
        if "above_state_bytes" in first:
            other["first_side_above_state"] = first["above_state_bytes"] / max(1, other["above_state_bytes"])


def speeds(side: Side, tokens: int) -> dict[str, Any]:
    """A side's speed and memory over its timed steps."""
    seconds, state = sorted(side.values("step", "seconds")), side.call("state")
    return {
        "tokens_per_second": tokens / side.median("seconds"),
        "fastest": tokens / seconds[0],
        "slowest": tokens / seconds[-1],
        "step_seconds": side.median("seconds"),
        "cpu_seconds": side.median("cpu_seconds"),
        "steps": len(seconds),
        "peak_bytes": side.peak(),
        "load_peak_bytes": side.loaded["load_peak"],
        "load_seconds": side.loaded["load_seconds"],
        "state_bytes": {name: state[name] for name in STATE},
        "runtime_bytes": side.loaded["runtime_bytes"],
        "trained_parameters": side.loaded["trained_parameters"],
    }


def results(side: Side, tokens: int, exact: Mapping[str, Any]) -> dict[str, Any]:
    """One side's results after its steps; calls its state and its check."""
    figures = speeds(side, tokens)
    return figures | {
        "above_state_bytes": figures["peak_bytes"] - sum(figures["state_bytes"].values()),
        "loss_first": side.values("step", "loss")[0],
        "loss_last": side.values("step", "loss")[-1],
        "correctness": errors(side.call("check", fresh_peak=True), exact),
    }
