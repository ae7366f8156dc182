"""Conditions under which an answer becomes a row, and which rows repeat another or an evaluation set."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from unfreeze.config.clean import Contamination, Duplicates
from unfreeze.core.errors import ConfigError, UserError, nearest, printable
from unfreeze.data.clean.contamination import Evaluation
from unfreeze.data.clean.document import Document
from unfreeze.data.clean.duplicates import Exact, Near
from unfreeze.data.clean.language import ALONE, CYRILLIC, language_of
from unfreeze.synth.prompts import read_seeds
from unfreeze.synth.recipe import Check, Recipe
from unfreeze.teach.answers import Answer
from unfreeze.untrusted.json_object import is_list, is_object, parse_object
from unfreeze.untrusted.pattern import pattern

SHORT = 20  # words; a language is known by its function words, and a shorter text may have too few
MAIN = 0.5  # share of letters in the main script
LANGUAGES = {
    **{language: "latin" for language in ("en", "de", "fr", "es", "it", "pt", "nl")},
    **{language: "cyrillic" for language in CYRILLIC},
    **{language: language for language in ("zh", "ja", *ALONE.values())},
}
"""Language -> its script, or itself where the script is enough."""
HALF = re.compile("[\ud800-\udfff]")
"""JSON can name such a character, UTF-8 and so no data file can hold it."""
THINK = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)


def fault_of(answer: Answer, recipe: Recipe) -> str:
    """Return why an answer cannot become a row, "" if it can."""
    check, text = recipe.check, answer.text
    if answer.ended == "length":
        return f"cut at max_tokens = {recipe.max_tokens}"
    if answer.ended not in ("stop", "tool_calls"):
        return f"ended by {printable(answer.ended)}"
    if not text.strip():
        return "empty"
    if HALF.search(text + answer.reasoning):
        return "holds half a surrogate pair"
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
    """True if a text is in a language; a short one if its script is that of the language.

    Raises ConfigError for a language that cannot be recognised.
    """
    if language not in LANGUAGES:
        raise ConfigError(
            f"check.language = {language!r} is not known{nearest(language, LANGUAGES)}",
            next=", ".join(LANGUAGES),
        )
    document = Document(text)
    name, share = language_of(document)
    script = LANGUAGES[language]
    alike = name == script or (len(document.units) < SHORT and LANGUAGES.get(name) == script)
    return share >= MAIN and (name == language or alike)


def repeated(texts: Sequence[str], near: float) -> dict[int, int]:
    """Return place -> earlier place, for texts that repeat one: equal, or similar (data/clean/duplicates.py).

    near: least Jaccard similarity; 1: only equal texts.
    """
    exact, repeats, stayed = Exact(), dict[int, int](), list[int]()
    with ExitStack() as ends:
        index = None
        if near < 1:
            folder = ends.enter_context(TemporaryDirectory(prefix="unfreeze-synth-"))
            index = Near(Duplicates(threshold=near), Path(folder))
            ends.callback(index.close)
        for place, text in enumerate(texts):
            if (before := exact.before(text)) is not None:
                repeats[place] = before
                continue
            if index:
                signature = index.signature(Document(text))
                if similar := index.similar(signature):
                    repeats[place] = stayed[similar[0]]
                    continue
                index.add(signature)
            exact.add(text, place)
            stayed.append(place)
    return repeats


def contaminated(texts: Sequence[str], against: Sequence[str]) -> dict[int, str]:
    """Return place -> reason, for texts that share an n-gram with a row of the evaluation sets."""
    if not against:
        return {}
    evaluation = Evaluation(Contamination())
    for file in against:
        for row in read_seeds(Path(file)):
            evaluation.add(_strings(row.fields), f"{Path(file).name} row {row.row}")
    reasons = {place: evaluation(Document(text)) for place, text in enumerate(texts)}
    return {place: reason.why for place, reason in reasons.items() if reason}


def refuse_unable(check: Check) -> None:
    """Raise ConfigError for a check that cannot be made, before anything is paid for."""
    if check.language:
        of_language("a", check.language)
    repeated([], check.near)
    for file in check.against:
        if not Path(file).is_file():
            raise ConfigError(f"check.against: there is no file {file}", next="correct check.against")


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    inner = list(value.values()) if is_object(value) else value if is_list(value) else []
    for each in inner:
        yield from _strings(each)
