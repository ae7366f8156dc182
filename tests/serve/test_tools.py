"""Tool calls and reasoning: what is demanded is called, and a stream's deltas sum to the whole message."""

import json
import random

import jsonschema
import openai
import pytest
from openai.lib._tools import pydantic_function_tool
from pydantic import BaseModel, Field

import unfreeze
from tests.serve import small
from unfreeze.generate.answer import Completion, Piece
from unfreeze.generate.sampling import Sampling
from unfreeze.serve.deltas import Deltas
from unfreeze.serve.request import read_chat
from unfreeze.serve.session import Speech, Turn
from unfreeze.serve.structured import Grammars, chat_grammar

ASKED = [{"role": "user", "content": "two and two"}]
KIMI = [{"role": "user", "content": "What is two and two?"}]


def tool(name, **fields):
    digit = {"type": "integer", "minimum": 0, "maximum": 99}
    parameters = {"type": "object", "properties": {name[0]: digit}, "required": [name[0]]}
    parameters["additionalProperties"] = False
    return {"type": "function", "function": {"name": name, "parameters": parameters, **fields}}


TOOLS = [tool("add"), tool("sub")]
SCHEMAS = {each["function"]["name"]: each["function"]["parameters"] for each in TOOLS}


@pytest.fixture(scope="module")
def hermes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    small.write(folder)
    return unfreeze.load(folder, dtype="float32")


@pytest.fixture(scope="module")
def kimi():
    return unfreeze.load(unfreeze.TINY_K2, dtype="float32")


@pytest.fixture(scope="module", params=["hermes", "kimi"])
def client(request):
    running = small.serve(request.getfixturevalue(request.param), "m")
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="-", max_retries=0) as client:
        yield client
    running.close()


def ask(client, **fields):
    fields = {"model": "m", "messages": ASKED, "max_tokens": 900, "tools": TOOLS, "seed": 1, **fields}
    return client.chat.completions.create(**fields)


def summed(chunks, index=0):
    """-> the message that OpenAI's clients make of deltas, and its finish reason."""
    message, why = {"content": "", "reasoning_content": "", "tool_calls": []}, None
    for chunk in chunks:
        for choice in chunk.choices:
            if choice.index != index:
                continue
            delta, why = choice.delta.model_dump(), choice.finish_reason or why
            for name in ("content", "reasoning_content"):
                message[name] += delta.get(name) or ""
            for call in delta.get("tool_calls") or ():
                if call["index"] == len(message["tool_calls"]):
                    message["tool_calls"].append({"id": call["id"], **call["function"]})
                else:
                    message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
    return message, why


def plain(message):
    """A whole message in the form of `summed`."""
    fields = message if isinstance(message, dict) else message.model_dump()
    calls = [{"id": each["id"], **each["function"]} for each in fields.get("tool_calls") or ()]
    calls = [{name: each[name] for name in ("id", "name", "arguments")} for each in calls]
    texts = {name: fields.get(name) or "" for name in ("content", "reasoning_content")}
    return {**texts, "tool_calls": calls}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "sub"}}])
def test_a_call_that_is_demanded_is_made_and_fits(client, choice):
    for seed in range(2):
        done = ask(client, tool_choice=choice, seed=seed).choices[0]
        assert done.finish_reason == "tool_calls" and not done.message.content
        calls = done.message.tool_calls
        assert len({call.id for call in calls}) == len(calls) >= 1
        for call in calls:
            jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
            assert choice == "required" or call.function.name == "sub"
        if seed == 0:
            chunks = list(ask(client, tool_choice=choice, seed=seed, stream=True))
            assert summed(chunks) == (plain(done.message), "tool_calls")


def test_one_call_at_most(client):
    done = [
        ask(client, tool_choice="required", parallel_tool_calls=False, seed=i).choices[0] for i in range(4)
    ]
    assert [len(each.message.tool_calls) for each in done] == [1] * 4


def test_the_next_turn_takes_calls_and_results(client):
    message = ask(client, tool_choice="required", parallel_tool_calls=False).choices[0].message
    (call,) = message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "4"}
    again = ask(client, messages=[*ASKED, message, result], tool_choice="required").choices[0].message
    assert call.id not in [each.id for each in again.tool_calls]


class Add(BaseModel):
    """Add a number."""

    a: int = Field(ge=0, le=9)


def test_a_strict_tool_of_pydantic_is_parsed(client):
    done = client.chat.completions.parse(
        model="m", messages=ASKED, max_tokens=900, seed=1, tools=[pydantic_function_tool(Add, name="add")],
        tool_choice="required", parallel_tool_calls=False,
    )  # fmt: skip
    assert isinstance(done.choices[0].message.tool_calls[0].function.parsed_arguments, Add)


