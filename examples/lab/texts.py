"""Texts for studies: Python's own documentation of the language, which every Python has, in pieces.

    python examples/lab/texts.py build/lab/texts     # train.jsonl, held_out.jsonl and tokenizer/

Every fifth topic is held out. The tokenizer is trained on the others.
"""

import argparse
import json
from pathlib import Path
from pydoc_data.topics import topics

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers


def make(out: Path, vocabulary: int = 1024) -> None:
    """Write the rows and a byte-level tokenizer. The tokenizer's last file is written last."""
    (out / "tokenizer").mkdir(parents=True, exist_ok=True)
    texts = [topics[name] for name in sorted(topics)]
    parts = {"train": [t for i, t in enumerate(texts) if i % 5], "held_out": texts[::5]}
    for name, rows in parts.items():
        lines = "".join(json.dumps({"text": text}) + "\n" for text in rows)
        (out / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(parts["train"], trainer)
    tokenizer.save(str(out / "tokenizer" / "tokenizer.json"))
    settings = json.dumps({"eos_token": "<|endoftext|>"})
    (out / "tokenizer" / "tokenizer_config.json").write_text(settings + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    make(parser.parse_args().out)
