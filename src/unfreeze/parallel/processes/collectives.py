"""Collectives among the processes that train one model.

Besides this file, only fsdp.py and roll.py use torch.distributed. A step's micro-batches are dealt out to the
processes. Gradients are summed over those that hold the same rows (mesh.py), and each process makes the same
update. So replicas stay identical, and a saved run may resume with another number of processes.
Every process makes the same collective calls with the same sizes, whatever the data and the routing. So an
idle expert cannot make one process wait for another (docs/why/trust.md M1).

Start: torchrun --nproc-per-node 2 -m unfreeze sft run.toml. Without torchrun there is one process, ALONE, for
which all of this does nothing.
"""

# torch does not list its stores among its exports:
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from unfreeze.core.errors import ConfigError, UserError
from unfreeze.core.torch_types import ints, split
from unfreeze.core.torchrun import started
from unfreeze.parallel.processes.gpus import gpu_of, keep_traces
from unfreeze.parallel.processes.roll import Roll, Told, coming, has_agent, store_at

Item = TypeVar("Item")
# maximum bytes of gradients in flight: enough for full bandwidth, small compared to the gradients
BUCKET = 32 * 2**20
# timeout of one exchange, after which the run ends with an error. For another process's long work (a
# download, a save), processes wait on the store without a limit (roll.py)
TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True)
class InFlight:
    """Rows that are arriving. They may be read after `wait`, which a GPU's host does not wait in."""

    rows: Tensor
    wait: Callable[[], object]

    def arrived(self) -> Tensor:
        self.wait()
        return self.rows


