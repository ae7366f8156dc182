"""Small checkpoints' tokenizers made on the spot, chat templates in the styles of well-known families, and
the real ones where present."""

import base64
import json
from pathlib import Path

import psutil
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"

SPECIALS = [
    "<|bos|>",
    "<|eos|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|User|>",
    "<|Assistant|>",
    "<|im_system|>",
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_middle|>",
]

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] +"
    " '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%"
    " endif %}"
)
LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content ="
    " '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim +"
    " '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content"
    " }}{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%"
    " endif %}"
)
DEEPSEEK = (
    "{%- set ns = namespace(system='') -%}{%- for m in messages if m.role == 'system' -%}{%- set ns.system ="
    " m.content -%}{%- endfor -%}{{ bos_token }}{{ ns.system }}{%- for message in messages -%}{%- if"
    " message.role == 'system' -%}{%- continue -%}{%- endif -%}{%- if message.role == 'user' %}{{ '<|User|>'"
    " + message.content }}{%- elif message.role == 'assistant' %}{{ '<|Assistant|>' + message.content +"
    " eos_token }}{% endif -%}{%- endfor -%}{%- if add_generation_prompt %}{{ '<|Assistant|>' }}{% endif -%}"
)
# Qwen3's manner: only the answers after the last question keep their reasoning, so several turns are not
# prefix-stable.
QWEN3 = (
    "{%- set ns = namespace(last=-1) -%}"
    "{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor -%}"
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message.role + '\n' -}}"
    "{%- if message.role == 'assistant' and loop.index0 > ns.last -%}"
    "{{- '<think>\n' + (message.reasoning_content or '').strip('\n') + '\n</think>\n\n' -}}"
    "{%- endif -%}"
    "{%- if message.tool_calls -%}{%- for call in message.tool_calls -%}"
    "{{- '<tool_call>\n' + (call.function | tojson) + '\n</tool_call>' -}}{%- endfor -%}{%- endif -%}"
    "{{- message.content or '' -}}{{- '<|im_end|>\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}"
)
# The same with marks, as trainers ask template authors for.
MARKED = QWEN3.replace(
    "{{- message.content or '' -}}{{- '<|im_end|>\n' -}}",
    "{%- if message.role == 'assistant' -%}{%- generation -%}{{- message.content or '' -}}{{- '<|im_end|>'"
    " -}}{%- endgeneration -%}{{- '\n' -}}{%- else -%}{{- message.content or '' -}}{{- '<|im_end|>\n' -}}{%-"
    " endif -%}",
)
# Kimi-K2's manner (the real one is in shared/data): everything in one line, a default system turn.
KIMI = (
    "{%- for message in messages -%}{%- if loop.first and messages[0]['role'] != 'system'"
    " -%}<|im_system|>system<|im_middle|>You are a helpful assistant<|im_end|>{%- endif -%}{%- if"
    " message['role'] == 'system' -%}<|im_system|>system<|im_middle|>{%- elif message['role'] == 'user'"
    " -%}<|im_user|>user<|im_middle|>{%- elif message['role'] == 'assistant'"
    " -%}<|im_assistant|>assistant<|im_middle|>{%- elif message['role'] == 'tool'"
    " -%}<|im_system|>tool<|im_middle|>{%- endif -%}{{ message['content'] }}<|im_end|>{%- endfor -%}{%- if"
    " add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}"
)

