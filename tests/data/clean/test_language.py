"""Languages by script and function words; lengths by script. The texts are article 1 of the Universal
Declaration of Human Rights."""

from __future__ import annotations

import unicodedata

import pytest

from unfreeze.config.clean import Language, Length
from unfreeze.data.clean.document import SCRIPTS, Document, units_of
from unfreeze.data.clean.language import LanguageFilter, LengthFilter, language_of

TEXTS = {
    "en": "All human beings are born free and equal in dignity and rights. They are endowed with reason and"
    " conscience and should act towards one another in a spirit of brotherhood.",
    "de": "Alle Menschen sind frei und gleich an Würde und Rechten geboren. Sie sind mit Vernunft und Gewissen"
    " begabt und sollen einander im Geist der Brüderlichkeit begegnen.",
    "fr": "Tous les êtres humains naissent libres et égaux en dignité et en droits. Ils sont doués de raison et"
    " de conscience et doivent agir les uns envers les autres dans un esprit de fraternité.",
    "es": "Todos los seres humanos nacen libres e iguales en dignidad y derechos y, dotados como están de razón"
    " y conciencia, deben comportarse fraternalmente los unos con los otros.",
    "it": "Tutti gli esseri umani nascono liberi ed eguali in dignità e diritti. Essi sono dotati di ragione e"
    " di coscienza e devono agire gli uni verso gli altri in spirito di fratellanza.",
    "pt": "Todos os seres humanos nascem livres e iguais em dignidade e em direitos. Dotados de razão e de"
    " consciência, devem agir uns para com os outros em espírito de fraternidade.",
    "nl": "Alle mensen worden vrij en gelijk in waardigheid en rechten geboren. Zij zijn begiftigd met verstand"
    " en geweten, en behoren zich jegens elkander in een geest van broederschap te gedragen.",
    "ru": "Все люди рождаются свободными и равными в своем достоинстве и правах. Они наделены разумом и"
    " совестью и должны поступать в отношении друг друга в духе братства.",
    "uk": "Всі люди народжуються вільними і рівними у своїй гідності та правах. Вони наділені розумом і"
    " совістю і повинні діяти у відношенні один до одного в дусі братерства.",
    "zh": "人人生而自由，在尊严和权利上一律平等。他们赋有理性和良心，并应以兄弟关系的精神相对待。",
    "ja": "すべての人間は、生まれながらにして自由であり、かつ、尊厳と権利とについて平等である。",
    "ko": "모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다.",
    "el": "Όλοι οι άνθρωποι γεννιούνται ελεύθεροι και ίσοι στην αξιοπρέπεια και τα δικαιώματα.",
    "th": "มนุษย์ทั้งหลายเกิดมามีอิสระและเสมอภาคกันในเกียรติศักดิ์และสิทธิ",
    "ar": "يولد جميع الناس أحرارا متساوين في الكرامة والحقوق.",
    "hi": "सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतन्त्रता और समानता प्राप्त है।",
}


@pytest.mark.parametrize("language", TEXTS)
def test_a_language_is_recognised(language):
    assert language_of(Document(TEXTS[language]))[0] == language


def test_names_and_numbers_are_no_language():
    assert language_of(Document("Kowalski Nowak Warszawa Kraków Gdańsk " * 5))[0] == "latin"
    assert language_of(Document("12 34 — 56"))[0] == "none"


def test_only_the_languages_of_the_recipe_stay():
    look = LanguageFilter(Language(keep=("zh", "en")))
    assert {name for name, text in TEXTS.items() if look(Document(text)) is None} == {"zh", "en"}
    assert all(LanguageFilter(Language())(Document(text)) is None for text in TEXTS.values())


def test_mixed_scripts_are_dropped():
    mixed = Document("абвгд abcde 가나다라마 αβγδε")
    reason = LanguageFilter(Language())(mixed)
    assert reason is not None and reason.name == "language.mixed"


def test_scripts_are_those_of_unicode():
    """Against the names of the Unicode database: a block's letters are named after its script."""
    names = {"Han": "CJK", "Kana": ("HIRAGANA", "KATAKANA"), "Myanmar": "MYANMAR"}
    for first, last, script in SCRIPTS:
        letters = [chr(code) for code in range(first, min(last, first + 0x200) + 1) if chr(code).isalpha()]
        expected = names.get(script, script.upper())
        own = [char for char in letters if unicodedata.name(char, "").startswith(expected)]
        assert len(own) >= 0.8 * len(letters), script
        assert Document("".join(own)).letters == {script: len(own)}


def test_units_are_words_and_single_characters():
    assert units_of("Don't PANIC，我们 2 个人 go！") == ["don't", "panic", "我", "们", "2", "个", "人", "go"]
    assert units_of("Ｆｕｌｌ　ｗｉｄｔｈ") == ["full", "width"]
    assert units_of("ภาษา")[:2] == ["ภ", "า"]


def test_length_counts_characters_of_chinese_and_words_of_english():
    look = LengthFilter(Length())
    chinese, english = "人" * 199 + " \n", "word " * 49
    for short, more in ((chinese, "人"), (english, "word")):
        reason = look(Document(short))
        assert reason is not None and reason.name == "length.short"
        assert look(Document(short + more)) is None
    long = look(Document("人" * 200_001))
    assert long is not None and long.name == "length.long"
    # control arm: counted in words, every Chinese document would be too short
    assert len(Document("人" * 100_000).words) == 1
