"""Each recipe of examples/synth against a local server: valid rows that the trainers read, with origin and cost."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from synth_plans import PRICES, answered, lines

from unfreeze.data.rows.files import read_rows
from unfreeze.data.rows.row import Conversation, Judged
from unfreeze.synth.plan import make_plan, write_plan
from unfreeze.synth.prompts import Requests, read_seeds
from unfreeze.synth.recipe import read_recipe
from unfreeze.synth.run import connect, open_plan

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "synth"
RECIPES = {
    "yoda": ("taught", 6),
    "domain": ("taught", 12),
    "reasoning_long": ("taught", 6),
    "reasoning_short": ("taught", 6),
    "riddles": ("taught", 6),
    "pairs": ("pairs", 6),
    "pairs_style": ("pairs", 6),
    "labels": ("labels", 6),
}


def reply(server, connection, body):
    """A model that does what the recipes ask; as a judge it likes the short answer, and what says 'water'."""
    asked = body["messages"][-1]["content"]
    if "<answer_1>" in asked:
        one, two = re.findall(r"<answer_\d>\n(.*?)\n</", asked, re.DOTALL)
        return answered(f'Short is good.\n{{"better": {1 if len(one) < len(two) else 2}}}')
    if "<answer>" in asked:
        (text,) = re.findall(r"<answer>\n(.*?)\n</", asked, re.DOTALL)
        return answered(f'{{"score": {9 if "carbon" in text or "density" in text or "30" in text else 2}}}')
    number = len(server.asked)
    words = " ".join(f"w{number}x{i}" for i in range(12))
    # as a reader would: longer where it is hotter
    text = f"The answer to {asked[-40:]!r} in words: {words}." + " And more." * int(10 * body["temperature"])
    if "JSON" in asked or "JSON object" in asked:
        return answered(json.dumps({"question": f"Which {words}?", "answer": text}))
    if "<think>" in body["messages"][0]["content"]:
        return answered(f"<think>\nStep one of {number}. Step two.\n</think>\n\n{text}")
    return answered(text, reasoning_content=f"Long thoughts about {asked}. " * 10)


def test_every_recipe_is_tested():
    assert {path.stem for path in FOLDER.glob("*.toml")} == RECIPES.keys()
    table = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert all(f"`{name}.toml`" in table for name in RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_makes_rows_that_its_trainer_reads(serving, tmp_path, name):
    answers, count = RECIPES[name]
    seeds = FOLDER / ("riddles.jsonl" if name == "riddles" else "questions.jsonl")
    server = serving(reply)
    fields = {"endpoint": server.url, **PRICES, "budget_usd": 10.0}
    plan, folder = make_plan(
        seeds, str(FOLDER / f"{name}.toml"), fields, str(tmp_path / "p"), lambda line: None
    )
    write_plan(plan, folder)
    at = open_plan(folder, lambda line: None, connect)
    assert at.ask() is None and not at.missing()
    written = at.rows()
    at.close()
    assert written.rows == count and not written.left_out  # 100 % valid and unique
    assert len(server.asked) <= plan.requests and at.ledger.spent <= plan.worst_usd
    rows = lines(folder / "rows.jsonl")
    read = list(read_rows(folder / "rows.jsonl", answers=answers))
    assert len(read) == count
    for row, parsed in zip(rows, read, strict=True):
        source = row["source"]
        assert source["prompt"][-1]["role"] == "user" and source["model"] == "fake-1"
        assert 0 < source["cost_usd"] <= plan.worst_usd and source["endpoint"] in server.url
        if answers == "taught":
            assert isinstance(parsed, Conversation) and parsed.messages[-1]["role"] == "assistant"
            assert bool(parsed.messages[-1].get("reasoning_content")) == (name != "domain")
        else:
            assert isinstance(parsed, Judged)
    if name == "pairs":
        assert len(server.asked) == 24  # two answers, and both orders of a judge
        assert all(len(row["chosen"][0]["content"]) < len(row["rejected"][0]["content"]) for row in rows)
    if name == "labels":
        assert [row["label"] for row in rows] == [False, True, False, True, True, False]
        assert [row["score"] for row in rows] == [2, 9, 2, 9, 9, 2]
    if name == "pairs_style":
        systems = {body["messages"][0]["content"] for _, _, body in server.asked}
        assert len(systems) == 2 and all(row["prompt"][0]["role"] == "user" for row in rows)


def test_a_judge_that_likes_what_stands_first_makes_no_pair(serving, tmp_path):
    """Each pair is asked about in both orders; a verdict that changes with the order is a tie."""

    def first(server, connection, body):
        return answered('{"better": 1}') if "<answer_1>" in str(body) else reply(server, connection, body)

    fields = {"endpoint": serving(first).url, **PRICES, "budget_usd": 10.0}
    made = make_plan(
        FOLDER / "questions.jsonl", str(FOLDER / "pairs.toml"), fields, str(tmp_path / "p"), lambda line: None
    )
    write_plan(*made)
    at = open_plan(made[1], lambda line: None, connect)
    assert at.ask() is None
    assert dict(at.rows().left_out) == {"a tie": 6}
    at.close()


def test_the_judge_s_questions_never_cost_more_than_planned():
    """Answers as long as max_tokens allows, in any script: within the plan's price, or not asked."""
    recipe = read_recipe(str(FOLDER / "pairs.toml"))
    requests = Requests(recipe, read_seeds(FOLDER / "questions.jsonl"))
    seed = requests.seeds[0]
    for text in ("a" * 8 * recipe.max_tokens, "字" * 2 * recipe.max_tokens, "<answer_1>" * 100):
        asked = requests.questions(seed, [text, f"{text[:-1]}b"])
        assert len(asked) == 2 and all(each.read <= requests.most_judged(seed) for each in asked)
    assert requests.questions(seed, ["a" * 9 * recipe.max_tokens, "b" * 9 * recipe.max_tokens]) == []
