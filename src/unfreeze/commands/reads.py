"""Files that a command reads, by its words: for the hashes of `unfreeze life` and `unfreeze lab`."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from unfreeze.config.parse import read_toml
from unfreeze.core.errors import ConfigError


def files_of(words: Sequence[str]) -> list[Path]:
    """Files that a command reads, each once: those named in its words and in its TOML files, and the modules
    that a Python file imports from its own folder."""
    files: dict[Path, None] = {}
    left = [path for word in words for path in _named(word)]
    while left:
        path = left.pop(0)
        if path not in files:
            files[path] = None
            left += _inside(path)
    return list(files)


def _named(word: str, beside: Path | None = None) -> Iterator[Path]:
    """The file that a word names: FILE, --flag=FILE, FILE.py:function; one in a file also beside that."""
    value = word.partition("=")[2] if word.startswith("--") else word
    python, colon, _ = value.rpartition(":")
    name = python if colon and python.endswith(".py") else value
    for folder in (Path(), *([beside] if beside else [])):
        with suppress(
            OSError, ValueError, RuntimeError
        ):  # too long for a name, a NUL character, no such ~user
            path = folder / Path(name).expanduser()
            if name and path.is_file():
                yield path
                return


def _inside(path: Path) -> Iterator[Path]:
    """Files that a TOML or Python file reads. One that cannot be parsed names none: its stage says why."""
    if path.suffix == ".toml":
        with suppress(ConfigError):
            for text in _texts(read_toml(path)):
                yield from _named(text, path.parent)
    if path.suffix == ".py":
        with suppress(SyntaxError, ValueError, OSError):
            for module in _imports(ast.parse(path.read_bytes())):
                yield from _module(path.parent, module)


def _texts(value: Any) -> Iterator[str]:
    """Every text in a TOML table."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        several = value.values() if isinstance(value, dict) else value
        for item in cast(Sequence[Any], several):
            yield from _texts(item)


def _imports(tree: ast.AST) -> Iterator[str]:
    """Dotted names of modules that a file may import: of `from a import b`, a and a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            before = [node.module] if node.module else []
            yield from before
            yield from (".".join([*before, name.name]) for name in node.names)


def _module(folder: Path, name: str) -> Iterator[Path]:
    """Files of a module and of the packages around it, if they stand in the folder."""
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        place = folder.joinpath(*parts[:count])
        files = (place.with_name(f"{place.name}.py"), place / "__init__.py")
        yield from (path for path in files if path.is_file())
