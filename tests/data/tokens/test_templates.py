"""Chat templates: rendered as transformers renders them, inside a sandbox."""

import itertools

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from unfreeze.core.errors import CheckpointError, DataError
from unfreeze.data import PLAIN_TEMPLATE, ChatTemplate, load_tokenizer
from unfreeze.data.tokens.templates import plain_template

VARIABLES = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
USER = {"role": "user", "content": "Who wrote <b>Hamlet</b> & “Macbeth”?\n"}
ANSWER = {"role": "assistant", "content": " Shakespeare, wrote them he did. "}
CONVERSATIONS = {
    "one": [USER],
    "answered": [USER, ANSWER],
    "system": [
        {"role": "system", "content": "Be short."},
        USER,
        ANSWER,
        {"role": "user", "content": "中文? 🙂"},
        ANSWER,
    ],
    "reasoning": [USER, {**ANSWER, "reasoning_content": "\nHe did.\n"}],
    "tools": [
        USER,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "look", "arguments": {"q": "é<&>"}}}],
        },
        {"role": "tool", "tool_call_id": "functions.look:0", "content": "found"},
        ANSWER,
    ],
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "look", "description": "Look <it> up — é", "parameters": {"type": "object"}},
    }
]


def theirs(source, messages, **options):
    return render_jinja_template([messages], chat_template=source, **options, **VARIABLES)


@pytest.mark.parametrize("name", ["chatml", "llama3", "deepseek", "qwen3", "marked", "kimi", "indented"])
def test_text_equals_transformers(name, templates):
    template = ChatTemplate(templates[name], VARIABLES)
    for messages, prompt, tools in itertools.product(CONVERSATIONS.values(), (False, True), (None, TOOLS)):
        rendered, _ = theirs(templates[name], messages, add_generation_prompt=prompt, tools=tools)
        assert template.render(messages, add_generation_prompt=prompt, tools=tools) == rendered[0]


def test_kimis_real_template_equals_transformers(kimi_folder):
    template = load_tokenizer(kimi_folder).template
    assert template is not None
    for messages, prompt, tools in itertools.product(CONVERSATIONS.values(), (False, True), (None, TOOLS)):
        rendered, _ = theirs(template.source, messages, add_generation_prompt=prompt, tools=tools)
        assert template.render(messages, add_generation_prompt=prompt, tools=tools) == rendered[0]


def test_generation_spans_equal_transformers(templates):
    template = ChatTemplate(templates["marked"], VARIABLES)
    for messages in CONVERSATIONS.values():
        rendered, spans = theirs(templates["marked"], messages, return_assistant_tokens_mask=True)
        assert template.render_spans(messages) == (rendered[0], spans[0])
    assert spans[0], "the last conversation has spans, so the comparison is not of empty lists"


def test_named_template_for_tools_is_used_only_with_tools():
    template = ChatTemplate("plain", VARIABLES, "with {{ tools | length }}")
    assert template.render([USER]) == "plain" and template.render([USER], tools=TOOLS) == "with 1"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[5].content.x.y }}",
        "{{ 1 // 0 }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_what_a_template_must_not_or_cannot_do_is_one_error(source):
    template = ChatTemplate(source, VARIABLES)
    with pytest.raises(DataError, match="the chat template refuses"):
        template.render([USER])


def test_text_that_is_no_template():
    with pytest.raises(CheckpointError, match="cannot be compiled"):
        ChatTemplate("{% generation %} {{ x }}", {})


def test_plain_template_closes_the_answer_and_opens_the_next():
    template = plain_template(VARIABLES, add_bos=True)
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Why?"}]
    assert template.source == PLAIN_TEMPLATE
    assert (
        template.render(messages, add_generation_prompt=True)
        == "<|bos|>System:\nBe short.\n\nUser:\nWhy?\n\nAssistant:\n"
    )
    assert template.render([*messages, {"role": "assistant", "content": "So."}]).endswith(
        "Assistant:\nSo.<|eos|>\n\n"
    )
    assert plain_template({}, add_bos=False).render(messages[1:]) == "User:\nWhy?\n\n"
    with pytest.raises(DataError, match="no form for tools"):
        template.render(messages, tools=TOOLS)
