"""Record a step of generation from the blocks that train: what a block's `record` receives.

A block with `record(to, x)` appends its operations (kernels/decode_step) and returns their result. A block
without one, or whose weights no operation reads, runs as in training: its `forward` is called in between.
S sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unfreeze.kernels.decode_step.program import CannotRecord, Program, Row, Store, Tables
from unfreeze.kernels.rotary import Pairing
from unfreeze.models.blocks.cache import Cache
from unfreeze.models.blocks.each import Assigned
from unfreeze.models.blocks.shared_cache import SharedCache
from unfreeze.models.blocks.step_pass import StepPass

PAIRINGS: dict[Pairing, int] = {"halves": 0, "adjacent": 1, "leading halves": 2}


@dataclass
class Present:
    """The pass of the present step.

    Calls hold this and not the Recording: it holds the program, which holds the calls, and only a search for
    garbage would free the circle with its cache.
    """

    run: StepPass | None = None


class Recording:
    """The program, the cache it reads, and the pass of the present step, for blocks that are called.

    chosen  layer -> ids [S, K] of the experts of the present step
    """

    def __init__(self, program: Program, cache: Cache):
        self.program, self.cache = program, cache
        self.chosen: dict[int, Tensor] = {}
        self.present = Present()
        self._tables: dict[str, tuple[Tensor, Tensor]] = {}

    def step(self, run: StepPass, assigned: Assigned) -> None:
        """Begin a step: its positions, rotary tables, and the adapter of each row."""
        self.present.run = run
        rows = len(run.positions_T)
        self.program.slots[:rows] = torch.tensor(assigned.of_rows(rows))
        self.program.positions[:rows] = run.positions_T
        self.program.place(self.cache.table() if isinstance(self.cache, SharedCache) else None, rows)
        for name, kept in self._tables.items():
            for mine, new in zip(kept, run.tables(name), strict=True):
                mine[:rows] = new

    def tables(self, name: str | None) -> Tables | None:
        """Addresses of the rotary tables of that name; None for None."""
        if name is None:
            return None
        cos, sin = self._table(name)
        return cos.data_ptr(), sin.data_ptr(), cos.shape[1]

    def factor(self, name: str | None) -> Tensor | None:
        """The table of that name that scales queries by position, [S, 1]; None for None."""
        return None if name is None else self._table(name)[0]

    def _table(self, name: str) -> tuple[Tensor, Tensor]:
        if name not in self._tables:
            run = self.present.run
            assert run is not None
            cos, sin = (table.new_zeros(self.program.rows, *table.shape[1:]) for table in run.tables(name))
            self._tables[name] = cos.float(), sin.float()
        return self._tables[name]

    def stores(self, layer: int) -> tuple[Store, ...]:
        """The cache of a layer, for all rows it will ever have."""
        own = self.cache.layers[layer]
        prompts = self.cache.prompts[layer] if isinstance(self.cache, SharedCache) else (None,) * len(own)
        return tuple(map(Store, own, prompts))

    def of(self, block: nn.Module, x: Row, *, add: Row | None = None, factor: float = 1.0) -> Row:
        """add + factor · block(x)."""
        record: Any = getattr(block, "record", None)
        done, chosen = None, dict(self.chosen)
        if record is not None:
            done = self.program.attempt(lambda: record(self, x, add=add, factor=factor))
        if done is None:
            self.chosen, present = chosen, self.present
            done = self.total(self.called(lambda x_SD: block(x_SD, present.run), x, x.width), add, factor)
        return done

    def total(self, y: Row, add: Row | None, factor: float) -> Row:
        """add + factor · y."""
        if add is not None:
            return self.program.combine(add, y, 1.0, factor)
        return y if factor == 1 else self.program.combine(y, a=factor)

    def called(self, function: Callable[[Tensor], Tensor], x: Row, width: int) -> Row:
        """function(x) between two parts of the program, in the model's dtype."""
        out, dtype = self.program.row(width), self.program.dtype

        def call(rows: int) -> None:
            out.tensor[:rows] = function(x.tensor[:rows].to(dtype)).float()

        self.program.call(call)
        return out


__all__ = ["PAIRINGS", "CannotRecord", "Recording"]
