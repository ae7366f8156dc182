"""A remedy written in flags, as a caller in Python writes it."""

from __future__ import annotations

import json
import re

from pydantic import BaseModel

from unfreeze.config.names import leaves, places
from unfreeze.config.words import expected

_FLAG = re.compile(r"(?<!\S)--([a-z][a-z_.-]*)(?: (\d[\d,]*\d(?=\W|$)|[^\s,;:]+(?:,[^\s,;:]+=[^\s,;:]+)*))?")
"""--flag, and the word after it: one value, or FIELD=COLUMN pairs with commas."""
_COMMAND = re.compile(r"(\bunfreeze [a-z]+ [^,;:()]*)")
"""A command to type within a text, up to the next comma, colon or bracket."""


def in_python(config: type[BaseModel], text: str) -> str:
    """`--columns prompt=q` -> `columns={"prompt": "q"}`, `--steps 5 or more` -> `steps=5 or more`.

    A word that is no value of the flag stays beside it: `--sequence-length higher` -> `sequence_length
    higher`. What is no flag of `config`, or part of a command to type, is left as it is.
    """
    infos, at = dict(leaves(config)), places(config)

    def keyword(found: re.Match[str]) -> str:
        flag, word = found[1], found[2]
        name = flag.replace("-", "_")
        place = at.get(name, name)
        if place not in infos:
            return found[0]
        name = name.removeprefix("lora.")
        if word is None:
            return name
        pairs = [pair.partition("=") for pair in word.strip("'").split(",")]
        if name == "columns" and all(all(pair) for pair in pairs):
            return f"{name}={json.dumps({field: column for field, _, column in pairs})}"
        if re.fullmatch(r"-?[\d.,]*\d(e-?\d+)?", word):
            return f"{name}={word.replace(',', '')}"
        choices = expected(infos[place].annotation).removeprefix("one of ").split(", ")
        if word in choices or word.isupper() or (name == "device" and word in ("cpu", "cuda")):
            return f'{name}="{word}"'
        return f"{name} {word}"

    if text.startswith("unfreeze "):
        return text
    parts = _COMMAND.split(text)
    return "".join(part if i % 2 else _FLAG.sub(keyword, part) for i, part in enumerate(parts))
