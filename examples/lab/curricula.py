"""Data for examples/lab/curricula.toml: words to write backwards, from easy to hard, and their reward.

    python examples/lab/curricula.py build/lab/words

A letter carries its place, so that a small model finds it soon: "c1a2b3=" becomes "b3a2c1". The teacher
writes each letter right with probability RIGHT, else any of the letters. A model that has read the texts
spells a word of n letters right with probability about .56^n: .32 of two letters, .01 of eight.

  model/           config.json and a tokenizer, without weights
  texts.jsonl      what the model reads first: the teacher's words of all lengths
  prompts.jsonl    words of 2 to 8 letters, as many of each
  hard.jsonl       as many words, of 8 letters
  held_out.jsonl   other words of 8 letters
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

LETTERS = "abcdefgh"
SHORTEST, LONGEST = 2, 8
TEXTS, PROMPTS, HELD_OUT = 20_000, 240, 100
RIGHT = 0.5


def reward(prompt: str, completion: str, answer: str) -> float:
    return float(completion == answer)


def main(out: Path) -> None:
    """Write all files. The same bytes each time."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "small"))
    from model import write, write_rows

    places = [f"{letter}{place}" for place in range(1, LONGEST + 1) for letter in LETTERS]
    write(out / "model", ["=", *places], width=64, positions=32)
    draw = random.Random(0)
    longest = draw.sample(range(len(LETTERS) ** LONGEST), HELD_OUT + PROMPTS)
    words = ["".join(LETTERS[number >> 3 * i & 7] for i in range(LONGEST)) for number in longest]
    write_rows(out / "held_out.jsonl", [row(word) for word in words[:HELD_OUT]])
    write_rows(out / "hard.jsonl", [row(word) for word in words[HELD_OUT:]])
    rows = [row(word[: SHORTEST + i % (LONGEST - SHORTEST + 1)]) for i, word in enumerate(words[HELD_OUT:])]
    draw.shuffle(rows)
    write_rows(out / "prompts.jsonl", rows)
    texts: list[dict[str, str]] = []
    for _ in range(TEXTS):
        word = "".join(draw.choices(LETTERS, k=draw.randint(SHORTEST, LONGEST)))
        read = "".join(each if draw.random() < RIGHT else draw.choice(LETTERS) for each in word)
        texts.append({"prompt": row(word)["prompt"], "completion": row(read)["answer"]})
    write_rows(out / "texts.jsonl", texts)


def row(word: str) -> dict[str, str]:
    """A prompt with its answer; "cab" -> "c1a2b3=", "b3a2c1"."""
    letters = [f"{letter}{place}" for place, letter in enumerate(word, 1)]
    return {"prompt": "".join(letters) + "=", "answer": "".join(reversed(letters))}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
