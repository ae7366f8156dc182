"""unfreeze synth plan and run: the price first, then rows; batch files; bad words."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from unfreeze import cli

sys.path.insert(0, str(Path(__file__).parents[1] / "teach"))
sys.path.insert(0, str(Path(__file__).parents[1] / "synth"))
from servers import serve
from synth_plans import RECIPE, SEEDS, batch_result, lines, yoda

PRICES = ["--price-read", "1", "--price-written", "2"]


@pytest.fixture
def server():
    with serve() as start:
        yield start(yoda)


@pytest.fixture
def base(tmp_path, monkeypatch):
    """base(url) -> the words of `synth plan` in an empty folder."""
    monkeypatch.chdir(tmp_path)
    Path("seeds.jsonl").write_text("".join(json.dumps(seed) + "\n" for seed in SEEDS))
    Path("yoda.toml").write_text(RECIPE)
    return lambda url: ["synth", "plan", "seeds.jsonl", "--recipe", "yoda.toml", "--endpoint", url]


def test_the_commands_say_price_first_and_then_rows(server, base, tmp_path, capsys):
    plan_of = [*base(server.url), *PRICES]
    assert cli.main(plan_of) == 2
    refused = capsys.readouterr().err
    assert "the budget is $0.0000" in refused and "next: --budget-usd" in refused
    assert not list(tmp_path.glob("*.plan")) and not server.asked
    assert cli.main([*plan_of, "--budget-usd", "1", "--json"]) == 0
    out, err = capsys.readouterr()
    plan = json.loads(out.splitlines()[-1])
    assert "12 seeds, 12 requests" in err and "at most $" in err and not server.asked
    assert cli.main(["synth", "run", plan["plan"], "--json"]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out.splitlines()[-1])
    assert result["rows"] == 12 and result["finished"] and result["booked_usd"] <= plan["worst_usd"]
    assert "12 of 12 requests answered" in err
    assert cli.main(["synth", "runn"]) == 2
    assert "nearest: 'run'" in capsys.readouterr().err


def test_the_commands_write_files_and_read_results(base, tmp_path, capsys):
    plan = [*base("https://api.example.com/v1"), *PRICES, "--budget-usd", "1", "--out", "p"]
    assert cli.main(plan) == 0
    assert cli.main(["synth", "run", "p", "--batch", "out", "--json"]) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["files"] == ["out/batch-0001.jsonl"] and not said["finished"]
    assert cli.main(["synth", "run", "p"]) == 2
    assert "12 requests wait in" in capsys.readouterr().err
    keys = [line["custom_id"] for line in lines(tmp_path / "out" / "batch-0001.jsonl")]
    (tmp_path / "results.jsonl").write_text("".join(batch_result(key) + "\n" for key in keys))
    assert cli.main(["synth", "run", "p", "--batch-results", "results.jsonl", "--json"]) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["rows"] == 12 and said["results"]["answers"] == 12 and said["finished"]
