"""Broken inputs for every reader, and what a command does with them. One generator, two drivers.

A Reader plants one broken input into an empty folder, from a random.Random, and reads it as the commands do.
The property tests hand it a Random whose draws hypothesis makes (so that it can shrink them),
benchmarks/fuzz.py one with a printed seed.

The promise of each: it is accepted whole, or one UserError says why; never another exception, a hang, or a
file outside the folder.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import tokenizers
import torch
from safetensors import safe_open

from unfreeze import models
from unfreeze.adapters import LoraConfig, attach, load_adapter, save_adapter, sites
from unfreeze.adapters.shards import save_index, save_shard
from unfreeze.checkpoint import open_checkpoint, save_checkpoint
from unfreeze.checkpoint.tensors import TORCH_DTYPE
from unfreeze.commands.inspect import inspect
from unfreeze.config.adapter import lora_of
from unfreeze.config.names import name_of
from unfreeze.config.parse import parse
from unfreeze.core.errors import UserError
from unfreeze.data import BadRow, encode_files, load_tokenizer, read_rows
from unfreeze.generate.open import open_model
from unfreeze.generate.source import locate_model
from unfreeze.models.publish import published
from unfreeze.parallel.placement.dispatch import split_experts
from unfreeze.parallel.processes.collectives import ALONE, Alone
from unfreeze.parallel.processes.mesh import Mesh
from unfreeze.recipes.sft import Config
from unfreeze.report.events import number
from unfreeze.report.html import page, summary_lines
from unfreeze.report.run import expert_balance, facts, first_event_time, load_words, read_run
from unfreeze.train.optim import AdamW
from unfreeze.train.run import Run
from unfreeze.train.schedule import Schedule
from unfreeze.train.state import State, save, start_or_resume

Files = dict[str, bytes]

LLAMA = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 300,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "eos_token_id": 257,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}
KIMI = {
    "model_type": "kimi_k2",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "n_routed_experts": 3,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*layers[.]0[.].*"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 4,
                    "type": "int",
                    "symmetric": True,
                    "strategy": "group",
                    "group_size": 32,
                    "dynamic": False,
                    "actorder": None,
                },
            }
        },
    },
}
QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "hidden_size": 16,
    "intermediate_size": 24,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 2,
    "head_dim": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [0],
    "vocab_size": 300,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
CONFIGS = {"llama": LLAMA, "kimi": KIMI, "qwen3_moe": QWEN3_MOE}
CHAT = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt"
    " %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True)
class Reader:
    """`plant` writes one broken input into an empty folder; `read` does with it what a command does."""

    name: str
    plant: Callable[[Random, Path], None]
    read: Callable[[Path], object]


def attempt(reader: Reader, random: Random, folder: Path) -> str:
    """ "accepted", or the class of the UserError. Any other exception is the finding; so is an error that
    isn't fit to print."""
    reader.plant(random, folder)
    try:
        reader.read(folder)
    except UserError as error:
        check_line(error)
        return next(
            kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "unfreeze.core.errors"
        )
    return "accepted"


def check_line(error: UserError) -> None:
    """One short line that can be printed anywhere: no control characters (a name in a file may hold any), no
    lone surrogates."""
    for text in (error.message, error.next):
        assert len(text) <= 2000, f"{len(text)} characters: {text[:200]}"
        assert text.isprintable(), f"not printable: {text[:200]!r}"
    assert error.message.strip(), "an error without a word"


# What is put in a value's place. Text of RAW is written into the file as it stands: JSON that no serializer
# would write.
RAW = "raw:"
NASTY: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    3,
    7,
    10**6,
    10**12,
    10**30,
    2**31,
    2**63,
    -(2**63),
    0.5,
    1.5,
    2.0,
    1e-320,
    1e308,
    -1e12,
    math.nan,
    math.inf,
    -math.inf,
    "",
    "x",
    "16",
    "F32",
    "I32",
    "BOOL",
    "F4",
    "../x",
    "/etc/passwd",
    "..",
    "a/b",
    "model.safetensors",
    "\x00",
    "\x1b[2J\nx",
    "\ud800",
    "\u202e",
    "a" * 5000,
    "(" * 50,
    "(a+)+$",
    "[",
    [],
    {},
    [[]],
    [0],
    [-1],
    [1, 2],
    ["x"],
    [None],
    [10**20, 10**20],
    {"a": None},
    {"content": "x"},
    RAW + "9" * 5000,
    RAW + "-" + "9" * 5000,
    RAW + "1e999",
    RAW + "[" * 3000,
    RAW + "[" * 200_000,
    RAW + '{"a":' * 100_000,
    RAW + "NaN",
    RAW + "tru",
    RAW + '"\\ud83d"',
    RAW + '"\\u0000"',
    RAW + "1,",
    RAW,
]
BYTES = [
    b"",
    b"\x00",
    b"\xff",
    b"\xef\xbb\xbf",
    b"\xff\xfe",
    b"\r\n",
    b"\r",
    b"\n",
    b"{",
    b"}",
    b"[",
    b'"',
    b"\\",
    b"\xed\xa0\x80",
    b"\xc0\x80",
    b"\x80\x04",
]


