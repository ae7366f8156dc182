"""The demo's two checks of an answer: does it speak like Yoda, and does it still state the fact?

Pure functions of text. The style is exactly: one object phrase, a comma, a subject with its verb last, a full
stop, "Hmm.":
"Paris, the capital of France is. Hmm."        "By Leo Tolstoy, War and Peace was written. Hmm."
A plain answer followed by "Hmm.", or with a comma put somewhere, does not count.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence

from unfreeze.core.errors import DataError

AUXILIARIES = frozenset("is are am was were has have had".split())
VERBS = AUXILIARIES | frozenset(
    "lies lie uses use stands stand belongs belong happened know knows wrote".split()
)
PARTICIPLES = frozenset("called named written known born built made found used invented".split())
RELATIVE = frozenset("which where who when that whose whom".split())

_SHAPE = re.compile(r"(?P<object>[^,.!?\n]+), (?P<clause>[^,.!?\n]+)\. Hmm\.")


def split_yoda(text: str) -> tuple[str, str, str] | None:
    """Return (object, subject, verb) of a Yoda sentence, or None if `text` is anything else.

    "Paris, the capital of France is. Hmm." -> ("Paris", "the capital of France", "is").
    The verb is one of VERBS, or one of AUXILIARIES with one of PARTICIPLES ("was written"). No auxiliary may
    precede it.
    The subject must not start a relative clause ("In Africa, where Morocco lies." is plain English), nor
    repeat the object. The first letter is a capital.
    """
    match = _SHAPE.fullmatch(text.strip())
    if match is None:
        return None
    object_words, clause_words = match["object"].lower().split(), match["clause"].lower().split()
    verb_length = _verb_length(clause_words)
    subject_words = clause_words[: len(clause_words) - verb_length]
    if not verb_length or not object_words or not subject_words or text.strip()[0].islower():
        return None
    if AUXILIARIES & set(object_words + subject_words) or subject_words[0] in RELATIVE:
        return None
    if set(subject_words) <= set(object_words) or set(object_words) <= set(subject_words):
        return None
    subject, verb = match["clause"].split()[:-verb_length], match["clause"].split()[-verb_length:]
    return match["object"], " ".join(subject), " ".join(verb)


def style_obeyed(text: str, *, entity: str = "") -> bool:
    """Return True if the whole answer is one Yoda sentence (split_yoda).

    entity: the subject of the question; it must not be in the object. "The capital of France, Paris is. Hmm."
    has its verb last, but its object is not first.
    """
    parts = split_yoda(text)
    return parts is not None and not (entity and contains(parts[0], entity))


def contains(text: str, phrase: str) -> bool:
    """Return True if `text` contains `phrase` as whole words.

    "Au" is not in "Australia", 7 not in 79 or 7.5, "Guinea" not in "Guinea-Bissau".
    Case matters (He is not he), but a lower-case phrase may start a sentence: "yen" is found in "Yen".
    """
    first = re.escape(phrase[0])
    if phrase[0].islower():
        first = f"(?:{first}|{re.escape(phrase[0].upper())})"
    pattern = rf"(?<![\w-])(?<!\d[.,]){first}{re.escape(phrase[1:])}(?![\w-]|[.,]\d)"
    return re.search(pattern, text) is not None


def fact_kept(text: str, value: str, others: Sequence[str] = ()) -> bool:
    """Return True if `text` states `value` and none of the `others`: naming two capitals is no answer."""
    rivals = [other for other in others if other != value and not contains(value, other)]
    return contains(text, value) and not any(contains(text, rival) for rival in rivals)


def facts_kept(answers: Sequence[str], items: Sequence[Mapping[str, str]]) -> list[bool]:
    """Return fact_kept for each item; for the answers before training: which facts the model knew.

    An item is {"question", "fact", "relation", "entity"}; the values of the other items of its relation are
    the `others` of fact_kept.
    Raises DataError if there is no item or the numbers differ.
    """
    if not items or len(answers) != len(items):
        raise DataError(
            f"{len(answers)} answers for {len(items)} held-out questions; both must be the same number, at"
            " least 1"
        )
    values: dict[str, list[str]] = {}
    for item in items:
        values.setdefault(item["relation"], []).append(item["fact"])
    return [
        fact_kept(answer, item["fact"], values[item["relation"]])
        for answer, item in zip(answers, items, strict=True)
    ]


def style_scores(answers: Sequence[str], items: Sequence[Mapping[str, str]]) -> dict[str, float]:
    """Return percentages of `answers` in the style, and with their item's fact: {"style", "facts", "asked"}.

    asked: the number of answers. See facts_kept.
    """
    return _percentages(answers, items, facts_kept(answers, items), range(len(items)))


def compare_style(
    before: Sequence[str], after: Sequence[str], items: Sequence[Mapping[str, str]]
) -> dict[str, float]:
    """Compare style and facts before and after training, over questions whose fact the model knew before.

    Return style_before, style_after, facts_before, facts_after in per cent; known, asked: numbers of
    questions.
    facts_before is 100 by definition; 100 - facts_after is the share of known facts that training lost.
    Raises DataError if nothing was known.
    """
    known, retained = facts_kept(before, items), facts_kept(after, items)
    chosen = [index for index, knew in enumerate(known) if knew]
    if not chosen:
        raise DataError(
            f"0 of {len(items)} held-out facts known before training; at least 1 is needed",
            next="inspect the answers before training",
        )
    first, last = _percentages(before, items, known, chosen), _percentages(after, items, retained, chosen)
    return {
        "style_before": first["style"],
        "style_after": last["style"],
        "facts_before": first["facts"],
        "facts_after": last["facts"],
        "known": last["asked"],
        "asked": float(len(items)),
    }


def changes(
    before: Sequence[str], after: Sequence[str], items: Sequence[Mapping[str, str]]
) -> list[dict[str, str | float | None]]:
    """Return changes of compare_style()'s style and facts with their standard errors, for an eval event."""
    known, retained = facts_kept(before, items), facts_kept(after, items)
    chosen = [index for index, knew in enumerate(known) if knew]
    rows: list[dict[str, str | float | None]] = []
    for name, was, now in (
        ("style", *(_styles(each, items, chosen) for each in (before, after))),
        ("facts", [known[index] for index in chosen], [retained[index] for index in chosen]),
    ):
        differences = [100.0 * (b - a) for a, b in zip(was, now, strict=True)]
        enough = len(differences) > 1
        error = statistics.stdev(differences) / math.sqrt(len(differences)) if enough else None
        rows.append({"measure": name, "since": 0, "change": statistics.fmean(differences), "error": error})
    return rows


def _styles(answers: Sequence[str], items: Sequence[Mapping[str, str]], chosen: Sequence[int]) -> list[bool]:
    return [style_obeyed(answers[index], entity=bare(items[index].get("entity", ""))) for index in chosen]


def _percentages(
    answers: Sequence[str], items: Sequence[Mapping[str, str]], facts: Sequence[bool], chosen: Sequence[int]
) -> dict[str, float]:
    style = _styles(answers, items, chosen)
    chosen_facts = [facts[index] for index in chosen]
    return {
        "style": 100.0 * sum(style) / len(chosen),
        "facts": 100.0 * sum(chosen_facts) / len(chosen),
        "asked": float(len(chosen)),
    }


def bare(entity: str) -> str:
    """Return an entity without its article: "the Taj Mahal" -> "Taj Mahal"."""
    return re.sub(r"^(?:the|a|an) ", "", entity)


def _verb_length(words: Sequence[str]) -> int:
    """Return the number of words at the end that form the verb: 2 ("was written"), 1 ("is"), 0 (none)."""
    if len(words) >= 2 and words[-1] in PARTICIPLES and words[-2] in AUXILIARIES:
        return 2
    return 1 if words and words[-1] in VERBS else 0
