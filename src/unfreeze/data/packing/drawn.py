"""A Source whose micro-batches carry the key by which routers draw experts (models/blocks/noise.py)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from unfreeze.core.draws import Draw, number

if TYPE_CHECKING:
    from unfreeze.data.packing.source import Source, Step


class Drawn:
    """Wraps a Source. The key depends on (seed, step, index of the micro-batch in the step) alone.

    So a resumed run draws what an uninterrupted one draws, and several processes what one would.

    step  number of steps before its first one
    """

    def __init__(self, source: Source, *, seed: int, temperature: float, step: int):
        self.source, self.seed, self.temperature, self.step = source, seed, temperature, step

    def __iter__(self) -> Iterator[Step]:
        return self

    def __next__(self) -> Step:
        micro_batches, cursor = next(self.source)
        drawn = [
            replace(batch, draw=Draw(number(self.seed, self.step, place), self.temperature))
            for place, batch in enumerate(micro_batches)
        ]
        self.step += 1
        return drawn, cursor

    def len_steps(self, epochs: float) -> int | None:
        return self.source.len_steps(epochs)
