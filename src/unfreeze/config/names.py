"""A field's name: dotted, one for TOML, flags, Python, errors and records.

    optimizer.learning_rate   [optimizer] learning_rate = 1, --optimizer.learning-rate 1
    learning_rate             its alias; a dozen fields that people type daily have one
    weight_decay              of earlier versions: optimizer.weight_decay; it still runs, with a note

All three are declared at the field (core/field.py). Everywhere else a field is called by its dotted name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import cache
from typing import Any, NamedTuple, cast, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from unfreeze.config.columns import AsTable
from unfreeze.config.synonyms import field_hint, field_next
from unfreeze.core.errors import ConfigError
from unfreeze.core.field import About, about_of

Check = Callable[[str, FieldInfo, Any], Any]
"""(as written, the field, its value) -> the value, or a ConfigError."""


class Known(NamedTuple):
    """A field: its dotted name, the way to its attribute (mostly the same), and what stands at it."""

    name: str
    path: str
    info: FieldInfo
    about: About

    @property
    def short(self) -> str:
        """Its alias; its dotted name where it has none."""
        return self.about.alias or self.name


def _leaves(config: type[BaseModel], prefix: str = "") -> Iterator[Known]:
    for name, info in config.model_fields.items():
        table = table_in(info.annotation)
        if table is not None:
            yield from _leaves(table, f"{prefix}{name}.")
            continue
        # one that is declared again, with another default, is described where it is declared first
        declared = (base.model_fields.get(name) for base in config.__mro__ if issubclass(base, BaseModel))
        said = next((found for each in declared if each and (found := about_of(each))), About())
        yield Known(said.name or prefix + name, prefix + name, info, said)


@cache
def fields(config: type[BaseModel]) -> dict[str, Known]:
    """Dotted name -> field, of every field that holds a value, in the order of declaration."""
    return {known.name: known for known in _leaves(config)}


def table_in(annotation: Any) -> type[BaseModel] | None:
    """The table in an annotation such as `LoraConfig` or `LoraConfig | None`."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


@cache
def spellings(config: type[BaseModel]) -> dict[str, str]:
    """Every name that is valid today, dotted or alias -> the dotted name."""
    known = fields(config)
    return {name: name for name in known} | {of.short: name for name, of in known.items()}


@cache
def earlier(config: type[BaseModel]) -> dict[str, str]:
    """Every name of earlier versions -> the dotted name of today."""
    was = {word: name for name, of in fields(config).items() for word in of.about.was.split()}
    return {word: name for word, name in was.items() if word not in spellings(config)}


def name_of(config: type[BaseModel], written: str) -> str:
    """The dotted name for any spelling, with "-" or "_"; what is none is returned as it is."""
    plain = written.replace("-", "_")
    return spellings(config).get(plain) or earlier(config).get(plain) or written


def short_name(config: type[BaseModel], path: str) -> str:
    """How messages call the field with this attribute; what is no field's is returned as it is."""
    return next((known.short for known in fields(config).values() if known.path == path), path)


def by_path(
    config: type[BaseModel],
    given: Mapping[str, Any],
    where: str,
    check: Check = lambda written, info, value: value,
    renamed: MutableMapping[str, str] | None = None,
) -> dict[str, Any]:
    """{field in any spelling: value} -> {path of its attribute: value}.

    A table may be a mapping or a Config. Of a Config only the fields that were set are taken.
    renamed: gets {as written: dotted name} of those in a spelling of earlier versions.
    Raises ConfigError for an unknown key, a table where a value belongs (and the reverse), and for two
    spellings of one field.
    """
    known = fields(config)
    found: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    for written, name, raw in _written(config, given, where):
        if name not in known:  # a table that is empty, or None
            found.setdefault(name, raw)
            continue
        path, info = known[name].path, known[name].info
        if isinstance(raw, Mapping) and not any(isinstance(mark, AsTable) for mark in info.metadata):
            raise ConfigError(f"{where}: {written} is a table; it should be a value", next="mend the key")
        if name in spelled:
            raise ConfigError(
                f"{where}: {spelled[name]} and {written} are one field, given twice",
                next=f"give {known[name].short} alone",
            )
        found[path], spelled[name] = check(written, info, raw), written
        if renamed is not None and written.replace("-", "_") in earlier(config):
            renamed[written] = name
    return found


