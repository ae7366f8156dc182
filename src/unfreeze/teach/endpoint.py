"""A teacher behind an OpenAI-compatible server: its likeliest words at each token of our documents.

A document goes to /v1/completions as token ids; one token is asked for, with the prompt echoed. What comes
back differs from server to server:

vLLM      choices[i].prompt_logprobs: {id: {logprob, decoded_token}} per token, at most --max-logprobs (20)
SGLang    choices[i].logprobs with echo: {text: logprob} per token; words of one text hide each other
OpenAI    the same, at most 5 words; refuses echo with logprobs for gpt-3.5-turbo-instruct
llama.cpp refuses echo, or gives log-probabilities of new tokens only: it cannot be this teacher

Nothing is taken on trust. The text of each token must be ours under that id, each position must have as many
words as were asked for, probabilities must be finite and sum to at most 1, and what is said twice must agree.

N tokens of a document, K words of a position, the likeliest first.
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

EPSILON = 1e-3  # by which probabilities may sum to more than 1, and two accounts of one differ: text rounds
IMPOSSIBLE = -1000.0  # vLLM writes -9999 for -inf
SHORT = 8  # tokens of a document at most, of which a teacher may be certain to the last bit
TOGETHER = 8  # documents of one request, which the server computes side by side
TEXTS = "unfreeze generate URL --data F --out rows.jsonl, then unfreeze sft"
NO_LOGPROBS = (
    "vLLM and SGLang give log-probabilities of a prompt, llama.cpp and most paid services don't; take the"
    f" teacher's texts instead: {TEXTS}"
)

Top = list[tuple[int, float]]
"""(id, log-probability in nats) of the likeliest words at one position, the likeliest first."""


@dataclass(frozen=True)
class Scored:
    """What the teacher says of one document of N tokens.

    top     for each of tokens 1 … N - 1: its likeliest words, given the tokens before it
    own     log-probability of the token itself there
    """

    top: list[Top]
    own: list[float]


class Endpoint:
    """Asks a server for the `top` likeliest words at each token.

    name       of the model on the server; "": the one it has
    tokenizer  the student's; the server's words must be the same
    reserve    (tokens read, tokens written) of a try, before it is sent (teach/budget.py)
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
        self._form: int | None = None  # of FORMS: what this server takes
        self._texts: dict[int, str] = {}
        self.listed = self.shared = 0
        """Words that came under their texts, and how many of these have a text that several ids share."""

    def __repr__(self) -> str:
        return f"{self.name or 'the model'} at {self.client.url}"

    def scored(self, documents: Sequence[Sequence[int]]) -> Iterator[Scored]:
        """One after the other, TOGETHER in a request. Raises EndpointError at one that cannot be used."""
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
                # fields that a strict server doesn't know: asked again without them
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
        """The choices in the order of the documents, each checked when its turn comes."""
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
        if (found := choice.get("prompt_logprobs")) is not None:
            positions = self._by_id(found, tokens)
        elif is_object(found := choice.get("logprobs")):
            positions = self._by_text(found, tokens)
        else:
            raise self._wrong("its answer has no log-probabilities of the prompt", NO_LOGPROBS)
        each = {said for words, _ in positions for said in words.values()}
        if len(tokens) > SHORT and len(each) == 1:
            raise self._wrong(f"every log-probability is {each.pop():g}")
        scored = [self._checked(words, own, place) for place, (words, own) in enumerate(positions, 1)]
        return Scored(scored, [own for _, own in positions])

    def _by_id(self, found: Any, tokens: Sequence[int]) -> list[tuple[dict[int, float], float]]:
        """vLLM's: per position an object id -> {logprob, rank, decoded_token}."""
        if not is_list(found) or len(found) < len(tokens):
            raise self._wrong(f"log-probabilities for {_len(found)} of {len(tokens)} tokens")
        positions: list[tuple[dict[int, float], float]] = []
        for place in range(1, len(tokens)):
            entries = found[place]
            if not is_object(entries):
                raise self._wrong(f"token {place}: its log-probabilities are {_short(entries)}")
            self._enough(len(entries), place)
            words: dict[int, float] = {}
            for written, entry in entries.items():
                if not _is_id(written) or not is_object(entry):
                    raise self._wrong(f"token {place}: {written!r} is no token id with a log-probability")
                said = self._number(entry.get("logprob"), place)
                if self._same_word(int(written), entry.get("decoded_token"), place):
                    words[int(written)] = said
            if tokens[place] not in words:
                raise self._wrong(
                    f"token {place}: {tokens[place]}, the prompt's own, is not among those listed"
                )
            self._likeliest(words, len(entries), place)
            positions.append((words, words[tokens[place]]))
        return positions

    def _likeliest(self, words: dict[int, float], listed: int, place: int) -> None:
        """The K likeliest of V words have K / V or more; half of it leaves room for a padded head."""
        total, size = sum(map(math.exp, words.values())), self.tokenizer.named_size
        least = self.top / size
        if len(words) == listed and total < least / 2:
            raise self._wrong(
                f"token {place}: the {listed} likeliest of {size:,} words have {total:.2g}"
                f" together, which is less than {least:.2g}: logits instead of log-probabilities?",
                "log-probabilities from the server (vLLM: --logprobs-mode raw_logprobs)",
            )

    def _by_text(self, found: dict[str, Any], tokens: Sequence[int]) -> list[tuple[dict[int, float], float]]:
        """OpenAI's: tokens, token_logprobs, top_logprobs, each a list over the prompt and what was added.

        A text that several ids have names none of them, so it is left out; its probability is with the words
        that are not listed. The prompt's own token is known by its place.
        """
        lists: list[Any] = [found.get(name) for name in ("tokens", "token_logprobs", "top_logprobs")]
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
            for text, said in entries.items():
                ids, said = self._ids.get(text, ()), self._number(said, place)
                if not ids and "\ufffd" not in text:
                    raise self._other(f"token {place}: it lists {text!r}, which is no word of ours")
                self.listed, self.shared = self.listed + 1, self.shared + (len(ids) != 1)
                if len(ids) == 1:
                    words[ids[0]] = said
                    if ids[0] == tokens[place] and abs(said - own) > EPSILON:
                        raise self._wrong(
                            f"token {place}: its log-probability is {own:g}, and {said:g} in another list"
                        )
            if place == 1:
                self._enough(len(entries), place)
            words[tokens[place]] = own
            positions.append((words, own))
        return positions

    def _checked(self, words: dict[int, float], own: float, place: int) -> Top:
        """The likeliest `top` words, sorted: where probabilities are ones."""
        total = sum(math.exp(said) for said in words.values())
        if total > 1 + EPSILON:
            raise self._wrong(f"token {place}: the probabilities of {len(words)} words sum to {total:.4g}")
        return sorted(words.items(), key=lambda word: -word[1])[: self.top]

    def _number(self, said: Any, place: int) -> float:
        if isinstance(said, bool) or not isinstance(said, (int, float)) or not said <= EPSILON:
            raise self._wrong(f"token {place}: a log-probability is {_short(said)}")
        return float(said) if said > IMPOSSIBLE else -math.inf

    def _enough(self, count: int, place: int) -> None:
        if count < min(self.top, self.tokenizer.named_size):
            raise self._wrong(
                f"token {place}: {count} words with log-probabilities, {self.top} were asked for",
                f"--distillation.top-k {count}; or let the server give more"
                f" (vLLM: --max-logprobs {self.top})",
            )

    def _same_word(self, id: int, text: Any, place: int) -> bool:
        """Whether we have a word under an id; raises where it isn't the server's.

        Ids without a word are the padding of its head. A part of a character has no text to compare.
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
        """A word's text -> every id that has it."""
        found: dict[str, tuple[int, ...]] = {}
        for id in range(self.tokenizer.named_size):
            text = self._text(id)
            found[text] = (*found.get(text, ()), id)
        return found

    def _wrong(
        self, words: str, next: str = "see that it serves the teacher, without a proxy that cuts"
    ) -> EndpointError:
        return EndpointError(f"{self}: {words}", next=next)

    def _other(self, words: str) -> UserError:
        return EndpointError(
            f"{self}: {words}: another vocabulary",
            next=f"a teacher with the student's tokenizer; of another one take the texts: {TEXTS}",
        )


def _for_vllm(top: int) -> dict[str, Any]:
    return {"prompt_logprobs": top, "return_token_ids": True}


FORMS: tuple[Callable[[int], dict[str, Any]], ...] = (_for_vllm, lambda top: {})
"""Fields beyond OpenAI's that a request has: vLLM's first, then none."""


def _spelled(text: str) -> str:
    """A word's text, however a server spells the space before it."""
    return text.replace("\u2581", " ").replace("\u0120", " ").removeprefix(" ") or text


def _is_id(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10


def _short(value: object) -> str:
    return repr(value)[:60]


def _len(value: object) -> int:
    return len(value) if is_list(value) else 0
