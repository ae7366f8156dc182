"""Rows to examples: which tokens the model is taught to say.

For the assistant's message i of a conversation, with the checkpoint's own template:
  prefix = render(messages[:i], add_generation_prompt=True)     what the model sees when it has to speak
  upto   = render(messages[:i + 1])                             the same, with what it said
  span   = upto[len(prefix):], cut after the end-of-turn token  what it is taught
The conversation is tokenized segment by segment, split at these boundaries, because in generation the prompt is tokenized alone.
A template where `upto` does not begin with `prefix`, or the whole text not with `upto`, has no such spans: it is refused, showing
where the texts part, unless its {% generation %} blocks say what the assistant speaks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from unfreeze.core.errors import DataError
from unfreeze.data.examples import Example
from unfreeze.data.sources import Conversation, Row, Text
from unfreeze.data.templates import ChatTemplate
from unfreeze.data.tokenizer import Tokenizer

Truncation = Literal["tail", "head", "error", "drop", "split"]
Supervise = Literal["assistant", "all"]

QUOTE_OPEN, QUOTE_CLOSE = "\U000f0000", "\U000f0001"
"""Private-use characters around special-token text that stands inside a message, so that it survives rendering as plain text."""
_QUOTED = re.compile(f"{QUOTE_OPEN}(.*?){QUOTE_CLOSE}", re.DOTALL)


LOST_MASK = "put the template's {% generation %} marks around the assistant's words only, or leave them out (chat_template.jinja)"


@dataclass(frozen=True)
class Segment:
    """A stretch of rendered text that is tokenized on its own."""

    text: str
    supervised: bool


class Dropped(DataError):
    """A row that is whole but of no use at this sequence length; counted and listed, never silent."""


def encode_chat(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None) -> list[int]:
    """The prompt for generation: the conversation up to where the assistant begins to speak, tokenized as training tokenizes it."""
    quoted, quoted_tools = quote_specials(list(messages), tokenizer), quote_specials(tools, tokenizer)
    return encode_rendered(tokenizer, tokenizer.chat.render(quoted, add_generation_prompt=True, tools=quoted_tools))


def encode_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """A text to be continued: BOS if this tokenizer begins documents with it, then the text; no special token is made from it."""
    return [*_bos(tokenizer), *tokenizer.encode(text, specials=False)]


def encode_row(
    row: Row,
    tokenizer: Tokenizer,
    sequence_length: int,
    truncation: Truncation = "tail",
    supervise: Supervise = "assistant",
) -> Example:
    """A row as tokens and weights (not shifted), at most `sequence_length` tokens.

    truncation  of a longer row: "tail" cuts its end, "head" its beginning (a BOS stays), "drop" raises Dropped, "error" raises DataError, and
                so does "split": half an answer is not a document (a long Text is split by encode_text).
    supervise   "assistant": weight 1 on the assistant's spans; "all": on everything. A Text row always counts whole.
    Raises Dropped if no supervised token is left, DataError for a conversation the template cannot take. Both name the row.
    """
    tokens, weights = encode_whole(row, tokenizer, supervise)
    if len(tokens) > sequence_length and truncation not in ("tail", "head"):
        kind = Dropped if truncation == "drop" else DataError
        why = ", and a conversation is not split" if truncation == "split" else ""
        raise kind(
            f"row {row.row}: {len(tokens)} tokens, sequence_length is {sequence_length}{why}",
            next=f"--sequence-length {len(tokens)} or more, or --truncation tail",
        )
    whole = len(tokens)
    tokens, weights = (_without_head if truncation == "head" else _without_tail)(tokens, weights, sequence_length, tokenizer)
    example = Example(tokens, weights, row.row, whole - len(tokens))
    if not example.num_supervised:
        cut = f" (truncated before the answer? the whole row has {whole})" if example.cut else ""
        raise Dropped(f"row {row.row}: 0 of {example.num_tokens} tokens supervised{cut}", next="a longer --sequence-length")
    return example


def _without_tail(tokens: list[int], weights: list[float], length: int, tokenizer: Tokenizer) -> tuple[list[int], list[float]]:
    return tokens[:length], weights[:length]


def _without_head(tokens: list[int], weights: list[float], length: int, tokenizer: Tokenizer) -> tuple[list[int], list[float]]:
    """The last `length` tokens; a BOS keeps its place. What preceded the first kept token is gone, so that token is no target."""
    if len(tokens) <= length:
        return tokens, weights
    lead = tokens[:1] if tokens[0] == tokenizer.bos_id else []
    begin = len(tokens) - length + len(lead)
    return [*lead, *tokens[begin:]], [*(0.0 for _ in lead), 0.0, *weights[begin + 1 :]]


def encode_text(row: Text, tokenizer: Tokenizer, sequence_length: int) -> list[Example]:
    """A long text as several documents that together predict each of its tokens exactly once.

    Consecutive pieces share one token: the last of a piece is the first of the next, where it is context and not a target.
    """
    tokens, weights = encode_whole(row, tokenizer, "all")
    step = max(sequence_length - 1, 1)
    starts = range(0, max(len(tokens) - 1, 1), step)
    pieces = [(tokens[at : at + sequence_length], weights[at : at + sequence_length]) for at in starts]
    return [Example(piece, [0.0, *weight[1:]], row.row) for piece, weight in pieces if len(piece) > 1]


def encode_whole(row: Row, tokenizer: Tokenizer, supervise: Supervise) -> tuple[list[int], list[float]]:
    """All tokens and weights of a row, however long. The first weight is 0: nothing precedes the first token."""
    if isinstance(row, Text):
        tokens = encode_prompt(tokenizer, row.text)
        if tokenizer.eos_id is not None:
            tokens.append(tokenizer.eos_id)
        weights = [1.0] * len(tokens)
    else:
        tokens, weights = _encode_conversation(row, tokenizer, supervise)
    if weights:
        weights[0] = 0.0
    return tokens, weights


def _encode_conversation(row: Conversation, tokenizer: Tokenizer, supervise: Supervise) -> tuple[list[int], list[float]]:
    tokens: list[int] = []
    weights: list[float] = []
    try:
        messages, tools = quote_specials(row.messages, tokenizer), quote_specials(row.tools, tokenizer)
        segments = chat_segments(tokenizer.chat, messages, tools, end_texts(tokenizer))
        covered = all(segment.supervised or not segment.text.strip() for segment in segments)
        if supervise == "assistant" and covered and any(message["role"] != "assistant" for message in row.messages):
            raise DataError("every token is supervised, the user's too: the mask is lost", next=LOST_MASK)
        for segment in segments:
            ids = encode_rendered(tokenizer, segment.text, continues=bool(tokens))
            tokens += ids
            weights += [1.0 if segment.supervised or supervise == "all" else 0.0] * len(ids)
    except DataError as error:
        raise DataError(f"row {row.row}: {error.message}", next=error.next) from None
    return tokens, weights


def check_mask(tokenizer: Tokenizer) -> None:
    """Render a conversation of known words and refuse a template whose mask covers what the user says, or misses what the assistant says.

    Raises DataError with the words (FAILURES N4). A template that doesn't take this conversation is not judged here: its rows are, one by one.
    """
    asked, said = ("Zq7 asks", "Zq8 asks"), ("Zq7 says", "Zq8 says")  # no template has these words
    turns = [{"role": role, "content": text} for pair in zip(asked, said, strict=True) for role, text in (("user", pair[0]), ("assistant", pair[1]))]
    for messages in (turns, turns[:2]):
        try:
            segments = chat_segments(tokenizer.chat, messages, None, end_texts(tokenizer))
        except DataError:
            continue
        taught = "\n".join(segment.text for segment in segments if segment.supervised)
        covered = [text for text in asked if text in taught]
        missed = [message["content"] for message in messages if message["role"] == "assistant" and message["content"] not in taught]
        if covered or missed:
            whole = sum(len(segment.text) for segment in segments)
            what = f"it covers the user's words {covered[0]!r}" if covered else f"it misses the assistant's words {missed[0]!r}"
            raise DataError(
                f"the chat template's loss mask is wrong: {what} ({len(taught)} of {whole} characters of a test conversation supervised)",
                next=LOST_MASK,
            )
        return


def end_texts(tokenizer: Tokenizer) -> list[str]:
    """The spellings of the tokens that can end a turn."""
    return [tokenizer.token_text(id) for id in sorted(tokenizer.eos_ids & tokenizer.special_ids)]


def chat_segments(
    template: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    ends: Sequence[str],
) -> list[Segment]:
    """The rendered conversation, cut into what is given and what the assistant says; the texts joined are render(messages)."""
    full = template.render(messages, tools=tools)
    spans: list[tuple[int, int]] = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        try:
            prefix = template.render(messages[:i], add_generation_prompt=True, tools=tools)
            upto = full if i == len(messages) - 1 else template.render(messages[: i + 1], tools=tools)
            spans.append(_span(i, prefix, upto, full, spans[-1][1] if spans else 0, ends))
        except DataError as error:
            if template.has_generation_marks:
                return _marked_segments(template, messages, tools, ends)
            if i == 0:
                raise DataError(
                    "the assistant speaks first and this template has no prompt for that", next="begin with a user or system message"
                ) from None
            raise error
    return _segments(full, spans)


def _span(i: int, prefix: str, upto: str, full: str, after: int, ends: Sequence[str]) -> tuple[int, int]:
    """[start, end) of what the assistant says in message i, in characters of `full`."""
    for shorter, longer, what in ((prefix, upto, "the prompt before it"), (upto, full, "the conversation up to it")):
        if not longer.startswith(shorter):
            at = next((i for i, (a, b) in enumerate(zip(shorter, longer, strict=False)) if a != b), min(len(shorter), len(longer)))
            raise DataError(
                f"the chat template is not prefix-stable: messages[{i}] (assistant), {what} changes at character {at}: "
                f"{shorter[at : at + 60]!r} became {longer[at : at + 60]!r}",
                next="end each row with its first assistant turn, or give the template {% generation %} marks (chat_template.jinja)",
            )
    if len(prefix) < after:
        raise DataError(f"the chat template is not prefix-stable: messages[{i}] (assistant) begins inside the turn before it")
    return len(prefix), _end_of_turn(full, len(prefix), len(upto), ends)


def _end_of_turn(full: str, start: int, end: int, ends: Sequence[str]) -> int:
    """Where the supervised part of a turn ends: behind its last end token; blanks the template adds after that are not taught."""
    said = full[start:end].rstrip()
    return start + len(said) if any(said.endswith(text) for text in ends) else end


def _marked_segments(template: ChatTemplate, messages: Any, tools: Any, ends: Sequence[str]) -> list[Segment]:
    """Spans from {% generation %}; an end token that stands right behind a block belongs to it, or the end would never be learned."""
    full, marked = template.render_spans(messages, tools)
    if not marked:
        raise DataError("the chat template has {% generation %} marks but none of them produced a turn of the assistant")
    spans = []
    for start, end in marked:
        following = next((text for text in ends if full.startswith(text, end)), "")
        spans.append((start, _end_of_turn(full, start, end, ends) if not following else end + len(following)))
    return _segments(full, spans)


def _segments(full: str, spans: Sequence[tuple[int, int]]) -> list[Segment]:
    result: list[Segment] = []
    at = 0
    for start, end in spans:
        result += [Segment(full[at:start], False), Segment(full[start:end], True)]
        at = end
    return [segment for segment in [*result, Segment(full[at:], False)] if segment.text]


def quote_specials(value: Any, tokenizer: Tokenizer) -> Any:
    """A copy of messages or tools in which special-token text is quoted: a user who types `<|im_end|>` ends nobody's turn."""
    if isinstance(value, str):
        if QUOTE_OPEN in value or QUOTE_CLOSE in value:
            raise DataError("a message holds the private-use character U+F0000 or U+F0001, which is used to quote special tokens")
        found = [text for text in tokenizer.special_texts if text and text in value]
        return re.sub("|".join(map(re.escape, found)), rf"{QUOTE_OPEN}\g<0>{QUOTE_CLOSE}", value) if found else value
    if isinstance(value, Mapping):
        return {key: quote_specials(item, tokenizer) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [quote_specials(item, tokenizer) for item in value]
    return value


def encode_rendered(tokenizer: Tokenizer, text: str, *, continues: bool = False) -> list[int]:
    """Ids of rendered text: special tokens are recognised, except where they are quoted."""
    ids: list[int] = []
    for i, piece in enumerate(_QUOTED.split(text)):
        piece = piece.replace(QUOTE_OPEN, "").replace(QUOTE_CLOSE, "")  # a template that cuts strings can part a pair of quotes
        if piece:
            ids += tokenizer.encode(piece, specials=i % 2 == 0, continues=continues or bool(ids))
    return ids


def _bos(tokenizer: Tokenizer) -> list[int]:
    return [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
