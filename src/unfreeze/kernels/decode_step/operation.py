"""An operation of a recorded step, and the table of all of them that the loop of team.py reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from unfreeze.kernels.decode_step import team
from unfreeze.kernels.decode_step.atomic import ARGUMENTS
from unfreeze.kernels.decode_step.pointer import Callee

COLUMNS = team.ARGUMENTS + ARGUMENTS


class Wide(NamedTuple):
    """The loop of an operation for many rows (wide.py), and its jobs."""

    loop: Callee
    jobs: int


@dataclass
class Operation:
    """A loop and its arguments; jobs, of_rows, count, first: columns of the table (team.py).

    wide       the loop for many rows; None: the same
    only_wide  left out for few rows
    """

    loop: Callee
    jobs: int
    of_rows: bool
    arguments: list[int]
    numbers: list[float]
    count: int = 0
    first: int = 0
    wide: Wide | None = None
    only_wide: bool = False


def loops_of(operations: Sequence[Operation], wide: bool) -> list[Callee]:
    """The loops of the table for few rows and, if `wide`, of that for many, in their order."""
    loops: list[Callee] = []
    for operation in operations:
        if not operation.only_wide or wide:
            loops.append(operation.loop)
        if wide and operation.wide is not None:
            loops.append(operation.wide.loop)
    return loops


def table_of(operations: Sequence[Operation], pairs: bool, wide: bool) -> np.ndarray:
    """The table for few rows or for many. pairs: the program multiplies in bf16."""
    table = np.zeros((len(operations), COLUMNS), np.int64)
    for i, operation in enumerate(operations):
        loop, jobs = operation.loop, operation.jobs
        if wide and operation.wide is not None:
            loop, jobs = operation.wide
        left_out = operation.only_wide and not wide
        address, jobs = (0, 0) if left_out else (loop.address(pairs), jobs)
        head = [address, jobs, operation.of_rows, operation.count, operation.first]
        table[i, : len(head)] = head
        table[i, team.ARGUMENTS : team.ARGUMENTS + len(operation.arguments)] = operation.arguments
    return table