def test_a_tool_that_may_be_called_need_not_be(client):
    """`auto`: the words of the model; with a strict tool its text is free, too."""
    free = ask(client, max_tokens=40).choices[0]
    strict = ask(client, max_tokens=40, tools=[tool("add", strict=True)]).choices[0]
    assert free.message.content and not free.message.tool_calls
    assert strict.finish_reason in ("stop", "length") and not strict.message.tool_calls
    assert ask(client, tool_choice="none", max_tokens=9).choices[0].message.content


def call(family, value, name="add", number=0):
    if family == "hermes":
        return f'<tool_call>\n{{"name": "{name}", "arguments": {{"{name[0]}": {value}}}}}\n</tool_call>'
    head = f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>"
    return f'{head}{{"{name[0]}": {value}}}<|tool_call_end|>'


def section(family, *calls):
    if family == "hermes":
        return "\n".join(calls)
    return f"<|tool_calls_section_begin|>{''.join(calls)}<|tool_calls_section_end|>"


FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [7, 8]}}}


@pytest.mark.parametrize("family", ["hermes", "kimi"])
def test_what_was_asked_for_decides_which_answers_there_can_be(family, request):
    """By the mask of each of their tokens, the end's too."""
    model = request.getfixturevalue(family)
    tokenizer, grammars = model.tokenizer, Grammars(model.tokenizer, model.engine.num_ids)
    shape, end = Speech(tokenizer, 999).shape, min(tokenizer.eos_ids & tokenizer.special_ids)

    def possible(thought="", **fields):
        body = {"messages": ASKED, "tools": TOOLS, **fields}
        grammar = chat_grammar(read_chat(json.dumps(body).encode()), shape, thought, grammars)
        allowed = grammar and grammars.compiled(*grammar)
        fits = []
        for name, text in answers.items():
            ids = [*tokenizer.encode(text, specials=True), end]
            if allowed is None or all(allowed(ids[:i])[id] for i, id in enumerate(ids)):
                fits.append(name)
        return " ".join(fits)

    one, two = call(family, 1), call(family, 2, "sub", 1)
    answers = {
        "text": "Four.",
        "call": section(family, one),
        "wrong": section(family, call(family, '"1"')),
        "both": section(family, one, two),
        "said": "Look." + section(family, one),
        "json": "7",
        "thought": f"so {shape.calls[-1]} no</think>" + section(family, one),
        "whole": f"<think>so {shape.calls[-1]} no</think>Four.",
    }
    # a <think> that is spelled is text like any other
    thinks = " whole" if shape.thinks and tokenizer.token_id(shape.opening) is not None else ""
    strict = [tool("add", strict=True), tool("sub")]
    assert possible(tool_choice="none") == possible() == " ".join(answers)
    assert possible(tools=strict) == "text call both said json" + thinks
    assert possible(parallel_tool_calls=False) == "text call said json" + thinks
    assert possible(tool_choice="required") == "call both"
    assert possible("open", tool_choice="required") == "thought"
    assert possible(response_format=FORM) == "call both json"
    assert possible(response_format=FORM, tool_choice="required") == "call both"
    assert possible(response_format=FORM, tool_choice="none") == "json"
    only = {"type": "function", "function": {"name": "sub"}}
    answers["call"] = section(family, call(family, 2, "sub"))
    assert possible(tool_choice=only) == "call"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "ad"}}}, "no tool 'ad'; nearest: 'add'"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "there is 'function' only"),
        ({"tools": [{"type": "function", "function": {"parameters": {}}}]}, "no name"),
        ({"tools": [tool("add", parameters=[])]}, "not an object"),
        (
            {"tools": [tool("add", parameters={"not": {}})], "tool_choice": "required"},
            '["not"], which is not built',
        ),
        ({"functions": [{"name": "x"}]}, "functions: this field is not known"),
    ],
)
def test_a_wrong_tool_is_400(client, fields, words):
    with pytest.raises(openai.BadRequestError) as raised:
        ask(client, **fields)
    assert words in raised.value.message and raised.value.param in ("tools", "tool_choice", "functions")


