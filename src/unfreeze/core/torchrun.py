"""What torchrun says of a process, by its environment; and into how many parts a step can be cut then."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass

from unfreeze.core.errors import ConfigError


@dataclass(frozen=True)
class Started:
    """Process `rank` of `size`, the `local`th of `on_node` on node `node` of `nodes`; a node is one agent."""

    rank: int = 0
    size: int = 1
    local: int = 0
    on_node: int = 1
    node: int = 0
    nodes: int = 1


def first_process() -> bool:
    """Whether this process speaks for all; yes where torchrun's numbers are wrong."""
    with suppress(ConfigError):
        return started().rank == 0
    return True


def started() -> Started:
    """As torchrun started this process: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK.

    Without a WORLD_SIZE above 1: alone, whatever else is set. Where LOCAL_WORLD_SIZE is not set: one node.
    Raises ConfigError where one of them is no number or too small, or there is no such process.
    """

    def number(name: str, otherwise: int, least: int = 0) -> int:
        said = os.environ.get(name) or str(otherwise)
        if not (said.isascii() and said.isdigit()):
            raise _not_torchruns(f"{name} is {said!r:.40}, which is no number of processes")
        if int(said) < least:
            raise _not_torchruns(f"{name} is {said}: a run has at least one process")
        return int(said)

    rank, size = number("RANK", 0), number("WORLD_SIZE", 1, 1)
    if size == 1:
        return Started()
    if rank >= size:
        raise _not_torchruns(f"RANK is {rank}, and WORLD_SIZE {size}: there is no such process")
    on_node = number("LOCAL_WORLD_SIZE", size, 1)
    node, nodes = number("GROUP_RANK", rank // on_node), number("GROUP_WORLD_SIZE", -(-size // on_node), 1)
    return Started(rank, size, number("LOCAL_RANK", rank % on_node), on_node, node, nodes)


def quieten() -> None:
    """Before torch is imported: of a store that is gone it would print C++ frames at each call."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def _not_torchruns(words: str) -> ConfigError:
    return ConfigError(words, next="unset WORLD_SIZE and RANK, or start the processes by torchrun")


def nearest_multiples(count: int, processes: int) -> list[int]:
    """The multiples of `processes` (from 1 on) below and above `count`; `count` alone where it is one."""
    below = count // processes * processes
    if below == count:
        return [count]
    return [below, below + processes] if below else [processes, 2 * processes]


def sharers(count: int) -> list[int]:
    """How many processes can share `count` micro-batches equally: its divisors."""
    return [n for n in range(1, count + 1) if count % n == 0]
