"""A tokenizer in a GGUF: transformers' reading of the file, SentencePiece's own format, and llama.cpp's fingerprints."""

import json
import struct

import gguf
import pytest
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers import models as kinds

from tests.compress.gguf.made import QWEN2, ROWS, byte_level, written
from unfreeze.compress.gguf import pretokenizers, vocabulary
from unfreeze.compress.gguf.file import write_gguf
from unfreeze.compress.gguf.vocabulary import sentencepieces, vocabulary_of
from unfreeze.core.errors import CheckpointError, ConfigError
from unfreeze.data.tokens.trained import RUN_ENCODED, split_pattern

TEXTS = [
    "the thing in 1 2 34 the",
    "这是一个测试。是",
    "for i in range(10):\n\n    print(i)\n",
    "I'm there, we'LL see",
    "привет, мир",
    "🙂👍🏽",
    "  spaces   and\ttabs \n",
]


def in_file(tmp_path, voc):
    path = tmp_path / "v.gguf"
    write_gguf(path, "qwen2", {"qwen2.context_length": 64}, [], [voc.add_to])
    return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}


def test_byte_level_bpe(tmp_path):
    folder = byte_level(tmp_path / "t")
    voc = vocabulary_of(folder, ROWS, "qwen2")
    table = in_file(tmp_path, voc)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens, types = table["tokenizer.ggml.tokens"], table["tokenizer.ggml.token_type"]
    assert len(tokens) == len(types) == ROWS
    assert tokens[: tokenizer.get_vocab_size()] == [
        tokenizer.id_to_token(id) for id in range(tokenizer.get_vocab_size())
    ]
    kind = dict(zip(tokens, types, strict=True))
    assert kind["<|im_end|>"] == gguf.TokenType.CONTROL and kind["<think>"] == gguf.TokenType.USER_DEFINED
    assert kind["Ġthe"] == gguf.TokenType.NORMAL and kind[f"[PAD{ROWS - 1}]"] == gguf.TokenType.UNUSED
    assert table["tokenizer.ggml.merges"][:3] == ["t h", "th e", "Ġ the"]
    assert table["tokenizer.ggml.pre"] == "qwen2" and table["tokenizer.ggml.model"] == "gpt2"
    assert table["tokenizer.ggml.eos_token_id"] == tokenizer.token_to_id("<|im_end|>")
    assert table["tokenizer.ggml.add_bos_token"] is False and table["tokenizer.ggml.add_eos_token"] is False
    assert "<|im_start|>" in table["tokenizer.chat_template"]
    assert voc.stops == ["<|im_end|>"] and "NFC" in voc.remarks[0]


def test_transformers_reads_the_same_tokens_from_the_file(tmp_path):
    folder = byte_level(tmp_path / "t")
    voc = vocabulary_of(folder, ROWS, "qwen2")
    write_gguf(
        folder / "v.gguf", "qwen2", {"general.name": "t", "qwen2.context_length": 64}, [], [voc.add_to]
    )
    theirs = transformers.AutoTokenizer.from_pretrained(folder, gguf_file="v.gguf")
    ours = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in TEXTS:
        assert (
            theirs.encode(text, add_special_tokens=False) == ours.encode(text, add_special_tokens=False).ids
        )


