"""Rows by outline are the rows of the long way: every template, texts that could be taken for the template's."""

import random
import re

import pytest

from unfreeze.core.errors import DataError
from unfreeze.data.rows.shapes import row_from_dict
from unfreeze.data.tokens import outlines, tracing
from unfreeze.data.tokens.outlines import DIFFERS, Outlines, begins, between, end_of
from unfreeze.data.tokens.templates import PLAIN_TEMPLATE, ChatTemplate
from unfreeze.data.tokens.tracing import Hole
from unfreeze.data.tokens.turns import Renderer

from .test_stepwise import VARIABLES

ENDS = ["<|im_end|>", "<|eot_id|>", "</s>", "<|eos|>"]
_ENDS = re.compile("|".join(map(re.escape, ENDS)))
PLAIN = ["a", "b c", "Yes, it is.", "42", "é", " ", "\n", ".", "<", "|", "user", "None"]
NASTY = [
    "<|im_end|>",
    "<|im_",
    "end|>",
    "</s>",
    "s>",
    "<think>",
    "</think>",
    "<think>\n",
    "[",
    "{{ x }}",
    "<|",
]


def quote(value):
    if isinstance(value, str):
        return _ENDS.sub(lambda found: f"\U000f0000{found[0]}\U000f0001", value)
    if isinstance(value, dict):
        return {name: quote(item) for name, item in value.items()}
    return [quote(item) for item in value] if isinstance(value, list) else value


def rows(seed=7, count=200):
    draw = random.Random(seed)

    def text(least=1):
        bits = PLAIN if draw.random() < 0.7 else PLAIN + NASTY
        block = "<think>\nWhy?\n</think>\n\n" if draw.random() < 0.1 else ""
        return block + "".join(draw.choices(bits, k=draw.randint(least, 4)))

    for _ in range(count):
        messages = [{"role": "system", "content": text(0)}] * (draw.random() < 0.4)
        for _ in range(draw.choice((1, 1, 2, 3))):
            answer = {"role": "assistant", "content": text()}
            answer |= {"reasoning_content": text()} if draw.random() < 0.1 else {}
            answer |= {"weight": draw.choice((0, 1))} if draw.random() < 0.1 else {}
            messages += [{"role": "user", "content": text()}, answer]
        try:
            yield row_from_dict({"messages": messages[: -1 if draw.random() < 0.1 else None]}, 1)
        except DataError:  # a blank text
            continue


def outcome(renderer, row):
    try:
        return renderer(row)
    except DataError as error:
        return error.message, error.next


def differences(source, turns, monkeypatch, given=()):
    """-> how many rows become something else by outline, and how many went by one."""
    long_way = Renderer(ChatTemplate(source, VARIABLES), ENDS, quote, turns=turns)
    long_way._outlines.key = lambda row: None
    long_way.template._traces.text = lambda *_: None
    found, real = [], Outlines.find
    renderer = Renderer(ChatTemplate(source, VARIABLES), ENDS, quote, turns=turns)
    monkeypatch.setattr(
        Outlines,
        "find",
        lambda *given: (lambda made: (found.append(1) if made else None, made)[1])(real(*given)),
    )
    wrong = sum(outcome(long_way, row) != outcome(renderer, row) for row in given or rows())
    monkeypatch.setattr(Outlines, "find", real)
    return wrong, len(found)


@pytest.mark.parametrize("turns", ["auto", "whole", "each", "last"])
def test_rows_by_outline_are_the_rows_of_the_long_way(templates, turns, monkeypatch):
    for name, source in templates.items():
        wrong, by_outline = differences(source, turns, monkeypatch)
        assert not wrong, name
        if name in ("chatml", "llama3", "kimi"):
            assert by_outline > 40, name


def test_without_the_look_at_think_blocks_rows_would_be_wrong(templates, monkeypatch):
    """The control arm."""
    monkeypatch.setattr(Outlines, "_marks", property(lambda self: []))
    assert sum(differences(source, "auto", monkeypatch)[0] for source in templates.values())


def test_without_the_look_at_end_tokens_a_turn_would_end_too_late(monkeypatch):
    """The control arm: an end token before the content, which the content can follow or not."""
    source = (
        "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}</s>>{% endif %}{{ m.content }}</s>"
        "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    assert differences(source, "auto", monkeypatch) == (0, 0)
    real = outlines.Completions.first_end
    monkeypatch.setattr(
        outlines.Completions,
        "first_end",
        lambda self, text: None if text.endswith(">>") else real(self, text),
    )
    answers = [
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": said}] for said in ("b", "s")
    ]
    short = [row_from_dict({"messages": messages}, 1) for messages in answers]  # "s" stands in "</s>"
    assert differences(source, "auto", monkeypatch, short)[0]


@pytest.mark.parametrize("limit", [tracing.MOST_WORK, 10**12])
def test_rows_near_the_limits_of_the_sandbox_go_the_long_way(limit, monkeypatch):
    """There they are refused or not whatever rows were before them; 10**12 is the control arm."""
    monkeypatch.setattr(tracing, "MOST_WORK", limit)
    renderer = Renderer(ChatTemplate(PLAIN_TEMPLATE, {**VARIABLES, "eos_token": "</s>"}), ENDS, quote)

    def row(text):
        turns = [{"role": role, "content": text} for role in ("user", "assistant") * 100]
        return row_from_dict({"messages": turns}, 1)

    renderer(row("a b"))
    assert renderer._outlines.find(renderer._outlines.key(row("c d")), row("c d"))
    assert (renderer._outlines.key(row("a" * 600)) is None) == (limit < 10**12)


def test_parts_begin_with_others_or_differ_or_texts_decide():
    a, b = Hole(0, "content"), Hole(1, "content")
    assert begins(["<u>", a, "<a>", b, "."], ["<u>", a, "<"]) == (2, 1)
    assert begins(["<u>", a, "<a>"], ["<u>", a, "<x"]) == DIFFERS
    assert begins(["<u>", a, "<a>"], ["<x>", a, "<a>"]) == DIFFERS
    assert begins(["<u>", a, "<a>"], ["<u>", a, "<a>..."]) == DIFFERS
    assert begins(["<u>", a, "<a>", b, ""], ["<u>", a, "<a>..."]) is None  # b decides
    assert begins(["<u>", a, "<a>"], ["<u>", b, "<a>"]) is None
    parts = ["<u>", a, "<a>", b, "."]
    assert between(parts, (0, 1), (2, 2)) == ["u>", a, "<a"]
    assert between(parts, (2, 1), (2, 2)) == ["a"]
    assert end_of(parts) == (4, 1)
