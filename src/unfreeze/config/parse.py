"""Parse a TOML file and flags into one frozen, validated Config.

Every field is a TOML key and a flag of the same name (names.py). A flag overrides the file.
"""

from __future__ import annotations

import errno
import io
import itertools
import os
import sys
import tomllib
from collections.abc import Callable, Generator, Mapping, Sequence
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
from unfreeze.config.mended import SHORT, first_is, is_rows, line, renamed, short_hint
from unfreeze.config.names import Known, by_path, earlier, fields, nested, short_name, spellings
from unfreeze.config.synonyms import field_hint, field_next
from unfreeze.config.words import fault_of, wrong, wrong_flag
from unfreeze.core.built_in import TINY_K2
from unfreeze.core.errors import FULL, ConfigError, nearest, size_limit
from unfreeze.core.torchrun import first_process


class Frozen(BaseModel):
    """Base of every Config: immutable. Unknown keys and non-finite numbers are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def _path(text: str) -> str:
    if "\0" in text:
        raise ValueError("a path cannot hold a NUL character")
    return os.path.expanduser(text)


Folder = Annotated[str, AfterValidator(_path)]
"""A path from the user; ~ and ~name are expanded here, once."""
Files = Annotated[
    tuple[Folder, ...], BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)
]
"""One path or several."""
ModelName = Folder
"""A folder, or a Hugging Face id org/name, which never starts with ~."""

# file system errors that the user can fix
USERS_OWN = (
    errno.EEXIST,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENAMETOOLONG,
    errno.EFBIG,
    *FULL,
)

MAX_TOML = 1_000_000  # bytes

MEANT = {"--data": "FILE", "--teacher": "DIR_OR_RUN"}  # placeholders for a flag's value in a remedy

C = TypeVar("C", bound=BaseModel)


def parse(
    config: type[C],
    arguments: list[str],
    *,
    command: str,
    description: str,
    positional: bool = False,
    say: Callable[[Sequence[str]], None] | None = None,
    topics: Mapping[str, Callable[[], str]] | None = None,
) -> C:
    """Parse `unfreeze COMMAND [file.toml] [--flag value …]` into a Config.

    positional: the first argument is a field of the Config (a model, a run), not a TOML file.
    say: called with notes about names of earlier versions; by default they go to stderr.
    topics: word -> a page that `--help WORD` prints instead.
    Raises ConfigError that names the field and the nearest valid key.
    """
    if wants_help := {"-h", "--help", "--help-all"} & set(arguments):
        everything = "--help-all" in wants_help
        page = _page(arguments, topics or {}, command)
        print(page or help_text(config, command, description, everything=everything))
        raise SystemExit(0)
    values: dict[str, Any] = {}
    renamed: list[str] = []
    typed = arguments
    if not positional and arguments and not arguments[0].startswith("-"):
        if "model" in fields(config) and is_model(arguments[0]):
            raise first_is("model", arguments, command)
        if "data" in spellings(config) and is_rows(arguments[0]):
            raise first_is("data", arguments, command)
        values = _given(config, read_toml(Path(arguments[0]).expanduser()), arguments[0], renamed)
        arguments = arguments[1:]
    flagged: dict[str, str] = {}
    flags = _parse_flags(config, arguments, command, typed)
    values |= by_path(config, flags, f"unfreeze {command}", renamed=flagged)
    renamed += [f"{_as_flag(old)} is {_as_flag(now)} now" for old, now in flagged.items()]
    if missing := _missing(config, values):
        flags = [_flag(known) for known in missing]
        whole = [*typed, *(word for flag in flags for word in (flag, MEANT.get(flag, flag[2:].upper())))]
        to_type = typed and all(flag.startswith("--") for flag in flags)
        raise ConfigError(
            f"unfreeze {command} needs {' and '.join(flags)}",
            next=line(command, whole) if to_type else f"unfreeze {command} --help",
        )
    validated = _validated(config, values, f"unfreeze {command} --help")
    (say or _note)(renamed)
    return validated


def _page(arguments: Sequence[str], topics: Mapping[str, Callable[[], str]], command: str) -> str:
    """The page that follows --help; "" if none does. Raises ConfigError for a word that is no page."""
    behind = arguments[arguments.index("--help") + 1 :] if "--help" in arguments else ()
    word = behind[0] if behind else ""
    if not topics or not word or word.startswith("-"):
        return ""
    if word not in topics:
        raise ConfigError(
            f"unfreeze {command} --help has no page {word!r}{nearest(word, topics)}",
            next=" or ".join(f"unfreeze {command} --help {topic}" for topic in topics),
        )
    return topics[word]()


def check_flags(config: type[BaseModel], arguments: list[str], command: str) -> None:
    """Check names and values of flags whose TOML file or adapter does not exist yet. Raises ConfigError."""
    by_path(config, _parse_flags(config, arguments, command), f"unfreeze {command}", renamed={})


def _note(renamed: Sequence[str]) -> None:
    """Print a line to stderr about names of earlier versions; under torchrun only in the first process."""
    if renamed and first_process():
        print(f"note: {'; '.join(renamed)}", file=sys.stderr, flush=True)


def _as_flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def refuse_second(arguments: Sequence[str], what: str, next: str) -> None:
    """Raise ConfigError for a second positional argument; `what` explains how to give it."""
    words = list(itertools.takewhile(lambda word: not word.startswith("-"), arguments))
    if len(words) > 1:
        raise ConfigError(f"{words[1]!r} is unexpected; {what}", next=next)


def is_model(name: str) -> bool:
    """True if the name is a checkpoint folder, or looks like org/name and is not a path."""
    path = Path(name).expanduser()
    if path.exists():
        return (path / "config.json").is_file()
    if name == TINY_K2.name:
        return True
    plain = name.count("/") == 1 and name[0] not in "~/." and not path.parent.exists()
    return plain and path.suffix not in (".toml", ".yaml", ".yml")


def from_keywords(
    config: type[C],
    keywords_given: Mapping[str, Any],
    *,
    function: str,
    file: str | Path | None = None,
    command: str = "",
) -> C:
    """Build a Config from keywords: unfreeze.sft("run.toml", rank=16, optimizer={"clip": 0.5}).

    Keywords override the file. command: of the function, if its name is another.
    Raises ConfigError that names the keyword and the nearest valid one.
    """
    # refuse an unknown keyword
    valid = {*spellings(config), *config.model_fields}
    unknown = next(
        (name for name in keywords_given if name.replace("-", "_") not in {*valid, *earlier(config)}), None
    )
    if unknown is not None:
        hint = field_hint(unknown, valid) or _elsewhere(config, unknown)
        raise ConfigError(
            f"unfreeze.{function} has no argument {unknown!r}{hint}",
            next=field_next(unknown, f"help(unfreeze.{function}), or: unfreeze {command or function} --help"),
        )

    # the file, overridden by keywords
    renamed: list[str] = []
    values = _given(config, read_toml(Path(file).expanduser()), str(file), renamed) if file else {}
    keywords = {name: _plain(value) for name, value in keywords_given.items() if value is not None}
    values |= _given(config, keywords, f"unfreeze.{function}", renamed)
    if missing := [known.short for known in _missing(config, values)]:
        others = "".join(f', {name}="…"' for name in missing if name not in ("model", "data"))
        raise ConfigError(
            f"unfreeze.{function} needs {' and '.join(missing)}",
            next=f'unfreeze.{function}(model="…", data="chat.jsonl"{others})',
        )
    validated = _validated(config, values, f"help(unfreeze.{function})")
    _note(renamed)
    return validated


def from_file(config: type[C], path: Path, example: str) -> C:
    """Build a Config from a TOML file alone. example: a file with all required fields, for the remedy.

    Raises ConfigError that names the file and the field.
    """
    values = _given(config, read_toml(path), str(path), [])
    if missing := [known.short for known in _missing(config, values)]:
        raise ConfigError(f"{path} needs {' and '.join(missing)}", next=example)
    return _validated(config, values, f"correct {path}")


def _plain(value: Any) -> Any:
    """Convert paths to text, also in a list."""
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in cast(Sequence[Any], value)]
    return os.fspath(cast(os.PathLike[str], value)) if isinstance(value, os.PathLike) else value


def _missing(config: type[BaseModel], values: Mapping[str, Any]) -> list[Known]:
    """Required fields that are missing and that no other field provides (SAID_BY)."""
    said_by: Mapping[str, str] = getattr(config, "SAID_BY", {})
    return [
        known
        for known in fields(config).values()
        if known.info.is_required()
        and known.path not in values
        and not any(values.get(other) for other in said_by.get(known.path, "").split())
    ]


def _validated(config: type[C], values: Mapping[str, Any], next: str) -> C:
    try:
        return config.model_validate(nested(values))
    except ValidationError as error:
        raise ConfigError(_explain(config, error), next=next) from error


def _parse_flags(
    config: type[BaseModel], arguments: list[str], command: str, typed: Sequence[str] | None = None
) -> dict[str, Any]:
    """Parse the flags; names stay as the user spelled them. typed: all of the command line, for the remedy.

    tyro's parser has the typed flags alone: one of all fields takes ten times as long. What it refuses, that
    of all refuses again: its message about a wrong flag, a box of many lines, becomes one ConfigError.
    """
    _refuse_repeated(config, arguments)
    help = f"unfreeze {command} --help"
    _refuse_absent(config, arguments, command, arguments if typed is None else typed)
    if wrong := _wrong_flag(config, arguments):
        raise ConfigError(wrong, next=help)
    if not arguments:
        return {}
    captured, every = io.StringIO(), _every(config)
    for known in filter(None, (_typed(every, arguments), every)):
        captured = io.StringIO()
        try:
            with redirect_stderr(captured):
                return dict(tyro.cli(_flags(known), args=arguments, prog=f"unfreeze {command}"))
        except SystemExit as ended:
            if ended.code == 0:
                raise

    # tyro's message: the lines of its box before the flag's help
    words = [line.strip(" │") for line in captured.getvalue().splitlines() if not line.startswith(("╭", "╰"))]
    end = next((i for i, word in enumerate(words) if word.startswith("──")), len(words))
    raise ConfigError(" ".join(word for word in words[:end] if word) or "the flags cannot be read", next=help)


def _refuse_absent(
    config: type[BaseModel], arguments: Sequence[str], command: str, typed: Sequence[str]
) -> None:
    """Raise ConfigError for unknown flags, each with our name for it or the nearest one.

    Checked before tyro, which takes seconds to compare an unknown flag with all others.
    """
    dotted, short = list(fields(config)), [known.short for known in fields(config).values()]
    known = {*map(_as_flag, _every(config)), *(f"--no-{name.replace('_', '-')}" for name in short), "--"}
    flags = (argument.partition("=")[0] for argument in arguments)
    written = [flag for flag in flags if flag.startswith("--") or flag in SHORT]
    absent: list[str] = []
    strange = list(dict.fromkeys(flag for flag in written if flag.replace("_", "-") not in known))
    for unknown in strange:
        near = list(map(_as_flag, [*short, *dotted] if "." in unknown else short))
        hint = _elsewhere(config, unknown, flag=True) or field_hint(unknown, near, flag=True)
        hint = short_hint(config, unknown) if unknown in SHORT else hint
        absent.append(f"there is no flag {unknown}{hint}")
    if absent:
        otherwise = renamed(config, typed, strange, command)
        raise ConfigError(". And ".join(absent), next=field_next(strange[0], otherwise))


def _elsewhere(config: type[BaseModel], word: str, *, flag: bool = False) -> str:
    """Hint "; it is called --optimizer.moments here" if the word is the last part of exactly one name."""
    word = word.lstrip("-").replace("-", "_")
    matches = [name for name in fields(config) if name.endswith(f".{word}")]
    alone = len(matches) == 1 and word not in config.model_fields
    return f"; it is called {_as_flag(matches[0]) if flag else matches[0]} here" if alone else ""


def _every(config: type[BaseModel]) -> dict[str, Known]:
    """Return every spelling, including those of earlier versions -> its field."""
    known = fields(config)
    return {word: known[name] for word, name in (spellings(config) | earlier(config)).items()}


def _wrong_flag(config: type[BaseModel], arguments: Sequence[str]) -> str:
    """Message about the first flag with missing or invalid values; "" if all are valid."""
    known = {_as_flag(word): field.info for word, field in _every(config).items()}
    words: list[str] = []
    at: list[int] = []
    for word in arguments:
        flag, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        if flag:
            at.append(len(words))
            words.append(flag)
        if equals or not flag:  # what follows = may begin with -- itself
            words.append(value)
    for start, end in itertools.pairwise([*at, len(words)]):
        info = known.get(words[start].replace("_", "-"))
        if info is not None and (message := wrong_flag(words[start], words[start + 1 : end], info)):
            return message
    return ""


def _refuse_repeated(config: type[BaseModel], arguments: Sequence[str]) -> None:
    """Raise ConfigError for a multi-value flag given twice: the first values would be lost."""
    several = {_as_flag(word) for word, field in _every(config).items() if takes_several(field.info)}
    written = [argument.partition("=")[0].replace("_", "-") for argument in arguments]
    twice = next((flag for flag in written if flag in several and written.count(flag) > 1), "")
    if twice:
        raise ConfigError(f"{twice} is given twice", next=f"give its values after one {twice}: {twice} A B")


def takes_several(info: FieldInfo) -> bool:
    """True if a field takes several values after its flag."""
    return any(get_origin(kind) is tuple for kind in (info.annotation, *get_args(info.annotation)))


def _typed(every: Mapping[str, Known], arguments: Sequence[str]) -> dict[str, Known]:
    """Return the spellings that the arguments have as flags, or negated, and all positional fields."""
    written = {argument.partition("=")[0].replace("_", "-") for argument in arguments}
    return {
        word: field
        for word, field in every.items()
        if {_as_flag(word), _as_flag(f"no_{word}")} & written or not _flag(field).startswith("--")
    }


def _flags(known: Mapping[str, Known]) -> Any:
    """Make a TypedDict of fields by their spellings; tyro fills in the flags given.

    The Config checks limits, so that errors have our wording.
    """
    make = cast(Any, TypedDict)  # a class made at run time; type checkers cannot follow it
    return make("Flags", {word: _kind(field.info) for word, field in known.items()}, total=False)


def _kind(info: FieldInfo) -> Any:
    """Annotated type of a field, with its limits."""
    return Annotated[(info.annotation, *info.metadata, Field())]


def _flag(known: Known) -> str:
    """Command-line form of a field: --model, or MODEL for a positional one."""
    metavar = next((item.metavar for item in known.info.metadata if getattr(item, "metavar", None)), "")
    return metavar or _as_flag(known.short)


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file.

    Raises ConfigError if it is missing, isn't TOML, or has more than MAX_TOML bytes.
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
    # ValueErrors: TOMLDecodeError, UnicodeDecodeError, a number with thousands of digits
    except (ValueError, RecursionError) as error:
        yaml = ". YAML is not supported: write KEY = VALUE" if path.suffix in (".yaml", ".yml") else ""
        of_run = "settings are a TOML file; a run's command is in its report.html"
        mend = of_run if path.suffix == ".json" else "correct that line"
        raise ConfigError(f"{path} is not valid TOML: {error}{yaml}", next=mend) from error


@contextmanager
def writing(folder: Path | str, field: str, *, positional: bool = False) -> Generator[None]:
    """Turn an OSError about writing under `folder` into a ConfigError that names `field`.

    Examples: a file in place of a folder, no permission, a read-only or full disk.
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
        if error.errno == errno.EFBIG:
            cause, remedy = size_limit()
            words = f"{field} = {str(folder)!r} cannot be written: {cause}"
            raise ConfigError(words, next=remedy) from error
        at = f" at {error.filename}" if error.filename and str(error.filename) != str(folder) else ""
        raise ConfigError(
            f"{field} = {str(folder)!r} cannot be written: {error.strerror}{at}",
            next=elsewhere or f"make {path} a writable folder",
        ) from error


