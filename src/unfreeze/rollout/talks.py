"""Answers of several turns: the model calls the tools of an environment until it answers without a call.

An answer ends with a turn without a call, when no turn is left, when its sampled tokens reach the longest
length (`length`), or when all that was fed and sampled fills the window (`window`). The reward is that of the
environment, that of the functions of --reward, or the sum of both.

Each process plays the environments of its own prompts, in graders of its own. Where processes share the
weights (lockstep), process 0 plays all of them, and each gets from it what the model is fed next.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from unfreeze.core.draws import number
from unfreeze.core.errors import StepLeft
from unfreeze.data.tokens.tool_calls import reads_calls
from unfreeze.data.tokens.transcript import Transcript, as_message
from unfreeze.generate.sampling import Sampling
from unfreeze.rollout.answering import Asked, Grade
from unfreeze.rollout.prompts import text_of
from unfreeze.rollout.reward import Graded, combined
from unfreeze.rollout.sampled import Sampled, as_text, of_text

if TYPE_CHECKING:
    from unfreeze.data import Tokenizer
    from unfreeze.data.rows.row import Conversation, Message
    from unfreeze.generate.answer import Completion
    from unfreeze.generate.engine import Engine
    from unfreeze.parallel.processes.collectives import Group
    from unfreeze.rollout.environment import Environments, Episode
    from unfreeze.rollout.rollouts import Settings

T = TypeVar("T")
Request = tuple[list[int], int, int]
"""What the model is fed for a turn: ids, most new tokens, seed."""


@dataclass(eq=False)
class Talk:
    """One answer while it is sampled.

    key     the numbers that its seeds are made of
    tokens  sampled ids of all turns
    turns   [role, text] of each turn
    stop    reason at which it ended; "" until then
    """

    episode: Episode
    transcript: Transcript
    key: tuple[int, ...]
    tokens: list[int] = field(default_factory=list[int])
    turns: list[list[str]] = field(default_factory=list[list[str]])
    stop: str = ""

    def request(self, new_tokens: int, window: int) -> Request | None:
        """Return what the model is fed for the next turn; None at the end."""
        prompt = self.transcript.prompt
        left, room = new_tokens - len(self.tokens), window - len(prompt)
        if self.episode.done == "failed":
            self.stop = "failed"
        elif not self.stop and min(left, room) < 1:
            self.stop = "window" if room < 1 else "length"
        return None if self.stop else (prompt, min(left, room), number(*self.key, self.episode.turns))

    def hear(self, done: Completion, new_tokens: int) -> str:
        """Take a turn. -> its text."""
        text = self.transcript.hear(done.tokens, done.sampled_logprobs, done.experts)
        self.tokens += done.tokens
        self.turns.append(["assistant", text])
        if done.stop_reason != "end":  # the turn is not whole, and neither are its calls
            self.stop = "length" if len(self.tokens) >= new_tokens else "window"
        return text

    def tell(self, news: Sequence[Message], tokenizer: Tokenizer) -> None:
        """Take what the environment says to the turn."""
        episode, transcript = self.episode, self.transcript
        self.turns += [[str(each["role"]), text_of(each)] for each in news]
        if episode.done:
            self.stop = {"answered": "end"}.get(episode.done, episode.done)
            return
        answer = as_message(tokenizer, transcript.messages, episode.spoken.content, episode.calls)
        transcript.tell(answer, news)

    def sampled(self, graded: Graded) -> Sampled:
        """Return the whole answer."""
        fed = [sample for sample in self.transcript.samples if any(sample.sampled)]
        own = [text for role, text in self.turns if role == "assistant"]
        log_p = [each for sample in fed for each in sample.log_p]
        faults = dict(self.episode.faults)
        text = own[-1] if own else ""
        return Sampled(self.tokens, text, self.stop, log_p, None, fed, self.turns, faults, graded)


class Talks:
    """An Answering with environments.

    environments  those that this process plays; None where process 0 plays all
    window        most ids of a sample, fed and sampled
    grade         the functions of --reward, if there are any
    stop          asked before each turn; True leaves the step (StepLeft), but in lockstep

    Raises ConfigError if the chat template's calls cannot be read.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        environments: Environments | None,
        settings: Settings,
        *,
        window: int,
        group: Group,
        grade: Grade | None = None,
        stop: Callable[[], bool] = lambda: False,
    ):
        self._engine, self.tokenizer, self.environments = engine, tokenizer, environments
        self._read = reads_calls(tokenizer.chat.source)
        self.settings, self.window, self.group, self._grade = settings, window, group, grade
        self._stop = stop

    @property
    def engine(self) -> Engine:
        return self._engine

    def sample(self, questions: Sequence[Asked], n: int, *, greedy: bool = False) -> list[list[Sampled]]:
        """Play n episodes for each prompt; in each turn the model continues all that are open at once."""
        settings = self.settings
        temperature = 0.0 if greedy else settings.temperature
        talks = self._play(lambda: self._open(questions, n)) or []
        while True:
            if not self.group.lockstep and self._stop():
                raise StepLeft
            requests = [each.request(settings.new_tokens, self.window) for each in talks]
            busy = [talk for talk, request in zip(talks, requests, strict=True) if request]
            fed = self._agreed([request for request in requests if request])
            if not fed:
                break
            prompts, limits, seeds = zip(*fed, strict=True)
            same = sharing(fed, n)
            done = self._engine.generate(
                prompts[::same],
                Sampling(settings.new_tokens, temperature=temperature, n=same, seeds=tuple(seeds)),
                max_rows=settings.at_once,
                limits=limits[::same],
                experts=settings.replay and not greedy,
            )
            self._play(lambda busy=busy, done=done: self._turn(busy, done))
        answers = self._play(lambda: self._close(talks)) or []
        if self._follows:
            answers = of_text(json.loads(self.group.of_first(json.dumps(as_text(answers)).encode())))
        return [answers[first : first + n] for first in range(0, len(answers), n)]

    def grade(self, answered: Sequence[tuple[Conversation, Sampled]]) -> list[Graded]:
        """Return each environment's reward, the functions' rewards of the last turn's text, or their sum."""
        own = [answer.graded or Graded(None, outcome="no value") for _, answer in answered]
        if self._grade is None:
            return own
        theirs = self._grade([(row, answer.text) for row, answer in answered])
        return [
            by_text if played.outcome == "no value" else combined({"environment": played, "reward": by_text})
            for played, by_text in zip(own, theirs, strict=True)
        ]

    @property
    def _follows(self) -> bool:
        return self.group.lockstep and self.group.size > 1

    def _play(self, action: Callable[[], T]) -> T | None:
        """Do it where the environments are. -> None in a process without any."""
        return self.group.on_rank0(action) if self._follows else action()

    def _agreed(self, requests: list[Request]) -> list[Request]:
        """Return what the model is fed: in lockstep, that of process 0."""
        if not self._follows:
            return requests
        return json.loads(self.group.of_first(json.dumps(requests).encode()))

    def _open(self, questions: Sequence[Asked], n: int) -> list[Talk]:
        assert self.environments is not None
        every = [(each, answer) for each in questions for answer in range(n)]
        episodes = self.environments.open([each.row for each, _ in every], self._read)
        talks: list[Talk] = []
        for (each, answer), episode in zip(every, episodes, strict=True):
            transcript = Transcript(self.tokenizer, episode.messages, episode.tools or None)
            talk = Talk(episode, transcript, (*each.key, answer))
            if (asks := text_of(episode.messages[-1])) != text_of(each.row.messages[-1]):
                talk.turns.append(["user", asks])  # with what reset says
            talks.append(talk)
        return talks

    def _turn(self, talks: Sequence[Talk], done: Sequence[Completion]) -> None:
        """Let the environments answer the turns that are whole."""
        assert self.environments is not None
        texts = [talk.hear(each, self.settings.new_tokens) for talk, each in zip(talks, done, strict=True)]
        whole = [(talk, text) for talk, text in zip(talks, texts, strict=True) if not talk.stop]
        news = self.environments.turn([talk.episode for talk, _ in whole], [text for _, text in whole])
        for (talk, _), new in zip(whole, news, strict=True):
            talk.tell(new, self.tokenizer)

    def _close(self, talks: Sequence[Talk]) -> list[Sampled]:
        assert self.environments is not None
        graded = self.environments.grade([talk.episode for talk in talks])
        return [talk.sampled(each) for talk, each in zip(talks, graded, strict=True)]


def sharing(requests: Sequence[Request], n: int) -> int:
    """Return n if every n requests in a row feed the same, so that they can share a prefill; else 1."""
    alike = all(each[:2] == requests[i - i % n][:2] for i, each in enumerate(requests))
    return n if alike and len(requests) % n == 0 else 1
