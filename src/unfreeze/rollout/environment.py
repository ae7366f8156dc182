"""Environments that the model talks with: tools, several turns, and a reward at the end.

    environments, read = Environments("my.py:Calculator"), reads_calls(tokenizer.chat.source)
    episodes = environments.open(rows, read)                 # reset's text joins the last user message
    while some are not done:
        news = environments.turn(episodes, texts)            # calls run; their results are messages
    graded = environments.grade(episodes)

An Episode is a state machine that knows neither the model nor a process. The objects live in the graders'
processes (held.py). If one of these is killed, the others' environments in it are made again by the same
calls, and an answer whose calls then give other results is lost by name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from unfreeze.core.errors import ConfigError, nearest
from unfreeze.data.rows.row import Conversation, Message, Tool
from unfreeze.data.tokens.tool_calls import Read, Spoken
from unfreeze.rollout.limits import Limits
from unfreeze.rollout.pool import Job, Pool, Pooled
from unfreeze.rollout.reward import Graded, Outcome, checked
from unfreeze.rollout.user_code import Given, user_code
from unfreeze.rollout.worker import Gone

TURNS = 8
"""Most turns of an answer."""
UNREADABLE = "unreadable"
"""Name of the tool that answers a call that could not be read."""
COLUMN = "environment"
"""Column of a row that names its environment, if there are several."""

Done = Literal["", "answered", "turns", "failed"]
"""answered: a turn without a call. turns: no turn is left. failed: reset failed, or the object was lost."""


@dataclass(frozen=True)
class Result:
    """The result of a call as text; `fault`: the kind of error, "" for none."""

    text: str
    fault: str = ""


@dataclass(eq=False)
class Episode:
    """One answer of several turns.

    messages  the conversation so far, with the model's turns
    tools     schemas of the environment's tools
    spoken    the last turn of the model, taken apart
    past      each call so far, and its result
    faults    kinds of errors of calls, counted
    failure   the outcome and words if it failed
    """

    row: Conversation
    messages: list[Message]
    tools: list[Tool]
    read: Read
    most_turns: int = TURNS
    turns: int = 0
    done: Done = ""
    spoken: Spoken = field(default_factory=lambda: Spoken(""))
    past: list[tuple[Mapping[str, Any], str]] = field(default_factory=list[tuple[Mapping[str, Any], str]])
    faults: Counter[str] = field(default_factory=Counter[str])
    failure: tuple[Outcome, str] = ("ok", "")

    def hear(self, text: str) -> list[Mapping[str, Any]]:
        """Take the model's turn. -> the calls to run: {"name", "arguments"} each."""
        self.turns += 1
        self.spoken = self.read(text, len(self.past))
        message: Message = {"role": "assistant", "content": self.spoken.content}
        self.messages.append({**message, **({"tool_calls": self.calls} if self.calls else {})})
        if not self.calls:
            self.done = "answered"
        return [] if self.spoken.fault else [call["function"] for call in self.calls]

    @property
    def calls(self) -> list[Tool]:
        """The calls of the last turn; UNREADABLE in place of one that could not be read."""
        if not self.spoken.fault:
            return self.spoken.calls
        id = f"functions.{UNREADABLE}:{self.turns}"
        return [{"id": id, "type": "function", "function": {"name": UNREADABLE, "arguments": {}}}]

    def tell(self, results: Sequence[Result]) -> list[Message]:
        """Take the results of the calls. -> the messages to append: a tool's turn for each."""
        new: list[Message] = []
        if self.spoken.fault:  # the call could not be read; the model is told why
            results = [Result(f"error: {self.spoken.fault}", "unreadable call")]
        for call, result in zip(self.calls, results, strict=True):
            self.faults.update([result.fault] if result.fault else [])
            new.append(
                {
                    "role": "tool",
                    "name": call["function"]["name"],
                    "tool_call_id": call["id"],
                    "content": result.text,
                }
            )
        self.messages += new
        if self.turns >= self.most_turns and not self.done:
            self.done = "turns"
        return new

    def fail(self, outcome: Outcome, message: str) -> None:
        """End it for a reason that is not the model's."""
        self.done, self.failure = "failed", (outcome, message)


