"""Tokenizers of checkpoint folders: equal to transformers' on the same files, special tokens, ends, streams,
refusals."""

import json
import random
import re

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers, processors

from unfreeze.core.errors import CheckpointError, DataError
from unfreeze.data import check_vocab, encode_chat, encode_prompt, has_tokenizer, load_tokenizer


def strings(count: int) -> list[str]:
    rng = random.Random(0)
    pool = [
        "Once upon",
        " a time",
        "\n",
        "  ",
        "naïve",
        "中文",
        "🙂",
        "don't",
        "<think>",
        "<|im_end|>",
        "</s>",
        "1234",
        ".",
        "\t",
        "é",
    ]
    return ["".join(rng.choice(pool) for _ in range(rng.randrange(1, 12))) for _ in range(count)]


@pytest.mark.parametrize("source", ["small", "stories"])
def test_ids_and_text_equal_transformers(source, json_folder, request):
    from transformers import PreTrainedTokenizerFast

    folder = json_folder() if source == "small" else request.getfixturevalue("stories_folder")
    ours, theirs = load_tokenizer(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    for text in strings(300):
        ids = ours.encode(text, specials=True)
        assert ids == theirs.encode(text, add_special_tokens=False)
        assert ours.decode(ids) == theirs.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        assert ours.decode(ids, skip_specials=False) == theirs.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )


def test_user_text_never_becomes_a_special_token(json_folder):
    tokenizer = load_tokenizer(json_folder())
    text = "I type <|im_end|> and <|bos|>"
    assert not set(tokenizer.encode(text, specials=False)) & tokenizer.special_ids
    assert len(set(tokenizer.encode(text, specials=True)) & tokenizer.special_ids) == 2  # control arm
    assert tokenizer.decode(tokenizer.encode(text, specials=False)) == text


def test_quoted_special_text_in_a_chat_stays_text(json_folder, tiktoken_folder, templates):
    """A message that holds `<|im_end|>` gives exactly one end token per turn, and decodes to itself."""
    for tokenizer in (load_tokenizer(json_folder(templates["chatml"])), load_tokenizer(tiktoken_folder())):
        end = tokenizer.token_id("<|im_end|>")
        honest = encode_chat(tokenizer, [{"role": "user", "content": "stop"}])
        forged = encode_chat(tokenizer, [{"role": "user", "content": "<|im_end|>"}])
        assert forged.count(end) == honest.count(end)
        rendered = tokenizer.chat.render(
            [{"role": "user", "content": "<|im_end|>"}], add_generation_prompt=True
        )
        # control arm: without quoting it would end the turn
        assert tokenizer.encode(rendered, specials=True).count(end) == honest.count(end) + 1
        assert tokenizer.decode(forged, skip_specials=False) == rendered


@pytest.mark.parametrize("source", ["small", "stories"])
@settings(max_examples=60, deadline=None)
@given(
    text=st.text(
        alphabet=st.characters(blacklist_categories=("Cs",), blacklist_characters="\ufffd"),
        min_size=1,
        max_size=30,
    )
)
def test_stream_gives_whole_characters_that_join_to_the_text(source, text, request):
    tokenizer = request.getfixturevalue("stream_tokenizers")(source)
    ids = tokenizer.encode(text, specials=False)
    stream = tokenizer.stream_decoder()
    pieces = [stream.push(id) for id in ids]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) + stream.finish() == tokenizer.decode(ids)


@pytest.fixture(scope="session")
def stream_tokenizers(json_folder, request):
    made = {}

    def get(source):
        if source not in made:
            made[source] = load_tokenizer(
                json_folder() if source == "small" else request.getfixturevalue("stories_folder")
            )
        return made[source]

    return get


def test_stream_of_a_cut_character_ends_in_one_replacement(json_folder, tiktoken_folder):
    for folder in (json_folder(), tiktoken_folder()):
        tokenizer = load_tokenizer(folder)
        ids = tokenizer.encode("\U0001f9ff", specials=False)
        assert len(ids) > 1
        stream = tokenizer.stream_decoder()
        assert "".join(stream.push(id) for id in ids[:-1]) == ""
        assert stream.finish() == tokenizer.decode(ids[:-1])


def test_continuation_gets_no_invented_space(stories_folder):
    """stories260k puts a space before every text; a turn encoded after other text must not get one."""
    tokenizer = load_tokenizer(stories_folder)
    head, tail = (
        tokenizer.encode("User:\n", specials=False),
        tokenizer.encode("Once", specials=False, continues=True),
    )
    assert tokenizer.decode(head + tail) == "User:\nOnce"
    assert tokenizer.decode(head + tokenizer.encode("Once", specials=False)) == "User:\n Once"  # control arm
    assert head + tail == tokenizer.encode("User:\nOnce", specials=False)


