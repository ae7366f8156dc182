"""A tokenizer of one's own: without loss on any text, the same twice, read alike by transformers, with a template whose
mask is transformers' mask. Each guard has an arm in which it fails."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers
from transformers import AutoTokenizer

from unfreeze import cli
from unfreeze.core.errors import ConfigError, DataError
from unfreeze.core.files import write_folder
from unfreeze.data import Conversation, Encoder, Text, load_tokenizer
from unfreeze.data.tokens import trained
from unfreeze.data.tokens.corpus import Corpus
from unfreeze.data.tokens.tool_calls import hermes, reads_calls

CHINESE = (
    "学而时习之不亦说乎有朋自远方来不亦乐乎人不知而不愠不亦君子乎",
    "知识就是力量学习使人进步语言模型从文字里学习下一个字是什么",
    "今天天气很好我们去公园散步孩子们在湖边放风筝老人们在树下下棋",
)
ENGLISH = "The tokenizer learns which pairs of pieces occur often, and joins them one by one. "
CODE = "def add(a, b):\n    return {'sum': a + b}[0]  # 12345\n"
ROWS = [
    {"text": f"{a}。{b}，{i}！"} for i, (a, b) in enumerate((x, y) for x in CHINESE for y in CHINESE)
] * 4 + [{"text": ENGLISH * 3 + str(i)} for i in range(12)]
ROWS += [{"text": CODE * 4 + f"x{i} = [{i}]"} for i in range(12)]
ROWS += [
    {
        "messages": [
            {"role": "user", "content": f"How many are {i}?"},
            {
                "role": "assistant",
                "content": f"They are {i}, 一共{i}个.",
                "reasoning_content": "Let me count.",
            },
        ]
    }
    for i in range(8)
]
VOCAB = 512
ANYTHING = st.text(st.characters(exclude_categories=["Cs"]))
ODD = (
    "🙂👩‍👩‍👧‍👦🏳️‍🌈❤️",  # emoji joined and with variation selectors
    "𠮷𪚥𰻞",  # extensions of CJK
    "\u0301\u0327 e\u0301 \u200d\ufe0f",  # marks without a letter
    "\0\x01\x7f\ufeff\uffff\U0010ffff",
    "  \t\r\n\n \u3000\u2028\u00a0 x  ",
    "กำลังทดสอบภาษาไทย ひらがな漢字カタカナ 한국어",
    "<|im_end|><think></tool_call><|reserved_3|>",
    "1234567890٣٤٥" + "a" * 100 + "汉" * 300 + "=" * 100 + " " * 100,
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def folder(corpus) -> Path:
    return made(corpus, corpus.parent / "tok")


@pytest.fixture(scope="module")
def own(folder):
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def theirs(folder):
    return AutoTokenizer.from_pretrained(folder)


def made(corpus: Path, out: Path, *more: str) -> Path:
    words = ["tokenizer", "train", str(corpus), "--vocab", str(VOCAB), "--out", str(out), "--reserved", "8"]
    assert cli.main([*words, "--quiet", "--held-out", "0.2", *more]) == 0
    return out


def lost(tokenizer: tokenizers.Tokenizer, text: str) -> bool:
    return (
        tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids, skip_special_tokens=False)
        != text
    )


# any text


@settings(max_examples=120, deadline=None)
@given(ANYTHING)
@example("".join(ODD))
@example(ODD[3])
def test_any_text_comes_back(own, text):
    for specials in (False, True):
        ids = own.encode(text, specials=specials)
        assert own.decode(ids, skip_specials=False) == text
        assert b"".join(own.bytes_of(id) for id in ids) == text.encode()
    assert not set(own.encode(text, specials=False)) & own.special_ids


def test_every_character_of_unicode_comes_back(own):
    """All of the planes with letters and emoji, and every 61st of the others, which are almost empty."""
    planes = [range(0, 0xD800), range(0xE000, 0x20000), range(0x20000, 0x33480), range(0x33480, 0x110000, 61)]
    for plane in planes:
        for first in range(0, len(plane), 4096):
            text = "".join(map(chr, plane[first : first + 4096]))
            assert own.decode(own.encode(text, specials=False), skip_specials=False) == text


def test_control_arm_a_split_that_drops_a_character_is_noticed(folder):
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert not any(lost(backend, text) for text in ODD)
    drops = pre_tokenizers.Split(Regex(r"\p{Mn}|\x00"), "removed")
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([drops, spelled])
    assert [i for i, text in enumerate(ODD) if lost(backend, text)] == [0, 2, 3, 5]


# words


def longest_word(splitter, text: str) -> int:
    return max(end - begin for _, (begin, end) in splitter.pre_tokenize_str(text))


def test_no_word_is_as_long_as_a_sentence():
    sentence = "".join(CHINESE) * 5
    assert longest_word(trained.pre_tokenizer(trained.RUN_TRAINED), sentence) == trained.RUN_TRAINED
    assert longest_word(trained.pre_tokenizer(trained.RUN_ENCODED), sentence) == trained.RUN_ENCODED
    for char in "aé1=\u0301 \n\u0e01":
        assert longest_word(trained.pre_tokenizer(trained.RUN_ENCODED), char * 1000) <= 64


def test_control_arm_a_plain_split_makes_words_of_sentences():
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert longest_word(plain, "".join(CHINESE) * 5) == len("".join(CHINESE) * 5)


def test_words_are_cut_as_readers_expect():
    splitter = pre_tokenizers.Split(Regex(trained.split_pattern(4)), "isolated")
    text = "Hello world, 你好世界和平 x.append(1234567)\n\n    return\n"
    words = [word for word, _ in splitter.pre_tokenize_str(text)]
    assert words == [
        *("Hello", " world", ",", " ", "你好世界", "和平", " x", ".append", "(", "123", "456", "7"),
        *(")\n\n", "   ", " return", "\n"),
    ]


def test_tokens_cross_the_cuts_of_training(own):
    """Runs are cut every 4 characters in training and not in encoding, so an offset changes few tokens."""
    run = CHINESE[2][2:]
    whole = own.encode(run, specials=False)
    cut = [id for i in range(0, len(run), 4) for id in own.encode(run[i : i + 4], specials=False)]
    shifted = own.encode("不" + run, specials=False)
    assert len(whole) < len(cut) and shifted[-4:] == whole[-4:]
    assert max(len(own.bytes_of(id)) for id in range(own.base_size)) <= trained.LONGEST_TOKEN


# the same twice, and as transformers has it


def test_the_same_files_and_seed_give_the_same_bytes(corpus, folder, tmp_path):
    """In another process, with another number of threads."""
    words = [
        "tokenizer",
        "train",
        str(corpus),
        "--vocab",
        str(VOCAB),
        "--out",
        str(tmp_path / "tok"),
        "--reserved",
        "8",
    ]
    line = [sys.executable, "-m", "unfreeze", *words, "--quiet", "--held-out", "0.2"]
    subprocess.run(line, env={**os.environ, "RAYON_NUM_THREADS": "1"}, check=True)
    assert contents(tmp_path / "tok") == contents(folder)


def test_control_arm_another_seed_gives_other_bytes(corpus, folder, tmp_path):
    assert contents(made(corpus, tmp_path / "tok", "--seed", "1")) != contents(folder)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@settings(max_examples=100, deadline=None)
@given(ANYTHING)
@example("".join(ODD))
def test_transformers_gives_the_same_ids(own, theirs, text):
    assert theirs(text, add_special_tokens=False)["input_ids"] == own.encode(text, specials=True)
    assert theirs(text)["input_ids"] == [own.bos_id, *own.encode(text, specials=True)]


def test_sizes_and_special_tokens(own, theirs, folder):
    assert own.vocab_size == own.named_size == len(theirs) == VOCAB
    assert own.base_size == theirs.vocab_size == VOCAB - len(trained.specials_of(8))
    assert [own.token_text(id) for id in range(own.base_size, VOCAB)] == trained.specials_of(8)
    assert own.bos_id == theirs.bos_token_id and own.eos_id == theirs.eos_token_id and own.add_bos
    assert own.eos_ids == {own.eos_id, own.token_id("<|im_end|>")}
    assert theirs.pad_token_id == own.token_id("<|pad|>") not in own.eos_ids
    assert own.token_id("<think>") not in own.special_ids


# the chat template

CALL = {"name": "look", "arguments": {"query": 'a "b" 北京\nd', "count": 7}}
TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}},
}
CHAT = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "今天 <|im_end|> how many?"},
    {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "Let me count.",
        "tool_calls": [
            {"id": "a", "type": "function", "function": CALL},
            {"id": "b", "type": "function", "function": {"name": "look", "arguments": {}}},
        ],
    },
    {"role": "tool", "tool_call_id": "a", "content": "seven"},
    {"role": "tool", "tool_call_id": "b", "content": "none"},
    {"role": "assistant", "content": "7 个"},
    {"role": "user", "content": "Thanks."},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": CALL}]},
]
PLAIN = [{**CHAT[1], "content": "How many?"}, {"role": "assistant", "content": "\n 7 个 "}]


@pytest.mark.parametrize(("messages", "tools"), [(CHAT[:1] + PLAIN, None), (PLAIN, [TOOL]), (CHAT, [TOOL])])
def test_the_mask_is_that_of_transformers(own, theirs, messages, tools):
    (example,) = Encoder(own, 1000)(Conversation(messages, tools)).examples
    quoted = [
        {**m, "content": (m["content"] or "").replace("<|im_end|>", "<|im" + "_end|>")} for m in messages
    ]
    with_mask = theirs.apply_chat_template(
        quoted, tools=tools, return_dict=True, return_assistant_tokens_mask=True
    )
    text = theirs.apply_chat_template(quoted, tools=tools, tokenize=False)
    assert own.decode(example.tokens, skip_specials=False) == text
    ours = supervised(own, example.tokens, example.weights)
    assert ours == supervised(own, with_mask["input_ids"], with_mask["assistant_masks"])
    if messages is not CHAT:  # its user types a special token, which transformers takes for one
        assert list(example.tokens) == with_mask["input_ids"]


def supervised(tokenizer, ids, weights) -> list[str]:
    """The texts of the stretches with loss."""
    texts, last = [], 0.0
    for id, weight in zip(ids, weights, strict=True):
        if weight and not last:
            texts.append([])
        if weight:
            texts[-1].append(id)
        last = weight
    return [tokenizer.decode(ids, skip_specials=False) for ids in texts]


def test_a_prompt_is_the_beginning_of_what_is_taught(own):
    prompt = own.chat.render(CHAT[:2], add_generation_prompt=True)
    whole = own.chat.render(CHAT[:3])
    assert whole.startswith(prompt) and whole[len(prompt) :].startswith(
        "<think>\nLet me count.\n</think>\n\nI look.\n"
    )


def test_a_content_in_parts_is_the_text_of_its_parts(own, theirs):
    def in_parts(text: str) -> list[dict]:
        return [{"type": "text", "text": text[:4]}, {"type": "text", "text": text[4:]}]

    parts = [{**turn, "content": in_parts(turn["content"])} for turn in PLAIN]
    assert own.chat.render(parts) == own.chat.render(PLAIN)
    assert theirs.apply_chat_template(parts, tokenize=False) == own.chat.render(PLAIN)


def test_calls_are_read_from_an_answer(own):
    answer = own.chat.render([CHAT[1], CHAT[2]], tools=[TOOL]).rpartition("assistant\n")[2]
    assert reads_calls(own.chat.source) is hermes
    spoken = hermes(answer)
    assert not spoken.fault and [call["function"] for call in spoken.calls] == [
        CALL,
        {"name": "look", "arguments": {}},
    ]


def test_control_arm_a_template_that_loses_a_call_is_refused(folder, tmp_path):
    files = {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()}
    files["tokenizer_config.json"] = files["tokenizer_config.json"].replace("message.tool_calls or []", "[]")
    write_folder(tmp_path / "tok", files, "a tokenizer")
    with pytest.raises(DataError, match=r"tool_calls\[0\]"):
        Encoder(load_tokenizer(tmp_path / "tok"), 1000)(Conversation(CHAT, [TOOL]))


def test_a_text_has_its_ends(own):
    (example,) = Encoder(own, 100)(Text("今天")).examples
    assert example.tokens[0] == own.bos_id and example.tokens[-1] == own.eos_id


# what is measured


def test_bytes_per_token_are_counted_from_bytes(corpus, folder, theirs):
    """Held-out documents, encoded by transformers; a document's bytes are those of its UTF-8."""
    read = Corpus([corpus], (), 0.2, 0)
    assert read.documents == 0 and sum(1 for _ in read.texts()) == read.documents
    assert 0 < len(read.held) < len(ROWS) and read.documents + len(read.held) == len(ROWS)
    facts = json.loads((folder / "made.json").read_text(encoding="utf-8"))
    assert facts["documents"] == read.documents and set(facts["held_out"]) >= {"zh", "en", "code"}
    counts = facts["held_out"].values()
    ids = [theirs(text, add_special_tokens=False)["input_ids"] for text in read.held]
    assert sum(count["tokens"] for count in counts) == sum(map(len, ids))
    assert sum(count["bytes"] for count in counts) == sum(len(text.encode()) for text in read.held)
    assert all(count["bytes_per_token"] == count["bytes"] / count["tokens"] for count in counts)


