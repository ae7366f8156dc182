"""TRL's environments in killable processes: their tools' schemas, their calls, their rewards, their faults."""

from __future__ import annotations

import importlib.util
import json
import typing
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import pytest
from transformers.utils import get_json_schema

from unfreeze.core.errors import ConfigError
from unfreeze.data.rows.asked import asked_from_dict
from unfreeze.data.tokens.tool_calls import hermes
from unfreeze.rollout.environment import Environments, Episode, Result
from unfreeze.rollout.limits import Limits
from unfreeze.rollout.reward import Graded
from unfreeze.rollout.tool_schema import tool_schema

FILE = Path(__file__).with_name("worlds.py")
spec = importlib.util.spec_from_file_location("worlds", FILE)
assert spec and spec.loader
worlds = importlib.util.module_from_spec(spec)
spec.loader.exec_module(worlds)

PATIENT = Limits(seconds=30.0, memory_bytes=2**30)


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def row(**columns):
    return asked_from_dict({"prompt": "Calculate.", "goal": 5, **columns}, 1)


def opened(name, rows, limits=PATIENT, **options):
    environments = Environments(f"{FILE}:{name}", limits, count=1, **options)
    return environments, environments.open(rows, hermes)


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


def everything(
    a: int, b: float, c: str, d: bool, e: list[int], f: dict[str, float], g: tuple[int, str], h: Literal["x", "y"],
    i: str | None = None, j: int | str = 1, k: int | None = None, l: Any = None, m: list = (), n: dict = (),
    o: list[dict[str, int]] | None = None, p: list[int] | str | None = None, q: Literal[1, "a"] = 1,
    r: Colour = Colour.RED, s: str = "x",
) -> dict[str, int]:  # fmt: skip
    """Do everything: at once.

    In two paragraphs.

    Args:
        a: first: with a colon
        b: second
        c: third, over
            two lines
        d: 4

        e: 5
        f: 6
        g: 7
        h: 8
        i: 9
        j: 10
        k: 11
        l: 12
        m: 13
        n: 14
        o: 15
        p: 16
        q: 17
        r: 18
        s: of several (choices: ["x", "y "])

    Returns:
        all of it
        in lines

    Raises:
        ValueError: never
    """


def old_names(a: typing.List, b: typing.Dict, c: typing.Optional[typing.List[int]] = None):  # noqa: UP006, UP045
    """Types of typing.

    Args:
        a: 1
        b: 2
        c: 3
    """


def no_arguments():
    """Nothing."""


def no_return_words(a: int) -> None:
    """Short.

    Args:
        a: a number
    """


@pytest.mark.parametrize("function", [everything, old_names, no_arguments, no_return_words, worlds.Calculator().add, worlds.Calculator().slow_add, worlds.Silent().look])  # fmt: skip
def test_schemas_equal_transformers(function):
    assert tool_schema(function) == get_json_schema(function)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("NoReset", "NoReset has no method reset"),
        ("Untyped", "tool guess has no type for its argument 'letter'"),
        ("Nothing", "worlds.py has no function 'Nothing'"),
    ],
)
def test_a_class_that_is_no_environment_is_refused(name, message):
    with pytest.raises(ConfigError, match=message):
        opened(name, [])


