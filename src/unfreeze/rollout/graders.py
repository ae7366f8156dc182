"""Rewards of many answers, by a user's functions in processes that can be killed.

    with Graders("my.py") as graders:
        graders.check(rows)
        graded = graders.grade([(row, answer), …])

Every answer gets a Graded: a reward, or a named outcome. Nothing that a function does ends or hangs the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from unfreeze.core.errors import StepLeft, printable
from unfreeze.data.rows.row import Conversation
from unfreeze.rollout.limits import Limits
from unfreeze.rollout.pool import Job, Pool, Pooled
from unfreeze.rollout.reward import MAX_MESSAGE, Graded, checked, prompt_column, prompt_of
from unfreeze.rollout.signature import Signature
from unfreeze.rollout.user_code import Given, user_code
from unfreeze.rollout.worker import Gone, Reply


class Graders(Pooled):
    """The reward of a run.

    reward  "my.py", "my.py:name", a Python function, or several: the sum of theirs
    count   processes; 0: one for each core, at most four
    say     called with one line if the system cannot cut the network
    field   setting that names the functions, for errors

    signatures  the arguments of each function

    Raises ConfigError if the functions cannot be loaded.
    """

    def __init__(
        self,
        reward: Given,
        limits: Limits | None = None,
        *,
        count: int = 0,
        say: Callable[[str], None] = lambda line: None,
        field: str = "reward",
    ):
        self.codes = user_code(reward, field=field)
        self._pool = Pool(self.codes, limits or Limits(), count=count, say=say)
        try:
            self.signatures = [Signature.from_json(each) for each in self._pool.load()["signatures"]]
        except BaseException:
            self.close()
            raise

    @property
    def digest(self) -> str:
        """Hash of all files: a resumed run is refused if it differs."""
        return "-".join(code.digest for code in self.codes)

    def check(self, rows: Iterable[Conversation]) -> None:
        """Raise ConfigError or DataError for the first row whose columns the functions cannot take."""
        for row in rows:
            self._keywords(row)

    def grade(
        self,
        answers: Sequence[tuple[Conversation, str]],
        *,
        failing: float = 1.0,
        stop: Callable[[], bool] = lambda: False,
    ) -> list[Graded]:
        """Return the reward of each (row, answer's text).

        failing  share of the answers that may take too long; once there are more, the rest is "skipped"
        stop     asked now and then; True ends all graders, and raises StepLeft
        """
        most, timeouts = failing * len(answers), 0

        def leave(reply: Reply | None) -> bool:
            nonlocal timeouts
            gone = reply.content if reply else None
            timeouts += isinstance(gone, Gone) and gone.outcome == "timeout"
            return timeouts > most or stop()

        replies = self._pool.run([self._job(row, text) for row, text in answers], leave)
        if stop():
            raise StepLeft
        return [graded_of(reply) for reply in replies]

    def _keywords(self, row: Conversation) -> dict[str, dict[str, Any]]:
        return {
            signature.name: signature.keywords(row.columns, row.row, prompt_column(row))
            for signature in self.signatures
        }

    def _job(self, row: Conversation, text: str) -> Job:
        content = {"prompt": prompt_of(row), "completion": text, "keywords": self._keywords(row)}
        return Job({"do": "grade", **content})


def graded_of(reply: Reply) -> Graded:
    """Return the reward that a process sent, or its outcome."""
    printed = printable(reply.printed.strip())[:MAX_MESSAGE]
    if isinstance(reply.content, Gone):
        return Graded(None, {}, reply.content.outcome, reply.content.message, printed)
    graded = checked(reply.content)
    if graded is None:
        return Graded(None, {}, "garbage", "its process sent no reward", printed)
    return Graded(graded.reward, graded.parts, graded.outcome, graded.message, printed)
