"""Special tokens by their ids: what a model spells in ordinary tokens is content, and stays."""

import json
from types import SimpleNamespace

import pytest

import unfreeze
from tests.serve.test_tools import ASKED, TOOLS, summed_of
from unfreeze.data.tokens.tokenizer import load_tokenizer
from unfreeze.generate.answer import Completion
from unfreeze.generate.sampling import Sampling
from unfreeze.serve import session as sessions
from unfreeze.serve import signs
from unfreeze.serve.session import Speech, Turn


@pytest.fixture(scope="module")
def speech():
    return Speech(load_tokenizer(unfreeze.TINY_K2), 999)


def ids_of(speech, *parts):
    """Ids of texts in ordinary tokens, and of special tokens, which are given as [text]."""
    tokenizer = speech.tokenizer
    ids = []
    for part in parts:
        ids += (
            [tokenizer.token_id(part[0])]
            if isinstance(part, list)
            else tokenizer.encode(part, specials=False)
        )
    assert None not in ids
    return ids


def heard(speech, ids, tools=None, stop=(), text=""):
    """-> the message of an answer; its stream must sum to the same."""
    turn = Turn(ASKED, tools, None, Sampling(9, stop=stop), 9)
    done = Completion(ids, text, "stop word" if stop else "length", [0.0] * len(ids))
    (message,) = speech.heard(turn, [done])
    sums = summed_of(speech, ids, message, tools=bool(tools), stop=stop)
    assert sums["content"].strip() == (message["content"] or "").strip()
    assert sums["reasoning_content"] == message.get("reasoning_content", "")
    assert json.dumps(message)  # half a surrogate pair would be an escape that no client can read
    assert not any(0xD800 <= ord(letter) < 0xE000 for letter in message["content"])
    return message


END, MIDDLE = "<|im_end|>", "<|im_middle|>"
OPEN, CLOSE = "<|tool_calls_section_begin|><|tool_call_begin|>", "<|tool_call_end|><|tool_calls_section_end|>"
ARGUMENTS = "<|tool_call_argument_begin|>"


@pytest.mark.parametrize(
    ("parts", "content"),
    [
        ((f"the token {END} ends a turn",), f"the token {END} ends a turn"),
        ((json.dumps({"a": f"x{END}y", "b": MIDDLE}),), json.dumps({"a": f"x{END}y", "b": MIDDLE})),
        (("a", [MIDDLE], f"b {END} c", [MIDDLE]), f"ab {END} c"),
        (("<|im_", "end|>"), END),
        (("<", [MIDDLE], "|im_end|>"), END),  # parted by a token that is removed
        ((f"\ufdd0 {END}",), f"\ufdd0 {END}"),
    ],
)
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_what_is_only_spelled_like_a_special_token_stays(speech, parts, content, tools):
    assert heard(speech, ids_of(speech, *parts), tools)["content"] == content


def test_control_arm_by_the_text_it_is_lost(speech, monkeypatch):
    monkeypatch.setattr(sessions, "guarded", lambda text, tokenizer: signs.Guarded(text, ""))
    turn = Turn(ASKED, None, None, Sampling(9), 9)
    ids = ids_of(speech, f"the token {END} ends a turn")
    (message,) = speech.heard(turn, [Completion(ids, "", "length", [0.0] * len(ids))])
    assert message["content"] == "the token  ends a turn"


def test_arguments_of_a_call_may_spell_one(speech):
    arguments = json.dumps({"a": 1, "text": f"{END} {MIDDLE}", END: [MIDDLE]})
    ids = speech.tokenizer.encode(f"I add.{OPEN}functions.add:0{ARGUMENTS}", specials=True)
    ids += ids_of(speech, arguments) + speech.tokenizer.encode(CLOSE, specials=True)
    message = heard(speech, ids, TOOLS)
    (call,) = message["tool_calls"]
    assert message["content"] == "I add." and call["function"]["arguments"] == json.loads(arguments)


def test_reasoning_and_stop_strings(speech):
    ids = ids_of(speech, f"<think>Is {END} it?</think>It is {END}.")
    message = heard(speech, ids)
    assert message["content"] == f"It is {END}." and message["reasoning_content"] == f"Is {END} it?"
    ids, stop = ids_of(speech, f"one {END} two"), f"{END} t"
    ids = next(ids[:n] for n in range(len(ids)) if stop in speech.tokenizer.decode(ids[:n]))
    assert heard(speech, ids, stop=(stop,))["content"].strip() == "one"


def test_the_text_of_any_ids_is_the_tokenizers(speech):
    """With its signs spelled out, whatever the ids."""
    import random

    tokenizer, rng = speech.tokenizer, random.Random(0)
    special = sorted(tokenizer.special_ids)
    for _ in range(50):
        ids = [rng.choice([rng.randrange(tokenizer.vocab_size), rng.choice(special)]) for _ in range(12)]
        ids.append(97)  # no stop id at the end
        text = signs.signed_text(ids, tokenizer)
        assert signs.spelled_signs(text, tokenizer) == tokenizer.decode(ids, skip_specials=False)
        plain = [id for id in ids if id not in tokenizer.special_ids]
        if "\ufffd" not in text:
            assert signs.without_signs(text) == tokenizer.decode(plain)


def test_a_sign_is_no_text():
    for id in (0, 5, 1023, 1024, 163_586, 2**20 - 1):
        sign = signs.sign_of(id)
        assert signs.SIGN.fullmatch(sign) and signs.without_signs(f"a{sign}b") == "ab"
        assert sign.encode("utf-16-be", "surrogatepass").decode("utf-16-be") == chr(0x10000 + id)
        assert signs.spelled_signs(sign, SimpleNamespace(token_text=str)) == str(id)
        with pytest.raises(UnicodeEncodeError):
            sign.encode()
