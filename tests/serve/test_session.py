"""Sessions: each id that was fed or sampled is recorded as it was, and each sampled id is trained on once."""

import json
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

import unfreeze
from unfreeze.core.draws import number
from unfreeze.core.errors import ConfigError
from unfreeze.generate.answer import Completion
from unfreeze.generate.sampling import Sampling
from unfreeze.serve.request import Refused, read_chat
from unfreeze.serve.router import Router
from unfreeze.serve.running import Endpoint
from unfreeze.serve.session import Rules, Session, Speech, _same
from unfreeze.serve.speaker import Speaker
from unfreeze.serve.written import as_openai

HOT, NEW = 1.5, 8
ASKED = {"role": "user", "content": "What is two and two?"}
AGAIN = {"role": "user", "content": "And <|im_end|> three?"}
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}},
}


@pytest.fixture(scope="module")
def model():
    return unfreeze.load(unfreeze.TINY_K2, dtype="float32")


@pytest.fixture(scope="module")
def speech(model):
    return Speech(model.tokenizer, model.decoder.shape.max_positions)


@pytest.fixture(scope="module")
def running(model):
    running = Endpoint().serve(Router(Speaker(model.engine, shares_prefixes=False), model.tokenizer, "tiny"))
    yield running
    running.close()


@pytest.fixture
def opened(running, speech):
    """() -> a session of its own and a client of it."""
    clients = []

    def make(seed=3, **rules):
        session = Session(
            speech, Rules(**{"temperature": HOT, "new_tokens": NEW, "window": 200, **rules}), seed
        )
        name = f"{len(running.router.sessions)}"
        running.router.sessions[name] = session
        clients.append(openai.OpenAI(base_url=running.session_url(name), api_key="-", max_retries=0))
        return session, clients[-1]

    yield make
    for client in clients:
        client.close()
    running.router.sessions.clear()


def say(client, *messages, **fields):
    done = client.chat.completions.create(model="tiny", messages=list(messages), **fields)
    return done.choices[0].message


def test_sampled_ids_stay_and_only_what_is_new_is_tokenised(model, opened):
    session, client = opened(replay=True)
    first = say(client, ASKED)
    second = say(client, ASKED, first, AGAIN)
    third = say(client, ASKED, first, AGAIN, second, ASKED)
    (spent,) = session.end()
    sample = spent.sample

    # each turn is what the engine samples after the ids before it, with the seed of that request
    turns = [i for i, own in enumerate(sample.sampled) if own and not sample.sampled[i - 1]]
    assert len(turns) == 3 and sample.ids[: turns[0]] == model.encode_chat([ASKED])
    tokens = []
    for count, begin in enumerate(turns):
        sampling = Sampling(NEW, temperature=HOT, seeds=(number(3, count, 0),))
        (own,) = model.engine.generate([sample.ids[:begin]], sampling)
        assert sample.ids[begin : begin + len(own.tokens)] == own.tokens
        assert sample.log_p[len(tokens) : len(tokens) + len(own.tokens)] == own.sampled_logprobs
        tokens += own.tokens
    assert [id for id, own in zip(sample.ids, sample.sampled, strict=True) if own] == tokens
    assert len({first.content, second.content, third.content}) == 3

    # the trainer's log p of the whole sample, after temperature
    (logits,) = model.logits([sample.ids])
    log_p = (logits[:, : model.engine.num_ids].double() / HOT).log_softmax(-1)
    theirs = [float(log_p[i - 1, id]) for i, id in enumerate(sample.ids) if sample.sampled[i]]
    assert sample.log_p == pytest.approx(theirs, abs=1e-5)
    assert sample.experts is not None and len(sample.experts) == len(sample.ids) - 1


def test_the_engines_ids_need_not_be_the_tokenizers(model, speech):
    """Letter by letter, the answer is other ids than its text; they stay."""
    session = Session(speech, Rules(HOT, NEW, 200), 0)
    odd = [model.tokenizer.encode(letter, specials=False)[0] for letter in "The"]
    (end,) = script(model, "<|im_end|>")
    assert model.tokenizer.encode("The", specials=False) != odd
    message = answered(session, [ASKED], [*odd, end])
    turn = session.begin(chat([ASKED, message, AGAIN]))
    prompt = model.encode_chat([ASKED])
    assert turn.sample.ids[: len(prompt) + 4] == [*prompt, *odd, end]
    assert model.tokenizer.decode(turn.sample.ids, skip_specials=False) == model.tokenizer.decode(
        model.encode_chat([ASKED, {"role": "assistant", "content": "The"}, AGAIN]), skip_specials=False
    )


