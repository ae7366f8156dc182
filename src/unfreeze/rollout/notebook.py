"""The text of a function of a notebook with everything it uses, so that another process can make it.

Imports, functions and classes of the notebook, compiled patterns, and constants that Python can write down.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import re
import textwrap
from collections.abc import Callable
from types import ModuleType
from typing import Any, cast

from unfreeze.core.errors import ConfigError


def written_out(function: Callable[..., Any], field: str) -> str:
    """Return a module's text that defines the function. Raises ConfigError naming what cannot be written."""
    namespace: dict[str, Any] = vars(inspect.getmodule(function)) if inspect.isclass(function) else {}
    namespace = namespace or getattr(function, "__globals__", {})
    lines: list[str] = ["import re as _re"]
    _write(function, namespace, lines, set(), field)
    return "\n".join([*lines, ""])


def _write(
    item: Callable[..., Any], namespace: dict[str, Any], lines: list[str], known: set[str], field: str
) -> None:
    """Append the source of a function or class, after the globals that its source names."""
    known.add(item.__name__)
    try:
        source = textwrap.dedent(
            _class_source(item, namespace) if inspect.isclass(item) else inspect.getsource(item)
        )
    except (OSError, TypeError, SyntaxError):
        raise ConfigError(
            f"{field}: the source of {item.__name__} is not known, so no other process can make it",
            next="write it into a file, and give my.py:" + item.__name__,
        ) from None
    names = {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
    for name in sorted(names & namespace.keys() - known):
        known.add(name)
        value = namespace[name]
        own = getattr(value, "__module__", None) == "__main__" and hasattr(value, "__qualname__")
        if own and callable(value):
            _write(value, namespace, lines, known, field)
        elif (line := _assigned(name, value)) is not None:
            lines.append(line)
        else:
            raise ConfigError(
                f"{field}: {item.__name__} uses {name}, a {type(value).__name__} that lives in this process"
                " only; graders run in processes of their own",
                next=f"make {name} inside the function, or write both into a file",
            )
    lines.append(source)


def _class_source(item: type, namespace: dict[str, Any]) -> str:
    """Return the source of a class of a notebook, which has no file: from the cells of its functions."""
    functions = [value for value in (*vars(item).values(), *namespace.values()) if inspect.isfunction(value)]
    for cell in dict.fromkeys(function.__code__.co_filename for function in functions):
        lines = linecache.getlines(cell)
        for node in ast.parse("".join(lines)).body:
            if isinstance(node, ast.ClassDef) and node.name == item.__name__:
                first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
                return "".join(lines[first - 1 : node.end_lineno])
    raise OSError("no cell defines it")


def _assigned(name: str, value: object) -> str | None:
    """Return a line that gives the name its value; None if there is none."""
    if isinstance(value, ModuleType):
        return f"import {value.__name__} as {name}" if "." not in value.__name__ else _submodule(name, value)
    if isinstance(value, re.Pattern):
        pattern = cast("re.Pattern[Any]", value)
        return f"{name} = _re.compile({pattern.pattern!r}, {pattern.flags})"
    module, qualname = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if module and module != "__main__" and qualname.isidentifier():
        return f"from {module} import {qualname} as {name}"
    try:
        if ast.literal_eval(repr(value)) == value:
            return f"{name} = {value!r}"
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        pass
    return None


def _submodule(name: str, module: ModuleType) -> str:
    parent, _, own = module.__name__.rpartition(".")
    return f"from {parent} import {own} as {name}"
