"""Send what a plan asks and has no answer yet, and make rows of the answers.

Each attempt is booked at its worst price before it is sent. An answer is on disk before the next is asked
for by the same worker. After a kill, a request that was under way stays booked, and is sent again only if
the ceiling still holds; after Ctrl-C the requests under way are waited for, since they are paid.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unfreeze.core.errors import ConfigError, DataError, UserError
from unfreeze.core.units import format_seconds
from unfreeze.synth.judging import questions_missing, questions_of
from unfreeze.synth.plan import ANSWERS, Plan, opened, read_plan
from unfreeze.synth.prompts import Count, Request, Requests
from unfreeze.synth.recipe import Recipe
from unfreeze.synth.rows import Written, write_rows
from unfreeze.synth.usage import checked
from unfreeze.teach.address import WORDS, EndpointError, refuse_unheard, refuse_without_library
from unfreeze.teach.answers import Answer
from unfreeze.teach.chat import answer_of
from unfreeze.teach.ledger import Ledger
from unfreeze.teach.once import Come, Kept
from unfreeze.teach.store import one_writer

if TYPE_CHECKING:
    from unfreeze.teach.client import Client

SAY_EVERY = 10.0  # seconds between two lines of progress
OF_ONE = (400, 413, 422)
"""Statuses with which a server refuses one request; it may take others."""
PASSING = (408, 409, 429)
"""Statuses below 500 that may pass."""
AT_LEAST = 4  # requests in a row that fail before a run stops
NO = "server refused"
"""Answer.ended of a request that the server refused; it is not asked again."""


@dataclass
class Sender:
    """Books, sends and checks one request.

    going    True once the server has answered one
    stopped  why none is sent any more: the other workers know it before it is said
    """

    client: Client
    recipe: Recipe
    ledger: Ledger
    plan: str
    count: Count | None = None
    going: bool = False
    stopped: UserError | None = None

    def __call__(self, request: Request) -> Answer:
        """Return the answer. Raises EndpointError, and ConfigError at the ceiling."""
        if self.stopped:
            raise self.stopped
        most = (request.read, request.written)
        try:
            raw = self.client.post(
                "chat/completions",
                request.body,
                lambda: self.ledger.book(request.key, *most),
                release=lambda: self.ledger.settle(request.key, most, (0, 0)),
                key=f"{self.plan}-{request.key}",
            )
        except UserError as error:
            if of_all(error):
                self.stopped = error
            if not isinstance(error, EndpointError):
                raise
            if self.going and error.status in OF_ONE:
                return Answer("", NO, about={"error": error.message[:WORDS], "time": now()})
            raise
        answer = answer_of(raw, f"{self.client.url}/chat/completions")
        self.going = True
        answer = looked_at(request, answer, self.count, self.ledger if self.recipe.trust_usage else None)
        if answer.about.get("over"):
            self.stopped = over_booked(answer.about["usage_fault"])
        return answer


def looked_at(request: Request, answer: Answer, count: Count | None, ledger: Ledger | None) -> Answer:
    """Return the answer with its time and what is wrong with its usage. ledger: lowered to the usage."""
    usage = checked(request, answer, count)
    about = {**answer.about, "time": now()}
    about |= {"usage_fault": usage.fault} if usage.fault else {}
    about |= {"over": True} if usage.over else {}
    if ledger is not None and not usage.fault:
        ledger.settle(request.key, (request.read, request.written), usage[:2])
    return replace(answer, about=about)


def now() -> str:
    """Return this second, UTC."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass
class Watch:
    """Answers of one run, when to stop, and the lines of progress."""

    recipe: Recipe
    ledger: Ledger
    total: int
    show: Callable[[str], None]
    stopped: UserError | None = None
    failed: UserError | None = None
    failures: int = 0
    came: int = 0
    in_a_row: int = 0
    began: float = field(default_factory=time.monotonic)
    last_line: float = field(default_factory=time.monotonic)

    def __call__(self, come: Come | None) -> bool:
        """Look at what came; True: ask no more."""
        if isinstance(come, Answer):
            self.came, self.in_a_row = self.came + 1, 0
            if come.about.get("over"):
                self.stopped = over_booked(come.about["usage_fault"])
        elif isinstance(come, UserError):
            self.failures, self.in_a_row = self.failures + 1, self.in_a_row + 1
            self.failed = come
            if of_all(come) or self.in_a_row >= max(AT_LEAST, self.recipe.at_once):
                self.stopped = come
        elif come is not None:
            raise come
        if time.monotonic() - self.last_line > SAY_EVERY:
            self.last_line = time.monotonic()
            self.show(self.line())
        return self.stopped is not None

    def line(self) -> str:
        """'412 of 1,000 requests answered, 3 failed; $0.41 of $2.00 booked; 3 min 20 s left'."""
        left = "time left unknown"  # before the first answer
        if self.came:
            each = (time.monotonic() - self.began) / self.came
            left = f"{format_seconds(each * max(0, self.total - self.came))} left"
        failed = f", {self.failures:,} failed" if self.failures else ""
        return f"{self.came:,} of {self.total:,} requests answered{failed}; {money(self.ledger)}; {left}"


