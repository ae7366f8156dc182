"""From a TOML file and flags to one frozen, validated Config. Every field is a TOML key and a flag; a flag wins over the file."""

from __future__ import annotations

import errno
import io
import os
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import MISSING, asdict, field, fields, is_dataclass, make_dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

import tyro
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from unfreeze.config.help import text as help_text
from unfreeze.config.synonyms import field_hint
from unfreeze.core.errors import ConfigError


class Frozen(BaseModel):
    """Base of every Config: immutable, an unknown key is an error, and so is a number that isn't finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def _path(text: str) -> str:
    if "\0" in text:
        raise ValueError("a path cannot hold a NUL character")
    return os.path.expanduser(text)


Folder = Annotated[str, AfterValidator(_path)]
"""A path as the user gives it; ~ and ~name are expanded here, once."""
Files = Annotated[tuple[Folder, ...], BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)]
"""One path or several."""
ModelName = Folder
"""A folder, or a Hugging Face id org/name, which never begins with ~."""

USERS_OWN = (errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ENOSPC, errno.EDQUOT)

MAX_TOML = 1_000_000  # bytes

C = TypeVar("C", bound=BaseModel)


def parse(config: type[C], arguments: list[str], *, command: str, description: str, positional: bool = False) -> C:
    """`unfreeze COMMAND [file.toml] [--flag value …]` -> Config. Raises ConfigError that names the field and the nearest valid key.

    `positional`: the first argument is a field of the Config (a model, a run), not a TOML file.
    """
    if asked := {"-h", "--help", "--help-all"} & set(arguments):
        print(help_text(config, command, description, everything="--help-all" in asked))
        raise SystemExit(0)
    given: dict[str, Any] = {}
    if not positional and arguments and not arguments[0].startswith("-"):
        given = _given(config, read_toml(Path(arguments[0]).expanduser()), arguments[0])
        arguments = arguments[1:]
    twin = _twin(config, given)
    values = asdict(_parse_flags(twin, arguments, command, description))
    named = given.keys() | {argument[2:].partition("=")[0].partition(".")[0].replace("-", "_") for argument in arguments if argument.startswith("--")}
    try:
        return config.model_validate({item.name: values[item.name] for item in fields(twin) if item.name in named or not _default(item, values)})
    except ValidationError as error:
        raise ConfigError(_explain(error), next=f"unfreeze {command} --help") from error


def from_keywords(config: type[C], given: Mapping[str, Any], *, function: str, file: str | Path | None = None) -> C:
    """unfreeze.sft("run.toml", rank=16) -> Config. A field of an inner table may stand without its table where its name is unambiguous.

    Raises ConfigError that names the keyword and the nearest valid one.
    """
    table: dict[str, Any] = read_toml(Path(file).expanduser()) if file is not None else {}
    tables = {name: model for name, info in config.model_fields.items() if (model := _model_in(info.annotation))}
    inner = {name: table_name for table_name, model in tables.items() for name in model.model_fields}
    for name, value in given.items():
        plain = os.fspath(value) if isinstance(value, os.PathLike) else value
        if isinstance(plain, (list, tuple)):
            plain = [os.fspath(item) if isinstance(item, os.PathLike) else item for item in plain]
        if name in inner and name not in config.model_fields:
            table[inner[name]] = {**table.get(inner[name], {}), name: plain}
        else:
            table[name] = plain.model_dump() if isinstance(plain, BaseModel) else plain
    unknown = next((name for name in table if name.replace("-", "_") not in config.model_fields), None)
    if unknown is not None:
        hint = field_hint(unknown, [*config.model_fields, *inner]).replace("lora.", "")  # a keyword has no dots
        raise ConfigError(f"unfreeze.{function} has no argument {unknown!r}{hint}", next=f"help(unfreeze.{function}), or: unfreeze {function} --help")
    missing = [name for name, info in config.model_fields.items() if info.is_required() and name not in table]
    if missing:
        raise ConfigError(f"unfreeze.{function} needs {' and '.join(missing)}", next=f'unfreeze.{function}(model="…", data="chat.jsonl")')
    values = _given(config, {name: value for name, value in table.items() if value is not None}, f"unfreeze.{function}")
    try:
        return config.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_explain(error), next=f"help(unfreeze.{function})") from error


def _parse_flags(twin: type, arguments: list[str], command: str, description: str) -> Any:
    """tyro's parser. Its message about a wrong flag (a box of many lines) becomes one ConfigError."""
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            return tyro.cli(twin, args=arguments, prog=f"unfreeze {command}", description=description)
    except SystemExit as ended:
        if ended.code == 0:
            raise
    words = [line.strip(" │") for line in said.getvalue().splitlines() if not line.startswith(("╭", "╰"))]
    end = next((i for i, word in enumerate(words) if word.startswith("──")), len(words))  # below it stand the flag's help and where to find more
    unknown = next((argument for argument in arguments if argument.startswith("--") and argument.partition("=")[0] not in _names(twin)), "")
    message = " ".join(word for word in words[:end] if word) or "the flags cannot be read"
    if unknown:
        message = f"there is no flag {unknown.partition('=')[0]}{field_hint(unknown.partition('=')[0], _names(twin), flag=True)}"
    raise ConfigError(message, next=f"unfreeze {command} --help")