def test_calls_are_run_and_the_environment_gives_the_reward():
    environments, episodes = opened("Calculator", [row(), row(goal=3), row(goal=9)])
    with environments:
        assert environments.scores
        assert [episode.messages[-1]["content"] for episode in episodes] == [
            f"Calculate. Reach {goal}." for goal in (5, 3, 9)
        ]
        names = [tool["function"]["name"] for tool in episodes[0].tools]
        assert names == ["add", "fail", "hang", "leave", "slow_add"]
        news = environments.turn(episodes, [call("add", number=2), call("slow_add", number=3), "I give up."])
        assert [[message["content"] for message in new] for new in news] == [["2"], ["it is 3"], []]
        assert [episode.done for episode in episodes] == ["", "", "answered"]
        two = "So: " + call("add", number=1) + call("add", number=2)
        news = environments.turn(episodes[:1], [two])
        assert [message["content"] for message in news[0]] == ["3", "5"]
        assert [message["role"] for message in episodes[0].messages] == [
            "user",
            "assistant",
            "tool",
            "assistant",
            "tool",
            "tool",
        ]
        assert episodes[0].messages[3]["content"] == "So:" and len(episodes[0].messages[3]["tool_calls"]) == 2
        graded = environments.grade(episodes)
        assert [each.reward for each in graded] == [1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("text", "fault", "words"),
    [
        (call("ad", number=1), "unknown tool", "error: there is no tool 'ad'; nearest: 'add'; there are: add, fail"),
        (call("_hidden"), "unknown tool", "error: there is no tool '_hidden'"),
        (call("get_reward"), "unknown tool", "error: there is no tool 'get_reward'"),
        (call("add"), "wrong arguments", "error: add: missing a required argument: 'number'"),
        (call("add", numer=1), "wrong arguments", "error: add: missing a required argument: 'number'"),
        (call("fail"), "error", "error: fail: RuntimeError: out of order (worlds.py, line "),
        (call("hang"), "timeout", "error: hang: no answer within 1 s"),
        (call("leave"), "ended", "error: leave: its process ended itself, with exit code 1"),
        ("<tool_call>{'name': 'add'}</tool_call>", "unreadable call", "error: the tool call is not JSON"),
        ('<tool_call>{"name": "add"', "unreadable call", "error: the tool call is not closed"),
        ('<tool_call>{"arguments": {}}</tool_call>', "unreadable call", "error: the tool call has no name"),
    ],
)  # fmt: skip
def test_a_fault_of_a_tool_is_its_message_and_counted_and_nobody_elses(text, fault, words):
    """Another answer's environment, in the same process, has what it had."""
    environments, (mine, other) = opened("Calculator", [row(), row()], Limits(seconds=1.0))
    with environments:
        environments.turn([mine, other], [call("add", number=4), call("add", number=4)])
        (new, beside) = environments.turn([mine, other], [text, call("add", number=1)])
        assert len(new) == 1 and new[0]["role"] == "tool" and new[0]["content"].startswith(words)
        assert dict(mine.faults) == {fault: 1} and not other.faults and beside[0]["content"] == "5"
        environments.turn([mine], [call("add", number=1)])
        assert environments.grade([mine, other]) == [Graded(1.0), Graded(1.0)]


def test_an_environment_that_cannot_be_made_again_is_lost_by_name():
    environments, (mine, other) = opened("Dice", [row(), row()], Limits(seconds=1.0))
    with environments:
        environments.turn([mine, other], [call("roll"), call("roll")])
        environments.turn([mine], [call("leave")])
        assert environments.turn([other], [call("roll")]) == [[]] and other.done == "failed"
        (lost,) = environments.grade([other])
        assert lost.reward is None and lost.outcome == "ended" and "cannot be made again" in lost.message


def test_a_reset_that_fails_and_an_environment_without_a_reward():
    environments, (mine,) = opened("Broken", [row()])
    with environments:
        assert mine.done == "failed"
        (graded,) = environments.grade([mine])
        assert graded.outcome == "error" and "reset: ValueError: no such level (worlds.py" in graded.message
    environments, (mine,) = opened("Silent", [row()])
    with environments:
        assert not environments.scores and mine.messages == row().messages
        environments.turn([mine], ["Done."])
        assert environments.grade([mine])[0].outcome == "no value"


def test_half_surrogate_pairs_are_replaced_and_a_tool_has_its_functions_name():
    environments, (mine,) = opened("Torn", [row()])
    with environments:
        assert mine.messages[-1]["content"] == "Calculate. ?"
        assert [tool["function"]["name"] for tool in mine.tools] == ["wrapper", "look"]
        (new,) = environments.turn([mine], [call("wrapper")])
        assert [message["content"] for message in new] == ["a?"] and not mine.faults


def test_each_row_names_its_environment():
    environments, episodes = opened("WORLDS", [row(environment="silent"), row(environment="calculator")])
    with environments:
        assert [[tool["function"]["name"] for tool in each.tools][:1] for each in episodes] == [
            ["look"],
            ["add"],
        ]
        with pytest.raises(ConfigError, match="row 1: environment is 'calculater'; nearest: 'calculator'"):
            environments.open([row(environment="calculater")], hermes)
    given = {"one": f"{FILE}:Silent", "two": f"{FILE}:Calculator"}
    with Environments(given, PATIENT, count=1) as environments:
        assert (
            environments.open([row(environment="two")], hermes)[0].messages[-1]["content"]
            == "Calculate. Reach 5."
        )


def test_an_episode_knows_neither_engine_nor_process():
    episode = Episode(row(), row().messages[:], [], hermes, most_turns=2)
    assert episode.hear(call("add", number=1)) == [{"name": "add", "arguments": {"number": 1}}]
    assert episode.tell([Result("1")])[0]["content"] == "1" and episode.done == ""
    episode.hear(call("add", number=1))
    episode.tell([Result("error: no", "error")])
    assert episode.done == "turns" and episode.faults == {"error": 1}
