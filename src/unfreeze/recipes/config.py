"""From a TOML file and flags to one frozen, validated Config. Every field is a TOML key and a flag; a flag wins over the file."""

from __future__ import annotations

import errno
import os
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, field, make_dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

import tyro
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, ValidationError

from unfreeze.core.errors import ConfigError, nearest


class Frozen(BaseModel):
    """Base of every Config: immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


Folder = Annotated[str, AfterValidator(os.path.expanduser)]
"""A path as the user gives it; ~ and ~name are expanded here, once."""
Files = Annotated[tuple[Folder, ...], BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)]
"""One path or several."""
ModelName = Folder
"""A folder, or a Hugging Face id org/name, which never begins with ~."""

USERS_OWN = (errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ENOSPC, errno.EDQUOT)

C = TypeVar("C", bound=BaseModel)


def parse(config: type[C], arguments: list[str], *, command: str, description: str, positional: bool = False) -> C:
    """`unfreeze COMMAND [file.toml] [--flag value …]` -> Config. Raises ConfigError that names the field and the nearest valid key.

    `positional`: the first argument is a field of the Config (a model, a run), not a TOML file.
    """
    from_file: list[str] = []
    if not positional and arguments and not arguments[0].startswith("-"):
        from_file = _flags(config, read_toml(Path(arguments[0]).expanduser()), arguments[0])
        arguments = arguments[1:]
    values = tyro.cli(_twin(config), args=[*from_file, *arguments], prog=f"unfreeze {command}", description=description)
    try:
        return config.model_validate(asdict(values))
    except ValidationError as error:
        raise ConfigError(_explain(error), next=f"unfreeze {command} --help") from error


def _twin(config: type[BaseModel]) -> type:
    """A dataclass with the same fields, types and help but no limits: tyro parses into it, and the Config judges the values in our own words."""
    fields: list[Any] = []
    for name, info in config.model_fields.items():
        inner = _model_in(info.annotation)
        kind = _twin(inner) if inner else info.annotation
        annotated = Annotated[(kind, *info.metadata, tyro.conf.arg(help=info.description))]  # type: ignore[valid-type]
        if info.is_required():
            fields.append((name, annotated, field(kw_only=True)))
        else:
            default: Any = kind if inner else partial(info.get_default, call_default_factory=True)
            fields.append((name, annotated, field(default_factory=default, kw_only=True)))
    return make_dataclass(config.__name__, fields)


def read_toml(path: Path) -> dict[str, Any]:
    """The file's table. Raises ConfigError for a file that is absent or isn't TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, IsADirectoryError):
        raise ConfigError(f"{path} is not a file; the first argument is a TOML file, everything else is --flags") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


@contextmanager
def writing(folder: Path | str, field: str) -> Iterator[None]:
    """What the file system refuses under `folder` is the user's to mend: a file where a folder is needed, no permission, read-only, full."""
    try:
        yield
    except OSError as error:
        if error.errno not in USERS_OWN:
            raise
        at = f" at {error.filename}" if error.filename and str(error.filename) != str(folder) else ""
        raise ConfigError(f"{field} = {str(folder)!r} cannot be written: {error.strerror}{at}", next=f"give another folder with --{field}") from error


def _flags(config: type[BaseModel], table: Mapping[str, Any], where: str, prefix: str = "") -> list[str]:
    """A TOML table as flags: {lora: {rank: 8}} -> ["--lora.rank", "8"]; keys are checked here, values by the Config itself."""
    flags: list[str] = []
    fields = {name.replace("_", "-"): field for name, field in config.model_fields.items()}
    for key, value in table.items():
        name = key.replace("_", "-")
        if name not in fields:
            raise ConfigError(f"{where}: unknown key {prefix}{key}{nearest(name, fields)}", next="mend or remove the key")
        if isinstance(value, Mapping):
            inner = _model_in(fields[name].annotation)
            if inner is None:
                raise ConfigError(f"{where}: {prefix}{key} is a table; it should be a value")
            flags += _flags(inner, value, where, f"{prefix}{name}.")
        else:
            flags += [f"--{prefix}{name}", *(str(v) for v in (value if isinstance(value, list) else [value]))]
    return flags


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The Config class in an annotation such as `LoraConfig` or `LoraConfig | None`."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _explain(error: ValidationError) -> str:
    """Each wrong field with the value tested and what it must be."""
    lines = [f"{'.'.join(str(part) for part in item['loc']) or 'config'} = {item.get('input')!r}: {item['msg']}" for item in error.errors()]
    return "; ".join(lines)
