"""Answers over several turns, at the level of tokens.

The ids that were sampled stay as they are; only what comes from elsewhere (results of tools, a user's turn)
is tokenised. Where the chat template would write the history otherwise than it was fed, because it drops
earlier reasoning or opens a think block in its prompt only, the next turn is a sample of its own with its own
prompt. So the ids that are trained on are always those that the model was fed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from unfreeze.data.rows.row import Message, Tool
from unfreeze.data.tokens.completions import Completions
from unfreeze.data.tokens.masks import encode_chat, encode_rendered, end_texts, renderer
from unfreeze.data.tokens.taught import QUOTE_OPEN, missing, words_of
from unfreeze.data.tokens.think import USUAL_MARKS, ThinkBlock
from unfreeze.data.tokens.tokenizer import Tokenizer


@dataclass
class Sample:
    """Ids in the order that the model was fed: one example to train on.

    sampled  True for each id that the model wrote itself
    log_p    of each of these when it was sampled, after temperature
    experts  int16 [fewer than ids, L, K]: of each id, those chosen when the model first read it
    """

    ids: list[int]
    sampled: list[bool] = field(default_factory=list[bool])
    log_p: list[float] = field(default_factory=list[float])
    experts: Tensor | None = None

    def __post_init__(self) -> None:
        self.sampled = self.sampled or [False] * len(self.ids)

    def add(
        self, ids: Sequence[int], *, sampled: bool, log_p: Sequence[float] = (), experts: Tensor | None = None
    ) -> None:
        """Append ids. experts: of all ids read so far; those of ids that were read before are kept."""
        self.ids += ids
        self.sampled += [sampled] * len(ids)
        self.log_p += log_p
        if experts is not None:
            before = experts[:0] if self.experts is None else self.experts
            self.experts = torch.cat([before, experts[len(before) :]])

    def last_turn(self) -> list[int]:
        """Return the sampled ids at the end."""
        begin = len(self.ids)
        while begin and self.sampled[begin - 1]:
            begin -= 1
        return self.ids[begin:]


class Transcript:
    """One answer of several turns: its samples, of which the last one grows.

    messages  the conversation as the template gets it
    tools     schemas of tools, or None
    forks     reasons for which a new sample began
    """

    def __init__(
        self, tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[Tool] | None = None
    ):
        self.tokenizer, self.tools = tokenizer, tools
        self.messages = list(messages)
        self.samples = [Sample(encode_chat(tokenizer, self.messages, tools))]
        self.forks: list[str] = []

    @property
    def prompt(self) -> list[int]:
        """The ids to be fed for the next turn."""
        return self.samples[-1].ids

    def hear(self, tokens: Sequence[int], log_p: Sequence[float] = (), experts: Tensor | None = None) -> str:
        """Take sampled ids. -> the turn's text: special tokens spelled out, without the one that ends it.

        log_p, experts: as in Sample
        """
        self.samples[-1].add(tokens, sampled=True, log_p=log_p, experts=experts)
        return spoken_text(self.tokenizer, tokens)

    def tell(self, answer: Message, new: Sequence[Message]) -> bool:
        """Append the turn that was just sampled, as a message, and what follows. -> True if a sample began.

        Raises DataError if the template refuses the conversation.
        """
        sample = self.samples[-1]
        ids, why = continuation(self.tokenizer, sample, self.messages, answer, new, self.tools)
        self.messages += [answer, *new]
        if ids is not None:
            sample.add(ids, sampled=False)
            return False
        self.forks.append(why)
        self.samples.append(Sample(encode_chat(self.tokenizer, self.messages, self.tools)))
        return True


def spoken_text(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """Return the text of a sampled turn without the stop id at its end; special tokens are spelled out."""
    ended = len(tokens) > 0 and tokens[-1] in tokenizer.eos_ids
    return tokenizer.decode(tokens[:-1] if ended else tokens, skip_specials=False)


def as_message(
    tokenizer: Tokenizer, before: Sequence[Message], content: str, calls: Sequence[Tool]
) -> Message:
    """Return a sampled turn as a message: reasoning apart from content, and its calls."""
    completions = Completions(tokenizer.chat, end_texts(tokenizer))
    marks = completions.marks or USUAL_MARKS
    opening, closing = marks.opening.strip(), marks.closing.strip()
    thought, closed, answer = content.partition(closing)
    begins_open = ThinkBlock(marks).state(renderer(tokenizer).prompt(before)) == "open"
    message: Message = {"role": "assistant", "content": content}
    if closed and (begins_open or thought.lstrip().startswith(opening)):
        reasoning = thought.strip().removeprefix(opening).strip()
        message["content"] = answer.strip()
        message |= {"reasoning_content": reasoning} if reasoning else {}
    if calls:
        message["tool_calls"] = [dict(call) for call in calls]
    return message


def continuation(
    tokenizer: Tokenizer,
    sample: Sample,
    before: Sequence[Message],
    answer: Message,
    new: Sequence[Message],
    tools: Sequence[Tool] | None = None,
) -> tuple[list[int] | None, str]:
    """Return the ids to append after a sampled turn, or None and the reason why the history is rewritten.

    sample  everything fed and sampled so far; it ends with the sampled turn
    before  the messages of its prompt; answer: the sampled turn; new: the messages that follow it
    """
    write = renderer(tokenizer)
    prompt, whole = write.prompt(before, tools), write.prompt([*before, answer, *new], tools)
    if not whole.startswith(prompt):
        return None, "the template writes the prompt otherwise once it is answered"
    # the sampled turn ends at the first token that ends turns; one in a message is quoted
    ends = end_texts(tokenizer)
    end = _first_end(whole, ends, len(prompt))
    if end is None:
        return None, "the template writes no token that ends a turn"
    tokens = sample.last_turn()
    text, written = spoken_text(tokenizer, tokens), whole[len(prompt) : end.start()]
    # spelled otherwise is no matter, such as JSON without spaces; words or think blocks that differ are
    if text != written:
        if (word := missing(list(words_of(answer, len(before))), written)) is not None:
            return None, f"the template drops {word.field} of an earlier turn"
        marks = Completions(tokenizer.chat, ends).marks or USUAL_MARKS
        closing = marks.closing.strip()
        if written.count(closing) != text.count(closing):
            return None, "the template adds or drops a think block of an earlier turn"
    if not tokens or tokens[-1] not in tokenizer.eos_ids:  # cut by a stop word
        return encode_rendered(tokenizer, whole[end.start() :], continues=True), ""
    if (last := tokenizer.token_text(tokens[-1])) != end[0]:
        return None, f"the turn ended with {last}, where the template writes {end[0]}"
    return encode_rendered(tokenizer, whole[end.end() :], continues=True), ""


def _first_end(text: str, ends: Sequence[str], begin: int) -> re.Match[str] | None:
    longest_first = sorted(map(re.escape, ends), key=len, reverse=True)
    return re.compile(f"(?<!{QUOTE_OPEN})(?:{'|'.join(longest_first)})").search(text, begin) if ends else None
