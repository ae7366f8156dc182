"""Names of config fields. The dotted name is the same in TOML, flags, Python, errors and records.

    optimizer.learning_rate   [optimizer] learning_rate = 1, --optimizer.learning-rate 1
    learning_rate             its alias; a dozen frequent fields have one
    weight_decay              name in earlier versions of optimizer.weight_decay; still works, with a note

All three are declared at the field (core/field.py). Everywhere else a field has its dotted name.
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
"""(name as written, the field, its value) -> the checked value, or raises ConfigError."""


class Known(NamedTuple):
    """A field: dotted name, attribute path (mostly the same), pydantic info, and our own facts."""

    name: str
    path: str
    info: FieldInfo
    about: About

    @property
    def short(self) -> str:
        """The alias, or the dotted name if it has none."""
        return self.about.alias or self.name


def _leaves(config: type[BaseModel], prefix: str = "") -> Iterator[Known]:
    for name, info in config.model_fields.items():
        table = table_in(info.annotation)
        if table is not None:
            yield from _leaves(table, f"{prefix}{name}.")
            continue
        # a field redeclared with another default is described at its first declaration
        declared = (base.model_fields.get(name) for base in config.__mro__ if issubclass(base, BaseModel))
        own = next((about_field for each in declared if each and (about_field := about_of(each))), About())
        yield Known(own.name or prefix + name, prefix + name, info, own)


@cache
def fields(config: type[BaseModel]) -> dict[str, Known]:
    """Return dotted name -> field for every field with a value, in the order of declaration."""
    return {known.name: known for known in _leaves(config)}


def table_in(annotation: Any) -> type[BaseModel] | None:
    """Return the table in an annotation such as `LoraConfig` or `LoraConfig | None`."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


@cache
def spellings(config: type[BaseModel]) -> dict[str, str]:
    """Return every current name, dotted or alias -> the dotted name."""
    known = fields(config)
    return {name: name for name in known} | {of.short: name for name, of in known.items()}


@cache
def earlier(config: type[BaseModel]) -> dict[str, str]:
    """Return every name of earlier versions -> the current dotted name."""
    was = {word: name for name, of in fields(config).items() for word in of.about.was.split()}
    return {word: name for word, name in was.items() if word not in spellings(config)}


def name_of(config: type[BaseModel], written: str) -> str:
    """Return the dotted name for any spelling, with "-" or "_". An unknown name is returned unchanged."""
    plain = written.replace("-", "_")
    return spellings(config).get(plain) or earlier(config).get(plain) or written


def short_name(config: type[BaseModel], path: str) -> str:
    """Return the name used in messages for the field at this path. An unknown path is returned unchanged."""
    return next((known.short for known in fields(config).values() if known.path == path), path)


def by_path(
    config: type[BaseModel],
    values: Mapping[str, Any],
    where: str,
    check: Check = lambda written, info, value: value,
    renamed: MutableMapping[str, str] | None = None,
) -> dict[str, Any]:
    """Convert {field in any spelling: value} to {attribute path: value}.

    A table can be a mapping or a Config; of a Config, only the fields that were set are used.
    renamed: receives {as written: dotted name} for names of earlier versions.
    Raises ConfigError for an unknown key, a table in place of a value (or the reverse), and two spellings of
    one field.
    """
    known = fields(config)
    by_attribute: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    for written, name, raw in _written(config, values, where):
        if name not in known:  # an empty table, or None
            by_attribute.setdefault(name, raw)
            continue
        path, info = known[name].path, known[name].info
        if isinstance(raw, Mapping) and not any(isinstance(mark, AsTable) for mark in info.metadata):
            raise ConfigError(f"{where}: {written} is a table; it should be a value", next="correct the key")
        if name in spelled:
            raise ConfigError(
                f"{where}: {spelled[name]} and {written} are one field, given twice",
                next=f"give {known[name].short} alone",
            )
        by_attribute[path], spelled[name] = check(written, info, raw), written
        if renamed is not None and written.replace("-", "_") in earlier(config):
            renamed[written] = name
    return by_attribute


