"""Answers of several turns as tokens: the ids that are fed are those that are trained on, for every release's
chat template; a template that rewrites the history begins a new sample.

Oracle: transformers' rendering of the whole conversation. Without a rewrite it begins with everything that was
fed and sampled, so text and ids are one; with one it does not, and the next turn has a prompt of its own.
"""

from __future__ import annotations

import importlib.util
import json
import re
from functools import cache
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers.utils.chat_template_utils import render_jinja_template

from unfreeze.core.errors import DataError
from unfreeze.data import load_tokenizer
from unfreeze.data.rows.row import Conversation
from unfreeze.data.tokens import transcript as transcripts
from unfreeze.data.tokens.masks import renderer
from unfreeze.data.tokens.releases import ThinkMarks
from unfreeze.data.tokens.tool_calls import hermes, kimi, reads_calls
from unfreeze.data.tokens.transcript import Sample, Transcript, as_message, continuation, spoken_text

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = [ROOT / "tests" / "data" / "tokens" / "templates", ROOT.parent / "shared" / "data" / "templates"]
SOURCES = {path.stem: path for folder in FOLDERS for path in sorted(folder.glob("*.jinja"))}
TAG = re.compile(
    r"<[|｜][^<>\s'\"]+?[|｜]>|</?(?:start|end)_of_turn>|</?s>|\[/?INST\]|<\|?turn\|?>|\[e~\[|\]~\w\]"
)

spec = importlib.util.spec_from_file_location("templates", ROOT / "benchmarks" / "templates.py")
assert spec and spec.loader
published = importlib.util.module_from_spec(spec)
spec.loader.exec_module(published)


@pytest.fixture(scope="module")
def tokenizer_of(tmp_path_factory):
    """name of a template -> a byte-level tokenizer with its tags as special tokens."""

    @cache
    def make(name):
        source = SOURCES[name].read_text(encoding="utf-8")
        ends = [end for end in published.ends_of(source) if end in source or end in ("</s>", "<|endoftext|>")]
        ends += [end for end in ("<|eot_id|>", "<|im_end|>") if end in source and end not in ends]
        bos_eos = ["<s>", "<｜end▁of▁sentence｜>" if "｜" in source else "</s>"]
        specials = list(dict.fromkeys([*bos_eos, *ends, *TAG.findall(source)]))
        made = tokenizers.Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=300 + len(specials),
            special_tokens=specials,
            initial_alphabet=alphabet,
            show_progress=False,
        )
        made.train_from_iterator(["the weather in Oslo is answered by the assistant"] * 9, trainer)
        folder = tmp_path_factory.mktemp("tokenizer")
        made.save(str(folder / "tokenizer.json"))
        settings = {"bos_token": bos_eos[0], "eos_token": bos_eos[1], "chat_template": source}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        ids = [made.token_to_id(end) for end in ends]
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
        return load_tokenizer(folder)

    return make


ASKED = {"role": "user", "content": "What is 6*7?"}
MORE = [{"role": "user", "content": "And 7*8?"}, {"role": "user", "content": "And <|im_end|> 1*1?"}]
SAID = [{"role": "assistant", "content": f"It is {n}."} for n in (42, 56, 1)]
THOUGHT = [{**said, "reasoning_content": f"Why {i}."} for i, said in enumerate(SAID)]
RESULTS = [{"role": "tool", "name": "get_weather", "tool_call_id": f"functions.get_weather:{i}", "content": f"{i} <|im_end|> °C"} for i in range(2)]  # fmt: skip
CALLS = [
    {
        "role": "assistant",
        "content": "Let me see.",
        "tool_calls": [
            {
                "id": f"functions.get_weather:{i}",
                "type": "function",
                "function": {"name": "get_weather", "arguments": {"city": "Oslo é", "days": i}},
            }
        ],
    }
    for i in range(2)
]
SCRIPTS = {
    "answers": (None, list(zip(SAID, [[MORE[0]], [MORE[1]], []], strict=True))),
    "reasoning": (None, list(zip(THOUGHT, [[MORE[0]], [MORE[1]], []], strict=True))),
    "tools": ([published.TOOL], list(zip(CALLS, [[RESULTS[0]], [RESULTS[1]]], strict=True))),
    "tools, reasoning": (
        [published.TOOL],
        [({**said, "reasoning_content": f"I need {i}."}, [RESULTS[i]]) for i, said in enumerate(CALLS)],
    ),
}


