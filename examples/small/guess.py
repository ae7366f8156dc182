"""A game of several turns: `python examples/small/guess.py build/guess`.

The game is GuessNumber of examples/environments.

  model/               0.4 million weights; a number is a token
  transcripts.jsonl    what it reads first: games of players who guess at random, no number twice; 1 of 4
                       heeds what he was told, and guesses at random among the numbers that are left
  prompts.jsonl        secrets from 1 to 8
  held_out.jsonl       each secret 8 times: all there are, so what is held out is the draw of the answers

One who does not heed it needs 4.5 guesses in the mean, one who does 3.1, binary search 2.6. The same seed
writes the same bytes.
"""

import random
import sys
from pathlib import Path

from model import write, write_rows

MOST, GAMES, HEED = 8, 10_000, 0.25
PROMPT = "Guess my number."
BEFORE, AFTER = '<tool_call>{"name": "guess", "arguments": {"number": ', "}}</tool_call>"


def main(out: Path) -> None:
    """Write all files."""
    words = [PROMPT, f" It is from 1 to {MOST}.", "higher", "lower", "right", "Done."]
    numbers = [str(number) for number in range(1, MOST + 1)]
    write(out / "model", [*words, BEFORE, AFTER, *numbers], positions=96)
    rows = [
        {"prompt": PROMPT, "secret": secret, "most": MOST, "game": game}
        for game in range(16 + 8)
        for secret in range(1, MOST + 1)
    ]
    write_rows(out / "prompts.jsonl", rows[: 16 * MOST])
    write_rows(out / "held_out.jsonl", rows[16 * MOST :])
    draw = random.Random(0)
    write_rows(out / "transcripts.jsonl", [{"messages": played(draw)} for _ in range(GAMES)])


def played(draw: random.Random) -> list[dict[str, object]]:
    """Messages of one game of a player."""
    secret, heeds = draw.randint(1, MOST), draw.random() < HEED
    left, guesses = list(range(1, MOST + 1)), list[int]()
    while secret not in guesses:
        guesses.append(number := draw.choice(left))
        left = [n for n in left if n != number and (not heeds or (n > number) == (secret > number))]
    messages: list[dict[str, object]] = [{"role": "user", "content": f"{PROMPT} It is from 1 to {MOST}."}]
    for number in guesses:
        call = {"type": "function", "function": {"name": "guess", "arguments": {"number": number}}}
        answer = "right" if number == secret else "higher" if number < secret else "lower"
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "name": "guess", "content": answer})
    return [*messages, {"role": "assistant", "content": "Done."}]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