class Group(Protocol):
    """The processes of a run: `rank` of `size`. Rank 0 writes files and messages for all.

    lockstep: True if a forward pass is a collective, because the processes share weights. Then all must run
    every pass of the model, including those that one could do for all, such as a sample. Set once, by the
    code that splits the weights.
    """

    rank: int
    size: int
    lockstep: bool

    def share(self, items: Sequence[Item]) -> list[Item]:
        """Return this process's part of a list that all processes have."""
        ...

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over the processes, in place.

        All processes pass the same shapes and dtypes in the same order.
        """
        ...

    def any(self, value: bool) -> bool:
        """Return True if `value` is true in at least one process."""
        ...

    def on_rank0(self, action: Callable[[], Item]) -> Item | None:
        """Run on process 0 while the others wait and get None. If it raises, the others raise UserError."""
        ...

    def in_turn(self, action: Callable[[bool], Item]) -> Item:
        """Run in every process: process 0 first, then the first of every other node, then all others.

        So later processes find what the first put into a cache. action(first): first is True in the first two
        turns.
        If it raises in one, the others raise UserError.
        """
        ...

    @property
    def node_first(self) -> int:
        """Return the rank of the first process on this node."""
        ...

    def meet(self, action: Callable[[], Item]) -> Item:
        """Run in all processes and wait for the last. If it raises in one, the others raise UserError."""
        ...

    def watching(self, report: Told) -> AbstractContextManager[None]:
        """Convert torch errors caused by a lost process into ProcessGone, built by `report`."""
        ...

    def texts(self, text: str) -> list[str]:
        """Return the text of every process, in rank order."""
        ...

    def of_first(self, data: bytes) -> bytes:
        """Return the bytes of process 0; those of the others are ignored."""
        ...

    def check_replicas(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise UserError naming the first tensor that is not bit-identical in all processes."""
        ...

    def exchange(self, rows: Tensor, send: Sequence[int], receive: Sequence[int]) -> InFlight:
        """All-to-all: send the next send[r] rows to process r, and receive receive[r] rows from it.

        It begins here, in program order. The received rows are in rank order. Every process takes part, even
        with 0 rows.
        """
        ...

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Replace `tensor` by that of process `source`, in place, byte for byte (contiguous, any dtype)."""
        ...

    def gather(self, whole: Tensor, part: Tensor) -> Callable[[], object]:
        """All-gather: fill `whole` with the parts of all processes in rank order (bytes, equal lengths).

        The gather is queued here, in program order; it is complete when the returned function has been
        called.
        """
        ...


class Alone:
    """A group of one process: nothing to exchange."""

    rank, size, lockstep = 0, 1, False

    def share(self, items: Sequence[Item]) -> list[Item]:
        return list(items)

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        pass

    def any(self, value: bool) -> bool:
        return value

    def on_rank0(self, action: Callable[[], Item]) -> Item | None:
        return action()

    def in_turn(self, action: Callable[[bool], Item]) -> Item:
        return action(True)

    @property
    def node_first(self) -> int:
        return 0

    def meet(self, action: Callable[[], Item]) -> Item:
        return action()

    def watching(self, report: Told) -> AbstractContextManager[None]:
        return nullcontext()

    def texts(self, text: str) -> list[str]:
        return [text]

    def of_first(self, data: bytes) -> bytes:
        return data

    def check_replicas(self, tensors: Mapping[str, Tensor]) -> None:
        pass

    def exchange(self, rows: Tensor, send: Sequence[int], receive: Sequence[int]) -> InFlight:
        return InFlight(rows, lambda: None)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        pass

    def gather(self, whole: Tensor, part: Tensor) -> Callable[[], object]:
        whole.copy_(part)
        return lambda: None


ALONE = Alone()


class _Gather(Protocol):
    def __call__(
        self, whole: Tensor, part: Tensor, /, *, group: dist.ProcessGroup | None, async_op: bool
    ) -> dist.Work | None: ...


class _Exchanges(Protocol):
    """The untyped functions of torch.distributed used here."""

    @property
    def all_gather_into_tensor(self) -> _Gather: ...
    def new_group(self, ranks: list[int] | None = None, timeout: timedelta | None = None) -> object: ...
    def all_reduce(
        self, tensor: Tensor, op: dist.ReduceOp.RedOpType = ..., group: dist.ProcessGroup | None = None
    ) -> object: ...
    def all_gather(
        self, tensor_list: list[Tensor], tensor: Tensor, group: dist.ProcessGroup | None = None
    ) -> object: ...
    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> dist.Work | None: ...


_exchanges: _Exchanges = dist
# torch has no public setter. A group of a DeviceMesh has its back end's default: 10 minutes for nccl
_set_timeout: Callable[[timedelta, dist.ProcessGroup], None] = dist.distributed_c10d._set_pg_timeout  # pyright: ignore[reportPrivateUsage]


class Processes:
    """All processes that torch.distributed knows, or some of them.

    device: device of small exchanges (the GPU for nccl, the CPU for gloo)
    some: torch's group of them; None: all
    roll: their Roll; only for the group of all
    """

    _group: dist.ProcessGroup | None = None
    _roll: Roll | None = None
    lockstep = False

    def __init__(self, device: torch.device, some: dist.ProcessGroup | None = None, roll: Roll | None = None):
        self.rank, self.size = dist.get_rank(some), dist.get_world_size(some)
        self.device, self._group, self._roll = device, some, roll

    def among(self, some: dist.ProcessGroup) -> Processes:
        """Return the group of those processes, with the timeout of this one."""
        _set_timeout(TIMEOUT, some)
        return Processes(self.device, some)

    def again(self) -> Processes:
        """Return the same processes with a communicator of their own. All call it, in the same order."""
        return self.among(cast(dist.ProcessGroup, _exchanges.new_group(timeout=TIMEOUT)))

    def share(self, items: Sequence[Item]) -> list[Item]:
        """Return items[rank], items[rank + size], and so on.

        It depends only on the position, so a run can resume exactly with another number of processes.
        """
        return list(items[self.rank :: self.size])

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Sum bucket by bucket (`buckets`), in order, so that every process makes the same calls."""
        for bucket in buckets(tensors):
            if len(bucket) == 1 and bucket[0].is_contiguous():
                _exchanges.all_reduce(bucket[0], group=self._group)
                continue
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            _exchanges.all_reduce(flat, group=self._group)
            for tensor, part in zip(bucket, split(flat, [tensor.numel() for tensor in bucket]), strict=True):
                tensor.copy_(part.view_as(tensor))

    def any(self, value: bool) -> bool:
        flag = torch.tensor([int(value)], device=self.device)
        _exchanges.all_reduce(flag, dist.ReduceOp.MAX, group=self._group)
        return bool(flag.item())

    def on_rank0(self, action: Callable[[], Item]) -> Item | None:
        return self._of_all.act([[0]], action)

    def in_turn(self, action: Callable[[bool], Item]) -> Item:
        first = self.node_first == self.rank
        result = self._of_all.act(self._of_all.first_of_nodes(), lambda: action(first))
        return cast(Item, result)  # every process has a turn

    @property
    def node_first(self) -> int:
        return self._of_all.node_first()

    def meet(self, action: Callable[[], Item]) -> Item:
        return cast(Item, self._of_all.act([range(self.size)], action))

    def watching(self, report: Told) -> AbstractContextManager[None]:
        return self._of_all.watching(report)

    @property
    def _of_all(self) -> Roll:
        if self._roll is None:
            raise ValueError("some of the processes do not act for all: ask the group of all")
        return self._roll

    def texts(self, text: str) -> list[str]:
        """Exchange as bytes padded to the longest: dist.all_gather_object would send pickles."""
        # all lengths first, then the bytes
        data = text.encode()
        length = torch.tensor([len(data)], device=self.device)
        lengths = [torch.zeros_like(length) for _ in range(self.size)]
        _exchanges.all_gather(lengths, length, group=self._group)
        room = max(1, *(int(n.item()) for n in lengths))
        padded = torch.zeros(room, dtype=torch.uint8, device=self.device)
        padded[: len(data)] = torch.tensor(list(data), dtype=torch.uint8)
        every = [torch.zeros_like(padded) for _ in range(self.size)]
        _exchanges.all_gather(every, padded, group=self._group)
        return [bytes(ints(t[: int(n.item())])).decode() for t, n in zip(every, lengths, strict=True)]

    def of_first(self, data: bytes) -> bytes:
        length = torch.tensor([len(data)], device=self.device)
        dist.broadcast(length, group=self._group, group_src=0)
        if not (count := int(length.item())):
            return b""
        own = torch.frombuffer(bytearray(data), dtype=torch.uint8) if self.rank == 0 else torch.empty(count)
        sent = own.to(dtype=torch.uint8, device=self.device)
        dist.broadcast(sent, group=self._group, group_src=0)
        return sent.cpu().numpy().tobytes()

    def check_replicas(self, tensors: Mapping[str, Tensor]) -> None:
        low = torch.stack([fingerprint(tensor).to(self.device) for tensor in tensors.values()])
        high = low.clone()
        _exchanges.all_reduce(low, dist.ReduceOp.MIN, group=self._group)
        _exchanges.all_reduce(high, dist.ReduceOp.MAX, group=self._group)
        different = ints(low.ne(high).nonzero().flatten())
        if different:
            raise UserError(
                f"the {self.size} processes hold different values: {len(different)} of {len(tensors)} tensors"
                f" differ; first: {list(tensors)[different[0]]}",
                next="resume from the last save with the same command; if it comes again, report it",
            )

    def exchange(self, rows: Tensor, send: Sequence[int], receive: Sequence[int]) -> InFlight:
        """Use uneven splits; gloo supports int64, float32 and bfloat16 here."""
        sent, received = rows.contiguous(), rows.new_empty((sum(receive), *rows.shape[1:]))
        work = _exchanges.all_to_all_single(
            received, sent, list(receive), list(send), group=self._group, async_op=True
        )

        in_use = [sent]  # must live until it is sent

        def wait() -> None:
            cast("dist.Work", work).wait()
            in_use.clear()

        return InFlight(received, wait)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Broadcast as bytes: gloo supports neither int16 nor float8."""
        flat = tensor.detach().view(-1).view(torch.uint8)
        dist.broadcast(flat, group=self._group, group_src=source)

    def gather(self, whole: Tensor, part: Tensor) -> Callable[[], object]:
        gather: _Gather = getattr(dist, "all_gather_single", None) or _exchanges.all_gather_into_tensor
        work = gather(whole, part, group=self._group, async_op=True)
        return cast("dist.Work", work).wait  # None only occurs for processes outside the group


def buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Group the tensors in order into runs of one dtype and device with at most BUCKET bytes.

    A larger tensor is a bucket by itself.
    """
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        other = bucket and (tensor.dtype, tensor.device) != (bucket[0].dtype, bucket[0].device)
        if bucket and (other or size + tensor.nbytes > BUCKET):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket


