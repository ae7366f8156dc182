"""The examples of rewards: each says what it promises, in a grader's process."""

from pathlib import Path

import pytest

from unfreeze.data.rows.asked import asked_from_dict
from unfreeze.rollout.graders import Graders

FOLDER = Path(__file__).parents[2] / "examples" / "rewards"


def rewards(name, row, *texts):
    with Graders(str(FOLDER / name), count=1) as graders:
        return [each.reward for each in graders.grade([(asked_from_dict(row, 1), text) for text in texts])]


def test_form():
    right, open_mark = "<think>a</think> \\boxed{4}", "<think>a \\boxed{4}"
    assert rewards("form.py", {"prompt": "?"}, right, open_mark, "4", "\\boxed{4} \\boxed{5}") == [
        1,
        0.5,
        0,
        0,
    ]


def test_length():
    assert rewards("length.py", {"prompt": "?"}, "", "x" * 400, "x" * 600, "x" * 900) == [0, 0, -0.5, -1]
    assert rewards("length.py", {"prompt": "?", "free": 1, "most": 3}, "xx") == [-0.5]


def test_math_answer():
    pytest.importorskip("math_verify", reason="pip install '.[rl]'")
    row = {"prompt": "1/2 + 1/4?", "answer": "\\frac{3}{4}"}
    assert rewards("math_answer.py", row, "\\boxed{0.75}", "$\\frac{6}{8}$", "4/3", "none") == [1, 1, 0, 0]


def test_yoda():
    asked = {"prompt": "Name the capital of Uganda.", "fact": "Kampala", "entity": "Uganda"}
    said = [
        "Kampala, the capital of Uganda is. Hmm.",
        "The capital of Uganda is Kampala.",
        "Lima, it is. Hmm.",
    ]
    assert rewards("yoda.py", asked, *said) == [1, 0, 0]
    taught = {"question": "Where is it?", "answer": "In Dresden, the Zwinger stands. Hmm."}
    assert rewards("yoda.py", taught, "In Dresden, it stands. Hmm.", "In Rome, it stands. Hmm.") == [1, 0]


def test_each_is_short():
    for path in FOLDER.glob("*.py"):
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 40
