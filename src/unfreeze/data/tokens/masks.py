"""Convert rows to examples: masked text becomes tokens with weights.

turns.py decides how a conversation becomes text and which words carry loss; taught.py checks it. The text is
tokenized segment by segment, split where a turn starts and ends, because at generation the prompt is
tokenized alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

from unfreeze.core.errors import DataError
from unfreeze.data.rows.row import Answers, JsonObject, Row, Text
from unfreeze.data.store.examples import Example
from unfreeze.data.store.remarks import MARKUP
from unfreeze.data.tokens.forms import Reasoning
from unfreeze.data.tokens.taught import QUOTE_CLOSE, QUOTE_OPEN, Segment
from unfreeze.data.tokens.tokenizer import Tokenizer
from unfreeze.data.tokens.turns import Renderer, Turns, V

Truncation = Literal["tail", "head", "error", "drop", "split"]
Supervise = Literal["assistant", "all"]

_QUOTED = re.compile(f"{QUOTE_OPEN}(.*?){QUOTE_CLOSE}", re.DOTALL)
_MARKUP = re.compile(
    r"<\|im_start\|>|<\|im_user\|>|<\|start_header_id\|>|<start_of_turn>|\[INST\]|<｜User｜>"
    r"|<\|(?:user|assistant|system)\|>"
)
"""Start of a turn in ChatML, Kimi, Llama 3, Gemma, Mistral, DeepSeek, and Phi or GLM."""

LONGER = "a longer --sequence-length, if the model takes it, or a shorter row"


class Dropped(DataError):
    """A valid row that is unusable at this sequence length; it is counted and listed, never lost silently."""


@dataclass(frozen=True)
class Encoded:
    """A row's examples. `dropped`: reasons for examples left out while others were kept.

    digest: 16-byte hash that tells the row from others, if it is not that of its content
    """

    examples: list[Example]
    notes: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    digest: bytes = b""


class Encoder:
    """Convert rows to examples of at most `sequence_length` tokens.

    The result is the same when rows are counted and when they are read again.

        truncation  of a longer example: "tail" cuts its end, "head" its start (a BOS stays), "drop" raises
                    Dropped, "error" raises DataError;
                    "split" makes several documents of a text, and is an error for a conversation: half an
                    answer is not a document
        supervise   "assistant": weight 1 on the assistant's words; "all": on everything. Every token of a
                    text counts
        turns, reasoning   see turns.Turns and forms.Reasoning
    """

    answers: Answers = "taught"

    def __init__(
        self,
        tokenizer: Tokenizer,
        sequence_length: int,
        truncation: Truncation = "tail",
        supervise: Supervise = "assistant",
        *,
        turns: Turns = "auto",
        reasoning: Reasoning = "auto",
    ):
        self.tokenizer, self.sequence_length, self.truncation, self.supervise = (
            tokenizer,
            sequence_length,
            truncation,
            supervise,
        )
        self.render = renderer(tokenizer, turns=turns, reasoning=reasoning, supervise_all=supervise == "all")

    def __call__(self, row: Row) -> Encoded:
        """Encode a row. Raises Dropped for an unusable row, DataError for a bad one; both name the row."""
        if isinstance(row, Text):
            notes = _text_notes(row, self.tokenizer)
            return Encoded(
                (
                    self._split(row)
                    if self.truncation == "split"
                    else [self._bounded(row, *encode_whole_text(row, self.tokenizer))]
                ),
                notes,
            )
        try:
            rendered = self.render(row)
        except DataError as error:
            raise DataError(f"row {row.row}: {error.message}", next=error.next) from None
        examples: list[Example] = []
        dropped: list[str] = []
        for sample in rendered.samples:
            try:
                examples.append(self._bounded(row, *encode_segments(self.tokenizer, sample)))
            except Dropped as error:
                dropped.append(error.message)
        if not examples:
            raise Dropped(dropped[0], next=LONGER)
        plain = (
            () if self.tokenizer.template else ("no chat template in the checkpoint: the plain one is used",)
        )
        return Encoded(examples, (*plain, *rendered.notes), tuple(dropped))

    def _bounded(self, row: Row, tokens: list[int], weights: list[float]) -> Example:
        """Return one example, cut to length. Raises Dropped if no supervised token is left."""
        if len(tokens) > self.sequence_length and self.truncation not in ("tail", "head"):
            kind = Dropped if self.truncation == "drop" else DataError
            why = ", and a conversation is not split" if self.truncation == "split" else ""
            raise kind(
                f"row {row.row}: {len(tokens)} tokens, sequence_length is {self.sequence_length}{why}",
                next=f"--sequence-length {len(tokens)} or more, if the model takes it,"
                " or --data.truncation tail",
            )
        whole = len(tokens)
        cut = _without_head if self.truncation == "head" else _without_tail
        tokens, weights = cut(tokens, weights, self.sequence_length, self.tokenizer)
        example = Example(tokens, weights, row.row, whole - len(tokens))
        if not any(weights[1:]):
            why = f" (truncated before the answer? the whole row has {whole})" if example.cut else ""
            raise Dropped(f"row {row.row}: 0 of {example.num_tokens} tokens supervised{why}", next=LONGER)
        return example

    def _split(self, row: Text) -> list[Example]:
        """Split a long text into documents that together predict each of its tokens exactly once.

        Consecutive pieces share one token: the last of a piece is the first of the next, where it is context
        and not a target.
        """
        tokens, weights = encode_whole_text(row, self.tokenizer)
        length = self.sequence_length
        starts = range(0, max(len(tokens) - 1, 1), max(length - 1, 1))
        pieces = [(tokens[at : at + length], weights[at : at + length]) for at in starts]
        examples = [Example(piece, [0.0, *weight[1:]], row.row) for piece, weight in pieces if len(piece) > 1]
        if not examples:
            raise Dropped(f"row {row.row}: 0 tokens supervised (the text has a single token)")
        return examples


def renderer(
    tokenizer: Tokenizer, *, turns: Turns = "auto", reasoning: Reasoning = "auto", supervise_all: bool = False
) -> Renderer:
    """Return the Renderer of the tokenizer's chat template; special tokens in messages are quoted."""

    def quote(value: V) -> V:
        return quote_specials(value, tokenizer)

    return Renderer(
        tokenizer.chat,
        end_texts(tokenizer),
        quote,
        turns=turns,
        reasoning=reasoning,
        supervise_all=supervise_all,
    )


