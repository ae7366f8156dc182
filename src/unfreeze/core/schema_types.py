"""Types of event fields, and the fields that every event has (schema.py)."""

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field, InstanceOf, PlainValidator
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

AnyText = InstanceOf[str]  # any str: pydantic's own refuses lone surrogates, which a model can generate
Int = Annotated[int, Field(ge=-(2**63), lt=2**63)]
LARGEST = 1e300  # far above any measurement; a damaged file can hold 1.7e308, and twice that is infinite


def _real(value: object) -> float:
    """Validate a JSON number. pydantic's own float accepts a one-element tensor, which JSON cannot hold."""
    if isinstance(value, bool) or not isinstance(value, float | int):
        raise PydanticCustomError("float_type", "Input should be a valid number")
    if not abs(value) <= LARGEST:  # false for NaN
        raise PydanticCustomError("finite_number", "Input should be a finite number, at most 1e300")
    return value


Real = Annotated[float, PlainValidator(_real)]
Counts = Annotated[list[Annotated[Int, Field(ge=0)]], Field(min_length=1)]
When = Literal["before", "during", "after"]
PromptSource = Literal["your prompts", "training data", "held-out data"]


def of(unit: str, meaning: str = "") -> Any:
    """Annotate a field with its unit and meaning."""
    return Field(title=unit, description=meaning)


class CommonFields(TypedDict):
    """Fields of every event."""

    step: Annotated[Int, of("finished optimizer steps", "at the time of the event; 0 before the first")]
    time: Annotated[Real, of("seconds since 1970-01-01 UTC", "time of the event")]
    warning: NotRequired[
        Annotated[AnyText, of("sentence", "a deviation from the request, or something to know")]
    ]
