"""Task rows:FILE:METRIC: greedy answers to a file's prompts, each graded beside its row's answer."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from unfreeze.core.errors import ConfigError, DataError
from unfreeze.data.rows.files import read_rows
from unfreeze.data.rows.row import Conversation, columns_digest
from unfreeze.data.tokens.masks import encode_chat
from unfreeze.evaluate.forced import forced
from unfreeze.evaluate.kept import Kept
from unfreeze.evaluate.metrics import CHOICE, GradeAll, expected_of, refuse_row
from unfreeze.evaluate.tasks import Scores, Settings, Shown, unseen
from unfreeze.generate.model import Model
from unfreeze.generate.sampling import Sampling
from unfreeze.untrusted.json_object import is_list

FAILING = 0.2
"""Share of the answers without a score above which the task stops."""
NO_ROOM = "no room"
CHOICES = "choices"
"""Column of the texts to choose from."""


class RowsTask:
    """Rows with a metric.

    grade     the metric; None for "choice", which asks for log-probabilities and no answer
    own       True for the user's function: it gets each row's columns as they are, and needs no answer
    check_of  called with the rows before a model is loaded
    identity  hash of the metric, for the task's digest
    """

    def __init__(
        self,
        name: str,
        file: Path,
        metric: str,
        settings: Settings,
        grade: GradeAll | None,
        *,
        own: bool = False,
        check_of: Callable[[Sequence[Conversation]], None] = lambda rows: None,
        identity: str = "",
    ):
        self.name, self.file, self.metric, self.settings = name, file, metric, settings
        self._grade, self._own, self._check_of, self._identity = grade, own, check_of, identity
        self.rows: list[Conversation] = []
        self.digest, self.counts = "", "row" if grade is not None else "choice"

    def check(self) -> None:
        """Read the rows. Raises DataError without any, or for one whose answer cannot be used."""
        each = read_rows(self.file, columns=self.settings.columns, answers="asked")
        self.rows = list(islice(each, self.settings.limit))
        if not self.rows:
            raise DataError(f"{self.file} has no rows", next='{"prompt": "…", "answer": "…"}')
        hashed = hashlib.blake2b(repr((self.metric, self._identity)).encode(), digest_size=16)
        hashed.update(str(self.settings.max_new_tokens).encode())
        for row in self.rows:
            hashed.update(columns_digest(row))
        self.digest = hashed.hexdigest()
        if not self._own:
            for row in self.rows:
                refuse_row(self.metric, row)
        if self.metric == CHOICE:
            for row in self.rows:
                choices_of(row)
        else:
            self.rows = [(_for_function if self._own else _with_answer)(row) for row in self.rows]
        self._check_of(self.rows)

    def score(self, model: Model, kept: Kept, shown: Shown = unseen) -> list[Scores]:
        """Answer all rows and grade them. Raises ConfigError if too many answers have no score."""
        if self._grade is None:
            return [self._of_choices(model, kept, shown)]
        prompts = [prompt_of(model, row) for row in self.rows]
        answers, cut = greedy_answers(model, prompts, self.settings, kept, shown)
        there = [i for i, answer in enumerate(answers) if answer is not None]
        grades = self._grade([(self.rows[i], answers[i] or "") for i in there])
        values: list[float | None] = [None] * len(answers)
        failed: Counter[str] = Counter({NO_ROOM: len(answers) - len(there)})
        words: dict[str, str] = {NO_ROOM: "the prompt fills the model's positions"}
        for i, each in zip(there, grades, strict=True):
            values[i] = each.reward
            if each.reward is None:
                failed[each.outcome] += 1
                words.setdefault(each.outcome, f"row {self.rows[i].row}: {each.message}")
        failed += Counter()  # drops those of 0
        self._refuse(failed, words)
        notes = [f"{count} without a score ({name}): {words[name]}" for name, count in failed.items()]
        if cut:
            most = self.settings.max_new_tokens
            notes.append(
                f"{cut} of {len(answers)} answers were cut at {most} tokens (--max-new-tokens {2 * most})"
            )
        measure = "metric" if self._own else self.metric
        unit = "" if self._own else "share"
        return [
            Scores(
                measure,
                self._names(),
                values,
                unit=unit,
                failed=failed,
                contents=self._contents(),
                notes=notes,
            )
        ]

    def _names(self) -> list[str]:
        return [f"row {row.row}" for row in self.rows]

    def _contents(self) -> list[str]:
        return [content_of(row) for row in self.rows]

    def _refuse(self, failed: Counter[str], words: dict[str, str]) -> None:
        count = failed.total()
        if count <= FAILING * len(self.rows):
            return
        kind = failed.most_common(1)[0][0]
        raise ConfigError(
            f"{count} of {len(self.rows)} answers have no score, more than {FAILING:.0%} ({kind}):"
            f" {words[kind]}",
            next="mend the metric; the answers are kept, so only the metric runs again",
        )

    def _of_choices(self, model: Model, kept: Kept, shown: Shown) -> Scores:
        """Score 1 where the right choice has the highest sum of log p over its tokens."""
        questions: list[tuple[list[int], list[int]]] = []
        owners: list[int] = []
        room = model.decoder.shape.max_positions
        for i, row in enumerate(self.rows):
            prompt = prompt_of(model, row)
            choices = [encoded(model, text) for text in choices_of(row)[0]]
            if len(prompt) + max(map(len, choices)) > room or not all(choices):
                continue
            questions += [(prompt, tokens) for tokens in choices]
            owners += [i] * len(choices)
        scored = forced(model, questions, kept, shown, most=self.settings.batch)
        sums: dict[int, list[float]] = {}
        for i, each in zip(owners, scored, strict=True):
            sums.setdefault(i, []).append(sum(each.log_p))
        values: list[float | None] = [
            float(max(range(len(sums[i])), key=sums[i].__getitem__) in choices_of(row)[1])
            if i in sums
            else None
            for i, row in enumerate(self.rows)
        ]
        failed = Counter({NO_ROOM: values.count(None)}) + Counter()
        self._refuse(failed, {NO_ROOM: "a choice is empty, or the prompt fills the model's positions"})
        return Scores(self.metric, self._names(), values, failed=failed, contents=self._contents())


def _with_answer(row: Conversation) -> Conversation:
    """Return the row with its answers, a list, in the column "answer", wherever they stood."""
    return replace(row, columns={**row.columns, "answer": expected_of(row)})


def _for_function(row: Conversation) -> Conversation:
    """Return the row with its one answer, if it has any, in the column "answer"."""
    if "answer" in row.columns:
        return row
    try:
        answers = expected_of(row)
    except DataError:  # a function may grade without one
        return row
    return replace(row, columns={**row.columns, "answer": answers[0]}) if len(answers) == 1 else row


def content_of(row: Conversation) -> str:
    """Return what the row asks, its answer and its choices, without case and white space."""
    turns = [message.get("content") for message in row.messages]
    parts = repr([turns, row.columns.get("answer"), row.columns.get(CHOICES)])
    return "".join(parts.replace("\\n", " ").casefold().split())


def choices_of(row: Conversation) -> tuple[list[str], set[int]]:
    """Return the choices and the places of the right ones. Raises DataError for a row without."""
    choices: Any = row.columns.get(CHOICES)
    if not is_list(choices) or len(choices) < 2 or not all(isinstance(each, str) for each in choices):
        raise DataError(
            f"row {row.row} has no column {CHOICES!r} with two texts or more",
            next='{"prompt": "…", "choices": ["a", "b"], "answer": "b"}',
        )
    texts = [str(each) for each in choices]
    answer = row.columns.get("answer")
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(texts):
        return texts, {answer}
    right = {i for i, text in enumerate(texts) if text in expected_of(row)}
    if not right:
        raise DataError(
            f"row {row.row}: none of its choices is its answer", next="a choice, or its number from 0"
        )
    return texts, right


def prompt_of(model: Model, row: Conversation) -> list[int]:
    """Return the prompt as training renders it. Raises ConfigError for a model without a tokenizer."""
    return encode_chat(needs_tokenizer(model), row.messages, row.tools)


def needs_tokenizer(model: Model) -> Any:
    """Return the tokenizer. Raises ConfigError if there is none."""
    if model.tokenizer is None:
        raise ConfigError("the model has no tokenizer, so it reads no text", next="use another model")
    return model.tokenizer


def encoded(model: Model, text: str) -> list[int]:
    """Return the tokens of a text that follows another one."""
    return needs_tokenizer(model).encode(text, specials=False, continues=True)


def greedy_answers(
    model: Model, prompts: Sequence[list[int]], settings: Settings, kept: Kept, shown: Shown = unseen
) -> tuple[list[str | None], int]:
    """Return the greedy answer to each prompt (None: no room for one), and how many were cut."""
    most, room = settings.max_new_tokens, model.decoder.shape.max_positions
    keys = [kept.key("answer", prompt, most) for prompt in prompts]
    fitting = [i for i, prompt in enumerate(prompts) if len(prompt) < room]
    missing = list({keys[i]: i for i in reversed(fitting) if kept.get(keys[i]) is None}.values())[::-1]
    done = len(prompts) - len(missing)
    texts = [""] * len(missing)
    sampling = Sampling(max_new_tokens=most, temperature=0.0)
    questions = [prompts[i] for i in missing]
    for step in model.engine.stream(questions, sampling, max_rows=settings.batch) if questions else ():
        for piece in step:
            texts[piece.row] += piece.text
            if piece.stop_reason is not None:
                kept.put(keys[missing[piece.row]], [texts[piece.row], piece.stop_reason])
                done += 1
                shown(done, len(prompts))
    answers: list[str | None] = [None] * len(prompts)
    cut = 0
    for i in fitting:
        answers[i], reason = kept.get(keys[i])
        cut += reason in ("length", "window")
    return answers, cut
