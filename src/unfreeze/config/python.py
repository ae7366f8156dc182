"""Rewrite a remedy with flags as Python keywords."""

from __future__ import annotations

import json
import re

from pydantic import BaseModel

from unfreeze.config.names import fields, spellings
from unfreeze.config.words import expected

_FLAG = re.compile(r"(?<!\S)--([a-z][a-z_.-]*)(?: (\d[\d,]*\d(?=\W|$)|[^\s,;:]+(?:,[^\s,;:]+=[^\s,;:]+)*))?")
"""--flag and the word after it: one value, or FIELD=COLUMN pairs separated by commas."""
_COMMAND = re.compile(r"(\bunfreeze [a-z]+ [^,;:()]*)")
"""A command in a text, up to the next comma, colon or bracket."""


def in_python(config: type[BaseModel], text: str) -> str:
    """Rewrite `--columns prompt=q` to `columns={"prompt": "q"}`, `--steps 5 or more` to `steps=5 or more`.

    `--optimizer.clip 1` -> `optimizer={"clip": 1}`.
    A word that is not a value of the flag stays beside it: `--sequence-length higher` -> `sequence_length
    higher`. Unknown flags and complete commands are unchanged.
    """
    known, names = fields(config), spellings(config)

    def keyword(match: re.Match[str]) -> str:
        written, word = match[1].replace("-", "_"), match[2]
        if written not in names:
            return match[0]
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
        if table == "data":  # the keyword `data` means data.files
            return f'**{{"{name}": {value}}}'
        return f'{table}={{"{field}": {value}}}' if table else f"{name}={value}"

    if text.startswith("unfreeze "):
        return text
    parts = _COMMAND.split(text)
    return "".join(part if i % 2 else _FLAG.sub(keyword, part) for i, part in enumerate(parts))
