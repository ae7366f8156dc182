"""Names of a language model inside a release that holds more, such as a vision tower: data.

On disk such a name begins with a prefix; in the model it begins with what an ordinary release has there.
"""

from __future__ import annotations

from collections.abc import Iterable

NESTED = {
    # prefix on disk -> what the model has in its place
    "model.language_model.": "model.",  # Qwen3-VL, Gemma 4; the head beside it is lm_head
    "language_model.": "",  # Kimi-K2.5, Mistral 3, Gemma 3; the head inside it is language_model.lm_head
}


def prefix_of(names: Iterable[str]) -> str:
    """The prefix that these names on disk have, "" where they have none."""
    found = {prefix for name in names for prefix in NESTED if name.startswith(prefix)}
    return next((prefix for prefix in NESTED if prefix in found), "")


def in_model(prefix: str, name: str) -> str:
    """The model's name of a tensor on disk; one beside the language model keeps its own."""
    return NESTED[prefix] + name.removeprefix(prefix) if prefix and name.startswith(prefix) else name


def name_on_disk(prefix: str, name: str) -> str:
    """The inverse: the name on disk of one of the model's tensors."""
    inner = NESTED.get(prefix, "")
    return prefix + name.removeprefix(inner) if prefix and name.startswith(inner) else name


def model_name(name: str) -> str:
    """The model's name of a tensor on disk, whichever prefix it has."""
    return in_model(prefix_of((name,)), name)
