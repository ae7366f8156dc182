"""`unfreeze grpo --reward judge.toml`: a run whose rewards a server gives, its events, resuming, refusals."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from runs import Stopped, adapter, of_kind, stopping_at

import unfreeze
from unfreeze.core.errors import ConfigError, UserError
from unfreeze.tracking.live import rollout_words

sys.path.insert(0, str(Path(__file__).parents[1] / "teach"))
from servers import Judging, serve

WORDS = {
    "steps": 2,
    "prompts_per_step": 2,
    "answers": 3,
    "max_new_tokens": 6,
    "rollout.cut": "score",
    "rollout.resample": 0,
    "rank": 2,
    "samples": 0,
    "dtype": "float32",
    "learning_rate": 5e-3,
    "quiet": True,
}


@pytest.fixture
def serving():
    """serving(reply) -> a running Server."""
    with serve() as start:
        yield start


@pytest.fixture
def grpo(tmp_path, two_layers):
    def run(url, out="run", judge=(), **fields):
        file = tmp_path / "judge.toml"
        lines = {"endpoint": url, "rubric": "Many letters are good.", "timeout": 5.0, **dict(judge)}
        file.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in lines.items()))
        rows = [{"prompt": f"What is {n}?", "answer": str(n)} for n in range(5)]
        words = {"model": two_layers, "data": rows, "reward": str(file), "out": tmp_path / out}
        return unfreeze.grpo(**{**words, **WORDS, **fields})

    return run


def longer(shown):
    if len(shown) == 1:
        return f'Quite long <script>x</script>.\n{{"score": {min(10, len(shown[0]) / 5)}}}'
    return json.dumps({"better": 1 if len(shown[0]) > len(shown[1]) else 2})


def test_scores_train_and_a_resumed_run_asks_nothing_twice(grpo, serving):
    server = serving(Judging(longer))
    fields = {"save.every": 1}
    whole = grpo(server.url, "whole", **fields)
    questions = {json.dumps(body) for _, _, body in server.asked}
    assert len(server.asked) == len(questions) <= 12 and any("<reference>\\n3" in each for each in questions)
    assert any(tensor.any() for name, tensor in adapter(whole).items() if "lora_B" in name)
    (first, second) = of_kind(whole, "rollout")
    assert first["outcomes"] == {"ok": 6} and "agreement" not in first and 0 < second["reward"] <= 1
    (plan,) = of_kind(whole, "plan")
    words = (
        f"judge: the model at {server.url}, mode score; 6 requests a step; budget none, since it has no price"
    )
    assert words in plan["start"]
    with gzip.open(whole.path / "rollouts" / "step-000001.jsonl.gz", "rt") as file:
        line = json.loads(file.readline())
    assert line["message"].startswith("Quite long <script>x</script>. {")  # text, wherever it is shown

    count = len(server.asked)
    with pytest.raises(Stopped):
        grpo(server.url, "parts", **fields, on_step=[stopping_at(2)])  # both steps were judged, one was saved
    assert len(server.asked) == 2 * count
    patient = {"judge": {"budget_usd": 1.0, "at_once": 2}}  # these may change
    parts = grpo(server.url, "parts", **fields, **patient)
    assert len(server.asked) == 2 * count and parts.finished
    assert all(torch.equal(ours, adapter(parts)[name]) for name, ours in adapter(whole).items())


def test_pairs_say_how_far_the_orders_agree(grpo, serving):
    server = serving(Judging(longer))
    run = grpo(server.url, judge={"mode": "pairs"})
    first = of_kind(run, "rollout")[0]
    assert first["agreement"] is not None and first["parts"] == {"agreement": first["agreement"]}
    assert first["reward"] == pytest.approx(0.5) and first["signal"] > 0
    assert f"{100 * first['agreement']:.0f} % of pairs agree" in rollout_words(first)
    assert "mode pairs; 12 requests a step;" in str(of_kind(run, "plan")[0]["start"])


def test_a_judge_of_the_place_teaches_nothing_and_the_run_says_so(grpo, serving, tmp_path):
    """Planted: always the first. All are ties, so no group has a signal."""
    server = serving(Judging(lambda shown: '{"better": 1}'))
    with pytest.raises(UserError, match="no group of the first 3 steps has answers with different rewards"):
        grpo(server.url, judge={"mode": "pairs"}, steps=4)
    events = map(json.loads, (tmp_path / "run" / "events.jsonl").open())
    agreement = [event["agreement"] for event in events if event["kind"] == "rollout"]
    assert agreement == [0.0] * 3


def test_a_judge_beside_an_environment(grpo, serving, tmp_path):
    """It judges the last turn; the reward is the sum."""
    file = tmp_path / "env.py"
    file.write_text("class World:\n    def reset(self, **row): pass\n    def get_reward(self): return 1.0\n")
    server = serving(Judging(lambda shown: '{"score": 5}'))
    with pytest.raises(UserError, match=r"all 1\.5 in the last"):
        more = {"model": unfreeze.TINY_K2, "steps": 4, "grading.processes": 1}  # it ends its turns
        grpo(server.url, env=f"{file}:World", **more)
    assert server.asked


def test_rubbish_stops_the_run_by_name(grpo, serving):
    server = serving(Judging(lambda shown: "I like it."))
    with pytest.raises(UserError, match=r"6 of 6 answers have no reward \(6 unreadable\).*: I like it\."):
        grpo(server.url)


def test_a_changed_rubric_is_refused(grpo, serving):
    server = serving(Judging(longer))
    with pytest.raises(Stopped):
        grpo(server.url, on_step=[stopping_at(2)], **{"save.every": 1})
    with pytest.raises(ConfigError, match=r"cannot resume: .*judge\.toml has changed since this run began"):
        grpo(server.url, judge={"rubric": "Few letters are good."}, **{"save.every": 1})


BAD = {
    "grading.seconds has no meaning with a judge": ({}, {"grading.seconds": 3.0}),
    "mode = pairs measures nothing on held-out prompts": (
        {"mode": "pairs"},
        {"data.validation_fraction": 0.4},
    ),
    "row 1 has no column 'gold'": ({"reference": "gold"}, {}),
    "its price is unknown": ({"endpoint": "https://api.example.com/v1"}, {}),
}


@pytest.mark.parametrize("words", BAD)
def test_bad_input_is_one_line_before_any_request(grpo, serving, words):
    server = serving(Judging(longer))
    judge, fields = BAD[words]
    with pytest.raises(UserError, match=words):
        grpo(server.url, judge=judge, **fields)
    assert not server.asked
