"""Import a package's names on first use (PEP 562), so that importing the package imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from typing import Any


def on_first_use(package: str, home: Mapping[str, str], rooms: Collection[str] = ()) -> Callable[[str], Any]:
    """Make the `__getattr__` of `package`.

    home: name -> its module. Module and attribute must have different names, because importing a submodule
    sets the attribute of the submodule's name.
    rooms: submodules that can be called.
    """

    def __getattr__(name: str) -> Any:
        if name in rooms:
            return import_module(f"{package}.{name}")
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(home[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return __getattr__
