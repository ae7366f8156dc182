"""The loss mask of each family's chat template, with tools and reasoning, proven token by token against
transformers
(fixture `proof`; its own control arms are in test_masks.py).

tests/data/tokens/templates holds one template per style, written for these tests with {% generation %} around what
the assistant says. Oracle:
transformers' assistant spans of the marked template. Under test: the same template with the marks taken out,
where spans are found by rendering prefixes; and the marked one through our own reading of the marks. Kimi's
style is also held against the real template where that is present.
"""

import re
from pathlib import Path

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from unfreeze.core.errors import DataError
from unfreeze.data import Conversation, Encoder, load_tokenizer

FOLDER = Path(__file__).parent / "templates"
MARKED = {path.stem: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.jinja"))}
EOS = {
    "chatml": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "qwen2": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "deepseek_v3": "<｜end▁of▁sentence｜>",
    "kimi_k2": "<|im_end|>",
}
SPECIALS = [
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁outputs▁begin｜>",
    "<｜tool▁outputs▁end｜>",
    "<｜tool▁output▁begin｜>",
    "<｜tool▁output▁end｜>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
]

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look <up> \u2014 \u00e9",
            "parameters": {"type": "object"},
        },
    }
]
SYSTEM = {"role": "system", "content": "Be short."}
USER = {"role": "user", "content": "Who wrote Hamlet? \U0001f642"}
ANSWER = {"role": "assistant", "content": "Shakespeare it was, hmm."}
THOUGHT = {**ANSWER, "reasoning_content": "An easy one."}


def call(*queries):
    functions = [{"name": "look", "arguments": {"q": query}} for query in queries]
    return [
        {"type": "function", "id": f"functions.look:{i}", "function": function}
        for i, function in enumerate(functions)
    ]


ASKS_TOOL = {"role": "assistant", "content": None, "tool_calls": call("x")}
ASKS_TWO = {"role": "assistant", "content": "Look I will.", "tool_calls": call("<x>", "é")}
RESULT = {"role": "tool", "content": "found", "tool_call_id": "functions.look:0"}

CONVERSATIONS = {
    "single": ([USER, ANSWER], None),
    "system, several turns": (
        [SYSTEM, USER, ANSWER, {"role": "user", "content": ANSWER["content"]}, ANSWER, USER],
        None,
    ),
    "tool": ([SYSTEM, USER, ASKS_TOOL, RESULT, ANSWER], TOOLS),
    "two calls at once": (
        [USER, ASKS_TWO, RESULT, {**RESULT, "tool_call_id": "functions.look:1"}, ANSWER],
        TOOLS,
    ),
    "reasoning": ([USER, THOUGHT], None),
    "reasoning around a tool": (
        [USER, {**ASKS_TOOL, "reasoning_content": "Look it up."}, RESULT, THOUGHT],
        TOOLS,
    ),
}
WITH_TOOLS = {"llama3", "qwen2", "qwen3", "deepseek_v3", "kimi_k2"}
# Qwen3 writes an empty thought in front of the last answer only, so a text changes behind its first turn when
# a turn is added.
UNSTABLE = [("qwen3", "system, several turns"), ("qwen3", "tool"), ("qwen3", "two calls at once")]


def encode_whole(row, tokenizer, **options):
    (example,) = Encoder(tokenizer, 10_000, **options)(row).examples
    return list(example.tokens), list(example.weights)


def without_marks(source: str) -> str:
    return re.sub(r"\{%-? (end)?generation -?%\}", "", source)


def takes(style: str, name: str) -> bool:
    thinks = "reasoning_content" in MARKED[style]
    return (
        (CONVERSATIONS[name][1] is None or style in WITH_TOOLS)
        and (style, name) != ("llama3", "two calls at once")
        and (thinks or "reasoning" not in name)
    )


CASES = [(style, name) for style in MARKED for name in CONVERSATIONS if takes(style, name)]


@pytest.fixture(scope="module")
def tokenizer_of(json_folder):
    made = {}

    def make(style: str, source: str):
        if (style, source) not in made:
            size = load_tokenizer(json_folder()).vocab_size
            added = {str(size + i): {"content": text, "special": True} for i, text in enumerate(SPECIALS)}
            made[style, source] = load_tokenizer(
                json_folder(source, added_tokens_decoder=added, eos_token=EOS[style])
            )
        return made[style, source]

    return make


