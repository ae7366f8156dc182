"""Python's search for garbage, put off while a command starts.

The 400,000 objects that come with torch and the other libraries all stay. Looking through them again and
again takes 0.3 s of the 4 s to the first step of a small run (docs/why/decisions.md, 81).
"""

from __future__ import annotations

import gc

RARELY = (500_000, 50, 50)  # objects between two searches, where Python has 700 or 2,000

_usual: list[tuple[int, int, int]] = []


def put_off() -> None:
    """From here on search rarely. Does nothing where it is so already."""
    if not _usual:
        _usual.append(gc.get_threshold())
        gc.set_threshold(*RARELY)


def take_up() -> None:
    """From here on search as before put_off. Without that call, in a user's program, nothing changes."""
    if _usual:
        gc.set_threshold(*_usual.pop())
