"""OpenAI's client, unmodified: models, adapters by name, errors, many at once, and clients that leave."""

import asyncio
import json
import time

import httpx
import openai
import pytest

import unfreeze
from tests.serve import small
from unfreeze.generate.sampling import Sampling
from unfreeze.serve.router import Router
from unfreeze.serve.running import Endpoint
from unfreeze.serve.session import Rules, Session, Speech
from unfreeze.serve.speaker import Speaker

ASKED = [{"role": "user", "content": "What is two and two?"}]
NAMES = ["yoda", "org/pirate"]
HOT = 1.5


class Noted:
    """Adapters that do nothing but remember which was asked for."""

    def __init__(self):
        self.versions, self.held = [], 0

    def version(self, name):
        self.versions.append(name)
        self.held += 1
        return name

    def assign(self, versions):
        pass

    def leave(self, version):
        self.held -= 1


@pytest.fixture(scope="module")
def model():
    return unfreeze.load(unfreeze.TINY_K2, dtype="float32")


@pytest.fixture(scope="module")
def noted():
    return Noted()


@pytest.fixture(scope="module")
def running(model, noted):
    speech = Speech(model.tokenizer, model.decoder.shape.max_positions)
    speaker = Speaker(model.engine, adapters=noted, shares_prefixes=False)
    running = Endpoint().serve(Router(speaker, model.tokenizer, "tiny", speech, adapters=lambda: NAMES))
    yield running
    running.close()


@pytest.fixture(scope="module")
def client(running):
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="-", max_retries=0) as client:
        yield client


def ask(client, **fields):
    return client.chat.completions.create(**{"model": "tiny", "messages": ASKED, "max_tokens": 12, **fields})


def test_models_are_the_base_and_its_adapters(client):
    listed = list(client.models.list())
    assert [each.id for each in listed] == ["tiny", *NAMES]
    assert [each.parent for each in listed] == [None, "tiny", "tiny"]
    for name in ("tiny", *NAMES):
        assert client.models.retrieve(name).id == name
    assert client.models.retrieve("default").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="model 'yodda' is not here; nearest: 'yoda'") as raised:
        client.models.retrieve("yodda")
    assert raised.value.code == "model_not_found" and raised.value.param == "model"


def test_an_answer_is_that_of_the_adapter_that_is_named(client, noted):
    for name, adapter in (("tiny", ""), ("default", ""), ("yoda", "yoda"), ("org/pirate", "org/pirate")):
        noted.versions.clear()
        done = ask(client, model=name)
        text = client.completions.create(model=name, prompt="The sun", max_tokens=2)
        (*_, last) = ask(client, model=name, stream=True)
        assert set(noted.versions) == {adapter} and len(noted.versions) == 3
        assert done.model == text.model == last.model == (adapter or "tiny")
    assert noted.held == 0
    for name, words in (
        ("Yoda", "nearest: 'yoda'"),
        ("gpt-9", "there is 'tiny', 'yoda'"),
        ("x" * 999, "there is"),
    ):
        with pytest.raises(openai.NotFoundError, match=words):
            ask(client, model=name)


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
         openai.BadRequestError, "messages[0].content[0].type is 'image_url'; this model reads text alone"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, openai.BadRequestError, "input_audio"),
        ({"audio": {"voice": "alloy", "format": "wav"}}, openai.BadRequestError, "audio: this field is not known"),
        ({"reasoning_effort": "high"}, openai.BadRequestError, "reasoning_effort: this field is not known"),
        ({"prediction": {"type": "content", "content": "x"}}, openai.BadRequestError, "prediction"),
        ({"stream": True, "stream_options": {"include_usag": True}}, openai.BadRequestError, "stream_options.include_usag"),
        ({"model": "tinyy"}, openai.NotFoundError, "nearest: 'tiny'"),
        ({"messages": [{"role": "user", "content": "word " * 5000}]}, openai.APIStatusError, "leave no place"),
    ],
)  # fmt: skip
def test_errors_are_openais(client, fields, error, words):
    with pytest.raises(error) as raised:
        ask(client, **fields)
    assert words in raised.value.message


def test_fields_that_do_nothing_are_taken(client):
    taken = {
        "user": "me",
        "store": False,
        "metadata": {"a": "b"},
        "modalities": ["text"],
        "service_tier": "auto",
    }
    plain = ask(client, seed=3).choices[0].message.content
    done = ask(client, seed=3, **taken, prompt_cache_key="x", safety_identifier="y", presence_penalty=0)
    assert done.choices[0].message.content == plain


def test_thirty_two_at_once_are_each_as_alone(running, client):
    few = {"max_tokens": 6}
    alone = [ask(client, seed=i, **few).choices[0].message.content for i in range(32)]

    async def streamed(client, i):
        chunks = await ask(client, seed=i, stream=True, **few)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    async def whole(client, i):
        return (await ask(client, seed=i, **few)).choices[0].message.content

    async def every():
        async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="-", max_retries=0) as client:
            return await asyncio.gather(*((streamed if i % 2 else whole)(client, i) for i in range(32)))

    assert asyncio.run(every()) == alone and len(set(alone)) > 8


