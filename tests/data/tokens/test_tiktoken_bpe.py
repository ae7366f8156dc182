"""tiktoken.model read natively: equal to tiktoken itself, and to a byte-pair encoder written out by hand."""

import base64
import json
import random
import time
import unicodedata
from itertools import pairwise

import pytest
import regex
import tiktoken

from unfreeze.core.errors import CheckpointError
from unfreeze.data import load_tokenizer
from unfreeze.data.tokens.tiktoken_bpe import MAX_RUN, cut_long_runs, read_ranks

# Typed here, not imported: the oracle must not share the constant under test.
PATTERN = "|".join(
    [
        r"""[\p{Han}]+""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""\p{N}{1,3}""",
        r""" ?[^\s\p{L}\p{N}]+[\r\n]*""",
        r"""\s*[\r\n]+""",
        r"""\s+(?!\S)""",
        r"""\s+""",
    ]
)
GPT4_PATTERN = r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"""


def oracle(folder, pattern=PATTERN) -> tiktoken.Encoding:
    lines = (folder / "tiktoken.model").read_bytes().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line)}
    return tiktoken.Encoding("oracle", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})


def random_strings(count: int, seed: int) -> list[str]:
    """A third any code point, a third from scripts and blanks that meet in the pattern, a third words glued
    with punctuation."""
    rng = random.Random(seed)
    pools = [
        "abcXYZ",
        "àéÎßǅʰ",
        "中文漢字〇",
        "かなカナ한글",
        "0123٣४Ⅷ",
        " \t\n\r\u00a0\u3000",
        "'.,!?-_/<|>",
        "🙂👩‍👩‍👧\u0301",
        "'s'Re'LL",
    ]
    words = [
        "the",
        "Hello",
        "don't",
        "I'LL",
        "HTTPServer",
        "中文mixed",
        "2024",
        "\r\n",
        "  ",
        " x",
        "naïve",
        "\n\n\n",
        "<|im_end|>",
        "été'S",
    ]

    def anything() -> str:
        code = rng.randrange(0x110000)
        return chr(code) if not 0xD800 <= code <= 0xDFFF else "?"

    makers = [anything, lambda: rng.choice(rng.choice(pools)), lambda: rng.choice(words)]
    return ["".join(makers[i % 3]() for _ in range(rng.randrange(1, 40))) for i in range(count)]


def slow_bpe(text: str, ranks: dict[bytes, int]) -> list[int]:
    """Byte-pair encoding as the definition says: join the pair of lowest rank until none is left. Splits with
    the `regex` module."""
    ids = []
    for match in regex.finditer(PATTERN, text, flags=regex.V1):
        parts = [bytes([byte]) for byte in match.group().encode()]
        while True:
            pairs = [(ranks.get(a + b, 1 << 40), i) for i, (a, b) in enumerate(pairwise(parts))]
            rank, i = min(pairs, default=(1 << 40, 0))
            if rank == 1 << 40:
                break
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        ids += [ranks[part] for part in parts]
    return ids


def differences(folder, reference, strings) -> int:
    tokenizer = load_tokenizer(folder)
    return sum(tokenizer.encode(text, specials=False) != reference.encode_ordinary(text) for text in strings)


def test_real_file_equals_tiktoken_on_10000_random_unicode_strings(kimi_folder):
    assert (
        differences(kimi_folder, oracle(kimi_folder), without_ordinary_added(random_strings(10_000, seed=0)))
        == 0
    )


def test_small_file_equals_tiktoken_and_another_pattern_would_be_noticed(tiktoken_folder):
    folder, strings = tiktoken_folder(), random_strings(2_000, seed=1)
    assert differences(folder, oracle(folder), strings) == 0
    assert differences(folder, oracle(folder, GPT4_PATTERN), strings) > 50  # control arm: 69 of 2,000 differ


def without_ordinary_added(strings):
    return [text for text in strings if "tool_call" not in text]


@pytest.mark.parametrize("source", ["small", "real"])
def test_equals_byte_pair_encoding_by_hand(source, tiktoken_folder, request):
    folder = tiktoken_folder() if source == "small" else request.getfixturevalue("kimi_folder")
    ranks, tokenizer = read_ranks(folder / "tiktoken.model"), load_tokenizer(folder)
    for text in random_strings(300, seed=2):
        # `regex` and tiktoken carry different Unicode versions
        if unicodedata.is_normalized("NFC", text) and unassigned(text) == 0:
            assert tokenizer.encode(text, specials=False) == slow_bpe(text, ranks), ascii(text)


def unassigned(text: str) -> int:
    return sum(unicodedata.category(c) in ("Cn", "Co") or c == "ſ" for c in text)


def test_decoding_gives_the_text_back(tiktoken_folder):
    tokenizer = load_tokenizer(tiktoken_folder())
    for text in random_strings(500, seed=3):
        ids = tokenizer.encode(text, specials=False)
        assert tokenizer.decode(ids) == text
        stream = tokenizer.stream_decoder()
        pieces = [stream.push(id) for id in ids]
        assert "".join(pieces) + stream.finish() == text
        assert not any("\ufffd" in piece for piece in pieces) or "\ufffd" in text


def test_reserved_ids_follow_the_folder_and_not_a_fixed_number(tiktoken_folder):
    folder = tiktoken_folder(num_reserved=40)
    tokenizer = load_tokenizer(folder)
    ranks = len(read_ranks(folder / "tiktoken.model"))
    assert (tokenizer.base_size, tokenizer.vocab_size) == (ranks, ranks + 40)
    assert tokenizer.token_text(ranks + 2) == "<|im_end|>"
    assert tokenizer.token_text(ranks + 5) == f"<|reserved_token_{ranks + 5}|>"  # unnamed among the named
    assert tokenizer.encode(f"<|reserved_token_{ranks + 39}|>", specials=True) == [ranks + 39]
    # [EOS], and <|im_end|> with which the template ends a turn
    assert tokenizer.eos_ids == {ranks + 1, ranks + 2}


def test_real_special_ids(kimi_folder):
    tokenizer = load_tokenizer(kimi_folder)
    assert tokenizer.vocab_size == 163_840 and tokenizer.base_size == 163_584
    assert tokenizer.encode("<|im_user|>user<|im_middle|>", specials=True)[0] == 163_587
    assert tokenizer.token_text(163_600) == "<|reserved_token_163600|>"
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.eos_ids) == (163_584, 163_585, {163_585, 163_586})


def test_user_text_never_becomes_a_special_token(tiktoken_folder):
    tokenizer = load_tokenizer(tiktoken_folder())
    text = "I type <|im_end|> and [BOS]"
    assert not set(tokenizer.encode(text, specials=False)) & tokenizer.special_ids
    assert len(set(tokenizer.encode(text, specials=True)) & tokenizer.special_ids) == 2  # control arm
    assert tokenizer.decode(tokenizer.encode(text, specials=False)) == text
    assert tokenizer.decode(tokenizer.encode(text, specials=True)) == "I type  and "


@pytest.mark.parametrize("unit", ["a", " ", "\n", "中", "!", "7", "ab ", "🙂", "A"])
def test_120000_characters_of_one_class_take_no_stack_and_little_time(unit, tiktoken_folder):
    tokenizer = load_tokenizer(tiktoken_folder())
    text = (unit * 120_000)[:120_000]
    begin = time.perf_counter()
    ids = tokenizer.encode(text, specials=True)
    # 0.03 s measured; an uncut run of a million takes minutes or overflows
    assert time.perf_counter() - begin < 2
    assert tokenizer.decode(ids) == text


def release(text: str, longest: int) -> list[str]:
    """The release's cutting, character by character: a run that would become longer than `longest` starts a
    new piece."""
    pieces, start, length = [], 0, 0
    for i, char in enumerate(text):
        length = length + 1 if i and char.isspace() == text[i - 1].isspace() else 1
        if length > longest:
            pieces.append(text[start:i])
            start, length = i, 1
    return [*pieces, text[start:]]


def test_long_runs_are_cut_where_the_release_cuts_them(tiktoken_folder):
    folder = tiktoken_folder()
    # MAX_RUN is no multiple of 6: the cut goes through a word and shows in the ids
    text, reference = ("Hamlet" * 10_000, oracle(folder))
    expected = [id for piece in release(text, MAX_RUN) for id in reference.encode_ordinary(piece)]
    assert load_tokenizer(folder).encode(text, specials=False) == expected != reference.encode_ordinary(text)
    rng = random.Random(0)
    for _ in range(8):
        text = "".join(
            rng.choice("a 中\n") * rng.choice([1, 3, MAX_RUN - 1, MAX_RUN, MAX_RUN + 1, 3 * MAX_RUN])
            for _ in range(4)
        )
        assert list(cut_long_runs(text)) == release(text, MAX_RUN)


def test_a_cut_never_goes_through_a_special_token(tiktoken_folder):
    tokenizer = load_tokenizer(tiktoken_folder())
    end = tokenizer.token_id("<|im_end|>")
    for shift in range(12):
        text = "x" * (MAX_RUN - shift) + "<|im_end|>" + "y" * MAX_RUN
        assert tokenizer.encode(text, specials=True).count(end) == 1
        assert tokenizer.encode(text, specials=False).count(end) == 0


@pytest.mark.parametrize(
    "spoil, says",
    [
        (lambda lines: [*lines, b"not base64 at all"], "is not `base64 rank`"),
        (lambda lines: [*lines, b"!!!! 7"], "is not `base64 rank`"),
        (lambda lines: lines[:100] + lines[101:], "ranks are not 0"),
        (lambda lines: [line for line in lines if int(line.split()[1]) >= 256], "ranks are not 0"),
        (
            lambda lines: [base64.b64encode(b"zz%d" % i) + b" %d" % i for i in range(300)],
            "256 of 256 single bytes",
        ),
    ],
)
def test_a_damaged_file_is_named(spoil, says, tiktoken_folder):
    path = tiktoken_folder() / "tiktoken.model"
    path.write_bytes(b"\n".join(spoil(path.read_bytes().splitlines())))
    with pytest.raises(CheckpointError, match=says):
        load_tokenizer(path.parent)


def test_an_added_token_without_text_is_refused(tiktoken_folder):
    """tiktoken finds an empty text everywhere, again and again, until memory is full: found by fuzzing."""
    folder = tiktoken_folder()
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    first = next(iter(settings["added_tokens_decoder"]))
    settings["added_tokens_decoder"][first]["content"] = ""
    path.write_text(json.dumps(settings), encoding="utf-8")
    with pytest.raises(CheckpointError, match=f"the added token {first} has no text"):
        load_tokenizer(folder)