def _written(
    config: type[BaseModel], values: Mapping[str, Any], where: str
) -> Iterator[tuple[str, str, Any]]:
    """Yield (as written, dotted name, value) of each entry of `values`."""
    every = earlier(config) | spellings(config)
    tables = {
        name: table for name, info in config.model_fields.items() if (table := table_in(info.annotation))
    }
    for key, value in values.items():
        name = key.replace("-", "_")
        if name in tables and isinstance(value, BaseModel):
            value = {field: getattr(value, field) for field in value.model_fields_set}
        if name in tables and isinstance(value, Mapping):
            inner = _gathered(tables[name], cast(Mapping[str, Any], value), every, name)
            if not inner:
                yield key, name, {}
            for field, of in inner.items():
                own = every.get(f"{name}.{field.replace('-', '_')}")
                if own is None:
                    hint = _hint(config, field, list(tables[name].model_fields), inside=True)
                    raise ConfigError(
                        f"{where}: unknown key {key}.{field}{hint}",
                        next=field_next(field, "correct or remove the key"),
                    )
                yield f"{key}.{field}", own, of
        elif name in every:
            yield key, every[name], value
        elif name in tables and value is None:
            yield key, name, None
        elif name in tables and not field_hint(key, ()):
            raise ConfigError(
                f"{where}: {key} = {value!r:.60} should be a table [{key}]", next="correct the key"
            )
        else:
            hint = _hint(config, key, [*spellings(config), *tables])
            raise ConfigError(
                f"{where}: unknown key {key}{hint}", next=field_next(key, "correct or remove the key")
            )


def _gathered(
    table: type[BaseModel], inner: Mapping[str, Any], every: Mapping[str, str], name: str
) -> Mapping[str, Any]:
    """Move the keys that a table does not know into its field REST, if it has one ([shape] does)."""
    rest: str = getattr(table, "REST", "")
    strange = [key for key in inner if every.get(f"{name}.{key.replace('-', '_')}") is None]
    if not rest or not strange or not isinstance(inner.get(rest, {}), Mapping):
        return inner
    known = {key: of for key, of in inner.items() if key not in strange}
    return known | {rest: {**inner.get(rest, {}), **{key.replace("-", "_"): inner[key] for key in strange}}}


def _hint(config: type[BaseModel], key: str, near: list[str], *, inside: bool = False) -> str:
    """End of an error about an unknown key: its table, our name for it, or the nearest name.

    inside: True within a table, where fields have their dotted names.
    """
    plain, there = key.replace("-", "_"), fields(config)
    home = (earlier(config) | spellings(config)).get(plain)
    # a table's own name is never looked up in another table
    if home is None and plain not in config.model_fields:
        home = next((name for name in there if name.endswith(f".{plain}")), None)
    if home:
        table = home.rpartition(".")[0]
        return f"; it belongs in [{table}]: {home}" if table else f"; it belongs above the tables: {home}"
    return field_hint(key, near, spellings(config) if inside else {})


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Nest dotted names: {"optimizer.clip": 1.0} -> {"optimizer": {"clip": 1.0}}."""
    tables: dict[str, Any] = {}
    for path, value in values.items():
        table, _, name = path.rpartition(".")
        if table:
            tables.setdefault(table, {})[name] = value
        elif value == {}:
            tables.setdefault(name, {})
        else:
            tables[name] = value
    return tables


def flat(config: BaseModel) -> dict[str, Any]:
    """Return every field by its dotted name, as JSON values. A missing table gives table -> None."""
    dumped, values = config.model_dump(mode="json"), dict[str, Any]()
    for name, known in fields(type(config)).items():
        table, _, field = known.path.rpartition(".")
        if table and dumped[table] is None:
            values[table] = None
        else:
            values[name] = dumped[table][field] if table else dumped[field]
    return values


def given(config: BaseModel) -> list[str]:
    """Names of the fields that are not at their default; these flags repeat the run."""
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
    """Convert a run's record of any version to current dotted names. Unknown keys are unchanged."""
    renamed: dict[str, Any] = {}
    for key, value in record.items():
        if isinstance(value, Mapping) and key in config.model_fields and key not in fields(config):
            inner = cast(Mapping[str, Any], value)
            renamed |= {name_of(config, f"{key}.{field}"): of for field, of in inner.items()}
        else:
            renamed[name_of(config, key)] = value
    return renamed