def until(condition):
    end = time.monotonic() + 10
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_a_client_that_leaves_frees_its_row(running, stream, path):
    load = running.router.speaker.load
    body = {"messages": ASKED} if path.startswith("chat") else {"prompt": "The sun"}
    body |= {"max_tokens": 900, "ignore_eos": True, "stream": stream}
    before = load().gone
    with httpx.Client(timeout=0.3) as leaving:
        if stream:
            with leaving.stream("POST", f"{running.url}/v1/{path}", json=body) as answer:
                next(answer.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                leaving.post(f"{running.url}/v1/{path}", json=body)
    assert until(lambda: load().gone == before + 1 and load().running == 0)


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_a_stream_that_is_refused_has_its_status(model, path):
    """429, not an event of a stream that was begun."""
    speech = Speech(model.tokenizer, 200)
    full = Endpoint().serve(Router(Speaker(model.engine, max_wait=0), model.tokenizer, "tiny", speech))
    for stream in (False, True):
        body = {"messages": ASKED} if path.startswith("chat") else {"prompt": "The sun"}
        answer = httpx.post(f"{full.url}/v1/{path}", json={**body, "stream": stream})
        assert answer.status_code == 429 and "waiting; try" in answer.json()["error"]["message"]
    full.close()


def test_more_prompts_than_may_wait_and_half_a_surrogate_are_refused(model):
    speech = Speech(model.tokenizer, 200)
    small = Endpoint().serve(Router(Speaker(model.engine, max_wait=2), model.tokenizer, "tiny", speech))
    for prompt, words in (
        (["a"] * 3, "3 prompts; this server lets 2 wait"),
        ("a\ud800b", "half a surrogate"),
    ):
        body = json.dumps({"prompt": prompt, "max_tokens": 1})  # half a surrogate as an escape
        answer = httpx.post(f"{small.url}/v1/completions", content=body)
        assert answer.status_code == 400 and words in answer.json()["error"]["message"]
    small.close()


def test_default_is_the_adapter_of_a_run(model, noted):
    """`unfreeze serve RUN`: its adapter answers where no model is named, its base by its own name."""
    speech = Speech(model.tokenizer, 200)
    router = Router(
        Speaker(model.engine, adapters=noted),
        model.tokenizer,
        "tiny",
        speech,
        adapters=lambda: ["yoda"],
        default="yoda",
    )
    run = Endpoint().serve(router)
    for body, name in (({}, "yoda"), ({"model": "default"}, "yoda"), ({"model": "tiny"}, "tiny")):
        answer = httpx.post(f"{run.url}/v1/completions", json={"prompt": "The sun", "max_tokens": 1, **body})
        assert answer.json()["model"] == name
    run.close()


def test_sessions_record_completions_too(model, running):
    """Ids, log-probabilities after temperature and routes; a prompt that begins with a sample goes on with it."""
    session = Session(running.router.talk, Rules(HOT, 8, 200, replay=True), 3)
    running.router.sessions["text"] = session
    with openai.OpenAI(base_url=running.session_url("text"), api_key="-", max_retries=0) as client:
        prompt = model.tokenizer.encode("The sun is", specials=True)
        first = client.completions.create(model="tiny", prompt=prompt, logprobs=0)
        seeds = Sampling(8, temperature=HOT, seeds=(unfreeze.core.draws.number(3, 0, 0),))
        (own,) = model.engine.generate([prompt], seeds)
        assert first.choices[0].text == own.text
        more = [*prompt, *own.tokens, *prompt]
        client.completions.create(model="tiny", prompt=more)
        client.completions.create(model="tiny", prompt="The sun is", echo=True, logprobs=0, max_tokens=0)
        chat = client.chat.completions.create(model="tiny", messages=ASKED).choices[0].message
        for fields in ({"temperature": 1.0}, {"logit_bias": {"5": 1}}, {"extra_body": {"top_k": 3}}):
            with pytest.raises(openai.BadRequestError):
                client.completions.create(model="tiny", prompt=prompt, **fields)
        for fields in ({"response_format": {"type": "json_object"}}, {"frequency_penalty": 1.0}):
            with pytest.raises(openai.BadRequestError, match="samples by itself"):
                client.chat.completions.create(model="tiny", messages=ASKED, **fields)
        with pytest.raises(openai.NotFoundError):  # it trains the model, not another's adapter
            client.completions.create(model="yoda", prompt=prompt)
    del running.router.sessions["text"]
    text, spoken = session.end()
    assert text.sample.ids[: len(more)] == more and spoken.answer["content"] == chat.content
    (logits,) = model.logits([text.sample.ids])
    log_p = (logits[:, : model.engine.num_ids].double() / HOT).log_softmax(-1)
    places = [i for i, sampled in enumerate(text.sample.sampled) if sampled]
    assert places[: len(own.tokens)] == list(range(len(prompt), len(prompt) + len(own.tokens)))
    theirs = [float(log_p[i - 1, text.sample.ids[i]]) for i in places]
    assert text.sample.log_p == pytest.approx(theirs, abs=1e-5)
    assert len(text.sample.experts) == len(text.sample.ids) - 1


def test_a_stop_string_of_many_and_of_a_stream(client):
    whole = ask(client, temperature=0, max_tokens=32).choices[0].message.content
    stop = ["never", *(f"no{i}" for i in range(14)), whole[4:7]]
    done = ask(client, temperature=0, max_tokens=32, stop=stop).choices[0]
    assert done.message.content == whole[: whole.index(whole[4:7])] and done.finish_reason == "stop"
    chunks = list(ask(client, temperature=0, max_tokens=32, stop=stop, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == done.message.content


def test_an_endpoint_of_another_model_has_its_name(model):
    running = small.serve(model, "org/other")
    assert httpx.get(f"{running.url}/v1/models/org/other").json()["id"] == "org/other"
    running.close()