def over_booked(fault: str) -> EndpointError:
    """Return the error for a server that counts more than was booked: no price is known any more."""
    return EndpointError(
        f"{fault}: the bill may be higher than what is booked",
        next="raise reasoning_tokens or read_beside in the recipe, and plan again with the same --out",
    )


def money(ledger: Ledger) -> str:
    """'$0.4100 of $2.0000 booked', or the tokens where nobody bills for them."""
    if not ledger.price.said:
        return f"{ledger.read:,} tokens read and {ledger.written:,} written at most"
    return f"${ledger.spent:,.4f} of ${ledger.usd:,.4f} booked"


def of_all(error: UserError) -> bool:
    """True if every other request would fail likewise: a wrong key, an unknown model, a spent budget."""
    if not isinstance(error, EndpointError):
        return isinstance(error, ConfigError)
    return error.status is not None and error.status < 500 and error.status not in (*OF_ONE, *PASSING)


@dataclass
class Open:
    """A plan that is open: its recipe and requests, its ledger and its answers."""

    folder: Path
    plan: Plan
    recipe: Recipe
    requests: Requests
    ledger: Ledger
    kept: Kept[Request]
    show: Callable[[str], None]

    @property
    def money(self) -> str:
        """Return the booked money, as words."""
        return money(self.ledger)

    def close(self) -> None:
        """Close the ledger and the file of answers."""
        self.ledger.close()
        self.kept.close()

    def answers_missing(self) -> list[Request]:
        """Return the requests of the first stage that have no answer."""
        return [request for request in self.requests.first if request.key not in self.kept.known]

    def verdicts_missing(self) -> list[Request]:
        """Return a judge's questions that can be asked now and have no answer."""
        return questions_missing(self.requests, self.kept.known)

    def missing(self) -> list[Request]:
        """Return what can be asked now and has no answer."""
        return [*self.answers_missing(), *self.verdicts_missing()]

    def over(self) -> UserError | None:
        """Return the error for an answer whose usage is more than its request has booked; else None."""
        known = self.kept.known
        for request in [*self.requests.first, *questions_of(self.requests, known)]:
            if request.key in known and (usage := checked(request, known[request.key], None)).over:
                return over_booked(usage.fault)
        return None

    def ask(self) -> UserError | None:
        """Send what is missing. -> the error that ended it, or the last one of those that failed."""
        failed = self.over()
        if failed is not None:
            return failed
        for stage in (self.answers_missing, self.verdicts_missing):
            if not (missing := stage()):
                continue
            watch = Watch(self.recipe, self.ledger, len(missing), self.show)
            try:
                self.kept(missing, watch)
            except KeyboardInterrupt:
                self.show("interrupted: waiting for the requests under way; Ctrl-C again leaves them")
                self.kept.wait()
                raise
            self.kept.wait()
            self.show(watch.line().rpartition(";")[0])
            failed = watch.stopped or (failed or watch.failed)
            if watch.stopped:
                break
        return failed

    def rows(self, out: Path | None = None) -> Written:
        """Make the rows of all answers that are there, and write them."""
        return write_rows(
            self.folder, self.plan, self.recipe, self.requests, self.ledger, self.kept.known, out
        )


def open_plan(
    folder: Path,
    show: Callable[[str], None],
    connected: Callable[[Plan, Recipe], Client] | None,
    **options: Any,
) -> Open:
    """Open a plan. connected: (plan, recipe) -> a client of its server; None: nothing can be sent.

    options: of Kept. The caller holds the folder's lock, and closes what is returned.
    """
    plan = read_plan(folder)
    recipe, requests = opened(plan, folder)
    client = connected(plan, recipe) if connected else None
    ledger = Ledger(folder, plan.budget_usd, plan.price)
    count = requests.count if recipe.tokenizer else None

    def unable(request: Request) -> Answer:
        raise DataError(f"{request.key} cannot be sent without a server", next="unfreeze synth run")

    send = Sender(client, recipe, ledger, plan.identity, count) if client else unable
    kept = Kept(send, lambda request: request.key, folder / ANSWERS, at_once=recipe.at_once, **options)
    if isinstance(send, Sender):
        send.going = bool(kept.known)
    return Open(folder, plan, recipe, requests, ledger, kept, show)


def connect(plan: Plan, recipe: Recipe) -> Client:
    """Return a client of the plan's server. Raises ConfigError if a local one does not listen."""
    refuse_without_library(plan.endpoint)
    from unfreeze.teach.client import Client  # the library openai: an extra, and a second

    refuse_unheard(plan.endpoint)
    return Client(plan.endpoint, timeout=recipe.timeout, tries=recipe.tries)


def only_here(folder: Path) -> Any:
    """Lock a plan's folder against other processes. Raises ConfigError."""
    return one_writer(folder, "answers", "wait for it")


def summary(at: Open, written: Written) -> dict[str, Any]:
    """Return the result of a command: rows, those left out by reason, and money."""
    missing = len(at.missing())
    return {
        "plan": str(at.folder),
        "path": str(written.path),
        "rows": written.rows,
        "left_out": dict(written.left_out),
        "answers": len(at.kept.known),
        "missing": missing,
        "booked_usd": round(at.ledger.spent, 8),
        "usage_usd": round(written.usage_usd, 8),
        "budget_usd": at.ledger.usd,
        "usage_refused": written.usage_refused,
        "finished": not missing,
    }
