"""The endpoint under OpenAI's own client, unmodified: its answers are the engine's, its errors are OpenAI's."""

import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

import unfreeze
from unfreeze.core.draws import number
from unfreeze.core.errors import ConfigError
from unfreeze.generate.sampling import NotFinite, Sampling
from unfreeze.serve import written
from unfreeze.serve.request import MAX_BODY
from unfreeze.serve.router import Router
from unfreeze.serve.running import Endpoint
from unfreeze.serve.session import Speech
from unfreeze.serve.speaker import Speaker, Work

ASKED = [{"role": "user", "content": "What is two and two?"}]


@pytest.fixture(scope="module")
def model():
    return unfreeze.load(unfreeze.TINY_K2, dtype="float32")


@pytest.fixture(scope="module")
def running(model):
    speech = Speech(model.tokenizer, model.decoder.shape.max_positions)
    running = Endpoint().serve(Router(Speaker(model.engine), model.tokenizer, "tiny", speech))
    yield running
    running.close()


@pytest.fixture(scope="module")
def client(running):
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="-", max_retries=0) as client:
        yield client


def ask(client, **fields):
    return client.chat.completions.create(**{"model": "tiny", "messages": ASKED, "max_tokens": 12, **fields})


def test_an_answer_is_the_engines(client, model):
    done = ask(client, seed=5)
    assert done.choices[0].message.content == model.chat(ASKED, seed=5, temperature=1.0, max_new_tokens=12)
    prompt = model.encode_chat(ASKED)
    (own,) = model.engine.generate([prompt], Sampling(12, temperature=1.0, seeds=(5,)))
    assert done.usage.prompt_tokens == len(prompt) and done.usage.completion_tokens == len(own.tokens)
    assert done.choices[0].finish_reason == own.finish_reason == "stop"
    greedy = ask(client, temperature=0)
    assert greedy.choices[0].message.content == model.chat(ASKED, max_new_tokens=12)
    cut = ask(client, temperature=0, max_completion_tokens=2, max_tokens=openai.omit)
    assert cut.choices[0].finish_reason == "length" and cut.usage.completion_tokens == 2


def test_n_answers_have_n_seeds(client, model):
    prompt = model.encode_chat(ASKED)
    seeds = (5, *(number(5, i) for i in range(1, 6)))
    own = model.engine.generate([prompt] * 6, Sampling(12, temperature=1.0, seeds=seeds))
    done = ask(client, n=6, seed=5)
    assert [choice.message.content for choice in done.choices] == [each.text for each in own]
    assert [choice.index for choice in done.choices] == list(range(6))
    assert len({choice.message.content for choice in done.choices}) > 1
    assert done.usage.completion_tokens == sum(len(each.tokens) for each in own)


def test_log_probabilities_are_the_models(client, model):
    """Oracle: log softmax of the logits of the whole text, in one pass."""
    done = ask(client, seed=5, temperature=1.7, logprobs=True, top_logprobs=3)
    prompt = model.encode_chat(ASKED)
    (own,) = model.engine.generate([prompt], Sampling(12, temperature=1.7, seeds=(5,)))
    (logits,) = model.logits([[*prompt, *own.tokens]])
    log_p = logits[len(prompt) - 1 : -1, : model.engine.num_ids].double().log_softmax(-1)
    content = done.choices[0].logprobs.content
    assert len(content) == len(own.tokens)
    for place, (each, token) in enumerate(zip(content, own.tokens, strict=True)):
        assert each.logprob == pytest.approx(float(log_p[place, token]), abs=1e-5)
        assert each.token == model.tokenizer.decode([token], skip_specials=False)
        values, ids = log_p[place].topk(3)
        assert [top.logprob for top in each.top_logprobs] == pytest.approx(values.tolist(), abs=1e-5)
        assert each.top_logprobs[0].token == model.tokenizer.decode([int(ids[0])], skip_specials=False)
    assert ask(client).choices[0].logprobs is None
    assert ask(client, logprobs=True).choices[0].logprobs.content[0].top_logprobs == []


def test_a_token_has_the_number_that_the_likeliest_have(client, monkeypatch):
    """One is made of one row, the other of all rows of a step: they may differ in the last digits."""

    def pairs():
        fields = {"seed": 1, "n": 4, "logprobs": True, "top_logprobs": 5}
        lists = [choice.logprobs.content for choice in ask(client, **fields).choices]
        for chunk in ask(client, **fields, stream=True):
            lists += [each.logprobs.content for each in chunk.choices if each.logprobs]
        places = [place for each in lists for place in each]
        return [(a.logprob, b.logprob) for a in places for b in a.top_logprobs if b.token == a.token]

    same = pairs()
    assert len(same) > 20 and all(a == b for a, b in same)

    def place(self, token, logprob, top):
        return {**self._token(token, logprob + 1e-6), "top_logprobs": [self._token(*each) for each in top]}

    monkeypatch.setattr(written.Spelled, "place", place)  # control arm
    assert any(a != b for a, b in pairs())


