"""Answers of agents: each is a session that an agent has with the run's own endpoint.

An agent's code runs in the graders' processes (rollout/agents.py) and speaks with the model as an application
does; the router records ids and log-probabilities (serve/session.py). While a step is sampled, one thread
answers requests and this one waits for the agents; no request is answered while weights change.
"""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unfreeze.core.draws import number
from unfreeze.core.errors import ConfigError
from unfreeze.rollout.agents import Agents
from unfreeze.rollout.answering import Asked
from unfreeze.rollout.prompts import text_of
from unfreeze.rollout.reward import Graded
from unfreeze.rollout.sampled import Sampled

if TYPE_CHECKING:
    from unfreeze.data import Tokenizer
    from unfreeze.data.rows.row import Conversation
    from unfreeze.generate.engine import Engine
    from unfreeze.rollout.limits import Limits
    from unfreeze.rollout.rollouts import Settings
    from unfreeze.rollout.user_code import Given
    from unfreeze.serve.session import Session, Speech, Spent

NO_TOKENS = "the agent made no request to its base_url that was answered"


def never() -> bool:
    """Return False."""
    return False


MODEL = "policy"
"""Name of the model at the endpoint; a request may leave it out."""


class ByAgents:
    """An Answering whose answers are made by agents. It listens from the start, and answers after `begin`.

    Raises ConfigError if the agent cannot be loaded, or if the libraries of the endpoint are absent.
    """

    def __init__(self, source: Given, limits: Limits, *, count: int, say: Callable[[str], None]):
        for library in ("starlette", "uvicorn"):
            try:
                import_module(library)
            except ImportError:
                raise ConfigError(
                    f"--agent needs the library {library} (extra [serve]), which is not installed",
                    next="pip install starlette uvicorn llguidance",
                ) from None
        from unfreeze.serve.running import Endpoint

        self._folder = tempfile.TemporaryDirectory(prefix="unfreeze-endpoint-")
        socket_file = Path(self._folder.name) / "socket"
        self.endpoint = Endpoint(socket_file=socket_file)
        limits = replace(limits, port=self.endpoint.port, socket_file=str(socket_file))
        try:
            self.agents = Agents(source, limits, count=count, say=say)
        except BaseException:
            self.endpoint.close()
            self._folder.cleanup()
            raise

    def begin(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        settings: Settings,
        window: int,
        stop: Callable[[], bool] = never,
    ) -> ByAgents:
        """Let the model answer. window: most ids of a sample, fed and sampled. stop: as in Agents.run."""
        from unfreeze.serve.router import Router
        from unfreeze.serve.session import Speech
        from unfreeze.serve.speaker import Speaker

        self._engine, self.settings, self.window, self._stop = engine, settings, window, stop
        self.speech: Speech = Speech(tokenizer, window)
        # a prompt that is copied has other last digits than one that is read: a resumed run would differ
        self.speaker = Speaker(engine, max_rows=settings.at_once, shares_prefixes=False)
        self.router = Router(self.speaker, tokenizer, MODEL)
        self.endpoint.serve(self.router)
        self._sampling(False)
        return self

    def to_the_end(self) -> ByAgents:
        """Return the same without `stop`: a validation is not left."""
        other = copy(self)
        other._stop = never
        return other

    def close(self) -> None:
        """End the agents, then the endpoint."""
        self.agents.close()
        self.endpoint.close()
        self._folder.cleanup()

    @property
    def engine(self) -> Engine:
        return self._engine

    def sample(self, questions: Sequence[Asked], n: int, *, greedy: bool = False) -> list[list[Sampled]]:
        """Run n agents for each prompt, each in a session of its own."""
        from unfreeze.serve.session import Rules, Session

        settings = self.settings
        rules = Rules(
            settings.temperature,
            settings.new_tokens,
            self.window,
            replay=settings.replay and not greedy,
            greedy=greedy,
        )
        every = [(each, answer) for each in questions for answer in range(n)]
        sessions: dict[int, Session] = {}
        self.router.sessions.clear()  # of the last step: they have ended

        def open(index: int) -> str:
            """Begin a session; one that was begun for this answer before is forgotten."""
            if index in sessions:
                sessions[index].end()
            each, answer = every[index]
            sessions[index] = Session(self.speech, rules, number(*each.key, answer))
            name = secrets.token_hex(8)
            self.router.sessions[name] = sessions[index]
            return self.endpoint.session_url(name)

        self._sampling(True)
        try:
            graded = self.agents.run([each.row for each, _ in every], open, self._stop)
        finally:  # Ctrl-C too: nobody asks the model any more, and its weights may change
            spent = [session.end() for _, session in sorted(sessions.items())]
            self.speaker.drain()
            self._sampling(False)
        answers = [answer_of(*both) for both in zip(spent, graded, strict=True)]
        return [answers[first : first + n] for first in range(0, len(answers), n)]

    def _sampling(self, now: bool) -> None:
        """Show in /metrics who waits: outside of sampling, sessions wait for the optimizer."""
        if self.endpoint.service is not None:
            self.endpoint.service.metrics.updating = not now

    def grade(self, answered: Sequence[tuple[Conversation, Sampled]]) -> list[Graded]:
        """Return the rewards that the agents returned."""
        return [answer.graded or Graded(None, outcome="no value") for _, answer in answered]


def answer_of(spent: Sequence[Spent], graded: Graded) -> Sampled:
    """Return an agent's answer: its session's samples, and its reward, which one without tokens has not."""
    fed = [each.sample for each in spent if any(each.sample.sampled)]
    tokens = [id for sample in fed for id, own in zip(sample.ids, sample.sampled, strict=True) if own]
    log_p = [each for sample in fed for each in sample.log_p]
    turns = [
        [str(message["role"]), _shown(message)]
        for each in spent
        for message in (*each.turn.messages, each.answer)
    ]
    if not tokens and graded.outcome == "ok":
        graded = Graded(None, outcome="no tokens", message=NO_TOKENS)
    stop = "length" if spent and spent[-1].cut else "end"
    text = _shown(spent[-1].answer) if spent else ""
    return Sampled(tokens, text, stop, log_p, None, fed, turns, {}, graded)


def _shown(message: dict[str, Any]) -> str:
    """The text of a message, with its calls."""
    calls = [
        f"{call['function']['name']}({call['function']['arguments']})"
        for call in message.get("tool_calls", ())
    ]
    return "\n".join([text for text in (text_of(message), *calls) if text])
