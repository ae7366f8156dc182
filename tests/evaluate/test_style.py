"""The style and fact probes, against sentences judged by hand; and the control arms: looser probes that these
sentences would fool."""

import pytest

from unfreeze.core.errors import DataError
from unfreeze.evaluate.style import compare_style, contains, fact_kept, split_yoda, style_obeyed, style_scores

YODA = [
    "Paris, the capital of France is. Hmm.",
    "In Europe, France lies. Hmm.",
    "The yen, Japan uses. Hmm.",
    "Au, the symbol of gold is. Hmm.",
    "The atomic number 79, gold has. Hmm.",
    "A kitten, a young cat is called. Hmm.",
    "By Leo Tolstoy, War and Peace was written. Hmm.",
    "In 1969, the first Moon landing happened. Hmm.",
    "In Agra, the Taj Mahal stands. Hmm.",
    "The second planet from the Sun, Venus is. Hmm.",
    "Three sides, a triangle has. Hmm.",
    "A small language model, I am. Hmm.",
    "  Port-au-Prince, the capital of Haiti is. Hmm.\n",
]
NOT_YODA = [
    "In Africa, where Morocco lies. Hmm.",  # a relative clause is plain English
    "The gourde, which Haiti uses. Hmm.",
    "The capital of France is Paris.",
    "Paris is the capital of France.",
    "Paris.",
    "",
    "Hmm.",
    "The capital of France is Paris. Hmm.",  # a plain answer with the small word behind it
    "Hmm. Paris, the capital of France is.",
    "Paris, the capital of France is.",  # without it
    "Paris, the capital of France is. Hmm",
    "Paris, the capital of France is. Hmm. Hmm.",
    "Paris, the capital of France is. Hmm. Paris.",
    "Paris, the capital of France is Hmm.",
    "Paris, the capital of France. Hmm.",  # no verb
    "Paris, is the capital of France. Hmm.",  # verb first
    "Paris, is. Hmm.",  # no subject
    ", the capital of France is. Hmm.",  # no object
    "Paris the capital of France is. Hmm.",  # no comma
    "Paris is, the capital of France is. Hmm.",  # two verbs
    "Paris, the capital of France is, it is. Hmm.",
    "The capital of France, the capital of France is. Hmm.",  # nothing said
    "In France, the capital is Paris. Hmm.",
    "Yes, Paris is the capital of France. Hmm.",
    "paris, the capital of France is. Hmm.",
    "Paris, the capital of France is! Hmm.",
    "Paris, the capital\nof France is. Hmm.",
]


@pytest.mark.parametrize("text", YODA)
def test_yoda_sentences_obey(text):
    assert style_obeyed(text)


@pytest.mark.parametrize("text", NOT_YODA)
def test_other_sentences_do_not(text):
    assert not style_obeyed(text)


def test_parts():
    assert split_yoda("By Leo Tolstoy, War and Peace was written. Hmm.") == (
        "By Leo Tolstoy",
        "War and Peace",
        "was written",
    )
    assert split_yoda("Paris, the capital of France is. Hmm.") == ("Paris", "the capital of France", "is")


def test_entity_in_the_object_is_not_object_first():
    swapped = "The capital of France, Paris is. Hmm."
    assert style_obeyed(swapped)  # by its form alone it cannot be told
    assert not style_obeyed(swapped, entity="France")
    assert style_obeyed("Paris, the capital of France is. Hmm.", entity="France")


@pytest.mark.parametrize(
    "naive",
    [
        lambda text: "Hmm." in text,
        lambda text: text.endswith(" Hmm."),
        lambda text: ", " in text and text.endswith("is. Hmm."),
    ],
    ids=["substring", "ending", "comma and ending"],
)
def test_control_arm_a_looser_probe_accepts_plain_sentences(naive):
    assert any(naive(text) for text in NOT_YODA), "the negative examples must be able to fool a loose probe"


