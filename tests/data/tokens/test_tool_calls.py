"""Calls are read as the templates write them; what cannot be read is named, never dropped."""

from __future__ import annotations

import json

import pytest

from unfreeze.core.errors import ConfigError
from unfreeze.data.tokens.tool_calls import hermes, kimi, reads_calls

ARGUMENTS = {"text": 'a "quoted" <b> é\n', "n": 1.5, "deep": {"list": [1, None, True]}}


def test_hermes():
    text = "First.\n" + "".join(
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': ARGUMENTS}, ensure_ascii=False)}\n</tool_call>\n"
        for name in "ab"
    )
    spoken = hermes(text, 3)
    assert spoken.content == "First." and not spoken.fault
    assert [call["function"] for call in spoken.calls] == [
        {"name": name, "arguments": ARGUMENTS} for name in "ab"
    ]
    assert [call["id"] for call in spoken.calls] == ["functions.a:3", "functions.b:4"]
    as_text = f"<tool_call>{json.dumps({'name': 'a', 'arguments': json.dumps(ARGUMENTS)})}</tool_call>"
    assert hermes(as_text).calls[0]["function"]["arguments"] == ARGUMENTS
    assert hermes("No call.").content == "No call." and not hermes("No call.").calls


def test_kimi():
    inside = "".join(
        f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>{json.dumps(ARGUMENTS)}<|tool_call_end|>"
        for i, name in enumerate("ab")
    )
    spoken = kimi(f"First.<|tool_calls_section_begin|>{inside}<|tool_calls_section_end|>")
    assert spoken.content == "First." and not spoken.fault
    assert [(call["id"], call["function"]) for call in spoken.calls] == [
        (f"functions.{name}:{i}", {"name": name, "arguments": ARGUMENTS}) for i, name in enumerate("ab")
    ]


@pytest.mark.parametrize(
    ("read", "text", "fault"),
    [
        (hermes, "<tool_call>{", "not closed"),
        (hermes, "<tool_call>[]</tool_call>", "holds a JSON list"),
        (hermes, '<tool_call>{"name": 1, "arguments": {}}</tool_call>', "has no name"),
        (hermes, '<tool_call>{"name": "a", "arguments": []}</tool_call>', "a: arguments is a list"),
        (hermes, '<tool_call>{"name": "a", "arguments": "{"}</tool_call>', "a: arguments is not JSON"),
        (hermes, '<tool_call>{"name": "\\ud83d", "arguments": {}}</tool_call>', "the tool call has half a surrogate pair"),
        (hermes, '<tool_call>{"name": "a", "arguments": {"b": ["\\ud83d"]}}</tool_call>', "has half a surrogate pair"),
        (hermes, '<tool_call>{"name": "a", "arguments": "{\\"\\\\ud83d\\": 1}"}</tool_call>', "has half a surrogate pair"),
        (hermes, '<tool_call>{"name": "a", "arguments": ' + '{"b":' * 500 + "1" + "}" * 501 + "</tool_call>", "nested deeper than 64"),
        (hermes, '<tool_call>{"name": "a"}</tool_call>' * 17, "17 tool calls at once; at most 16"),
        (hermes, "<tool_call>" + "[" * 100_000 + "</tool_call>", "not JSON"),
        (kimi, "<|tool_calls_section_begin|>", "has no call"),
        (kimi, "<|tool_calls_section_begin|><|tool_call_begin|>functions.a:0<|tool_call_argument_begin|>{}", "not closed"),
        (kimi, "<|tool_calls_section_begin|><|tool_call_begin|>functions.a:0<|tool_call_argument_begin|>{<|tool_call_end|>", "a: arguments is not JSON"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_named(read, text, fault):
    assert fault in read(text, 0).fault


def test_the_template_decides_the_form():
    assert reads_calls("… '<tool_call>\n' …") is hermes
    assert reads_calls("… <|tool_call_argument_begin|> …") is kimi
    for other in ("tools <tool_call>\n<function=", "tools <tool_call><arg_key>", "tools"):
        with pytest.raises(ConfigError, match="in a form that is not read"):
            reads_calls(other)
    with pytest.raises(ConfigError, match="has no place for tools"):
        reads_calls("messages")
