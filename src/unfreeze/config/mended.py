"""The user's own command line with its mistake mended: the next command of an error."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel

from unfreeze.config.names import Known, fields, spellings
from unfreeze.config.synonyms import FIELDS, OTHER_UNIT, Hint, value_hint
from unfreeze.config.words import wrong_flag
from unfreeze.core.errors import ConfigError, near_word

DATA = (".jsonl", ".csv", ".tsv", ".parquet", ".arrow", ".feather", ".txt", ".zst", ".gz")
YES, NO = ("", "true", "1", "yes"), ("false", "0", "no")
SHORT = {"-m": "model", "-d": "data", "-o": "out", "-p": "prompt"}
"""A letter of other tools -> the field it most likely means."""


def is_rows(name: str) -> bool:
    """True for the name of a data file; a .json only if it holds a list (a run's settings are an object)."""
    path = Path(name).expanduser()
    if path.suffix == ".json" and path.is_file():
        with path.open("rb") as file:
            return file.read(100).lstrip()[:1] == b"["
    return path.suffix in DATA and not path.is_dir()


def first_is(what: str, arguments: Sequence[str], command: str) -> ConfigError:
    """Error about a first argument that is a model or data, not TOML; names the command that was meant.

    what: "model" or "data".
    """
    others = list(itertools.takewhile(lambda word: not word.startswith("-"), arguments[1:]))
    rest = list(arguments[1 + len(others) :])
    typed = {word.partition("=")[0] for word in rest}
    if what == "model":
        model, files = [arguments[0]], others
    else:
        model, files = [], [arguments[0], *others]
        model = [] if "--model" in typed else ["MODEL"]
    flags = [*(["--model", *model] if model else []), *(["--data", *files] if files else [])]
    kind = "a model" if what == "model" else "a data file"
    return ConfigError(
        f"{arguments[0]} is {kind}; the first argument of {command} is a TOML file",
        next=line(command, [*flags, *rest]),
    )


def line(command: str, arguments: Sequence[str]) -> str:
    """The command, quoted as a shell needs it."""
    return shlex.join(["unfreeze", *command.split(), *arguments])


def short_hint(config: type[BaseModel], word: str) -> str:
    """End of an error about a flag of one letter."""
    own = _own_name(config, word)
    if own and (place := _place(fields(config)[spellings(config)[own]])):
        return f"; {place} has no flag"
    return f"; it is called {_flag(own)} here" if own else ""


def renamed(config: type[BaseModel], typed: Sequence[str], strange: Sequence[str], command: str) -> str:
    """The command line with our names for the strange flags and values, or the page that has these flags.

    A value is kept only if the field takes it and other tools mean the same by it.
    """
    names = {flag: _own_name(config, flag) for flag in strange}
    known = fields(config)
    words: list[str] = []
    left = list(typed)
    mends = all(names.values())
    while left and mends:
        word = left.pop(0)
        flag, equals, value = word.partition("=")
        if flag not in names:
            words.append(word)
            continue
        values = [value] if equals else list(itertools.takewhile(lambda word: not word.startswith("-"), left))
        left = left if equals else left[len(values) :]
        field = known[spellings(config)[names[flag]]]
        mended = _mended(field, names[flag], flag, values)
        mends = bool(mended)
        words = [*mended, *words] if _place(field) else [*words, *mended]
    if mends and len(set(names.values())) == len(names):
        return line(command, words)
    pages = [known[spellings(config)[name]] for name in names.values() if name]
    some = any(each.about.first for each in known.values())
    hidden = some and any(not each.about.first for each in pages)
    return f"unfreeze {command} --help{'-all' if hidden else ''}"


def _place(field: Known) -> str:
    """MODEL, for a field that is an argument without a flag; else ""."""
    return next((item.metavar for item in field.info.metadata if getattr(item, "metavar", None)), "")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _own_name(config: type[BaseModel], flag: str) -> str:
    """Our spelling of the field that a strange flag means; "" if none is known."""
    if flag in SHORT:
        return SHORT[flag] if SHORT[flag] in spellings(config) else ""
    word = flag.lstrip("-").replace("-", "_")
    ends = [name for name in fields(config) if name.endswith(f".{word}")]
    if len(ends) == 1:
        return ends[0]
    if word.lower() in FIELDS:
        name = FIELDS[word.lower()][0]
        return name if name in spellings(config) else ""
    return near_word(word, [known.short for known in fields(config).values()])


def _mended(field: Known, name: str, flag: str, values: Sequence[str]) -> list[str]:
    """Our flag with the values; [] if they mean something else here, or are no values of the field."""
    word = flag.lstrip("-").replace("-", "_").lower()
    first = values[0].lower() if values else ""
    if word in OTHER_UNIT:
        return []
    if _place(field):
        return list(values) if len(values) == 1 else []
    if bool in (field.info.annotation, *getattr(field.info.annotation, "__args__", ())):
        if first not in YES + NO or len(values) > 1:
            return []
        return [_flag(name) if first in YES else _flag(f"no_{name}")]
    if not wrong_flag(_flag(name), values, field.info):
        return [_flag(name), *values]
    # true, or nothing, is the flag's own word: --bf16 is --dtype bfloat16
    for other in (word, "true") if first in YES else (first,):
        hint = value_hint(name, other)
        if elsewhere := re.match(r"; it is (--\S+) (\w+) here", hint):
            return list(elsewhere.groups())
        ours = re.match(r"; it is called (\w+) here", hint)
        if ours and not wrong_flag(_flag(name), [ours[1]], field.info):
            return [_flag(name), ours[1]]
    return []


def with_arguments(hint: Hint, arguments: Sequence[str], training: Sequence[str], near: str) -> str:
    """The next command of a hint, with the user's own arguments if it is one of `training`.

    What the hint's command needs and the arguments lack is added. near: the command that was most likely
    mistyped.
    """
    if near and arguments and hint.next == "unfreeze --help":
        return line(near, arguments)
    words = hint.next.split()
    if not arguments or len(words) < 2 or words[1] not in training or ";" in hint.next:
        return hint.next
    if not arguments[0].startswith("-") and not arguments[0].endswith(".toml"):
        return hint.next
    own = {word.partition("=")[0] for word in arguments}
    pairs: Mapping[str, str] = dict(zip(words[2::2], words[3::2], strict=False))
    from_file = not arguments[0].startswith("-")
    lacks = [
        word
        for flag, value in pairs.items()
        if flag not in own and not (from_file and flag in ("--model", "--data"))
        for word in (flag, value)
    ]
    return line(words[1], [*arguments, *lacks])