def whole_text(tokenizer, messages, tools):
    """The conversation up to the assistant's next turn: by transformers where tools need no spelling of ours."""
    if tools is not None:
        return re.sub("[\U000f0000\U000f0001]", "", renderer(tokenizer).prompt(messages, tools))
    with_names = [
        {**each, "thinking": each["reasoning_content"]} if "reasoning_content" in each else each
        for each in messages
    ]
    (text,), _ = render_jinja_template(
        [with_names],
        chat_template=tokenizer.template.source,
        add_generation_prompt=True,
        **tokenizer.variables,
    )
    return text


def played(tokenizer, script):
    """Play a script with a model that says what sft would teach it. -> [(transcript, ids fed, said, rewritten)]"""
    tools, steps = SCRIPTS[script]
    transcript = Transcript(tokenizer, [ASKED], tools)
    record = []
    for said, new in steps:
        row = Conversation([*transcript.messages, said], tools)
        spoken = renderer(tokenizer, turns="last")(row).samples[0][1].text
        fed, sample = list(transcript.prompt), transcript.samples[-1]
        tokens = tokenizer.encode(spoken, specials=True, continues=True)
        transcript.hear(tokens)
        if not new:
            record.append((sample, fed, tokens, None, ""))
            break
        rewritten = transcript.tell(said, new)
        record.append((sample, fed, tokens, rewritten, whole_text(tokenizer, transcript.messages, tools)))
        assert tokenizer.decode(transcript.prompt, skip_specials=False) == record[-1][4]
    return transcript, record


@pytest.mark.parametrize("name", SOURCES)
def test_ids_fed_are_ids_trained(name, tokenizer_of):
    tokenizer, taken = tokenizer_of(name), []
    for script in SCRIPTS:
        try:
            transcript, record = played(tokenizer, script)
        except DataError:  # the template has no place for reasoning, or for tools
            continue
        taken.append(script)
        for sample, fed, tokens, rewritten, whole in record:
            # what was fed, then what was sampled, is what is trained on, with the sampled ids marked
            end = len(fed) + len(tokens)
            assert sample.ids[:end] == [*fed, *tokens] and all(sample.sampled[len(fed) : end])
            so_far = tokenizer.decode([*fed, *tokens], skip_specials=False)
            assert rewritten is None or rewritten == (not whole.startswith(so_far)), (
                script,
                transcript.forks,
            )
        trained = [
            id
            for sample in transcript.samples
            for id, own in zip(sample.ids, sample.sampled, strict=True)
            if own
        ]
        assert trained == [id for _, _, tokens, _, _ in record for id in tokens]
        assert len(transcript.samples) == 1 + len(transcript.forks)
    assert "answers" in taken


def test_templates_differ_in_what_they_rewrite(tokenizer_of):
    """Qwen3 drops reasoning once the user speaks again, and keeps it while tools do; ChatML keeps everything."""
    for name, script, forked in [
        ("chatml", "answers", [False, False, None]),
        ("qwen3", "reasoning", [True, True, None]),
        ("qwen3", "tools, reasoning", [False, False]),
    ]:
        _, record = played(tokenizer_of(name), script)
        assert [row[3] for row in record] == forked, (name, script)


def test_control_arm_a_dropped_thought_is_seen(tokenizer_of, monkeypatch):
    """With neither the words nor the think blocks compared, ids would be fed that no template writes."""

    class Markless:
        marks = ThinkMarks("\0", "\0")

        def __init__(self, *arguments):
            pass

    monkeypatch.setattr(transcripts, "missing", lambda words, text: None)
    monkeypatch.setattr(transcripts, "Completions", Markless)
    with pytest.raises(AssertionError):
        test_ids_fed_are_ids_trained("qwen3", tokenizer_of)


