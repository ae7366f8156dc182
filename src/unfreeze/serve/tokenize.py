"""POST /tokenize and /detokenize, GET /tokenizer_info, in vLLM's form.

/tokenize        {"prompt": text} or {"messages": […], "tools": […]} -> tokens, count, max_model_len
/detokenize      {"tokens": […]} -> {"prompt": text}
/tokenizer_info  -> bos_token, eos_token, … as texts, chat_template: lm-eval's remote tokenizer reads these
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, model_validator

from unfreeze.core.errors import DataError
from unfreeze.data.tokens.masks import encode_chat
from unfreeze.serve.completions import raw_ids
from unfreeze.serve.request import Refused, Strict, checked_tools, messages_of, read_fields

if TYPE_CHECKING:
    from unfreeze.data.tokens.tokenizer import Tokenizer

TOLD = ("bos_token", "eos_token", "pad_token", "unk_token")


class Written(Strict):
    """Fields of /tokenize. messages are written up to where the assistant starts to speak."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool = True
    messages: Annotated[list[Any], Field(min_length=1)] | None = None
    tools: list[Any] | None = None
    add_generation_prompt: Annotated[bool, Field()] = True
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _agrees(self) -> Written:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("one of prompt and messages must be there")
        if not self.add_generation_prompt:
            raise ValueError("add_generation_prompt = false is not built")
        return self


class Ids(Strict):
    """Fields of /detokenize."""

    model: str | None = None
    tokens: list[int]


def tokens_of(raw: bytes, tokenizer: Tokenizer, window: int) -> tuple[str | None, dict[str, Any]]:
    """Return the model that is named, and the answer. Raises Refused."""
    fields = read_fields(raw, Written)
    if fields.messages is None:
        ids = raw_ids(fields.prompt or "", tokenizer, begin=fields.add_special_tokens)
    else:
        messages, tools = messages_of(fields.messages), checked_tools(fields.tools)
        try:
            ids = encode_chat(tokenizer, messages, tools)
        except DataError as error:
            raise Refused(400, error.message, param="messages") from None
    texts = [tokenizer.token_text(id) for id in ids] if fields.return_token_strs else None
    return fields.model, {"count": len(ids), "max_model_len": window, "tokens": ids, "token_strs": texts}


def text_of(raw: bytes, tokenizer: Tokenizer) -> tuple[str | None, dict[str, Any]]:
    """Return the model that is named, and the answer. Raises Refused."""
    fields = read_fields(raw, Ids)
    try:
        return fields.model, {"prompt": tokenizer.decode(fields.tokens, skip_specials=False)}
    except DataError as error:
        raise Refused(400, f"tokens: {error.message}", param="tokens") from None


def info_of(tokenizer: Tokenizer, window: int) -> dict[str, Any]:
    """Return what a client needs to work with the tokenizer from afar; null for a token that is not there."""
    return {
        "tokenizer_class": "unfreeze",
        **{role: tokenizer.variables.get(role) for role in TOLD},
        "add_bos_token": tokenizer.add_bos,
        "chat_template": tokenizer.chat.source,
        "model_max_length": window,
    }
