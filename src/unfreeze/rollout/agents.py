"""Agents: a user's `async def run(base_url, row) -> float | dict`, in processes that can be killed.

Each answer of a step is one call. It speaks with the model at base_url, an endpoint in OpenAI's form, as
often as it likes, and returns the reward. Many run at once in each process, in forks of it (apart.py). They
reach the endpoint and no other network, where the system allows that (relay.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from unfreeze.core.errors import ConfigError, StepLeft
from unfreeze.data.rows.row import Conversation
from unfreeze.rollout.graders import graded_of
from unfreeze.rollout.limits import Limits
from unfreeze.rollout.pool import Job, Pool, Pooled
from unfreeze.rollout.reward import Graded
from unfreeze.rollout.signature import Signature
from unfreeze.rollout.user_code import Given, user_code
from unfreeze.rollout.worker import Gone, Reply
from unfreeze.untrusted.json_object import is_list, is_object

TOGETHER = 32
"""Runs at once in a process."""
THREADS = 8
"""Of each run, counted in the limit of a process's tasks."""
GRACE = 5.0
"""Seconds that a process has beyond those of its runs."""

Open = Callable[[int], str]
"""Number of a run -> the base_url of a new session for it."""


class Agents(Pooled):
    """The agent of a run.

    source  "my.py", "my.py:name", or a Python function
    limits  seconds: of one run, by the clock; port and socket_file: of the endpoint

    Raises ConfigError if the function cannot be loaded, or takes other arguments.
    """

    def __init__(
        self, source: Given, limits: Limits, *, count: int = 0, say: Callable[[str], None] = lambda line: None
    ):
        self.seconds = limits.seconds
        wider = replace(
            limits, seconds=limits.seconds + GRACE, processes=limits.processes + TOGETHER * THREADS
        )
        arguments = {"meaning": ["the endpoint's address", "the row"], "example": "base_url, row"}
        first = {"do": "load", "arguments": arguments}
        codes = user_code(source, "run", "agent")
        self._pool = Pool(codes, wider, first=first, count=count, say=say)
        try:
            signatures = [Signature.from_json(each) for each in self._pool.load()["signatures"]]
            if len(signatures) > 1:
                raise ConfigError(
                    f"agent: {len(signatures)} functions; a run has one", next="--agent my.py:run"
                )
            if more := signatures[0].required:
                raise ConfigError(
                    f"agent: {signatures[0].name} needs {more[0]!r}, which nothing gives it",
                    next=f"async def {signatures[0].name}(base_url, row); row has every column",
                )
        except BaseException:
            self.close()
            raise

    def run(
        self, rows: Sequence[Conversation], open: Open, stop: Callable[[], bool] = lambda: False
    ) -> list[Graded]:
        """Run the agent for each row. -> its rewards, or the named reasons for none.

        A process that is gone takes all its runs with it; each of these is made again by itself.
        stop: asked now and then; True ends all agents, and raises StepLeft.
        """
        numbers = list(range(len(rows)))
        parts = max(min(len(rows), len(self._pool.workers)), -(-len(rows) // TOGETHER))
        graded: dict[int, Graded] = {}
        lost: list[int] = []
        for inside in self._replies([numbers[part::parts] for part in range(parts)], rows, open, stop):
            for number, each in inside:
                if each is None:
                    lost.append(number)
                else:
                    graded[number] = each
        for ((number, each),) in self._replies([[number] for number in lost], rows, open, stop, alone=True):
            graded[number] = each or Graded(None, outcome="garbage", message="its process sent no reward")
        return [graded[number] for number in numbers]

    def _replies(
        self,
        parts: Sequence[Sequence[int]],
        rows: Sequence[Conversation],
        open: Open,
        stop: Callable[[], bool],
        *,
        alone: bool = False,
    ) -> list[list[tuple[int, Graded | None]]]:
        """Run each part in a process. alone: the process's end is the run's own outcome."""
        jobs = [
            Job(
                {
                    "do": "run",
                    "runs": [{"base_url": open(i), "row": dict(rows[i].columns)} for i in inside],
                    "each": self.seconds,
                }
            )
            for inside in parts
        ]
        every: list[list[tuple[int, Graded | None]]] = []
        replies = self._pool.run(jobs, lambda reply: stop())
        if stop():
            raise StepLeft
        for inside, reply in zip(parts, replies, strict=True):
            if isinstance(reply.content, Gone):
                why = graded_of(reply) if alone else None
                every.append([(number, why) for number in inside])
                continue
            sent = reply.content.get("graded")
            if not is_list(sent) or len(sent) != len(inside) or not all(map(is_object, sent)):
                every.append([(number, None) for number in inside])
                continue
            own = [graded_of(Reply(each, reply.printed if alone else "")) for each in sent]
            every.append(list(zip(inside, own, strict=True)))
        return every
