"""Python's own documentation of the language as a corpus: text that every Python has, without the internet.

    python examples/pretrain/pydoc.py                     # topics of help() and a tokenizer into build/pydoc
    unfreeze pretrain examples/pretrain/pydoc.toml        # below its trigram; the report has both
    python examples/pretrain/pydoc.py --check build/pydoc/run

A run reports its held-out bits per byte beside those of byte n-grams counted on the same training rows.
"""

import argparse
import json
import sys
from pathlib import Path
from pydoc_data.topics import topics

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers


def make(out: Path, vocabulary: int) -> int:
    """Write one row per topic, and a byte-level tokenizer trained on them. -> bytes of text."""
    texts = [topics[name] for name in sorted(topics)]
    (out / "tokenizer").mkdir(parents=True, exist_ok=True)
    rows = (json.dumps({"text": text}) + "\n" for text in texts)
    (out / "topics.jsonl").write_text("".join(rows), encoding="utf-8")
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(out / "tokenizer" / "tokenizer.json"))
    settings = json.dumps({"eos_token": "<|endoftext|>"})
    (out / "tokenizer" / "tokenizer_config.json").write_text(settings + "\n")
    return sum(len(text.encode()) for text in texts)


def check(run: Path) -> int:
    """Compare the lowest held-out bits per byte with the trigram's. -> exit code."""
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    (baseline,) = [event["ngrams"] for event in events if event["kind"] == "baseline"]
    bits = min(event["bits_per_byte"] for event in events if event["kind"] == "eval")
    by_order = {each["order"]: each["bits_per_byte"] for each in baseline}
    words = ", ".join(f"{order}-gram {of:.3f}" for order, of in by_order.items())
    print(f"model {bits:.3f} bits per byte held out; {words}")
    if bits >= by_order[3]:
        print("not below the trigram", file=sys.stderr)
    return int(bits >= by_order[3])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/pydoc"))
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--check", type=Path, metavar="RUN", help="compare this run with its trigram")
    options = parser.parse_args()
    if options.check:
        sys.exit(check(options.check))
    print(f"{make(options.out, options.vocabulary):,} bytes of text")
