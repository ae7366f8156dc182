"""Answers that fit a JSON schema: `jsonschema` is the judge, and an arm without masks does not fit."""

import json
import random
import re
import sys

import jsonschema
import openai
import pytest
import tokenizers
import torch
from pydantic import BaseModel, Field
from tokenizers import decoders, models, normalizers, trainers

import unfreeze
from tests.serve import small
from unfreeze.data.tokens.tokenizer import load_tokenizer
from unfreeze.generate.sampling import Sampling
from unfreeze.serve.request import Refused
from unfreeze.serve.speaker import Speaker, Work
from unfreeze.serve.structured import Grammars, json_grammar

ASKED = [{"role": "user", "content": "What is two and two?"}]
SCHEMAS = 40


@pytest.fixture(scope="module")
def model():
    return unfreeze.load(unfreeze.TINY_K2, dtype="float32")


@pytest.fixture(scope="module")
def client(model):
    running = small.serve(model, "tiny")
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="-", max_retries=0) as client:
        yield client
    running.close()


def ask(client, **fields):
    return client.chat.completions.create(**{"model": "tiny", "messages": ASKED, "max_tokens": 300, **fields})


def schema_of(rng, depth=0):
    """A random schema whose values are bounded: an answer of random tokens comes to its end."""
    kinds = ["integer", "boolean", "null", "enum", "text", "const"] + ["object", "array", "any"] * (depth < 2)
    kind = rng.choice(kinds) if depth else "object"
    if kind == "integer":
        low = rng.randrange(-50, 50)
        return {"type": "integer", "minimum": low, "maximum": low + rng.randrange(200)}
    if kind == "enum":
        return {"enum": rng.sample(["red", "Grün", "四", 3, None, True, "a b"], 3)}
    if kind == "const":
        return {"const": rng.choice(["x", 7, [1, "y"]])}
    if kind == "text":
        return rng.choice(
            [
                {"type": "string", "maxLength": rng.randrange(1, 6)},
                {"type": "string", "pattern": "^[a-c]{2,4}$"},
            ]
        )
    if kind == "array":
        least = rng.randrange(2)
        return {
            "type": "array", "items": schema_of(rng, depth + 1), "minItems": least,
            "maxItems": least + rng.randrange(3),
        }  # fmt: skip
    if kind == "any":
        return {"anyOf": [schema_of(rng, depth + 1) for _ in range(2)]}
    if kind == "object":
        names = rng.sample(["a", "name", "größe", "x y", "id"], rng.randrange(1, 4))
        return {
            "type": "object", "properties": {name: schema_of(rng, depth + 1) for name in names},
            "required": rng.sample(names, rng.randrange(1, len(names) + 1)), "additionalProperties": False,
        }  # fmt: skip
    return {"type": kind}


def fits(text, schema):
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def test_answers_of_random_schemas_are_valid(model):
    """At temperature 1, all of them in one engine; the arm without masks is the same requests."""
    rng = random.Random(0)
    schemas = [schema_of(rng) for _ in range(SCHEMAS)]
    grammars, speaker = Grammars(model.tokenizer, model.engine.num_ids), Speaker(model.engine)
    prompt = model.encode_chat(ASKED)

    def answers(masked):
        works = []
        for i, schema in enumerate(schemas):
            work = Work(prompt, Sampling(400, temperature=1.0, seeds=(i,)), 400 if masked else 30)
            if masked:
                work.allow = grammars.compiled("start: x\nx: " + json_grammar(schema, "x"), "x")
            works.append(work)
        waiting = [speaker.submit(work) for work in works]
        return [each.result(120)[0][0] for each in waiting]

    done = answers(True)
    wrong = [(s, each.text) for s, each in zip(schemas, done, strict=True) if not fits(each.text, s)]
    assert not wrong, wrong[0]
    assert {each.stop_reason for each in done} == {"end"}
    assert not any(fits(each.text, s) for s, each in zip(schemas, answers(False), strict=True))
    speaker.close()


def test_two_answers_to_a_prompt_have_a_state_each(client):
    schema = {"type": "array", "items": {"enum": [1, 2, 33]}, "minItems": 2, "maxItems": 5}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    done = ask(client, n=8, seed=1, response_format=form)
    texts = [choice.message.content for choice in done.choices]
    assert all(fits(text, schema) for text in texts) and len(set(texts)) > 4
    chunks = list(ask(client, n=8, seed=1, response_format=form, stream=True))
    streamed = [""] * 8
    for chunk in chunks:
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


class Step(BaseModel):
    of: int = Field(ge=0, le=9)
    words: list[str] = Field(max_length=2)


class Plan(BaseModel):
    name: str = Field(pattern=r"^[A-Z][a-z]{0,5}$")
    step: Step | None


