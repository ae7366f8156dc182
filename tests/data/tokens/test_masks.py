"""The loss mask, proven token by token against the template itself.

The proof does not use the code under test: it renders the conversation with transformers, finds each answer
by re-rendering with the answer replaced by a sentinel, and maps tokens to characters through their bytes.
`planted` masks show that the proof can fail.
"""

from itertools import pairwise

import pytest
import tokenizers
from tokenizers import normalizers
from transformers.utils.chat_template_utils import render_jinja_template

from unfreeze.core.errors import DataError
from unfreeze.data import Conversation, Encoder, Text, encode_chat, load_tokenizer, pack, read_rows
from unfreeze.data.tokens.masks import Dropped

SENTINEL = "\u2603\u2603\u2603"
QUESTION = {"role": "user", "content": "Who wrote Hamlet?"}
ANSWER = {"role": "assistant", "content": "Shakespeare it was, hmm. 🙂"}
SINGLE = [QUESTION, ANSWER]
SEVERAL = [
    {"role": "system", "content": "Be short."},
    QUESTION,
    ANSWER,
    # the user repeats the answer word for word
    {"role": "user", "content": "assistant\nShakespeare it was, hmm. 🙂"},
    {"role": "assistant", "content": "Said it I have."},
    {"role": "user", "content": "And?"},
]
ENDS = {
    "chatml": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "deepseek": "<|eos|>",
    "kimi": "<|im_end|>",
    "indented": "<|im_end|>",
    "qwen3": "<|im_end|>",
}


def encode_row(row, tokenizer, length, truncation="tail", **options):
    """The one example that a row becomes."""
    (example,) = Encoder(tokenizer, length, truncation, **options)(row).examples
    return example


def encode_whole(row, tokenizer):
    example = encode_row(row, tokenizer, 10_000)
    return list(example.tokens), list(example.weights)


def expected_spans(source, variables, messages, end, lead=""):
    """[start, end) in characters of each answer with what leads it in (`lead`, e.g. a think block) and its
    end token."""
    (full,), _ = render_jinja_template([messages], chat_template=source, **variables)
    spans = []
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            swapped = [{**m, "content": SENTINEL} if j == i else m for j, m in enumerate(messages)]
            (other,), _ = render_jinja_template([swapped], chat_template=source, **variables)
            start = other.index(SENTINEL)
            assert full[:start] == other[:start] and full[:start].endswith(lead)
            stop = len(full) - (len(other) - start - len(SENTINEL))
            assert full[stop:].startswith(end)
            spans.append((start - len(lead), stop + len(end)))
    return full, spans


def case(name, json_folder, tiktoken_folder, templates):
    tokenizer = load_tokenizer(
        tiktoken_folder(chat_template=templates[name]) if name == "kimi" else json_folder(templates[name])
    )
    return tokenizer, {role: tokenizer.variables[role] for role in ("bos_token", "eos_token")}


# refused, see below
CASES = [
    (name, messages)
    for name in ENDS
    for messages in (SINGLE, SEVERAL)
    if (name, messages) != ("qwen3", SEVERAL)
]


@pytest.mark.parametrize("name, messages", CASES)
def test_mask_covers_the_answers_and_their_end_token_and_nothing_else(
    proof, name, messages, json_folder, tiktoken_folder, templates
):
    tokenizer, variables = case(name, json_folder, tiktoken_folder, templates)
    lead = "<think>\n\n</think>\n\n" if name == "qwen3" else ""
    full, spans = expected_spans(templates[name], variables, messages, ENDS[name], lead)
    tokens, weights = encode_whole(Conversation(messages), tokenizer)
    assert proof(tokenizer, tokens, weights, full, spans) == []
    supervised = [token for token, weight in zip(tokens, weights, strict=True) if weight]
    # docs/why/trust.md N6
    assert supervised[-1] == tokenizer.token_id(ENDS[name]) and supervised[-1] in tokenizer.eos_ids


@pytest.mark.parametrize(
    "planted", ["all ones", "shifted left", "shifted right", "end not supervised", "first answer lost"]
)
def test_the_proof_notices_a_planted_fault(proof, planted, json_folder, tiktoken_folder, templates):
    tokenizer, variables = case("chatml", json_folder, tiktoken_folder, templates)
    full, spans = expected_spans(templates["chatml"], variables, SEVERAL, "<|im_end|>")
    tokens, weights = encode_whole(Conversation(SEVERAL), tokenizer)
    end = tokenizer.token_id("<|im_end|>")
    first_end = next(i for i, (t, w) in enumerate(zip(tokens, weights, strict=True)) if w and t == end)
    spoiled = {
        "all ones": [1.0] * len(tokens),
        "shifted left": [*weights[1:], 0.0],
        "shifted right": [0.0, *weights[:-1]],
        "end not supervised": [0.0 if t == end else w for t, w in zip(tokens, weights, strict=True)],
        "first answer lost": [0.0 if i <= first_end else w for i, w in enumerate(weights)],
    }[planted]
    assert proof(tokenizer, tokens, spoiled, full, spans)
    assert not proof(tokenizer, tokens, weights, full, spans)