def spots(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every node of a JSON value but the root."""
    keys: list[Any] = (
        list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    )
    return [found for key in keys for found in ((*path, key), *spots(value[key], (*path, key)))]


def altered(random: Random, value: Any, times: int = 1) -> Any:
    """A copy of a JSON value in which `times` nodes are replaced, removed, renamed or given a sibling.

    It depends on `random` alone: nothing of NASTY is handed out, since a later alteration may go into what an
    earlier one put in.
    """
    value = json.loads(json.dumps(value))
    for _ in range(times):
        places = spots(value)
        if not places:
            return value
        *parents, key = random.choice(places)
        inside = value
        for parent in parents:
            inside = inside[parent]
        how = random.randrange(8)
        if how == 0:
            del inside[key]
        elif how == 1 and isinstance(inside, dict):
            inside[random.choice([str(key) + "x", "", "../" + str(key), "\x1b[31m", "\ud800", "9" * 30])] = (
                inside.pop(key)
            )
        elif how == 2 and type(inside[key]) in (int, float):
            inside[key] = random.choice(
                [
                    inside[key] + 1,
                    inside[key] - 1,
                    inside[key] * 2,
                    -inside[key],
                    float(inside[key]),
                    str(inside[key]),
                ]
            )
        else:
            inside[key] = deepcopy(random.choice(NASTY))
    return value


def written(value: Any) -> bytes:
    """JSON text, with RAW texts as they stand. ensure_ascii keeps lone surrogates writable."""
    text = json.dumps(value)
    pieces = text.split(f'"{RAW}')
    for i in range(1, len(pieces)):
        inside, _, rest = _closed(pieces[i])
        pieces[i] = json.loads(f'"{inside}"') + rest
    return "".join(pieces).encode()


def _closed(text: str) -> tuple[str, str, str]:
    """(inside, quote, rest) of a JSON string whose opening quote was cut off."""
    at = 0
    while text[at] != '"':
        at += 2 if text[at] == "\\" else 1
    return text[:at], '"', text[at + 1 :]


def scarred(random: Random, raw: bytes, times: int = 1) -> bytes:
    """Bytes cut short, changed, doubled or with foreign ones in between."""
    for _ in range(times):
        at = random.randrange(len(raw) + 1)
        how = random.randrange(5)
        if how == 0:
            raw = raw[:at]
        elif how == 1:
            raw = raw[:at] + random.choice(BYTES) + raw[at:]
        elif how == 2 and at < len(raw):
            raw = raw[:at] + bytes([raw[at] ^ (1 << random.randrange(8))]) + raw[at + 1 :]
        elif how == 3:
            raw = raw[:at] + raw[max(0, at - random.randrange(1, 40)) :]
        else:
            raw = raw[:at] + raw[at + random.randrange(1, 9) :]
    return raw


def json_file(random: Random, raw: bytes) -> bytes:
    """A JSON file with one or two nodes altered, or with scarred bytes."""
    if random.randrange(4) == 0:
        return scarred(random, raw, random.randrange(1, 4))
    return written(altered(random, json.loads(raw), random.randrange(1, 3)))


def safetensors_file(random: Random, raw: bytes) -> bytes:
    """A safetensors file with its header altered, its length wrong, or its bytes scarred or cut."""
    length = int.from_bytes(raw[:8], "little")
    how = random.randrange(7)
    if how == 6:  # values that are no numbers
        at = random.randrange(8 + length, len(raw) - 8) & ~3
        return raw[:at] + b"\xff\xff\xff\x7f" * 2 + raw[at + 8 :]
    if how == 0:
        lie = random.choice(
            [
                0,
                1,
                length - 1,
                length + 1,
                len(raw),
                len(raw) - 8,
                2**32,
                2**63,
                2**64 - 1,
                10**8 + 1,
                random.randrange(2**16),
            ]
        )
        return lie.to_bytes(8, "little") + raw[8:]
    if how == 1:
        return raw[: random.randrange(len(raw))]
    if how == 2:
        text = scarred(random, raw[8 : 8 + length], random.randrange(1, 4))
    else:
        header = json.loads(raw[8 : 8 + length])
        names = [name for name in header if name != "__metadata__"]
        if how == 3:  # two entries trade their places, or one is written under two names
            a, b = random.choice(names), random.choice(names)
            header[a], header[b] = header[b], header[a]
            text = (
                written(header)
                if random.randrange(2)
                else written(header)[:-1] + b"," + json.dumps(a).encode() + b":" + written(header[a]) + b"}"
            )
        elif how == 4:  # offsets and shapes, where the sums are
            entry = header[random.choice(names)]
            numbers = entry[random.choice(["data_offsets", "shape"])]
            at = random.randrange(len(numbers) or 1)
            near = numbers[at] if numbers else 1
            numbers[at : at + 1] = [
                random.choice([0, -1, near + 1, near - 1, 2**63, 2**64, 10**30, 1.0, True, RAW + "9" * 4000])
            ]
            if random.randrange(4) == 0:
                entry["shape"] = random.choice(
                    [[0, 10**30], [2**32, 2**32], [1] * 200, [2] * 5000, [RAW + "9" * 4000] * 2, []]
                )
            text = written(header)
        else:
            text = written(altered(random, header, random.randrange(1, 3)))
    return len(text).to_bytes(8, "little") + text + raw[8 + length :]


# -----------------------------------------------------------------------------------------------------------
# good files to start from
def good_model(family: str) -> models.Decoder:
    """The family's tiny model, random weights."""
    model = models.build(models.shape(CONFIGS[family]), dtype=torch.float32, device="cpu")
    models.initialize(model, 0)
    return model


@cache
def checkpoint(family: str) -> Files:
    """A checkpoint folder with a tokenizer; kimi's is in two shards with an index, and INT4."""
    with TemporaryDirectory() as folder:
        extra = {
            "generation_config.json": b'{"eos_token_id": [257], "bos_token_id": 256}',
            **(tiktoken_files() if family == "kimi" else tokenizer_files()),
        }
        shard = 20_000 if family == "kimi" else 10**9
        target = Path(folder) / "m"
        save_checkpoint(
            target,
            CONFIGS[family],
            published(good_model(family), CONFIGS[family]),
            max_shard_bytes=shard,
            extra=extra,
        )
        return contents(target)


def contents(folder: Path) -> Files:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def spread(files: Files, folder: Path) -> None:
    """Write the files; a name with a folder makes it."""
    for name, raw in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(raw)


@cache
def tokenizer_files() -> Files:
    """A byte-level tokenizer.json: 256 bytes and a few merges, control tokens from 256 on."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    names = ["<s>", "<|end|>", "<|user|>", "<|assistant|>"]
    backend.add_special_tokens(names)
    settings = {
        "bos_token": "<s>",
        "eos_token": {"content": "<|end|>", "special": True},
        "add_bos_token": False,
        "chat_template": CHAT,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "additional_special_tokens": ["<|user|>"],
        "added_tokens_decoder": {
            str(256 + i): {"content": name, "special": True} for i, name in enumerate(names)
        },
    }
    special = {"bos_token": "<s>", "eos_token": {"content": "<|end|>"}}
    return {
        "tokenizer.json": backend.to_str().encode(),
        "tokenizer_config.json": json.dumps(settings).encode(),
        "special_tokens_map.json": json.dumps(special).encode(),
    }


@cache
def tiktoken_files() -> Files:
    """The same as tiktoken.model: 256 single bytes."""
    from base64 import b64encode

    ranks = b"".join(b64encode(bytes([byte])) + f" {byte}\n".encode() for byte in range(256))
    return {
        "tiktoken.model": ranks,
        "chat_template.jinja": CHAT.encode(),
        "tokenizer_config.json": tokenizer_files()["tokenizer_config.json"],
    }


class Rank(Alone):
    """A process of two."""

    def __init__(self, rank: int):
        self.rank, self.size = rank, 2


def in_shards(family: str, whole: models.Decoder, folder: Path) -> None:
    """The adapter as two processes write it that share the experts."""
    sizes = []
    for rank in (0, 1):
        mesh = Mesh(Rank(rank), ALONE, Rank(rank), whole.shape.num_experts)
        split = good_model(family)
        split_experts(split, mesh)
        attach(split, LoraConfig(rank=2, alpha=4.0), 0)
        save_shard(split, folder, rank, 2)
        sizes.append(len(mesh.rows_of(rank)))
    save_index(whole, folder, sizes, "base")


@cache
def adapter(family: str, layout: str) -> Files:
    model = good_model(family)
    attach(model, LoraConfig(rank=2, alpha=4.0), 0)
    with TemporaryDirectory() as folder:
        if layout == "shards":
            in_shards(family, model, Path(folder) / "a")
            return contents(Path(folder) / "a")
        save_adapter(model, Path(folder) / "a", layout, base_name="base", prefix="")  # type: ignore[arg-type]
        return contents(Path(folder) / "a")


def run_config() -> dict[str, Any]:
    return {"model": "m", "data": "d", "lora": {"rank": 2}}


@cache
def run_folder() -> Files:
    """A run with one save, events, plan, receipt and adapter."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        with Run(path, run_config()) as run:
            state = fresh_state(run)
            run.events.emit("start", 0, steps=2, model="m", data="d", resumed=False)
            run.events.emit("load", 0, bytes=100, seconds=0.1, expanded_bytes=400, rounded=1)
            for step in (1, 2):
                run.events.emit(
                    "train",
                    step,
                    loss=2.0 / step,
                    tokens=64,
                    seconds=0.1,
                    learning_rate=1e-3,
                    grad_norm=1.0,
                    peak_bytes=1000,
                    supervised_tokens=32,
                    expert_load={"1": [3, 4, 5]},
                )
            state.step, state.cursor = 1, {"epoch": 0, "position": 1}
            save(state)
            run.events.emit("receipt", 1, groups={"attention": {"parameters": 10, "grad_norm": 1.0}})
            run.events.emit("end", 2, reason="done", steps=2, tokens_per_second=640.0)
        spread({f"adapter/{name}": raw for name, raw in adapter("llama", "per-expert").items()}, path)
        (path / "resolved_config.json").write_text(json.dumps({"recipe": "sft", **run_config()}))
        (path / "plan.json").write_text(json.dumps({"lines": ["a plan"], "total": 10}))
        (path / "receipt.json").write_text(json.dumps({"groups": {"attention": {"parameters": 10}}}))
        return {name: raw for name, raw in contents(path).items() if name != "lock"}


def fresh_state(run: Run) -> State:
    model = good_model("llama")
    attach(model, LoraConfig(rank=2, alpha=4.0), 0)
    return start_or_resume(
        run, model, optimizer=AdamW(model), schedule=Schedule(peak=1e-3, steps=2, kind="constant")
    )


# ----------------------------------------------------------------------------------------------------------------------------- readers
TALK = [
    {"role": "user", "content": "Q"},
    {
        "role": "assistant",
        "content": "A",
        "reasoning_content": "hm",
        "tool_calls": [{"function": {"name": "f"}}],
    },
]
ROWS: list[dict[str, Any]] = [
    {"messages": TALK, "tools": [{"type": "function"}]},
    {"prompt": "Q", "completion": "A"},
    {"question": "Q", "answer": "A"},
    {"text": "a"},
    {"instruction": "Q", "input": "", "output": "A"},
    {"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "Q"}]}, TALK[1]]},
]


def plant_rows(random: Random, folder: Path) -> None:
    lines = [
        written(altered(random, random.choice(ROWS), random.randrange(3)))
        for _ in range(random.randrange(1, 5))
    ]
    raw = random.choice([b"\n", b"\n", b"\r\n", b"\n\n", b"\r"]).join(lines) + random.choice([b"", b"\n"])
    raw = random.choice([b"", b"", b"", b"\xef\xbb\xbf"]) + (
        scarred(random, raw, random.randrange(1, 3)) if random.randrange(2) else raw
    )
    if random.randrange(8) == 0:
        raw = raw.decode("utf-8", "replace").encode(
            random.choice(["utf-16", "utf-16-le", "utf-32", "latin-1"]), "replace"
        )
    name = random.choice(["d.jsonl", "d.jsonl", "d.json", "d.txt", "array.json", "d.csv"])
    if name == "array.json":
        raw = b"[" + raw.replace(b"\n", b",") + random.choice([b"]", b"]", b"]\n", b""])
    if name == "d.csv":
        raw = random.choice([b"messages,text\n", b"prompt,completion,id\n", b"text\n", b""]) + raw
    (folder / name).write_bytes(raw)


def read_data(folder: Path) -> None:
    """Strict, and skipping bad rows: then every row is either used or named (nothing vanishes)."""
    (path,) = folder.iterdir()
    bad: list[BadRow] = []
    good = list(read_rows(path, bad.append))
    if path.name in ("d.jsonl", "d.json") and not path.read_bytes().removeprefix(
        b"\xef\xbb\xbf"
    ).lstrip().startswith(b"["):
        raw = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
        assert len(good) + len(bad) == sum(1 for line in raw.split(b"\n") if line.strip()), "rows vanished"
    list(read_rows(path))


def plant_checkpoint(random: Random, folder: Path) -> None:
    """One file of a checkpoint broken; or a shard that is missing, another's, a link, a pickle."""
    files = dict(checkpoint(random.choice(list(CONFIGS))))
    shards = [name for name in files if name.endswith(".safetensors")]
    name = random.choice(
        [
            *shards,
            *shards,
            "config.json",
            "generation_config.json",
            *([INDEX, INDEX] if INDEX in files else []),
        ]
    )
    how = random.randrange(12)
    if name in shards and how == 0:
        del files[name]
        if random.randrange(2):
            files["pytorch_model.bin"] = b"\x80\x04}q\x00."
    elif name in shards and how == 1:
        files[name] = (
            files[random.choice(shards)]
            if random.randrange(2)
            else b"version https://git-lfs.github.com/spec/v1\n"
        )
    elif name in shards:
        files[name] = safetensors_file(random, files[name])
    else:
        files[name] = json_file(random, files[name])
    spread(files, folder)
    if how == 2 and name in files:
        secret = folder.parent / "outside" / name
        spread({name: (folder / name).read_bytes()}, secret.parent)
        (folder / name).unlink()
        (folder / name).symlink_to(secret)


INDEX = "model.safetensors.index.json"


def read_checkpoint(folder: Path) -> None:
    """unfreeze inspect, then what sft, chat and generate do: every parameter there, no meta tensor, or no
    model at all.

    Oracle: what is accepted, the safetensors library accepts too, with the same names, dtypes and shapes.
    """
    facts = inspect(str(folder))
    json.dumps(facts)
    manifest = open_checkpoint(str(folder))
    for file in manifest.files:
        with safe_open(file, "pt") as theirs:
            for name in theirs.keys():  # noqa: SIM118 (not a dict)
                tensor, info = theirs.get_tensor(name), manifest.tensors[name]
                assert (TORCH_DTYPE[info.dtype], info.shape, info.nbytes) == (
                    tensor.dtype,
                    tuple(tensor.shape),
                    tensor.nbytes,
                ), name
    model = open_model(manifest, torch.float32)
    assert all(not tensor.is_meta and tensor.numel() for tensor in [*model.parameters(), *model.buffers()])


def plant_config(random: Random, folder: Path) -> None:
    """A checkpoint whose config.json alone is wrong, sizes above all."""
    family = random.choice(list(CONFIGS))
    files = dict(checkpoint(family))
    config = json.loads(files["config.json"])
    if random.randrange(2):
        field = random.choice([name for name, value in config.items() if type(value) in (int, float)])
        config[field] = random.choice(
            [
                0,
                -1,
                1,
                3,
                1e12,
                10**12,
                10**9,
                100_000,
                10**30,
                2**63,
                "16",
                16.0,
                1.5,
                None,
                True,
                [16],
                math.nan,
                math.inf,
                1e-300,
                1e300,
            ]
        )
        files["config.json"] = written(config)
    elif random.randrange(8) == 0:
        files["config.json"] = written({"text_config": altered(random, config), "model_type": "kimi_k25"})
    else:
        files["config.json"] = json_file(random, files["config.json"])
    spread(files, folder)


BOMBS = [
    (
        "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}{% endfor %}{%"
        " endfor %}{% endfor %}"
    ),
    "{% for i in range(99999) %}{{ range(99999) | sum }}{% endfor %}",
    "{{ 9 ** 9 ** 9 }}",
    "{{ 'a' * 10 ** 10 }}",
    "{{ [0] * 10 ** 10 }}",
    (
        "{% set n = namespace(s='aaaaaaaaaa') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor"
        " %}{{ n.s }}"
    ),
    (
        "{% set n = namespace(s='aaaaaaaaaa') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor"
        " %}{{ n.s }}"
    ),
    "{% set n = namespace(i=3) %}{% for i in range(60) %}{% set n.i = n.i * n.i %}{% endfor %}{{ n.i }}",
    "{{ '%10000000000d' % 1 }}",
    "{{ 'a'.rjust(10 ** 10) }}",
    "{{ 'a' | center(10 ** 10) }}",
    "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ messages.__class__.__base__.__subclasses__() }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{{ self.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.system('false') }}",
    "{{ messages.append(1) }}",
    "{{ raise_exception('no') }}",
    "{% for m in messages %}{{ m.nothing.at.all }}{% endfor %}",
    "{{ messages[9999999999] }}",
    "{{ 1 // 0 }}",
    "{{ '\ud800' }}",
    "{{ 'a' | indent(10 ** 9) }}",
    "{{ '{:>9999999999}'.format(1) }}",
    "{{ dict.fromkeys(range(99999)) | string | length }}",
    "{% for i in messages recursive %}{{ loop(messages) }}{% endfor %}",
]


def plant_tokenizer(random: Random, folder: Path) -> None:
    files = dict(random.choice([tokenizer_files(), tiktoken_files()]))
    files["config.json"] = json.dumps(LLAMA).encode()
    files["generation_config.json"] = b'{"eos_token_id": [257]}'
    name = random.choice(list(files))
    if random.randrange(8) == 0:
        files["chat_template.jinja"] = random.choice(BOMBS).encode("utf-8", "surrogatepass")
    elif name.endswith(".json"):
        files[name] = json_file(random, files[name])
    else:
        files[name] = scarred(random, files[name], random.randrange(1, 4))
    spread(files, folder)


def read_tokenizer(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode("Hello, wörld \U0001f600\n", specials=False)
    tokenizer.decode(ids)
    tokenizer.encode(
        tokenizer.chat.render([{"role": "user", "content": "a"}], add_generation_prompt=True),
        specials=True,
        continues=True,
    )


HERE = Path(__file__).resolve()
TEMPLATES = [
    HERE.parents[1] / "data" / "tokens" / "templates",
    HERE.parents[3] / "shared" / "data" / "templates",
]
"""Chat templates of this repository, and those of releases where a folder of them lies beside it: an input is
made by its seed and their list."""
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, {"b": "x"}]}'}}
TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "d",
        "parameters": {
            "type": "object",
            "required": ["a"],
            "properties": {"a": {"type": "array", "items": {"type": ["string", "null"]}, "enum": ["x", 1]}},
        },
    },
}
TALKS: list[list[dict[str, Any]]] = [
    [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "A", "reasoning_content": "hm"},
        {"role": "user", "content": "Q2"},
        {"role": "assistant", "content": "A2"},
    ],
    [
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [CALL]},
        {"role": "tool", "content": "R", "tool_call_id": "call_1", "name": "f"},
        {"role": "assistant", "content": "A"},
    ],
    [
        {"role": "user", "content": [{"type": "text", "text": "Q"}]},
        {"role": "assistant", "content": "<think>hm</think>A"},
    ],
]
TURNS: list[Any] = [
    None,
    "",
    " ",
    "\n",
    3,
    1.5,
    True,
    [],
    {},
    ["a"],
    "user",
    "assistant",
    "tool",
    "developer",
    "a" * 100_000,
    "{" * 1000,
    "</think>",
    "<think>",
    "<think>a</think></think>",
    "<|im_end|>",
    "<|im_start|>user\n",
    "{{ 1 }}",
    "{% raw %}",
    "\U000f0000",
    "\U000f0002",
    "\u2028",
    "\x00",
    "\ufeff",
    RAW + "[" * 900 + "]" * 900,
    RAW + '{"a":' * 400 + "1" + "}" * 400,
    [{"type": "text", "text": ""}],
    [{"type": "image", "image": "x"}],
    [{"type": "text"}],
    [{"text": "a"}, {"type": "text", "text": "b"}],
    [{"name": "f"}],
    [{"function": "f"}],
    [{"function": {"name": "f"}}],
    [{"function": {"name": "f", "arguments": {}}}],
    [{"function": {"name": "f", "arguments": "{"}}],
    [{"function": {"name": None, "arguments": [1]}}],
    [{"function": {"name": "f", "arguments": {"a": RAW + "[" * 300 + "]" * 300}}}],
    {"a" * 20_000: "b" * 20_000},
    [CALL] * 200,
    [TOOL] * 50,
]


