"""The arguments of a user's function: the columns of a row that it takes by keyword.

Read in the process that holds the function (child.py), checked here against the rows, before anything is
generated.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from unfreeze.core.errors import ConfigError, DataError, nearest

POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
SHOWN = 20  # names in an error
MEANING = ("the prompt", "the model's answer")
"""Meaning of the arguments by position."""
ADDRESS = "base_url"
"""First argument of an agent, by its contract."""


@dataclass(frozen=True)
class Signature:
    """Arguments of a function.

    first       names of the arguments by position; fewer than two: *args
    required    names of the others without a default
    optional    names of the others with one
    takes_all   True if it has **kwargs
    """

    name: str
    first: tuple[str, ...]
    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    takes_all: bool = False

    def as_json(self) -> dict[str, Any]:
        """The fields as plain values."""
        return asdict(self)

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Signature:
        """Make it of plain values."""
        lists = {name: tuple(map(str, value[name])) for name in ("first", "required", "optional")}
        return Signature(str(value["name"]), takes_all=bool(value["takes_all"]), **lists)

    def keywords(self, columns: Mapping[str, Any], row: int, prompt: str) -> dict[str, Any]:
        """Return the columns of a row that the function gets by keyword.

        prompt: the column with the prompt, which the first argument has already.
        Raises ConfigError for a column with the name of an argument by position, DataError for a missing one.
        """
        for place, name in enumerate(self.first):
            if name in columns and not (place == 0 and name == prompt):
                free = ", ".join(_free(self.first, columns, prompt))
                raise ConfigError(
                    f"{self.name}: its argument {name!r} is {MEANING[place]}, but the rows have a column"
                    f" {name!r} too",
                    next=f"rename the argument: def {self.name}({free}, {name}, …)",
                )
        if missing := next((name for name in self.required if columns.get(name) is None), ""):
            there = ", ".join(sorted(columns)[:SHOWN])
            raise DataError(
                f"row {row}: {self.name} needs the column {missing!r}{nearest(missing, columns)};"
                f" there are: {there}",
                next=f"rename the column in the file, or give the argument a default: {missing}=None",
            )
        if self.takes_all:
            return {name: value for name, value in columns.items() if name not in self.first}
        return {name: columns[name] for name in (*self.required, *self.optional) if name in columns}


def _free(first: Sequence[str], columns: Mapping[str, Any], prompt: str) -> list[str]:
    """Names for the two arguments that no column has."""
    others = (("question", "text"), ("reply", "written"))
    return [
        name
        if name not in columns or (words is others[0] and name == prompt)
        else next(word for word in (*words, f"{name}_") if word not in columns)
        for name, words in zip(first, others, strict=False)
    ]


def signature_of(
    name: str,
    function: Callable[..., Any],
    meaning: Sequence[str] = MEANING,
    example: str = "prompt, completion, **row",
) -> Signature:
    """Read a function's arguments; the first ones, with a `meaning` each, are given by position.

    Raises ConfigError if it cannot take so many.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # some functions written in C
        raise ConfigError(
            f"{name} does not say which arguments it takes",
            next=f"wrap it: def {name}(prompt, completion): …",
        ) from None
    positional = len(meaning)
    by_position = [parameter for parameter in parameters if parameter.kind in POSITIONAL]
    first, others = by_position[:positional], by_position[positional:]
    kinds = {parameter.kind for parameter in parameters}
    if meaning is MEANING and first and first[0].name == ADDRESS:
        raise ConfigError(
            f"{name}{inspect.signature(function)} is an agent, not a function of a prompt and an answer",
            next=f"unfreeze grpo --agent my.py:{name}; agents are played by a run",
        )
    if meaning is MEANING and {"completions", "prompts"} & {each.name for each in by_position}:
        raise ConfigError(
            f"{name}{inspect.signature(function)} is of TRL's form, which gets all answers in one call",
            next=f"a reward of one answer: def {name}({example})",
        )
    if len(first) < positional and inspect.Parameter.VAR_POSITIONAL not in kinds:
        raise ConfigError(
            f"{name}{inspect.signature(function)} takes fewer than {positional} arguments by position:"
            f" {' and '.join(meaning)}",
            next=f"def {name}({example})",
        )
    if hidden := next((each for each in others if each.kind is inspect.Parameter.POSITIONAL_ONLY), None):
        raise ConfigError(
            f"{name}: columns are given by keyword, and {hidden.name!r} takes none",
            next="move the / behind the first two arguments",
        )
    others += [parameter for parameter in parameters if parameter.kind is inspect.Parameter.KEYWORD_ONLY]
    needed = [each.name for each in others if each.default is inspect.Parameter.empty]
    return Signature(
        name,
        tuple(each.name for each in first),
        tuple(needed),
        tuple(each.name for each in others if each.name not in needed),
        inspect.Parameter.VAR_KEYWORD in kinds,
    )
