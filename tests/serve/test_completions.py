"""/v1/completions, /tokenize, /detokenize: log-probabilities are transformers', in the form that lm-eval reads."""

import httpx
import openai
import pytest
import torch

import unfreeze
from tests.serve import small
from unfreeze.serve.completions import Spelling

PROMPT = "the sun is two 四 and"


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    return small.write(folder), unfreeze.load(folder, dtype="float32"), folder


@pytest.fixture(scope="module")
def running(both):
    running = small.serve(both[1])
    yield running
    running.close()


@pytest.fixture(scope="module")
def client(running):
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="-", max_retries=0) as client:
        yield client


def complete(client, prompt=PROMPT, **fields):
    return client.completions.create(**{"model": "small", "prompt": prompt, "max_tokens": 8, **fields})


def log_p(both, ids):
    with torch.no_grad():
        return both[0](torch.tensor([ids])).logits[0].double().log_softmax(-1)


def test_echo_scores_the_prompt_as_transformers_does(both, client):
    ids = both[1].tokenizer.encode(PROMPT, specials=True)
    done = complete(client, echo=True, logprobs=3, temperature=0)
    (choice,) = done.choices
    got = choice.logprobs
    whole = both[1].tokenizer.encode(choice.text, specials=True)
    length = len(got.tokens)
    assert choice.text.startswith(PROMPT) and length == len(ids) + done.usage.completion_tokens
    assert got.token_logprobs[0] is None and got.top_logprobs[0] is None and got.text_offset[0] == 0
    answer = [id for id in done_ids(both, ids, done.usage.completion_tokens)]
    theirs = log_p(both, [*ids, *answer])
    for place, id in enumerate([*ids, *answer][1:], start=1):
        assert got.token_logprobs[place] == pytest.approx(float(theirs[place - 1, id]), abs=1e-4)
        top = theirs[place - 1].topk(3).values.tolist()
        assert sorted(got.top_logprobs[place].values())[-3:] == pytest.approx(top[::-1], abs=1e-4)
        assert got.token_logprobs[place] in got.top_logprobs[place].values()  # lm-eval compares with ==
    assert whole[: len(ids)] == ids
    for offset, token in zip(got.text_offset, got.tokens, strict=True):
        rest = choice.text[offset:]
        assert token.startswith("bytes:") or rest.startswith(("\ufffd", token)) or "<" in token
    assert "bytes:\\x9b" in got.tokens  # the last byte of 四


def done_ids(both, ids, count, **how):
    out = both[0].generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False, pad_token_id=0, **how)
    return out[0, len(ids) :].tolist()


def test_no_new_tokens(both, client):
    done = complete(client, echo=True, logprobs=0, max_tokens=0)
    ids = both[1].tokenizer.encode(PROMPT, specials=True)
    assert done.choices[0].text == PROMPT and done.usage.completion_tokens == 0
    assert len(done.choices[0].logprobs.token_logprobs) == len(ids)
    assert done.choices[0].logprobs.top_logprobs is None and done.choices[0].finish_reason == "length"
    with pytest.raises(openai.BadRequestError, match="needs echo = true"):
        complete(client, max_tokens=0)


@pytest.mark.parametrize("ids", [False, True])
def test_prompts_are_texts_or_ids_and_choices_are_in_their_order(both, client, ids):
    texts = ["the sun", "two and", "四"]
    prompts = [both[1].tokenizer.encode(text, specials=True) for text in texts]
    done = complete(client, prompts if ids else texts, temperature=0)
    alone = [
        complete(client, prompt, temperature=0).choices[0].text for prompt in (prompts if ids else texts)
    ]
    assert [choice.index for choice in done.choices] == [0, 1, 2]
    assert [choice.text for choice in done.choices] == alone
    assert done.usage.prompt_tokens == sum(map(len, prompts))
    assert complete(client, prompts[0], echo=True, max_tokens=0).choices[0].text == texts[0]


def test_n_answers_to_each_prompt_differ_and_repeat(client):
    done, again = (complete(client, ["the", "two"], n=3, seed=4) for _ in range(2))
    texts = [choice.text for choice in done.choices]
    assert [choice.index for choice in done.choices] == list(range(6)) and len(set(texts)) > 4
    assert texts == [choice.text for choice in again.choices]


def test_a_stream_is_the_whole_completion(client):
    fields = {"n": 2, "seed": 4, "logprobs": 2, "max_tokens": 20, "stop": ["a"]}
    whole = complete(client, ["the", "two"], **fields)
    chunks = list(
        complete(client, ["the", "two"], stream=True, stream_options={"include_usage": True}, **fields)
    )
    for choice in whole.choices:
        own = [each for chunk in chunks for each in chunk.choices if each.index == choice.index]
        assert "".join(each.text for each in own) == choice.text
        assert [each.finish_reason for each in own if each.finish_reason] == [choice.finish_reason]
        lists = [each.logprobs for each in own if each.logprobs]
        assert [token for each in lists for token in each.tokens] == choice.logprobs.tokens
        assert [top for each in lists for top in each.top_logprobs] == choice.logprobs.top_logprobs
        values = [value for each in lists for value in each.token_logprobs]
        assert values == choice.logprobs.token_logprobs
    assert chunks[-1].usage == whole.usage and chunks[0].usage is None