def odd_turns(random: Random, row: dict[str, Any]) -> dict[str, Any]:
    """A row of messages in which a value is odd, a turn stands twice, is missing or has another's place."""
    row = deepcopy(row)
    messages = row["messages"]
    how = random.randrange(6)
    at, other = random.randrange(len(messages)), random.randrange(len(messages))
    if how == 0:
        messages[at], messages[other] = messages[other], messages[at]
    elif how == 1:
        messages.insert(at, deepcopy(messages[other]))
    elif how == 2:
        del messages[at]
    elif how == 3 and isinstance(messages[at], dict):
        messages[at][random.choice(["content", "reasoning_content", "tool_calls", "name", "role"])] = (
            deepcopy(random.choice(TURNS))
        )
    else:
        *parents, key = random.choice(spots(row))
        inside: Any = row
        for parent in parents:
            inside = inside[parent]
        inside[key] = deepcopy(random.choice(TURNS))
    return row


def plant_template(random: Random, folder: Path) -> None:
    """Rows of odd messages for a release's own template; the marks of its text are tokens, and one of them
    ends a turn."""
    templates = [path for place in TEMPLATES for path in sorted(place.glob("*.jinja"))]
    source = random.choice(templates).read_text(encoding="utf-8")
    marks = sorted(
        set(re.findall(r"<[|\uff5c][^<>{}'\"]{1,30}[|\uff5c]>|<(?:start|end)_of_turn>|</?s>", source))
    )[:40]
    ends = [mark for mark in marks if "end" in mark or "eot" in mark or mark == "</s>"] or ["<|end|>"]
    files = dict(tokenizer_files())
    backend = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
    backend.add_special_tokens(marks)
    settings = {
        "bos_token": "<s>",
        "eos_token": random.choice(ends),
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    files |= {
        "tokenizer.json": backend.to_str().encode(),
        "tokenizer_config.json": json.dumps(settings).encode(),
    }
    files |= {"special_tokens_map.json": b"{}", "chat_template.jinja": source.encode()}
    rows = []
    for _ in range(random.randrange(1, 4)):
        row: dict[str, Any] = {
            "messages": deepcopy(random.choice(TALKS)),
            **({"tools": [deepcopy(TOOL)]} if random.randrange(2) else {}),
        }
        for _ in range(random.randrange(3)):
            row = odd_turns(random, row) if row["messages"] and isinstance(row["messages"], list) else row
        rows.append(written(row))
    spread({**files, "d.jsonl": b"\n".join(rows) + b"\n"}, folder)


def read_template(folder: Path) -> None:
    """What sft does with the rows, skipping bad ones and then strict: every row is used, dropped or named;
    strict refuses what is skipped."""
    tokenizer, path = load_tokenizer(folder), folder / "d.jsonl"
    stats = encode_files([path], tokenizer, 4096, on_bad_row="skip").stats
    assert stats.rows == len(path.read_bytes().splitlines()), "rows vanished"
    strict = encode_files([path], tokenizer, 4096)
    assert not stats.bad and (strict.stats.rows, strict.stats.tokens) == (stats.rows, stats.tokens), (
        "a bad row was accepted"
    )
    assert all(example.num_supervised for example in strict.examples), "an example without a supervised token"


def plant_adapter(random: Random, folder: Path) -> None:
    family, layout = random.choice(list(CONFIGS)), random.choice(["per-expert", "peft", "shards"])
    layout = "peft" if layout == "shards" and family == "llama" else layout
    files = dict(adapter(family, layout))
    name = random.choice(list(files))
    if random.randrange(16) == 0:
        del files[name]
    else:
        files[name] = (
            safetensors_file(random, files[name])
            if name.endswith(".safetensors")
            else json_file(random, files[name])
        )
    spread(files, folder)
    (folder / "family").write_text(random.choice([family, family, family, "llama"]))


def read_adapter(folder: Path) -> None:
    """Loaded whole, or the model is as it was."""
    locate_model(folder)
    with suppress(UserError):
        lora_of(folder)
    model = good_model((folder / "family").read_text())
    try:
        load_adapter(model, folder)
    except UserError:
        assert not sites(model) and all(parameter.requires_grad for parameter in model.parameters()), (
            "a partly loaded adapter"
        )
        raise
    values = [p for site in sites(model) for p in site.adapter.parameters()]
    assert values and all(bool(value.isfinite().all()) for value in values), "an adapter that isn't finite"


def plant_run(random: Random, folder: Path) -> None:
    files = dict(run_folder())
    name = random.choice(list(files))
    if random.randrange(16) == 0:
        del files[name]
    elif name.endswith(".safetensors"):
        files[name] = safetensors_file(random, files[name])
    elif name.endswith(".jsonl"):
        lines = files[name].splitlines()
        at = random.randrange(len(lines))
        if random.randrange(4) == 0:
            lines = throughout(random, lines, at)
        else:
            lines[at] = json_file(random, lines[at])
        files[name] = b"\n".join(lines) + b"\n"
    else:
        files[name] = json_file(random, files[name])
    spread(files, folder)


def throughout(random: Random, lines: list[bytes], at: int) -> list[bytes]:
    """One value wrong in every event of a kind, so that no event contradicts another."""
    events = [json.loads(line) for line in lines]
    *parents, key = random.choice(spots(events[at]))
    value, kind = random.choice(NASTY), events[at]["kind"]
    for event in events:
        if event["kind"] == kind:
            inside = event
            for parent in parents:
                inside = inside[parent]
            inside[key] = deepcopy(value)
    return [written(event) for event in events]


def read_run_folder(folder: Path) -> None:
    """unfreeze report, chat and the resuming command on one run folder. All three are tried; the first error
    is raised."""
    errors: list[UserError] = []
    for step in (_report, locate_model, _resume):
        try:
            step(folder)
        except UserError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _report(folder: Path) -> None:
    run = read_run(folder)
    json.dumps(facts(run))
    for event in run.events:
        number(event.get("loss"))
        if event["kind"] == "load":
            load_words(event)
    first_event_time(run), expert_balance(run), run.state, run.source("model"), run.loaded
    if (folder / "events.jsonl").stat().st_size % 8 == 0:  # the page takes a hundred times as long
        page(run)
        "\n".join(summary_lines(folder))


def _resume(folder: Path) -> None:
    with Run(folder, run_config()) as run:
        state = fresh_state(run)
        assert state.step in (0, 1), state.step
        assert all(
            bool(tensor.isfinite().all()) for tensor in state.tensors().values() if tensor.is_floating_point()
        )


TOML = {
    "model": '"m"',
    "data": '"d.jsonl"',
    "out": '"o"',
    "steps": "5",
    "epochs": "1.5",
    "tokens_per_step": "4096",
    "micro_batches": "1",
    "sequence_length": "128",
    "truncation": '"tail"',
    "learning_rate": "1e-4",
    "schedule": '"cosine"',
    "warmup": "0.1",
    "clip": "1.0",
    "dtype": '"bfloat16"',
    "device": '"cpu"',
    "seed": "0",
}
LORA = {
    "rank": "8",
    "alpha": "16.0",
    "targets": '["experts", "*.q_proj"]',
    "experts_rank": "4",
    "scaling": '"alpha/r"',
}
TOML_VALUES = [
    "nan",
    "inf",
    "-inf",
    "-1",
    "0",
    "1.5",
    "true",
    '""',
    '"x"',
    '"--help"',
    '"--out"',
    "[]",
    '["--steps", "3"]',
    '["-h"]',
    "{}",
    "{a = 1}",
    "1e999",
    "9" * 5000,
    "99999999999999999999",
    "1979-05-27",
    "07:32:00",
    '"\\u0000"',
    '"\\u001b[2J"',
    "[[1]]",
    "[" * 2000,
    "0x",
    "'''a\nb'''",
    '"5"',
    "2e-4",
]


def plant_toml(random: Random, folder: Path) -> None:
    tables = [dict(TOML), dict(LORA)]
    for _ in range(random.randrange(1, 3)):
        table = random.choice(tables)
        key = random.choice(list(table))
        how = random.randrange(6)
        if how == 0:
            table[random.choice([key[:-1], key + "s", '""', "rnak", "a.b", '"\\u001b"', key.upper()])] = (
                table.pop(key)
            )
        elif how == 1:
            table[key] = random.choice(list(TOML.values()))
        else:
            table[key] = random.choice(TOML_VALUES)
    top, lora = tables
    written: dict[str, dict[str, str]] = {"": {}, "lora": lora}
    in_tables = random.sample(("data", "training", "optimizer", "memory"), random.randrange(3))
    for key, value in top.items():  # by its flat name, or in its table
        table, _, name = name_of(Config, key).rpartition(".")
        at, by = (table, name) if table in in_tables else ("", key)
        written.setdefault(at, {})[by] = value
    raw = "".join(
        (f"[{table}]\n" if table else "") + "".join(f"{key} = {value}\n" for key, value in fields.items())
        for table, fields in written.items()
    ).encode()
    (folder / "run.toml").write_bytes(
        scarred(random, raw, random.randrange(1, 3)) if random.randrange(4) == 0 else raw
    )


def read_toml_config(folder: Path) -> None:
    config = parse(Config, [str(folder / "run.toml")], command="sft", description="")
    given = tomllib.loads((folder / "run.toml").read_text())
    places = {name_of(Config, key): value for key, value in given.items() if not isinstance(value, dict)}
    for table, fields in given.items():
        places |= (
            {f"{table}.{key}": value for key, value in fields.items()} if isinstance(fields, dict) else {}
        )
    for place, value in places.items():
        got = attrgetter(place.replace("-", "_"))(config)
        # one path may stand for several
        same = list(got) if isinstance(value, list) else got[0] if isinstance(got, tuple) else got
        assert (
            same == (float(value) if isinstance(got, float) else value)
            and isinstance(value, bool) == isinstance(got, bool)
            and isinstance(value, str) == isinstance(same, str)
        ), place
    tables = [fields for fields in config.model_dump().values() if isinstance(fields, dict)]
    values = [value for fields in [config.model_dump(), *tables] for value in fields.values()]
    assert all(math.isfinite(value) for value in values if isinstance(value, float)), "a number that is none"


READERS = {
    reader.name: reader
    for reader in (
        Reader("rows", plant_rows, read_data),
        Reader("checkpoint", plant_checkpoint, read_checkpoint),
        Reader("config", plant_config, read_checkpoint),
        Reader("tokenizer", plant_tokenizer, read_tokenizer),
        Reader("template", plant_template, read_template),
        Reader("adapter", plant_adapter, read_adapter),
        Reader("run", plant_run, read_run_folder),
        Reader("toml", plant_toml, read_toml_config),
    )
}
