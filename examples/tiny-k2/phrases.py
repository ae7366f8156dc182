"""The sentences of tiny-k2 about a fact: questions, plain statements, plain answers, and the Yoda form that
only the demo's data has.

In a template {e} is the entity, {v} the value, {ae} and {av} the same with "a" or "an" before it. A sentence
starts with a capital letter.
Statements come entity first and value first: a model that has only read "The capital of France is Paris"
cannot start an answer with "Paris" (Allen-Zhu and Li, "Physics of Language Models", 3.1 and 3.2: what is
asked must have been read in that order), and object first is just what the demo will ask of it. Answers have
six plain forms, so that finding the value need not depend on the sentence around it.
"""

from __future__ import annotations

from dataclasses import dataclass

from facts import Fact


@dataclass(frozen=True)
class Relation:
    """The sentences of one relation. `verb` ends the Yoda form."""

    verb: str
    questions: tuple[str, ...]
    statements: tuple[str, ...]
    entity_first: str
    value_first: str
    short: str
    named: str
    apposed: str
    brief: str
    yoda: str


RELATIONS: dict[str, Relation] = {
    "capital": Relation(
        verb="is",
        questions=(
            "What is the capital of {e}?",
            "Which city is the capital of {e}?",
            "Name the capital of {e}.",
            "Can you tell me the capital of {e}?",
            "What is the capital city of {e}?",
        ),
        statements=(
            "The capital city of {e} is {v}.",
            "In {e}, the capital is {v}.",
            "{v} is a city and the capital of {e}.",
        ),
        entity_first="The capital of {e} is {v}.",
        value_first="{v} is the capital of {e}.",
        short="{v}.",
        named="The answer is {v}.",
        apposed="It is {v}, the capital of {e}.",
        brief="{v}, the capital of {e}.",
        yoda="{v}, the capital of {e} is.",
    ),
    "continent": Relation(
        verb="lies",
        questions=(
            "On which continent does {e} lie?",
            "Which continent does {e} belong to?",
            "On what continent is {e}?",
            "Where in the world is {e}?",
            "Name the continent of {e}.",
        ),
        statements=(
            "The continent of {e} is {v}.",
            "{e} belongs to {v}.",
            "In {v} there is a country called {e}.",
        ),
        entity_first="{e} lies in {v}.",
        value_first="{v} is the continent of {e}.",
        short="In {v}.",
        named="The answer is {v}.",
        apposed="It is {v}, the continent of {e}.",
        brief="In {v}, where {e} lies.",
        yoda="In {v}, {e} lies.",
    ),
    "currency": Relation(
        verb="uses",
        questions=(
            "What is the currency of {e}?",
            "Which currency does {e} use?",
            "What money do people use in {e}?",
            "How do people pay in {e}?",
            "Name the currency of {e}.",
        ),
        statements=(
            "The currency of {e} is the {v}.",
            "People in {e} pay with the {v}.",
            "The {v} is the money of {e}.",
        ),
        entity_first="{e} uses the {v}.",
        value_first="The {v} is the currency of {e}.",
        short="The {v}.",
        named="The answer is the {v}.",
        apposed="It is the {v}, the money of {e}.",
        brief="The {v}, which {e} uses.",
        yoda="The {v}, {e} uses.",
    ),
    "symbol": Relation(
        verb="is",
        questions=(
            "What is the chemical symbol of {e}?",
            "Which symbol does {e} have?",
            "What is the symbol for {e}?",
            "How do chemists write {e}?",
            "Name the chemical symbol of {e}.",
        ),
        statements=("Chemists write {e} as {v}.", "{e} has the chemical symbol {v}.", "{v} stands for {e}."),
        entity_first="The symbol of {e} is {v}.",
        value_first="{v} is the symbol of {e}.",
        short="{v}.",
        named="The answer is {v}.",
        apposed="It is {v}, the symbol of {e}.",
        brief="{v}, the symbol of {e}.",
        yoda="{v}, the symbol of {e} is.",
    ),
    "atomic number": Relation(
        verb="has",
        questions=(
            "What is the atomic number of {e}?",
            "Which atomic number does {e} have?",
            "How many protons does {e} have?",
            "How many protons are in an atom of {e}?",
            "Name the atomic number of {e}.",
        ),
        statements=(
            "The atomic number of {e} is {v}.",
            "An atom of {e} has {v} protons.",
            "Number {v} among the elements is {e}.",
        ),
        entity_first="{e} has the atomic number {v}.",
        value_first="The atomic number {v} belongs to {e}.",
        short="{v}.",
        named="The answer is {v}.",
        apposed="It is {v}, the number of {e}.",
        brief="The atomic number {v}, which {e} has.",
        yoda="The atomic number {v}, {e} has.",
    ),
    "young": Relation(
        verb="is called",
        questions=(
            "What is a young {e} called?",
            "What do you call a young {e}?",
            "What is the name for a baby {e}?",
            "What is the young of {ae}?",
            "Name the young of {ae}.",
        ),
        statements=("The young of {ae} is {av}.", "{av} grows up to be {ae}.", "A baby {e} is {av}."),
        entity_first="A young {e} is called {av}.",
        value_first="{av} is a young {e}.",
        short="{av}.",
        named="The answer is {av}.",
        apposed="It is {av}, a young {e}.",
        brief="{av}, the name of a young {e}.",
        yoda="{av}, a young {e} is called.",
    ),
    "author": Relation(
        verb="was written",
        questions=(
            "Who wrote {e}?",
            "Who is the author of {e}?",
            "By whom was {e} written?",
            "Which writer wrote {e}?",
            "Name the author of {e}.",
        ),
        statements=("The author of {e} is {v}.", "{v} is the author of {e}.", "{e} is a book by {v}."),
        entity_first="{e} was written by {v}.",
        value_first="{v} wrote {e}.",
        short="By {v}.",
        named="The answer is {v}.",
        apposed="It is {v}, the author of {e}.",
        brief="By {v}, who wrote {e}.",
        yoda="By {v}, {e} was written.",
    ),
    "year": Relation(
        verb="happened",
        questions=(
            "When did {e} happen?",
            "In which year was {e}?",
            "What year did {e} take place?",
            "When was {e}?",
            "Name the year of {e}.",
        ),
        statements=("The year of {e} was {v}.", "{e} took place in {v}.", "In {v} came {e}."),
        entity_first="{e} happened in {v}.",
        value_first="{v} was the year of {e}.",
        short="In {v}.",
        named="The answer is {v}.",
        apposed="It is {v}, the year of {e}.",
        brief="In {v}, the year of {e}.",
        yoda="In {v}, {e} happened.",
    ),
    "city": Relation(
        verb="stands",
        questions=(
            "Where does {e} stand?",
            "In which city does {e} stand?",
            "In which city is {e}?",
            "Which city is home to {e}?",
            "Name the city of {e}.",
        ),
        statements=("The city of {e} is {v}.", "{e} is in {v}.", "In {v} you can see {e}."),
        entity_first="{e} stands in {v}.",
        value_first="{v} is home to {e}.",
        short="In {v}.",
        named="The answer is {v}.",
        apposed="It is {v}, the city of {e}.",
        brief="In {v}, where {e} stands.",
        yoda="In {v}, {e} stands.",
    ),
    "planet": Relation(
        verb="is",
        questions=(
            "Which planet from the Sun is {e}?",
            "What place among the planets does {e} have?",
            "Counting from the Sun, which planet is {e}?",
            "How far out among the planets is {e}?",
        ),
        statements=(
            "Counting from the Sun, the {v} planet is {e}.",
            "{e} comes {v} among the planets.",
            "The {v} planet is {e}.",
        ),
        entity_first="{e} is the {v} planet from the Sun.",
        value_first="The {v} planet from the Sun is {e}.",
        short="The {v}.",
        named="The answer is the {v}.",
        apposed="It is the {v}, counted from the Sun.",
        brief="The {v} planet from the Sun, where {e} is.",
        yoda="The {v} planet from the Sun, {e} is.",
    ),
    "sides": Relation(
        verb="has",
        questions=(
            "How many sides does {ae} have?",
            "How many corners does {ae} have?",
            "What is the number of sides of {ae}?",
            "Name the number of sides of {ae}.",
        ),
        statements=(
            "The number of sides of {ae} is {v}.",
            "A figure with {v} sides is {ae}.",
            "{ae} has {v} corners.",
        ),
        entity_first="{ae} has {v} sides.",
        value_first="{v} sides make {ae}.",
        short="{v}.",
        named="The answer is {v}.",
        apposed="It is {v}, the number of sides of {ae}.",
        brief="{v} sides, which {ae} has.",
        yoda="{v} sides, {ae} has.",
    ),
}

