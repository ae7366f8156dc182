"""Traits of published templates, each as the smallest template that has it: what is taught there, and a
control arm that is refused."""

import pytest

from unfreeze.core.errors import DataError
from unfreeze.data.rows.shapes import row_from_dict
from unfreeze.data.tokens.releases import release_of
from unfreeze.data.tokens.templates import ChatTemplate
from unfreeze.data.tokens.turns import Renderer

USER = {"role": "user", "content": "Who is there?"}
ANSWER = {"role": "assistant", "content": "Me."}
THOUGHT = {**ANSWER, "reasoning_content": "Hm, look."}
TALK = [USER, ANSWER, {"role": "user", "content": "And now?"}, {**THOUGHT, "content": "You."}]


def template(
    turn="{{ m.content }}", prompt="", *, head="<|im_start|>{{ m.role }}\n", end="<|im_end|>\n", before=""
):
    """A template in the manner of ChatML: `turn` is what it writes of an answer, `prompt` what its generation
    prompt ends in."""
    said = "{% if m.role == 'assistant' %}" + turn + "{% else %}{{ m.content }}{% endif %}"
    return (
        before
        + "{% for m in messages %}"
        + head
        + said
        + end
        + "{% endfor %}"
        + ("{% if add_generation_prompt %}<|im_start|>assistant\n" + prompt + "{% endif %}")
    )


def render(source, messages, **options):
    ends = options.pop("ends", ["<|im_end|>"])
    return Renderer(ChatTemplate(source, {}), ends, lambda value: value, **options)(
        row_from_dict({"messages": messages}, 3)
    )


def examples(source, messages, **options):
    """(prompt, what is taught) of each example, where each holds one taught turn."""
    return [(sample[0].text, sample[1].text) for sample in render(source, messages, **options).samples]


THINKS = (
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}"
)


@pytest.mark.parametrize("block", ["<think>\n</think>", "<think></think>", "<think>\n\n</think>\n\n"])
def test_an_empty_block_in_the_prompt_that_the_history_does_not_have(block):
    """The answer follows it; reasoning comes in a block of its own, and a note names the variable."""
    source = template(THINKS, block, before="{% set _ = enable_thinking %}")
    (first, plain), (second, thought) = examples(source, TALK)
    assert (
        first == f"<|im_start|>user\nWho is there?<|im_end|>\n<|im_start|>assistant\n{block}"
        and plain == "Me.<|im_end|>"
    )
    assert (
        second.endswith(f"<|im_start|>assistant\n{block}")
        and thought == "<think>\nHm, look.\n</think>\n\nYou.<|im_end|>"
    )
    assert any(
        "--data.template-variables enable_thinking=true" in note for note in render(source, TALK).notes
    )


def test_a_prompt_that_ends_in_words_of_its_own_is_refused():
    with pytest.raises(
        DataError, match=r"messages\[1\] \(assistant\), the prompt before it changes"
    ) as error:
        examples(template(prompt="Sure: "), [USER, ANSWER])
    assert "chat_template.jinja" in error.value.next and "--data.turns each" not in error.value.next


def test_marks_of_an_unknown_release_are_read_off_its_template():
    """A block that the prompt opens and the history leaves out: the answer without reasoning closes it."""
    turn = "{% if m.thinking %}<|why|>{{ m.thinking }}<|so|>{% endif %}{{ m.content }}"
    (_, plain), (_, thought) = examples(template(turn, "<|why|>"), TALK)
    assert (plain, thought) == ("<|so|>Me.<|im_end|>", "Hm, look.<|so|>You.<|im_end|>")
    last_only = turn.replace(
        "m.thinking %}",
        "m.thinking and loop.last and not messages[1].tool_calls and messages | length < 3 %}",
    )
    assert examples(template(last_only), TALK)[1][1] == "<|why|>Hm, look.<|so|>You.<|im_end|>"


@pytest.mark.parametrize(
    "prompt, turn",
    [("<think>", "{{ '<think>' if m.reasoning_content }}{{ m.reasoning_content }}</think>{{ m.content }}")],
)
def test_marks_that_begin_alike_are_not_cut_within_a_tag(prompt, turn):
    """GLM-4.7: the prompt ends in <think>, an answer without reasoning begins with </think>."""
    assert [said for _, said in examples(template(turn, prompt), TALK)] == [
        "</think>Me.<|im_end|>",
        "Hm, look.</think>You.<|im_end|>",
    ]


