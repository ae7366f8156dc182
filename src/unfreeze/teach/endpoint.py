"""A teacher behind an OpenAI-compatible server: its top tokens at each token of our documents.

A document is posted to /v1/completions as token ids; one new token is requested, with the prompt echoed. The
answer differs from server to server:

    vLLM      choices[i].prompt_logprobs: {id: {logprob, decoded_token}} per token, at most --max-logprobs
              (20)
    SGLang    choices[i].logprobs with echo: {text: logprob} per token; ids with equal texts hide each other
    OpenAI    the same, at most 5 tokens; refuses echo with logprobs for gpt-3.5-turbo-instruct
    llama.cpp refuses echo, or returns log-probabilities of new tokens only: it cannot be this teacher

Everything is checked. The text of each token must be ours for that id, each position must have the requested
number of tokens, probabilities must be finite and sum to at most 1, and values given twice must agree.

N tokens of a document, K top tokens per position, the likeliest first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from unfreeze.core.errors import UserError
from unfreeze.teach.address import EndpointError
from unfreeze.untrusted.json_object import is_list, is_object

if TYPE_CHECKING:
    from unfreeze.data.tokens.tokenizer import Tokenizer
    from unfreeze.teach.client import Client

EPSILON = 1e-3  # rounding tolerance: for sums of probabilities above 1, and between two values of one
IMPOSSIBLE = -1000.0  # vLLM writes -9999 for -inf
SHORT = 8  # maximum tokens of a document for which a teacher may be certain to the last bit
TOGETHER = 8  # documents per request, which the server computes in parallel
TEXTS = "unfreeze generate URL --data F --out rows.jsonl, then unfreeze sft"
NO_LOGPROBS = (
    "vLLM and SGLang give log-probabilities of a prompt, llama.cpp and most paid services don't; take the"
    f" teacher's texts instead: {TEXTS}"
)

Top = list[tuple[int, float]]
"""(id, log-probability in nats) of the top tokens at one position, the likeliest first."""


@dataclass(frozen=True)
class Scored:
    """The teacher's output for one document of N tokens.

    top     for each of tokens 1 … N - 1: the top tokens, given the tokens before it
    own     log-probability of the token itself
    """

    top: list[Top]
    own: list[float]


class Endpoint:
    """Requests the `top` likeliest tokens at each token from a server.

    name       of the model on the server; "": its only one
    tokenizer  the student's; the server must have the same tokens
    reserve    (tokens read, tokens written) of an attempt, before it is sent (teach/budget.py)
    """

    def __init__(
        self,
        client: Client,
        name: str,
        tokenizer: Tokenizer,
        *,
        top: int,
        reserve: Callable[[int, int], None] = lambda read, written: None,
    ):
        self.client, self.name, self.tokenizer, self.top, self.reserve = client, name, tokenizer, top, reserve
        self._form: int | None = None  # index in FORMS of the form this server accepts
        self._texts: dict[int, str] = {}
        self.listed = self.shared = 0
        """Number of tokens identified by their text, and how many of these texts are shared by several ids.
        """

    def __repr__(self) -> str:
        return f"{self.name or 'the model'} at {self.client.url}"

    def scored(self, documents: Sequence[Sequence[int]]) -> Iterator[Scored]:
        """Score documents, TOGETHER per request. Raises EndpointError at one that cannot be used."""
        for first in range(0, len(documents), TOGETHER):
            yield from self._ask(documents[first : first + TOGETHER])

    def _ask(self, documents: Sequence[Sequence[int]]) -> Iterator[Scored]:
        read, written = sum(map(len, documents)), len(documents)
        forms = range(len(FORMS)) if self._form is None else (self._form,)
        for form in forms:
            body = {
                **({"model": self.name} if self.name else {}),
                "prompt": [list(document) for document in documents],
                "max_tokens": 1,
                "echo": True,
                "logprobs": self.top,
                "temperature": 1.0,
                **FORMS[form](self.top),
            }
            try:
                answer = self.client.post("completions", body, lambda: self.reserve(read, written))
            except EndpointError as error:
                # a strict server rejects unknown fields: retry without them
                if form != forms[-1] and error.status in (400, 422):
                    continue
                raise self._unable(error) if error.status in (400, 422) else error from None
            self._form = form
            yield from self._read(answer, documents)
            return

    def _unable(self, error: EndpointError) -> EndpointError:
        return EndpointError(
            error.message,
            next=(
                f"a shorter --sequence-length, or a lower --distillation.top-k (or"
                f" vLLM's --max-logprobs), if {self.top} words are more than it gives; else: {NO_LOGPROBS}"
            ),
            status=error.status,
        )

    def _read(self, answer: dict[str, Any], documents: Sequence[Sequence[int]]) -> Iterator[Scored]:
        """Yield the choices in document order, each checked when its turn comes."""
        choices = answer.get("choices")
        if not is_list(choices) or not all(is_object(choice) for choice in choices):
            raise self._wrong("its answer has no list of choices")
        by_index = {repr(choice.get("index", place)): choice for place, choice in enumerate(choices)}
        if len(choices) != len(documents) or by_index.keys() != {repr(i) for i in range(len(documents))}:
            raise self._wrong(f"{len(choices)} choices came back for {len(documents)} documents")
        yield from (self._document(by_index[repr(i)], document) for i, document in enumerate(documents))

    def _document(self, choice: dict[str, Any], tokens: Sequence[int]) -> Scored:
        echoed = choice.get("prompt_token_ids")
        if is_list(echoed) and echoed != list(tokens):
            raise self._wrong(
                f"the prompt came back as {len(echoed)} other tokens than the {len(tokens)} sent"
            )
        if (logprobs := choice.get("prompt_logprobs")) is not None:
            positions = self._by_id(logprobs, tokens)
        elif is_object(logprobs := choice.get("logprobs")):
            positions = self._by_text(logprobs, tokens)
        else:
            raise self._wrong("its answer has no log-probabilities of the prompt", NO_LOGPROBS)
        each = {logprob for words, _ in positions for logprob in words.values()}
        if len(tokens) > SHORT and len(each) == 1:
            raise self._wrong(f"every log-probability is {each.pop():g}")
        scored = [self._checked(words, own, place) for place, (words, own) in enumerate(positions, 1)]
        return Scored(scored, [own for _, own in positions])

    def _by_id(self, listed: Any, tokens: Sequence[int]) -> list[tuple[dict[int, float], float]]:
        """Parse vLLM's form: per position an object id -> {logprob, rank, decoded_token}."""
        if not is_list(listed) or len(listed) < len(tokens):
            raise self._wrong(f"log-probabilities for {_len(listed)} of {len(tokens)} tokens")
        positions: list[tuple[dict[int, float], float]] = []
        for place in range(1, len(tokens)):
            entries = listed[place]
            if not is_object(entries):
                raise self._wrong(f"token {place}: its log-probabilities are {_short(entries)}")
            self._enough(len(entries), place)
            words: dict[int, float] = {}
            for written, entry in entries.items():
                if not _is_id(written) or not is_object(entry):
                    raise self._wrong(f"token {place}: {written!r} is not a token id with a log-probability")
                logprob = self._number(entry.get("logprob"), place)
                if self._same_word(int(written), entry.get("decoded_token"), place):
                    words[int(written)] = logprob
            if tokens[place] not in words:
                raise self._wrong(
                    f"token {place}: {tokens[place]}, the prompt's own, is not among those listed"
                )
            self._likeliest(words, len(entries), place)
            positions.append((words, words[tokens[place]]))
        return positions

    def _likeliest(self, words: dict[int, float], listed: int, place: int) -> None:
        """Check for real probabilities.

        The top K of V tokens have K / V or more; requiring only half allows for a padded head.
        """
        total, size = sum(map(math.exp, words.values())), self.tokenizer.named_size
        least = self.top / size
        if len(words) == listed and total < least / 2:
            raise self._wrong(
                f"token {place}: the {listed} likeliest of {size:,} words have {total:.2g}"
                f" together, which is less than {least:.2g}: logits instead of log-probabilities?",
                "log-probabilities from the server (vLLM: --logprobs-mode raw_logprobs)",
            )

    def _by_text(self, answer: dict[str, Any], tokens: Sequence[int]) -> list[tuple[dict[int, float], float]]:
        """Parse OpenAI's form: tokens, token_logprobs, top_logprobs, lists over the prompt and the new token.

        A text shared by several ids identifies none of them, so it is left out; its probability counts as
        unlisted.
        The prompt's own token is known by its position.
        """
        lists: list[Any] = [answer.get(name) for name in ("tokens", "token_logprobs", "top_logprobs")]
        texts, owns, tops = lists
        if not all(is_list(each) and len(each) >= len(tokens) for each in lists):
            counts = ", ".join(str(_len(each)) for each in lists)
            raise self._wrong(
                f"{len(tokens)} tokens were sent, and tokens, token_logprobs and top_logprobs have {counts}:"
                " the prompt's own are not among them",
                NO_LOGPROBS,
            )
        positions: list[tuple[dict[int, float], float]] = []
        for place in range(1, len(tokens)):
            self._same_word(tokens[place], texts[place], place)
            own, entries = self._number(owns[place], place), tops[place]
            if not is_object(entries):
                raise self._wrong(f"token {place}: its top_logprobs are {_short(entries)}")
            words: dict[int, float] = {}
            for text, logprob in entries.items():
                ids, logprob = self._ids.get(text, ()), self._number(logprob, place)
                if not ids and "\ufffd" not in text:
                    raise self._other(f"token {place}: it lists {text!r}, which is not in our vocabulary")
                self.listed, self.shared = self.listed + 1, self.shared + (len(ids) != 1)
                if len(ids) == 1:
                    words[ids[0]] = logprob
                    if ids[0] == tokens[place] and abs(logprob - own) > EPSILON:
                        raise self._wrong(
                            f"token {place}: its log-probability is {own:g}, and {logprob:g} in another list"
                        )
            if place == 1:
                self._enough(len(entries), place)
            words[tokens[place]] = own
            positions.append((words, own))
        return positions

    def _checked(self, words: dict[int, float], own: float, place: int) -> Top:
        """Return the `top` likeliest tokens, sorted, after checking that they are probabilities."""
        total = sum(math.exp(logprob) for logprob in words.values())
        if total > 1 + EPSILON:
            raise self._wrong(f"token {place}: the probabilities of {len(words)} words sum to {total:.4g}")
        return sorted(words.items(), key=lambda word: -word[1])[: self.top]

    def _number(self, value: Any, place: int) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value <= EPSILON:
            raise self._wrong(f"token {place}: a log-probability is {_short(value)}")
        return float(value) if value > IMPOSSIBLE else -math.inf

    def _enough(self, count: int, place: int) -> None:
        if count < min(self.top, self.tokenizer.named_size):
            raise self._wrong(
                f"token {place}: {count} words with log-probabilities, {self.top} were requested",
                f"--distillation.top-k {count}; or let the server give more"
                f" (vLLM: --max-logprobs {self.top})",
            )

    def _same_word(self, id: int, text: Any, place: int) -> bool:
        """Return True if we have a token with this id; raise if it differs from the server's.

        Ids without a token are padding of its head. A token that is part of a character has no text to
        compare.
        """
        named = text if isinstance(text, str) and "\ufffd" not in text else ""
        if id >= self.tokenizer.named_size:
            if named:
                ours = self.tokenizer.named_size
                raise self._other(f"token {place}: id {id} is {named!r} there, and we have {ours:,} ids")
            return False
        ours = self._text(id)
        if named and "\ufffd" not in ours and _spelled(ours) != _spelled(named):
            raise self._other(f"token {place}: id {id} is {named!r} there and {ours!r} here")
        return True

    def _text(self, id: int) -> str:
        if id not in self._texts:
            self._texts[id] = self.tokenizer.decode([id], skip_specials=False)
        return self._texts[id]

    @cached_property
    def _ids(self) -> dict[str, tuple[int, ...]]:
        """Return a token's text -> every id that has it."""
        ids_by_text: dict[str, tuple[int, ...]] = {}
        for id in range(self.tokenizer.named_size):
            text = self._text(id)
            ids_by_text[text] = (*ids_by_text.get(text, ()), id)
        return ids_by_text

    def _wrong(
        self, words: str, next: str = "check that it serves the teacher, without a proxy that truncates"
    ) -> EndpointError:
        return EndpointError(f"{self}: {words}", next=next)

    def _other(self, words: str) -> UserError:
        return EndpointError(
            f"{self}: {words}: another vocabulary",
            next=f"use a teacher with the student's tokenizer; for another one use its texts: {TEXTS}",
        )


def _for_vllm(top: int) -> dict[str, Any]:
    return {"prompt_logprobs": top, "return_token_ids": True}


FORMS: tuple[Callable[[int], dict[str, Any]], ...] = (_for_vllm, lambda top: {})
"""Extra request fields beyond OpenAI's: try vLLM's first, then none."""


def _spelled(text: str) -> str:
    """Return a token's text in our spelling, however the server writes the leading space."""
    return text.replace("\u2581", " ").replace("\u0120", " ").removeprefix(" ") or text


def _is_id(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10


def _short(value: object) -> str:
    return repr(value)[:60]


def _len(value: object) -> int:
    return len(value) if is_list(value) else 0
