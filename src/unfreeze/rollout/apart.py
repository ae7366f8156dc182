"""Calls that run at the same time, each in a fork of this process: one that hangs or dies ends no other.

The file of the user is loaded once, before the forks. Each has its deadline, and is killed with its group.
"""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from unfreeze.rollout.limits import allow_cpu, end_with_parent
from unfreeze.rollout.reward import Graded, Outcome

Call = Callable[[], Mapping[str, Any]]
"""-> the fields of a Graded."""
MAX_BYTES = 2**13
"""Of one reply: a batch of them has room in the reply of its process."""


@dataclass
class _Run:
    number: int
    pid: int
    deadline: float
    reply: bytearray = field(default_factory=bytearray)


def apart(calls: Sequence[Call], seconds: float) -> list[Mapping[str, Any]]:
    """Return the reply to each call, or the outcome that it has in its place; `seconds` for each."""
    running = dict(_begin(number, call, seconds) for number, call in enumerate(calls))
    replies: dict[int, Mapping[str, Any]] = {}
    poll = select.poll()
    for pipe in running:
        poll.register(pipe, select.POLLIN)
    while running:
        first = min(run.deadline for run in running.values())
        ready = [pipe for pipe, _ in poll.poll(max(0.0, 1000 * (first - time.monotonic())) + 1)]
        for pipe, run in list(running.items()):
            more = pipe in ready and os.read(pipe, MAX_BYTES)
            run.reply += more or b""
            late = time.monotonic() > run.deadline
            whole = b"\n" in run.reply or len(run.reply) > MAX_BYTES or (pipe in ready and not more)
            if not (whole or late):
                continue
            poll.unregister(pipe)
            os.close(pipe)
            del running[pipe]
            replies[run.number] = _end(run, seconds, late)
    return [replies[number] for number in range(len(calls))]


def _begin(number: int, call: Call, seconds: float) -> tuple[int, _Run]:
    reads, writes = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            os.close(reads)
            os.setpgid(0, 0)
            end_with_parent()
            allow_cpu(seconds)
            own = os.getpid()
            reply = json.dumps(call()).encode() + b"\n"
            if os.getpid() == own:  # else a fork of the user's code, which must not answer
                while reply:
                    reply = reply[os.write(writes, reply) :]
        finally:
            os._exit(0)
    os.close(writes)
    with suppress(OSError):
        os.setpgid(pid, pid)
    return reads, _Run(number, pid, time.monotonic() + seconds)


def _end(run: _Run, seconds: float, late: bool) -> Mapping[str, Any]:
    """End the process and its group. -> its reply, or the reason for none."""
    with suppress(OSError):
        os.killpg(run.pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(run.pid, 0)[1])
    if len(run.reply) > MAX_BYTES:
        return _none("garbage", f"its reply is longer than {MAX_BYTES:,} bytes")
    try:
        return json.loads(run.reply)
    except ValueError:
        pass
    if late:
        return _none("timeout", f"no answer within {seconds:g} s")
    if code == -signal.SIGXCPU:
        return _none("timeout", f"more than {seconds:g} s of CPU")
    if code < 0:
        return _none("ended", f"its process was ended by {signal.Signals(-code).name}")
    return _none("ended", f"its process ended itself, with exit code {code}")


def _none(outcome: Outcome, message: str) -> Mapping[str, Any]:
    return Graded(None, outcome=outcome, message=message).as_json()
