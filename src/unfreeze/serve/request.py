"""The body of POST /v1/chat/completions, checked; and errors in OpenAI's shape.

Fields that would change the answer in a way that is not built are refused by name, never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from unfreeze.core.errors import DataError, UserError, nearest
from unfreeze.data.rows.messages import read_messages, tools_of
from unfreeze.data.rows.row import Message, Tool
from unfreeze.untrusted.json_object import parse_object

MAX_BODY = 8_000_000  # bytes
MAX_N = 128  # answers to a request, as OpenAI has it
MAX_STOPS = 4
MAX_TOP = 20  # top_logprobs
MAX_TOKENS = 2**31 - 1  # asked for; the model's window is the limit that counts


class Refused(UserError):
    """A request without an answer.

    status  of HTTP
    param   the field at fault
    code    OpenAI's word for the reason
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        """The error as OpenAI's clients read it."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


class Fields(BaseModel):
    """Fields of a request by OpenAI's names. Those in the second part may have the one value only."""

    model_config = ConfigDict(extra="forbid", strict=True)

    messages: Annotated[list[Any], Field(min_length=1)]
    model: str | None = None
    tools: list[Any] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: str | Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=MAX_STOPS)] | None = (
        None
    )
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP)] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None

    # accepted as they do nothing here
    user: str | None = None
    store: Literal[False] | None = None
    metadata: dict[str, Any] | None = None
    parallel_tool_calls: Literal[True] | None = None
    presence_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    frequency_penalty: Annotated[float, Field(ge=0, le=0)] | None = None
    logit_bias: Annotated[dict[str, Any], Field(max_length=0)] | None = None
    response_format: dict[Literal["type"], Literal["text"]] | None = None

    @model_validator(mode="after")
    def _agrees(self) -> Fields:
        if self.max_tokens and self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens are both there; keep the second")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs = true")
        return self


class Chat:
    """A checked request.

    messages, tools  as rows have them
    new_tokens       most tokens of an answer; None: as many as fit
    temperature, top_p, seed   None if the request leaves them out
    top              likeliest tokens listed at each place; None: no log-probabilities
    usage            a stream ends with the number of tokens
    """

    def __init__(self, fields: Fields):
        self.messages, self.tools = _messages(fields), _tools(fields)
        self.model = fields.model
        self.new_tokens = fields.max_completion_tokens or fields.max_tokens
        self.temperature, self.top_p, self.seed = fields.temperature, fields.top_p, fields.seed
        self.n = fields.n or 1
        stop = fields.stop or ()
        self.stop = (stop,) if isinstance(stop, str) else tuple(stop)
        self.top = fields.top_logprobs or 0 if fields.logprobs else None
        self.stream = bool(fields.stream)
        self.usage = bool((fields.stream_options or {}).get("include_usage"))


def read_chat(raw: bytes) -> Chat:
    """Check a body. Raises Refused, which names the field."""
    try:
        body = parse_object(raw, "the body", UserError)
    except UserError as error:
        raise Refused(400, error.message) from None
    try:
        return Chat(Fields.model_validate(body))
    except ValidationError as error:
        raise _refused(error, body) from None


def _refused(error: ValidationError, body: Mapping[str, Any]) -> Refused:
    """Return the first field's fault in words; of several forms of a field, that of the nearest."""
    faults = error.errors(include_url=False, include_input=False)
    first = max(
        (each for each in faults if each["loc"][:1] == faults[0]["loc"][:1]),
        key=lambda each: len(each["loc"]),
    )
    name = str(first["loc"][0]) if first["loc"] else None
    if first["type"] == "extra_forbidden" and name:
        known = nearest(name, Fields.model_fields)
        return Refused(400, f"{name}: this field is not known here{known}", param=name)
    words = first["msg"].removeprefix("Value error, ")
    value = f" (it is {str(body[name])[:40]!r})" if name and name != "messages" and name in body else ""
    return Refused(400, f"{name}: {words}{value}" if name else words, param=name)


def _messages(fields: Fields) -> list[Message]:
    try:
        wrong = next((i for i, each in enumerate(fields.messages) if not isinstance(each, dict)), None)
        if wrong is not None:
            raise DataError(f"messages[{wrong}] is not an object")
        as_system = [  # OpenAI's newer name
            {**each, "role": "system"} if each.get("role") == "developer" else each
            for each in fields.messages
        ]
        return read_messages(as_system)
    except DataError as error:
        raise Refused(400, error.message, param="messages") from None


def _tools(fields: Fields) -> list[Tool] | None:
    if not fields.tools or fields.tool_choice == "none":
        return None
    try:
        return tools_of({"tools": fields.tools}, 0)
    except DataError as error:
        raise Refused(400, error.message.removeprefix("row 0: "), param="tools") from None
