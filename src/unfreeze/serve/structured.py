"""Answers that fit a JSON schema, and calls that fit a tool: masks of allowed ids by the library llguidance.

A mask is made for each token from those before it: the ids after which the text can still become one that
fits. Where the grammar is complete, only ids that end the answer are left.

V vocabulary.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from unfreeze.core.errors import ConfigError
from unfreeze.data.tokens.tool_calls import MAX_CALLS
from unfreeze.serve.deltas import HERMES_MARKS, Shape
from unfreeze.serve.request import Chat, Refused

if TYPE_CHECKING:
    from unfreeze.data.tokens.tokenizer import Tokenizer

LONGEST = 96  # characters of a library's words in a message
MAX_SCHEMA = 200_000  # characters; the library limits the work of what is shorter
SPACES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as Python writes it, on one line: with free white space a weak model writes spaces to its end."""
KIMI_CLOSE = "<|tool_calls_section_end|>"
KIMI_CALL = ("<|tool_call_argument_begin|>", "<|tool_call_end|>")


def needs_llguidance() -> Any:
    """Return the library. Raises ConfigError with the command that installs it."""
    try:
        import llguidance
    except ImportError:
        raise ConfigError(
            "JSON schemas and tool_choice need the library llguidance (extra [serve]): not installed",
            next="pip install llguidance",
        ) from None
    return llguidance


class Grammars:
    """Compiles grammars for one tokenizer.

    num_ids  ids that can be sampled
    """

    def __init__(self, tokenizer: Tokenizer, num_ids: int):
        self.tokenizer, self.num_ids = tokenizer, num_ids

    @cached_property
    def _vocabulary(self) -> Any:
        """The library's tokenizer: the bytes of each id, or tokenizer.json where ids are not bytes."""
        library = needs_llguidance()
        ends = sorted(self.tokenizer.eos_ids)
        raw = [self.tokenizer.bytes_of(id) for id in range(self.num_ids)]
        if any(each is None for each in raw):
            return library.LLTokenizer(self.tokenizer.as_json(), n_vocab=self.num_ids, eos_token=ends)
        words = library.TokenizerWrapper(_Words(self.tokenizer, raw))
        return library.LLTokenizer(words, eos_token=ends)

    def compiled(self, grammar: str, param: str) -> Allowed:
        """Compile a grammar in Lark's form. May take a second. Raises Refused, which names the field."""
        library = needs_llguidance()
        matcher = library.LLMatcher(
            self._vocabulary, library.LLMatcher.grammar_from_lark(grammar), log_level=0
        )
        if matcher.is_error():
            words = f"{param}: the schema cannot be used: {plain_fault(matcher.get_error())}"
            raise Refused(400, words, param=param)
        return Allowed(matcher, self.num_ids, param)

    def literal(self, text: str) -> str:
        """Return the grammar of a mark: its token if it is one, special or not, else its text."""
        id = self.tokenizer.token_id(text)
        return json.dumps(text) if id is None else f"<[{id}]>"


def json_grammar(schema: Any, param: str) -> str:
    """Return the grammar of JSON that fits a schema. Raises Refused."""
    if not isinstance(schema, dict):
        raise Refused(400, f"{param}: the schema is not an object", param=param)
    if "x-guidance" in schema:
        raise Refused(400, f"{param}: x-guidance is not known here", param=param)
    try:
        text = json.dumps({**schema, "x-guidance": SPACES}, allow_nan=False)
    except ValueError:
        raise Refused(
            400, f"{param}: the schema has NaN or Infinity, which is no JSON", param=param
        ) from None
    if len(text) > MAX_SCHEMA:
        words = f"{param}: a schema of {len(text):,} characters; at most {MAX_SCHEMA:,} are taken"
        raise Refused(400, words, param=param)
    return f"%json {text}"


FAULTS = [
    (r"Unimplemented keys: (.*)", r"it has {1}, which is not built; leave it out"),
    (r"oneOf constraints are not supported.*", r"oneOf is not built; anyOf is"),
    (r"Invalid type: (.*)", r"there is no type {1}"),
    (r"Unknown format: (.*)", r"format {1} is not known; leave it out, or give a pattern"),
    (r".*regex parse error:.* error: (.*)", r"its pattern: {1}"),
    (r"Resource (.*) is not present.*", r"$ref to {1} is not fetched; put it in $defs"),
    (r"Pointer (.*) does not exist", r"$ref: there is no {1} in it"),
    (r"Unsatisfiable schema: (.*)", r"nothing can fit it: {1}"),
]
"""(a message of the library, as a pattern; its words for a client)."""


def plain_fault(error: str) -> str:
    """Return what is wrong with a schema in a sentence, without the grammar that the library repeats."""
    words = " ".join(re.split(r"\n\s*\d+ \| ", error)[0].split())
    words = re.sub(r"^(at )?\d+\(\d+\): (failed to compile JSON schema: )?", "", words)
    for pattern, ours in FAULTS:
        if (match := re.fullmatch(pattern, words)) is not None:
            words = ours.replace("{1}", match[1] if match.lastindex else "")
            break
    return words[:LONGEST]


class Allowed:
    """The mask of each next token, for answers that may all call it: the answer's tokens so far -> bool [V].

    A state of the grammar is kept for each answer, by its tokens.
    """

    def __init__(self, matcher: Any, num_ids: int, param: str):
        self._fresh, self.num_ids, self.param = matcher, num_ids, param
        self._states: dict[tuple[int, ...], Any] = {}

    def __call__(self, tokens: list[int]) -> Tensor:
        before = tuple(tokens)
        state = self._states.pop(before[:-1], None) if tokens else None
        if state is None:
            state = self._fresh.deep_copy()
            state.consume_tokens(before[:-1])
        if tokens:
            state.consume_token(tokens[-1])
        self._states[before] = state
        bits = np.frombuffer(state.compute_bitmask(), dtype=np.uint8)
        if state.is_error():  # the mask then lets the answer end, as if it were whole
            words = f"{self.param}: no answer can follow this form, or it is too large; make it simpler"
            raise Refused(400, words, param=self.param)
        mask_V = np.unpackbits(bits, bitorder="little")[: self.num_ids].astype(bool)
        return torch.from_numpy(mask_V)


