"""The examples of environments: each does what it promises, in a grader's process."""

import importlib.util
import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from unfreeze.data.rows.asked import asked_from_dict
from unfreeze.data.tokens.tool_calls import hermes
from unfreeze.rollout.environment import Environments
from unfreeze.rollout.graders import Graders

FOLDER = Path(__file__).parents[2] / "examples" / "environments"
PROMPT = {"prompt": "Play."}


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def played(name, rows, policy):
    """Play until each has no call left. policy: (row's columns, what was told so far) -> a turn."""
    with Environments(str(FOLDER / name), count=1, most_turns=200) as environments:
        episodes = environments.open([asked_from_dict({**PROMPT, **row}, 1) for row in rows], hermes)
        while live := [episode for episode in episodes if not episode.done]:
            told = [[each["content"] for each in one.messages if each["role"] == "tool"] for one in live]
            turns = [policy(episode.row.columns, heard) for episode, heard in zip(live, told, strict=True)]
            environments.turn(live, turns)
        return episodes, environments.grade(episodes)


def test_calculator():
    expressions = ["12 + 34", "-(2 * 3) / 4", "2 ** 9", "__import__('os')", "1 / 0", "1" * 300]
    episodes, graded = played(
        "calculator.py:Calculator",
        [{"expression": each} for each in expressions],
        lambda row, told: "So." if told else call("calculate", expression=row["expression"]),
    )
    results = [episode.messages[2]["content"] for episode in episodes]
    assert results[:2] == ["46", "-1.5"] and all(
        each.startswith("error: calculate: ") for each in results[2:]
    )
    assert all(each.outcome == "no value" for each in graded)
    with Graders(str(FOLDER / "calculator.py"), count=1) as graders:
        row = asked_from_dict({**PROMPT, "answer": -32}, 1)
        texts = ["It is -32.", "-32.0", "32", "none", "-32, not 3"]
        assert [each.reward for each in graders.grade([(row, text) for text in texts])] == [1, 1, 0, 0, 0]


@cache
def fewest(most):
    """Least total of guesses over all secrets of `most` numbers, over every first guess."""
    if most <= 0:
        return 0
    return most + min(fewest(first) + fewest(most - 1 - first) for first in range(most))


def test_guess_number():
    """Binary search over every secret has regret 0; guessing upwards has more."""
    spec = importlib.util.spec_from_file_location("guess_number", FOLDER / "guess_number.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for most in range(1, 70):
        assert module.optimum(most) == pytest.approx(fewest(most) / most, abs=1e-12)

    def search(row, told):
        low, high = 1, row["most"]
        for answer in told:
            middle = (low + high) // 2
            if answer == "right":
                return "Done."
            low, high = (middle + 1, high) if answer == "higher" else (low, middle - 1)
        return call("guess", number=(low + high) // 2)

    def upwards(row, told):
        return "Done." if "right" in told else call("guess", number=len(told) + 1)

    rows = [{"secret": secret, "most": 13} for secret in range(1, 14)]
    _, best = played("guess_number.py:GuessNumber", rows, search)
    _, plain = played("guess_number.py:GuessNumber", rows, upwards)
    _, none = played("guess_number.py:GuessNumber", rows[:1], lambda row, told: "No.")
    assert sum(each.parts["regret"] for each in best) == pytest.approx(0, abs=1e-9)
    assert sum(each.parts["guesses"] for each in plain) == sum(range(1, 14))
    assert sum(each.reward for each in best) > sum(each.reward for each in plain) and none[0].reward == 0


GAMES = '''
class Count:
    """As gymnasium has it."""
    def reset(self, seed=None):
        self.left = 2
        return f"seed {seed}", {}
    def step(self, action):
        self.left -= 1
        return f"you said {action}", 0.5, self.left == 0, False, {}

class Echo:
    """As skyrl-gym has it."""
    def init(self, prompt):
        return [{"role": "user", "content": prompt}], {}
    def step(self, action):
        return {"observations": [{"role": "user", "content": action}], "reward": 1.0, "done": True, "metadata": {}}
'''


def test_text_games(tmp_path, monkeypatch):
    (tmp_path / "my_games.py").write_text(GAMES)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    rows = [{"game": "my_games:Count", "seed": 7}, {"game": "my_games:Echo"}]
    episodes, graded = played(
        "text_games.py:TextGame",
        rows,
        lambda row, told: "Done." if len(told) > 2 else call("act", action="left"),
    )
    told = [[each["content"] for each in episode.messages if each["role"] == "tool"] for episode in episodes]
    assert episodes[0].messages[0]["content"] == "Play. seed 7"
    assert told[0] == ["you said left", "you said left The game is over.", "the game is over"]
    assert told[1] == ["left The game is over.", "the game is over", "the game is over"]
    assert [each.reward for each in graded] == [1.0, 1.0]


def test_reasoning_tasks(tmp_path):
    pytest.importorskip("reasoning_gym", reason="pip install reasoning-gym")
    script = FOLDER / "reasoning_tasks.py"
    for name in ("chain_sum", "spell_backward", "letter_counting"):
        done = subprocess.run([sys.executable, script, name, "3"], capture_output=True, text=True, check=True)
        rows = [asked_from_dict(json.loads(line), 1) for line in done.stdout.splitlines()]
        with Graders(str(script), count=1) as graders:
            right = [(row, f"I see. Answer: {row.columns['gold']}") for row in rows]
            graded = graders.grade([*right, *((row, "Answer: no") for row in rows)])
        assert [each.reward for each in graded[:3]] == [1, 1, 1]
        assert all(each.reward is not None and each.reward < 1 for each in graded[3:])
