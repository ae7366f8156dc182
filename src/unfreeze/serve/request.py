"""The body of POST /v1/chat/completions, checked; and errors in OpenAI's shape.

Fields that would change the answer in a way that is not built are refused by name, never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from unfreeze.core.errors import DataError, UserError, nearest
from unfreeze.data.rows.fields import half_surrogate
from unfreeze.data.rows.messages import MESSAGE_FIELDS, read_messages, tools_of
from unfreeze.data.rows.row import REASONING_NAMES, Message, Tool
from unfreeze.serve.wording import wording
from unfreeze.untrusted.json_object import parse_object

MAX_BODY = 8_000_000  # bytes
MAX_N = 128  # answers to a request, as OpenAI has it
MAX_STOPS = 16  # OpenAI has 4; lm-eval's tasks name more
MAX_TOP = 20  # top_logprobs
MAX_TOKENS = 2**31 - 1  # asked for; the model's window is the limit that counts
MAX_BIASES = 1024  # ids of logit_bias
ANSWERED = ("refusal", "audio", "annotations", "parsed", "type")
"""Fields of a message that OpenAI's answers have, that its Python client adds (parsed) or lm-eval (type).
They come back in the next request, and change nothing here."""

PART_FIELDS = ("type", "text", "annotations", "cache_control")
"""Fields of a part of a message's content. The last two change nothing here."""


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


Penalty = Annotated[float, Field(ge=-2, le=2)]


class Strict(BaseModel):
    """An object whose fields are all known and of their own type."""

    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(Strict):
    """Obfuscation pads events with random text; it is not built, so clients may only decline it."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class Sampled(Strict):
    """Fields that chat completions and completions share, by OpenAI's names.

    top_k, min_tokens and ignore_eos are vLLM's. Those in the last part may have the one value only.
    """

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOKENS)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: str | Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=MAX_STOPS)] | None = (
        None
    )
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: (
        Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_BIASES)] | None
    ) = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    # accepted as they do nothing here
    user: str | None = None

    @model_validator(mode="after")
    def _streams(self) -> Sampled:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream = true")
        return self


class Function(Strict):
    """The function of a tool_choice."""

    name: str


class Named(Strict):
    """The tool that an answer must call."""

    type: Literal["function"]
    function: Function


class Schema(Strict):
    """JSON schema of an answer. `strict` makes no difference: the answer always fits."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class Form(Strict):
    """A response_format."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Schema | None = None

    @model_validator(mode="after")
    def _agrees(self) -> Form:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema is for type = 'json_schema', and that needs it")
        return self


class Fields(Sampled):
    """Fields of a chat completion."""

    messages: Annotated[list[Any], Field(min_length=1)]
    tools: list[Any] | None = None
    tool_choice: Literal["auto", "none", "required"] | Named | None = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP)] | None = None
    response_format: Form | None = None

    # accepted as they do nothing here
    store: Literal[False] | None = None
    metadata: dict[str, Any] | None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None
    service_tier: Literal["auto", "default"] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    @model_validator(mode="after")
    def _agrees(self) -> Fields:
        if self.max_tokens and self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens are both there; keep the second")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs = true")
        return self


class Asking:
    """A checked request, the part that chat completions and completions share.

    new_tokens       most tokens of an answer; None: as many as fit
    temperature, top_p, top_k, seed   None if the request leaves them out
    bias             id -> number added to its logit
    presence, frequency   penalties for tokens that the answer already has: once, and for each time
    min_tokens       an answer ends by a stop id no earlier
    top              likeliest tokens listed at each place; None: no log-probabilities
    usage            a stream ends with the number of tokens
    """

    top: int | None

    def __init__(self, fields: Sampled):
        self.model = fields.model
        self.new_tokens = fields.max_tokens
        self.temperature, self.top_p, self.seed = fields.temperature, fields.top_p, fields.seed
        self.top_k = fields.top_k if fields.top_k and fields.top_k > 0 else None  # -1 and 0: all
        self.n = fields.n or 1
        stop = fields.stop or ()
        self.stop = (stop,) if isinstance(stop, str) else tuple(stop)
        if any(half_surrogate(each) for each in self.stop):
            raise Refused(400, "stop: half a surrogate pair is no character", param="stop")
        self.bias = _bias(fields.logit_bias)
        self.presence, self.frequency = fields.presence_penalty or 0.0, fields.frequency_penalty or 0.0
        self.min_tokens = MAX_TOKENS if fields.ignore_eos else fields.min_tokens or 0
        self.stream = bool(fields.stream)
        self.usage = bool(fields.stream_options and fields.stream_options.include_usage)

    def steered(self) -> str | None:
        """Return the first field by which tokens come from another distribution than the model's own."""
        fields = {
            "top_k": self.top_k,
            "logit_bias": self.bias,
            "presence_penalty": self.presence,
            "frequency_penalty": self.frequency,
            "min_tokens, ignore_eos": self.min_tokens,
        }
        return next((name for name, value in fields.items() if value), None)


