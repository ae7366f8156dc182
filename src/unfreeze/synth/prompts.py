"""Seeds and a recipe -> requests.

A template is text with {field}; {{ and }} are braces. It is replaced, not evaluated: no expression, no
attribute, no format. A seed is a row of any data file; it needs the fields that the templates name.

A request's key is a hash of all that decides its answer, so that an answer that was paid for is found again,
also by a plan with more seeds. Seeds that make the same request are asked once.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unfreeze.core.errors import ConfigError, DataError, nearest
from unfreeze.data.rows.files import FORMS, ending, raw_rows, refuse_form
from unfreeze.data.rows.row import Conversation, Message
from unfreeze.rollout.verdicts import Pairs, Scores
from unfreeze.synth.recipe import Recipe
from unfreeze.teach.chat import BESIDE, body_of

FIELD = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
ANSWER_BYTES = 8
"""Bytes of an answer per token that a judge is asked to read, at most. English has 4 to 5, Chinese 3 to 5."""
SEPARATE = "\x1f"

Count = Callable[[str], int]
"""A text -> the most tokens that it has."""


@dataclass(frozen=True)
class Seed:
    """A row of the seeds. row: its line, from 1; name: its field id, or its line."""

    row: int
    fields: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The field id, or the line."""
        named = self.fields.get("id")
        return str(named) if isinstance(named, str | int) else str(self.row)


@dataclass(frozen=True)
class Request:
    """One request. read, written: the most tokens that an attempt is billed for. part: its place in a row."""

    key: str
    part: str
    seed: Seed
    body: Mapping[str, Any] = field(repr=False)
    read: int
    written: int


def read_seeds(path: Path) -> Iterator[Seed]:
    """Yield the rows of a data file as they are. Raises DataError at one that cannot be read."""
    refuse_form(path)
    if not path.is_file():
        raise DataError(f"there is no file {path}", next="check the path")
    parse = FORMS[ending(path)][1]
    for place, raw in raw_rows(path):
        try:
            fields = parse(raw, place.row, {}, lambda fields, row, renames: fields)
        except DataError as error:
            raise DataError(f"{path.name}, {error.message}", next=error.next or "correct the row") from None
        yield Seed(place.row, fields)


def fields_of(template: str, name: str) -> list[str]:
    """Return the fields that a template names. Raises ConfigError for a single brace; name: of its key."""
    names: list[str] = []
    for match in FIELD.finditer(template):
        if match[0] in ("{{", "}}"):
            continue
        if not match[1] or not match[1].strip():
            raise ConfigError(
                f"{name}: {match[0]!r} at character {match.start() + 1} is no {{field}}",
                next="{field}, or {{ and }} for braces",
            )
        names.append(match[1].strip())
    return names


def filled(template: str, seed: Seed) -> str:
    """Return the template with the seed's fields. Raises DataError for a field that the seed lacks."""

    def value(match: re.Match[str]) -> str:
        if match[0] in ("{{", "}}"):
            return match[0][0]
        name = match[1].strip()
        held = seed.fields.get(name)
        if held is None:
            raise DataError(
                f"row {seed.row} has no field {name!r}, which the recipe names{nearest(name, seed.fields)}",
                next="correct the recipe or the seeds",
            )
        return held if isinstance(held, str) else json.dumps(held, ensure_ascii=False)

    return FIELD.sub(value, template)


def most_bytes(text: str) -> int:
    """Return the most tokens of a text for any tokenizer: a token is at least one byte."""
    return len(text.encode("utf-8", "surrogatepass"))


def counter(recipe: Recipe) -> Count:
    """Return how tokens are counted: by the recipe's tokenizer, or a token a byte."""
    if not recipe.tokenizer:
        return most_bytes
    from unfreeze.data import load_tokenizer

    tokenizer = load_tokenizer(recipe.tokenizer)
    return lambda text: len(tokenizer.encode(text, specials=False))