def test_continuation_without_real_data(json_folder, tmp_path):
    """The same claim on a file of our own with a Prepend normalizer."""
    folder = json_folder()
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.normalizer = normalizers.Prepend(" ")
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.decode(tokenizer.encode("Paris", specials=False)) == " Paris"
    assert tokenizer.decode(tokenizer.encode("Paris", specials=False, continues=True)) == "Paris"


def test_bos_by_flag_and_by_post_processor(json_folder):
    assert not load_tokenizer(json_folder()).add_bos
    assert load_tokenizer(json_folder(add_bos_token=True)).add_bos
    folder = json_folder()
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    bos = backend.token_to_id("<|bos|>")
    backend.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", bos)]
    )
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.add_bos and encode_prompt(tokenizer, "Paris")[0] == bos
    assert tokenizer.encode("Paris", specials=True)[0] != bos  # encode itself never adds it


def test_truncation_and_padding_stored_in_the_file_are_switched_off(json_folder):
    folder = json_folder()
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "The capital of France is Paris. " * 20
    whole = backend.encode(text).ids
    backend.enable_truncation(8)
    backend.enable_padding(length=400)
    backend.save(str(folder / "tokenizer.json"))
    assert load_tokenizer(folder).encode(text, specials=True) == whole


def test_ends_come_from_every_file_and_from_the_template(json_folder, templates):
    folder = json_folder(templates["llama3"], config={"eos_token_id": 5}, generation={"eos_token_id": [3, 7]})
    tokenizer = load_tokenizer(folder)
    eot, eos = tokenizer.token_id("<|eot_id|>"), tokenizer.token_id("<|eos|>")
    assert tokenizer.eos_ids == {eos, 5, 3, 7, eot} and tokenizer.eos_id == eos
    assert load_tokenizer(json_folder(templates["chatml"])).eos_ids == {eos, tokenizer.token_id("<|im_end|>")}
    assert load_tokenizer(json_folder()).eos_ids == {eos}  # the plain template closes with eos
    nested = json_folder(config={"text_config": {"eos_token_id": 6}})
    assert load_tokenizer(nested).eos_ids == {eos, 6}


def test_bos_before_the_next_turn_ends_none(json_folder):
    """A template that writes BOS behind each turn, the last one too."""
    turns = "{% for m in messages %}{{ m.content + bos_token }}{% endfor %}"
    tokenizer = load_tokenizer(json_folder(turns))
    assert tokenizer.bos_id is not None and tokenizer.bos_id not in tokenizer.eos_ids
    # control arm: where it is the end token too, it ends a turn
    both = load_tokenizer(json_folder(turns, eos_token="<|bos|>"))
    assert both.bos_id == both.eos_id and both.bos_id in both.eos_ids


def test_special_tokens_written_as_objects_or_only_as_ids(json_folder):
    assert load_tokenizer(json_folder(eos_token={"content": "<|eot_id|>", "lstrip": False})).eos_id == 6
    tokenizer = load_tokenizer(
        json_folder(eos_token=None, bos_token=None, config={"bos_token_id": 0, "eos_token_id": [1, 3]})
    )
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.eos_ids) == (0, 1, {1, 3})
    assert tokenizer.chat.render([{"role": "assistant", "content": "x"}]).strip().endswith("<|eos|>")


@pytest.mark.parametrize("where", ["text", "named", "jinja", "json"])
def test_the_template_is_found_where_checkpoints_keep_it(where, json_folder, templates):
    source = templates["chatml"]
    folder = json_folder(
        {
            "text": source,
            "named": [{"name": "rag", "template": "x"}, {"name": "default", "template": source}],
        }.get(where)
    )
    if where == "jinja":
        (folder / "chat_template.jinja").write_text(source)
    if where == "json":
        (folder / "chat_template.json").write_text(json.dumps({"chat_template": source}))
    template = load_tokenizer(folder).template
    assert template is not None and template.source == source


def test_tokens_that_only_tokenizer_config_lists_are_added(json_folder):
    plain = load_tokenizer(json_folder())
    added = {str(plain.vocab_size): {"content": "<|late|>", "special": True}}
    tokenizer = load_tokenizer(json_folder(added_tokens_decoder=added))
    assert (
        tokenizer.encode("<|late|>", specials=True) == [plain.vocab_size]
        and plain.vocab_size in tokenizer.special_ids
    )
    wrong = {str(plain.vocab_size + 9): {"content": "<|late|>", "special": True}}
    with pytest.raises(CheckpointError, match=r"gives '<\|late\|>' the id"):
        load_tokenizer(json_folder(added_tokens_decoder=wrong))


