"""What a server says of a document is what its model says (tiny-k2's own logits in float64), however the server
spells it; and everything it can get wrong is one line."""

from __future__ import annotations

import copy
import math
import random

import pytest
import torch
from servers import Completions

from unfreeze.teach.address import EndpointError
from unfreeze.teach.client import Client
from unfreeze.teach.endpoint import TOGETHER, Endpoint

TEXTS = ["What is the capital of France?", "A tadpole, the young of a frog is. Hmm.", "Naïve café: 10 %."]


@pytest.fixture
def documents(tiny):
    return [tiny.tokenizer.encode(text, specials=True) for text in TEXTS]


def endpoint(server, tiny, top=5, **options):
    client = Client(server.url, timeout=20.0, tries=2)
    return Endpoint(client, "tiny-k2", tiny.tokenizer, top=top, **options)


@pytest.mark.parametrize("kind", ["vllm", "sglang", "strict"])
def test_it_is_what_the_model_says(completions, tiny, documents, oracle, kind):
    server = completions(kind)
    found = list(endpoint(server, tiny).scored(documents))
    parts = {id for id in range(tiny.tokenizer.named_size) if "\ufffd" in tiny.tokenizer.decode([id])}
    listed = 0
    for scored, tokens in zip(found, documents, strict=True):
        said_TV = oracle(tokens)
        assert len(scored.top) == len(scored.own) == len(tokens) - 1
        for place, (top, own) in enumerate(zip(scored.top, scored.own, strict=True)):
            assert own == pytest.approx(float(said_TV[place, tokens[place + 1]]), abs=1e-5)
            values = [value for _, value in top]
            assert values == sorted(values, reverse=True) and len(top) <= 5
            for id, value in top:
                assert value == pytest.approx(float(said_TV[place, id]), abs=1e-5)
            wanted = set(said_TV[place].topk(5).indices.tolist()) - (parts if kind != "vllm" else set())
            assert wanted <= {id for id, _ in top} | {tokens[place + 1]}
            listed += len(top)
    assert listed > 4.5 * sum(len(tokens) - 1 for tokens in documents)
    # a strict server is asked twice for the first documents, and once for all others
    assert len(server.asked) == (2 if kind == "strict" else 1)
    assert server.asked[-1][2]["model"] == "tiny-k2" and server.asked[-1][2]["temperature"] == 1.0


def test_all_words_sum_to_one(completions, tiny, documents):
    server = completions()
    (scored,) = endpoint(server, tiny, top=tiny.tokenizer.named_size).scored(documents[:1])
    for top in scored.top:
        assert sum(math.exp(value) for _, value in top) == pytest.approx(1, abs=1e-5)
        assert len(top) == tiny.tokenizer.named_size


def test_documents_go_together_and_come_in_order(serving, tiny, documents, oracle):
    many = [documents[i % 3][: 3 + i % 4] for i in range(TOGETHER + 3)]

    def backwards(server, connection, body):
        answer = vllm(server, connection, body)
        answer["choices"].reverse()
        return answer

    vllm, server, reserved = Completions(tiny), serving(backwards), []
    asked = endpoint(server, tiny, reserve=lambda read, written: reserved.append((read, written)))
    found = list(asked.scored(many))
    assert [len(body["prompt"]) for _, _, body in server.asked] == [TOGETHER, 3]
    assert reserved == [(sum(map(len, many[:TOGETHER])), TOGETHER), (sum(map(len, many[TOGETHER:])), 3)]
    for scored, tokens in zip(found, many, strict=True):
        own = oracle(tokens)[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:])]
        assert scored.own == pytest.approx(own.tolist(), abs=1e-5)


def entries(choice):
    return choice["prompt_logprobs"][3]


def first(choice):
    return next(iter(entries(choice).values()))


def other_words(choice):
    for entry in entries(choice).values():
        entry["decoded_token"] = "zebra"


def no_own(choice):
    for place, position in enumerate(choice["prompt_logprobs"][1:], 1):
        position.pop(str(choice["prompt_token_ids"][place]))
        position["7"] = {"logprob": -9.0, "decoded_token": None}


def all_zero(choice):
    for position in choice["prompt_logprobs"][1:]:
        for entry in position.values():
            entry["logprob"] = 0.0


def shifted(choice, change):
    for position in choice["prompt_logprobs"][1:]:
        for entry in position.values():
            entry["logprob"] = change(entry["logprob"])


