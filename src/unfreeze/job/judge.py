"""A reward by a model behind a server: its questions, its budget, and what it has said in this run.

RUN/judge/verdicts.jsonl  each answer of the judge, so that a resumed run asks nothing twice
RUN/judge/spent.json      the cost so far (teach/budget.py)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from pathlib import Path

from unfreeze.config.grpo import Rollout
from unfreeze.config.judge import JudgeConfig
from unfreeze.core.closing import Closing
from unfreeze.core.errors import ConfigError, DataError, StepLeft, StepRefused, UserError, nearest
from unfreeze.data.rows.row import Conversation
from unfreeze.rollout.reward import Graded
from unfreeze.rollout.verdicts import Mode, Pairs, Scores, Verdict, partners
from unfreeze.teach.address import EndpointError, base_url, refuse_unheard, refuse_without_library
from unfreeze.teach.answers import REFUSED, Answer
from unfreeze.teach.budget import Budget, Price
from unfreeze.teach.chat import ChatEndpoint, most_tokens
from unfreeze.teach.once import Come, Once

FOLDER = "judge"  # in the run's folder
TRIES = 3  # of a request
OF_ONE = (400, 413, 422)
"""Statuses with which a server refuses one request; it may take others."""
PASSING = (408, 409, 429)
"""Statuses below 500 that may pass."""
MONEY = "in the judge's file: price_read and price_written, USD per million tokens, and a larger budget_usd"
FILTERED = ("content_filter", REFUSED)
SKIPPED = Verdict(None, "skipped", "not waited for: too many verdicts before it took too long")


class Judge(Closing):
    """A judge of a run, with the manners of Graders.

    config  of its file (config/judge.py)
    folder  for verdicts and cost

    Raises ConfigError if the client library is absent, if the server needs a price, or if the budget does not
    hold one request.
    """

    def __init__(self, config: JudgeConfig, folder: Path):
        refuse_without_library(config.endpoint)
        from unfreeze.teach.client import Client  # the library openai: an extra, and a second

        self.config, self.url = config, base_url(config.endpoint)
        self.mode: Mode = (
            Scores(config.rubric, config.reference)
            if config.mode == "score"
            else Pairs(config.rubric, config.pairs, config.reference)
        )
        client = Client(config.endpoint, timeout=config.timeout, tries=TRIES)
        price = Price(config.price_read, config.price_written)
        budget = Budget(folder, config.budget_usd, price)
        # a resumed run may need no more requests
        least = (0, 0) if budget.spent else (most_tokens(_row(config.rubric)), config.max_tokens)
        try:
            budget.worst(client.url, *least)
        except ConfigError as error:
            raise ConfigError(error.message, next=MONEY) from None
        sampling = {"max_tokens": config.max_tokens, "temperature": config.temperature}
        endpoint = ChatEndpoint(client, config.model, sampling, budget.reserve)
        about = {"model": config.model, **sampling}
        self.once = Once(endpoint.ask, folder / "verdicts.jsonl", about, at_once=config.at_once)

    def close(self) -> None:
        """Close the file of verdicts."""
        self.once.close()

    def check(self, rows: Iterable[Conversation]) -> None:
        """Raise DataError for the first row without the reference's column, if the file names one.

        Raises ConfigError if the judge is to be on this machine, and nothing listens there.
        """
        name = self.config.reference
        for row in rows if name else ():
            if name not in row.columns:
                raise DataError(
                    f"row {row.row} has no column {name!r}, which is the judge's reference"
                    f"{nearest(name, row.columns)}",
                    next="correct reference in the judge's file, or leave it out",
                )
        refuse_unheard(self.url)

    def grade(
        self,
        answers: Sequence[tuple[Conversation, str]],
        *,
        failing: float = 1.0,
        stop: Callable[[], bool] = lambda: False,
    ) -> list[Graded]:
        """Return the reward of each (row, answer's text); answers to one row stand together.

        failing  share of the verdicts that may take too long; once there are more, the rest is "skipped". It
                 is also, if none has come and all that are asked at once take too long
        stop     asked now and then; True raises StepLeft

        Raises StepRefused if the budget is spent, or if the server refuses every request (401, 403, 404).
        """
        groups = [list(each) for _, each in groupby(answers, key=lambda each: id(each[0]))]
        questions = [self.mode.questions(group) for group in groups]
        rows = [_row(question) for each in questions for question in each]
        come = self.once(rows, self._leaving(failing * len(rows), stop))
        if stop():
            raise StepLeft
        verdicts = iter([self._verdict(each) for each in come])
        graded = [
            self.mode.graded(group, [next(verdicts) for _ in own])
            for group, own in zip(groups, questions, strict=True)
        ]
        return [each for group in graded for each in group]

    def _leaving(self, most: float, stop: Callable[[], bool]) -> Callable[[Come | None], bool]:
        """Return `leave` of one call of grade."""
        late = came = unheard = 0

        def leave(each: Come | None) -> bool:
            nonlocal late, came, unheard
            if isinstance(each, UserError) and _of_all(each):
                raise StepRefused(each.message, next=each.next if isinstance(each, EndpointError) else MONEY)
            if isinstance(each, EndpointError):
                late += each.late
                unheard += each.unheard
                if not came and unheard >= self.config.at_once:
                    raise StepRefused(each.message, next=each.next)
            came += isinstance(each, Answer)
            return late > most or (not came and late >= self.config.at_once) or stop()

        return leave

    def _verdict(self, come: Come | None) -> Verdict:
        """Return the verdict of what came; None: it was not waited for."""
        if come is None:
            return SKIPPED
        if isinstance(come, EndpointError):
            refused = come.status in OF_ONE
            return Verdict(None, "timeout" if come.late else "refused" if refused else "error", come.message)
        if isinstance(come, Exception):
            raise come
        if come.ended in FILTERED:
            return Verdict(None, "refused", come.text or f"the server's filter ended it: {come.ended}")
        value = self.mode.read(come.text)
        if value is not None:
            return Verdict(value, words=come.text)
        cut = f"cut at max_tokens = {self.config.max_tokens}: " if come.ended == "length" else ""
        return Verdict(None, "unreadable", f"{cut}{come.text[-300:] or 'the judge wrote nothing'}")


def _of_all(error: UserError) -> bool:
    """True if every other request would fail likewise: a wrong key, an unknown model, a spent budget."""
    if not isinstance(error, EndpointError):
        return isinstance(error, ConfigError)
    status = error.status
    return status is not None and status < 500 and status not in (*OF_ONE, *PASSING)


def _row(question: str) -> Conversation:
    return Conversation([{"role": "user", "content": question}])


def line_of(judge: JudgeConfig, rollout: Rollout, greedy: bool) -> str:
    """'judge: NAME at URL; 128 requests a step, at most 256 where groups are replaced; budget $5'."""
    answers = rollout.answers + greedy
    each = answers if judge.mode == "score" else 2 * len(partners(answers, judge.pairs))
    requests = each * rollout.prompts_per_step
    more = f", at most {requests * (1 + rollout.resample):,} where groups are replaced"
    priced = judge.price_read is not None and judge.price_written is not None
    return (
        f"judge: {judge.model or 'the model'} at {judge.endpoint}, mode {judge.mode}; {requests:,} requests a"
        f" step{more if rollout.resample else ''}; budget "
        + (f"${judge.budget_usd:,.2f}" if priced else "none, since it has no price")
    )


def refuse_alone(judge: JudgeConfig, answers: int) -> None:
    """Raise ConfigError for pairs without a second answer."""
    if judge.mode == "pairs" and answers < 2:
        raise ConfigError(
            "mode = pairs compares the answers to one prompt, and there is only one", next="--answers 4"
        )


def refuse_held_out(judge: JudgeConfig) -> None:
    """Raise ConfigError for held-out prompts with pairs: half of all comparisons are won, always."""
    if judge.mode == "pairs":
        raise ConfigError(
            "mode = pairs measures nothing on held-out prompts: their mean reward is always 0.5",
            next="leave validation out, or mode = score in the judge's file",
        )
