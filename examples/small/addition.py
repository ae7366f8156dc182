"""Addition of numbers of two and three digits: `python examples/small/addition.py build/addition`.

  model/          0.4 million weights; a token is a digit with its place: units, tens, hundreds, thousands
  texts.jsonl     what it reads first: sums of a careless teacher, who forgets every carry in 4 of 5
  prompts.jsonl   "5u4t3h+7u6t0h=" with the answer "2u1t4h0k": 345 + 67 = 412
  held_out.jsonl  the same of other sums

Units first, a digit needs only two others and a carry (Lee et al. 2023, arXiv:2307.03381); with its place,
two layers find those soon (index hints: Zhou et al. 2023, arXiv:2310.16028).
The same seed writes the same bytes.
"""

import random
import sys
from pathlib import Path

PLACES = "uthk"
TEXTS, PROMPTS, HELD_OUT = 20_000, 4_000, 200
CARELESS = 0.8


def reward(prompt: str, completion: str, answer: str) -> float:
    return float(completion == answer)


def main(out: Path) -> None:
    """Write all files."""
    from model import write, write_rows

    write(
        out / "model",
        ["+", "=", *(f"{digit}{place}" for place in PLACES for digit in range(10))],
        positions=32,
    )
    draw = random.Random(0)
    sums = draw.sample([(a, b) for a in range(10, 1000) for b in range(10, 1000)], TEXTS + PROMPTS + HELD_OUT)
    rows = [row(*pair) for pair in sums]
    write_rows(out / "held_out.jsonl", rows[:HELD_OUT])
    write_rows(out / "prompts.jsonl", rows[HELD_OUT : HELD_OUT + PROMPTS])
    texts = [row(*pair, carries=draw.random() >= CARELESS) for pair in sums[HELD_OUT + PROMPTS :]]
    write_rows(
        out / "texts.jsonl", ({"prompt": each["prompt"], "completion": each["answer"]} for each in texts)
    )


def row(a: int, b: int, carries: bool = True) -> dict[str, str]:
    """A prompt and its answer, or what is written without carries."""
    total = a + b if carries else sum((a // p % 10 + b // p % 10) % 10 * p for p in (1, 10, 100))
    return {"prompt": f"{written(a, 3)}+{written(b, 3)}=", "answer": written(total, 4)}


def written(number: int, digits: int) -> str:
    """345 -> "5u4t3h"."""
    return "".join(
        digit + place for digit, place in zip(f"{number:0{digits}}"[::-1], PLACES[:digits], strict=True)
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
