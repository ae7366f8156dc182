"""Run Python's garbage collection rarely while a command starts.

The 400,000 objects of torch and other libraries all stay alive. Scanning them repeatedly takes 0.3 s of the 4
s to the first step of a small run (docs/why/decisions.md, 81).
"""

from __future__ import annotations

import gc

RARELY = (500_000, 50, 50)  # objects between two collections; Python's default is 700 or 2,000

_usual: list[tuple[int, int, int]] = []


def put_off() -> None:
    """Collect rarely from here on. Does nothing if already so."""
    if not _usual:
        _usual.append(gc.get_threshold())
        gc.set_threshold(*RARELY)


def take_up() -> None:
    """Collect again as before put_off. Does nothing without put_off, for example in a user's program."""
    if _usual:
        gc.set_threshold(*_usual.pop())
