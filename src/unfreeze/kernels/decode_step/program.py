"""Record a generation step as a table of operations, and run it.

A Program holds buffers for up to S sequences; `run(rows)` computes the first `rows` of them. Operations keep
the addresses of matrices: one changed in place is seen, one that is replaced is not (its old memory stays).
Vectors (gains, biases) may be copies, made at recording.

S sequences, K inputs of a product, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from unfreeze.kernels.attention import CAUSAL, Mask
from unfreeze.kernels.decode_step import ops, team, thin
from unfreeze.kernels.decode_step.buffers import Row, Store, memory_of
from unfreeze.kernels.decode_step.codes import CHUNK
from unfreeze.kernels.decode_step.compile import compile_all
from unfreeze.kernels.decode_step.dots import FLOAT32
from unfreeze.kernels.decode_step.formats import packed_weight
from unfreeze.kernels.decode_step.operation import Operation, Wide, loops_of, table_of
from unfreeze.kernels.decode_step.ops import ACT_WIDTH, LINEAR_ROWS
from unfreeze.kernels.decode_step.pointer import Callee
from unfreeze.kernels.decode_step.slots import NONE, SlotTable
from unfreeze.kernels.decode_step.weights import DENSE, CannotRecord, Weight, dense_weight
from unfreeze.kernels.decode_step.wide import (
    blocks_of,
    fits,
    follow,
    linear_by_tiles,
    tile_rows,
    tiles_of,
    wide_from,
)
from unfreeze.kernels.loops.amx_tile import SIDE, config
from unfreeze.kernels.loops.bf16_cpu import available
from unfreeze.kernels.loops.cores import in_runs
from unfreeze.quant.codec import Packed

Tables = tuple[int, int, int]
"""Addresses of cos and sin, float32 [S, pairs], and the number of pairs."""


class Heads(NamedTuple):
    """Sizes of an attention: query heads, groups that share a key head, widths of a key and a value."""

    queries: int
    groups: int
    width: int
    value_width: int


class Program:
    """The table, its buffers, and how it is run. `dtype`: of the model; `rows`: S."""

    def __init__(self, rows: int, dtype: torch.dtype):
        self.rows, self.dtype = rows, dtype
        self.pairs = dtype == torch.bfloat16 and available()
        self.like = np.uint16(0) if self.pairs else np.float32(0)
        self.size = 2 if self.pairs else 4  # bytes of a packed number
        self.positions = torch.zeros(rows, dtype=torch.int64)
        self.places = torch.zeros(rows, dtype=torch.int64)  # of the new token, in its row of the cache
        self.shared = torch.zeros(rows, 2, dtype=torch.int64)  # slot of a row's prompt, and its length
        self.slots = torch.full((rows,), NONE)  # of each row's adapter, if there are several (slots.py)
        self._holds: list[Any] = [self.positions, self.places, self.shared, self.slots]
        self._sizes = torch.from_numpy(config())
        self._operations: list[Operation] = []
        self._calls: list[tuple[int, Callable[[int], None]]] = []  # before operation i, on the host
        self._wide_from = wide_from(self.pairs)
        self._free: dict[int, list[Row]] = {}
        self._taken: list[Row] = []
        self._scratch: dict[tuple[int, int], Tensor] = {}
        self._read: set[int] = set()
        self._written: set[int] = set()
        self._phase = 0
        self._fresh: list[Row] = []  # those whose packed form has its operation

    def place(self, shared: Tensor | None, rows: int) -> None:
        """Set where the step's positions lie. shared [rows, 2]: slot and length of each prompt, or None."""
        if shared is not None:
            self.shared[:rows] = shared
        self.places[:rows] = self.positions[:rows] - self.shared[:rows, 1]

    # --- buffers

    def row(self, width: int) -> Row:
        """A buffer; it may have served an earlier layer (`reuse`)."""
        free = self._free.get(width)
        whole = SIDE * tiles_of(self.rows)  # products by tiles write so many
        taken = free.pop() if free else Row(torch.zeros(whole, width)[: self.rows], self.pairs)
        taken.stale = True
        self._taken.append(taken)
        return taken

    def reuse(self, *kept: Row) -> None:
        """All buffers but these may be taken again."""
        for row in self._taken:
            if row not in kept:
                self._free.setdefault(row.width, []).append(row)
        self._taken = list(kept)

    def keep(self, tensor: Tensor) -> int:
        """Address of a tensor that lives as long as the program."""
        self._holds.append(tensor)
        return tensor.data_ptr()

    def scratch(self, rows: int, width: int) -> Tensor:
        """Packed rows that no Row holds, [rows, width]; all layers use the same memory."""
        name = rows, width
        if name not in self._scratch:
            self._scratch[name] = torch.zeros(rows, width, dtype=torch.int16 if self.pairs else torch.float32)
        return self._scratch[name]

    def vector(self, tensor: Tensor | None) -> int:
        """Address of a float32 copy of a vector; 0 for None."""
        return 0 if tensor is None else self.keep(tensor.detach().float().contiguous())

    def weight(self, weight: Tensor | Packed) -> Weight:
        """A matrix [.., O, K] for the products. Raises CannotRecord for a format without an operation.

        It lives as long as the program.
        """
        read = packed_weight if isinstance(weight, Packed) else dense_weight
        held = read(weight, self.pairs)  # type: ignore[arg-type]
        self._holds.append(held)
        return held

    def dense(self, factor: Tensor) -> Weight:
        """A matrix of float32 or bf16 that an operation reads without products, such as an adapter's B."""
        held = self.weight(factor)
        if held.kind < 0:
            raise CannotRecord(f"a factor of {factor.dtype}")
        return held

    def factor(self, B: Tensor) -> list[int]:
        """Address, kind and float32 products of an adapter's second matrix (ops.add_thin)."""
        held = self.dense(B.detach())
        return [held.codes, held.kind, DENSE[B.dtype][1].address(False)]

    def tables(self, table: SlotTable | None) -> list[int]:
        """Addresses of the rows' slots and of a matrix's table; 0 for None."""
        return [0, 0] if table is None else [self.slots.data_ptr(), self.keep(table.entries)]

    def thin_tile(self) -> int:
        """Address of the products of a float32 A."""
        return DENSE[torch.float32][1].address(self.pairs)

    def _thin_of_slots(self, x: Row, table: SlotTable) -> Row:
        """t = A x of each row's own adapter, [S, R]."""
        packed, low = self.packed(x), self.row(table.rank)
        arguments = [self.thin_tile(), *self.tables(table), packed, self.packed_stride(x), x.width]
        arguments += [low.address, low.stride]
        self.add(thin.thin_of_slots, 1, True, arguments, reads=[x.packed], writes=[low])
        return low

    def packed(self, x: Row) -> int:
        """Address of the packed form of x; an operation writes it if none has."""
        address = x.packed.data_ptr()
        if x.stale:
            self._now_packed(x)
            arguments = [x.address, x.stride, x.width, address, self.packed_stride(x)]
            self.add(ops.pack_rows, 1, True, arguments, reads=[x], writes=[x.packed])
        return address

    def _now_packed(self, x: Row) -> None:
        x.stale = x.tiled = False
        self._fresh.append(x)

    def packed_stride(self, x: Row) -> int:
        return x.width * self.size

    def writes_packed(self, x: Row, part: int = CHUNK) -> int:
        """Address for an operation that writes x packed itself, in parts of that width; 0 if it cannot."""
        if part % CHUNK:
            return 0
        self._now_packed(x)
        return x.packed.data_ptr()

    # --- operations

    def add(
        self,
        loop: Callee,
        jobs: int,
        of_rows: bool,
        arguments: Sequence[int],
        numbers: Sequence[float] = (),
        *,
        reads: Iterable[Any] = (),
        writes: Iterable[Any] = (),
        count: int = 0,
        wide: Wide | None = None,
        only_wide: bool = False,
    ) -> None:
        """Append an operation. It waits for those before it only if it touches what they write or read.

        wide, only_wide: as in Operation.

        All that it reads and writes lives as long as the program.
        """
        reads, writes = list(reads), list(writes)
        self._holds += reads + writes
        read, written = {memory_of(each) for each in reads}, {memory_of(each) for each in writes}
        index = len(self._operations)
        lists = list(arguments), list(numbers)
        operation = Operation(loop, jobs, of_rows, *lists, count, index, wide, only_wide)
        if read & self._written or written & (self._written | self._read):
            operation.first, self._phase = self._phase, index
            self._read, self._written = set(), set()
        self._read |= read
        self._written |= written
        self._operations.append(operation)

    def call(self, function: Callable[[int], None]) -> None:
        """Append a call on the host, with the number of rows. All operations before it are done then."""
        self._calls.append((len(self._operations), function))
        self._phase, self._read, self._written = len(self._operations), set(), set()

    def attempt(self, record: Callable[[], Row]) -> Row | None:
        """record(), or None if it raises CannotRecord; what it had appended is taken back."""
        before = len(self._operations), len(self._calls), len(self._fresh)
        waits = self._phase, set(self._read), set(self._written)
        try:
            return record()
        except CannotRecord:
            del self._operations[before[0] :], self._calls[before[1] :]
            self._phase, self._read, self._written = waits
            for row in self._fresh[before[2] :]:
                row.stale = True
            del self._fresh[before[2] :]
            return None

    def norm(self, x: Row, gain: Tensor, eps: float, groups: int = 1) -> Row:
        """gain · x / rms(x), for each of `groups` equal parts."""
        out = self.row(x.width)
        width = x.width // groups
        arguments = [x.address, x.stride, self.vector(gain), width, groups, out.address, out.stride]
        packed = self.writes_packed(out)
        self.add(
            ops.norm,
            1,
            True,
            [*arguments, packed, self.packed_stride(out)],
            [eps],
            reads=[x],
            writes=[out, out.packed],
        )
        return out

    def linear(
        self,
        x: Row,
        weight: Tensor | Packed,
        bias: Tensor | None = None,
        *,
        adapter: tuple[Tensor, Tensor, float] | None = None,
        each: SlotTable | None = None,
        add: Row | None = None,
        factor: float = 1.0,
    ) -> Row:
        """add + factor · (W x + bias + scale · B A x); adapter: (A [R, K], B [O, R], scale).

        each: the adapters of the rows, in place of one for all.
        """
        W = self.weight(weight)
        O, K = weight.shape[-2:]
        of_adapter, low = [0] * 6, None
        if each is not None:
            low = self._thin_of_slots(x, each)
            of_adapter = [low.address, low.stride, 0, 0, FLOAT32, DENSE[torch.float32][1].address(False)]
        elif adapter is not None:
            A, B, _ = adapter
            low = self.linear(x, A.detach())
            of_adapter = [low.address, low.stride, A.shape[0], *self.factor(B)]
        packed, out = self.packed(x), self.row(O)
        end = [add.address, add.stride] if add is not None else [0, 0]
        arguments = [*W.arguments, K, O, packed, self.packed_stride(x), out.address, out.stride]
        tiles, wide = self._in_tiles(x, weight)
        jobs, blocks = -(-O // LINEAR_ROWS), blocks_of(O)
        self.add(
            ops.linear,
            jobs,
            False,
            [*arguments, self.vector(bias), *end, *of_adapter, *self.tables(each), *tiles, blocks],
            [factor, adapter[2] if adapter else 0.0],
            reads=[x.packed, *([add] if add is not None else []), *([low] if low is not None else []), *wide],
            writes=[out],
            wide=Wide(linear_by_tiles, -(-jobs // blocks)) if wide else None,
        )
        return out

    def _in_tiles(self, x: Row, weight: Tensor | Packed) -> tuple[list[int], list[Tensor]]:
        """Addresses of packed x in tiles and of their sizes, and the tiles; nothing where none are used."""
        if self._wide_from is None or isinstance(weight, Packed) or not fits(weight):
            return [], []
        if not x.tiled:
            x.tiled = True
            self._fresh.append(x)
            arguments = [x.packed.data_ptr(), self.packed_stride(x), x.width, x.tiles.data_ptr()]
            ends: Any = {"reads": [x.packed], "writes": [x.tiles], "only_wide": True}
            self.add(tile_rows, len(x.tiles), False, arguments, **ends)
        return [x.tiles.data_ptr(), self._sizes.data_ptr()], [x.tiles]

    def dots(self, x: Row, weight: Tensor) -> Row:
        """W x in float32 throughout: x is not rounded, whatever the arithmetic of the other products."""
        W, (O, K), out = self.dense(weight), weight.shape, self.row(len(weight))
        # products of no number, and W as the adapter's second matrix: its input is float32 in order
        arguments = [*W.arguments, 0, O, x.packed.data_ptr(), self.packed_stride(x), out.address, out.stride]
        of_adapter = [x.address, x.stride, K, W.codes, W.kind, 0]
        jobs = -(-O // LINEAR_ROWS)
        self.add(
            ops.linear, jobs, False, [*arguments, 0, 0, 0, *of_adapter], [1.0, 1.0], reads=[x], writes=[out]
        )
        return out

    def activate(self, gate: Row, up: Row | None, kind: int, alpha: float = 0.0, limit: float = 0.0) -> Row:
        """act(gate, up); gate may be twice as wide and hold both, gate first."""
        width = gate.width
        out = self.row(width)
        second = [up.address, up.stride] if up is not None else [0, 0]
        arguments = [gate.address, gate.stride, *second, width, out.address, out.stride]
        packed = self.writes_packed(out)
        self.add(
            ops.activate,
            -(-width // ACT_WIDTH),
            True,
            [*arguments, packed, self.packed_stride(out), kind],
            [alpha, limit],
            reads=[gate, *([up] if up is not None else [])],
            writes=[out, out.packed],
        )
        return out

    def combine(
        self, x: Row, y: Row | None = None, a: float = 1.0, b: float = 1.0, share: Row | None = None
    ) -> Row:
        """a x + b y, or a x + b sigmoid(share) y."""
        out = self.row(x.width)
        second = [y.address, y.stride] if y is not None else [0, 0]
        third = [share.address, share.stride] if share is not None else [0, 0]
        self.add(
            ops.add,
            1,
            True,
            [x.address, x.stride, *second, *third, x.width, out.address, out.stride],
            [a, b],
            reads=[each for each in (x, y, share) if each is not None],
            writes=[out],
        )
        return out

    def rotate(
        self,
        x: Row,
        heads: int,
        tables: Tables | None,
        pairing: int,
        *,
        factor: Tensor | None = None,
        cache: Store | None = None,
        packed: bool = False,
    ) -> Row:
        """Heads rotated (tables None: as they are) and scaled by `factor` [S, 1].

        cache: written too. packed: head by head, for `attend`.
        """
        out = self.row(x.width)
        cos, sin, pairs = (0, 0, 0) if tables is None else tables
        arguments = [x.address, x.stride, heads, x.width // heads, cos, sin, pairs, pairing]
        arguments += [0 if factor is None else factor.data_ptr(), out.address, out.stride]
        arguments += [0] * 4 if cache is None else self.cache(cache.rows)
        arguments += [self.places.data_ptr(), out.packed.data_ptr() if packed else 0, self.packed_stride(out)]
        writes = [out, *([cache.rows] if cache is not None else []), *([out.packed] if packed else [])]
        self.add(ops.rotate_heads, 1, True, arguments, reads=[x], writes=writes)
        return out

    def cache(self, store: Tensor) -> list[int]:
        """Address of a cache [S, N, …], bytes between rows and between positions, kind of its numbers."""
        if store.dtype not in DENSE:
            raise CannotRecord(f"a cache of {store.dtype}")
        self._holds.append(store)
        strides = [store.stride(i) * store.element_size() for i in (0, 1)]
        return [store.data_ptr(), *strides, DENSE[store.dtype][0]]

    def attend(
        self,
        q: Row,
        keys: Store,
        values: Store,
        scale: float,
        heads: Heads,
        *,
        mask: Mask = CAUSAL,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Row:
        """Attention of each sequence's query to its cache. q is packed head by head.

        keys […, G, d], values […, G, v]; without G all groups read the same keys. -> [S, queries · v].
        """
        queries, groups, width, value_width = heads
        out = self.row(queries * value_width)
        packed = self.writes_packed(out, value_width)
        key_head, value_head = (
            t.stride(2) * t.element_size() if t.dim() == 4 else 0 for t in (keys.rows, values.rows)
        )
        *key, kind = self.cache(keys.rows)
        tile = DENSE[keys.rows.dtype][1].address(self.pairs)
        arguments = [
            q.packed.data_ptr(),
            self.packed_stride(q),
            width * self.size,
            queries,
            groups,
            width,
            value_width,
        ]
        arguments += [
            *key,
            key_head,
            *self.cache(values.rows)[:3],
            value_head,
            kind,
            tile,
            self.positions.data_ptr(),
        ]
        arguments += [mask.window or 0, mask.chunk or 0, self.vector(sinks), out.address, out.stride]
        prompts = [store.prompts for store in (keys, values) if store.prompts is not None]
        shared = [self.cache(store)[:2] for store in prompts] or [[0, 0], [0, 0]]
        self.add(
            ops.attend,
            groups,
            True,
            [*arguments, packed, self.packed_stride(out), self.shared.data_ptr(), *shared[0], *shared[1]],
            [scale, softcap or 0.0],
            reads=[q.packed, keys.rows, values.rows, *prompts],
            writes=[out, out.packed],
        )
        return out

    # --- running

    def finish(self) -> None:
        """Turn the list into the table that the loop reads."""
        wide = self._wide_from is not None
        follow(self._operations)
        compile_all(loops_of(self._operations, wide), self.pairs)
        self._tables = [table_of(self._operations, self.pairs, many) for many in (False, wide)]
        self._numbers = np.zeros((len(self._operations), ops.NUMBERS), np.float32)
        for i, operation in enumerate(self._operations):
            self._numbers[i, : len(operation.numbers)] = operation.numbers
        self._counters = np.zeros((len(self._operations), 2), np.int64)

    def run(self, rows: int) -> None:
        """Compute the step of the first `rows` sequences. Raises ValueError for more than were recorded."""
        if rows > self.rows:
            raise ValueError(f"{rows} sequences in a step recorded for {self.rows}")
        self._counters.fill(0)
        table = self._tables[self._wide_from is not None and rows >= self._wide_from]
        begin = 0
        for end, function in [*self._calls, (len(self._operations), None)]:
            if end > begin:
                self._work(table, begin, end, rows)
            if function is not None:
                function(rows)
            begin = end

    def _work(self, table: np.ndarray, begin: int, end: int, rows: int) -> None:
        threads = torch.get_num_threads()

        def share(_start: int, _stop: int) -> None:
            if team.work(self.like, table, self._numbers, begin, end, rows, self._counters):
                raise MemoryError("a step of generation found no memory for its sums")

        if threads == 1:
            share(0, 1)
        else:
            in_runs(threads, threads, share)