def encode_chat(
    tokenizer: Tokenizer, messages: Sequence[JsonObject], tools: Sequence[JsonObject] | None = None
) -> list[int]:
    """Tokenize a prompt for generation the way training tokenizes it.

    It is the conversation up to where the assistant starts to speak.
    """
    return encode_rendered(tokenizer, renderer(tokenizer).prompt(messages, tools))


def encode_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokenize a text to be continued: BOS if this tokenizer starts documents with it, then the text.

    The text never produces special tokens.
    """
    bos = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
    return [*bos, *tokenizer.encode(text, specials=False)]


def encode_whole_text(row: Text, tokenizer: Tokenizer) -> tuple[list[int], list[float]]:
    """Return all tokens and weights of a text, including its end token.

    The first weight is 0: nothing precedes the first token.
    """
    tokens = encode_prompt(tokenizer, row.text)
    if tokenizer.eos_id is not None:
        tokens.append(tokenizer.eos_id)
    return tokens, [0.0, *[1.0] * (len(tokens) - 1)][: len(tokens)]


def encode_segments(tokenizer: Tokenizer, segments: Sequence[Segment]) -> tuple[list[int], list[float]]:
    """Return all tokens and weights of an example's text."""
    tokens: list[int] = []
    weights: list[float] = []
    for segment in segments:
        ids = encode_rendered(tokenizer, segment.text, continues=bool(tokens))
        tokens += ids
        weights += [1.0 if segment.supervised else 0.0] * len(ids)
    if weights:
        weights[0] = 0.0
    return tokens, weights


def _text_notes(row: Text, tokenizer: Tokenizer) -> tuple[str, ...]:
    if markup := _MARKUP.search(row.text):
        return (MARKUP.format(markup[0]),)
    special = next((text for text in tokenizer.special_texts if text and text in row.text), None)
    return (f"special-token text ({special}) read as plain text",) if special else ()


def _without_tail(
    tokens: list[int], weights: list[float], length: int, tokenizer: Tokenizer
) -> tuple[list[int], list[float]]:
    return (tokens, weights) if len(tokens) <= length else (tokens[:length], weights[:length])


def _without_head(
    tokens: list[int], weights: list[float], length: int, tokenizer: Tokenizer
) -> tuple[list[int], list[float]]:
    """Return the last `length` tokens; a BOS keeps its place.

    The token before the first kept one is gone, so that first token is no target.
    """
    if len(tokens) <= length:
        return tokens, weights
    lead = tokens[:1] if tokens[0] == tokenizer.bos_id else []
    begin = len(tokens) - length + len(lead)
    return [*lead, *tokens[begin:]], [*(0.0 for _ in lead), 0.0, *weights[begin + 1 :]]


def end_texts(tokenizer: Tokenizer) -> list[str]:
    """Return the spellings of the tokens that can end a turn."""
    return [tokenizer.token_text(id) for id in sorted(tokenizer.eos_ids & tokenizer.special_ids)]


def quote_specials(value: V, tokenizer: Tokenizer) -> V:
    """Copy messages or tools with special-token text quoted.

    So a user who types `<|im_end|>` ends nobody's turn.
    """
    if value is None:
        return value
    if isinstance(value, str):
        if not value.isascii() and (QUOTE_OPEN in value or QUOTE_CLOSE in value):
            raise DataError(
                "a message holds the private-use character U+F0000 or U+F0001, which is used to quote special"
                " tokens"
            )
        specials = tokenizer.special_pattern
        quoted = specials.sub(_quoted, value) if specials else value
        return cast(V, quoted)
    if isinstance(value, dict | Mapping):  # isinstance is faster for dict than for Mapping
        fields = cast("Mapping[str, object]", value)
        return cast(V, {key: quote_specials(item, tokenizer) for key, item in fields.items()})
    if isinstance(value, list | tuple):
        items = cast("Sequence[object]", value)
        return cast(V, [quote_specials(item, tokenizer) for item in items])
    return value


def _quoted(match: re.Match[str]) -> str:
    return f"{QUOTE_OPEN}{match[0]}{QUOTE_CLOSE}"


def encode_rendered(tokenizer: Tokenizer, text: str, *, continues: bool = False) -> list[int]:
    """Tokenize rendered text: special tokens are recognised unless they are quoted."""
    if QUOTE_OPEN not in text and QUOTE_CLOSE not in text:
        return tokenizer.encode(text, specials=True, continues=continues) if text else []
    ids: list[int] = []
    for i, piece in enumerate(_QUOTED.split(text)):
        # a template that cuts strings can separate a pair of quotes
        piece = piece.replace(QUOTE_OPEN, "").replace(QUOTE_CLOSE, "")
        if piece:
            ids += tokenizer.encode(piece, specials=i % 2 == 0, continues=continues or bool(ids))
    return ids