class Requests:
    """The requests of a recipe and its seeds.

    seeds     those that make a request of their own
    first     requests that need no other's answer, in the order of the seeds
    repeated  number of seeds whose requests another seed has made
    judges    True if a judge compares pairs
    """

    def __init__(self, recipe: Recipe, seeds: Iterator[Seed], name: str = "the seeds"):
        self.recipe, self.count = recipe, counter(recipe)
        self.scores = Scores(recipe.judge.rubric)
        self.pairs = Pairs(recipe.judge.rubric, 1)
        self.judges = recipe.kind == "pairs" and bool(recipe.judge.rubric)
        for key in ("prompt", "system", "row_prompt", "row_system"):
            fields_of(getattr(recipe, key), key)
        for key in ("prompt", "system"):
            fields_of(getattr(recipe.rejected, key), f"rejected.{key}")
        self.seeds: list[Seed] = []
        self.first: list[Request] = []
        self.by_seed: list[list[Request]] = []
        self.repeated = 0
        self._room = self._room_of_judge()
        known: set[str] = set()
        for seed in seeds:
            try:
                own = list(self._of(seed))
                self.row_turns(seed)
            except DataError as error:
                raise DataError(f"{name}, {error.message}", next=error.next) from None
            if all(request.key in known for request in own):
                self.repeated += 1
                continue
            self.seeds.append(seed)
            self.by_seed.append(own)
            self.first += [request for request in own if request.key not in known]
            known |= {request.key for request in own}
        if not self.seeds:
            raise DataError(f"{name} has no rows", next="one seed a line, with the fields of the recipe")

    def row_turns(self, seed: Seed) -> list[Message]:
        """Return the turns of a row before its answer."""
        recipe = self.recipe
        system = [_turn("system", filled(recipe.row_system, seed))] if recipe.row_system else []
        return [*system, _turn("user", filled(recipe.row_prompt or recipe.prompt, seed))]

    def questions(self, seed: Seed, texts: Sequence[str]) -> list[Request]:
        """Return a judge's two questions about two answers; none if they are longer than the plan priced."""
        row = Conversation([_turn("user", self.row_turns(seed)[-1]["content"])])
        texts_of_judge = self.pairs.questions([(row, text) for text in texts])
        questions = [self._judge(seed, f"judge-{i}", text) for i, text in enumerate(texts_of_judge)]
        most = self.most_judged(seed)
        return questions if all(request.read <= most for request in questions) else []

    def _of(self, seed: Seed) -> Iterator[Request]:
        recipe = self.recipe
        if recipe.kind == "labels":
            row = Conversation(self.row_turns(seed))
            (question,) = self.scores.questions([(row, filled("{completion}", seed))])
            yield self._judge(seed, "label", question)
            return
        if recipe.kind == "messages":
            for sample in range(recipe.samples):
                yield self._answer(
                    seed, f"answer-{sample}", recipe.system, recipe.prompt, recipe.temperature, sample
                )
            return
        second = recipe.rejected
        yield self._answer(seed, "chosen", recipe.system, recipe.prompt, recipe.temperature, 0)
        yield self._answer(
            seed,
            "rejected",
            second.system or recipe.system,
            second.prompt or recipe.prompt,
            recipe.temperature if second.temperature is None else second.temperature,
            1,
        )

    def _answer(
        self, seed: Seed, part: str, system: str, prompt: str, temperature: float, sample: int
    ) -> Request:
        turns = [_turn("system", filled(system, seed))] if system else []
        return self._request(
            seed,
            part,
            [*turns, _turn("user", filled(prompt, seed))],
            self.recipe.model,
            {
                self.recipe.max_tokens_field: self.recipe.max_tokens,
                "temperature": temperature,
                "top_p": self.recipe.top_p,
                "seed": self.recipe.seed + sample,
                **self.recipe.more,
            },
            self.recipe.written,
            self.count,
        )

    def _judge(self, seed: Seed, part: str, question: str) -> Request:
        judge = self.recipe.judge
        settings = {self.recipe.max_tokens_field: judge.max_tokens, "temperature": 0.0}
        turns, model = [_turn("user", question)], judge.model or self.recipe.model
        return self._request(seed, part, turns, model, settings, judge.max_tokens, most_bytes)

    def _request(
        self,
        seed: Seed,
        part: str,
        turns: list[Message],
        model: str,
        settings: dict[str, Any],
        written: int,
        count: Count,
    ) -> Request:
        body = body_of(Conversation(turns), model, settings)
        whole = json.dumps([part, body], sort_keys=True).encode("utf-8", "surrogatepass")
        key = hashlib.blake2b(whole, digest_size=12).hexdigest()
        read = sum(count(turn["content"]) + BESIDE for turn in turns) + BESIDE + self.recipe.read_beside
        return Request(key, part, seed, body, read, written)

    def _room_of_judge(self) -> int:
        """Tokens of a judge's question about two answers, at most, besides the prompt."""
        row = Conversation([_turn("user", "")])
        empty = self.pairs.questions([(row, ""), (row, " ")])[0]
        beside = 2 * BESIDE + self.recipe.read_beside
        return most_bytes(empty) + beside + 2 * ANSWER_BYTES * self.recipe.max_tokens

    def most_judged(self, seed: Seed) -> int:
        """Return the most tokens of one of a judge's questions about a seed."""
        return self._room + 2 * most_bytes(self.row_turns(seed)[-1]["content"])


def _turn(role: str, text: str) -> Message:
    return {"role": role, "content": text}
