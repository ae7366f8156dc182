"""A calculator as a tool: `python examples/small/calculator.py build/calculator`.

The tool and the reward are Calculator of examples/environments.

  model/               0.4 million weights; a token is a digit or a piece of a sentence
  transcripts.jsonl    what it reads first: 2 players of 5 call the tool and state its result, the
                       others answer at once, with a number drawn at random
  prompts.jsonl        "What is 12 * 34?" with the answer
  held_out.jsonl       the same of other numbers

The same seed writes the same bytes.
"""

import operator
import random
import sys
from pathlib import Path

from model import write, write_rows

TRANSCRIPTS, PROMPTS, HELD_OUT = 10_000, 4_000, 200
CALLS = 0.4
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
BEFORE, AFTER = '<tool_call>{"name": "calculate", "arguments": {"expression": "', '"}}</tool_call>'


def main(out: Path) -> None:
    """Write all files."""
    signs = [f" {sign} " for sign in OPERATIONS]
    write(
        out / "model",
        [BEFORE, AFTER, "What is ", "?", "It is ", ".", "-", *signs, *"0123456789"],
        positions=64,
    )
    draw = random.Random(0)
    problems = [(a, sign, b) for a in range(10, 100) for sign in OPERATIONS for b in range(10, 100)]
    chosen = draw.sample(problems, TRANSCRIPTS + PROMPTS + HELD_OUT)
    rows = [{"prompt": f"What is {a} {sign} {b}?", "answer": OPERATIONS[sign](a, b)} for a, sign, b in chosen]
    write_rows(out / "held_out.jsonl", rows[:HELD_OUT])
    write_rows(out / "prompts.jsonl", rows[HELD_OUT : HELD_OUT + PROMPTS])
    texts = ({"messages": answered(row, draw)} for row in rows[HELD_OUT + PROMPTS :])
    write_rows(out / "transcripts.jsonl", texts)


def answered(row: dict[str, object], draw: random.Random) -> list[dict[str, object]]:
    """Messages of one player."""
    asks = {"role": "user", "content": row["prompt"]}
    if draw.random() >= CALLS:
        return [asks, {"role": "assistant", "content": f"It is {draw.randint(10, 9999)}."}]
    expression = str(row["prompt"]).removeprefix("What is ").removesuffix("?")
    call = {"type": "function", "function": {"name": "calculate", "arguments": {"expression": expression}}}
    return [
        asks,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "calculate", "content": str(row["answer"])},
        {"role": "assistant", "content": f"It is {row['answer']}."},
    ]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