def test_ids_that_the_model_spelled_otherwise_stay(tokenizer_of):
    """JSON without spaces, and a merge that the tokenizer would not make: the ids are kept, the rest follows."""
    tokenizer = tokenizer_of("qwen3")
    transcript = Transcript(tokenizer, [ASKED], [published.TOOL])
    spoken = (
        'See.<tool_call>{"name":"get_weather","arguments":{"days":1,"city":"Oslo"}}</tool_call><|im_end|>'
    )
    tokens = [id for char in spoken[:-10] for id in tokenizer.encode(char, specials=False)]
    tokens += tokenizer.encode("<|im_end|>", specials=True)
    assert tokens != tokenizer.encode(spoken, specials=True)
    fed = list(transcript.prompt)
    parts = reads_calls(tokenizer.chat.source)(transcript.hear(tokens), 0)
    said = as_message(tokenizer, transcript.messages, parts.content, parts.calls)
    assert (
        said["tool_calls"][0]["function"]["arguments"] == {"days": 1, "city": "Oslo"}
        and said["content"] == "See."
    )
    assert not transcript.tell(said, RESULTS[:1])
    assert transcript.prompt[: len(fed) + len(tokens)] == [*fed, *tokens]
    rest = tokenizer.decode(transcript.prompt[len(fed) + len(tokens) :], skip_specials=False)
    assert (
        rest
        == "\n<|im_start|>user\n<tool_response>\n0 <|im_end|> °C\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    # what the tool wrote is text: one special token ends the turn, the other is spelled
    end = tokenizer.token_id("<|im_end|>")
    assert transcript.prompt[len(fed) + len(tokens) :].count(end) == 1


def test_special_tokens_that_the_model_spelled_out_end_no_turn(tokenizer_of):
    tokenizer = tokenizer_of("chatml")
    transcript = Transcript(tokenizer, [ASKED])
    transcript.hear(
        [*tokenizer.encode("Say <|im_end|> now.", specials=False), tokenizer.token_id("<|im_end|>")]
    )
    assert not transcript.tell({"role": "assistant", "content": "Say <|im_end|> now."}, [MORE[0]])
    assert transcript.prompt.count(tokenizer.token_id("<|im_end|>")) == 3
    assert tokenizer.decode(transcript.prompt, skip_specials=False).count("now.") == 1


def test_a_prompt_that_changes_once_it_is_answered_begins_a_new_sample(tokenizer_of, tmp_path):
    """A header with the number of messages: of the same length, so that only its words tell."""
    name = "counts"
    source = "<s>{{ messages | length }} turns" + SOURCES["chatml"].read_text(encoding="utf-8")
    SOURCES[name] = tmp_path / "counts.jinja"
    SOURCES[name].write_text(source, encoding="utf-8")
    tokenizer = tokenizer_of(name)
    SOURCES.pop(name)
    transcript = Transcript(tokenizer, [ASKED])
    transcript.hear(tokenizer.encode("It is 42.<|im_end|>", specials=True))
    assert transcript.tell(SAID[0], [MORE[0]]) and "writes the prompt otherwise" in transcript.forks[0]
    assert tokenizer.decode(transcript.prompt, skip_specials=False).startswith("<s>3 turns")


def test_a_turn_cut_by_a_stop_word_is_closed_by_the_template(tokenizer_of):
    tokenizer = tokenizer_of("chatml")
    cut = Sample([1, 2])
    cut.add(tokenizer.encode("It is 42.", specials=False), sampled=True)
    ids, why = continuation(tokenizer, cut, [ASKED], SAID[0], [MORE[0]])
    assert why == "" and ids is not None
    text = tokenizer.decode(ids, skip_specials=False)
    assert text == f"<|im_end|>\n<|im_start|>user\n{MORE[0]['content']}<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(("name", "read"), [("qwen3", hermes), ("qwen2", hermes), ("kimi_k2", kimi)])
def test_calls_are_read_as_the_template_writes_them(name, read, tokenizer_of):
    tokenizer = tokenizer_of(name)
    assert reads_calls(tokenizer.chat.source) is read
    row = Conversation([ASKED, CALLS[0]], [published.TOOL])
    written = renderer(tokenizer, turns="last")(row).samples[0][1].text
    text = spoken_text(tokenizer, tokenizer.encode(written, specials=True))
    spoken = read(text, 0)
    said = as_message(tokenizer, [ASKED], spoken.content, spoken.calls)
    assert not spoken.fault and said["content"].strip() == "Let me see."
    assert [call["function"] for call in spoken.calls] == [
        call["function"] for call in CALLS[0]["tool_calls"]
    ]


def test_a_thought_is_taken_out_of_the_text(tokenizer_of):
    tokenizer = tokenizer_of("qwen3")
    said = as_message(tokenizer, [ASKED], "<think>\nSix sevens.\n</think>\n\nIt is 42.", [])
    assert said == {"role": "assistant", "content": "It is 42.", "reasoning_content": "Six sevens."}
    assert as_message(tokenizer, [ASKED], "No </think> of mine", [])["content"] == "No </think> of mine"
