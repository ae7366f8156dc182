"""Imports: names of a package on first use (PEP 562), so that it imports no torch; large libraries faster."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any


def on_first_use(package: str, home: Mapping[str, str]) -> Callable[[str], Any]:
    """Make the `__getattr__` of `package`.

    home: name -> the module that has it. The module must have another name than the attribute, because
    importing a submodule sets the attribute of its name.
    """

    def __getattr__(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(home[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return __getattr__


@contextmanager
def importing() -> Iterator[None]:
    """Around the import of a large library: Python does not look for garbage meanwhile.

    All of the objects that come with torch stay, and looking through them again and again takes a fifth of
    its import.
    """
    wanted = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if wanted:
            gc.enable()