def fingerprint(tensor: Tensor) -> Tensor:
    """Return an int64 that depends on every bit and its place: sum_i bits_i * (i mod 65,521 + 1) mod 2^64."""
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    bits = tensor.detach().contiguous().view(width).reshape(-1)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, bits.numel(), 2**22):  # int64 copies of 32 MiB at a time
        part = bits[start : start + 2**22].long()
        total += (part * ((torch.arange(start, start + part.numel(), device=part.device) % 65521) + 1)).sum()
    return total


@contextmanager
def open_group(device: torch.device, run: Path | None = None) -> Generator[Group]:
    """Open the group that torchrun set up, or ALONE. gloo on CPU, nccl on CUDA.

    run: folder that gets a trace of each process if an exchange hangs (nccl only).
    torchrun sets RANK, WORLD_SIZE and MASTER_ADDR in the environment. If a process is lost, the others raise
    ProcessGone, with exit code 1.
    Raises ConfigError if the processes cannot connect, or have different versions of torch.
    """
    if started().size == 1:
        yield ALONE
        return
    own_gpu: dict[str, Any] = {}
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # bound: communicators are made at once and split for groups, instead of at the first exchange
        own_gpu = {"device_id": torch.device("cuda", torch.cuda.current_device())}
        if run is not None:
            keep_traces(run)
    store, rank, size = _met()
    roll = Roll(dist.PrefixStore("unfreeze", store), rank, size, gpu_of(device))
    error: BaseException | None = None
    with roll.beside():
        try:
            with roll.watching():
                backend = "nccl" if device.type == "cuda" else "gloo"
                own = dist.PrefixStore("exchange", store)
                dist.init_process_group(
                    backend, store=own, rank=rank, world_size=size, timeout=TIMEOUT, **own_gpu
                )
                yield Processes(device, roll=roll)
        except BaseException as caught:
            error = caught
            raise
        finally:
            roll.leave(error)
            if error is None or device.type != "cuda":  # nccl would wait for a lost process
                dist.destroy_process_group()
            roll.stay()