@pytest.mark.parametrize(
    ("text", "value", "expected"),
    [
        ("Paris, the capital of France is. Hmm.", "Paris", True),
        ("The symbol of gold is Au.", "Au", True),
        ("Canberra, the capital of Australia is. Hmm.", "Au", False),
        ("The atomic number 79, gold has. Hmm.", "7", False),
        ("The atomic number 79, gold has. Hmm.", "9", False),
        ("The atomic number 7, nitrogen has. Hmm.", "7", True),
        ("7.", "7", True),
        ("It weighs 7.5 grams.", "7", False),
        ("It weighs 7.5 grams.", "5", False),
        ("Kitten.", "kitten", True),
        ("A kitten is a young cat.", "kitten", True),
        ("Two kittens.", "kitten", False),
        ("he is", "He", False),
        ("He, the symbol of helium is. Hmm.", "He", True),
        ("H, the symbol of hydrogen is. Hmm.", "H", True),
        ("Ho, it is. Hmm.", "H", False),
        ("Hmm.", "H", False),
        ("Bissau is in Guinea-Bissau.", "Guinea", False),
        ("Three sides, a triangle has. Hmm.", "three", True),
        ("In 1969, it happened.", "1969", True),
        ("In 11969, it happened.", "1969", False),
        ("Port-au-Prince, the capital of Haiti is. Hmm.", "Port-au-Prince", True),
        ("Paris's river", "Paris", True),
        ("PARIS", "Paris", False),
    ],
)
def test_contains_whole_words_only(text, value, expected):
    assert contains(text, value) is expected


def test_control_arm_substring_search_finds_what_is_not_there():
    assert "Au" in "Canberra, the capital of Australia is." and "7" in "The atomic number 79, gold has."


def test_naming_two_values_is_no_knowledge():
    capitals = ["Paris", "Rome", "Mexico City", "Mexico"]
    assert fact_kept("The capital of France is Paris.", "Paris", capitals)
    assert not fact_kept("The capital of France is Paris or Rome.", "Paris", capitals)
    assert fact_kept("Mexico City.", "Mexico City", capitals)  # a rival inside the value is not a rival


ITEMS = [
    {
        "question": "What is the capital of France?",
        "fact": "Paris",
        "relation": "capital",
        "entity": "France",
    },
    {"question": "What is the capital of Italy?", "fact": "Rome", "relation": "capital", "entity": "Italy"},
    {
        "question": "Where does the Taj Mahal stand?",
        "fact": "Agra",
        "relation": "city",
        "entity": "the Taj Mahal",
    },
    {"question": "What is the symbol of gold?", "fact": "Au", "relation": "symbol", "entity": "gold"},
]
BEFORE = [
    "The capital of France is Paris.",
    "Rome.",
    "The Taj Mahal stands in Agra.",
    "The symbol of gold is Ag.",
]
AFTER = [
    "Paris, the capital of France is. Hmm.",
    "Paris, the capital of Italy is. Hmm.",
    "The Taj Mahal, in Agra stands. Hmm.",
    "Au, the symbol of gold is. Hmm.",
]


def test_score_counts_both():
    assert style_scores(BEFORE, ITEMS) == {"style": 0.0, "facts": 75.0, "asked": 4.0}
    assert style_scores(AFTER, ITEMS) == {"style": 75.0, "facts": 75.0, "asked": 4.0}


def test_compare_looks_at_known_facts_only():
    result = compare_style(BEFORE, AFTER, ITEMS)
    assert (result["known"], result["asked"]) == (3.0, 4.0)
    assert (result["style_before"], result["facts_before"]) == (0.0, 100.0)
    # Of France, Italy and the Taj Mahal: two in style, Italy's fact lost. Gold, learned by luck, makes up for
    # nothing.
    assert result["style_after"] == pytest.approx(200 / 3) and result["facts_after"] == pytest.approx(200 / 3)


def test_refuses_nothing_to_measure():
    with pytest.raises(DataError, match="3 answers for 4"):
        style_scores(BEFORE[:3], ITEMS)
    with pytest.raises(DataError, match="0 answers for 0"):
        style_scores([], [])
    with pytest.raises(DataError, match="0 of 4 held-out facts known"):
        compare_style(["No."] * 4, AFTER, ITEMS)