def test_lm_evals_own_client_scores_as_transformers(both, running):
    """LocalCompletionsAPI, unmodified; the oracle is transformers' logits."""
    api = pytest.importorskip("lm_eval.models.openai_completions")
    pytest.importorskip("tenacity")  # lm-eval[api]
    from lm_eval.api.instance import Instance

    lm = api.LocalCompletionsAPI(
        model="small", base_url=f"{running.url}/v1/completions", tokenizer=str(both[2]),
        tokenizer_backend="huggingface", max_length=512, batch_size=2,
    )  # fmt: skip
    pairs = [("the sun is", " a star"), ("two and two are", " four"), ("四是", "二加二")]
    for context in (
        "two",
        "a",
        "the sun",
        "star",
        "and",
        "four",
        "is",
        "4",
        "name",
        "{",
    ):  # a text that is greedy
        before = lm.tok_encode(context)
        text = both[1].tokenizer.decode(likeliest := done_ids(both, before, 1))
        if lm.tok_encode(context + text) == [*before, *likeliest]:
            pairs.append((context, text))
    requests = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    greedy = []
    for (context, text), (score, is_greedy) in zip(pairs, lm.loglikelihood(requests), strict=True):
        before = lm.tok_encode(context)
        ids = [*before, *lm.tok_encode(context + text)[len(before) :]]  # as lm-eval cuts a pair
        theirs = log_p(both, ids)[len(before) - 1 : -1]
        each = theirs.gather(1, torch.tensor(ids[len(before) :])[:, None])
        assert score == pytest.approx(float(each.sum()), abs=1e-4)
        assert is_greedy == (theirs.argmax(-1).tolist() == ids[len(before) :])
        greedy.append(is_greedy)
    assert greedy[:3] == [False] * 3 and len(greedy) > 3 and all(greedy[3:])


BAD = {
    "suffix": ({"suffix": "x"}, "is not built"),
    "best_of": ({"best_of": 3}, "best_of other than n is not built"),
    "logprobs": ({"logprobs": 21}, "logprobs: 21 is too large; at most 20"),
    "prompt": ({"prompt": []}, "empty"),
    "id": ({"prompt": [999_999]}, "outside the vocabulary"),
    "many": ({"prompt": ["a"] * 2049}, "2,049 prompts; at most 2,048"),
    "empty": ({"prompt": ["", "a"]}, "prompt 0 is empty"),
    "mixed": ({"prompt": ["a", 3]}, "prompt[1]: a text is expected"),
    "echo": ({"echo": True, "stream": True}, "echo has no stream"),
    "bias": ({"logit_bias": {"999999": 1}}, "outside the vocabulary"),
    "word": ({"logit_bias": {"the": 1}}, "'the' is not a token id"),
    "stream_options": ({"stream_options": {"include_usage": True}}, "needs stream"),
    "obfuscation": ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options"),
    "min_p": ({"extra_body": {"min_p": 0.1}}, "min_p: this field is not known"),
    "topk": ({"extra_body": {"topk": 3}}, "nearest: 'top_k'"),
}


@pytest.mark.parametrize("field", BAD)
def test_a_bad_field_is_400_and_named(client, field):
    words, message = BAD[field]
    with pytest.raises(openai.BadRequestError) as raised:
        complete(client, **words)
    assert message in raised.value.message


def test_long_prompts_are_413(client):
    with pytest.raises(openai.APIStatusError, match="prompt: 4,000 tokens") as raised:
        complete(client, [[5] * 4000])
    assert raised.value.status_code == 413