def test_control_arm_bytes_of_decoded_tokens_are_wrong(theirs):
    """One token at a time, a part of a character becomes U+FFFD, which has 3 bytes."""
    text = "𠮷🙂"
    ids = theirs(text, add_special_tokens=False)["input_ids"]
    assert sum(len(theirs.decode([id]).encode()) for id in ids) != len(text.encode())


def test_a_measured_document_is_never_trained_on(tmp_path):
    path = tmp_path / "corpus.jsonl"
    lines = [json.dumps({"text": f"document {i % 40}"}) + "\n" for i in range(80)]  # each twice
    path.write_text("".join(lines), encoding="utf-8")
    read = Corpus([path], (), 0.3, 3)
    trained_on = set(read.texts())
    assert read.held and not trained_on & set(read.held) and len(trained_on | set(read.held)) == 40


# refusals


@pytest.mark.parametrize(("vocab", "count"), [(264, 0), (328, 64), (1, 0)])
def test_a_vocabulary_below_bytes_and_special_tokens_is_refused_with_the_sum(vocab, count):
    with pytest.raises(
        ConfigError, match=rf"256 bytes \+ 9 special tokens \+ {count} reserved = {265 + count}"
    ):
        trained.merges_in(vocab, count)
    assert trained.merges_in(265 + count, count) == 0


