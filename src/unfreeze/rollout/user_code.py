"""A user's functions and classes by name: another process makes them again from a file's text or a module."""

from __future__ import annotations

import ast
import hashlib
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

from unfreeze.core.errors import ConfigError, looked_in, nearest
from unfreeze.rollout.notebook import written_out

Given = str | Callable[..., Any] | Sequence[str | Callable[..., Any]]
"""my.py, my.py:name, my.py:name,other, a Python function or class, or several of them."""


@dataclass(frozen=True)
class UserCode:
    """Names in a file, or in a module that can be imported.

    path    the file, for messages and hashes
    text    its content, read once: a run keeps its rewards when the file is edited. "": import `module`
    """

    names: tuple[str, ...]
    path: str
    text: str = ""
    module: str = ""

    @property
    def digest(self) -> str:
        """Hash of the text; of an imported module, that of its own file as it is now."""
        content = self.text.encode("utf-8", "surrogatepass") if self.text else Path(self.path).read_bytes()
        return hashlib.blake2b(content, digest_size=16).hexdigest()

    def as_json(self) -> dict[str, Any]:
        """The fields as plain values."""
        return asdict(self)


def user_code(source: Given, name: str = "reward", field: str = "reward") -> tuple[UserCode, ...]:
    """Return the code that `source` stands for.

    name: of the function in a file, if none is written after a colon. field: the setting, for errors.
    Raises ConfigError for a file that is missing or has a syntax error, and for a function that another
    process cannot make.
    """
    if isinstance(source, str):
        return (_of_file(source, name, field),)
    if callable(source):
        return (_of_callable(source, field),)
    several = tuple(code for each in source for code in user_code(each, name, field))
    if not several:
        raise ConfigError(f"{field} is empty", next=f"--{field} my.py")
    return several


def are_environments(code: UserCode) -> bool:
    """True if a file's text defines each of the names as a class, or as a dict written out."""
    defined: set[str] = set()
    for node in ast.parse(code.text).body:
        if isinstance(node, ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            defined |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return defined.issuperset(code.names)


def _of_file(written: str, name: str, field: str) -> UserCode:
    before, colon, after = written.rpartition(":")
    file, names = (before, after) if colon and before.endswith(".py") else (written, name)
    path = Path(file).expanduser()
    if path.suffix != ".py":
        raise ConfigError(
            f"{field} = {written!r} is not a Python file", next=f"--{field} my.py, or my.py:{name}"
        )
    if not path.is_file():
        others = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        raise ConfigError(
            f"{field} = {written!r}: there is no file {file}{looked_in(file)}{nearest(path.name, others)}",
            next=f"give --{field} FILE.py",
        )
    return UserCode(tuple(each.strip() for each in names.split(",")), str(path.resolve()), _text(path, field))


def _text(path: Path, field: str) -> str:
    """Read a file of Python. It is compiled here, for its syntax errors, and never executed here."""
    try:
        text = path.read_text(encoding="utf-8")
        compile(text, str(path), "exec", dont_inherit=True)
    except SyntaxError as error:
        line = f", line {error.lineno}" if error.lineno else ""
        raise ConfigError(f"{field}: {path.name}{line}: {error.msg}", next=f"python {path}") from None
    except (ValueError, RecursionError, MemoryError) as error:  # not UTF-8, a NUL, endless nesting
        raise ConfigError(f"{field}: {path.name} is not Python: {error}", next=f"python {path}") from None
    if not text.strip():
        raise ConfigError(
            f"{field}: {path.name} is empty", next="def reward(prompt, completion, **row): return 1.0"
        )
    return text


def _of_callable(function: Callable[..., Any], field: str) -> UserCode:
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    home = sys.modules.get(module or "")
    if not name or "<" in name or home is None:
        kind = "a lambda" if "<lambda>" in name else "defined inside a function" if name else "an object"
        raise ConfigError(
            f"{field} is {kind}; graders run in processes of their own and find it by its name",
            next="define it with def at the top of a file or a notebook's cell",
        )
    file = getattr(home, "__file__", None)
    if module == "__main__" and not (file and Path(file).is_file()):
        return UserCode((name,), "<notebook>", written_out(function, field))
    if getattr(home, "__package__", "") and _is_there(home, name, function):
        return UserCode((name,), inspect.getsourcefile(home) or "", module=home.__name__)
    return UserCode((name,), str(Path(str(file)).resolve()), _text(Path(str(file)), field))


def _is_there(home: ModuleType, name: str, function: object) -> bool:
    """True if importing the module by its name gives this function."""
    try:
        return attrgetter(name)(import_module(home.__name__)) is function
    except (ImportError, AttributeError):
        return False
