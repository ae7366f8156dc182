"""From a TOML file and flags to one frozen, validated Config.

Every field is a TOML key and a flag, in both its spellings (names.py). A flag wins over the file.
"""

from __future__ import annotations

import errno
import io
import itertools
import os
import shlex
import tomllib
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Annotated, Any, TypedDict, TypeVar, cast, get_args, get_origin

import tyro
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
)
from pydantic.fields import FieldInfo

from unfreeze.config.help import text as help_text
from unfreeze.config.names import by_place, flat_name, leaves, nested, places
from unfreeze.config.synonyms import field_hint, field_next
from unfreeze.config.words import fault_of, wrong, wrong_flag
from unfreeze.core.errors import FULL, ConfigError


class Frozen(BaseModel):
    """Base of every Config: immutable, an unknown key is an error, and so is a number that isn't finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def _path(text: str) -> str:
    if "\0" in text:
        raise ValueError("a path cannot hold a NUL character")
    return os.path.expanduser(text)


Folder = Annotated[str, AfterValidator(_path)]
"""A path as the user gives it; ~ and ~name are expanded here, once."""
Files = Annotated[
    tuple[Folder, ...], BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)
]
"""One path or several."""
ModelName = Folder
"""A folder, or a Hugging Face id org/name, which never begins with ~."""

# errors of the file system that the user can mend
USERS_OWN = (
    errno.EEXIST,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENAMETOOLONG,
    *FULL,
)

MAX_TOML = 1_000_000  # bytes

MEANT = {"--data": "FILE", "--teacher": "DIR_OR_RUN"}  # what stands for a flag's value in a remedy

C = TypeVar("C", bound=BaseModel)


def parse(
    config: type[C], arguments: list[str], *, command: str, description: str, positional: bool = False
) -> C:
    """`unfreeze COMMAND [file.toml] [--flag value …]` -> Config.

    positional: the first argument is a field of the Config (a model, a run), not a TOML file.
    Raises ConfigError that names the field and the nearest valid key.
    """
    if asked := {"-h", "--help", "--help-all"} & set(arguments):
        print(help_text(config, command, description, everything="--help-all" in asked))
        raise SystemExit(0)
    fields: dict[str, Any] = {}
    typed = arguments
    if not positional and arguments and not arguments[0].startswith("-"):
        if "model" in places(config) and is_model(arguments[0]):
            raise _model_first(arguments, command)
        fields = _given(config, read_toml(Path(arguments[0]).expanduser()), arguments[0])
        arguments = arguments[1:]
    fields |= by_place(config, _parse_flags(config, arguments, command), f"unfreeze {command}")
    if missing := _missing(config, fields):
        flags = [_flag(config, name) for name in missing]
        whole = [*typed, *(word for flag in flags for word in (flag, MEANT.get(flag, flag[2:].upper())))]
        flagged = typed and all(flag.startswith("--") for flag in flags)
        raise ConfigError(
            f"unfreeze {command} needs {' and '.join(flags)}",
            next=shlex.join(["unfreeze", *command.split(), *whole])
            if flagged
            else f"unfreeze {command} --help",
        )
    return _validated(config, fields, f"unfreeze {command} --help")


def refuse_second(arguments: Sequence[str], what: str, next: str) -> None:
    """Raise ConfigError for a second word behind the first that is no flag: `what` it was meant to be."""
    words = list(itertools.takewhile(lambda word: not word.startswith("-"), arguments))
    if len(words) > 1:
        raise ConfigError(f"{words[1]!r} stands where no word is read; {what}", next=next)


def is_model(name: str) -> bool:
    """Whether it is a checkpoint's folder, or written like org/name where no such path is."""
    path = Path(name).expanduser()
    if path.exists():
        return (path / "config.json").is_file()
    plain = name.count("/") == 1 and name[0] not in "~/." and not path.parent.exists()
    return plain and path.suffix not in (".toml", ".yaml", ".yml")


