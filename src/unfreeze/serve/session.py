"""A model that is spoken to by messages, and what one answer of a run with rewards trains on.

In a session the next request usually begins with the messages of an earlier one and its answer. The ids that
were sampled then stay as they are, and only the new messages are tokenised (data/tokens/transcript.py). If
the agent or the template has rewritten the history, the request begins a sample of its own. Several requests
may begin with the same history; each sampled id is trained on once.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from unfreeze.core.draws import number
from unfreeze.core.errors import ConfigError, DataError
from unfreeze.data.rows.row import Message, Tool
from unfreeze.data.tokens.masks import encode_rendered, renderer
from unfreeze.data.tokens.tool_calls import Read, Spoken, reads_calls
from unfreeze.data.tokens.transcript import Sample, as_message, continuation
from unfreeze.generate.sampling import Sampling
from unfreeze.generate.stops import StopText
from unfreeze.serve.deltas import Shape, shape_of
from unfreeze.serve.request import Asking, Chat, Refused
from unfreeze.serve.signs import guarded, signed_text

if TYPE_CHECKING:
    from unfreeze.data.tokens.tokenizer import Tokenizer
    from unfreeze.generate.answer import Completion
    from unfreeze.serve.completions import Continue


@dataclass(frozen=True)
class Turn:
    """A request as the engine gets it.

    messages, tools  of its prompt; none of a text that is continued
    sample           the prompt's ids: those of `before` first, if it goes on with an earlier turn
    number           of the request in its session
    most             new tokens of an answer; cut: the run's limit, if that is `most`, not the request's
    thought          "open" if the prompt ends inside a think block, "closed" right after one, else ""
    raw              the prompt is a text that is continued
    recorded         a session keeps the answers and their log-probabilities
    """

    messages: list[Message]
    tools: list[Tool] | None
    sample: Sample
    sampling: Sampling
    most: int
    experts: bool = False
    number: int = 0
    before: Spent | None = None
    cut: bool = False
    thought: Literal["", "open", "closed"] = ""
    raw: bool = False
    recorded: bool = False


@dataclass(eq=False)
class Spent:
    """A turn with one of its answers.

    place    number of the request, and of the choice
    sample   everything fed and sampled so far
    answer   the sampled turn as the template gets it
    cut      True if the run's limit ended it
    """

    turn: Turn
    place: tuple[int, int]
    sample: Sample
    answer: Message
    cut: bool


class Speech:
    """Turns messages to prompts and sampled tokens to messages. Each request is a prompt of its own.

    new_tokens  of an answer, if the request names no number
    longest     most tokens of an answer, whatever the request names; None: as many as fit
    """

    ended = False

    def __init__(
        self, tokenizer: Tokenizer, positions: int, new_tokens: int = 1024, longest: int | None = None
    ):
        self.tokenizer, self.positions, self.new_tokens = tokenizer, positions, new_tokens
        self.longest = positions if longest is None else longest
        self._read: Read | ConfigError
        try:
            self._read = reads_calls(tokenizer.chat.source)
        except ConfigError as error:  # refused where a request has tools
            self._read = error

    @cached_property
    def shape(self) -> Shape:
        """The marks of reasoning and of calls in an answer."""
        return shape_of(self.tokenizer, None if isinstance(self._read, ConfigError) else self._read)

    def begin(self, chat: Chat) -> Turn:
        """Return the request's prompt and sampling, by OpenAI's defaults. Raises Refused."""
        prompt, thought = self.prompt(chat)
        most = room_for(prompt, self.positions, min(self.longest, chat.new_tokens or self.new_tokens))
        return Turn(
            chat.messages, chat.tools, Sample(prompt), _sampling(chat, most, 0), most, thought=thought
        )

    def begin_text(self, request: Continue, number: int) -> Turn:
        """The same for a text that is continued: the prompt of this number. Raises Refused."""
        prompt = request.prompts[number]
        most = room_for(prompt, self.positions, min(self.longest, request.new_tokens or 0), "prompt")
        return Turn([], None, Sample(prompt), _sampling(request, most, number), most, raw=True)

    def heard(self, turn: Turn, answers: Sequence[Completion]) -> list[Message]:
        """Return the answers as messages; of reasoning that was cut, as such."""
        return [self.message(turn, done, cut=True) for done in answers]

    def heard_text(self, turn: Turn, answers: Sequence[Completion]) -> None:
        """Nothing is recorded without a session."""

    def prompt(self, chat: Chat) -> tuple[list[int], Literal["", "open", "closed"]]:
        """Return the ids up to the assistant's turn, and how they end.

        Raises Refused for what the template does not take.
        """
        if chat.tools and isinstance(self._read, ConfigError):
            raise Refused(400, f"tools: {self._read.message}", param="tools")
        try:
            text = renderer(self.tokenizer).prompt(chat.messages, chat.tools)
            return encode_rendered(self.tokenizer, text), self.shape.block.state(text)
        except DataError as error:
            raise Refused(400, error.message, param="messages") from None

    def message(self, turn: Turn, done: Completion, *, cut: bool = False) -> Message:
        """Return an answer, its reasoning and its tool calls. A call that cannot be read is text.

        cut: reasoning without an end is reasoning; else it is content, as the template writes it back.
        """
        text = signed_text(done.tokens, self.tokenizer)
        if done.stop_reason == "stop word":
            text, stopped = StopText(turn.sampling.stop).push(text)
            text = text if stopped else done.text  # a control token parts the stop string
        whole = guarded(text, self.tokenizer)
        if cut and (thought := self.shape.unclosed(whole.text, turn.thought)) is not None:
            return {"role": "assistant", "content": "", "reasoning_content": whole.plain(thought)}
        spoken = Spoken(whole.text)
        if turn.tools and not isinstance(self._read, ConfigError):
            before = sum(len(each.get("tool_calls") or ()) for each in turn.messages)
            read = self._read(whole.text, before)
            spoken = spoken if read.fault else read
        message = as_message(self.tokenizer, turn.messages, spoken.content, spoken.calls)
        control = self.tokenizer.special_pattern  # spelled out above, as calls and reasoning are made of some
        if control is not None:
            message["content"] = control.sub("", message["content"])
        return whole.plain(message)


def _sampling(request: Asking, most: int, prompt: int) -> Sampling:
    """Return a request's own sampling of the prompt of this number, by OpenAI's defaults."""
    seed = secrets.randbits(63) if request.seed is None else request.seed
    first = prompt * request.n
    return Sampling(
        max(1, most),
        temperature=1.0 if request.temperature is None else request.temperature,
        top_k=request.top_k,
        top_p=request.top_p,
        stop=request.stop,
        n=request.n,
        seeds=tuple(number(seed, i) if i else seed for i in range(first, first + request.n)),
    )


@dataclass(frozen=True)
class Rules:
    """Limits of a run that its sessions keep to.

    temperature  of all sampling; greedy: take the likeliest ids all the same, to compare with
    new_tokens   of one answer to a request
    window       tokens of a sample
    requests     of one session
    replay       keep the chosen experts
    """

    temperature: float
    new_tokens: int
    window: int
    requests: int = 64
    replay: bool = False
    greedy: bool = False


class Session:
    """All requests that belong to one answer of a run with rewards.

    seed       each request and choice samples with its own, made of this and the request's number; a `seed`
               in the request is not read, as a group whose answers share one has nothing to learn from
    requests   so far
    """

    def __init__(self, speech: Speech, rules: Rules, seed: int):
        self.speech, self.rules, self.seed = speech, rules, seed
        self.ended, self.requests = False, 0
        self._spent: list[Spent] = []
        self._lock = threading.Lock()

    def begin(self, chat: Chat) -> Turn:
        """Return the prompt and the run's sampling. Raises Refused, also for another distribution."""
        count = self._counted(chat)
        with self._lock:
            messages, sample, before, thought = self._goes_on(chat)
        most, cut, sampling = self._sampling(chat, sample.ids, count, "messages")
        turn = Turn(messages, chat.tools, sample, sampling, most, self.rules.replay, count, before, cut)
        return replace(turn, thought=thought, recorded=True)

    def begin_text(self, request: Continue, number: int) -> Turn:
        """The same for a text that is continued: after an earlier sample that its ids begin with."""
        count = self._counted(request)
        prompt = request.prompts[number]
        with self._lock:
            fitting = [each for each in self._spent if prompt[: len(each.sample.ids)] == each.sample.ids]
            before = max(fitting, key=lambda each: len(each.sample.ids), default=None)
        sample = Sample(list(prompt))
        if before is not None:
            sample = copy_of(before.sample)
            sample.add(prompt[len(sample.ids) :], sampled=False)
        most, cut, sampling = self._sampling(request, prompt, count, "prompt")
        turn = Turn([], None, sample, sampling, most, self.rules.replay, count, before, cut)
        return replace(turn, raw=True, recorded=True)

    def _counted(self, request: Asking) -> int:
        """Return the number of a request. Raises Refused for one that the run's loss could not use."""
        rules = self.rules
        for name, value in (("temperature", rules.temperature), ("top_p", 1.0)):
            if getattr(request, name) not in (None, value):
                raise Refused(
                    400,
                    f"{name}: this run samples with {value:g}, which its loss needs; leave {name} out",
                    param=name,
                )
        if name := request.steered():
            words = f"{name}: this run trains on what the model samples by itself; leave {name} out"
            raise Refused(400, words, param=name)
        with self._lock:
            if self.requests >= rules.requests:
                raise Refused(403, f"a session has at most {rules.requests} requests")
            count, self.requests = self.requests, self.requests + 1
        return count

    def _sampling(
        self, request: Asking, prompt: list[int], count: int, param: str
    ) -> tuple[int, bool, Sampling]:
        """-> most new tokens, True if that is the run's limit, and the run's sampling."""
        rules = self.rules
        room = room_for(prompt, rules.window, rules.new_tokens, param)
        most = min(room, room if request.new_tokens is None else request.new_tokens)
        seeds = tuple(number(self.seed, count, choice) for choice in range(request.n))
        heat = 0.0 if rules.greedy else rules.temperature
        sampling = Sampling(max(1, most), temperature=heat, stop=request.stop, n=request.n, seeds=seeds)
        return most, most == room, sampling

    def heard(self, turn: Turn, answers: Sequence[Completion]) -> list[Message]:
        """Record the answers to a request, unless the session has ended. -> a message each."""
        messages = [self.speech.message(turn, done) for done in answers]
        self._record(turn, answers, messages)
        return messages

    def heard_text(self, turn: Turn, answers: Sequence[Completion]) -> None:
        """Record the answers to a text, unless the session has ended."""
        if turn.most:
            texts: list[Message] = [{"role": "assistant", "content": done.text} for done in answers]
            self._record(turn, answers, texts)

    def _record(self, turn: Turn, answers: Sequence[Completion], messages: Sequence[Message]) -> None:
        with self._lock:
            for choice, (done, message) in enumerate(zip(answers, messages, strict=True)):
                if self.ended:
                    break
                sample = copy_of(turn.sample)
                sample.add(done.tokens, sampled=True, log_p=done.sampled_logprobs, experts=done.experts)
                cut = turn.cut and done.finish_reason == "length"
                self._spent.append(Spent(turn, (turn.number, choice), sample, message, cut))

    def end(self) -> list[Spent]:
        """Take no more requests. -> the samples, in the order of requests. Each sampled id is in one."""
        with self._lock:
            self.ended = True
            spent = sorted(self._spent, key=lambda each: each.place)
        samples: dict[int, Sample] = {}
        continued: set[int] = set()
        for each in spent:
            samples[id(each)] = each.sample
            if (before := each.turn.before) is None:
                continue
            ids, logs = len(before.sample.ids), len(before.sample.log_p)
            earlier = samples[id(before)]
            taken = id(before) in continued  # another one trains on its tokens
            continued.add(id(before))
            samples[id(each)] = Sample(
                each.sample.ids,
                ([False] * ids if taken else earlier.sampled) + each.sample.sampled[ids:],
                ([] if taken else earlier.log_p) + each.sample.log_p[logs:],
                each.sample.experts,
            )
        return [replace(each, sample=samples[id(each)]) for each in spent if id(each) not in continued]

    def _goes_on(
        self, chat: Chat
    ) -> tuple[list[Message], Sample, Spent | None, Literal["", "open", "closed"]]:
        """Continue the longest turn that the messages begin with, else begin a sample.

        -> the messages as they were sampled: clients drop fields, such as reasoning, on the way.
        """
        fitting = [each for each in self._spent if not each.turn.raw and _begins_with(chat, each)]
        before = max(fitting, key=lambda each: len(each.turn.messages), default=None)
        if before is not None:
            earlier = before.turn.messages
            new = chat.messages[len(earlier) + 1 :]
            chat.messages = [*earlier, before.answer, *new]
            try:
                ids, _ = continuation(
                    self.speech.tokenizer, before.sample, earlier, before.answer, new, chat.tools
                )
            except DataError as error:
                raise Refused(400, error.message, param="messages") from None
            if ids is not None:
                sample = copy_of(before.sample)
                sample.add(ids, sampled=False)
                return chat.messages, sample, before, before.turn.thought
        prompt, thought = self.speech.prompt(chat)
        return chat.messages, Sample(prompt), None, thought


