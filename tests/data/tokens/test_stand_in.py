"""The stand-in of a row is a function of its shape alone."""

import pytest

from unfreeze.data.rows.row import Conversation
from unfreeze.data.rows.shapes import row_from_dict
from unfreeze.data.tokens.stand_in import shape_of, stand_in

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


def talk(a: str, b: str, **fields) -> list[dict]:
    return [{"role": "user", "content": a}, {"role": "assistant", "content": b, **fields}]


def call(name: str, arguments: dict, id: str, content=None) -> list[dict]:
    calls = [{"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}]
    returned = {"role": "tool", "tool_call_id": id, "content": name}
    return [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": content, "tool_calls": calls},
        returned,
        {"role": "assistant", "content": "So."},
    ]


def row(messages, tools=None) -> Conversation:
    return row_from_dict({"messages": messages, "tools": tools}, 1)


ALIKE = {
    "texts": (row(talk("a", "b")), row(talk("Other words.", "<|im_end|> Grüße"))),
    "reasoning": (row(talk("a", "b", reasoning_content="c")), row(talk("d", "e", reasoning_content="f g"))),
    "think": (row(talk("a", "<think>\nb\n</think>\n\nc")), row(talk("d", "<think>\ne f\n</think>\n\ng"))),
    "calls": (
        row(call("look", {"at": "x", "n": [1, 2], "all": True}, "1"), TOOLS),
        row(call("see", {"at": "yz", "n": [3, 4], "all": True}, "call_7"), [*TOOLS, *TOOLS]),
    ),
}
OTHER = {
    "a role": (row(talk("a", "b")), row([{"role": "system", "content": "s"}, *talk("a", "b")])),
    "emptiness": tuple(
        row([{"role": "system", "content": text}, *talk("a", "b")]) for text in ("", " ", "s")[1:]
    ),
    "a field": (row(talk("a", "b")), row(talk("a", "b", reasoning_content="c"))),
    "a think mark": (row(talk("a", "b")), row(talk("a", "<think>b</think>c"))),
    "space at a think mark": (row(talk("a", "<think>b</think>c")), row(talk("a", "<think>\nb</think>c"))),
    "null": (row(call("look", {}, "1")), row(call("look", {}, "1", ""))),
    "an argument's name": (row(call("look", {"at": 1}, "1")), row(call("look", {"to": 1}, "1"))),
    "an argument's type": (row(call("look", {"at": 1}, "1")), row(call("look", {"at": "1"}, "1"))),
    "tools": (row(talk("a", "b")), row(talk("a", "b"), TOOLS)),
    "context": (row(talk("a", "b")), Conversation(talk("a", "b"), context=frozenset((1,)))),
}


@pytest.mark.parametrize("name", ALIKE)
def test_rows_that_differ_in_words_have_one_stand_in(name):
    one, other = ALIKE[name]
    assert shape_of(one) == shape_of(other) and hash(shape_of(one)) == hash(shape_of(other))
    first, second = stand_in(one), stand_in(other)
    assert (first.messages, first.tools, first.context) == (second.messages, second.tools, second.context)
    assert first.messages != one.messages


@pytest.mark.parametrize("name", OTHER)
def test_rows_that_a_template_could_tell_apart_have_shapes_of_their_own(name):
    one, other = OTHER[name]
    assert shape_of(one) != shape_of(other)


def test_words_of_a_stand_in_name_their_place_and_ids_go_together():
    found = stand_in(ALIKE["calls"][0]).messages
    (called,) = found[1]["tool_calls"]
    assert found[0]["content"] == "Words 001 stand here."
    assert called["function"]["arguments"] == {"at": "Words 002 stand here.", "n": [7, 7], "all": True}
    assert called["id"] == found[2]["tool_call_id"] != "1"
    assert stand_in(ALIKE["think"][0]).messages[1]["content"] == (
        "<think>\nWords 002 stand here.\n</think>\n\nWords 003 stand here."
    )