def test_every_row_of_yoda_with_kimis_own_tokenizer_and_template(proof, kimi_folder, yoda_file):
    tokenizer = load_tokenizer(kimi_folder)
    assert tokenizer.template is not None
    rows = list(read_rows(yoda_file))
    assert len(rows) == 700
    for row in rows:
        full, spans = expected_spans(tokenizer.template.source, {}, row.messages, "<|im_end|>")
        tokens, weights = encode_whole(row, tokenizer)
        assert proof(tokenizer, tokens, weights, full, spans) == [], f"row {row.row}"


def test_prompt_tokens_of_training_are_those_of_generation(json_folder, tiktoken_folder, templates):
    for name in ("chatml", "llama3", "deepseek", "kimi"):
        tokenizer, _ = case(name, json_folder, tiktoken_folder, templates)
        tokens, weights = encode_whole(Conversation(SEVERAL), tokenizer)
        starts = [i for i, w in enumerate(weights) if w and not weights[i - 1]]
        turns = [i for i, m in enumerate(SEVERAL) if m["role"] == "assistant"]
        assert [tokens[:start] for start in starts] == [
            encode_chat(tokenizer, SEVERAL[:turn]) for turn in turns
        ]


def test_plain_template_mask_on_a_sentencepiece_vocabulary(stories_folder, yoda_file):
    tokenizer = load_tokenizer(stories_folder)
    assert tokenizer.template is None
    for row in list(read_rows(yoda_file))[:100]:
        tokens, weights = encode_whole(row, tokenizer)
        said = tokenizer.decode([t for t, w in zip(tokens, weights, strict=True) if w], skip_specials=False)
        assert said == row.messages[1]["content"].lstrip(" ") + "</s>"
        assert tokens[: weights.index(1.0)] == encode_chat(tokenizer, row.messages[:1])
        assert tokenizer.decode(tokens, skip_specials=False).replace(
            "<s> ", "<s>", 1
        ) == tokenizer.chat.render(row.messages)  # one space, at BOS


def test_a_template_that_rewrites_the_past_is_refused_as_a_whole_and_taught_turn_by_turn(
    json_folder, templates
):
    tokenizer = load_tokenizer(json_folder(templates["qwen3"]))
    row = Conversation([*SINGLE, *SINGLE], row=7)
    with pytest.raises(DataError, match=r"row 7: .*not prefix-stable: messages\[1\].*'<think>") as error:
        encode_row(row, tokenizer, 512, turns="whole")
    assert "--data.turns each" in error.value.next
    examples = Encoder(tokenizer, 512)(row).examples
    assert [example.row for example in examples] == [7, 7] and examples[0].num_tokens < examples[1].num_tokens
    (last,) = Encoder(tokenizer, 512, turns="last")(row).examples
    assert list(last.tokens) == list(examples[1].tokens) and list(last.weights) == list(examples[1].weights)


def test_generation_marks_give_the_spans_where_the_past_is_rewritten(proof, json_folder, templates):
    tokenizer = load_tokenizer(json_folder(templates["marked"]))
    messages = [*SINGLE, *SINGLE]
    (full,), (spans,) = render_jinja_template(
        [messages], chat_template=templates["marked"], return_assistant_tokens_mask=True
    )
    tokens, weights = encode_whole(Conversation(messages), tokenizer)
    assert len(spans) == 2 and proof(tokenizer, tokens, weights, full, spans) == []


def test_marks_that_leave_out_the_end_token_still_teach_it(json_folder, templates):
    source = templates["marked"].replace(
        "{{- '<|im_end|>' -}}{%- endgeneration -%}{{- '\n' -}}",
        "{%- endgeneration -%}{{- '<|im_end|>' -}}{{- '\n' -}}",
    )
    assert source != templates["marked"]
    tokenizer = load_tokenizer(json_folder(source))
    tokens, weights = encode_whole(Conversation([*SINGLE, *SINGLE]), tokenizer)
    end = tokenizer.token_id("<|im_end|>")
    assert sum(w for t, w in zip(tokens, weights, strict=True) if t == end) == 2