def chat(messages, **fields):
    return read_chat(json.dumps({"messages": messages, **fields}).encode())


def answered(session, messages, *answers, stop="end", **fields):
    """Let a session take scripted ids. -> the message, as a client sends it back."""
    turn = session.begin(chat(messages, n=len(answers), **fields))
    done = [Completion(ids, "", stop, [-1.0] * len(ids), [-1.0] * len(ids)) for ids in answers]
    return json.loads(json.dumps(session.heard(turn, done)[0]))


def script(model, text):
    return model.tokenizer.encode(text, specials=True)


def test_a_rewritten_history_is_a_sample_of_its_own(model, speech):
    session = Session(speech, Rules(HOT, NEW, 200), 0)
    message = answered(session, [ASKED], script(model, "Four.<|im_end|>"))
    six = script(model, "Six.<|im_end|>")
    answered(session, [ASKED, {**message, "content": "Five."}, AGAIN], six)
    answered(session, [AGAIN], script(model, "One.<|im_end|>"))
    texts = [model.tokenizer.decode(each.sample.ids, skip_specials=False) for each in session.end()]
    assert len(texts) == 3 and "Five." in texts[1] and "Four." not in texts[1]
    prompt = model.encode_chat([ASKED, {"role": "assistant", "content": "Five."}, AGAIN])
    assert session.end()[1].sample.sampled == [False] * len(prompt) + [True] * len(six)


def test_each_sampled_id_is_trained_on_once(model, speech):
    """A tree: two answers to one prompt, the first of which goes on twice, and the second once."""
    session = Session(speech, Rules(HOT, NEW, 200), 0)
    one, two = script(model, "One.<|im_end|>"), script(model, "Two.<|im_end|>")
    message = answered(session, [ASKED], one, two)
    answered(session, [ASKED, message, AGAIN], script(model, "Three.<|im_end|>"))
    answered(session, [ASKED, message, AGAIN], script(model, "Four.<|im_end|>"))
    answered(session, [ASKED, {**message, "content": "Two."}, ASKED], script(model, "Five.<|im_end|>"))
    spent = session.end()
    trained = [
        model.tokenizer.decode(
            [id for id, own in zip(each.sample.ids, each.sample.sampled, strict=True) if own]
        )
        for each in spent
    ]
    assert trained == ["One.Three.", "Four.", "Two.Five."]
    assert all(len(each.sample.log_p) == sum(each.sample.sampled) for each in spent)
    assert model.tokenizer.decode(spent[1].sample.ids).count("One.") == 1  # it is read, not trained on
    assert [each.sample.sampled for each in session.end()] == [each.sample.sampled for each in spent]


def test_tool_calls_come_as_openai_has_them_and_go_on(model, speech):
    session = Session(speech, Rules(HOT, 99, 999), 0)
    call = (
        "I add.<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
        '{"a":  1}<|tool_call_end|><|tool_calls_section_end|><|im_end|>'
    )
    turn = session.begin(chat([ASKED], tools=[TOOL]))
    ids = script(model, call)
    (message,) = session.heard(turn, [Completion(ids, "", "end", [0.0] * len(ids), [0.0] * len(ids))])
    sent = openai.types.chat.ChatCompletionMessage.model_validate(as_openai(message))
    assert sent.content == "I add." and json.loads(sent.tool_calls[0].function.arguments) == {"a": 1}
    result = {"role": "tool", "tool_call_id": sent.tool_calls[0].id, "content": "2"}
    back = [ASKED, sent.model_dump(), result]
    turn = session.begin(chat(back, tools=[TOOL]))
    assert turn.before is not None and turn.sample.ids[-len(ids) :] != ids
    start = len(model.encode_chat([ASKED]))
    text = model.tokenizer.decode(turn.sample.ids, skip_specials=False)
    assert '{"a":  1}<|tool_call_end|>' in text  # two spaces: as sampled
    assert "2" in text.rpartition("<|tool_calls_section_end|>")[2] and start < len(turn.sample.ids)
    other = session.begin(chat(back))  # other tools: another prompt
    assert other.before is None


def test_a_call_that_cannot_be_read_is_text(model, speech):
    session = Session(speech, Rules(HOT, 99, 999), 0)
    text = "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0"
    message = answered(session, [ASKED], script(model, text + "<|im_end|>"), tools=[TOOL])
    assert message["content"] == text and "tool_calls" not in message


