"""Texts for studies: what Python's own library says about itself, which every Python has, in paragraphs.

    python examples/lab/texts.py build/lab/texts     # train.jsonl, held_out.jsonl and tokenizer/

Topics of help() and the docstrings of the standard library, in pieces of up to 400 characters, each once.
Every tenth module or topic is held out, as 300 pieces. The tokenizer is trained on the others.
"""

import argparse
import ast
import json
import random
import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

import unfreeze

LEAST, MOST = 80, 400  # characters of a piece
HELD_OUT = 300


def texts() -> Iterator[tuple[str, str]]:
    """(topic or module, text), in the order of their names."""
    yield from sorted(topics.items())
    library = Path(sysconfig.get_paths()["stdlib"])
    for file in sorted(library.rglob("*.py")):
        place = file.relative_to(library)
        if {"site-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data"} & set(place.parts):
            continue
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
        docstrings = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds)]
        yield str(place), "\n\n".join(filter(None, docstrings))


def pieces(text: str) -> Iterator[str]:
    """Paragraphs joined to at most MOST characters; a longer one stays whole."""
    piece = ""
    for paragraph in text.split("\n\n"):
        if piece and len(piece) + len(paragraph) > MOST:
            yield piece
            piece = ""
        piece = f"{piece}\n\n{paragraph}" if piece else paragraph.strip()
    yield piece


def make(out: Path, vocabulary: int = 1024) -> None:
    """Write the rows, and last a byte-level tokenizer."""
    out.mkdir(parents=True, exist_ok=True)
    parts: dict[str, list[str]] = {"train": [], "held_out": []}
    seen: set[str] = set()
    for number, (_, text) in enumerate(texts()):
        for piece in pieces(text):
            if len(piece) >= LEAST and piece not in seen:
                seen.add(piece)
                parts["train" if number % 10 else "held_out"].append(piece)
    draw = random.Random(0)
    draw.shuffle(parts["train"])
    parts["held_out"] = draw.sample(parts["held_out"], min(HELD_OUT, len(parts["held_out"])))
    for name, rows in parts.items():
        lines = "".join(json.dumps({"text": text}) + "\n" for text in rows)
        (out / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    files, folder = str(out / "train.jsonl"), out / "tokenizer"
    shutil.rmtree(folder, ignore_errors=True)
    unfreeze.train_tokenizer(files, vocab=vocabulary, reserved=0, out=folder, quiet=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    make(parser.parse_args().out)