def test_an_answer_that_begins_with_the_closing_mark():
    """Laguna, DeepSeek-V3.1: the prompt ends in </think>, a thought begins with <think> all the same."""
    turn = "{{ '<think>\n' + m.reasoning_content + '\n' if m.reasoning_content }}</think>\n{{ m.content }}"
    (_, plain), (prompt, thought) = examples(template(turn, "</think>"), TALK)
    assert plain == "\nMe.<|im_end|>" and prompt.endswith("assistant\n</think>")
    assert thought == "<think>\nHm, look.\n</think>\nYou.<|im_end|>"


def test_white_space_in_another_place_than_the_prompt_has_it():
    spaced = template(prompt="\n", head="  <|im_start|>{{ m.role }}\n")
    assert examples(spaced, [USER, ANSWER]) == [
        ("  <|im_start|>user\nWho is there?<|im_end|>\n<|im_start|>assistant\n\n", "Me.<|im_end|>")
    ]


def test_what_a_template_writes_only_into_the_last_question():
    hint = template().replace(
        "{{ m.content }}{% endif %}", "{{ 'Be brief. ' if loop.last }}{{ m.content }}{% endif %}"
    )
    assert hint != template()
    (first, said), (second, _) = examples(hint, [*TALK[:3], ANSWER])
    assert (
        "Be brief. Who" in first
        and said == "Me.<|im_end|>"
        and "Be brief. And now?" in second
        and "Be brief. Who" not in second
    )


def test_the_last_words_are_not_mistaken_for_the_end_of_the_prompt():
    """Control arm: found by its text, a question that is what the prompt ends in would make the user's turn
    the answer."""
    for asked in ("?", "assistant", "Who is there?"):
        with pytest.raises(DataError, match="the prompt before it changes"):
            examples(template(prompt="?"), [{"role": "user", "content": asked}, ANSWER])


def test_an_end_token_that_only_stands_before_the_next_turn():
    source = template(end="{% if not loop.last or m.role == 'user' %}<|im_end|>\n{% endif %}")
    assert [said for _, said in examples(source, [USER, ANSWER])] == ["Me.<|im_end|>"]
    never = render(template(end="\n"), [USER, ANSWER])
    assert never.notes == ("the answer does not end with an end token, so the model does not learn to stop",)


CUTS = template("{{ m.content.split('</think>')[-1].strip() }}")


def test_a_block_in_content_that_the_template_cuts_out_is_taught_as_it_was_written():
    """As Phi-4-reasoning, EXAONE and others do, in the last turn too. Reasoning in a field has no marks
    there: refused, and the advice holds."""
    inline = {**ANSWER, "content": "<think>Hm, look.</think>\nMe."}
    assert [said for _, said in examples(CUTS, [USER, inline])] == ["<think>Hm, look.</think>\nMe.<|im_end|>"]
    with pytest.raises(
        DataError, match=r"messages\[1\].reasoning_content \('Hm, look.'\) is not trained on"
    ) as error:
        examples(CUTS, [USER, THOUGHT])
    assert "--data.reasoning inline" in error.value.next
    for asked in (THOUGHT, inline):
        ((_, said),) = examples(CUTS, [USER, asked], reasoning="inline")
        assert said == "<think>\nHm, look.\n</think>\n\nMe.<|im_end|>" or asked is inline
        assert [said for _, said in examples(CUTS, [USER, asked], reasoning="drop")] == ["Me.<|im_end|>"]


@pytest.mark.parametrize(
    "source, name",
    [
        # January 2025 and R1-0528: the model opens the block itself
        ("<｜Assistant｜> content.split('</think>')", "DeepSeek-R1"),
        ("<｜Assistant｜><think>\\n", "DeepSeek-R1"),
        ("<｜Assistant｜> </think> thinking", "DeepSeek-V3.1"),
        ("[TOOL_CALLS] [THINK] [/THINK]", "Magistral"),
        ("<|turn> <|channel>thought", "Gemma-4"),
        ("<|CHATBOT_TOKEN|> <|START_THINKING|><|END_THINKING|>", "Command-R7B"),
        ("Here are my reasoning steps: [BEGIN FINAL RESPONSE]", "Apriel-Thinker"),
        ("<seed:bos> <seed:think>", "Seed-OSS"),
        ("<|im_start|> Reasoning Mode: /no_think", "SmolLM3"),
        ("<｜Assistant｜>", ""),
    ],
)
def test_releases_are_known_by_what_stands_in_their_templates(source, name):
    assert release_of(source).name == name


