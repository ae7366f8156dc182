"""A game of several turns whose best play is known: guess a number from 1 to `most`.

unfreeze grpo --model MODEL --data numbers.jsonl --env examples/environments/guess_number.py:GuessNumber

{"prompt": "Guess my number.", "secret": 37, "most": 100}

Best play is binary search. The part `regret` is the number of guesses beyond its mean, so a run that learns
the game brings the mean regret to 0; below that is luck.
"""


class GuessNumber:
    """The reward is 1 for the first guess, 0 for `most` guesses or more, and 0 for a number never guessed."""

    def reset(self, secret: int, most: int = 100, **row) -> str:
        self.secret, self.most, self.guesses, self.right = secret, most, 0, False
        return f" It is from 1 to {most}."

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: the guess
        """
        if self.right:
            return "right; the game is over"
        self.guesses += 1
        self.right = number == self.secret
        return "right" if self.right else "higher" if number < self.secret else "lower"

    def get_reward(self) -> dict[str, float]:
        guesses = self.guesses if self.right else self.most
        reward = 1 - (guesses - 1) / max(1, self.most - 1)
        return {"reward": max(0.0, reward), "guesses": guesses, "regret": guesses - optimum(self.most)}


def optimum(most: int) -> float:
    """Mean guesses of binary search over 1 to `most`: a tree with at most 2^(d - 1) numbers at depth d."""
    depth = most.bit_length()
    return ((most + 1) * depth - 2**depth + 1) / most