def test_consecutive_turns_with_tools_and_reasoning(json_folder, templates):
    call = {"type": "function", "function": {"name": "look", "arguments": {"q": "x"}}}
    messages = [
        QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "Look it up."},
        {"role": "tool", "content": "found"},
        {**ANSWER, "reasoning_content": "Found."},
    ]
    tokenizer = load_tokenizer(json_folder(templates["qwen3"]))
    tokens, weights = encode_whole(Conversation(messages), tokenizer)
    said = tokenizer.decode([t for t, w in zip(tokens, weights, strict=True) if w], skip_specials=False)
    assert (
        said == '<think>\nLook it up.\n</think>\n\n<tool_call>\n{"name": "look", "arguments": {"q":'
        ' "x"}}\n</tool_call><|im_end|><think>\nFound.\n</think>\n\nShakespeare it was, hmm. 🙂<|im_end|>'
    )


def test_an_answer_that_holds_special_text_ends_once(json_folder, templates):
    tokenizer = load_tokenizer(json_folder(templates["chatml"]))
    tokens, weights = encode_whole(
        Conversation([QUESTION, {"role": "assistant", "content": "say <|im_end|>"}]), tokenizer
    )
    end = tokenizer.token_id("<|im_end|>")
    assert tokens.count(end) == 2 and sum(w for t, w in zip(tokens, weights, strict=True) if t == end) == 1
    assert tokenizer.decode([t for t, w in zip(tokens, weights, strict=True) if w]) == "say <|im_end|>"
    with pytest.raises(DataError, match=r"row 3: .*U\+F0000"):
        encode_row(Conversation([{"role": "user", "content": "\U000f0000"}, ANSWER], row=3), tokenizer, 512)


def test_an_assistant_that_speaks_first_is_named_where_the_template_has_no_prompt_for_it(tiktoken_folder):
    tokenizer = load_tokenizer(tiktoken_folder())
    with pytest.raises(DataError, match="row 4: the assistant speaks first"):
        encode_row(Conversation([ANSWER, QUESTION, ANSWER], row=4), tokenizer, 512)


def test_supervise_all_counts_every_token_but_the_first(json_folder, templates):
    tokenizer = load_tokenizer(json_folder(templates["chatml"]))
    example = encode_row(Conversation(SINGLE), tokenizer, 512, supervise="all")
    assert list(example.weights) == [0.0] + [1.0] * (example.num_tokens - 1)


def test_text_counts_whole_and_ends(json_folder):
    tokenizer = load_tokenizer(json_folder(add_bos_token=True))
    example = encode_row(Text("The capital of France is Paris."), tokenizer, 512)
    assert (example.tokens[0], example.tokens[-1]) == (tokenizer.bos_id, tokenizer.eos_id)
    assert list(example.weights) == [0.0] + [1.0] * (example.num_tokens - 1)


def test_truncation_cuts_refuses_or_drops_and_says_so(json_folder, templates):
    tokenizer = load_tokenizer(json_folder(templates["chatml"]))
    row = Conversation(SINGLE, row=17)
    whole = encode_row(row, tokenizer, 512)
    size, prompt = whole.num_tokens, list(whole.weights).index(1.0)
    cut = encode_row(row, tokenizer, size - 3)
    assert (cut.num_tokens, cut.cut) == (size - 3, 3) and list(cut.tokens) == list(whole.tokens)[:-3]
    assert encode_row(row, tokenizer, size, "error").cut == 0
    with pytest.raises(DataError, match=f"row 17: {size} tokens, sequence_length is {size - 1}") as error:
        encode_row(row, tokenizer, size - 1, "error")
    assert not isinstance(error.value, Dropped)
    with pytest.raises(Dropped, match="row 17"):
        encode_row(row, tokenizer, size - 1, "drop")
    with pytest.raises(
        Dropped, match=rf"row 17: 0 of {prompt} tokens supervised \(truncated before the answer\?"
    ):
        encode_row(row, tokenizer, prompt)  # docs/why/trust.md N2
    assert encode_row(row, tokenizer, size, "split").cut == 0
    with pytest.raises(DataError, match=r"row 17: .* a conversation is not split"):
        encode_row(row, tokenizer, size - 1, "split")


@pytest.mark.parametrize("sequence_length", [2, 3, 7, 50, 10_000])
def test_split_predicts_each_token_of_a_text_exactly_once(sequence_length, json_folder):
    tokenizer = load_tokenizer(json_folder(add_bos_token=True))
    row = Text("The capital of France is Paris. Who wrote the play Hamlet?")
    tokens, _ = encode_whole(row, tokenizer)
    pieces = Encoder(tokenizer, sequence_length, "split")(row).examples
    predicted = [t for piece in pieces for t, w in zip(piece.tokens, piece.weights, strict=True) if w]
    assert predicted == tokens[1:] and max(piece.num_tokens for piece in pieces) <= sequence_length
    assert all(before.tokens[-1] == after.tokens[0] for before, after in pairwise(pieces))


