"""docs/why/trust.md R6: what is booked is never less than the bill and never above the ceiling, through failures,
retries, kills and usage fields that lie.

A fake server keeps the bill: it charges what it wrote, at most max_tokens, also for answers that are lost.
The client is the real one, with its retries; only its transport is in this process. A kill is an exception that
nothing catches, so files are left as a dead process leaves them, at times with half a line.
"""

from __future__ import annotations

import json
import random
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest

from unfreeze.core.errors import ConfigError, UserError
from unfreeze.synth import run as run_module
from unfreeze.synth.plan import make_plan, write_plan
from unfreeze.synth.run import open_plan
from unfreeze.teach.budget import Price
from unfreeze.teach.client import Client
from unfreeze.teach.ledger import NAME, Booked, Ledger

URL = "https://api.example.com/v1"
MOST = 40  # max_tokens of the recipe
PRICE = Price(3.0, 11.0)
SESSIONS = 8  # of one plan, at most: each ends with the plan, at the ceiling, or in a kill


class Kill(BaseException):
    """The process is dead: nothing after this runs."""


@dataclass
class Bank:
    """The server of one plan, and its bill.

    fine      weight of an answer among what may happen
    charged   (read, written) tokens so far
    short     bookings on disk that did not cover the bill at a moment when a request arrived
    """

    folder: Path
    draw: random.Random
    honest: bool = False
    calm: bool = False
    fine: int = 70
    kills: bool = True
    one: Any = field(default_factory=threading.Lock)
    charged: list[int] = field(default_factory=lambda: [0, 0])
    arrived: list[str] = field(default_factory=list)
    given: set[str] = field(default_factory=set)
    short: list[str] = field(default_factory=list)

    @property
    def bill(self) -> float:
        return PRICE.of(*self.charged)

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        with self.one:
            return self.answer(request)

    def answer(self, request: httpx2.Request) -> httpx2.Response:
        fate = "fine" if self.calm else self.draw.choices(FATES, (self.fine, *WEIGHTS))[0]
        fate = fate if self.kills else fate.replace("killed", "late")
        if fate == "no connection":
            raise httpx2.ConnectError("refused", request=request)
        if fate == "killed before it is sent":
            raise Kill
        body = json.loads(request.content)
        key = request.headers["Idempotency-Key"]
        self.arrived.append(key)
        text = "word " * self.draw.randrange(1, 30)
        read = len(body["messages"][0]["content"]) + self.draw.randrange(65)  # a token a byte, and a template
        written = self.draw.choice([body["max_tokens"], self.draw.randrange(8, body["max_tokens"] + 1)])
        if fate != "429":
            self.charged[0] += read
            self.charged[1] += written
        self.look(f"at {key}")
        if fate == "killed while it waits":
            raise Kill
        if fate.startswith("late"):
            raise httpx2.ReadTimeout("no answer", request=request)
        if fate == "half":
            return httpx2.Response(200, content=b'{"choices": [', request=request)
        if fate.isdigit():
            return httpx2.Response(int(fate), json={"error": {"message": "no"}}, request=request)
        usage: Any = {"prompt_tokens": read, "completion_tokens": written}
        if not self.honest:
            usage = self.draw.choice(
                [
                    usage,
                    {"prompt_tokens": 0, "completion_tokens": 1},
                    {"prompt_tokens": 1, "completion_tokens": written // 2},
                    {"prompt_tokens": -5, "completion_tokens": -9},
                    {"prompt_tokens": "many", "completion_tokens": None},
                    "none of your business",
                    None,
                ]
            )
        self.given.add(key)
        message = {"role": "assistant", "content": text}
        answer = {"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage}
        return httpx2.Response(200, json=answer, request=request)

    def look(self, when: str) -> None:
        """Note a booking that is too low; what another process would read counts, not what this one knows."""
        spent = Booked(self.folder, 1e9, PRICE).spent
        if spent < self.bill:
            self.short.append(f"{when}: ${spent:.6f} booked, ${self.bill:.6f} charged")


FATES = (
    "fine",
    "no connection",
    "killed before it is sent",
    "killed while it waits",
    "late",
    "half",
    "429",
    "500",
)
WEIGHTS = (4, 3, 4, 4, 4, 4, 7)  # beside fine


@pytest.fixture
def fuzz(tmp_path, waits):
    """fuzz(number) -> (the bank, the ceiling, the ledger as it ended, keys of the answers) of one random plan."""
    client = Client(URL, tries=3, environment={})
    inner = client._openai._client

    def one(number: int, **options: Any) -> tuple[Bank, float, Booked, dict[str, Any]]:
        draw = random.Random(number)
        folder = tmp_path / f"{number}-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        trusted = options.pop("trust", draw.random() < 0.2)
        seeds, recipe = folder / "seeds.jsonl", folder / "recipe.toml"
        rows = [json.dumps({"q": f"{number} and {i}"}) for i in range(draw.randrange(1, 6))]
        seeds.write_text("\n".join(rows) + "\n", encoding="utf-8")
        recipe.write_text(
            f'prompt = "{{q}}?"\nmax_tokens = {MOST}\nat_once = 2\nretries = 2\n'
            f"trust_usage = {str(trusted).lower()}\nread_beside = 64\n[check]\nnear = 1\n",
            encoding="utf-8",
        )
        money = {"endpoint": URL, "price_read": PRICE.read, "price_written": PRICE.written}
        silent: Any = lambda line: None  # noqa: E731
        free, plan = make_plan(seeds, str(recipe), {**money, "budget_usd": 1e9}, str(folder / "p"), silent)
        ceiling = free.worst_usd * draw.choice([1.0, 1.0, 1.1, 1.5])
        made, plan = make_plan(seeds, str(recipe), {**money, "budget_usd": ceiling}, str(plan), silent)
        write_plan(made, plan)
        fine = draw.choice([70, 70, 15])  # or a storm
        inline: Any = {} if options.pop("threads", False) else {"start": lambda work: work()}
        bank = Bank(plan, draw, **{"honest": trusted, "fine": fine, **options})
        inner._transport = httpx2.MockTransport(bank)
        known: dict[str, Any] = {}
        for _ in range(SESSIONS):
            at = open_plan(plan, silent, lambda plan, recipe: client, **inline)
            before = set(at.kept.known)
            fault: UserError | None = None
            sent = len(bank.arrived)
            try:
                fault = at.ask()
            except Kill:
                if draw.random() < 0.3:  # half a line, as of a write that was cut
                    with (plan / "answers.jsonl").open("a") as file:
                        file.write('{"key": "half')
            at.close()
            again = {key.split("-")[1] for key in bank.arrived[sent:]} & before
            assert not again, f"plan {number}: sent again although its answer is kept: {again}"
            bank.look("after a session")
            known = dict(at.kept.known)
            if not at.missing() or isinstance(fault, ConfigError):
                break
        at.rows()
        return bank, ceiling, Booked(plan, ceiling, PRICE), known

    return one


@pytest.mark.parametrize("runs", [40, pytest.param(1000, marks=pytest.mark.nightly)])
def test_random_plans_book_at_least_the_bill_and_at_most_the_ceiling(fuzz, runs):
    whole = stopped = refused = 0
    for number in range(runs):
        bank, ceiling, booked, known = fuzz(number)
        assert not bank.short, f"plan {number}: {bank.short[0]}"
        assert bank.bill <= booked.spent <= ceiling, f"plan {number}"
        rows = (bank.folder / "rows.jsonl").read_text(encoding="utf-8").splitlines()
        costs = sum(json.loads(row)["source"]["cost_usd"] for row in rows)
        assert costs <= booked.spent + 1e-12
        refused += sum(bool(answer.about.get("usage_fault")) for answer in known.values())
        whole += len(known) > 0 and len(rows) > 0
        stopped += len(bank.arrived) > 0
    assert whole > 0.9 * runs and stopped > 0.9 * runs and refused > runs / 2


def test_a_plan_without_trouble_fits_into_its_price_and_asks_nothing_twice(fuzz):
    for number in range(8):
        bank, ceiling, booked, known = fuzz(number, calm=True)
        assert len(bank.arrived) == len(known) == len(set(bank.arrived))
        assert booked.spent <= ceiling / 3 + 1e-12  # one attempt of three


def test_threads_share_a_ledger(fuzz):
    """Two workers at a time; a kill would take only one of them, so there is none."""
    for number in range(10):
        bank, ceiling, booked, _ = fuzz(5000 + number, threads=True, kills=False)
        assert not bank.short and bank.bill <= booked.spent <= ceiling


def some(fuzz, runs=30, **options):
    """(bookings below the bill, ledgers above the ceiling) of some plans."""
    ended = [fuzz(10_000 + number, **options) for number in range(runs)]
    short = sum(bool(bank.short) for bank, *_ in ended)
    return short, sum(booked.spent > ceiling for _, ceiling, booked, _ in ended)


def test_control_arm_booking_after_the_answer(fuzz, monkeypatch):
    real = run_module.Sender.__call__

    class Late:
        def __init__(self, ledger):
            self.ledger, self.booked = ledger, []

        def book(self, *attempt):
            self.booked.append(attempt)

        def __getattr__(self, name):
            return getattr(self.ledger, name)

    def late(self, request):
        ledger, self.ledger = self.ledger, Late(self.ledger)
        try:
            return real(self, request)
        finally:
            ledger.book_all(self.ledger.booked)
            self.ledger = ledger

    monkeypatch.setattr(run_module.Sender, "__call__", late)
    assert some(fuzz)[0] > 5


def test_control_arm_a_usage_that_lies_is_trusted(fuzz):
    assert some(fuzz, trust=True, honest=False)[0] > 1
    assert some(fuzz, runs=15, trust=True)[0] == 0  # an honest one may be


def test_control_arm_a_failed_attempt_is_not_counted(fuzz, monkeypatch):
    real = run_module.Sender.__call__

    def forgiving(self, request):
        try:
            return real(self, request)
        except UserError:
            self.ledger.settle(request.key, (request.read, request.written), (0, 0))
            raise

    monkeypatch.setattr(run_module.Sender, "__call__", forgiving)
    assert some(fuzz, runs=100)[0] > 0


def test_control_arm_without_a_ceiling(fuzz, monkeypatch):
    def book_all(self, attempts):
        with self._lock:
            self._write(list(attempts))

    monkeypatch.setattr(Ledger, "book_all", book_all)
    assert some(fuzz, runs=60)[1] > 3


def test_control_arm_a_killed_request_is_forgotten(fuzz, monkeypatch):
    """A ledger that counts answers only: what was under way at a kill is lost."""
    real = run_module.open_plan

    def forgetful(plan, *arguments, **options):
        path = plan / NAME
        kept = (plan / "answers.jsonl").read_text() if (plan / "answers.jsonl").is_file() else ""
        lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
        path.write_text("".join(line for line in lines if json.loads(line)["request"] in kept))
        return real(plan, *arguments, **options)

    monkeypatch.setitem(globals(), "open_plan", forgetful)
    assert some(fuzz)[0] > 1
