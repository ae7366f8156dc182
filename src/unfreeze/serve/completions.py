"""POST /v1/completions: its body, checked, and its answers in OpenAI's JSON.

A prompt is a text, a list of texts, ids, or a list of lists of ids. A text is read as it stands: the text of
a special token becomes that token, as the client writes the chat template itself if it wants one.

P prompts, n answers to each; choice index = prompt · n + answer.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, Field, model_validator

from unfreeze.generate.answer import Completion
from unfreeze.generate.request import PromptScores, Top
from unfreeze.serve.request import MAX_TOKENS, MAX_TOP, Asking, Refused, Sampled, read_fields

if TYPE_CHECKING:
    from unfreeze.data.tokens.tokenizer import Tokenizer

MAX_PROMPTS = 2048  # of one request

Ids = list[int]
Likeliest = Sequence[tuple[int, float]]


def _no_suffix(text: str) -> str:
    if text:
        raise ValueError("text between a prompt and a suffix is not built")
    return text


class Fields(Sampled):
    """Fields of a completion. max_tokens 0 is for the prompt's log-probabilities alone.

    logprobs: likeliest tokens to list at each place; 0: none, and the log-probabilities of the tokens.
    """

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP)] | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    suffix: Annotated[str, AfterValidator(_no_suffix)] | None = None

    @model_validator(mode="after")
    def _agrees(self) -> Fields:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError("best_of other than n is not built")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens = 0 needs echo = true")
        if self.echo and self.stream:
            raise ValueError("echo has no stream; leave out one of them")
        return self


class Continue(Asking):
    """A checked completion.

    prompts  ids of each
    texts    of each, as the client wrote it; None for ids
    echo     the answer's text and log-probabilities begin with the prompt's
    """

    def __init__(self, fields: Fields, tokenizer: Tokenizer, num_ids: int):
        super().__init__(fields)
        self.new_tokens = 16 if fields.max_tokens is None else fields.max_tokens  # OpenAI's number
        self.top, self.echo = fields.logprobs, bool(fields.echo)
        self.prompts, self.texts = prompts_of(fields.prompt, tokenizer, num_ids)


def read_completion(raw: bytes, tokenizer: Tokenizer, num_ids: int) -> Continue:
    """Check a body. Raises Refused, which names the field. num_ids: ids that the model knows."""
    return Continue(read_fields(raw, Fields), tokenizer, num_ids)


def prompts_of(
    prompt: str | list[str] | list[int] | list[list[int]], tokenizer: Tokenizer, num_ids: int
) -> tuple[list[Ids], list[str | None]]:
    """Return the ids of each prompt, and its text if it is one. Raises Refused."""
    each: list[Any] = prompt if isinstance(prompt, list) and prompt else [prompt]
    if isinstance(each[0], int):
        each = [each]
    if len(each) > MAX_PROMPTS:
        raise _wrong(f"{len(each):,} prompts; at most {MAX_PROMPTS:,} are taken at once")
    prompts = [raw_ids(one, tokenizer) if isinstance(one, str) else list(one) for one in each]
    for i, ids in enumerate(prompts):
        if not ids:
            raise _wrong(f"prompt {i} is empty; it needs at least one token")
        if wrong := next((id for id in ids if not 0 <= id < num_ids), None):
            raise _wrong(f"token id {str(wrong)[:20]} is outside the vocabulary 0 to {num_ids - 1}")
    return prompts, [one if isinstance(one, str) else None for one in each]


def raw_ids(text: str, tokenizer: Tokenizer, *, begin: bool = True) -> Ids:
    """Return the ids of a text as it stands. begin: after BOS, if documents start with it here."""
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise _wrong("half a surrogate pair is no character; send UTF-8, or a pair of escapes")
    bos = [tokenizer.bos_id] if begin and tokenizer.add_bos and tokenizer.bos_id is not None else []
    return [*bos, *tokenizer.encode(text, specials=True)]


def _wrong(words: str) -> Refused:
    return Refused(400, f"prompt: {words}", param="prompt")


class Spelling:
    """Texts of single tokens as OpenAI's older endpoint writes them: `bytes:\\xe4` for half a character."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def __call__(self, id: int) -> str:
        """Return the token's text, special tokens spelled out."""
        if id not in self._texts:
            text, raw = self._tokenizer.decode([id], skip_specials=False), self._tokenizer.bytes_of(id)
            half = raw is not None and raw != text.encode()
            self._texts[id] = "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw or b"") if half else text
        return self._texts[id]

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens spelled out."""
        return self._tokenizer.decode(ids, skip_specials=False)

    def offsets(self, ids: Sequence[int], start: int = 0) -> list[int]:
        """Return where each token begins in the text of all, in characters. Half of one has no length."""
        utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        places: list[int] = []
        for id in ids:
            places.append(start)
            raw = self._tokenizer.bytes_of(id)
            start += len(self(id) if raw is None else utf8.decode(raw))
        return places


def logprobs_of(
    ids: Sequence[int],
    values: Sequence[float | None],
    tops: Sequence[Likeliest | None],
    spell: Spelling,
    start: int = 0,
) -> dict[str, Any]:
    """Return the log-probabilities of tokens in the form of /v1/completions.

    top_logprobs has the likeliest tokens and the token itself: of two with one text, the likelier. A token
    among the likeliest has the very number that is there: lm-eval compares them with ==.
    """
    lists: list[dict[str, float] | None] = []
    own: list[float | None] = []
    for id, value, top in zip(ids, values, tops, strict=True):
        value = dict(top or ()).get(id, value)
        own.append(value)
        if top is None or value is None:
            lists.append(None)
            continue
        table: dict[str, float] = {}
        for other, logprob in [*top, (id, value)]:
            table.setdefault(spell(other), logprob)
        lists.append(table)
    return {
        "tokens": [spell(id) for id in ids],
        "token_logprobs": own,
        "top_logprobs": lists if any(each is not None for each in lists) else None,
        "text_offset": spell.offsets(ids, start),
    }


def choices_of(
    request: Continue,
    prompt: int,
    answers: Sequence[Completion],
    tops: Sequence[Top],
    scores: PromptScores | None,
    spell: Spelling,
) -> Iterator[dict[str, Any]]:
    """Yield the choices of one prompt. scores: of the prompt's tokens, if they are shown."""
    ids, text = request.prompts[prompt], request.texts[prompt]
    before: list[int] = []
    values: list[float | None] = []
    lists: list[Likeliest | None] = []
    head = ""
    if request.echo:
        head = spell.text(ids) if text is None else text
        if scores is not None:
            before, values = ids, [None, *scores.logprobs]
            lists = [None, *(scores.top if request.top else [None] * len(scores.logprobs))]
    for i, answer in enumerate(answers):
        logprobs = None
        if request.top is not None:
            top = tops[i] if request.top and tops else [None] * len(answer.tokens)
            tokens = [*before, *answer.tokens]
            logprobs = logprobs_of(tokens, [*values, *answer.logprobs], [*lists, *top], spell)
        yield {
            "index": prompt * request.n + i,
            "text": head + answer.text,
            "logprobs": logprobs,
            "finish_reason": answer.finish_reason,
        }