def test_a_client_may_drop_reasoning(speech):
    """The ids of the reasoning stay in the sample."""
    ours = {"role": "assistant", "content": "Four.", "reasoning_content": "Two and two."}
    assert _same({"role": "assistant", "content": "Four."}, ours)
    assert not _same({**ours, "reasoning_content": "Other."}, ours)
    assert not _same({**ours, "content": "Five."}, ours)


def test_seeds_are_of_session_request_and_choice(opened):
    texts = {}
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        _, client = opened(seed)
        done = client.chat.completions.create(
            model="tiny", messages=[ASKED], n=4, seed=7 if name == "b" else 8
        )
        texts[name] = [choice.message.content for choice in done.choices]
        texts[name].append(say(client, ASKED).content)
    assert texts["a"] == texts["b"] != texts["c"]
    assert len(set(texts["a"])) > 2


@pytest.mark.parametrize(
    ("fields", "param"), [({"temperature": 1.0}, "temperature"), ({"top_p": 0.9}, "top_p")]
)
def test_another_distribution_is_refused_by_name(opened, fields, param):
    _, client = opened()
    with pytest.raises(openai.BadRequestError, match="which its loss needs") as raised:
        say(client, ASKED, **fields)
    assert raised.value.param == param
    assert say(client, ASKED, temperature=HOT, top_p=1.0)


def test_limits_of_a_session(opened):
    session, client = opened(requests=2)
    say(client, ASKED, max_tokens=1)
    say(client, ASKED)
    with pytest.raises(openai.PermissionDeniedError, match="at most 2 requests"):
        say(client, ASKED)
    session.end()
    with pytest.raises(openai.APIStatusError, match="has ended and takes no more") as raised:
        say(client, ASKED)
    assert raised.value.status_code == 410
    _, small = opened(window=10)
    with pytest.raises(openai.APIStatusError, match="at most 9 are possible") as raised:
        say(small, ASKED)
    assert raised.value.status_code == 413


def test_an_answer_is_cut_by_the_runs_limit_not_by_its_own(model, speech):
    session = Session(speech, Rules(HOT, 2, 200), 0)
    answered(session, [ASKED], script(model, "One."), stop="length")
    answered(session, [ASKED], script(model, "One"), stop="length", max_tokens=1)
    assert [each.cut for each in session.end()] == [True, False]


def test_a_window_with_one_place_left_has_one_token(speech):
    length = len(speech.prompt(chat([ASKED]))[0])
    for window, asked, most, cut in (
        (length + 1, {}, 1, True),
        (length + 5, {}, 5, True),
        (length + 5, {"max_tokens": 5}, 5, True),
        (length + 5, {"max_tokens": 4}, 4, False),
        (length + NEW + 1, {}, NEW, True),
    ):
        turn = Session(speech, Rules(HOT, NEW, window), 0).begin(chat([ASKED], **asked))
        assert (turn.most, turn.sampling.max_new_tokens, turn.cut) == (most, most, cut)
    with pytest.raises(Refused, match=f"at most {length - 1} are possible") as refused:
        Session(speech, Rules(HOT, NEW, length), 0).begin(chat([ASKED]))
    assert refused.value.status == 413


def test_a_session_without_tools_in_its_template_says_so(model, speech):
    deaf = Speech(model.tokenizer, 200)
    deaf._read = ConfigError("the chat template writes tool calls in a form that is not read")
    with pytest.raises(Refused, match="tools: the chat template"):
        Session(deaf, Rules(HOT, NEW, 200), 0).begin(chat([ASKED], tools=[TOOL]))


def test_sessions_at_once_do_not_mix(opened):
    sessions = [opened(seed) for seed in range(6)]
    alone = []
    for seed in range(6):
        _, client = opened(seed)
        alone.append(say(client, ASKED).content)
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda each: say(each[1], ASKED).content, sessions))
    assert together == alone and len(set(alone)) > 2
    assert all(len(session.end()) == 1 for session, _ in sessions)


def test_control_tokens_are_no_text(model, speech):
    """They stay in the sample, and the next request goes on with it."""
    session = Session(speech, Rules(HOT, 99, 999), 0)
    odd = model.tokenizer.special_texts[0]
    message = answered(session, [ASKED], ids := script(model, f"It is {odd}4.<|im_end|>"))
    assert message["content"] == "It is 4."
    turn = session.begin(chat([ASKED, message, AGAIN]))
    start = len(model.encode_chat([ASKED]))
    assert turn.before is not None and turn.sample.ids[start : start + len(ids)] == ids
