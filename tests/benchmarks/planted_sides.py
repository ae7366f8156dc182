"""Sides for tests/bench/test_sides.py, loaded by worker processes: one that works, and one for each way to
fail."""

import os
import signal
import time

from benchmarks.harness.sides import Worker
from unfreeze.core.errors import ConfigError


def good(start=0):
    total = [start]

    def step(by=1):
        total[0] += by
        return {"total": total[0]}

    def touch(mib):
        kept = bytearray(b"x" * (mib * 2**20))
        return {"touched": len(kept)}

    def crash():
        os.kill(os.getpid(), signal.SIGKILL)

    def chatter():
        print("a library prints to stdout")
        return {}

    def boom():
        raise ZeroDivisionError("planted")

    def leave():
        print("the last words", flush=True)
        os._exit(7)

    def sleep():
        time.sleep(600)
        return {}

    return Worker(
        {f.__name__: f for f in (step, touch, crash, chatter, boom, leave, sleep)},
        facts={"start": start, "pid": os.getpid()},
    )


def refuses():
    raise ConfigError("there is no such peer", next="pip install peer")


def dies():
    os._exit(3)
