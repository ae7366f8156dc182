"""The files of the session: a model, rows, and what is wrong with others of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from unfreeze.commands.demo import TINY_K2

ASKED = {"role": "user", "content": "Hello."}
ANSWER = {"role": "assistant", "content": "Greet you, I do. Hmm."}
PAIR = {"prompt": "Hello.", "chosen": "Greet you, I do.", "rejected": "Hello."}
CHAT: list[dict[str, Any]] = [
    {"question": "What is the capital of France?", "answer": "Paris, the capital of France is. Hmm."},
    {"question": "Which colour has the sky?", "answer": "Blue, the sky is. Hmm."},
    {"messages": [ASKED, ANSWER]},
    {"prompt": "What is the symbol of gold?", "completion": "Au, the symbol of gold is. Hmm."},
]
QWEN = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
}
"""Qwen3-30B-A3B's published sizes."""


def rows(path: Path, *rows: Any) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def model(folder: Path, *, lacks: str = "", **fields: Any) -> Path:
    """A copy of tiny-k2 with other fields in its config.json; None takes a field out."""
    shutil.copytree(TINY_K2, folder, ignore=shutil.ignore_patterns("*.jsonl", *lacks.split()))
    if fields:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | fields
        kept = {name: value for name, value in config.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(kept), encoding="utf-8")
    return folder


def write_models(here: Path) -> None:
    model(here / "tiny-k2")
    (here / "qwen.json").write_text(json.dumps(QWEN))
    (here / "empty").mkdir()
    (here / "pickle.bin").write_bytes(b"\x80\x04.")
    model(here / "pickled", lacks="*.safetensors")
    (here / "pickled" / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    model(here / "no-weights", lacks="*.safetensors")
    model(here / "broken-json")
    (here / "broken-json" / "config.json").write_text('{"model_type": "kimi_k2", hidden_size}')
    model(here / "no-type", model_type=None)
    model(here / "unknown-type", model_type="gpt9")
    model(here / "no-field", hidden_size=None)
    model(here / "not-built", topk_method="greedy")
    model(here / "rope", rope_scaling={"type": "spiral", "factor": 2.0})
    model(here / "too-large", vocab_size=1_000_000_000)
    model(here / "quantized", quantization_config={"quant_method": "quip"})
    model(here / "no-tokenizer", lacks="tiktoken.model tokenizer_config.json")
    model(here / "no-template")
    settings = here / "no-template" / "tokenizer_config.json"
    there = json.loads(settings.read_text(encoding="utf-8"))
    settings.write_text(json.dumps({k: v for k, v in there.items() if k != "chat_template"}))
    (model(here / "wrong-template") / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }")
    model(here / "other-words", vocab_size=1500)
    cut = model(here / "cut") / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-100])


def write_rows(here: Path) -> None:
    rows(here / "chat.jsonl", *CHAT)
    rows(here / "short.jsonl", {"question": "What is the capital of France?", "answer": "Paris."})
    (here / "rows.docx").write_text("Hello")
    (here / "empty.jsonl").write_text("")
    (here / "binary.jsonl").write_bytes(bytes(range(256)) * 4)
    (here / "latin1.jsonl").write_bytes('{"question": "Où?", "answer": "Là."}\n'.encode("latin-1"))
    (here / "utf16.jsonl").write_bytes('{"question": "Q", "answer": "A"}\n'.encode("utf-16"))
    (here / "broken.jsonl").write_text(json.dumps(CHAT[0]) + "\n{broken\n")
    rows(here / "number.jsonl", 3)
    rows(here / "unknown.jsonl", {"colour": "blue", "size": 3})
    rows(here / "role.jsonl", {"messages": [ASKED, {"role": "bot", "content": "Hmm."}]})
    rows(here / "user.jsonl", {"messages": [ASKED]})
    rows(here / "null.jsonl", {"question": "Why?", "answer": None})
    picture = [{"type": "image_url", "image_url": {"url": "x.png"}}]
    rows(here / "image.jsonl", {"messages": [{"role": "user", "content": picture}, ANSWER]})
    rows(here / "pairs.jsonl", PAIR)
    rows(here / "long.jsonl", PAIR | {"chosen": ANSWER["content"] * 3})
    rows(here / "labels.jsonl", {"prompt": "Hello.", "completion": "Greet you, I do.", "label": True})
    rows(here / "same.jsonl", PAIR | {"rejected": PAIR["chosen"]})
    chosen, rejected = [ASKED, ANSWER], [ASKED | {"content": "Bye."}, ANSWER | {"content": "Bye."}]
    rows(here / "other-prompt.jsonl", {"chosen": chosen, "rejected": rejected})
    rows(here / "no-prompt.jsonl", {"chosen": "Paris.", "rejected": "London."})
    rows(here / "message.jsonl", ASKED)
    rows(here / "sharegpt.jsonl", {"conversations": [{"from": "humn", "value": "Hello."}]})
    (here / "odd.csv").write_text("task,reply\nWhy?,Because.\n")
    (here / "ragged.csv").write_text("question,answer\nWhy?,Because.,again\n")
    (here / "unclosed.json").write_text(json.dumps(CHAT)[:-1])
    (here / "folder").mkdir()


def write_tomls(here: Path) -> None:
    start = 'model = "m"\ndata = "d.jsonl"\n'
    for name, text in {
        "run.toml": 'dtype = "float32"\ntokens_per_step = 512\nsteps = 8\n',
        "run.yaml": "model: m\n",
        "broken.toml": 'model = "m\n',
        "key.toml": f"{start}[optimizer]\nlearning_rat = 1\n",
        "type.toml": f'{start}steps = "three"\n',
        "table.toml": f"{start}memory = 3\n",
        "twice.toml": f"{start}learning_rate = 1e-3\n[optimizer]\nlearning_rate = 2e-3\n",
    }.items():
        (here / name).write_text(text, encoding="utf-8")


def write(here: Path) -> None:
    """All of them, into an empty folder."""
    write_models(here)
    write_rows(here)
    write_tomls(here)