def _model_first(arguments: Sequence[str], command: str) -> ConfigError:
    """With the command that was meant: --model before the first word, --data before those after it."""
    files = list(itertools.takewhile(lambda word: not word.startswith("-"), arguments[1:]))
    mended = ["--model", arguments[0], *(["--data", *files] if files else []), *arguments[1 + len(files) :]]
    return ConfigError(
        f"{arguments[0]} is a model; the first argument of {command} is a TOML file",
        next=shlex.join(["unfreeze", *command.split(), *mended]),
    )


def from_keywords(
    config: type[C], given: Mapping[str, Any], *, function: str, file: str | Path | None = None
) -> C:
    """unfreeze.sft("run.toml", rank=16, optimizer={"clip": 0.5}) -> Config; keywords win over the file.

    A field of [lora] may be given without its table: rank for lora.rank.
    Raises ConfigError that names the keyword and the nearest valid one.
    """
    # refuse a keyword that is no field
    names = places(config)
    inner = _last_words(config, names)
    known = {*names, *config.model_fields, *inner}
    unknown = next((name for name in given if name.replace("-", "_") not in known), None)
    if unknown is not None:
        # a keyword has no dots
        hint = field_hint(unknown, [*names, *config.model_fields, *inner]).replace("lora.", "")
        raise ConfigError(
            f"unfreeze.{function} has no argument {unknown!r}{hint}",
            next=field_next(unknown, f"help(unfreeze.{function}), or: unfreeze {function} --help"),
        )

    # the file, then the keywords over it
    fields = _given(config, read_toml(Path(file).expanduser()), str(file)) if file is not None else {}
    keywords = {
        name if name in names else inner.get(name, name): _plain(value)
        for name, value in given.items()
        if value is not None
    }
    fields |= _given(config, keywords, f"unfreeze.{function}")
    if missing := _missing(config, fields):
        others = "".join(f', {name}="…"' for name in missing if name not in ("model", "data"))
        raise ConfigError(
            f"unfreeze.{function} needs {' and '.join(missing)}",
            next=f'unfreeze.{function}(model="…", data="chat.jsonl"{others})',
        )
    return _validated(config, fields, f"help(unfreeze.{function})")


def _plain(value: Any) -> Any:
    """Paths as text, also those in a list."""
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in cast(Sequence[Any], value)]
    return os.fspath(cast(os.PathLike[str], value)) if isinstance(value, os.PathLike) else value


def _missing(config: type[BaseModel], fields: Mapping[str, Any]) -> list[str]:
    """The flat names of required fields that nobody gave, and no other field says (SAID_BY)."""
    said_by: Mapping[str, str] = getattr(config, "SAID_BY", {})
    return [
        flat_name(config, place)
        for place, info in leaves(config)
        if info.is_required() and place not in fields and not fields.get(said_by.get(place, ""))
    ]


def _validated(config: type[C], fields: Mapping[str, Any], next: str) -> C:
    try:
        return config.model_validate(nested(fields))
    except ValidationError as error:
        raise ConfigError(_explain(config, error), next=next) from error


def _parse_flags(config: type[BaseModel], arguments: list[str], command: str) -> dict[str, Any]:
    """The flags that were given, in the spelling they were given in.

    tyro's message about a wrong one, a box of many lines, becomes one ConfigError.
    """
    _refuse_repeated(config, arguments)
    help = f"unfreeze {command} --help"
    _refuse_absent(config, arguments, command)
    if wrong := _wrong_flag(config, arguments):
        raise ConfigError(wrong, next=help)
    captured = io.StringIO()
    try:
        with redirect_stderr(captured):
            return dict(tyro.cli(_flags(config), args=arguments, prog=f"unfreeze {command}"))
    except SystemExit as ended:
        if ended.code == 0:
            raise

    # tyro's message: the lines of its box that come before the flag's help
    words = [line.strip(" │") for line in captured.getvalue().splitlines() if not line.startswith(("╭", "╰"))]
    end = next((i for i, word in enumerate(words) if word.startswith("──")), len(words))
    raise ConfigError(" ".join(word for word in words[:end] if word) or "the flags cannot be read", next=help)


