"""Templates are replaced, not evaluated; prices are bounds; keys are of all that decides an answer."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unfreeze.commands.demo import TINY_K2
from unfreeze.core.errors import ConfigError, DataError
from unfreeze.data import load_tokenizer
from unfreeze.synth.prompts import Requests, Seed, fields_of, filled, most_bytes, read_seeds
from unfreeze.synth.recipe import Recipe
from unfreeze.synth.usage import checked, least_tokens
from unfreeze.synth.validate import of_language, repeated, thought_apart
from unfreeze.teach.answers import Answer


def requests(recipe, *rows):
    return Requests(recipe, iter([Seed(place, row) for place, row in enumerate(rows, 1)]))


@given(st.text(), st.text())
def test_a_field_s_text_is_never_read_as_a_template(text, before):
    """What str.format would evaluate, an attribute or an index, is no field here."""
    template = before.replace("{", "{{").replace("}", "}}") + "{x}"
    assert filled(template, Seed(1, {"x": text})) == before + text


def test_attributes_and_formats_are_no_fields():
    seed = Seed(3, {"x": "a", "n": 5, "list": [1, "é"]})
    assert filled("{n} {list} {{x}} {x}", seed) == '5 [1, "é"] {x} a'
    for template in ("{x.__class__}", "{x[0]}", "{x!r}", "{x:>9999999999}"):
        with pytest.raises(DataError, match="row 3 has no field"):
            filled(template, seed)
    with pytest.raises(ConfigError, match=r"'{}' at character 2"):
        fields_of("a{}", "prompt")
    with pytest.raises(ConfigError, match=r"'}' at character 1"):
        fields_of("}", "prompt")
    assert fields_of("{{ {a} {b }", "prompt") == ["a", "b"]


TOKENIZER = load_tokenizer(TINY_K2)


@given(st.text(max_size=200))
def test_a_byte_a_token_is_a_bound_for_a_real_tokenizer(text):
    count = len(TOKENIZER.encode(text, specials=False))
    assert least_tokens(Answer(text, "stop"), None) <= count <= most_bytes(text)


def test_a_key_is_of_what_decides_the_answer_and_a_place_in_the_row():
    row = {"q": "a"}
    base = Recipe(prompt="{q}")
    key = requests(base, row).first[0].key
    assert requests(base, {"q": "a", "other": 1}).first[0].key == key
    for name, value in {"temperature": 0.1, "max_tokens": 7, "model": "m", "system": "s", "seed": 4}.items():
        assert requests(base.model_copy(update={name: value}), row).first[0].key != key
    for name, value in {"price_read": 1.0, "retries": 5, "timeout": 1.0, "read_beside": 9}.items():
        assert requests(base.model_copy(update={name: value}), row).first[0].key == key
    samples = requests(base.model_copy(update={"samples": 3}), row).first
    assert [request.body["seed"] for request in samples] == [0, 1, 2]
    assert len({request.key for request in samples}) == 3


def test_extra_fields_are_sent_and_the_limit_has_the_server_s_name():
    recipe = Recipe(
        prompt="{q}",
        extra='{"reasoning_effort": "low"}',
        max_tokens_field="max_completion_tokens",
        max_tokens=9,
    )
    body = requests(recipe, {"q": "a"}).first[0].body
    assert body["reasoning_effort"] == "low" and body["max_completion_tokens"] == 9
    assert "max_tokens" not in body


@pytest.mark.parametrize("name", ["seeds.csv", "seeds.json", "seeds.txt", "seeds.jsonl.gz"])
def test_seeds_are_rows_of_any_data_file(tmp_path, name):
    import gzip

    path, rows = tmp_path / name, [{"text": "one"}, {"text": "two"}]
    written = {
        "seeds.csv": b"text\none\ntwo\n",
        "seeds.json": json.dumps(rows).encode(),
        "seeds.txt": b"one\n\ntwo\n",
        "seeds.jsonl.gz": gzip.compress(b'{"text": "one"}\n{"text": "two"}\n'),
    }
    path.write_bytes(written[name])
    assert [seed.fields["text"] for seed in read_seeds(path)] == ["one", "two"]


@pytest.mark.parametrize(
    "usage, fault, over",
    [
        ({"prompt_tokens": 5, "completion_tokens": 50}, "", False),
        ({"prompt_tokens": 5, "completion_tokens": 101}, "101 tokens written; at most 100", True),
        ({"prompt_tokens": 10_000, "completion_tokens": 50}, "10,000 tokens read; the request has", True),
        ({"prompt_tokens": 5, "completion_tokens": 3}, "3 tokens written; the answer alone has 4", False),
        ({"prompt_tokens": True, "completion_tokens": 5}, "usage is", False),
        ({"prompt_tokens": -1, "completion_tokens": 5}, "usage is", False),
        ({"completion_tokens": 5.5}, "usage is", False),
        ([1], "usage is", False),
        ("\x1b[31m", r"usage is '\x1b[31m'", False),
        (None, "no usage", False),
    ],
)
def test_a_usage_is_believed_in_so_far_as_it_can_be_true(usage, fault, over):
    request = requests(Recipe(prompt="{q}", max_tokens=100), {"q": "a"}).first[0]
    answer = Answer("x" * 1000, "stop", about={"usage": usage} if usage is not None else {})
    found = checked(request, answer, None)
    assert found.fault.startswith("usage says " + fault) if "tokens" in fault else fault in found.fault
    assert bool(found.fault) == bool(fault) and found.over == over
    # with the model's own tokenizer the count is closer
    assert checked(request, answer, len).fault


def test_repeats_are_found_and_different_texts_stay():
    long = " ".join(f"word{i}" for i in range(50))
    texts = [long, f"{long} and more", "short", "short", "another", long.upper()]
    assert repeated(texts, 0.7) == {1: 0, 3: 2, 5: 0}
    assert repeated(texts, 1.0) == {3: 2}
    assert repeated([], 0.7) == {}


@pytest.mark.parametrize(
    "text, language, fits",
    [
        ("The answer is that it was not in the house, as it was said to be by all of them that day.", "en", True),
        ("Die Antwort ist, dass es nicht in dem Haus war, wie es von allen an dem Tag gesagt wurde, und das ist "
         "alles, was man von der Sache noch weiss.", "en", False),
        ("Short it is.", "en", True),
        ("短いです。", "en", False),
        ("这是一个答案。", "zh", True),
        ("This is an answer.", "zh", False),
        ("Это короткий ответ.", "ru", True),
    ],
)  # fmt: skip
def test_the_language_of_an_answer(text, language, fits):
    assert of_language(text, language) == fits


def test_a_think_block_is_taken_apart_once():
    answer = thought_apart(Answer("<think>\nwhy\n</think>\n\nso <think> it is", "stop"))
    assert (answer.reasoning, answer.text) == ("why", "so <think> it is")
    kept = Answer("<think>a</think> b", "stop", "own")
    assert thought_apart(kept) is kept
