"""The JSON schema of a tool, made from a typed method and its docstring in Google's form.

The form is that of transformers' get_json_schema, which chat templates are written for:

    def add(self, a: int, b: int = 0) -> int:
        '''Add two numbers.

        Args:
            a: the first
            b: the second (choices: [1, 2])
        '''
"""

from __future__ import annotations

import inspect
import json
import re
import types
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from unfreeze.core.errors import ConfigError

SCALARS: dict[type, str] = {
    int: "integer",
    float: "number",
    str: "string",
    bool: "boolean",
    type(None): "null",
}
PLAIN: dict[Any, dict[str, Any]] = {
    **{kind: {"type": name} for kind, name in SCALARS.items()},
    list: {"type": "array"},
    tuple: {"type": "array"},
    dict: {"type": "object"},
    Any: {},
}
CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE)
ENTRY = re.compile(r"([ \t]*)(\w+):\s*(.*)")
HEADINGS = ("Args:", "Returns:", "Raises:")


class Unwritable(Exception):
    """A type that JSON schema has no form for."""


def tool_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """Return {"type": "function", "function": {name, description, parameters, return?}}.

    Raises ConfigError if a docstring, a type or the description of an argument is missing.
    """
    name = function.__name__
    document = (inspect.getdoc(function) or "").strip()
    if not document:
        raise _refusal(name, "has no docstring, which tells the model what it does")
    sections = _sections(document)
    described = _entries(sections.get("Args:", []))
    try:
        hints = get_type_hints(function)
        result = hints.pop("return", None)
    except (NameError, TypeError) as error:
        raise _refusal(name, f"has a type that cannot be read: {error}") from None
    properties: dict[str, Any] = {}
    required: list[str] = []
    for place, parameter in enumerate(inspect.signature(function).parameters.values()):
        key = parameter.name
        if place == 0 and key in ("self", "cls") and key not in hints:
            continue
        if key not in hints:
            raise _refusal(name, f"has no type for its argument {key!r}")
        if key not in described:
            raise _refusal(name, f"does not describe its argument {key!r} under Args: in its docstring")
        try:
            properties[key] = _with_choices(type_schema(hints[key]), described[key])
        except (Unwritable, ValueError) as error:
            raise _refusal(name, f"has an argument {key!r} that JSON cannot write: {error}") from None
        if parameter.default is inspect.Parameter.empty:
            required.append(key)
    parameters = {"type": "object", "properties": properties, **({"required": required} if required else {})}
    schema: dict[str, Any] = {"name": name, "description": sections[""], "parameters": parameters}
    if "return" in get_type_hints(function):
        try:
            schema["return"] = type_schema(type(None) if result is None else result)
            if lines := sections.get("Returns:"):
                schema["return"]["description"] = "\n".join(lines).strip()
        except Unwritable:  # the model never writes it
            pass
    return {"type": "function", "function": schema}


def _refusal(name: str, what: str) -> ConfigError:
    return ConfigError(
        f"tool {name} {what}", next=f'def {name}(self, text: str) -> str: """…""" with Args: text: …'
    )


def type_schema(hint: Any) -> dict[str, Any]:
    """Return the schema of a type. Raises Unwritable."""
    origin: Any = get_origin(hint)
    inner: Sequence[Any] = get_args(hint)
    if origin is None:
        if isinstance(hint, type) and issubclass(hint, Enum):
            return _enum([member.value for member in hint])
        try:
            return dict(PLAIN[hint])
        except (KeyError, TypeError):
            raise Unwritable(f"{hint!r}") from None
    if origin in (Union, types.UnionType):
        return _union(inner)
    if origin is Literal:
        return _enum(list(inner))
    if origin in (list, tuple, dict) and not inner:  # List, Tuple and Dict of typing, bare
        return dict(PLAIN[origin])
    if origin is list:
        return {"type": "array", "items": type_schema(inner[0])}
    if origin is tuple and len(inner) > 1 and ... not in inner:
        return {"type": "array", "prefixItems": [type_schema(each) for each in inner]}
    if origin is dict and len(inner) == 2:
        return {"type": "object", "additionalProperties": type_schema(inner[1])}
    raise Unwritable(f"{hint}")


def _enum(values: Sequence[Any]) -> dict[str, Any]:
    if not values or any(type(value) not in SCALARS for value in values):
        raise Unwritable(f"choices {list(values)}")
    names = list(dict.fromkeys(SCALARS[type(value)] for value in values))
    return {"type": names[0] if len(names) == 1 else names, "enum": list(values)}


def _union(inner: Sequence[Any]) -> dict[str, Any]:
    """Several types: a list of names if that says all, else anyOf; None makes it nullable."""
    schemas = [type_schema(each) for each in inner if each is not type(None)]
    if len(schemas) == 1:
        schema = schemas[0]
    elif all(each.keys() == {"type"} for each in schemas):
        names = sorted({each["type"] for each in schemas})
        schema = {"type": names[0] if len(names) == 1 else names}
    else:
        schema = {"anyOf": schemas}
    return {**schema, **({"nullable": True} if type(None) in inner else {})}


def _sections(document: str) -> dict[str, Any]:
    """Split a docstring: "" -> its description, a heading -> the lines below it."""
    sections: dict[str, Any] = {"": []}
    at = ""
    for line in document.split("\n"):
        if line.strip() in HEADINGS:
            at = line.strip()
            sections[at] = []
        else:
            sections[at].append(line)
    sections[""] = "\n".join(sections[""]).strip()
    return sections


def _entries(lines: Sequence[str]) -> dict[str, str]:
    """Return name -> description; a line that is indented deeper than its name continues it."""
    entries: dict[str, str] = {}
    name, indent = "", ""
    for line in filter(str.strip, lines):
        entry = ENTRY.match(line)
        if entry and not (name and entry[1].startswith(indent) and len(entry[1]) > len(indent)):
            indent, name = entry[1], entry[2]
            entries[name] = entry[3].strip()
        elif name:
            entries[name] = f"{entries[name]} {line.strip()}".strip()
    return entries


def _with_choices(schema: dict[str, Any], description: str) -> dict[str, Any]:
    choices = CHOICES.search(description)
    if choices is None:
        return {**schema, "description": description}
    values = [value.strip() if isinstance(value, str) else value for value in json.loads(choices[1])]
    return {**schema, "enum": values, "description": description[: choices.start()].strip()}
