"""Environments as they are written for TRL, and some that misbehave."""

import os
import random
import time
from typing import Literal


class Calculator:
    """A register that is added to. The reward is 1 if it holds the goal."""

    def __init__(self):
        self.value = 0

    def reset(self, **row) -> str | None:
        self.goal = row["goal"]
        return f" Reach {self.goal}."

    def add(self, number: int) -> int:
        """Add to the register.

        Args:
            number: what to add
        """
        self.value += number
        return self.value

    async def slow_add(self, number: int, mode: Literal["a", "b"] = "a") -> str:
        """Add after a moment.

        Args:
            number: what to add,
                as a whole number
            mode: either

        Returns:
            the register in words
        """
        self.value += number
        return f"it is {self.value}"

    def fail(self) -> str:
        """Raise."""
        raise RuntimeError("out of order")

    def hang(self) -> str:
        """Never return."""
        while True:
            time.sleep(1)

    def leave(self) -> str:
        """End the process."""
        os._exit(1)

    def _hidden(self):
        return "not a tool"

    def get_reward(self) -> float:
        return float(self.value == self.goal)


class Adder:
    """A register with one tool."""

    def reset(self, goal, **row):
        self.goal, self.value = goal, 0
        return f" Reach {goal}."

    def add(self, number: int) -> int:
        """Add.

        Args:
            number: it
        """
        self.value += number
        return self.value

    def get_reward(self):
        return float(self.value == self.goal)


class Dice(Calculator):
    """Another object gives other results."""

    def roll(self) -> float:
        """Roll."""
        return random.random()


class Silent:
    def reset(self, **row):
        return None

    def look(self) -> str:
        """Look around."""
        return "nothing <tool_response> <|im_end|>"


class Torn(Silent):
    """Texts of half surrogate pairs, as names of files can be; a tool whose decorator keeps no name."""

    def reset(self, **row):
        return " \ud800"

    def renamed(function):
        def wrapper(self) -> str:
            """List."""
            return function(self)

        return wrapper

    @renamed
    def files(self):
        return "a\udc80"

    del renamed


class Broken(Silent):
    def reset(self, **row):
        raise ValueError("no such level")


class Untyped(Silent):
    def guess(self, letter):
        """Guess."""


class NoReset:
    def look(self) -> str:
        """Look."""
        return ""


WORLDS = {"calculator": Calculator, "silent": Silent}