# SmolLM3's manner: content alone, an empty block in the mode without thinking, marks for what is learned
SMOLLM3 = (
    "{%- set mode = '/think' if enable_thinking is not defined or enable_thinking else '/no_think' -%}"
    "{%- set empty = '' if mode == '/think' else '<think>\n\n</think>\n' -%}"
    "{{- '<|im_start|>system\nReasoning Mode: ' + mode + '<|im_end|>\n' -}}"
    "{%- for m in messages -%}{%- if m.role == 'assistant' -%}{% generation %}"
    "{{- '<|im_start|>assistant\n' + empty + m.content.lstrip('\n') + '<|im_end|>\n' -}}{% endgeneration %}"
    "{%- else -%}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' + empty -}}{%- endif -%}"
)
# Seed-OSS' manner: a block with marks of its own wherever a turn has reasoning
SEED_OSS = (
    "{%- for m in messages -%}{{ '<seed:bos>' + m.role }}"
    "{%- if m.role == 'assistant' and m.reasoning_content %}"
    "{{ '\n<seed:think>' + m.reasoning_content | trim + '</seed:think>' }}{%- endif %}"
    "{{ '\n' + m.content + '<seed:eos>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<seed:bos>assistant\n' }}{%- endif %}"
)
INLINE = {**ANSWER, "content": "<think>\nHm, look.\n</think>\nMe."}


def said(source, messages, **options):
    """All that is taught, an example after the other."""
    samples = render(source, messages, **options).samples
    return [part.text for sample in samples for part in sample if part.supervised]


def test_smollm3_thinks_in_the_form_of_its_empty_block(monkeypatch):
    thought = "<think>\nHm, look.\n</think>\n"
    assert said(SMOLLM3, TALK) == ["Me.<|im_end|>", thought + "You.<|im_end|>"]
    for turn in (THOUGHT, INLINE):
        assert said(SMOLLM3, [USER, turn]) == [thought + "Me.<|im_end|>"]
    off = SMOLLM3.replace("{%- set mode", "{%- set enable_thinking = false -%}{%- set mode", 1)
    assert said(off, [USER, ANSWER]) == ["Me.<|im_end|>"]
    prompt = render(off, [USER, ANSWER]).samples[0][0].text
    assert prompt.endswith("<|im_start|>assistant\n<think>\n\n</think>\n")
    monkeypatch.setattr("unfreeze.data.tokens.releases.RELEASES", ())  # control arm
    with pytest.raises(DataError, match=r"reasoning_content \('Hm, look.'\) is not trained on"):
        said(SMOLLM3, [USER, THOUGHT])


def test_seed_oss_thinks_in_marks_of_its_own(monkeypatch):
    thought = "<seed:think>Hm, look.</seed:think>\n"
    for turn in (THOUGHT, INLINE):  # usual marks in a row become the release's
        assert said(SEED_OSS, [USER, turn], ends=["<seed:eos>"]) == [thought + "Me.<seed:eos>"]
    assert said(SEED_OSS, TALK, ends=["<seed:eos>"]) == ["Me.<seed:eos>", thought + "You.<seed:eos>"]
    # where a template drops reasoning, its release's marks are written
    drops = SEED_OSS.replace("and m.reasoning_content", "and m.reasoning_content and false")
    assert said(drops, [USER, THOUGHT], ends=["<seed:eos>"]) == [thought + "Me.<seed:eos>"]
    monkeypatch.setattr("unfreeze.data.tokens.releases.RELEASES", ())  # control arm
    with pytest.raises(DataError, match=r"is not trained on"):
        said(drops, [USER, THOUGHT], ends=["<seed:eos>"])


def test_the_first_template_of_r1_leaves_the_opening_mark_to_the_model():
    said = "<｜Assistant｜>{{ m.content.split('</think>')[-1] }}<|im_end|>"
    asked = (
        "{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}{% else %}"
        + said
        + "{% endif %}{% endfor %}"
    )
    source = asked + "{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"
    assert examples(source, [USER, THOUGHT]) == [
        ("<｜User｜>Who is there?<｜Assistant｜>", "<think>\nHm, look.\n</think>\n\nMe.<|im_end|>")
    ]