@pytest.mark.parametrize(("left", "asked", "count"), [(1, 1, 1), (1, 9, 1), (3, 2, 2), (3, 3, 3), (3, 4, 3)])
def test_an_answer_ends_at_the_last_position(both, client, left, asked, count):
    """The window has 2048; the tokens are those of transformers, without the end's."""
    ids, end = [5 + i * i % 250 for i in range(2048 - left)], both[1].tokenizer.eos_id
    done = complete(client, [ids], max_tokens=asked, temperature=0, logprobs=0, logit_bias={str(end): -100})
    (choice,) = done.choices
    assert done.usage.completion_tokens == count and choice.finish_reason == "length"
    theirs = done_ids(both, ids, count, suppress_tokens=[end])
    assert choice.logprobs.tokens == list(map(Spelling(both[1].tokenizer), theirs))
    with pytest.raises(openai.APIStatusError, match="at most 2,047 are possible"):
        complete(client, [[*ids, *[5] * left]], max_tokens=1)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_that_ends_at_the_last_token_is_a_stop(both, client, stream):
    """Of one letter; a token earlier the answer is cut, a token later nothing changes."""
    letters = {str(both[1].tokenizer.encode(each, specials=False)[0]): 50 for each in "abcdefghijklm"}
    fields = {"temperature": 0, "logit_bias": letters, "frequency_penalty": 2}
    whole = complete(client, max_tokens=20, **fields).choices[0].text
    last = next(place for place in range(3, 20) if whole.index(whole[place]) == place) + 1
    letter = whole[last - 1]

    def ended(count):
        done = complete(client, max_tokens=count, stop=letter, stream=stream, **fields)
        parts = [chunk.choices[0] for chunk in done] if stream else [done.choices[0]]
        return "".join(part.text for part in parts), parts[-1].finish_reason

    assert len(whole) == 20 and ended(last) == ended(last + 1) == (whole[: last - 1], "stop")
    assert ended(last - 1) == (whole[: last - 1], "length")


def test_logit_bias_bans_and_forces(both, client):
    first = done_ids(both, both[1].tokenizer.encode(PROMPT, specials=True), 1)[0]
    token = both[1].tokenizer.encode("Q", specials=False)[0]
    plain = complete(client, temperature=0, max_tokens=1, logprobs=0).choices[0]
    banned = complete(client, temperature=0, max_tokens=1, logit_bias={str(first): -100}).choices[0]
    forced = complete(client, temperature=1, max_tokens=5, logit_bias={str(token): 100}).choices[0]
    assert plain.text != banned.text and forced.text == "QQQQQ"
    assert complete(client, temperature=0, max_tokens=1, logit_bias={}).choices[0].text == plain.text


@pytest.mark.parametrize(("frequency", "presence"), [(0.5, 0.0), (0.0, 2.0), (1.1, 0.7), (0.0, -0.7)])
def test_penalties_are_openais_formula(both, client, frequency, presence):
    """Oracle: the greedy ids of logits - frequency · count - presence · [count > 0], from transformers' logits."""
    ids = both[1].tokenizer.encode(PROMPT, specials=True)
    own = []
    for _ in range(50):
        with torch.no_grad():
            logits = both[0](torch.tensor([[*ids, *own]])).logits[0, -1].double()
        for id in set(own):
            logits[id] -= frequency * own.count(id) + presence
        own.append(int(logits.argmax()))
    fields = {"frequency_penalty": frequency, "presence_penalty": presence}
    done = complete(client, temperature=0, max_tokens=50, **fields).choices[0]
    plain = complete(client, temperature=0, max_tokens=50).choices[0]
    assert done.text == both[1].tokenizer.decode(own) != plain.text


def test_an_answer_may_not_end_early(both, client):
    end = {str(both[1].tokenizer.eos_id): 100}
    assert complete(client, logit_bias=end, max_tokens=9).usage.completion_tokens == 1
    long = complete(client, logit_bias=end, max_tokens=9, extra_body={"ignore_eos": True})
    assert long.usage.completion_tokens == 9 and long.choices[0].finish_reason == "length"
    least = complete(client, logit_bias=end, max_tokens=9, extra_body={"min_tokens": 4})
    assert least.usage.completion_tokens == 5 and least.choices[0].finish_reason == "stop"


def test_top_k_one_is_greedy(client):
    greedy = complete(client, temperature=0).choices[0].text
    assert complete(client, temperature=2, extra_body={"top_k": 1}).choices[0].text == greedy
    assert complete(client, temperature=2, seed=1, extra_body={"top_k": -1}).choices[0].text != greedy


def test_tokenize_and_back(both, running):
    def post(path, **body):
        return httpx.post(f"{running.url}{path}", json=body)

    tokenizer = both[1].tokenizer
    text = "two <|im_end|> 四"
    answer = post("/tokenize", prompt=text, return_token_strs=True).json()
    assert answer["tokens"] == tokenizer.encode(text, specials=True) and answer["count"] == len(
        answer["tokens"]
    )
    assert answer["max_model_len"] == 2048 and len(answer["token_strs"]) == answer["count"]
    assert post("/detokenize", tokens=answer["tokens"]).json() == {"prompt": text}
    messages = [{"role": "user", "content": "two"}]
    assert post("/tokenize", messages=messages, model="small").json()["tokens"] == both[1].encode_chat(
        messages
    )
    for path, body, status in (
        ("/tokenize", {}, 400),
        ("/tokenize", {"prompt": "a", "messages": messages}, 400),
        ("/tokenize", {"prompt": "a", "model": "smal"}, 404),
        ("/tokenize", {"messages": [3]}, 400),
        ("/detokenize", {"tokens": [999_999]}, 400),
        ("/detokenize", {"tokens": ["a"]}, 400),
    ):
        fault = post(path, **body)
        assert fault.status_code == status and fault.json()["error"]["message"], body