def oracle(style: str, name: str, tokenizer):
    """(text, spans) of transformers; a template that renders differently without its marks would prove
    nothing."""
    messages, tools = CONVERSATIONS[name]
    variables = {role: tokenizer.variables[role] for role in ("bos_token", "eos_token")}
    (full,), (spans,) = render_jinja_template(
        [messages], chat_template=MARKED[style], tools=tools, return_assistant_tokens_mask=True, **variables
    )
    (plain,), _ = render_jinja_template(
        [messages], chat_template=without_marks(MARKED[style]), tools=tools, **variables
    )
    assert plain == full and len(spans) == sum(message["role"] == "assistant" for message in messages)
    assert all(full[start:end].endswith(EOS[style]) for start, end in spans)
    return full, spans


def test_every_style_of_the_issue_is_here():
    assert (
        MARKED.keys() == EOS.keys() == {"chatml", "llama3", "qwen2", "qwen3", "deepseek_v3", "kimi_k2"}
        and len(CASES) == 23
    )


@pytest.mark.parametrize("style", [style for style in MARKED if "reasoning_content" not in MARKED[style]])
def test_reasoning_is_refused_where_the_template_has_no_form_for_it(style, tokenizer_of):
    messages, tools = CONVERSATIONS["reasoning"]
    for source in (MARKED[style], without_marks(MARKED[style])):
        with pytest.raises(
            DataError, match=r"messages\[1\].reasoning_content \('An easy one.'\) is not taught"
        ) as error:
            encode_whole(Conversation(messages, tools), tokenizer_of(style, source))
        assert "--data.reasoning inline" in error.value.next
        tokenizer = tokenizer_of(style, source)
        tokens, weights = encode_whole(Conversation(messages, tools), tokenizer, reasoning="inline")
        said = tokenizer.decode([t for t, w in zip(tokens, weights, strict=True) if w], skip_specials=False)
        assert said == "<think>\nAn easy one.\n</think>\n\n" + ANSWER["content"] + EOS[style]


@pytest.mark.parametrize("style, name", [case for case in CASES if case not in UNSTABLE])
def test_mask_by_prefixes_is_that_of_transformers(style, name, tokenizer_of, proof):
    tokenizer = tokenizer_of(style, without_marks(MARKED[style]))
    messages, tools = CONVERSATIONS[name]
    tokens, weights = encode_whole(Conversation(messages, tools), tokenizer)
    assert proof(tokenizer, tokens, weights, *oracle(style, name, tokenizer)) == []


@pytest.mark.parametrize("style, name", CASES)
def test_mask_by_marks_is_that_of_transformers(style, name, tokenizer_of, proof):
    tokenizer = tokenizer_of(style, MARKED[style])
    messages, tools = CONVERSATIONS[name]
    tokens, weights = encode_whole(Conversation(messages, tools), tokenizer)
    assert proof(tokenizer, tokens, weights, *oracle(style, name, tokenizer)) == []


@pytest.mark.parametrize("style, name", UNSTABLE)
def test_an_unstable_template_is_refused_as_a_whole_with_the_span_that_differs(style, name, tokenizer_of):
    messages, tools = CONVERSATIONS[name]
    with pytest.raises(DataError) as error:
        encode_whole(
            Conversation(messages, tools, row=5),
            tokenizer_of(style, without_marks(MARKED[style])),
            turns="whole",
        )
    says = (
        r"row 5: the chat template is not prefix-stable: messages\[[12]\] \(assistant\), the conversation up"
        r" to it changes at character \d+: '"
    )
    assert (
        re.match(says, error.value.message)
        and "hink>\\n\\n</think>" in error.value.message
        and "--data.turns each" in error.value.next
    )


