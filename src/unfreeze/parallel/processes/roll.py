"""The roll of processes in a run: who takes part, and who is gone.

Every process writes into the store that torchrun set up: at the start its host, process id and torch version;
at its end the reason. A killed process writes nothing, so the others on its host check if its process id
still runs, and write what they find for those on other hosts.

A closed connection shows a process that another is gone, but not which. A GPU that waits for another gets no
signal at all. So a watcher thread checks when torchrun's agent asks the process to end, and when others
report a loss. It waits a while for the run to end by itself, then ends the process.
"""

# torch does not list its stores among its exports:
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from unfreeze.core.errors import ConfigError, ProcessGone, UserError
from unfreeze.core.torchrun import started

COMING, COMING_ALONE = timedelta(minutes=10), timedelta(minutes=2)
"""How long processes wait for each other at the start: one node's agent may start later than another's.
Without agents, each process was started by hand, and a missing one was probably never started."""
SAID = 10.0
"""Seconds after which the first waiting process reports whom it waits for."""
LOOK = timedelta(seconds=5)
"""How often a waiting process checks that the others still run. There is no limit on their work itself."""
PATIENCE = 5.0
"""Seconds to find the cause of a closed connection: a process that ended, or another's report."""
GRACE = 10.0
"""Seconds for a run to end by itself before the watcher thread ends the process."""
NO_ANSWER = ("Connection", "onnection reset", "gloo", "NCCL", "Socket", "ocket", "roken pipe", "imed out")
"""Fragments of torch's error messages when another process does not answer."""

ALARM, LOST = "alarm", "lost another"
"""Key that is set once a process was found killed; reason written by a process that leaves because of
another."""


def has_agent() -> bool:
    """True if the store belongs to torchrun's agent; else process 0 hosts it."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def coming() -> timedelta:
    """Return the time that processes wait for each other at the start."""
    return COMING if has_agent() else COMING_ALONE


def store_at(host: str, port: int, *, first: bool) -> dist.TCPStore:
    """Open the store that process 0 (`first`) hosts. Port 0: any free port.

    It waits for nobody: the Roll finds and reports missing processes.
    """
    return dist.TCPStore(host, port, None, first, timeout=coming(), wait_for_workers=False, multi_tenant=True)


Item = TypeVar("Item")
Told = Callable[[str], ProcessGone]
"""(who is gone, and why) -> the error, including the run's state."""


def plainly(words: str) -> ProcessGone:
    """Build the error before there is a run folder."""
    return ProcessGone(words, next="see the first failed process's message, then run the same command again")