def test_a_stop_string_ends_the_text_before_it(client, model):
    whole = model.chat(ASKED, max_new_tokens=32)
    stop = whole[3:6]
    done = ask(client, temperature=0, stop=[stop, "never"], max_tokens=32)
    assert done.choices[0].message.content == whole[: whole.index(stop)]
    assert done.choices[0].finish_reason == "stop"
    assert ask(client, temperature=0, stop=stop, max_tokens=32).choices == done.choices


def test_a_stream_is_the_whole_answer(client):
    whole = ask(client, seed=5, n=2)
    chunks = list(ask(client, seed=5, n=2, stream=True, stream_options={"include_usage": True}))
    texts = ["", ""]
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]
    ends = [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason]
    assert ends == [choice.finish_reason for choice in whole.choices]
    assert chunks[-1].usage == whole.usage


def test_requests_that_come_together_run_together_and_none_changes_another(running, client):
    alone = [ask(client, seed=i).choices[0].message.content for i in range(8)]
    before = running.router.speaker.load()
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda i: ask(client, seed=i).choices[0].message.content, range(8)))
    after = running.router.speaker.load()
    assert together == alone and after.answered - before.answered == 8
    assert after.new_tokens - before.new_tokens > 2 * (after.steps - before.steps)


def test_requests_sampled_otherwise_run_together_too(running, client):
    def text(fields):
        return ask(client, seed=2, **fields).choices[0].message.content

    kinds = [{}, {"temperature": 0}, {"temperature": 2.0}, {"stop": "a"}, {"top_p": 0.1}, {"n": 2}] * 2
    alone = [text(fields) for fields in kinds[:6]]
    with ThreadPoolExecutor(10) as pool:
        together = list(pool.map(text, kinds))
    assert together == alone * 2 and len(set(alone)) > 2


def test_models(client):
    assert [each.id for each in client.models.list()] == ["tiny"]


BAD = {
    "messages": ({"messages": []}, "the list is empty; it needs at least 1"),
    "temperature": ({"temperature": 3}, "3 is too large; at most 2 is possible"),
    "n": ({"n": 0}, "0 is too small; at least 1 is possible"),
    "max_tokens": ({"max_tokens": "12"}, 'a whole number is expected, not "12"'),
    "stop": ({"stop": [""]}, "stop[0]: an empty text is not possible"),
    "seed": ({"seed": 2**64}, "it must be below 9,223,372,036,854,775,808"),
    "top_p": ({"top_p": 0}, "0 is too small; it must be above 0"),
    "logit_bias": ({"logit_bias": {"1": 200}}, "logit_bias.1: 200 is too large; at most 100"),
    "stream_options": ({"stream": True, "stream_options": 5}, "an object is expected, not 5"),
    "top_logprobs": ({"top_logprobs": 3}, "top_logprobs needs logprobs = true"),
    "store": ({"store": True}, "true is not possible; possible is false"),
    "metadata": ({"metadata": [1]}, "an object is expected, not a list"),
    "best_of": ({"extra_body": {"best_of": 2}}, "this field is not known here"),
    "presence_penalty": ({"presence_penalty": 3.0}, "3.0 is too large; at most 2 is possible"),
    "min_p": ({"extra_body": {"min_p": 0.1}}, "this field is not known here"),
    "response_format": ({"response_format": {"type": "xml"}}, 'response_format.type: "xml" is not possible'),
    "tool_choice": ({"tool_choice": "required"}, "needs tools"),
}


@pytest.mark.parametrize("field", BAD)
def test_a_bad_field_is_400_and_named(client, field):
    words, message = BAD[field]
    with pytest.raises(openai.BadRequestError) as raised:
        ask(client, **words)
    assert raised.value.param == field and message in raised.value.message
    assert raised.value.body["message"].startswith(field)
    assert not re.search(r"Input should|instance of|\^\[|validation", raised.value.body["message"])


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "the body is empty"),
        (b" \n", "the body is empty"),
        (b"\xff{}", "not UTF-8: byte 0xff at place 0"),
        (b'{"stop": ' + json.dumps(["a"] * 20).encode() + b', "messages": [1]}', "stop: there are 20; at most 16"),
        (b'{"stop": "\\ud800", "messages": [{"role": "user", "content": "x"}]}', "half a surrogate pair"),
        (b'{"messages": "Hello"}', "messages: a list is expected, not a text"),
    ],
)  # fmt: skip
def test_a_body_that_no_client_of_openai_sends(running, body, words):
    answer = httpx.post(f"{running.url}/v1/chat/completions", content=body)
    assert answer.status_code == 400 and words in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([{"role": "narrator", "content": "x"}], "unknown role 'narrator'"),
        (["text"], "messages[0] is not an object"),
        (
            [{**ASKED[0], "contnet": 1}],
            "messages[0].contnet: this field is not known here; nearest: 'content'",
        ),
        ([*ASKED, {**ASKED[0], "cache": True}], "messages[1].cache: this field is not known here"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "x", "txet": "y"}]}],
            "messages[0].content[0].txet: this field is not known here; nearest: 'text'",
        ),
        (
            [{"role": "assistant", "audio": {"id": "a"}}, *ASKED],
            "messages[0].audio: this model reads text alone",
        ),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "image_url"),
    ],
)
def test_a_bad_message_is_400_and_named(client, messages, words):
    with pytest.raises(openai.BadRequestError) as raised:
        ask(client, messages=messages)
    assert words in raised.value.message and raised.value.param == "messages"


