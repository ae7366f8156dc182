"""Read torchrun's environment variables, and compute valid numbers of micro-batches."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass

from unfreeze.core.errors import ConfigError


@dataclass(frozen=True)
class Started:
    """Process `rank` of `size`, number `local` of `on_node` on node `node` of `nodes`.

    A node is one agent.
    """

    rank: int = 0
    size: int = 1
    local: int = 0
    on_node: int = 1
    node: int = 0
    nodes: int = 1


def first_process() -> bool:
    """True if this process reports for all. Also True if torchrun's variables are invalid."""
    with suppress(ConfigError):
        return started().rank == 0
    return True


def started() -> Started:
    """Read torchrun's variables RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK.

    Without WORLD_SIZE above 1 the process is alone, whatever else is set. Without LOCAL_WORLD_SIZE there is
    one node. Raises ConfigError if a variable is not a number, too small, or names a process that does not
    exist.
    """

    def number(name: str, otherwise: int, least: int = 0) -> int:
        value = os.environ.get(name) or str(otherwise)
        if not (value.isascii() and value.isdigit()):
            raise _not_torchruns(f"{name} is {value!r:.40}, which is not a number of processes")
        if int(value) < least:
            raise _not_torchruns(f"{name} is {value}: a run has at least one process")
        return int(value)

    rank, size = number("RANK", 0), number("WORLD_SIZE", 1, 1)
    if size == 1:
        return Started()
    if rank >= size:
        raise _not_torchruns(f"RANK is {rank}, but WORLD_SIZE is {size}: there is no such process")
    on_node = number("LOCAL_WORLD_SIZE", size, 1)
    node, nodes = number("GROUP_RANK", rank // on_node), number("GROUP_WORLD_SIZE", -(-size // on_node), 1)
    return Started(rank, size, number("LOCAL_RANK", rank % on_node), on_node, node, nodes)


def quieten() -> None:
    """Silence torch's C++ log before importing torch: it prints C++ frames at each call to a lost store."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def _not_torchruns(words: str) -> ConfigError:
    return ConfigError(words, next="unset WORLD_SIZE and RANK, or start the processes by torchrun")


def nearest_multiples(count: int, processes: int) -> list[int]:
    """Positive multiples of `processes` below and above `count`; only `count` if it is one itself."""
    below = count // processes * processes
    if below == count:
        return [count]
    return [below, below + processes] if below else [processes, 2 * processes]


def sharers(count: int) -> list[int]:
    """Numbers of processes that can share `count` micro-batches equally: its divisors."""
    return [n for n in range(1, count + 1) if count % n == 0]