def test_a_vocabulary_of_bytes_alone_is_one(tmp_path):
    path = tmp_path / "one.txt"
    path.write_text("one line", encoding="utf-8")
    result = trained.train_bpe(Corpus([path], (), 0, 0), 265, 0)
    assert result.merges == 0 and result.sizes == {"base": 256, "total": 265, "padded": 320}


def test_a_pair_that_occurs_once_is_not_merged(tmp_path):
    path = tmp_path / "one.txt"
    path.write_text("abcdefgh ab", encoding="utf-8")
    with pytest.raises(DataError, match=r"give 1: no other pair of tokens occurs twice"):
        trained.train_bpe(Corpus([path], (), 0, 0), 300, 0)


def test_a_corpus_of_one_line_says_which_vocabulary_fits(tmp_path):
    path = tmp_path / "one.txt"
    path.write_text("ab ab abc abc\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"needs 247 merges; 1 document \(13 B\) give (\d+)") as error:
        trained.train_bpe(Corpus([path], (), 0.5, 0), 512, 0)
    fits = int(error.value.next.split()[1].rstrip(","))
    assert trained.train_bpe(Corpus([path], (), 0.5, 0), fits, 0).sizes["total"] == fits
    with pytest.raises(DataError):  # and no larger one
        trained.train_bpe(Corpus([path], (), 0.5, 0), fits + 1, 0)


def test_an_error_of_a_row_is_raised_as_it_is(tmp_path):
    path = tmp_path / "bad.txt"
    path.write_bytes(b"fine\n\nnot \xff fine\n")
    with pytest.raises(DataError, match=r"bad.txt, row 3: byte 5 \(0xff\) is not UTF-8"):
        trained.train_bpe(Corpus([path], (), 0, 0), 300, 0)
    skipped = Corpus([path], (), 0, 0, skip=True)
    trained.train_bpe(skipped, 265, 0)
    assert [bad.row for bad in skipped.bad] == [3]


def test_a_file_without_text_is_refused(tmp_path):
    path = tmp_path / "empty.txt"
    path.write_text("\n\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"there is no text in empty.txt"):
        trained.train_bpe(Corpus([path], (), 0, 0), 300, 0)


def test_ctrl_c_while_reading_stops_the_thread(tmp_path, monkeypatch):
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"text": "abc"}\n' * 1000, encoding="utf-8")
    read = Corpus([path], (), 0, 0)

    def interrupt(corpus, done):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match="nothing was written"):
        trained.train_bpe(read, 300, 0, progress=interrupt)