ANSWERS = {
    "hermes": [
        "Four.", "  Four. ", "<think>\nIt is 4.\n</think>\n\nFour.", "<think>\ncut", "< think", "a <thin",
        "<think></think>Four.", "Look.\n<tool_call>\n" + json.dumps({"name": "add", "arguments": {"a": 1}})
        + "\n</tool_call>", "<think>\nHm.\n</think>\n\n<tool_call>" + json.dumps({"name": "add"}) + "</tool_call>"
        + "\n<tool_call>" + json.dumps({"name": "sub", "arguments": {"s": list(range(60))}}) + "</tool_call>",
        " Look. <tool_call>{broken</tool_call>", "<tool_call>{}", "四是二加二。 <tool", "a<tool_call>b", "",
    ],
    "kimi": [
        "Four.", " Four. ", "<think>Hm.</think>Four.", "<think>cut", "I <|im_middle|>add", "x<|tool_call",
        "Adding.<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
        '{"a":  1}<|tool_call_end|><|tool_calls_section_end|>',
        " Adding. <|tool_calls_section_begin|><|tool_call_begin|>functions.add:0", "<think> a </think> b ",
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "text"), [(name, text) for name, texts in ANSWERS.items() for text in texts]
)
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("live", [True, False])
def test_the_deltas_of_any_answer_sum_to_its_message(family, text, tools, live, request):
    """Cut into tokens in several ways. live: as without a session."""
    model = request.getfixturevalue(family)
    speech = Speech(model.tokenizer, 999)
    ends = sorted(model.tokenizer.eos_ids & model.tokenizer.special_ids)
    rng = random.Random(text)
    for cut in range(4):
        parts = [text] if cut == 0 else _cut(text, rng, model.tokenizer)
        tokens = [id for part in parts for id in model.tokenizer.encode(part, specials=True)]
        tokens += [ends[0]] * (cut % 2)
        done = Completion(tokens, "", "end" if cut % 2 else "length", [0.0] * len(tokens))
        turn = Turn(ASKED, tools, None, Sampling(9), 9)
        message = speech.heard(turn, [done])[0] if live else speech.message(turn, done)
        deltas = Deltas(model.tokenizer, speech.shape, "", (), tools=bool(tools), live=live)
        sums = {"content": "", "reasoning_content": ""}
        for i, token in enumerate(tokens):
            reason = done.stop_reason if i + 1 == len(tokens) else None
            for name, new in deltas.push(Piece(0, token, "", reason)).items():
                sums[name] += new
        calls: dict[int, str] = {}  # arguments as text
        for delta in deltas.rest(message):
            for name in sums:
                sums[name] += delta.get(name, "")
            for each in delta.get("tool_calls", []):
                calls[each["index"]] = calls.get(each["index"], "") + each["function"]["arguments"]
        expected = {name: message.get(name) or "" for name in sums}
        if (
            expected["content"].lstrip() == sums["content"].lstrip()
        ):  # white space before a call that is broken
            expected["content"] = sums["content"]
        assert sums == expected
        whole = [each["function"]["arguments"] for each in message.get("tool_calls") or ()]
        assert [json.loads(calls[i]) for i in sorted(calls)] == whole


def summed_of(speech, ids, message, *, tools, stop=()):
    """-> the texts that the deltas of these ids sum to."""
    deltas = Deltas(speech.tokenizer, speech.shape, "", stop, tools=tools, live=True)
    sums = {"content": "", "reasoning_content": ""}
    parts = [deltas.push(Piece(0, id, "", None)) for id in ids]
    for delta in [*parts, *deltas.rest(message)]:
        for name in sums:
            sums[name] += delta.get(name, "")
    return sums


def _cut(text, rng, tokenizer):
    """Cut a text at random, but not inside a special token."""
    pieces, at = [], 0
    spans = [match.span() for match in tokenizer.special_pattern.finditer(text)]
    while at < len(text):
        end = min(len(text), at + rng.randrange(1, 6))
        end = max([end, *(b for a, b in spans if a < end < b)])
        pieces.append(text[at:end])
        at = end
    return pieces


def test_text_is_streamed_before_the_answer_ends(hermes):
    """Control: nothing is held back but what may still become a mark."""
    speech = Speech(hermes.tokenizer, 999)
    deltas = Deltas(hermes.tokenizer, speech.shape, "", (), tools=True, live=True)
    texts = []
    for token in hermes.tokenizer.encode("the sun is a star <tool", specials=True):
        texts.append(deltas.push(Piece(0, token, "", None)).get("content", ""))
    assert "".join(texts) == "the sun is a star" and sum(bool(text) for text in texts) > 3


def test_reasoning_of_a_prompt_that_opens_it(hermes):
    speech = Speech(hermes.tokenizer, 999)
    deltas = Deltas(hermes.tokenizer, speech.shape, "open", (), tools=False, live=True)
    text = "two is\n</think>\n\nfour"
    parts = [deltas.push(Piece(0, token, "", None)) for token in hermes.tokenizer.encode(text, specials=True)]
    assert "".join(part.get("reasoning_content", "") for part in parts) == "two is"
    assert "".join(part.get("content", "") for part in parts) == "four"
    assert speech.shape.unclosed("two is", "open") == "two is" and speech.shape.unclosed("two", "") is None


def test_an_answer_and_its_stream_with_log_probabilities(client):
    fields = {"logprobs": True, "top_logprobs": 2, "n": 3, "max_tokens": 30, "stop": ["e", "zz"]}
    done = ask(client, **fields)
    chunks = list(ask(client, **fields, stream=True))
    for choice in done.choices:
        assert summed(chunks, choice.index) == (plain(choice.message), choice.finish_reason)
        listed = [
            token
            for chunk in chunks
            for each in chunk.choices
            if each.index == choice.index and each.logprobs
            for token in each.logprobs.content
        ]
        assert listed == choice.logprobs.content and all(len(each.top_logprobs) == 2 for each in listed)