class Environments(Pooled):
    """The environments of a run, in processes that can be killed.

    source  "my.py:Class", a class, a file's dict of factories (my.py:NAME), or a dict of those: then each row
            names its own in the column `environment`

    Raises ConfigError if a class has no reset, or a tool without types or docstring.
    """

    def __init__(
        self,
        source: Given | dict[str, Given],
        limits: Limits | None = None,
        *,
        most_turns: int = TURNS,
        count: int = 0,
        say: Callable[[str], None] = lambda line: None,
    ):
        named = cast("dict[str, Given]", source) if isinstance(source, dict) else {"": source}
        pairs = [
            (name, code) for name, each in named.items() for code in user_code(each, "Environment", "env")
        ]
        self.most_turns, self._limits = most_turns, limits or Limits()
        self._pool = Pool(
            [code for _, code in pairs],
            self._limits,
            first={"do": "meet", "names": [name for name, _ in pairs]},
            count=count,
            say=say,
        )
        try:
            self._known: Mapping[str, Any] = self._pool.load()["environments"]
            if not self._known:
                raise ConfigError(
                    "env names a dict without an environment", next='{"name": Class, …} in that file'
                )
        except BaseException:
            self.close()
            raise
        self._count = 0
        self._places: dict[int, tuple[str, int]] = {}  # id(episode) -> its id there, its process

    @property
    def scores(self) -> bool:
        """True if every environment has get_reward; else reward functions are needed beside."""
        return all(each["scores"] for each in self._known.values())

    def name_of(self, row: Conversation) -> str:
        """Return the name of a row's environment. Raises ConfigError if there is none of that name."""
        if list(self._known) == [""]:
            return ""
        name = str(row.columns.get(COLUMN, ""))
        if name not in self._known:
            raise ConfigError(
                f"row {row.row}: {COLUMN} is {name!r}{nearest(name, self._known)}; there are:"
                f" {', '.join(self._known)}",
                next=f"give each row one of these in a column {COLUMN!r}",
            )
        return name

    def tools(self, row: Conversation) -> list[Tool]:
        """Return the schemas of the tools that a row's environment has."""
        return list(self._known[self.name_of(row)]["tools"])

    def check(self, rows: Iterable[Conversation]) -> None:
        """Raise ConfigError for the first row that names no environment that there is."""
        for row in rows:
            self.name_of(row)

    def check_reward(self, reward: str) -> None:
        """Raise ConfigError if an environment has no reward, and there is no --reward either."""
        if reward or self.scores:
            return
        kind = next(each["kind"] for each in self._known.values() if not each["scores"])
        raise ConfigError(
            f"environment {kind} has no get_reward, and no reward is given",
            next="def get_reward(self) -> float, or --reward my.py, which grades the last turn's text",
        )

    def open(self, rows: Sequence[Conversation], read: Read) -> list[Episode]:
        """Make an environment for each row and reset it; its text joins the last user message.

        read: the reader of the model's tool calls (tool_calls.py)
        """
        episodes = [
            Episode(row, [dict(message) for message in row.messages], self.tools(row), read, self.most_turns)
            for row in rows
        ]
        for episode in episodes:
            place = self._count % len(self._pool.workers)
            self._places[id(episode)] = (str(self._count), place)
            self._count += 1
        for episode, reply in zip(episodes, self._ask(episodes, [() for _ in rows]), strict=True):
            if reply is not None and (text := reply.get("opened")) is not None:
                last = episode.messages[-1]
                both = last["content"] + (text if isinstance(last["content"], str) else [_part(text)])
                episode.messages[-1] = {**last, "content": both}
        return episodes

    def turn(self, episodes: Sequence[Episode], texts: Sequence[str]) -> list[list[Message]]:
        """Take a turn of the model in each of these episodes, none of which is done.

        -> the messages to append to each; [] if it is done now.
        """
        calls = [episode.hear(text) for episode, text in zip(episodes, texts, strict=True)]
        busy = [i for i, mine in enumerate(calls) if mine]
        replies = self._ask([episodes[i] for i in busy], [calls[i] for i in busy])
        results: dict[int, list[Result]] = {}
        for i, reply in zip(busy, replies, strict=True):
            if reply is not None:
                results[i] = [Result(str(each["text"]), str(each["fault"])) for each in reply["results"]]
        news: list[list[Message]] = []
        for i, episode in enumerate(episodes):
            if episode.done in ("answered", "failed"):
                news.append([])
                continue
            mine = results.get(i, [])
            # a call that never ended changed nothing that is still there: it is not made again
            if all(result.fault not in LOST for result in mine):
                episode.past += [(call, result.text) for call, result in zip(calls[i], mine, strict=True)]
            news.append(episode.tell(mine))
        return news

    def grade(self, episodes: Sequence[Episode]) -> list[Graded]:
        """Return get_reward() of each, and forget its environment."""
        whole = [episode for episode in episodes if episode.done != "failed"]
        scores = self._ask(whole, [() for _ in whole], score=True)
        replies = dict(zip(map(id, whole), scores, strict=True))
        graded: list[Graded] = []
        for episode in episodes:
            reply = replies.get(id(episode))
            self._places.pop(id(episode), None)
            if reply is None or episode.done == "failed":
                graded.append(Graded(None, outcome=episode.failure[0], message=episode.failure[1]))
                continue
            known = checked(reply.get("graded") or {})
            graded.append(known or Graded(None, outcome="garbage", message="its process sent no reward"))
        return graded

    def _ask(
        self,
        episodes: Sequence[Episode],
        calls: Sequence[Sequence[Mapping[str, Any]]],
        *,
        score: bool = False,
    ) -> list[Mapping[str, Any] | None]:
        """Ask each episode's process. -> replies; None if it failed, faults if a call was killed."""
        jobs: list[Job] = []
        for episode, mine in zip(episodes, calls, strict=True):
            id_there, place = self._places[id(episode)]
            row = {
                name: value
                for name, value in episode.row.columns.items()
                if name != COLUMN or "" in self._known
            }
            request = {"do": "turn", "id": id_there, "environment": self.name_of(episode.row), "row": row}
            past = [call for call, _ in episode.past]
            jobs.append(Job({**request, "past": past, "calls": list(mine), "score": score}, place))
        replies: list[Mapping[str, Any] | None] = []
        for episode, mine, reply in zip(episodes, calls, self._pool.run(jobs), strict=True):
            content = reply.content
            if isinstance(content, Gone):
                if not mine:
                    episode.fail(content.outcome, content.message)
                    replies.append(None)
                    continue
                fault = {"text": f"error: {mine[0]['name']}: {content.message}", "fault": content.outcome}
                replies.append({"results": [fault] * len(mine)})
                continue
            if content.get("failed"):
                episode.fail("error", str(content["failed"]))
            elif content.get("replayed") and content["replayed"] != [text for _, text in episode.past]:
                episode.fail(
                    "ended", "its environment ended with another's process, and cannot be made again"
                )
            replies.append(None if episode.done == "failed" else content)
        return replies


LOST = ("timeout", "processes", "ended", "garbage")
"""Faults of a call after which its process was killed."""


def _part(text: str) -> Message:
    return {"type": "text", "text": text}