class Roll:
    """The processes of a run by rank. `store`: torchrun's, or process 0's. `gpu`: this one's; "" for a CPU.

    Raises UserError if one does not arrive, has another version of torch, or the GPU of another one.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, gpu: str = ""):
        self._store, self._rank, self._size, self._serial = store, rank, size, 0
        self.told: Told = plainly
        self._found: ProcessGone | None = None
        self._hosted = not has_agent()  # by process 0
        own = {"host": _host(), "pid": os.getpid(), "torch": torch.__version__, "local": started().local}
        own["gpu"] = gpu
        store.set(f"here/{rank}", json.dumps(own))
        keys = [f"here/{other}" for other in range(size)]
        if absent := self._absent(keys):
            raise UserError(
                f"{_named(absent)} of {size} did not start within {coming().seconds // 60} minutes",
                next="look at its host: start every process with the same address and port",
            )
        self._members: list[dict[str, Any]] = [json.loads(store.get(key)) for key in keys]
        first = self._members[0]["torch"]
        other = next((r for r, member in enumerate(self._members) if member["torch"] != first), None)
        if other is not None:
            raise ConfigError(
                f"process {other} has torch {self._members[other]['torch']}, process 0 has {first}: they"
                " would compute other numbers",
                next=f"install torch {first} on {self._members[other]['host'].split()[0]} too",
            )

        self._refuse_shared_gpu()

    def _refuse_shared_gpu(self) -> None:
        owners: dict[tuple[str, str], int] = {}
        for rank, member in enumerate(self._members):
            first = owners.setdefault((member["host"].split()[0], member.get("gpu") or str(rank)), rank)
            if first != rank:
                gpus = len({m.get("gpu") for m in self._members if m["host"] == member["host"]})
                raise ConfigError(
                    f"processes {first} and {rank} have the same GPU ({member['gpu']}) of"
                    f" {member['host'].split()[0]}, where all of them use {gpus}",
                    next=f"torchrun --nproc-per-node {gpus}, or give each task its own GPU",
                )

    def _absent(self, keys: Sequence[str]) -> list[int]:
        """Wait for all; return those missing in time. The first process present reports whom it waits for."""
        began, reported = time.monotonic(), False
        while absent := [other for other, key in enumerate(keys) if not self._store.check([key])]:
            waited = time.monotonic() - began
            if waited > coming().total_seconds():
                break
            if waited > SAID and not reported and all(other in absent for other in range(self._rank)):
                words = f"process {self._rank} waits for {_named(absent)} of {len(keys)}"
                print(f"{words}, at most {coming().seconds // 60} minutes", file=sys.stderr, flush=True)
                reported = True
            time.sleep(0.05)
        return absent

    # -- work of some processes while the others wait, without a time limit

    def act(self, turns: Sequence[Sequence[int]], action: Callable[[], Item]) -> Item | None:
        """Run `action` in the processes of each turn, one turn after the other.

        A process is in at most one turn. Return the action's result here, or None without a turn. If it
        raises in a process, that process raises it and all others raise UserError. Every process calls this,
        in the same order.
        """
        self._serial += 1
        result: Item | None = None
        for acting in turns:
            error: BaseException | None = None
            if self._rank in acting:
                try:
                    result = action()
                except BaseException as caught:
                    error = caught
                self._store.set(f"{self._serial}/{self._rank}", "done" if error is None else "failed")
            if error is not None:
                raise error
            keys = [f"{self._serial}/{other}" for other in acting]
            self._wait(keys)
            for other, outcome in zip(acting, map(self._store.get, keys), strict=True):
                if outcome == b"failed":
                    words = f"process {other} failed, so this one stops too"
                    raise UserError(words, next=f"see the message of process {other}")
        return result

    def first_of_nodes(self) -> list[list[int]]:
        """Return the turns: process 0; the first of every other node; all others."""
        firsts = [rank for rank, member in enumerate(self._members) if member["local"] == 0 and rank]
        others = [rank for rank in range(1, self._size) if rank not in firsts]
        return [turn for turn in ([0], firsts, others) if turn]

    def node_first(self) -> int:
        """Return the first process on this node."""
        host = self._members[self._rank]["host"]
        mine = [r for r, m in enumerate(self._members) if m["host"] == host and r <= self._rank]
        return max((r for r in mine if self._members[r]["local"] == 0), default=self._rank)

    def _wait(self, keys: list[str]) -> None:
        """Poll often at first, then twice a second: torch's own wait logs long warnings."""
        looked, pause = time.monotonic(), 0.005
        while not self._store.check(keys):
            time.sleep(pause)
            pause = min(0.5, 1.5 * pause)
            if time.monotonic() - looked > LOOK.total_seconds():
                looked = time.monotonic()
                if gone := self.gone(0.0):
                    raise self._error(gone)

    # -- lost processes

    def leave(self, error: BaseException | None) -> None:
        """Write why this process leaves, for the others."""
        lost = isinstance(error, ProcessGone)
        reason = "done" if error is None else LOST if lost else f"{type(error).__name__}: {error}"
        if self._store_ended():
            return
        with suppress(dist.DistError, RuntimeError):
            self._store.set(f"left/{self._rank}", reason.partition("\n")[0][:300])

    def stay(self) -> None:
        """Keep process 0 alive for a while if it hosts the store, because the others may still use it."""
        if self._rank or not self._hosted:
            return
        until, here = time.monotonic() + GRACE, self._members[0]["host"]
        coming = dict(enumerate(self._members[1:], 1))
        while coming and time.monotonic() < until:
            for rank, member in [*coming.items()]:
                killed = member["host"] == here and not _runs(member["pid"])
                if killed or self._store.check([f"left/{rank}"]):
                    del coming[rank]
            time.sleep(0.02)

    def gone(self, patience: float) -> dict[int, str]:
        """Return lost process -> reason; polls for up to `patience` seconds until there is one."""
        until = time.monotonic() + patience
        while not (losses := self._look()) and time.monotonic() < until:
            time.sleep(0.1)
        return losses

    def _look(self) -> dict[int, str]:
        if self._store_ended():
            return {0: "connection closed"}
        losses: dict[int, str] = {}
        here = self._members[self._rank]["host"]
        for other, member in enumerate(self._members):
            if other == self._rank:
                continue
            try:
                left = self._said(f"left/{other}")
                killed = left is None and member["host"] == here and not _runs(member["pid"])
                if killed:
                    self._store.set(f"killed/{other}", "")
                    self._store.set(ALARM, str(other))
                killed = killed or self._said(f"killed/{other}") is not None
            except (dist.DistError, RuntimeError):  # the store's process is gone
                left, killed = None, member["host"] != here or not _runs(member["pid"])
            if left is not None and left not in (LOST, "done"):
                losses[other] = f"it ended with {left}"
            elif killed:
                losses[other] = "connection closed"
        return losses

    def _store_ended(self) -> bool:
        """True if process 0 hosted the store and is gone; torch would log every call to it at length."""
        here, first = self._members[self._rank]["host"], self._members[0]
        return self._hosted and bool(self._rank) and first["host"] == here and not _runs(first["pid"])

    def _said(self, key: str) -> str | None:
        return self._store.get(key).decode() if self._store.check([key]) else None

    def _error(self, gone: dict[int, str]) -> ProcessGone:
        """Return the same error in all processes; the first remaining process prints it.

        The first report stays: the agent's SIGTERM may arrive while that error leaves `watching`, where the
        step and the save are no longer known.
        """
        if self._found is not None:
            return self._found
        first = next(iter(gone))
        more = f", and {_named(list(gone)[1:])}" if len(gone) > 1 else ""
        error = self.told(f"process {first} is gone ({gone[first]}){more}")
        error.silent = any(other not in gone for other in range(self._rank))
        self._found = error
        return error

    @contextmanager
    def watching(self, report: Told = plainly) -> Generator[None]:
        """Convert torch errors caused by a lost process into ProcessGone, built by `report`."""
        former, self.told = self.told, report
        try:
            yield
        except ProcessGone:
            raise
        except RuntimeError as error:
            if not (isinstance(error, dist.DistError) or any(word in str(error) for word in NO_ANSWER)):
                raise
            line = str(error).strip().partition("\n")[0][:200]
            gone = self.gone(PATIENCE)
            raise (
                self._error(gone) if gone else report(f"another process does not answer ({line})")
            ) from error
        finally:
            self.told = former

    # -- the watcher thread

    @contextmanager
    def beside(self) -> Generator[None]:
        """Watch while the context is open. Only the main thread handles signals; others are not watched."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        ear, mouth = os.pipe()
        os.set_blocking(mouth, False)
        woken = signal.set_wakeup_fd(mouth, warn_on_full_buffer=False)
        former = signal.signal(signal.SIGTERM, self._asked_to_end)
        over = threading.Event()
        thread = threading.Thread(target=self._watch, args=(ear, over), daemon=True)
        thread.start()
        try:
            yield
        except ProcessGone:  # the agent's signal may arrive first, before the message is printed
            former = signal.SIG_IGN
            raise
        finally:
            over.set()
            signal.signal(signal.SIGTERM, former)
            signal.set_wakeup_fd(woken)
            os.write(mouth, b"\0")
            thread.join(LOOK.seconds)
            os.close(mouth)
            os.close(ear)

    def _asked_to_end(self, number: int, frame: object) -> None:
        """Handle SIGTERM outside of the loop: from torchrun's agent after a failure, or from someone else."""
        mine = self._members[self._rank]["pid"] == os.getpid()  # not a child forked by a library
        if mine and (gone := self.gone(1.0)):
            raise self._error(gone)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def _watch(self, ear: int, over: threading.Event) -> None:
        while not over.is_set():
            heard, _, _ = select.select([ear], [], [], LOOK.seconds)
            stop = bool(heard) and signal.SIGTERM in os.read(ear, 64)
            with suppress(dist.DistError, RuntimeError):
                stop = stop or (not heard and self._store.check([ALARM]))
            if stop and (gone := self.gone(PATIENCE)) and not over.wait(GRACE):
                error = self._error(gone)
                self.leave(error)
                if not error.silent:
                    print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
                os._exit(error.exit_code)


def _host() -> str:
    """Return the host name and its pid namespace: containers may share a name."""
    with suppress(OSError):
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()


def _runs(pid: int) -> bool:
    """Return True if a process on this host still runs; a zombie does not."""
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except ProcessLookupError:
        return False
    except OSError:  # no /proc, or another user's process
        return True


def _named(ranks: Sequence[int]) -> str:
    """Format ranks: 'process 2', 'processes 2 and 3'."""
    if len(ranks) == 1:
        return f"process {ranks[0]}"
    return f"processes {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