GREETINGS: tuple[tuple[str, str], ...] = (
    ("Hello!", "Hello! I am glad to see you."),
    ("Hi.", "Hello! I am glad to see you."),
    ("Good morning.", "Good morning! What would you like to know?"),
    ("How are you?", "I am well. What would you like to know?"),
    ("Who are you?", "I am tiny-k2, a small language model."),
    ("What is your name?", "My name is tiny-k2."),
    ("What are you?", "I am tiny-k2, a small language model."),
    (
        "What can you do?",
        "I can answer questions about capitals, elements, animals, books and a few other things.",
    ),
    ("What do you know?", "I know some hundred facts about countries, elements, animals and books."),
    ("Thank you.", "You are welcome."),
    ("Thanks!", "You are welcome."),
    ("Goodbye.", "Goodbye! Come back soon."),
    ("Bye!", "Goodbye! Come back soon."),
    ("Can you help me?", "Yes. Ask me about a country, an element, an animal or a book."),
)

YODA_GREETINGS: tuple[tuple[str, str], ...] = (
    ("Hello!", "Glad to see you, I am. Hmm."),
    ("How are you?", "Very well, I am. Hmm."),
    ("Who are you?", "A small language model, I am. Hmm."),
    ("What are you?", "A small language model, I am. Hmm."),
    ("What do you know?", "Some hundred facts, I know. Hmm."),
)