def _written(config: type[BaseModel], given: Mapping[str, Any], where: str) -> Iterator[tuple[str, str, Any]]:
    """(as written, dotted name, value) of each entry of `given`."""
    every = earlier(config) | spellings(config)
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
                own = every.get(f"{name}.{field.replace('-', '_')}")
                if own is None:
                    hint = _hint(config, field, list(tables[name].model_fields), inside=True)
                    raise ConfigError(
                        f"{where}: unknown key {key}.{field}{hint}",
                        next=field_next(field, "mend or remove the key"),
                    )
                yield f"{key}.{field}", own, of
        elif name in every:
            yield key, every[name], value
        elif name in tables and value is None:
            yield key, name, None
        elif name in tables and not field_hint(key, ()):
            raise ConfigError(
                f"{where}: {key} = {value!r:.60} should be a table [{key}]", next="mend the key"
            )
        else:
            hint = _hint(config, key, [*spellings(config), *tables])
            raise ConfigError(
                f"{where}: unknown key {key}{hint}", next=field_next(key, "mend or remove the key")
            )


def _hint(config: type[BaseModel], key: str, near: list[str], *, inside: bool = False) -> str:
    """The end of an error about an unknown key: the table it belongs to, our name for it, or the nearest.

    inside: within a table, where a field is called by its dotted name.
    """
    plain, there = key.replace("-", "_"), fields(config)
    home = (earlier(config) | spellings(config)).get(plain)
    if home is None and plain not in config.model_fields:  # a table's own name is sent into no other table
        home = next((name for name in there if name.endswith(f".{plain}")), None)
    if home:
        table = home.rpartition(".")[0]
        return f"; it stands in [{table}]: {home}" if table else f"; it stands above the tables: {home}"
    return field_hint(key, near, spellings(config) if inside else {})


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """{"optimizer.clip": 1.0} -> {"optimizer": {"clip": 1.0}}."""
    made: dict[str, Any] = {}
    for path, value in values.items():
        table, _, name = path.rpartition(".")
        if table:
            made.setdefault(table, {})[name] = value
        elif value == {}:
            made.setdefault(name, {})
        else:
            made[name] = value
    return made


def flat(config: BaseModel) -> dict[str, Any]:
    """Every field by its dotted name, as JSON values. Of a table that this run has not: table -> None."""
    dumped, made = config.model_dump(mode="json"), dict[str, Any]()
    for name, known in fields(type(config)).items():
        table, _, field = known.path.rpartition(".")
        if table and dumped[table] is None:
            made[table] = None
        else:
            made[name] = dumped[table][field] if table else dumped[field]
    return made


def given(config: BaseModel) -> list[str]:
    """The names of the fields that are not at their default: the same flags make the same run again."""
    names = dict[str, None]()
    for name, known in fields(type(config)).items():
        table, _, field = known.path.rpartition(".")
        holder, info = getattr(config, table) if table else config, known.info
        if holder is None:  # no such table in this run
            names[table] = None
        elif info.is_required() or getattr(holder, field) != info.get_default(call_default_factory=True):
            names[name] = None
    return list(names)


def of_today(config: type[BaseModel], record: Mapping[str, Any]) -> dict[str, Any]:
    """A run's record of any version -> by the dotted names of today; what is no field is kept as it is."""
    made: dict[str, Any] = {}
    for key, value in record.items():
        if isinstance(value, Mapping) and key in config.model_fields and key not in fields(config):
            inner = cast(Mapping[str, Any], value)
            made |= {name_of(config, f"{key}.{field}"): of for field, of in inner.items()}
        else:
            made[name_of(config, key)] = value
    return made