def _given(
    config: type[BaseModel], table: Mapping[str, Any], where: str, renamed: list[str]
) -> dict[str, Any]:
    """Convert a TOML table to {path: value}, checking each value by its field's type and limits.

    renamed: receives notes about names of earlier versions.
    The check is strict: true is not 1, and "5" is not 5. But a list counts as a tuple, and a whole number as
    a float.
    """

    def check(written: str, info: FieldInfo, value: Any) -> Any:
        typed: TypeAdapter[Any] = TypeAdapter(_kind(info), config=ConfigDict(allow_inf_nan=False))
        typed_value = tuple(cast(Sequence[Any], value)) if isinstance(value, list) else value
        try:
            return typed.validate_python(typed_value, strict=True)
        except ValidationError as error:
            raise ConfigError(
                f"{where}: {wrong(written, cast(object, value), fault_of(error.errors()))}",
                next="correct the value",
            ) from None

    old: dict[str, str] = {}
    values = by_path(config, table, where, check, old)
    file = "" if where.startswith("unfreeze.") else f"{where}: "
    renamed += [f"{file}{name} is {now} now" for name, now in old.items()]
    return values


def _explain(config: type[BaseModel], error: ValidationError) -> str:
    """Describe each wrong field, with its value and the requirement."""
    lines: list[str] = []
    for item in error.errors():
        # a check of several fields, of all or of a table, has a complete message
        if not item["loc"] or (item["type"] == "value_error" and isinstance(item.get("input"), dict)):
            lines.append(item["msg"].partition(", ")[2])
            continue
        path = [str(part) for part in item["loc"] if not isinstance(part, int)]
        whole: dict[str, Any] = {**item, "loc": ()}  # the wrong item of a list, without the list
        lines.append(wrong(short_name(config, ".".join(path)), item.get("input"), whole))
    return "; ".join(lines)