def _refuse_absent(config: type[BaseModel], arguments: Sequence[str], command: str) -> None:
    """Each unknown flag with ours, or with the nearest one.

    Asked before tyro, which takes seconds to compare an unknown flag with every other.
    """
    flat = [f"--{name.replace('_', '-')}" for name in places(config)]
    dotted = [f"--{place.replace('_', '-')}" for place in places(config).values()]
    written = [argument.partition("=")[0] for argument in arguments if argument.startswith("--")]
    known = {*flat, *dotted, *(f"--no-{name[2:]}" for name in flat), "--"}
    # the last word of a dotted flag: --rank for --lora.rank
    words = _last_words(config, places(config))
    ends = {word.replace("_", "-"): f"--{name.replace('_', '-')}" for word, name in words.items()}
    absent: list[str] = []
    strange = list(dict.fromkeys(flag for flag in written if flag.replace("_", "-") not in known))
    for unknown in strange:
        near = [*flat, *dotted] if "." in unknown else flat
        inner = ends.get(unknown.lstrip("-").replace("_", "-"))
        hint = f"; it is called {inner} here" if inner else field_hint(unknown, near, flag=True)
        absent.append(f"there is no flag {unknown}{hint}")
    if absent:
        raise ConfigError(". And ".join(absent), next=field_next(strange[0], f"unfreeze {command} --help"))


def _last_words(config: type[BaseModel], names: Iterable[str]) -> dict[str, str]:
    """The last word of each dotted name -> the name, but for words that are tables or fields themselves."""
    words = {name.rpartition(".")[2]: name for name in names if "." in name}
    return {word: name for word, name in words.items() if word not in config.model_fields}


def _wrong_flag(config: type[BaseModel], arguments: Sequence[str]) -> str:
    """The first flag whose values are none, or beyond its limits, in words as given; "" where each is one."""
    infos = dict(leaves(config))
    known = {
        f"--{spelling.replace('_', '-')}": infos[place]
        for name, place in places(config).items()
        for spelling in (name, place)
    }
    words = [part for word in arguments for part in (word.split("=", 1) if word.startswith("--") else [word])]
    at = [i for i, word in enumerate(words) if word.startswith("--")]
    for start, end in itertools.pairwise([*at, len(words)]):
        info = known.get(words[start].replace("_", "-"))
        if info is not None and (said := wrong_flag(words[start], words[start + 1 : end], info)):
            return said
    return ""


def _refuse_repeated(config: type[BaseModel], arguments: Sequence[str]) -> None:
    """A flag of several values that is given twice would lose those of the first time."""
    infos = dict(leaves(config))
    several = {
        f"--{spelling.replace('_', '-')}"
        for name, place in places(config).items()
        if any(
            get_origin(kind) is tuple
            for kind in (infos[place].annotation, *get_args(infos[place].annotation))
        )
        for spelling in (name, place)
    }
    written = [argument.partition("=")[0].replace("_", "-") for argument in arguments]
    twice = next((flag for flag in written if flag in several and written.count(flag) > 1), "")
    if twice:
        raise ConfigError(f"{twice} is given twice", next=f"give its values after one {twice}: {twice} A B")


def _flags(config: type[BaseModel]) -> Any:
    """A TypedDict of every flag in each of its spellings; tyro fills in those that were given.

    The Config checks the limits, so that errors are in our own words.
    """
    kinds = {place: _kind(info) for place, info in leaves(config)}
    by_name = {name: kinds[place] for name, place in places(config).items()}
    make = cast(Any, TypedDict)  # a class made at run time, which a type checker cannot follow
    return make("Flags", {**by_name, **kinds}, total=False)


def _kind(info: FieldInfo) -> Any:
    """A field's type with its limits."""
    return Annotated[(info.annotation, *info.metadata, Field())]


def _flag(config: type[BaseModel], name: str) -> str:
    """How a field is given on the command line: --model, or MODEL where it has no flag."""
    info = dict(leaves(config))[places(config)[name]]
    metavar = next((item.metavar for item in info.metadata if getattr(item, "metavar", None)), "")
    return metavar or f"--{name.replace('_', '-')}"


