"""docs/why/trust.md R6: a paid call is priced before it is made, and nothing goes beyond the budget, over restarts too."""

from __future__ import annotations

import random

import pytest
from servers import say

from unfreeze.core.errors import ConfigError
from unfreeze.teach.address import EndpointError
from unfreeze.teach.budget import Budget, Price
from unfreeze.teach.client import Client

REMOTE = "https://api.example.com/v1"


def test_one_s_own_server_costs_nothing(tmp_path):
    budget = Budget(tmp_path, 0.0, Price())
    assert budget.worst("http://127.0.0.1:8000/v1", 10**9, 10**9) == ""
    budget.reserve(10**9, 10**9)
    assert not list(tmp_path.iterdir())


def test_another_s_server_needs_a_price(tmp_path):
    with pytest.raises(ConfigError, match="its price is unknown"):
        Budget(tmp_path, 5.0, Price()).worst(REMOTE, 1, 1)
    assert Budget(tmp_path, 0.0, Price(0.0, 0.0)).worst(REMOTE, 10**6, 10**6) == ""


def test_the_default_budget_refuses_what_has_a_price(tmp_path):
    with pytest.raises(
        ConfigError, match=r"2,000,000 tokens read at \$0.5 .* at most \$1.0015; the budget is \$0"
    ):
        Budget(tmp_path, 0.0, Price(0.5, 1.5)).worst(REMOTE, 2_000_000, 1000)
    said = Budget(tmp_path, 1.1, Price(0.5, 1.5)).worst(REMOTE, 2_000_000, 1000)
    assert "at most $1.0015; budget $1.1" in said


def test_a_thousand_runs_against_a_moody_server_never_pass_the_budget(serving, waits, tmp_path):
    """Every try counts, failed ones too, and a new process finds what was spent."""
    draw = random.Random(0)

    def moody(server, connection, body):
        return say(connection, 500, {}) if draw.random() < 0.4 else {"choices": []}

    server, price, billed = serving(moody), Price(1000.0, 0.0), 0
    client = Client(server.url, tries=4)
    for run in range(60):
        folder = tmp_path / str(run % 6)
        budget = Budget(folder, 0.02, price)
        try:
            for _ in range(draw.randrange(1, 6)):
                client.post("completions", {}, lambda: budget.reserve(1, 1))  # noqa: B023
        except (ConfigError, EndpointError):
            pass
    billed = len(server.asked) * 0.001
    spent = [Budget(tmp_path / str(i), 0.02, price).spent for i in range(6)]
    assert sum(spent) == pytest.approx(billed) and max(spent) <= 0.02 + 1e-12
    with pytest.raises(ConfigError, match="is spent"):
        Budget(tmp_path / "0", 0.02, price).reserve(30, 0)
    # control: without a reservation the same server takes more
    patient = Client(server.url, tries=9)
    for _ in range(30):
        patient.post("completions", {})
    assert len(server.asked) * 0.001 > sum(spent) + 0.02