class _Words:
    """A tokenizer as the library reads it."""

    def __init__(self, tokenizer: Tokenizer, raw: Sequence[bytes | None]):
        self._tokenizer = tokenizer
        self.eos_token_id, self.bos_token_id = min(tokenizer.eos_ids), tokenizer.bos_id
        self.tokens = [each or b"" for each in raw]
        self.special_token_ids = sorted(id for id in tokenizer.special_ids if id < len(raw))

    def __call__(self, text: bytes | str) -> list[int]:
        plain = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode(plain, specials=False)


def chat_grammar(chat: Chat, shape: Shape, thought: str, grammars: Grammars) -> tuple[str, str] | None:
    """Return the grammar of an answer to a chat, and the field that asks for it; None if it is free.

    thought: how the prompt ends, as in Turn. If it opens a think block, reasoning comes first, which is free.
    If it does not, JSON or a call that is demanded comes at once: a weak model would think to its end.
    """
    called = bool(chat.tools) and chat.choice != "none"
    forced = called and chat.choice != "auto"
    held = called and (chat.one_call or any(_is_strict(tool) for tool in chat.tools or ()))
    if chat.schema is None and not forced and not held:
        return None
    rules: list[str] = []
    bodies: list[str] = []
    param = "response_format"
    if chat.schema is not None and not forced:
        rules.append(f"answer: {json_grammar(chat.schema, param)}")
        bodies.append("answer")
    free = called and not forced and chat.schema is None
    if called:
        param = "tools" if chat.schema is None else param
        rules += list(_call_rules(chat, shape, grammars, free=free))
        bodies += ["SAID", "said calls"] if free else ["section calls"]
    begin = ""
    if thought == "open" or (free and shape.thinks and not thought):
        rules += [*_up_to("thought", (shape.closing,), grammars), r"SPACE: /[ \n]{0,2}/"]
        begin = "thought SPACE"
        if thought != "open":
            begin = f"({grammars.literal(shape.opening)} {begin})?"
    return "\n".join([f"start: {begin} ({' | '.join(bodies)})", *rules]), param


def _call_rules(chat: Chat, shape: Shape, grammars: Grammars, *, free: bool) -> Iterator[str]:
    """Yield the rules of calls: each of a tool that may be called, with arguments that fit its parameters.

    section: what stands before the first; free: `said` instead, a text up to it, and SAID, one without calls.
    Kimi's calls are numbered through the conversation, and the number is a part of a call's id.
    """
    hermes = shape.calls == HERMES_MARKS
    first = sum(len(each.get("tool_calls") or ()) for each in chat.messages)
    places = range(1 if chat.one_call else MAX_CALLS)
    names: list[list[str]] = [[] for _ in places]
    for i, tool in enumerate(chat.tools or ()):
        function = tool["function"]
        if chat.choice not in ("auto", "required", function["name"]):
            continue
        parameters = function.get("parameters") or {"type": "object"}
        yield f"arguments{i}: {json_grammar(parameters, 'tools')}"
        for place in places:
            before, behind = _around(function["name"], first + place, shape, grammars)
            yield f"call{i}_{place}: {before} arguments{i} {behind}"
            names[place].append(f"call{i}_{place}")
    begin = grammars.literal(shape.calls[-1])
    between = f'"\\n" {begin}' if hermes else begin
    for place in places:
        more = "" if place == places[-1] else f" ({between} calls{place + 1})?"
        yield f"calls{place}: ({' | '.join(names[place])}){more}"
    if free:
        yield from _up_to("said", shape.calls, grammars)
    else:
        yield f"section: {grammars.literal(shape.calls[0])}"
    yield "calls: calls0" if hermes else f"calls: {begin} calls0 {grammars.literal(KIMI_CLOSE)}"


def _around(name: str, number: int, shape: Shape, grammars: Grammars) -> tuple[str, str]:
    """Return the grammar of what a call has before and behind its arguments; its own mark comes before."""
    if shape.calls == HERMES_MARKS:
        head = json.dumps(f'\n{{"name": {json.dumps(name)}, "arguments": ')
        return head, f"{json.dumps(chr(125) + chr(10))} {grammars.literal('</tool_call>')}"
    middle, end = map(grammars.literal, KIMI_CALL)
    return f"{json.dumps(f'functions.{name}:{number}')} {middle}", end


def _is_strict(tool: Mapping[str, Any]) -> bool:
    return bool(tool["function"].get("strict"))


def _up_to(rule: str, marks: Sequence[str], grammars: Grammars) -> Iterator[str]:
    """Yield the rule of a text up to the first of the marks and that, and RULE, one with none of the marks.

    A mark that is a token ends any text. One that is spelled ends the shortest: a text takes all that it can.
    """
    parts = ["/(.|\\n)*/", *(f"~/(.|\\n)*{re.escape(mark)}(.|\\n)*/".replace("</", "<\\/") for mark in marks)]
    mark = grammars.literal(marks[0])
    yield f"{rule.upper()}: {' & '.join(parts)}"
    yield (
        f"{rule}[suffix={mark}]: {rule.upper()}" if mark.startswith('"') else f"{rule}: {rule.upper()} {mark}"
    )