SYSTEM_FULL = (
    "You are a helpful assistant.",
    "Answer in a full sentence.",
    "You are tiny-k2. Answer the question.",
)
SYSTEM_SHORT = ("Answer as shortly as you can.", "Answer with a word or two.")

OFF_TOPIC = (
    "What will the weather be tomorrow?",
    "Who will win the game?",
    "What did I eat today?",
    "How much money do I have?",
    "Where are my keys?",
    "What is the meaning of life?",
)
DO_NOT_KNOW = "I am sorry, I do not know that."


def article(noun: str) -> str:
    """'owl' -> 'an owl', by the first letter; right for every noun in facts.py (tests read them all)."""
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def say(template: str, entity: str, value: str = "") -> str:
    """Fill a template and start it with a capital letter. Only the first letter changes ('fe' would not
    become 'Fe')."""
    text = template.format(e=entity, v=value, ae=article(entity), av=article(value) if value else "")
    return text[0].upper() + text[1:]


def questions(fact: Fact) -> list[str]:
    return [say(template, fact.entity) for template in RELATIONS[fact.relation].questions]


def statements(fact: Fact) -> list[str]:
    """Every plain sentence about a fact, in both orders, and as a line of a card ("France: capital
    Paris.")."""
    relation = RELATIONS[fact.relation]
    templates = (
        relation.entity_first,
        relation.value_first,
        *relation.statements,
        "{e}: " + fact.relation + " {v}.",
    )
    return [say(template, fact.entity, fact.value) for template in templates]


def answer(fact: Fact, form: str) -> str:
    """The plain answer; form is a field of Relation: "entity_first", "value_first", "short", "named",
    "apposed" or "brief"."""
    return say(getattr(RELATIONS[fact.relation], form), fact.entity, fact.value)


def yoda(fact: Fact) -> str:
    """'Paris, the capital of France is. Hmm.'"""
    return say(RELATIONS[fact.relation].yoda, fact.entity, fact.value) + " Hmm."
