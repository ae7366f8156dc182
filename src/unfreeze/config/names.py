"""A field's two spellings: its flat name, and its place in a table.

    learning_rate             flat name: flags, help, errors, records
    optimizer.learning_rate   place: TOML and code

`FLAT` of a Config says which flat name stands for which place. A field that FLAT doesn't list has one
spelling, its place. `MOVED` says where a field stands now that earlier files have in another table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, cast, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from unfreeze.config.columns import AsTable
from unfreeze.config.synonyms import field_hint, field_next
from unfreeze.core.errors import ConfigError

Check = Callable[[str, FieldInfo, Any], Any]
"""(as written, the field, its value) -> the value, or a ConfigError."""


def leaves(config: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """(place, field) of every field that holds a value: ("optimizer.learning_rate", …)."""
    for name, info in config.model_fields.items():
        table = table_in(info.annotation)
        if table is None:
            yield prefix + name, info
        else:
            yield from leaves(table, f"{prefix}{name}.")


def table_in(annotation: Any) -> type[BaseModel] | None:
    """The table in an annotation such as `LoraConfig` or `LoraConfig | None`."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


@cache
def places(config: type[BaseModel]) -> dict[str, str]:
    """Flat name -> place, in the order of FLAT."""
    all_places = [place for place, _ in leaves(config)]
    flat: Mapping[str, str] = getattr(config, "FLAT", {})
    named = {name: place for name, place in flat.items() if place in all_places}
    return named | {place: place for place in all_places if place not in named.values()}


def flat_name(config: type[BaseModel], place: str) -> str:
    """The flat name of a place; a place that has none is returned as it is."""
    return next((name for name, other in places(config).items() if other == place), place)


def by_place(
    config: type[BaseModel],
    given: Mapping[str, Any],
    where: str,
    check: Check = lambda written, info, value: value,
) -> dict[str, Any]:
    """{field in either spelling: value} -> {place: value}.

    A table may be a mapping or a Config. Of a Config only the fields that were set are taken.
    Raises ConfigError for an unknown key, a table where a value belongs (and the reverse), and for two
    spellings of one field whose values differ.
    """
    infos = dict(leaves(config))
    found: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    for written, place, raw in _written(config, given, where):
        if place not in infos:  # a table that is empty, or None
            found.setdefault(place, raw)
            continue
        if isinstance(raw, Mapping) and not any(isinstance(mark, AsTable) for mark in infos[place].metadata):
            raise ConfigError(f"{where}: {written} is a table; it should be a value", next="mend the key")
        value = check(written, infos[place], raw)
        if place in spelled and found[place] != value:
            first = f"{spelled[place]} = {found[place]!r:.60}"
            raise ConfigError(
                f"{where}: {first} and {written} = {value!r:.60} are one field with two values",
                next=f"give {spelled[place]} or {written}",
            )
        found[place], spelled[place] = value, written
    return found


def _written(config: type[BaseModel], given: Mapping[str, Any], where: str) -> Iterator[tuple[str, str, Any]]:
    """(as written, place, value) of each entry of `given`."""
    known = places(config)
    tables = {name: made for name, info in config.model_fields.items() if (made := table_in(info.annotation))}
    for key, value in given.items():
        name = key.replace("-", "_")
        if name in tables and isinstance(value, BaseModel):
            value = {field: getattr(value, field) for field in value.model_fields_set}
        if name in tables and isinstance(value, Mapping):
            inner = cast(Mapping[str, Any], value)
            if not inner:
                yield key, name, {}
            for field, of in inner.items():
                own = field.replace("-", "_")
                if (moved := getattr(config, "MOVED", {}).get(f"{name}.{own}")) is not None:
                    yield f"{key}.{field}", moved, of
                    continue
                if own not in tables[name].model_fields:
                    hint = _hint(config, field, list(tables[name].model_fields), inside=True)
                    raise ConfigError(
                        f"{where}: unknown key {key}.{field}{hint}",
                        next=field_next(field, "mend or remove the key"),
                    )
                yield f"{key}.{field}", f"{name}.{own}", of
        elif name in known or name in known.values():
            yield key, known.get(name, name), value
        elif name in tables and value is None:
            yield key, name, None
        elif name in tables and not (hint := field_hint(key, ())):
            raise ConfigError(
                f"{where}: {key} = {value!r:.60} should be a table [{key}]", next="mend the key"
            )
        else:
            hint = _hint(config, key, [*known, *tables])
            raise ConfigError(
                f"{where}: unknown key {key}{hint}", next=field_next(key, "mend or remove the key")
            )


def _hint(config: type[BaseModel], key: str, known: list[str], *, inside: bool = False) -> str:
    """The end of an error about an unknown key: the place it belongs to, our name for it, or the nearest key.

    inside: within a table, where a field is named by its place.
    """
    name, at = key.replace("-", "_"), places(config)
    home = at.get(name)
    if home is None and name not in config.model_fields:  # a table's own name is sent into no other table
        home = next((place for place in at.values() if place.endswith(f".{name}")), None)
    if home:
        table = home.rpartition(".")[0]
        return f"; it stands in [{table}]: {home}" if table else f"; it stands above the tables: {home}"
    return field_hint(key, known, at if inside else {})


def nested(fields: Mapping[str, Any]) -> dict[str, Any]:
    """{"optimizer.clip": 1.0} -> {"optimizer": {"clip": 1.0}}."""
    made: dict[str, Any] = {}
    for place, value in fields.items():
        table, _, name = place.rpartition(".")
        if table:
            made.setdefault(table, {})[name] = value
        elif value == {}:
            made.setdefault(name, {})
        else:
            made[name] = value
    return made


def flat(config: BaseModel) -> dict[str, Any]:
    """Every field by its flat name, as JSON values; a table whose fields have no flat names stays a table."""
    dumped, made = config.model_dump(mode="json"), dict[str, Any]()
    for name, place in places(type(config)).items():
        table, _, field = place.rpartition(".")
        if not table:
            made[name] = dumped[field]
        elif "." in name:
            inner = dumped[table]
            made[table] = inner if inner is None else {**made.get(table, {}), field: inner[field]}
        else:
            made[name] = dumped[table][field]
    return made


def given(config: BaseModel) -> list[str]:
    """The flat names of the fields that are not at their default: the same flags make the same run again."""
    infos, names = dict(leaves(type(config))), dict[str, None]()
    for name, place in places(type(config)).items():
        table, _, field = place.rpartition(".")
        holder, info = getattr(config, table) if table else config, infos[place]
        if holder is None:  # no such table in this run
            names[table] = None
        elif info.is_required() or getattr(holder, field) != info.get_default(call_default_factory=True):
            names[name] = None
    return list(names)