def read_toml(path: Path) -> dict[str, Any]:
    """The file's table.

    Raises ConfigError for a file that is absent, isn't TOML, or has more than MAX_TOML bytes.
    """
    try:
        if path.stat().st_size > MAX_TOML:
            raise ConfigError(
                f"{path} has {path.stat().st_size:,} bytes; a run's TOML file has at most {MAX_TOML:,}",
                next="give a run's file",
            )
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise ConfigError(
            f"{path} is not a file; the first argument is a TOML file, everything else is --flags",
            next="check the path",
        ) from None
    # TOMLDecodeError and UnicodeDecodeError are ValueErrors; so is a number of thousands of digits
    except (ValueError, RecursionError) as error:
        yaml = ". YAML is not read: write KEY = VALUE" if path.suffix in (".yaml", ".yml") else ""
        of_run = "report.html of a run has its command; a file of settings is TOML"
        mend = of_run if path.suffix == ".json" else "mend that line"
        raise ConfigError(f"{path} is not valid TOML: {error}{yaml}", next=mend) from error


@contextmanager
def writing(folder: Path | str, field: str, *, positional: bool = False) -> Generator[None]:
    """Turn the file system's refusal to write under `folder` into a ConfigError that names `field`.

    Such refusals: a file where a folder is needed, no permission, a read-only or a full disk.
    """
    path, elsewhere = Path(folder), "" if positional else f"give another folder with --{field}"
    try:
        yield
    except OSError as error:
        if error.errno not in USERS_OWN:
            raise
        file = next((name for name in (path, *path.parents) if name.is_file()), None)
        if error.errno in (errno.EEXIST, errno.ENOTDIR) and file is not None:
            inside = f": {file}" if file != path else ""
            raise ConfigError(
                f"{field} = {str(folder)!r}{inside} is a file, not a folder",
                next=elsewhere or "give another folder",
            ) from error
        if error.errno in FULL:
            disk = next(name for name in (path.absolute(), *path.absolute().parents) if name.is_mount())
            _, colon, sizes = (error.strerror or "").partition(": ")  # checkpoint/save.py's
            raise ConfigError(
                f"{field} = {str(folder)!r} cannot be written: the disk at {disk} is full{colon}{sizes}",
                next=" or ".join(["free space there", *([elsewhere] if elsewhere else [])]),
            ) from error
        at = f" at {error.filename}" if error.filename and str(error.filename) != str(folder) else ""
        raise ConfigError(
            f"{field} = {str(folder)!r} cannot be written: {error.strerror}{at}",
            next=elsewhere or f"make {path} a folder that you may write to",
        ) from error


def _given(config: type[BaseModel], table: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A TOML table as {place: value}, each value checked by its field's type and limits.

    The check is strict: true is not 1, and "5" is not 5. But a list may stand for a tuple, and a whole number
    for a float.
    """

    def check(written: str, info: FieldInfo, value: Any) -> Any:
        typed: TypeAdapter[Any] = TypeAdapter(_kind(info), config=ConfigDict(allow_inf_nan=False))
        given = tuple(cast(Sequence[Any], value)) if isinstance(value, list) else value
        try:
            return typed.validate_python(given, strict=True)
        except ValidationError as error:
            raise ConfigError(
                f"{where}: {wrong(written, cast(object, value), fault_of(error.errors()))}",
                next="mend the value",
            ) from None

    return by_place(config, table, where, check)


def _explain(config: type[BaseModel], error: ValidationError) -> str:
    """Each wrong field with the value tested and what it must be."""
    lines: list[str] = []
    for item in error.errors():
        if not item["loc"]:  # a check of several fields: its message says in words what is wrong
            lines.append(item["msg"].partition(", ")[2])
            continue
        place = [str(part) for part in item["loc"] if not isinstance(part, int)]
        whole: dict[str, Any] = {**item, "loc": ()}  # the item of a list that is wrong, without the list
        lines.append(wrong(flat_name(config, ".".join(place)), item.get("input"), whole))
    return "; ".join(lines)
