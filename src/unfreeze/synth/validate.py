"""What an answer must be to become a row, and which rows repeat another or an evaluation set."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from unfreeze.core.errors import ConfigError, DataError, UserError, nearest
from unfreeze.synth.prompts import read_seeds
from unfreeze.synth.recipe import Check, Recipe
from unfreeze.teach.answers import Answer
from unfreeze.untrusted.json_object import is_list, is_object, parse_object
from unfreeze.untrusted.pattern import pattern

SCRIPTS = {
    "zh": r"[\u3400-\u4dbf\u4e00-\u9fff\U00020000-\U0002ebef]",
    "ja": r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff]",
    "ko": r"[\uac00-\ud7af\u1100-\u11ff]",
    "ru": r"[\u0400-\u04ff]",
    "en": r"[A-Za-z]",
}
"""Letters of a language's script."""
MOST = 0.6  # share of an answer's letters that are of its language's script
PERMUTATIONS, SHINGLE = 128, 5
WORDS = 13  # in a row, that a row may not share with an evaluation set
THINK = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)
TOKEN = re.compile(r"[^\W_]+|[\u3400-\u9fff]")


def fault_of(answer: Answer, recipe: Recipe) -> str:
    """Return why an answer cannot become a row, "" if it can."""
    check, text = recipe.check, answer.text
    if answer.ended == "length":
        return f"cut at max_tokens = {recipe.max_tokens}"
    if answer.ended not in ("stop", "tool_calls"):
        return f"ended by {answer.ended}"
    if not text.strip():
        return "empty"
    if not check.least_chars <= len(text) <= check.most_chars:
        return f"not of {check.least_chars:,} to {check.most_chars:,} characters"
    lower = text.lower()
    if named := next((word for word in check.forbid if word.lower() in lower), ""):
        return f"contains {named!r}"
    if check.form == "json":
        try:
            parse_object(text.strip().encode("utf-8", "replace"), "it", UserError)
        except UserError:
            return "no JSON object"
    if check.regex and not pattern(check.regex, "check.regex", ConfigError).search(text):
        return "without check.regex"
    if check.language and not of_language(text, check.language):
        return f"not in {check.language}"
    if recipe.reasoning == "require" and not answer.reasoning.strip():
        return "no reasoning"
    if not recipe.least_reasoning <= len(answer.reasoning) <= recipe.most_reasoning:
        return f"reasoning not of {recipe.least_reasoning:,} to {recipe.most_reasoning:,} characters"
    return ""


def thought_apart(answer: Answer) -> Answer:
    """Return the answer with a <think> block at its start as its reasoning."""
    match = None if answer.reasoning else THINK.match(answer.text)
    if not match:
        return answer
    return Answer(answer.text[match.end() :], answer.ended, match[1].strip(), answer.calls, answer.about)


def of_language(text: str, language: str) -> bool:
    """True if most letters of a text are of a language's script. Raises ConfigError for an unknown one."""
    if language not in SCRIPTS:
        raise ConfigError(
            f"check.language = {language!r} is not known{nearest(language, SCRIPTS)}", next=", ".join(SCRIPTS)
        )
    letters = sum(char.isalpha() for char in text)
    own = len(re.findall(SCRIPTS[language], text))
    return letters > 0 and own >= MOST * letters


def repeated(texts: Sequence[str], near: float) -> dict[int, int]:
    """Return place -> earlier place, for texts whose 5-character shingles have a Jaccard similarity >= near.

    MinHash finds candidates (128 permutations); each is compared exactly. near = 1: only equal texts.
    """
    first: dict[str, int] = {}
    repeats: dict[int, int] = {}
    for place, text in enumerate(map(_plain, texts)):
        if text in first:
            repeats[place] = first[text]
        first.setdefault(text, place)
    if near >= 1 or len(first) < 2:
        return repeats
    try:
        datasketch: Any = import_module("datasketch")  # an extra, and a second
    except ImportError:
        raise ConfigError(
            "near-duplicates need the library datasketch, which is not installed",
            next="pip install datasketch, or check.near = 1 for equal answers only",
        ) from None
    # a lower threshold for candidates, since each is compared
    index: Any = datasketch.MinHashLSH(threshold=max(0.1, near - 0.15), num_perm=PERMUTATIONS)
    shingles: dict[int, set[bytes]] = {}
    for text, place in first.items():
        own = {text[i : i + SHINGLE].encode() for i in range(max(1, len(text) - SHINGLE + 1))}
        sketch: Any = datasketch.MinHash(num_perm=PERMUTATIONS)
        sketch.update_batch(list(own))
        alike = [other for other in sorted(index.query(sketch)) if _jaccard(own, shingles[other]) >= near]
        if alike:
            repeats[place] = alike[0]
            continue
        index.insert(place, sketch)
        shingles[place] = own
    return repeats


def contaminated(texts: Sequence[str], against: Sequence[str]) -> set[int]:
    """Return the places of texts that share WORDS words in a row with a text of the evaluation sets."""
    if not against:
        return set()
    known = {gram for file in against for text in _texts_of(Path(file)) for gram in _grams(text)}
    return {place for place, text in enumerate(texts) if not known.isdisjoint(_grams(text))}


def _texts_of(path: Path) -> Iterator[str]:
    if not path.is_file():
        raise DataError(f"check.against: there is no file {path}", next="correct check.against")
    for row in read_seeds(path):
        yield " \n ".join(_strings(row.fields))


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    inner = list(value.values()) if is_object(value) else value if is_list(value) else []
    for each in inner:
        yield from _strings(each)


def _grams(text: str) -> set[tuple[str, ...]]:
    words = [word.lower() for word in TOKEN.findall(text)]
    return {tuple(words[i : i + WORDS]) for i in range(len(words) - WORDS + 1)}


def _jaccard(one: set[bytes], two: set[bytes]) -> float:
    return len(one & two) / len(one | two)


def _plain(text: str) -> str:
    return " ".join(text.lower().split())


def names_of(check: Check) -> None:
    """Raise ConfigError for a check that cannot be made, before anything is sent."""
    if check.language:
        of_language("a", check.language)
    for file in check.against:
        if not Path(file).is_file():
            raise ConfigError(f"check.against: there is no file {file}", next="correct check.against")
