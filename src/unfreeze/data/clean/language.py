"""Language by script and function words; length in words or characters.

    script      a language of its own: Hangul ko, Greek el, Thai th, …; Han zh, or ja with 2 % Kana
    words       Latin and Cyrillic: the language whose function words are most frequent among the words

No model is loaded. A text of less than about 20 words can be wrong; it is then "latin" or "cyrillic".
"""

from __future__ import annotations

from unfreeze.config.clean import Language, Length
from unfreeze.data.clean.document import Document
from unfreeze.data.clean.reason import Reason

ALONE = {
    "Hangul": "ko",
    "Greek": "el",
    "Hebrew": "he",
    "Arabic": "ar",
    "Devanagari": "hi",
    "Bengali": "bn",
    "Tamil": "ta",
    "Thai": "th",
    "Lao": "lo",
    "Myanmar": "my",
    "Khmer": "km",
}
"""Script -> language, where one language has most of its texts."""
KANA = 0.02  # share of Kana in Han and Kana: Japanese prose has about half, a Chinese page with a name less
FUNCTION_WORDS = {
    "en": "the of and to in is that it for was with as on be by this are from at have",
    "de": "der die das und ist nicht ein eine zu den mit von auf für sich dem des auch es im",
    "fr": "le la les et est des du une un dans que qui pour pas sur au avec ce par il",
    "es": "el la los las y es de que en un una por con para no del se su al lo",
    "it": "il di che e è la per un una non con del della sono si le da come i gli",
    "pt": "o os as e é de que em um uma não para com do da dos no na por ao",
    "nl": "de het een en van is dat niet in op te zijn voor met aan ook er die als maar",
    "ru": "и в не на что с он как это по но из у к за то от о так же",
    "uk": "і в не на що з він як це та до за у й від але про його я є",
}
FEWEST = 0.08
"""Least share of function words among the words: English prose has .3 to .4, a list of names under .05."""
CYRILLIC = ("ru", "uk")


def language_of(document: Document) -> tuple[str, float]:
    """Return (language, share of its script among the letters); ("none", 0.0) without letters."""
    if not document.num_letters:
        return "none", 0.0
    letters = dict(document.letters)
    east = letters.pop("Han", 0) + letters.get("Kana", 0)
    kana = letters.pop("Kana", 0)
    if east:
        letters["Han"] = east
    script = max(letters, key=lambda name: (letters[name], name))
    share = letters[script] / document.num_letters
    if script == "Han":
        return ("ja" if kana >= KANA * east else "zh"), share
    if script in ALONE:
        return ALONE[script], share
    if script in ("Latin", "Cyrillic"):
        return _by_words(document, script), share
    return script.lower(), share


def _by_words(document: Document, script: str) -> str:
    there = [unit for unit in document.units if not unit.isdigit()]
    counts: dict[str, int] = {}
    for unit in there:
        counts[unit] = counts.get(unit, 0) + 1
    hits = {
        language: sum(counts.get(word, 0) for word in words.split())
        for language, words in FUNCTION_WORDS.items()
        if (language in CYRILLIC) == (script == "Cyrillic")
    }
    best = max(hits, key=lambda language: hits[language])
    return best if hits[best] and hits[best] >= FEWEST * len(there) else script.lower()


class LanguageFilter:
    """Drop documents in other languages, and those of mixed scripts."""

    def __init__(self, recipe: Language):
        self.recipe = recipe

    def __call__(self, document: Document) -> Reason | None:
        language, share = language_of(document)
        if self.recipe.keep and language not in self.recipe.keep:
            return Reason("language.other", f"{language}; kept: {', '.join(self.recipe.keep)}")
        if share < self.recipe.min_share:
            return Reason("language.mixed", f"{share:.2f} of the letters, at least {self.recipe.min_share}")
        return None


class LengthFilter:
    """Drop short and long documents."""

    def __init__(self, recipe: Length):
        self.recipe = recipe

    def __call__(self, document: Document) -> Reason | None:
        recipe = self.recipe
        if document.by_characters:
            length, low, high, unit = (
                document.num_characters,
                recipe.min_characters,
                recipe.max_characters,
                "characters",
            )
        else:
            length, low, high, unit = len(document.words), recipe.min_words, recipe.max_words, "words"
        unit = unit.removesuffix("s") if length == 1 else unit
        if length < low:
            return Reason("length.short", f"{length} {unit}, at least {low}")
        if length > high:
            return Reason("length.long", f"{length} {unit}, at most {high}")
        return None