def test_a_pydantic_model_is_parsed(client):
    fields = {"model": "tiny", "messages": ASKED, "max_tokens": 900}
    for seed in range(20):  # text of a weak model has no end, sometimes
        try:
            done = client.chat.completions.parse(**fields, response_format=Plan, seed=seed)
        except openai.LengthFinishReasonError:
            continue
        assert isinstance(done.choices[0].message.parsed, Plan)
        return
    raise AssertionError("no answer came to its end")


def test_json_object(client):
    for seed in range(3):
        done = ask(client, response_format={"type": "json_object"}, seed=seed).choices[0]
        assert done.finish_reason == "length" or isinstance(json.loads(done.message.content), dict)
    with pytest.raises(ValueError):
        json.loads(ask(client, seed=0).choices[0].message.content)


def test_a_penalty_does_not_lift_the_mask(client):
    schema = {"enum": ["red", "blue"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    bias = {str(i): 100 for i in range(256)}
    done = ask(client, response_format=form, logit_bias=bias, extra_body={"min_tokens": 2})
    assert fits(done.choices[0].message.content, schema)


def test_what_has_no_answer_is_refused_and_not_cut_short(client):
    """A state that the library gives up lets the answer end, as if it were whole."""
    large = {f"p{i}": {"type": "string", "pattern": "^([a-z]{1,50}[0-9]?){1,60}$"} for i in range(800)}
    for schema in ({"$ref": "#"}, {"type": "object", "properties": large, "additionalProperties": False}):
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
        with pytest.raises(openai.BadRequestError, match="no answer can follow this form"):
            ask(client, response_format=form)


def test_a_form_that_ends_before_min_tokens_is_refused(client):
    with pytest.raises(openai.BadRequestError, match="min_tokens, ignore_eos"):
        form = {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {"enum": ["red"]}, "strict": True},
        }
        ask(client, response_format=form, extra_body={"ignore_eos": True})


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"not": {"type": "string"}}, 'it has ["not"], which is not built; leave it out'),
        ({"type": "foo"}, "there is no type foo"),
        ({"type": "string", "pattern": "(?=x)"}, "its pattern: look-around, including look-ahead"),
        ({"$ref": "http://localhost/x"}, "$ref to 'http://localhost/x' is not fetched; put it in $defs"),
        ({"$ref": "#/$defs/a"}, "$ref: there is no '/$defs/a' in it"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf is not built; anyOf is"),
        ({"type": "string", "format": "foo"}, "format foo is not known"),
        ({"type": "integer", "minimum": 5, "maximum": 1}, "nothing can fit it: minimum (5) is greater than"),
        ({"type": "array", "prefixItems": 5}, "prefixItems must be an array"),
        ({"x-guidance": {}}, "x-guidance"),
        ({"enum": ["x" * 300_000]}, "at most 200,000"),
    ],
)
def test_a_schema_that_is_not_built_is_400(client, schema, words):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with pytest.raises(openai.BadRequestError) as raised:
        ask(client, response_format=form)
    assert raised.value.param == "response_format" and words in raised.value.message
    told = raised.value.body["message"]
    assert len(told) <= 140 and not re.search(r"x-guidance\": \{|%json|start:|at \d+\(\d", told)


@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_schema"},
        {"type": "json_object", "json_schema": {"name": "x", "schema": {}}},
        {"type": "json_schema", "json_schema": {"schema": {}}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "strictly": True}},
        {"type": "grammar"},
    ],
)
def test_a_wrong_response_format_is_400(client, form):
    with pytest.raises(openai.BadRequestError, match="response_format"):
        ask(client, response_format=form)


def test_without_the_library_the_answer_names_it(client, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(openai.BadRequestError, match="pip install llguidance"):
        ask(client, response_format={"type": "json_object"})
    assert ask(client, max_tokens=2).choices


def test_a_vocabulary_that_is_not_of_bytes(tmp_path):
    """SentencePiece's form: pieces with ▁, and bytes as <0x…>."""
    backend = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokens = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=tokens, show_progress=False)
    backend.train_from_iterator(["the sun is a star", '{"a": [1, 2]}'] * 4, trainer)
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    tokenizer = load_tokenizer(tmp_path)
    schema = {"type": "object", "properties": {"a": {"enum": ["四 x", "the sun"]}}, "required": ["a"]}
    allowed = Grammars(tokenizer, tokenizer.named_size).compiled("start: %json " + json.dumps(schema), "x")
    rng, ids = torch.Generator().manual_seed(0), []
    while not ids or ids[-1] != tokenizer.eos_id:
        mask = allowed(ids)
        assert mask.any() and len(mask) == tokenizer.named_size and len(ids) < 400
        ids.append(int(torch.multinomial(mask.float(), 1, generator=rng)))
    assert fits(tokenizer.decode(ids), schema)


def test_an_unknown_grammar_is_refused(model):
    with pytest.raises(Refused, match="unknown name"):
        Grammars(model.tokenizer, model.engine.num_ids).compiled("start: nothing", "x")
