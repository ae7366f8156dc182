"""Train a byte-level BPE in Kimi-K2's form: `tiktoken.model` (a line per token: base64 and rank) and
`tokenizer_config.json`.

`tokenizers` counts and merges; only the byte strings and their order leave it. Ids are laid out as in the
release: the ranks first, then 256 reserved ids of which some have names, at the same offsets.
tests/examples/test_tiny_k2.py proves that `tiktoken`, reading the file with the same split pattern, gives the
ids of the trained merges.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.trainers import BpeTrainer

SPLIT_PATTERN = "|".join(
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
"""Pattern that splits text before merging; from tokenization_kimi.py of the Kimi-K2 release."""

NUM_RANKS = 1280
NUM_RESERVED = 256
VOCAB_SIZE = NUM_RANKS + NUM_RESERVED  # 1,536, a multiple of 64

# Offset after the last rank -> content, special; the offsets of Kimi-K2's own tokenizer_config.json.
ADDED_TOKENS = {
    0: ("[BOS]", True),
    1: ("[EOS]", True),
    2: ("<|im_end|>", True),
    3: ("<|im_user|>", True),
    4: ("<|im_assistant|>", True),
    10: ("<|im_system|>", True),
    11: ("<|tool_calls_section_begin|>", False),
    12: ("<|tool_calls_section_end|>", False),
    13: ("<|tool_call_begin|>", False),
    14: ("<|tool_call_argument_begin|>", False),
    15: ("<|tool_call_end|>", False),
    17: ("<|im_middle|>", True),
    254: ("[UNK]", True),
    255: ("[PAD]", True),
}
BOS_ID, EOS_ID, IM_END_ID, PAD_ID = NUM_RANKS, NUM_RANKS + 1, NUM_RANKS + 2, NUM_RANKS + 255

# Kimi's markup in our own words. Prefix-stable: the first n messages render to a prefix of the whole
# conversation, so that the loss mask
# can be proven by rendering again. No default system turn: a question and its answer stay about 25 tokens.
CHAT_TEMPLATE = """\
{%- macro text(content) -%}
  {%- if content is string -%}{{ content }}
  {%- elif content is not none -%}
    {%- for part in content -%}
      {%- if part['type'] != 'text' -%}{{ raise_exception('tiny-k2 reads text only, not ' ~ part['type']) }}{%- endif -%}
      {{ part['text'] }}
    {%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{%- if tools -%}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{%- endif -%}
{%- for message in messages -%}
  {%- set role = message['role'] -%}
  {%- if role == 'system' -%}<|im_system|>system<|im_middle|>{{ text(message['content']) }}
  {%- elif role == 'user' -%}<|im_user|>user<|im_middle|>{{ text(message['content']) }}
  {%- elif role == 'tool' -%}<|im_system|>tool<|im_middle|>
    {%- if message.get('tool_call_id') -%}{{ '## Return of ' ~ message['tool_call_id'] ~ '\\n' }}{%- endif -%}
    {{ text(message['content']) }}
  {%- elif role == 'assistant' -%}<|im_assistant|>assistant<|im_middle|>
    {%- if message.get('reasoning_content') -%}<think>{{ message['reasoning_content'] }}</think>{%- endif -%}
    {{ text(message.get('content')) }}
    {%- if message.get('tool_calls') -%}<|tool_calls_section_begin|>
      {%- for call in message['tool_calls'] -%}
        {%- set arguments = call['function']['arguments'] -%}
        {%- set id = call.get('id') or 'functions.' ~ call['function']['name'] ~ ':' ~ loop.index0 -%}
        <|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>
        {%- if arguments is string -%}{{ arguments }}{%- else -%}{{ arguments | tojson }}{%- endif -%}
        <|tool_call_end|>
      {%- endfor -%}
    <|tool_calls_section_end|>{%- endif -%}
  {%- else -%}{{ raise_exception('role ' ~ role ~ ' is none of system, user, assistant, tool') }}
  {%- endif -%}
  <|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}
"""


def _unicode_to_byte() -> dict[str, int]:
    """The inverse of GPT-2's byte alphabet, in which `tokenizers` writes byte-level tokens: printable bytes
    stand for themselves, the
    other 68 for the characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


def train(texts: Iterable[str], num_ranks: int = NUM_RANKS) -> tuple[list[bytes], Tokenizer]:
    """(tokens by rank, the trained tokenizer whose ids are those ranks). The first 256 ranks are the bytes in
    order."""
    trained = _with_split(BPE())
    trainer = BpeTrainer(
        vocab_size=num_ranks,
        min_frequency=2,
        initial_alphabet=ByteLevel.alphabet(),
        special_tokens=[],
        show_progress=False,
    )
    trained.train_from_iterator(texts, trainer)
    to_byte = _unicode_to_byte()
    merged = sorted((rank, token) for token, rank in trained.get_vocab().items() if len(token) > 1)
    alphabet = sorted(to_byte, key=lambda character: to_byte[character])
    names = [*alphabet, *(token for _, token in merged)]
    if len(names) != num_ranks:
        raise ValueError(f"the corpus gave {len(names)} ranks, {num_ranks} wanted: more text, or fewer ranks")
    merges = json.loads(trained.to_str())["model"]["merges"]
    ranked = _with_split(
        BPE(vocab={name: rank for rank, name in enumerate(names)}, merges=[tuple(pair) for pair in merges])
    )
    return [bytes(to_byte[character] for character in name) for name in names], ranked


def _with_split(model: BPE) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = Sequence(
        [Split(Regex(SPLIT_PATTERN), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return tokenizer


def tiktoken_lines(tokens: list[bytes]) -> str:
    """The text of tiktoken.model."""
    return "".join(f"{base64.b64encode(token).decode('ascii')} {rank}\n" for rank, token in enumerate(tokens))


def tokenizer_config() -> dict:
    """The content of tokenizer_config.json."""
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    added = {
        str(NUM_RANKS + offset): {"content": name, **flags, "special": special}
        for offset, (name, special) in ADDED_TOKENS.items()
    }
    return {
        "added_tokens_decoder": added,
        "additional_special_tokens": [
            "<|im_end|>",
            "<|im_user|>",
            "<|im_assistant|>",
            "<|im_system|>",
            "<|im_middle|>",
        ],
        "bos_token": "[BOS]",
        "clean_up_tokenization_spaces": False,
        "eos_token": "[EOS]",
        "unk_token": "[UNK]",
        "pad_token": "[PAD]",
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": 1024,
        "tokenizer_class": "TikTokenTokenizer",
    }


def write(directory: Path, tokens: list[bytes]) -> None:
    """tiktoken.model and tokenizer_config.json into `directory`."""
    (directory / "tiktoken.model").write_text(tiktoken_lines(tokens), encoding="ascii")
    (directory / "tokenizer_config.json").write_text(
        json.dumps(tokenizer_config(), indent=2) + "\n", encoding="utf-8"
    )
