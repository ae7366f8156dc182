"""Check an event against core/schema.py: `violations` when it is emitted, `damage` when it is read."""

import reprlib
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, NamedTuple

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from unfreeze.core.schema import FURTHER, KINDS, AnyText, Event, Real


class Violation(NamedTuple):
    """A fault in one field of an event.

    path    location, such as ("expert_balance", "1", "dead"); empty if the kind itself is unknown
    why     pydantic's error type: "missing", "extra_forbidden", "int_type", …
    words   "train.loss is '2.5': Input should be a valid number"
    """

    path: tuple[int | str, ...]
    why: str
    words: str

    @property
    def absent(self) -> bool:
        """True if the whole field is missing; readers can do without it."""
        return self.why == "missing" and len(self.path) == 1


def violations(event: Mapping[str, Any]) -> list[Violation]:
    """Return the faults of an event to emit; [] if it conforms."""
    kind, fields, further = event.get("kind"), event, {}
    if kind in FURTHER and (names := event.keys() - KINDS[kind].__annotations__.keys()):
        fields = {name: value for name, value in event.items() if name not in names}
        further = {name: event[name] for name in names}
    known, further_checker = _checkers()
    faults = _found(known, fields)
    return faults + _found(further_checker, further, str(kind)) if further else faults


def damage(event: Mapping[str, Any]) -> list[Violation]:
    """Return the faults of an event that was read: values of another type than in the schema.

    Missing fields, further fields and unknown kinds are no faults: another version may have written them.
    """
    fields: dict[str, object] = KINDS[event["kind"]].__annotations__ if event["kind"] in KINDS else {}
    return [
        fault
        for fault in violations(event)
        if fault.path and fault.path[0] in fields and fault.why != "extra_forbidden" and not fault.absent
    ]


@cache
def _checkers() -> tuple[TypeAdapter[Any], TypeAdapter[Any]]:
    """Return the validators (of events, of further fields). Made on first use, because that takes 30 ms."""
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
    """Make a Violation. path starts with the kind."""
    missing = error["type"] == "missing"
    words = "missing" if missing else f"{reprlib.repr(error['input'])}: {error['msg']}"
    return Violation(path[1:], error["type"], f"{'.'.join(map(str, path)) or 'the event'} is {words}")