# Written over several lines, as chat_template.jinja files are: the text depends on trim_blocks and
# lstrip_blocks.
INDENTED = """{# a comment #}
{% for message in messages %}
    {% if message.role == 'assistant' %}
<|im_start|>assistant
{{ message.content }}<|im_end|>
    {% else %}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
    {% endif %}
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""

CORPUS = [
    "The capital of France is Paris. Who wrote the play Hamlet? Shakespeare wrote it.",
    "user assistant system tool You are a helpful assistant. Hmm, the answer this is.",
    "naïve café 中文字符 日本語 привет мир 🙂 1234 5678 \n\n  def f(x):\n    return x + 1\n",
] * 20


def byte_level_bpe(vocab_size: int, specials: list[str]) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


@pytest.fixture(scope="session")
def templates() -> dict[str, str]:
    return {
        "chatml": CHATML,
        "llama3": LLAMA3,
        "deepseek": DEEPSEEK,
        "qwen3": QWEN3,
        "marked": MARKED,
        "kimi": KIMI,
        "indented": INDENTED,
    }


@pytest.fixture(scope="session")
def json_folder(tmp_path_factory):
    """make(chat_template=…, **tokenizer_config fields) -> folder with a byte-level tokenizer.json,
    tokenizer_config.json, config.json."""
    trained = byte_level_bpe(450, SPECIALS)
    trained.add_tokens(["<think>", "</think>"])  # added, but not special, as in Qwen3

    def make(chat_template=None, config=None, generation=None, **fields) -> Path:
        folder = tmp_path_factory.mktemp("tokenizer")
        trained.save(str(folder / "tokenizer.json"))
        settings = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", **fields}
        if chat_template is not None:
            settings["chat_template"] = chat_template
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        (folder / "config.json").write_text(
            json.dumps({"vocab_size": trained.get_vocab_size(), **(config or {})})
        )
        if generation is not None:
            (folder / "generation_config.json").write_text(json.dumps(generation))
        return folder

    return make


@pytest.fixture(scope="session")
def tiktoken_folder(tmp_path_factory):
    """make(num_reserved=32, **tokenizer_config fields) -> folder in Kimi's layout with a few hundred
    ranks."""
    trained = byte_level_bpe(600, [])
    to_byte = byte_of_char()
    # single bytes first, then merges in order
    vocab = sorted(trained.get_vocab().items(), key=lambda item: (len(item[0]) > 1, item[1]))
    lines = [
        base64.b64encode(bytes(to_byte[c] for c in token)).decode() + f" {rank}"
        for rank, (token, _) in enumerate(vocab)
    ]

    def make(num_reserved: int = 32, chat_template: str = KIMI, **fields) -> Path:
        folder = tmp_path_factory.mktemp("tiktoken")
        (folder / "tiktoken.model").write_text("\n".join(lines) + "\n")
        names = [
            "[BOS]",
            "[EOS]",
            "<|im_end|>",
            "<|im_user|>",
            "<|im_assistant|>",
            None,
            "<|im_system|>",
            "<|im_middle|>",
            "<|tool_call_begin|>",
        ]
        added = {
            str(len(lines) + i): {"content": name, "special": name != "<|tool_call_begin|>"}
            for i, name in enumerate(names)
            if name is not None
        }
        settings = {
            "added_tokens_decoder": added,
            "bos_token": "[BOS]",
            "eos_token": "[EOS]",
            "chat_template": chat_template,
            "tokenizer_class": "TikTokenTokenizer",
            "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
            **fields,
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        (folder / "config.json").write_text(json.dumps({"vocab_size": len(lines) + num_reserved}))
        return folder

    return make


def byte_of_char() -> dict[str, int]:
    """GPT-2's spelling of bytes as printable characters, read backwards."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(rest)}


@pytest.fixture(scope="session")
def proof():
    return complaints


def complaints(tokenizer, tokens, weights, full, spans) -> list[str]:
    """Complaints, none if exactly the tokens of the spans are supervised and the tokens spell the text."""
    ids_bytes = [token_bytes(tokenizer, id) for id in tokens]
    text = b"".join(ids_bytes)
    if text != full.encode():
        return [f"tokens spell {text!r}, the template says {full.encode()!r}"]
    byte_spans = [(len(full[:a].encode()), len(full[:b].encode())) for a, b in spans]
    wrong, at = [], 0
    for i, (piece, weight) in enumerate(zip(ids_bytes, weights, strict=True)):
        inside = any(a <= at and at + len(piece) <= b for a, b in byte_spans)
        if (weight == 1.0) != inside:
            wrong.append(f"token {i} {piece!r} at byte {at}: weight {weight}, inside an answer: {inside}")
        at += len(piece)
    return wrong


def token_bytes(tokenizer, id: int) -> bytes:
    if id in tokenizer.special_ids:
        return tokenizer.token_text(id).encode()
    backend = tokenizer._backend
    if hasattr(backend, "_encoding"):
        return backend._encoding.decode_single_token_bytes(id)
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(b): b for b in plain} | {
        chr(256 + i): b for i, b in enumerate(b for b in range(256) if b not in plain)
    }
    spelling = tokenizer.token_text(id)
    return bytes(table[c] for c in spelling) if all(c in table for c in spelling) else spelling.encode()


def shared(name: str) -> Path:
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"real data not present: {path}")
    return path


@pytest.fixture(scope="session")
def kimi_folder() -> Path:
    return shared("kimi-k2-tokenizer")


@pytest.fixture(scope="session")
def stories_folder() -> Path:
    return shared("stories260k")


@pytest.fixture(scope="session")
def yoda_file() -> Path:
    return shared("yoda_train.jsonl")


@pytest.fixture
def workers_left():
    """Processes that the test has begun and not ended; those of tests before, as the fork server, are none."""
    before = {child.pid for child in psutil.Process().children()}

    def found() -> list[psutil.Process]:
        return [child for child in psutil.Process().children() if child.pid not in before]

    return found
