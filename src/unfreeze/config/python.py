"""A remedy written in flags, as a caller in Python writes it."""

from __future__ import annotations

import json
import re

from pydantic import BaseModel

from unfreeze.config.names import fields, spellings
from unfreeze.config.words import expected

_FLAG = re.compile(r"(?<!\S)--([a-z][a-z_.-]*)(?: (\d[\d,]*\d(?=\W|$)|[^\s,;:]+(?:,[^\s,;:]+=[^\s,;:]+)*))?")
"""--flag, and the word after it: one value, or FIELD=COLUMN pairs with commas."""
_COMMAND = re.compile(r"(\bunfreeze [a-z]+ [^,;:()]*)")
"""A command to type within a text, up to the next comma, colon or bracket."""


def in_python(config: type[BaseModel], text: str) -> str:
    """`--columns prompt=q` -> `columns={"prompt": "q"}`, `--steps 5 or more` -> `steps=5 or more`.

    `--optimizer.clip 1` -> `optimizer={"clip": 1}`.

    A word that is no value of the flag stays beside it: `--sequence-length higher` -> `sequence_length
    higher`. What is no flag of `config`, or part of a command to type, is left as it is.
    """
    known, names = fields(config), spellings(config)

    def keyword(found: re.Match[str]) -> str:
        written, word = found[1].replace("-", "_"), found[2]
        if written not in names:
            return found[0]
        name, info = known[names[written]].short, known[names[written]].info
        if word is None:
            return name
        pairs = [pair.partition("=") for pair in word.strip("'").split(",")]
        choices = expected(info.annotation).removeprefix("one of ").split(", ")
        if name == "columns" and all(all(pair) for pair in pairs):
            value = json.dumps({field: column for field, _, column in pairs})
        elif re.fullmatch(r"-?[\d.,]*\d(e-?\d+)?", word):
            value = word.replace(",", "")
        elif word in choices or word.isupper() or (name == "device" and word in ("cpu", "cuda")):
            value = f'"{word}"'
        else:
            return f"{name} {word}"
        table, _, field = name.rpartition(".")
        if table == "data":  # the keyword of this name is data.files
            return f'**{{"{name}": {value}}}'
        return f'{table}={{"{field}": {value}}}' if table else f"{name}={value}"

    if text.startswith("unfreeze "):
        return text
    parts = _COMMAND.split(text)
    return "".join(part if i % 2 else _FLAG.sub(keyword, part) for i, part in enumerate(parts))
