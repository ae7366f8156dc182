"""Compare an event with core/schema.py: `violations` where it is emitted, `damage` where it is read."""

import reprlib
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, NamedTuple

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from unfreeze.core.schema import FURTHER, KINDS, AnyText, Event, Real


class Violation(NamedTuple):
    """What is wrong with one field of an event.

    path    where it stands: ("expert_balance", "1", "dead"); empty where the kind itself is unknown
    why     pydantic's name of it: "missing", "extra_forbidden", "int_type", …
    words   "train.loss is '2.5': Input should be a valid number"
    """

    path: tuple[int | str, ...]
    why: str
    words: str

    @property
    def absent(self) -> bool:
        """Whether the field is missing as a whole; a reader can do without it."""
        return self.why == "missing" and len(self.path) == 1


def violations(event: Mapping[str, Any]) -> list[Violation]:
    """What is wrong with an event that is emitted; [] if it conforms."""
    kind, fields, further = event.get("kind"), event, {}
    if kind in FURTHER and (names := event.keys() - KINDS[kind].__annotations__.keys()):
        fields = {name: value for name, value in event.items() if name not in names}
        further = {name: event[name] for name in names}
    known, others = _checkers()
    found = _found(known, fields)
    return found + _found(others, further, str(kind)) if further else found


def damage(event: Mapping[str, Any]) -> list[Violation]:
    """Say what is wrong with an event that is read: a value of another type than the schema says.

    Fewer fields, more fields, or an unknown kind are no damage: another version may have written them.
    """
    fields: dict[str, object] = KINDS[event["kind"]].__annotations__ if event["kind"] in KINDS else {}
    return [
        fault
        for fault in violations(event)
        if fault.path and fault.path[0] in fields and fault.why != "extra_forbidden" and not fault.absent
    ]


@cache
def _checkers() -> tuple[TypeAdapter[Any], TypeAdapter[Any]]:
    """Of an event, and of further fields. Made when first asked for: it takes 30 ms."""
    config = ConfigDict(strict=True, extra="forbid")
    event = TypeAdapter(Annotated[Event, Field(discriminator="kind")], config=config)
    return event, TypeAdapter(dict[AnyText, Real | None], config=config)


def _found(checker: TypeAdapter[Any], value: object, *prefix: str) -> list[Violation]:
    try:
        checker.validate_python(value)
    except ValidationError as error:
        return [_fault((*prefix, *one["loc"]), one) for one in error.errors(include_url=False)]
    return []


def _fault(path: tuple[int | str, ...], error: Mapping[str, Any]) -> Violation:
    """path begins with the kind."""
    missing = error["type"] == "missing"
    said = "missing" if missing else f"{reprlib.repr(error['input'])}: {error['msg']}"
    return Violation(path[1:], error["type"], f"{'.'.join(map(str, path)) or 'the event'} is {said}")
