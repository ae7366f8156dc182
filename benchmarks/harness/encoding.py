"""The sides of `dev bench data`, each in a process of its own. Ours imports no torch."""

from __future__ import annotations

import importlib
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness.fresh import peak_bytes
from benchmarks.harness.shapes import TINY_K2
from unfreeze.data import encoded_files, load_tokenizer
from unfreeze.data.store.workers import num_workers
from unfreeze.data.tokens.tiktoken_bpe import KIMI_PATTERN


def encode(files: list[str], model: str, length: int, processes: int, first: int = 0) -> dict[str, Any]:
    """Seconds until the files are examples, and the ids of the `first` ones.

    processes: 1 means this process alone, otherwise one worker per core where workers pay.
    """
    tokenizer = load_tokenizer(model)
    began = time.perf_counter()
    data = encoded_files(files, tokenizer, length, workers=0 if processes == 1 else None)
    return {
        "seconds": time.perf_counter() - began,
        "rows": data.stats.rows,
        "tokens": data.stats.tokens,
        "peak_bytes": peak_bytes(num_workers()),
        "own_peak_bytes": peak_bytes(),
        "ids": [list(example.tokens) for example in data.examples[:first]],
    }


def tokenized(files: list[str], model: str, processes: int, first: int) -> dict[str, Any]:
    """Encode with datasets.map and apply_chat_template, in `processes`; for `dev bench data`.

    The tokenizer is tiktoken.model as transformers converts it, or the folder's tokenizer.json.
    """
    from benchmarks.harness.peers import library

    transformers, datasets = library("transformers"), library("datasets")
    folder = Path(model)
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    if (folder / "tokenizer.json").is_file():
        fast = transformers.AutoTokenizer.from_pretrained(folder)
    else:
        slow = importlib.import_module("transformers.convert_slow_tokenizer")
        converter = slow.TikTokenConverter(vocab_file=str(folder / "tiktoken.model"), pattern=KIMI_PATTERN)
        converted, added = converter.converted(), settings["added_tokens_decoder"]
        # ids after the ranks, in order; a gap gets a placeholder name
        for id in range(converted.get_vocab_size(), max(map(int, added)) + 1):
            entry = added.get(str(id), {"content": f"<|reserved_token_{id}|>"})
            converted.add_special_tokens([entry["content"]])
        fast = transformers.PreTrainedTokenizerFast(tokenizer_object=converted)
        fast.chat_template = settings["chat_template"]
    datasets.disable_progress_bars()

    def tokens(batch: dict[str, Any]) -> dict[str, Any]:
        ids = fast.apply_chat_template(batch["messages"], tokenize=True, return_dict=True)["input_ids"]
        return {"ids": ids}

    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as cache:
        rows = datasets.load_dataset("json", data_files=files, split="train", cache_dir=cache)
        loaded = time.perf_counter()
        done = rows.map(tokens, batched=True, num_proc=processes, remove_columns=rows.column_names)
        seconds = time.perf_counter() - began
        return {
            "seconds": seconds,
            "load_seconds": loaded - began,
            "rows": len(done),
            "tokens": sum(map(len, done[: len(done)]["ids"])),
            "peak_bytes": peak_bytes(processes),
            "ids": done[:first]["ids"],
        }


def write_rows(path: Path, count: int) -> None:
    """Write conversations of one to three questions, built from the demo's rows; deterministic."""
    lines = (TINY_K2 / "yoda_train.jsonl").read_text(encoding="utf-8").splitlines()
    pairs, draw = [json.loads(line) for line in lines], random.Random(0)

    def text_of(name: str, least: int, most: int) -> str:
        return " ".join(pair[name] for pair in draw.choices(pairs, k=draw.randint(least, most)))

    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            messages = [{"role": "system", "content": "Short answers, please."}] * (draw.random() < 0.3)
            for _ in range(draw.choice((1, 2, 2, 3))):
                messages.append({"role": "user", "content": text_of("question", 1, 4)})
                messages.append({"role": "assistant", "content": text_of("answer", 4, 10)})
            file.write(json.dumps({"messages": messages}) + "\n")


def rates(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Figures of the runs of one side; rows per second is the median."""
    rates = sorted(run["rows"] / run["seconds"] for run in runs)
    middle = statistics.median(rates)
    return {
        "rows_per_second": middle,
        "fastest": rates[-1],
        "slowest": rates[0],
        "seconds": statistics.median(run["seconds"] for run in runs),
        "tokens_per_row": runs[0]["tokens"] / runs[0]["rows"],
        "peak_bytes": max(run["peak_bytes"] for run in runs),
        "note": f"{middle:,.0f} rows/s ({rates[0]:,.0f} to {rates[-1]:,.0f})",
    }