class Chat(Asking):
    """A checked chat completion.

    messages, tools  as rows have them
    choice           "auto", "required", or the name of the tool that the answer calls
    one_call         the answer calls one tool at most
    schema           JSON schema of the answer; None: it is free
    """

    def __init__(self, fields: Fields):
        super().__init__(fields)
        self.messages, self.tools = _messages(fields), _tools(fields)
        self.new_tokens = fields.max_completion_tokens or fields.max_tokens
        self.top = fields.top_logprobs or 0 if fields.logprobs else None
        choice = fields.tool_choice
        self.choice = choice.function.name if isinstance(choice, Named) else choice or "auto"
        self.one_call = fields.parallel_tool_calls is False
        self.schema = _schema(fields.response_format)
        self._check_choice(fields)

    def _check_choice(self, fields: Fields) -> None:
        if self.choice in ("auto", "none"):
            return
        if not self.tools:
            raise Refused(400, f"tool_choice: {self.choice!r} needs tools", param="tool_choice")
        names = [each["function"]["name"] for each in self.tools]
        if isinstance(fields.tool_choice, Named) and self.choice not in names:
            words = f"tool_choice: there is no tool {self.choice!r}{nearest(self.choice, names)}"
            raise Refused(400, words, param="tool_choice")

    def steered(self) -> str | None:
        return super().steered() or next(
            (
                name
                for name, value in (
                    ("response_format", self.schema is not None),
                    ("tool_choice", bool(self.tools) and self.choice not in ("auto", "none")),
                    ("parallel_tool_calls", bool(self.tools) and self.one_call),
                )
                if value
            ),
            None,
        )


F = TypeVar("F", bound=BaseModel)


def read_chat(raw: bytes) -> Chat:
    """Check a body. Raises Refused, which names the field."""
    return Chat(read_fields(raw, Fields))


def read_fields(raw: bytes, form: type[F]) -> F:
    """Check a body by its fields. Raises Refused, which names the field."""
    if not raw.strip():
        raise Refused(400, "the body is empty; send a JSON object")
    try:
        raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        words = f"the body is not UTF-8: byte {raw[error.start]:#04x} at place {error.start:,}"
        raise Refused(400, words) from None
    try:
        body = parse_object(raw, "the body", UserError)
    except UserError as error:
        raise Refused(400, error.message) from None
    try:
        return form.model_validate(body)
    except ValidationError as error:
        words, name = wording(error, body, form)
        raise Refused(400, words, param=name) from None


def _bias(bias: Mapping[str, float] | None) -> dict[int, float]:
    """Return id -> number. Raises Refused for a key that is no id."""
    for name in bias or ():
        if not (name.isascii() and name.isdecimal()) or len(name) > 9:
            words = f"logit_bias: {name[:40]!r} is not a token id"
            raise Refused(400, words, param="logit_bias")
    return {int(name): value for name, value in (bias or {}).items() if value}


def _schema(form: Form | None) -> Any:
    if form is None or form.type == "text":
        return None
    return {"type": "object"} if form.json_schema is None else form.json_schema.schema_


def _messages(fields: Fields) -> list[Message]:
    return messages_of(fields.messages)


def messages_of(messages: list[Any]) -> list[Message]:
    """Check messages. Raises Refused, which names the place."""
    try:
        return read_messages([_spoken(each, f"messages[{i}]") for i, each in enumerate(messages)])
    except DataError as error:
        words = error.message.replace("only text is trained on", "this model reads text alone")
        raise Refused(400, words, param="messages") from None


def _spoken(message: Any, where: str) -> dict[str, Any]:
    """Return a message as rows have it. Raises DataError for a field that is neither OpenAI's nor a row's."""
    if not isinstance(message, dict):
        raise DataError(f"{where} is not an object")
    fields = {name: value for name, value in message.items() if value is not None}
    for name in fields:
        if name not in (*MESSAGE_FIELDS, *REASONING_NAMES, *ANSWERED, "function_call"):
            known = nearest(name, MESSAGE_FIELDS)
            raise DataError(f"{where}.{name[:40]}: this field is not known here{known}")
    content: Any = fields.get("content")
    parts: list[Any] = content if isinstance(content, list) else []
    for i, part in enumerate(parts):
        wrong = next((name for name in part if name not in PART_FIELDS), "") if _is_text(part) else ""
        if wrong:
            known = nearest(wrong, PART_FIELDS)
            raise DataError(f"{where}.content[{i}].{wrong[:40]}: this field is not known here{known}")
    if fields.get("audio"):
        raise DataError(f"{where}.audio: this model reads text alone")
    if fields.get("role") == "developer":  # OpenAI's newer name
        fields["role"] = "system"
    if "content" not in fields and "refusal" in fields:
        fields["content"] = fields["refusal"]
    return {name: value for name, value in fields.items() if name not in ANSWERED}


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type", "text") == "text"


def _tools(fields: Fields) -> list[Tool] | None:
    return None if fields.tool_choice == "none" else checked_tools(fields.tools)


def checked_tools(tools: list[Any] | None) -> list[Tool] | None:
    """Check tools: functions, each with a name. Raises Refused."""
    try:
        checked = tools_of({"tools": tools}, 0) if tools else None
        for i, each in enumerate(checked or ()):
            if each.get("type", "function") != "function":
                raise DataError(f"tools[{i}].type is {str(each['type'])[:40]!r}; there is 'function' only")
            function = each.get("function")
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                raise DataError(f"tools[{i}].function has no name")
            if not isinstance(function.get("parameters"), dict | None):
                raise DataError(f"tools[{i}].function.parameters is not an object")
        return checked
    except DataError as error:
        raise Refused(400, error.message.removeprefix("row 0: "), param="tools") from None