def test_blocks_that_a_template_leaves_in_the_history_stay_there():
    """The prompt of a later turn is that of apply_chat_template with the words as the row has them."""
    inline = {**ANSWER, "content": "<think>Hm, look.</think> Me."}
    source = template(prompt="<think>\n", before="{# <think> #}")
    (_, first), (prompt, second) = examples(source, [USER, inline, TALK[2], ANSWER])
    assert (first, second) == ("Hm, look.</think> Me.<|im_end|>", "\n</think>\n\nMe.<|im_end|>")
    assert "assistant\n<think>Hm, look.</think> Me.<|im_end|>" in prompt


def test_an_answer_behind_an_open_block_is_not_learned_as_a_thought():
    """Nemotron-Nano-v2's template puts <think> before the last answer and closes nothing. Reasoning that is
    there closes it."""
    source = template("{{ '<think>\n' if loop.last }}{{ m.content }}", "<think>\n")
    (_, first), (_, second) = examples(source, [*TALK[:3], ANSWER])
    assert first == second == "\n</think>\n\nMe.<|im_end|>"
    inline = {**ANSWER, "content": "<think>\nHm, look.\n</think>\n\nMe."}
    assert [said for _, said in examples(source, [USER, inline])] == ["Hm, look.\n</think>\n\nMe.<|im_end|>"]
    with pytest.raises(
        DataError,
        match=(
            r"messages\[1\] \(assistant\): the prompt opens a think block and the chat template does not"
            r" continue"
        ),
    ):
        examples(source, [USER, ANSWER], turns="whole")


def test_generation_marks_that_begin_inside_the_prompt_are_left_for_one_example_per_turn():
    """What stands in the prompt is not taught: here the history drops reasoning, and the marks begin before
    the header."""
    source = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}<|im_start|>assistant\n"
        "{{ '<think></think>' if loop.last }}{{ m.content }}<|im_end|>{% endgeneration %}"
        "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    assert [said for _, said in examples(source, [*TALK[:3], ANSWER])] == ["<think></think>Me.<|im_end|>"] * 2


def test_an_empty_block_in_content_is_no_reasoning():
    source = template(
        "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% else %}<think></think>{%"
        " endif %}{{ m.content }}"
    )
    empty = {**ANSWER, "content": "<think>\n\n</think>\n\nMe."}
    assert examples(source, [USER, empty]) == examples(source, [USER, ANSWER])


CALLS = "{% macro spell(value) %}{{ value | tojson }}{% endmacro %}" + template(
    "{{ m.content }}{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}{{"
    " spell(c.function.arguments) }}{% for k, v in c.function.arguments.items() %}{{ spell(v) }}{% endfor"
    " %}{% endfor %}"
)


@pytest.mark.parametrize("value", [1_700_000_000_000, 4_791_234_567, None, "null", [None], 2.5e12])
def test_large_numbers_and_nulls_in_arguments_are_no_fault(value):
    """A time in milliseconds is not a width that a template asks for, and an argument's null is not that of
    missing content."""
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": {"at": value}}}
    ((_, said),) = examples(CALLS, [USER, {"role": "assistant", "content": None, "tool_calls": [call]}])
    assert said.startswith('<call>look{"at": ') and said.endswith("<|im_end|>") and "None" not in said


def test_a_number_that_a_template_multiplies_text_by_is_still_limited():
    source = "{% macro wide(n) %}{{ 'x'.center(n) }}{% endmacro %}{{ wide(99999999999) }}" + template()
    with pytest.raises(DataError, match="is more than 10,000,000"):
        examples(source, [USER, ANSWER])


def test_a_speakers_name_that_the_prompt_has_not():
    source = template(head="<|im_start|>{{ m.name or m.role }}\n")
    assert [said for _, said in examples(source, [USER, {**ANSWER, "name": "Bo"}])] == ["Me.<|im_end|>"]


def test_a_templates_own_refusal_names_the_turn():
    source = template(
        "{{ m.content }}",
        before=(
            "{% for m in messages %}{{ raise_exception('No tools here') if m.role == 'tool' }}{% endfor %}"
        ),
    )
    with pytest.raises(DataError, match=r"No tools here; it does so from messages\[2\] \(tool\) on") as error:
        examples(source, [USER, ANSWER, {"role": "tool", "content": "x"}, ANSWER])
    assert "change that turn" in error.value.next
    with pytest.raises(
        DataError,
        match=r"cannot assign attribute on non-namespace object; it does so from messages\[0\] \(user\) on",
    ):
        examples("{% set m = messages[0] %}{% set m.x = m.content.strip() %}" + template(), [USER, ANSWER])