def room_for(prompt: Sequence[int], positions: int, most: int, param: str = "messages") -> int:
    """Return the most new tokens. Raises Refused (413) for a prompt that leaves no place for one."""
    if len(prompt) >= positions:
        raise Refused(
            413,
            f"{param}: {len(prompt):,} tokens leave no place for an answer; at most {positions - 1:,} are"
            " possible",
            param=param,
            code="context_length_exceeded",
        )
    return min(most, positions - len(prompt))


def copy_of(sample: Sample) -> Sample:
    """Return a copy that can grow."""
    return Sample(list(sample.ids), list(sample.sampled), list(sample.log_p), sample.experts)


def _begins_with(chat: Chat, spent: Spent) -> bool:
    """True if a request begins with the messages of a turn and its answer."""
    earlier = [*spent.turn.messages, spent.answer]
    if len(chat.messages) < len(earlier) or chat.tools != spent.turn.tools:
        return False
    return all(_same(theirs, ours) for theirs, ours in zip(chat.messages, earlier, strict=False))


def _same(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> bool:
    """True if a message that came back is the one that was sent; its reasoning may have been dropped."""
    if theirs.get("reasoning_content", ours.get("reasoning_content")) != ours.get("reasoning_content"):
        return False
    calls = [[call["function"] for call in each.get("tool_calls") or ()] for each in (theirs, ours)]
    plain = [
        (each.get("role"), each.get("content") or "", each.get("tool_call_id")) for each in (theirs, ours)
    ]
    return calls[0] == calls[1] and plain[0] == plain[1]