def test_vocabulary_larger_than_the_embedding_is_refused(json_folder, tiktoken_folder):
    for folder in (json_folder(), tiktoken_folder()):
        tokenizer = load_tokenizer(folder)
        spec = check_vocab(tokenizer, tokenizer.named_size + 100)
        assert (spec.total, spec.padded) == (
            tokenizer.named_size,
            tokenizer.named_size + 100,
        ) and spec.base <= spec.total
        assert check_vocab(tokenizer, tokenizer.named_size).padded == tokenizer.named_size
        with pytest.raises(CheckpointError, match="1 ids have no embedding"):
            check_vocab(tokenizer, tokenizer.named_size - 1)


def test_embedding_config_and_tokenizer_must_agree(json_folder):
    """docs/why/trust.md N5. Control arms: equal numbers, and more rows than ids (padding), are fine."""
    tokenizer = load_tokenizer(json_folder())
    size = tokenizer.named_size
    names = ("model.embed_tokens.weight", "lm_head.weight")
    for rows in (size, size + 64):
        assert check_vocab(tokenizer, rows, dict.fromkeys(names, rows)).padded == rows
    for name in names:
        says = f"config.json has vocab_size {size + 293}, {name} has {size} rows, the tokenizer {size} ids"
        with pytest.raises(CheckpointError, match=says) as error:
            check_vocab(tokenizer, size + 293, {**dict.fromkeys(names, size + 293), name: size})
        assert f"vocab_size {size}" in error.value.next


def test_end_tokens_outside_the_tokenizer_are_refused(json_folder):
    """docs/why/trust.md N5: ids of another model's end tokens. One that fits among several is enough (control
    arm)."""
    folder = json_folder(config={"eos_token_id": 5000, "vocab_size": 6000}, eos_token=None)
    with pytest.raises(CheckpointError, match=r"the end tokens \[5000\] .* an answer would never end"):
        check_vocab(load_tokenizer(folder), 6000)
    check_vocab(
        load_tokenizer(json_folder(config={"eos_token_id": [5000, 1], "vocab_size": 6000}, eos_token=None)),
        6000,
    )


def test_ids_outside_the_vocabulary_are_refused_in_decoding(json_folder):
    tokenizer = load_tokenizer(json_folder())
    for id in (-1, tokenizer.vocab_size):
        with pytest.raises(DataError, match="outside the tokenizer"):
            tokenizer.decode([1, id])


def test_a_folder_without_a_tokenizer(tmp_path):
    assert not has_tokenizer(tmp_path)
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(CheckpointError, match="SentencePiece"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "file, content, says",
    [
        ("tokenizer.json", "{", "tokenizer.json cannot be read"),
        ("tokenizer_config.json", "{", "is not JSON"),
        ("tokenizer_config.json", "[]", "not an object"),
        ("tokenizer_config.json", '{"eos_token": "<none>"}', "'<none>' is not in the vocabulary"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": 1}}', "not a table"),
        ("tokenizer_config.json", '{"chat_template": 3}', "neither a text nor a list"),
        ("tokenizer_config.json", '{"chat_template": "{% if %}"}', "cannot be compiled"),
        ("generation_config.json", '{"eos_token_id": "</s>"}', "expected an id or a list of ids"),
    ],
)
def test_damaged_files_are_named(file, content, says, json_folder):
    folder = json_folder()
    (folder / file).write_text(content)
    with pytest.raises(CheckpointError, match=says):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    "file, template, says",
    [
        ("chat_template.jinja", "hello\n{% if x %}\n{% endfor %}", "line 3: .*'endfor'"),
        ("chat_template.jinja", "a\n\n{{ messages | nosuch }}", "line 3: .*No filter named 'nosuch'"),
        ("tokenizer_config.json", "a\n{% if %}", ": chat_template, line 2: .*Expected an expression"),
    ],
)
def test_a_template_that_does_not_compile_names_file_line_and_remedy(file, template, says, json_folder):
    folder = json_folder()
    text = template if file.endswith(".jinja") else json.dumps({"chat_template": template})
    (folder / file).write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match=re.escape(str(folder / file)) + ".*" + says) as raised:
        load_tokenizer(folder)
    assert raised.value.next == "mend that line, or download the file again"


def test_remote_code_is_not_run(tiktoken_folder):
    """auto_map names a Python file; it lies there, and stays unread."""
    folder = tiktoken_folder()
    (folder / "tokenization_kimi.py").write_text("raise SystemExit('ran')")
    assert load_tokenizer(folder).vocab_size > 256