def pieces(folder, **settings):
    """A SentencePiece-like BPE, as Llama 2's and Gemma's tokenizer.json."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": byte + 3 for byte in range(256)}
    for text in ["▁", *"abcdth", "th", "▁a", "ab", "▁ab"]:
        vocab[text] = len(vocab)
    merges = [("t", "h"), ("▁", "a"), ("a", "b"), ("▁a", "b")]
    tokenizer = Tokenizer(
        kinds.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in ("<s>", "</s>")]
    )
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True}
    return written(tokenizer, folder, {**names, **settings})


def test_sentencepiece_has_scores_in_the_order_of_the_merges(tmp_path):
    folder = pieces(tmp_path / "s")
    voc = vocabulary_of(folder, 300, "llama")
    assert voc.model == "llama" and voc.pre == "default" and voc.merges is None and voc.scores is not None
    score = dict(zip(voc.tokens, voc.scores, strict=True))
    assert score["th"] > score["▁a"] > score["ab"] > score["▁ab"] > score["c"]
    kind = dict(zip(voc.tokens, voc.types, strict=True))
    assert (kind["<unk>"], kind["<s>"], kind["<0x0A>"]) == (
        gguf.TokenType.UNKNOWN,
        gguf.TokenType.CONTROL,
        gguf.TokenType.BYTE,
    )
    assert voc.add_bos and voc.add_space and voc.ids == {"bos": 1, "eos": 2, "unknown": 0}


def test_scores_of_tokenizer_model_are_taken(tmp_path):
    from transformers.utils import sentencepiece_model_pb2_new as proto

    message = proto.ModelProto()
    for text, score in (("th", -1.5), ("▁ab", -0.25), ("x", 0.0)):
        message.pieces.add(piece=text, score=score)
    message.trainer_spec.model_type = 2
    content = message.SerializeToString()
    assert list(sentencepieces(content)) == [("th", -1.5), ("▁ab", -0.25), ("x", 0.0)]
    folder = pieces(tmp_path / "s")
    (folder / "tokenizer.model").write_bytes(content)
    voc = vocabulary_of(folder, 300, "llama")
    assert voc.scores[voc.tokens.index("th")] == -1.5 and voc.scores[voc.tokens.index("ab")] == -2.0
    for damaged in (content[:-3], b"\x07", struct.pack("<I", 0xFFFFFFFF)):
        with pytest.raises(CheckpointError, match="not a SentencePiece model"):
            list(sentencepieces(damaged))


def test_gemma_4_has_merges(tmp_path):
    voc = vocabulary_of(pieces(tmp_path / "s"), 300, "gemma4")
    assert voc.model == voc.pre == "gemma4" and voc.scores is None and voc.merges[0] == "t h"


def test_rules_are_compared_word_for_word(tmp_path):
    llama3 = QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|")
    assert vocabulary_of(byte_level(tmp_path / "a", llama3), ROWS, "llama").pre == "dbrx"
    for number, rules in enumerate((QWEN2 + r"|\.", split_pattern(RUN_ENCODED))):
        folder = byte_level(tmp_path / f"u{number}", rules)
        with pytest.raises(ConfigError, match="does not know how this tokenizer splits words") as raised:
            vocabulary_of(folder, ROWS, "llama")
        assert "unfreeze serve" in raised.value.next


def test_gpt_2_s_and_starcoder_s_rules(tmp_path):
    file = json.loads((byte_level(tmp_path / "t") / "tokenizer.json").read_text())
    byte = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True, "trim_offsets": True}
    digits = {"type": "Digits", "individual_digits": True}
    for steps, name in (([byte], "gpt-2"), ([digits, byte], "starcoder")):
        now = {**file, "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps}}
        assert pretokenizers.BY_RULES[pretokenizers._rules(now)] == name
    for wrong in (
        {**file, "normalizer": {"type": "Lowercase"}},
        {**file, "pre_tokenizer": {**byte, "add_prefix_space": True}},
        {**file, "pre_tokenizer": None},
    ):
        assert pretokenizers._rules(wrong) not in pretokenizers.BY_RULES


def test_a_known_fingerprint_counts_before_the_rules(tmp_path, monkeypatch):
    folder = byte_level(tmp_path / "t", QWEN2 + r"|\.")
    print_ = pretokenizers.fingerprint(Tokenizer.from_file(str(folder / "tokenizer.json")))
    monkeypatch.setattr(pretokenizers, "BY_FINGERPRINT", {print_: "tekken"})
    assert vocabulary_of(folder, ROWS, "llama").pre == "tekken"
    assert len(print_) == 64


def test_what_is_not_a_vocabulary_is_refused(tmp_path):
    (tmp_path / "none").mkdir()
    with pytest.raises(ConfigError, match=r"none has no tokenizer\.json"):
        vocabulary_of(tmp_path / "none", 64, "llama")
    with pytest.raises(ConfigError, match="ids up to"):
        vocabulary_of(byte_level(tmp_path / "t"), 200, "llama")
    words = Tokenizer(kinds.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(ConfigError, match="of kind WordLevel"):
        vocabulary_of(written(words, tmp_path / "w", {}), 8, "llama")


def test_further_ends_of_an_answer_are_carried(tmp_path):
    folder = byte_level(tmp_path / "t")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    other = tokenizer.token_to_id("<|endoftext|>")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [other]}))
    voc = vocabulary_of(folder, ROWS, "qwen2")
    assert voc.ids["eot"] == other and set(voc.stops) == {"<|endoftext|>", "<|im_end|>"}
    assert vocabulary.CONTROL == gguf.TokenType.CONTROL