LIES = {
    "sums beyond 1": (lambda c: [e.update(logprob=-0.1) for e in entries(c).values()], "words sum to"),
    "NaN": (lambda c: first(c).update(logprob=math.nan), "a log-probability is nan"),
    "infinite": (lambda c: first(c).update(logprob=math.inf), "a log-probability is inf"),
    "above 0": (lambda c: first(c).update(logprob=0.5), "a log-probability is 0.5"),
    "a text": (lambda c: first(c).update(logprob="-1"), "a log-probability is '-1'"),
    "true": (lambda c: first(c).update(logprob=True), "a log-probability is True"),
    "other words": (other_words, "is 'zebra' there and"),
    "an id we have not": (
        lambda c: entries(c).update({"99999": {"logprob": -9.0, "decoded_token": "zebra"}}),
        "id 99999 is 'zebra' there, and we have 1,536 ids",
    ),
    "no id": (lambda c: entries(c).update({"word": {"logprob": -9.0}}), "'word' is not a token id"),
    "not the prompt's own": (
        lambda c: c.update(prompt_logprobs=[None] + c["prompt_logprobs"][2:] * 2),
        "own",
    ),
    "fewer words": (
        lambda c: c.update(prompt_logprobs=[p and dict(list(p.items())[-2:]) for p in c["prompt_logprobs"]]),
        "5 were requested",
    ),
    "fewer tokens": (lambda c: c.update(prompt_logprobs=c["prompt_logprobs"][:-1]), "log-probabilities for"),
    "other tokens": (lambda c: c.update(prompt_token_ids=[1, 2]), "came back as 2 other tokens"),
    "none": (lambda c: c.update(prompt_logprobs=None), "no log-probabilities of the prompt"),
    "nulls": (lambda c: c.update(prompt_logprobs=[None] * 50), "its log-probabilities are None"),
    "all zero": (all_zero, "sum to"),
    "all the same": (lambda c: shifted(c, lambda said: -7.5), "every log-probability is -7.5"),
    "logits": (lambda c: shifted(c, lambda said: said - 20), "likeliest of 1,536 words have .* together"),
    "another index": (lambda c: c.update(index=7), "choices came back"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_one_line(completions, tiny, documents, lie):
    change, says = LIES[lie]
    with pytest.raises(EndpointError, match=says) as caught:
        list(endpoint(completions("vllm", change), tiny).scored(documents))
    assert "\n" not in caught.value.message and caught.value.next and "127.0.0.1" in caught.value.message


def test_nothing_but_certainty_at_top_1_is_a_lie_too(completions, tiny, documents):
    def certain(choice):
        choice["prompt_logprobs"] = [p and dict(list(p.items())[-1:]) for p in choice["prompt_logprobs"]]
        all_zero(choice)

    with pytest.raises(EndpointError, match="every log-probability is 0"):
        list(endpoint(completions("vllm", certain), tiny, top=1).scored(documents[1:2]))


TOLD_TWICE = {
    "two accounts": (lambda c: c["logprobs"].update(token_logprobs=[-0.5] * 50), "in another list"),
    "other words": (lambda c: c["logprobs"]["tokens"].__setitem__(2, "zebra"), "is 'zebra' there and"),
    "a word we have not": (
        lambda c: c["logprobs"]["top_logprobs"][2].update(zebra=-9.0),
        "not in our vocabulary",
    ),
    "no list": (lambda c: c["logprobs"].update(top_logprobs=None), "have 12, 12, 0"),
}


@pytest.mark.parametrize("lie", TOLD_TWICE)
def test_a_lie_in_texts_is_one_line(completions, tiny, lie):
    change, says = TOLD_TWICE[lie]
    tokens = tiny.tokenizer.encode("Paris, the capital of France is.", specials=True)
    says = says.replace("12, 12", f"{len(tokens) + 1}, {len(tokens) + 1}")
    assert list(endpoint(completions("sglang"), tiny).scored([tokens]))  # control: the same without the lie
    with pytest.raises(EndpointError, match=says):
        list(endpoint(completions("sglang", change), tiny).scored([tokens]))


@pytest.mark.parametrize(
    "kind, says",
    [("no echo", "Only no echo is supported"), ("new only", "the prompt's own are not among them")],
)
def test_servers_that_cannot_are_told_apart_and_the_way_out_is_named(
    completions, tiny, documents, kind, says
):
    """llama.cpp: refused echo until a release, ignored it silently in another."""
    with pytest.raises(EndpointError, match=says) as caught:
        list(endpoint(completions(kind), tiny).scored(documents))
    assert "unfreeze generate URL" in caught.value.next


JUNK = [
    None,
    True,
    -1,
    2.5,
    10**400,
    -(10**400),
    "",
    "²",
    "9" * 5000,
    [],
    [[]],
    {},
    {"a": 1},
    "\ud800",
    math.nan,
]


def places(value, path=()):
    """Every place in a JSON value."""
    yield path
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, part in inside:
        yield from places(part, (*path, name))


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_whatever_an_answer_holds_it_is_one_line(tiny, kind):
    """Junk at each of 300 places of an answer: it is read as it stands, or refused as a server's fault."""
    tokens = tiny.tokenizer.encode("Paris, the capital.", specials=True)
    asked = Endpoint(Client("http://127.0.0.1:1"), "", tiny.tokenizer, top=3)
    body = {
        "prompt": [tokens],
        "logprobs": 3,
        "echo": True,
        **({"prompt_logprobs": 3} if kind == "vllm" else {}),
    }
    answer, draw, refused = Completions(tiny, kind)(None, None, body), random.Random(0), 0
    assert len(list(asked._read(answer, [tokens]))) == 1
    for _ in range(300):
        spoilt = copy.deepcopy(answer)
        *way, last = draw.choice([path for path in places(spoilt) if path])
        inside = spoilt
        for name in way:
            inside = inside[name]
        if isinstance(inside, dict) and draw.random() < 0.2:
            inside[draw.choice(["²", "9" * 5000, "-1", ""])] = inside.pop(last)
        else:
            inside[last] = draw.choice(JUNK)
        try:
            list(asked._read(spoilt, [tokens]))
        except EndpointError as error:
            refused += 1
            assert "\n" not in error.message
    assert refused > 150


def test_padding_of_the_servers_head_is_left_out(completions, tiny, documents):
    def padded(choice):
        for position in choice["prompt_logprobs"][1:]:
            position["1540"] = {"logprob": -20.0, "decoded_token": ""}

    (scored,) = endpoint(completions("vllm", padded), tiny, top=9).scored(documents[:1])
    assert scored.top and all(id < 1536 for top in scored.top for id, _ in top)