def _names(twin: type, prefix: str = "--") -> list[str]:
    """Every flag of a twin: --lora.rank."""
    flags = []
    for item in fields(twin):
        name = f"{prefix}{item.name.replace('_', '-')}"
        inner = get_args(item.type)[0] if get_args(item.type) else item.type
        flags += _names(inner, f"{name}.") if is_dataclass(inner) and isinstance(inner, type) else [name]
    return flags


def _twin(config: type[BaseModel], given: Mapping[str, Any]) -> type:
    """A dataclass with the same fields, types and help but without limits. tyro fills it; then the Config
    checks the values, so that errors are in our own words.

    `given`: the values of the TOML file, which become the fields' defaults. (They are never put among the
    arguments as text: there the value "--out" would be read as a flag.)
    """
    members: list[Any] = []
    for name, info in config.model_fields.items():
        inner = _model_in(info.annotation)
        kind = _twin(inner, given.get(name, {})) if inner else info.annotation
        annotated = Annotated[(kind, *info.metadata, tyro.conf.arg(help=info.description))]  # type: ignore[valid-type]
        if inner:
            members.append((name, annotated, field(default_factory=kind, kw_only=True)))  # type: ignore[arg-type]
        elif name in given:
            members.append((name, annotated, field(default_factory=partial(_itself, given[name]), kw_only=True)))
        elif info.is_required():
            members.append((name, annotated, field(kw_only=True)))
        else:
            members.append((name, annotated, field(default_factory=partial(info.get_default, call_default_factory=True), kw_only=True)))
    return make_dataclass(config.__name__, members)


def _default(item: Any, values: Mapping[str, Any]) -> bool:
    """Whether a field of the twin still has its default. Then it counts as not given, which a validator may
    ask for (model_fields_set)."""
    if item.default_factory is MISSING:
        return False
    default = item.default_factory()
    return values[item.name] == (asdict(default) if is_dataclass(default) and not isinstance(default, type) else default)


def _itself(value: Any) -> Any:
    return value


def read_toml(path: Path) -> dict[str, Any]:
    """The file's table. Raises ConfigError for a file that is absent, isn't TOML or has more than MAX_TOML bytes."""
    try:
        if path.stat().st_size > MAX_TOML:
            raise ConfigError(f"{path} has {path.stat().st_size:,} bytes; a run's TOML file has at most {MAX_TOML:,}", next="give a run's file")
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise ConfigError(f"{path} is not a file; the first argument is a TOML file, everything else is --flags", next="check the path") from None
    except (ValueError, RecursionError) as error:  # TOMLDecodeError and UnicodeDecodeError are ValueErrors; so is a number of thousands of digits
        yaml = ". YAML is not read: write KEY = VALUE" if path.suffix in (".yaml", ".yml") else ""
        raise ConfigError(f"{path} is not valid TOML: {error}{yaml}", next="mend that line") from error


@contextmanager
def writing(folder: Path | str, field: str) -> Iterator[None]:
    """Turn what the file system refuses under `folder` into a ConfigError: a file where a folder is needed,
    no permission, read-only, full."""
    try:
        yield
    except OSError as error:
        if error.errno not in USERS_OWN:
            raise
        at = f" at {error.filename}" if error.filename and str(error.filename) != str(folder) else ""
        raise ConfigError(f"{field} = {str(folder)!r} cannot be written: {error.strerror}{at}", next=f"give another folder with --{field}") from error


def _given(config: type[BaseModel], table: Mapping[str, Any], where: str, prefix: str = "") -> dict[str, Any]:
    """A TOML table as field values. Each is checked by its field's type and limits, strictly: true is not 1,
    and "5" is not 5. But a list may stand for a tuple, and a whole number for a float."""
    values: dict[str, Any] = {}
    names = {name.replace("_", "-"): name for name in config.model_fields}
    for key, value in table.items():
        name = names.get(key.replace("_", "-"))
        if name is None:
            raise ConfigError(f"{where}: unknown key {prefix}{key}{field_hint(key, config.model_fields)}", next="mend or remove the key")
        info = config.model_fields[name]
        inner = _model_in(info.annotation)
        if inner is not None:
            if not isinstance(value, Mapping):
                raise ConfigError(f"{where}: {prefix}{key} = {value!r:.60} should be a table [{prefix}{key}]", next="mend the key")
            values[name] = _given(inner, value, where, f"{prefix}{key}.")
            continue
        if isinstance(value, Mapping):
            raise ConfigError(f"{where}: {prefix}{key} is a table; it should be a value", next="mend the key")
        as_typed = TypeAdapter(Annotated[(info.annotation, *info.metadata, Field())], config=ConfigDict(allow_inf_nan=False))  # type: ignore[valid-type]
        try:
            values[name] = as_typed.validate_python(tuple(value) if isinstance(value, list) else value, strict=True)
        except ValidationError as error:
            raise ConfigError(f"{where}: {prefix}{key} = {value!r:.60}: {error.errors()[0]['msg']}", next="mend the value") from None
    return values


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The Config class in an annotation such as `LoraConfig` or `LoraConfig | None`."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _explain(error: ValidationError) -> str:
    """Each wrong field with the value tested and what it must be."""
    lines = [
        f"{'.'.join(str(part) for part in item['loc'])} = {item.get('input')!r}: {item['msg']}" if item["loc"] else item["msg"].partition(", ")[2]
        for item in error.errors()  # one of several fields together has no place, and says in its own words ("Value error, …") what is wrong
    ]
    return "; ".join(lines)