@pytest.mark.parametrize("style, name", UNSTABLE)
def test_an_unstable_template_teaches_each_turn_behind_the_prompt_of_transformers(
    style, name, tokenizer_of, proof
):
    tokenizer = tokenizer_of(style, without_marks(MARKED[style]))
    messages, tools = CONVERSATIONS[name]
    variables = {role: tokenizer.variables[role] for role in ("bos_token", "eos_token")}
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    examples = Encoder(tokenizer, 10_000)(Conversation(messages, tools)).examples
    assert len(examples) == len(turns) > 1
    for turn, example in zip(turns, examples, strict=True):
        source = without_marks(MARKED[style])
        (prompt,), _ = render_jinja_template(
            [messages[:turn]], chat_template=source, tools=tools, add_generation_prompt=True, **variables
        )
        (upto,), _ = render_jinja_template(
            [messages[: turn + 1]], chat_template=source, tools=tools, **variables
        )
        assert upto.startswith(prompt)
        assert (
            proof(
                tokenizer,
                list(example.tokens),
                list(example.weights),
                upto.rstrip(),
                [(len(prompt), len(upto.rstrip()))],
            )
            == []
        )


@pytest.mark.parametrize("style, name", UNSTABLE)
def test_control_arm_prefixes_of_an_unstable_template_would_supervise_the_wrong_span(
    style, name, tokenizer_of
):
    """Without the guard, the span found by lengths alone is not what transformers says the assistant
    speaks."""
    tokenizer = tokenizer_of(style, without_marks(MARKED[style]))
    messages, tools = CONVERSATIONS[name]
    full, spans = oracle(style, name, tokenizer)
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    render = tokenizer.chat.render
    ends = [len(render(messages[: i + 1], tools=tools)) - 1 for i in answers]
    unguarded = [
        (len(render(messages[:i], add_generation_prompt=True, tools=tools)), end)
        for i, end in zip(answers, ends, strict=True)
    ]
    assert unguarded != spans and full[slice(*unguarded[0])] != full[slice(*spans[0])]


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_kimi_style_is_the_real_kimi_template(name, kimi_folder):
    real = load_tokenizer(kimi_folder)
    messages, tools = CONVERSATIONS[name]
    variables = {role: real.variables[role] for role in ("bos_token", "eos_token")}
    (text,), _ = render_jinja_template(
        [messages], chat_template=without_marks(MARKED["kimi_k2"]), tools=tools, **variables
    )
    assert real.chat.render(messages, tools=tools) == text


@pytest.mark.parametrize("name", [name for name in CONVERSATIONS if "reasoning" not in name])
def test_mask_of_the_real_kimi_tokenizer_and_template(name, kimi_folder, proof):
    """docs/why/trust.md N4 on published files: spans from the marked style, tokens and mask from Kimi-K2's own
    tokenizer and template."""
    real = load_tokenizer(kimi_folder)
    messages, tools = CONVERSATIONS[name]
    tokens, weights = encode_whole(Conversation(messages, tools), real)
    assert proof(real, tokens, weights, *oracle("kimi_k2", name, real)) == []


def test_a_template_whose_marks_cover_the_user_is_refused_and_good_ones_pass(tokenizer_of):
    """docs/why/trust.md N4, "mask all ones". Control arm: the same template with its marks where they belong
    passes."""
    row = Conversation(CONVERSATIONS["single"][0])
    everywhere = "{% generation %}" + without_marks(MARKED["chatml"]) + "{% endgeneration %}"
    with pytest.raises(DataError, match="is the user's and would be taught"):
        encode_whole(row, tokenizer_of("chatml", forced(everywhere)))
    said = "{{ message.content + '<|im_end|>' }}"
    misses = MARKED["chatml"].replace(said + "{% endgeneration %}", "{% endgeneration %}" + said)
    with pytest.raises(
        DataError,
        match=r"messages\[1\].content .* is not taught: the chat template writes it where nothing is taught",
    ):
        encode_whole(row, tokenizer_of("chatml", forced(misses)))
    encode_whole(row, tokenizer_of("chatml", forced(MARKED["chatml"])))


def forced(source: str) -> str:
    """Marks are read where prefixes do not serve; a count of the messages at the end of the prompt makes them
    not serve."""
    return source + "{%- if add_generation_prompt -%}{{- '?' -}}{%- endif -%}"
