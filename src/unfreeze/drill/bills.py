"""R6: faults of calls that somebody bills. No server is called: what would be sent is counted here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from unfreeze.drill.fault import Fault, Outcome, measured, must_refuse, said
from unfreeze.drill.sandbox import Sandbox
from unfreeze.synth.plan import make_plan, write_plan
from unfreeze.synth.run import Open, open_plan
from unfreeze.synth.usage import checked
from unfreeze.teach.ledger import Booked, Ledger

URL = "https://api.example.com/v1"
MOST, DEAR = 1000, 50_000  # max_tokens of the recipe; tokens that a server counts which does not keep to it
CEILING = 0.3
PRICES = {"price_read": 0.5, "price_written": 2.0}


class Killed(BaseException):
    """The process ends here."""


class Server:
    """Stands for a client: books as the real one does, and answers with this usage, or is killed.

    sent: number of attempts
    """

    def __init__(self, written: int = 0, *, dies: bool = False):
        self.url, self.written, self.dies, self.sent = URL, written, dies, 0

    def post(self, path: str, body: Any, reserve: Any, **_: Any) -> dict[str, Any]:
        """Book an attempt and answer it."""
        reserve()
        self.sent += 1
        if self.dies:
            raise Killed
        message = {"role": "assistant", "content": f"Answer {self.sent}."}
        usage = {"prompt_tokens": 9, "completion_tokens": self.written}
        return {"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage}


def planned(sandbox: Sandbox, **fields: Any) -> Path:
    """Price a plan of 40 seeds as `unfreeze synth plan` does, and write it. -> its folder."""
    seeds, recipe = sandbox.rows([{"question": f"What is {i}?"} for i in range(40)]), sandbox.fresh("recipe")
    recipe.write_text(f'prompt = "{{question}}"\nmax_tokens = {MOST}\nat_once = 1\n', encoding="utf-8")
    fields = {"endpoint": URL, **PRICES, **fields}
    plan, folder = make_plan(seeds, str(recipe), fields, str(sandbox.fresh("plan")), lambda line: None)
    write_plan(plan, folder)
    return folder


def opened(folder: Path, server: Server) -> Open:
    """Open the plan with this server, whose requests are sent one by one in this thread."""
    client: Any = server
    return open_plan(folder, lambda line: None, lambda plan, recipe: client, start=lambda work: work())


def no_ceiling(sandbox: Sandbox) -> Outcome:
    """A learner's batch of prompts at a paid server, without a ceiling."""
    return must_refuse(lambda: planned(sandbox), says="at most $0.2502; the budget is $0.0000")


def no_price(sandbox: Sandbox) -> Outcome:
    """The same, at a server whose price nobody has looked up."""
    nothing = {"price_read": None, "price_written": None, "budget_usd": 5.0}
    return must_refuse(lambda: planned(sandbox, **nothing), says="its price is unknown")


def grown_seeds(sandbox: Sandbox) -> Outcome:
    """Seeds that are ten times as many as were priced."""
    folder = planned(sandbox, budget_usd=1.0)
    seeds = Path(json.loads((folder / "plan.json").read_text(encoding="utf-8"))["seeds"])
    seeds.write_bytes(seeds.read_bytes() * 10)
    return must_refuse(lambda: opened(folder, Server(9)).close(), says="changed since")


def dear_server(sandbox: Sandbox) -> Outcome:
    """A server that bills more tokens than max_tokens."""
    server = Server(DEAR)
    at = opened(planned(sandbox, budget_usd=1.0), server)

    fault = at.ask()
    at.close()
    line = f"{fault.message}; {server.sent} of 40 requests sent" if fault else ""
    return said(
        checked, line, says="at most 1,000 were asked: the bill may be higher than what is booked; 1 of"
    )


def killed_again_and_again(sandbox: Sandbox) -> Outcome:
    """A run that is killed while a request is under way, and started again until the ceiling."""
    folder = planned(sandbox, budget_usd=CEILING)
    sent = 0
    for _ in range(200):
        server = Server(dies=True)
        at = opened(folder, server)
        try:
            fault = at.ask()
        except Killed:
            fault = None
        at.close()
        sent += server.sent
        if fault:
            break
    bill = sent * MOST * PRICES["price_written"] / 1e6
    spent = Booked(folder, CEILING, at.plan.price).spent
    line = (
        f"killed {sent} times with a request under way, a bill of ${bill:.4f}: ${spent:.4f} is booked, and no"
        f" more is sent under the ceiling of ${CEILING:.4f}"
    )
    return measured(Ledger, line, holds=bill <= spent <= CEILING and sent < 200)


FAULTS = [
    Fault("R6", "prompts for a paid server, without a ceiling", no_ceiling),
    Fault("R6", "a server whose price is unknown", no_price),
    Fault("R6", "seeds that grew after they were priced", grown_seeds),
    Fault("R6", "a server that bills more than max_tokens", dear_server),
    Fault("R6", "a run killed and repeated with requests under way", killed_again_and_again),
]
