"""The fastest way in which transformers' generate decodes here, found by a few short attempts.

Number format, implementation of the experts, and cache are tried one after the other, each with the best of
those before. Compiling is tried last, and once: at the fewest rows and the shortest prompt, where Python's
time weighs most.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.harness.sides import Side, SideFailed, Sides

DTYPES = ("bfloat16", "float32")
EXPERTS = ("eager", "batched_mm")  # beside grouped_mm, the default of transformers 5.23
COMPILED = "static compiled"
MOST_COPIED = 2**28
"""Bytes of experts that batched_mm may copy in a layer: 4 rows take it three times grouped_mm's time."""
ATTEMPT_STEPS, SECONDS, TOKENS = 3, 3.0, 1024
"""Steps and seconds of an attempt, and the most tokens of its prompts together."""
Key = tuple[int, int]
"""(rows, tokens of a prompt) of a trial."""


class Way(NamedTuple):
    """dtype of the weights; implementation of the experts, "" without any; kind of cache."""

    dtype: str
    experts: str = ""
    cache: str = "dynamic"

    def __str__(self) -> str:
        return ", ".join(filter(None, self))


Tried = dict[str, float | str]
"""Way -> milliseconds of a step, or the reason why there are none."""
Attempt = Callable[[Way], float]
"""Milliseconds of a step. Raises SideFailed."""


class Trial:
    """Attempts at one number of rows, and the best of them."""

    def __init__(self, attempt: Attempt):
        self.attempt, self.tried = attempt, Tried()
        self.best: Way | None = None

    def take(self, way: Way) -> None:
        """Try a way, and keep it if it is the fastest."""
        try:
            milliseconds = self.attempt(way)
        except SideFailed as error:
            self.tried[str(way)] = error.message
            return
        best = self.tried[str(self.best)] if self.best else None
        self.tried[str(way)] = milliseconds
        if not isinstance(best, float) or milliseconds < best:
            self.best = way

    def eager(self, experts: str, copied: float) -> None:
        """Everything but compiling. experts: the default implementation. copied: bytes, of batched_mm."""
        for dtype in DTYPES:
            self.take(Way(dtype, experts))
        if self.best and experts:
            for other in EXPERTS:
                if other != "batched_mm" or copied <= MOST_COPIED:
                    self.take(Way(self.best.dtype, other))
        if self.best:
            self.take(self.best._replace(cache="static"))


def key_of(batch: int, prompt: int) -> Key:
    """The trial of a case: all its rows, and as much of its prompts as an attempt reads.

    Format and cache matter more the longer the cache is, the experts' implementation by the rows.
    """
    return batch, min(prompt, max(1, TOKENS // batch))


def trials(
    side: Side,
    say: Callable[[str], None],
    prompts: Mapping[Key, Sequence[Sequence[int]]],
    copied: float | None,
    compile_seconds: float,
) -> dict[Key, Trial]:
    """Make the trials of `prompts`.

    copied: bytes of the experts of one token, None without experts. compile_seconds: the longest attempt at
    compiling, which ends the process; 0: none.
    """
    within: float | None = None

    def attempt_at(key: Key) -> Attempt:
        def attempt(way: Way) -> float:
            request: dict[str, Any] = {"prompts": prompts[key], "steps": ATTEMPT_STEPS, "seconds": SECONDS}
            milliseconds = side.call("attempt", within=within, **request, **way._asdict())["step_ms"]
            say(f"trial of {key[0]}x{key[1]}: {way}: {milliseconds:.1f} ms a step")
            return milliseconds

        return attempt

    with Sides([side], say):
        results = {key: Trial(attempt_at(key)) for key in sorted(prompts)}
        for (rows, _), trial in results.items():
            trial.eager("" if copied is None else "grouped_mm", rows * (copied or 0))
        fewest = results[min(results)]
        if compile_seconds and fewest.best:
            within = compile_seconds
            fewest.take(fewest.best._replace(cache=COMPILED))
    return results
