"""Data: names of a language model inside a release that holds more, such as a vision tower.

On disk such a name starts with a prefix; in the model it starts as in an ordinary release.
"""

from __future__ import annotations

from collections.abc import Iterable

NESTED = {
    # prefix on disk -> the model's prefix
    "model.language_model.": "model.",  # Qwen3-VL, Gemma 4; the head beside it is lm_head
    "language_model.": "",  # Kimi-K2.5, Mistral 3, Gemma 3; the head inside it is language_model.lm_head
}


def prefix_of(names: Iterable[str]) -> str:
    """The prefix of these names on disk, "" if they have none."""
    prefixes = {prefix for name in names for prefix in NESTED if name.startswith(prefix)}
    return next((prefix for prefix in NESTED if prefix in prefixes), "")


def in_model(prefix: str, name: str) -> str:
    """The model's name of a tensor on disk; a tensor outside the language model keeps its name."""
    return NESTED[prefix] + name.removeprefix(prefix) if prefix and name.startswith(prefix) else name


def name_on_disk(prefix: str, name: str) -> str:
    """The inverse: the name on disk of one of the model's tensors."""
    inner = NESTED.get(prefix, "")
    return prefix + name.removeprefix(inner) if prefix and name.startswith(inner) else name


def model_name(name: str) -> str:
    """The model's name of a tensor on disk with any prefix."""
    return in_model(prefix_of((name,)), name)
