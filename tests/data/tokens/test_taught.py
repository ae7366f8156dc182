"""What the user wrote is what is taught: templates with a planted fault are refused by name, and a right one
beside each is not."""

import json

import pytest

from unfreeze.core.errors import DataError
from unfreeze.data.rows.shapes import row_from_dict
from unfreeze.data.tokens.templates import ChatTemplate
from unfreeze.data.tokens.turns import Renderer

TURN = "{{ '<|im_start|>' + m.role + '\n' }}"
GOOD = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.reasoning_content %}{{ '<think>' +"
    " m.reasoning_content + '</think>' }}{% endif %}{{ m.content or '' }}{% for call in m.tool_calls or []"
    " %}{{ '<call>' + call.function.name }}{% for key, value in call.function.arguments.items() %}{{ ' ' +"
    " key + '=' }}{{ value | tojson }}{% endfor %}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}{% if"
    " add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
USER = {"role": "user", "content": "Who is there?"}
SYSTEM = {"role": "system", "content": "Be kind."}
CALL = {
    "id": "a",
    "function": {
        "name": "look",
        "arguments": {"query": 'a "b" <c>\nd é', "count": 7, "deep": {"on": True, "list": ["x1", None]}},
    },
}
ROW = [
    SYSTEM,
    USER,
    {"role": "assistant", "content": "Let me see.", "reasoning_content": "Hm, look.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "a", "content": "nobody at all"},
    {"role": "assistant", "content": "7"},
]
LAST = ROW[-1]["content"]


def render(source, messages=ROW, **options):
    row = row_from_dict({"messages": messages, "tools": options.pop("tools", None)}, 3)
    return Renderer(ChatTemplate(source, {}), ["<|im_end|>"], lambda value: value, **options)(row)


def taught(rendered):
    return [[segment.text for segment in sample if segment.supervised] for sample in rendered.samples]


def test_a_right_template_teaches_everything_and_says_nothing():
    rendered = render(GOOD)
    assert rendered.notes == () and len(rendered.samples) == 1
    first, last = taught(rendered)[0]
    assert first.startswith("<think>Hm, look.</think>Let me see.<call>look query=") and last == "7<|im_end|>"


@pytest.mark.parametrize(
    "old, new, says",
    [
        (
            "{{ '<think>' + m.reasoning_content + '</think>' }}",
            "",
            r"messages\[2\].reasoning_content \('Hm, look.'\) is not trained on: .* leaves it out",
        ),
        (
            "{{ m.content or '' }}",
            "{% if not m.tool_calls %}{{ m.content }}{% endif %}",
            r"messages\[2\].content \('Let me see.'\) is not trained on",
        ),
        (
            "{{ '<call>' + call.function.name }}",
            "<call>",
            r"messages\[2\].tool_calls\[0\].function.name \('look'\) is not trained on",
        ),
        (
            "{{ value | tojson }}",
            "{{ (value | tojson)[:6] }}",
            r"function.arguments.query .* is not trained on",
        ),
        (
            "{{ value | tojson }}",
            "{% if value is string %}{{ value | tojson }}{% endif %}",
            r"function.arguments.count \('7'\) is not trained on",
        ),
        (
            "{{ m.content or '' }}",
            "{{ (m.content or '') | upper }}",
            r"messages\[2\].content \('Let me see.'\) is not trained on",
        ),
        (
            "{{ m.content or '' }}",
            "{{ m.content[:9] if m.role == 'assistant' else m.content }}",
            r"changes it after 'Let me se'",
        ),
    ],
)
def test_a_template_that_drops_or_changes_words_is_refused_by_field(old, new, says):
    assert old in GOOD
    with pytest.raises(DataError, match=says) as error:
        render(GOOD.replace(old, new))
    assert error.value.next


def test_a_short_answer_that_stands_there_by_chance_is_seen_to_be_dropped():
    """'7' is also an argument of the call, and 'a' a letter of the marks. Control arm: the words alone would
    not notice."""
    source = GOOD.replace("{{ m.content or '' }}", "{% if m.role != 'assistant' %}{{ m.content }}{% endif %}")
    for said in ("n", "im"):
        with pytest.raises(
            DataError,
            match=rf"messages\[1\].content \('{said}'\) is not trained on: the chat template leaves it out",
        ):
            render(
                source.replace("'<|im_end|>", "'n im<|im_end|>"),
                [USER, {"role": "assistant", "content": said}],
            )
    assert taught(render(GOOD, [USER, {"role": "assistant", "content": "n"}])) == [["n<|im_end|>"]]


ECHO = GOOD.replace(
    "{{ m.content or '' }}",
    "{{ m.content or '' }}{% if m.role == 'assistant' %}{{ messages[0].content }}{% endif %}",
)
MARKS = "{% generation %}" + GOOD + "{% endgeneration %}{% if add_generation_prompt %}?{% endif %}"


@pytest.mark.parametrize("source, whose", [(ECHO, "system"), (MARKS, "system")])
def test_words_of_others_in_the_loss_are_refused(source, whose):
    with pytest.raises(
        DataError, match=rf"messages\[0\].content \('Be kind.'\) is the {whose}'s and would be trained on"
    ):
        render(
            source,
            (
                [SYSTEM, USER, ROW[-1]]
                if source is ECHO
                else [SYSTEM, USER, {"role": "assistant", "content": "Hello."}]
            ),
        )


def test_an_answer_that_repeats_the_question_is_no_false_alarm():
    same = {"role": "assistant", "content": USER["content"]}
    assert taught(render(GOOD, [USER, same, USER, same])) == [[USER["content"] + "<|im_end|>"] * 2]
    yes = {"role": "assistant", "content": "assistant"}
    assert taught(render(GOOD, [{"role": "user", "content": "assistant"}, yes])) == [["assistant<|im_end|>"]]


@pytest.mark.parametrize(
    "spell",
    [
        "{{ value | tojson }}",
        "{{ value }}",
        "{{ value if value is string else value | tojson }}",
        "{{ value | string | e }}",
        "{{ value | tojson(ensure_ascii=True) }}",
        "{{ value | tojson(indent=2) }}",
    ],
)
def test_arguments_may_be_spelled_as_json_python_or_xml(spell):
    assert "x1" in taught(render(GOOD.replace("{{ value | tojson }}", spell)))[0][0]


def test_null_is_not_taught_for_a_turn_that_only_calls_a_tool():
    """A template that would write None (GLM-4.5's does) is given no words instead."""
    source = GOOD.replace("{{ m.content or '' }}", "{{ m.content }}")
    messages = [USER, {"role": "assistant", "tool_calls": [CALL]}]
    assert taught(render(source, messages))[0][0].startswith("<call>look")
    assert "None" in ChatTemplate(source, {}).render(
        [USER, {"role": "assistant", "content": None, "tool_calls": []}]
    )


def test_what_the_prompt_leaves_out_is_said():
    source = GOOD.replace("{% for m in messages %}", "{% for m in messages if m.role != 'system' %}")
    assert render(source).notes == ("the system's words are left out by this chat template",)
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    assert render(GOOD, tools=[tool]).notes == ("tools are left out by this chat template",)
    assert render("{{ tools | tojson }}" + GOOD, tools=[tool]).notes == ()


def test_a_turn_without_weight_is_read_and_not_taught():
    quiet = [
        USER,
        {"role": "assistant", "content": "Quiet words.", "weight": 0},
        USER,
        {"role": "assistant", "content": "Loud.", "weight": 1},
    ]
    assert taught(render(GOOD, quiet)) == [["Loud.<|im_end|>"]]
    prompt = {
        "prompt": [USER, {"role": "assistant", "content": "Shown."}, USER],
        "completion": [{"role": "assistant", "content": "Taught."}],
    }
    row = row_from_dict(prompt)
    assert taught(Renderer(ChatTemplate(GOOD, {}), ["<|im_end|>"], lambda value: value)(row)) == [
        ["Taught.<|im_end|>"]
    ]


def test_reasoning_inline_or_left_out_where_it_is_asked_for():
    source = GOOD.replace("{{ '<think>' + m.reasoning_content + '</think>' }}", "")
    messages = [USER, {"role": "assistant", "content": "Me.", "reasoning_content": "Who? Me."}]
    assert taught(render(source, messages, reasoning="inline")) == [
        ["<think>\nWho? Me.\n</think>\n\nMe.<|im_end|>"]
    ]
    assert taught(render(source, messages, reasoning="drop")) == [["Me.<|im_end|>"]]


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_has_three_names_in_rows_and_in_templates(field):
    source = GOOD.replace("m.reasoning_content", f"m.{field}")
    for name in ("reasoning_content", "reasoning", "thinking"):
        assert taught(render(source, [USER, {"role": "assistant", "content": "Me.", name: "Who?"}])) == [
            ["<think>Who?</think>Me.<|im_end|>"]
        ]


def test_ids_of_kimi_count_through_the_conversation_and_returns_carry_them():
    kimi = "{# <|im_middle|> #}" + GOOD.replace(
        "'<call>' + call.function.name", "'<call>' + call.id + call.function.name"
    ).replace("{{ m.content or '' }}", "{{ m.tool_call_id or '' }}{{ m.content or '' }}")
    calls = [
        {"id": f"x{i}", "function": {"name": name, "arguments": "{}"}}
        for i, name in enumerate(("look", "find", "look"))
    ]
    messages = [
        USER,
        {"role": "assistant", "tool_calls": calls[:2]},
        {"role": "tool", "tool_call_id": "x1", "content": "second"},
        {"role": "tool", "tool_call_id": "x0", "content": "first"},
        {"role": "assistant", "tool_calls": calls[2:]},
        {"role": "tool", "content": "third"},
        {"role": "assistant", "content": "Done."},
    ]
    rendered = render(kimi, messages)
    whole = "".join(segment.text for segment in rendered.samples[0])
    assert (
        "<call>functions.look:0look<call>functions.find:1find" in whole
        and "<call>functions.look:2look" in whole
    )
    assert (
        "functions.find:1second" in whole
        and "functions.look:0first" in whole
        and "functions.look:2third" in whole
    )
    assert len(rendered.notes) == 1 and "functions.NAME:i" in rendered.notes[0]
    with pytest.raises(DataError, match=r"messages\[1\] \(tool\) returns to no call: tool_call_id is 'z'"):
        render(
            kimi,
            [
                USER,
                {"role": "tool", "tool_call_id": "z", "content": "x"},
                {"role": "assistant", "content": "Done."},
            ],
        )


def test_sharegpts_calls_and_observations_are_the_openai_ones():
    call = {"name": "look", "arguments": {"query": "x"}}
    conversation = [
        {"from": "human", "value": "Look."},
        {"from": "function_call", "value": json.dumps(call)},
        {"from": "observation", "value": "seen"},
        {"from": "gpt", "value": "I saw."},
    ]
    tools = json.dumps([{"name": "look", "description": "looks", "parameters": {}}])
    row = row_from_dict({"conversations": conversation, "tools": tools}, 1)
    plain = row_from_dict(
        {
            "messages": [
                {"role": "user", "content": "Look."},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"function": {"name": "look", "arguments": '{"query": "x"}'}}],
                },
                {"role": "tool", "content": "seen"},
                {"role": "assistant", "content": "I saw."},
            ],
            "tools": [
                {"type": "function", "function": {"name": "look", "description": "looks", "parameters": {}}}
            ],
        },
        1,
    )
    assert (row.messages, row.tools) == (plain.messages, plain.tools)


def test_a_row_that_ends_in_the_users_turn_is_noted():
    said = "the last turn is not the assistant's: it is not trained on"
    asked = [*ROW, {"role": "user", "content": "And then?"}]
    assert said in render(GOOD, messages=asked).notes and said not in render(GOOD).notes
