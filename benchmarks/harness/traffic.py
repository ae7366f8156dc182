"""Bytes that torch's operations move at least, beside the rate at which one core copies memory.

torch's profiler records shapes and dtypes of inputs, not of outputs, so an operation counts only where its
output follows from them: each tensor read once, the output written once. What a cache keeps from one
operation to the next never comes from memory, so a rate may lie above the copy's. Loops without recorded
shapes (numba's, Python's) have no bytes.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

ITEM = {
    "c10::BFloat16": 2,
    "c10::Half": 2,
    "float": 4,
    "double": 8,
    "long int": 8,
    "long": 8,
    "int": 4,
    "short int": 2,
    "short": 2,
    "bool": 1,
    "unsigned char": 1,
    "signed char": 1,
}
COPIED = 256 * 2**20  # bytes read by the measured copy, several times the last cache


class Recorded(NamedTuple):
    """A tensor among an operation's inputs, or its output.

    `there`: how many numbers of it lie in memory; an expanded one repeats the same.
    """

    shape: tuple[int, ...]
    item: int
    there: int

    @property
    def nbytes(self) -> int:
        return self.there * self.item


def fresh(shape: tuple[int, ...], item: int) -> Recorded:
    """A tensor whose numbers all lie there."""
    return Recorded(shape, item, math.prod(shape))


def tensors(
    shapes: Sequence[Sequence[int]], dtypes: Sequence[str], strides: Sequence[Sequence[int]]
) -> list[Recorded]:
    """The tensors among recorded inputs; numbers, flags and lists are left out."""
    return [
        Recorded(
            tuple(shape),
            ITEM[dtype],
            math.prod(size for size, stride in zip(shape, steps, strict=True) if stride),
        )
        for shape, dtype, steps in zip(shapes, dtypes, strides, strict=True)
        if shape and dtype in ITEM
    ]


def _inputs_and(output: Callable[[list[Recorded]], Recorded]) -> Callable[[list[Recorded]], int]:
    return lambda given: sum(one.nbytes for one in given) + output(given).nbytes


def _product(given: list[Recorded]) -> int:
    """a @ b, with or without a batch dimension; an `out` that was given is the output, not read."""
    a, b = given[:2]
    return a.nbytes + b.nbytes + fresh((*a.shape[:-1], b.shape[-1]), a.item).nbytes


def _product_and_sum(given: list[Recorded]) -> int:
    """c + a @ b."""
    return given[0].nbytes + _product(given[1:3])


def _together(given: list[Recorded]) -> Recorded:
    """What tensors of one rank or fewer give element by element, in the widest of their dtypes."""
    rank = max(len(one.shape) for one in given)
    padded = [(1,) * (rank - len(one.shape)) + one.shape for one in given]
    return fresh(tuple(max(sizes) for sizes in zip(*padded, strict=True)), max(one.item for one in given))


MOVED: dict[str, Callable[[list[Recorded]], int]] = {
    "aten::mm": _product,
    "aten::bmm": _product,
    "aten::addmm": _product_and_sum,
    "aten::copy_": lambda given: sum(one.nbytes for one in given[:2]),  # what is written, what is read
    **dict.fromkeys(("aten::fill_", "aten::zero_"), lambda given: given[0].nbytes),
    **dict.fromkeys(
        (
            "aten::add",
            "aten::sub",
            "aten::mul",
            "aten::div",
            "aten::sigmoid",
            "aten::neg",
            "aten::exp",
            "aten::_softmax",
            "aten::abs",
        ),
        _inputs_and(_together),
    ),
    **dict.fromkeys(
        ("aten::add_", "aten::sub_", "aten::mul_", "aten::div_"), _inputs_and(lambda given: given[0])
    ),
}
"""Operation -> bytes of its recorded inputs and the output that follows from them."""


def moved(
    name: str, shapes: Sequence[Sequence[int]], dtypes: Sequence[str], strides: Sequence[Sequence[int]]
) -> int:
    """Bytes of one call; 0 where they don't follow from what was recorded."""
    given = tensors(shapes, dtypes, strides)
    enough = len(given) >= {"aten::mm": 2, "aten::bmm": 2, "aten::addmm": 3}.get(name, 1)
    return MOVED[name](given) if name in MOVED and enough else 0


def by_op(events: Sequence[Any]) -> Mapping[str, int]:
    """Operation -> bytes of all its calls among kineto events (profile.profiler.kineto_results.events())."""
    total: dict[str, int] = defaultdict(int)
    for event in events:
        if event.name() in MOVED:
            total[event.name()] += moved(
                event.name(), event.shapes(), event.dtypes(), event.structured_input_strides()
            )
    return total


def copy_rate(repeats: int = 7) -> float:
    """Measure bytes read and written per second by a copy of COPIED bytes; the median.

    Into memory that is there already, on as many cores as torch has.
    """
    import torch

    source, target = (torch.zeros(COPIED, dtype=torch.uint8) for _ in range(2))
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - started)
    return 2 * COPIED / statistics.median(times)
