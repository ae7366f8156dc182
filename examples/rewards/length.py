"""Reward of length: 0 up to a number of characters, then falling in a line to -1 at a second one.

    unfreeze reward show examples/rewards/length.py --model MODEL --data problems.jsonl

The soft punishment of DAPO (arXiv:2503.14476, equation 13), over characters instead of tokens. Give it
beside a reward that reads the answer: alone it teaches to say nothing.
"""

FREE, MOST = 400, 800  # characters


def reward(prompt: str, completion: str, free: int = FREE, most: int = MOST) -> float:
    """0 up to `free` characters, -1 from `most` on. A row may have columns of these names."""
    over = len(completion) - free
    return max(-1.0, min(0.0, -over / (most - free)))