def _met() -> tuple[dist.Store, int, int]:
    """Connect to torchrun's store, or that of process 0; return it with this rank and the process count."""
    here, env = started(), os.environ
    at = f"{env.get('MASTER_ADDR')}:{env.get('MASTER_PORT')}"
    try:
        if has_agent():
            met = dist.rendezvous("env://", timeout=coming())  # pyright: ignore[reportUnknownMemberType]
            store, rank, size = next(iter(met))
        else:
            for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
                if not env.get(name):
                    raise ValueError(f"{name} is not set")
            host, port, rank, size = env["MASTER_ADDR"], env["MASTER_PORT"], here.rank, here.size
            if not (port.isascii() and port.isdigit() and 0 < int(port) < 2**16):
                raise ValueError(f"MASTER_PORT is {port!r:.40}, which is no port")
            store = store_at(host, int(port), first=rank == 0)
    except dist.DistNetworkError as error:
        busy = "EADDRINUSE" in str(error) or "address already in use" in str(error).lower()
        why = "another program has that port" if busy else str(error).strip().partition("\n")[0][:200]
        raise ConfigError(
            f"the processes cannot meet at {at} (MASTER_ADDR, MASTER_PORT): {why}",
            next="torchrun --master-port with a free port, the same on every node",
        ) from error
    except ValueError as error:  # a variable is missing, or the port is invalid
        words = f"WORLD_SIZE is set, but other variables are missing or wrong: {error}"
        raise ConfigError(words, next="start the processes by torchrun") from error
    return dist.PrefixStore(f"attempt-{_attempt(store, rank)}", store), rank, size


def _attempt(store: dist.Store, rank: int) -> int:
    """Return which start of this run it is: an agent that restarts it may keep the store with its old keys.

    On one node, the agent counts. Several agents may count differently, so the starts of a rank are counted
    in the store, which c10d's rendezvous recreates and the static one keeps.
    """
    if started().nodes == 1:
        return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)
    return store.add(f"unfreeze/starts/{rank}", 1)
