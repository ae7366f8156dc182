"""Launch the steps of a generation: one by one, or recorded once (on a CPU: recorded.py; CUDA graphs here).

An Engine gets `Steps`: (model, cache) -> Step. A Step takes the newest token of each row and returns logits
[S, V].

`launched`: attention is as wide as the longest row, a host number that grows with each token.

`Replayed`: attention is as wide as the next power of two, and a mask hides the excess. Then only the two
input buffers change from step to step, and one recording serves every step of that width and number of rows.
Attention reads at most twice as much, which is little compared to the weights at these lengths.

S sequences, V vocabulary.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from unfreeze.generate.recorded import Recorded
from unfreeze.kernels.cuda_graph import CannotCapture, Launches, pays, replay
from unfreeze.models import Decoder
from unfreeze.models.blocks.cache import Cache
from unfreeze.models.blocks.residency import Resident

log = logging.getLogger(__name__)
NARROWEST = 64  # positions; a generation of 1,000 tokens then has five widths

Step = Callable[[Sequence[int]], Tensor]
Steps = Callable[[Decoder, Cache], Step]


def launched(model: Decoder, cache: Cache) -> Step:
    """Launch every step from the host."""
    return lambda tokens: model.logits(model.step(torch.tensor(tokens, device=model.device), cache))


def step_by_record(model: Decoder, cache: Cache) -> Step:
    """`Recorded` on a CPU, `replayed` on CUDA.

    A program reads the weights where they lie. If a forward pass communicates between processes, or weights
    come layer by layer, a CPU launches every step.
    """
    if model.device.type != "cpu":
        return replayed(model, cache)
    return Recorded(model, cache) if _stays(model) else launched(model, cache)


def shares_prompts(model: Decoder, steps: Steps) -> bool:
    """True if these steps read prompts that several rows share (SharedCache): recorded ones do.

    Not with longrope: a row that outgrows its short context changes the keys of its prompt.
    """
    recorded = steps is step_by_record and model.device.type == "cpu" and _stays(model)
    return recorded and model.shape.rope.long is None


def replayed(model: Decoder, cache: Cache) -> Step:
    """`Replayed`, recorded where that is predicted or measured to be faster.

    Elsewhere the steps are launched within the same widths: five shapes of attention in 1,000 tokens, not
    1,000. A replay would neither talk to other processes nor copy weights to the device again.
    """
    # recording a step runs it three times, and a recurrent state would move on each time
    if _stays(model) and not model.state_bytes() and pays(model.device, model.dtype, len(cache.lengths)):
        return Replayed(model, cache)
    return Replayed(model, cache, impl="reference")


def _stays(model: Decoder) -> bool:
    """True if all weights are on this device, at the same place in every step."""
    return not model.exchanges and isinstance(model.residency, Resident)


class Replayed:
    """A recording per (rows, width), kept for one generation: cache and weights keep their addresses.

    A size seen for the first time is launched; seen again it is recorded, which costs the host three steps.
    If the launches cannot be recorded (for example because an expert layer reads values on the host, or
    because memory runs out), all steps of this generation are launched, within the same widths, and the log
    has the reason. `impl`: of kernels/cuda_graph; "reference" launches every step.
    """

    def __init__(self, model: Decoder, cache: Cache, impl: str = "auto"):
        self.model, self.cache, self.impl = model, cache, impl
        self._met: dict[tuple[int, int], Launches] = {}

    def __call__(self, tokens: Sequence[int]) -> Tensor:
        self.model.prepare_step(self.cache)
        size = (len(tokens), width_of(max(self.cache.lengths) + 1, self.cache.capacity))
        known = self._met.get(size)
        if known is None:  # rows that have left don't come back, so drop their recordings
            self._met = {met: launches for met, launches in self._met.items() if met[0] == len(tokens)} | {
                size: self._launches(*size)
            }
        launches = self._met[size]
        tokens_S, positions_S = launches.buffers
        tokens_S.copy_(torch.tensor(tokens))
        positions_S.copy_(torch.tensor(self.cache.lengths))
        try:
            # which adapter a row has is a number on the host: with several, steps are launched
            recorded = known and not self.model.assigned.changes
            logits_SV = replay(launches, self.impl if recorded else "reference")
        except CannotCapture as error:
            self.impl = "reference"
            self._met = {size: launches}  # the other recordings are not replayed again: frees their memory
            _say(error.message)
            logits_SV = replay(launches, self.impl)
        self.cache.lengths = [length + 1 for length in self.cache.lengths]
        return logits_SV

    def _launches(self, rows: int, width: int) -> Launches:
        def run(tokens_S: Tensor, positions_S: Tensor) -> Tensor:
            return self.model.logits(self.model.step_within(tokens_S, positions_S, self.cache, width))

        buffers = tuple(torch.zeros(rows, dtype=torch.int64, device=self.model.device) for _ in range(2))
        return Launches(run, buffers, rows, self.model.dtype)


def width_of(longest: int, capacity: int) -> int:
    """Return the power of two at or above `longest`, at least NARROWEST, at most the cache's capacity."""
    return min(capacity, max(NARROWEST, 1 << (longest - 1).bit_length()))


@functools.cache
def _say(reason: str) -> None:
    log.warning("generation: steps are launched one by one, because they cannot be recorded: %s", reason)