def test_openais_own_messages_come_back(client):
    """What its client dumps of an answer is taken again, with fields that only other servers fill."""
    first = ask(client, seed=5).choices[0].message
    dumped = first.model_dump()
    assert {"refusal", "audio", "function_call", "annotations", "tool_calls"} <= set(dumped)
    plain = ask(client, messages=[*ASKED, {"role": "assistant", "content": first.content}, *ASKED], seed=5)
    full = {**dumped, "annotations": [], "refusal": None, "parsed": {"a": 1}, "name": None, "whatever": None}
    for message in (first, dumped, full, {**dumped, "type": "text"}):  # lm-eval sends a type
        done = ask(client, messages=[*ASKED, message, *ASKED], seed=5)
        assert done.usage == plain.usage and done.choices[0].message == plain.choices[0].message
    refused = {"role": "assistant", "content": None, "refusal": first.content}
    assert ask(client, messages=[*ASKED, refused, *ASKED], seed=5).usage == plain.usage
    developer = [
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": "Hi", "name": "me"},
    ]
    assert ask(client, messages=developer).choices


def test_other_faults_have_their_status(client, running):
    with pytest.raises(openai.NotFoundError, match="model 'gpt-9' is not here; there is 'tiny'"):
        ask(client, model="gpt-9")
    with pytest.raises(openai.APIStatusError) as raised:
        ask(client, messages=[{"role": "user", "content": "word " * 5000}])
    assert raised.value.status_code == 413 and raised.value.code == "context_length_exceeded"
    for method, path, content, status in (
        ("GET", "/v1/chat/completions", b"", 405),
        ("GET", "/v2", b"", 404),
        ("POST", "/s/nobody/v1/chat/completions", b"{}", 404),
        ("POST", "/v1/chat/completions", b"{", 400),
        ("POST", "/v1/chat/completions", b"[" * 100_000, 400),
        ("POST", "/v1/chat/completions", b" " * (MAX_BODY + 1), 413),
        ("POST", "/v1/chat/completions", b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400),
    ):
        answer = httpx.request(method, f"{running.url}{path}", content=content)
        assert answer.status_code == status and answer.json()["error"]["message"], path


def test_a_fault_of_the_model_is_500_and_the_next_request_is_answered(client, model, monkeypatch):
    def broken(*args, **options):
        raise NotFinite("the model's logits are not finite numbers")

    with monkeypatch.context() as planted:
        planted.setattr(type(model.decoder), "fill", broken)
        with pytest.raises(openai.InternalServerError, match="not finite"):
            ask(client)
        planted.setattr(type(model.decoder), "fill", lambda *args, **options: 1 / 0)
        with pytest.raises(openai.InternalServerError, match="ZeroDivisionError") as raised:
            ask(client)
        assert "Traceback" not in str(raised.value.body)
        with pytest.raises(openai.APIError, match="ZeroDivisionError"):
            list(ask(client, stream=True))
    assert ask(client).choices


def test_who_is_gone_is_not_answered(model):
    """Queued while another request is answered; a control arm is answered."""
    speaker, held = Speaker(model.engine), threading.Event()
    prompt = model.encode_chat(ASKED)

    def work(**fields):
        return Work(prompt, Sampling(4, temperature=1.0, seeds=(1,)), 4, **fields)

    first = speaker.submit(work(heard=lambda piece: held.wait(5)))
    time.sleep(0.05)
    gone, there = speaker.submit(work(gone=lambda: True)), speaker.submit(work())
    held.set()
    assert first.result(5) and there.result(5)
    speaker.drain()
    assert gone.cancelled() and speaker.load().gone == 1 and speaker.load().answered == 2
    speaker.close()
    with pytest.raises(unfreeze.core.errors.UserError, match="closed"):
        speaker.submit(work())


def test_too_many_requests_are_429(model):
    speaker, held = Speaker(model.engine, max_wait=1), threading.Event()
    prompt = model.encode_chat(ASKED)

    def work(**fields):
        return Work(prompt, Sampling(1, seeds=(1,)), 1, **fields)

    first = speaker.submit(work(heard=lambda piece: held.wait(5)))
    time.sleep(0.05)
    second = speaker.submit(work())
    with pytest.raises(unfreeze.core.errors.UserError, match="1 request waiting"):
        speaker.submit(work())
    held.set()
    assert first.result(5) and second.result(5)
    speaker.close()


def test_a_port_in_use_is_one_line(running):
    with pytest.raises(ConfigError, match=f"port {running.port}: Address already in use"):
        Endpoint(port=running.port)