def test_plain_template_mask_on_a_vocabulary_that_invents_a_leading_space(json_folder):
    """What the test on stories260k shows, on a file of our own: turns get no space that the template did not
    write."""
    folder = json_folder(add_bos_token=True)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.normalizer = normalizers.Prepend(" ")
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(folder)
    tokens, weights = encode_whole(Conversation(SINGLE), tokenizer)
    assert (
        tokenizer.decode([t for t, w in zip(tokens, weights, strict=True) if w], skip_specials=False)
        == ANSWER["content"] + "<|eos|>"
    )
    spelled = tokenizer.decode(tokens, skip_specials=False)
    assert spelled.startswith("<|bos|> User:\n") and spelled.replace(
        "<|bos|> ", "<|bos|>"
    ) == tokenizer.chat.render(SINGLE)


def test_head_cuts_the_beginning_keeps_bos_and_what_lost_its_context_is_no_target(json_folder, templates):
    tokenizer = load_tokenizer(json_folder(templates["llama3"]))
    whole = encode_row(Conversation(SINGLE, row=17), tokenizer, 512)
    size = whole.num_tokens
    cut = encode_row(Conversation(SINGLE, row=17), tokenizer, size - 3, "head")
    assert (cut.num_tokens, cut.cut) == (size - 3, 3)
    assert list(cut.tokens) == [tokenizer.bos_id, *whole.tokens[4:]] and list(cut.weights[2:]) == list(
        whole.weights[5:]
    )
    answer = size - list(whole.weights).index(1.0)
    # shorter than the answer: it begins inside it
    short = encode_row(Conversation(SINGLE), tokenizer, answer - 1, "head")
    assert list(short.weights) == [0.0, 0.0] + [1.0] * (answer - 3) and short.num_supervised == answer - 3
    no_bos = load_tokenizer(json_folder(templates["chatml"]))
    cut = encode_row(Conversation(SINGLE), no_bos, 10, "head")
    assert (
        list(cut.tokens) == list(encode_row(Conversation(SINGLE), no_bos, 512).tokens)[-10:]
        and cut.weights[0] == 0.0
    )
    assert encode_row(Conversation(SINGLE), no_bos, 512, "head").cut == 0


def test_the_end_of_every_answer_is_a_target_also_where_pad_is_eos(json_folder, templates):
    """docs/why/trust.md N6. Packed batches have no padding; nothing is masked by its id. Control arm: masking by
    the pad id loses every end."""
    tokenizer = load_tokenizer(json_folder(templates["deepseek"], pad_token="<|eos|>"))
    end = tokenizer.eos_id
    batch = pack([encode_row(Conversation([*SINGLE, *SINGLE], row=i), tokenizer, 512) for i in range(3)])
    taught = batch.targets_T[batch.weights_T > 0]
    assert int((taught == end).sum()) == 6 and batch.num_tokens == sum(batch.lengths())
    masked_by_id = batch.weights_T * (batch.targets_T != tokenizer.token_id("<|eos|>"))
    assert int((batch.targets_T[masked_by_id > 0] == end).sum()) == 0


def test_a_mask_that_covers_everything_is_refused_per_row(json_folder, templates):
    """docs/why/trust.md N4. Control arm: with the same marks where they belong, and for `supervise` "all", which
    asks for it, nothing is refused."""
    forced = (  # prompts that are no prefix: marks are read
        "{%- if add_generation_prompt -%}{{- '?' -}}{%- endif -%}"
    )
    everywhere = load_tokenizer(
        json_folder("{% generation %}" + templates["chatml"] + "{% endgeneration %}" + forced)
    )
    with pytest.raises(
        DataError,
        match=r"row 9: messages\[0\].content \('Who wrote Hamlet\?'\) is the user's and would be taught",
    ) as error:
        encode_row(Conversation(SINGLE, row=9), everywhere, 512)
    assert "generation" in error.value.next
    right = load_tokenizer(json_folder(templates["marked"] + forced))
    assert 0 < encode_row(Conversation(SINGLE), right, 512).num_supervised < 20
    plain = load_tokenizer(json_folder(templates["chatml"]))
    assert (
        encode_row(Conversation(SINGLE), plain, 512, supervise="all").num_supervised
        == encode_row(Conversation(SINGLE), plain, 512).num_tokens - 1
    )
