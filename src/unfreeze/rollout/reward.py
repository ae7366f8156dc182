"""A reward, its parts, or the named reason why an answer has none.

A reward file has a function

    def reward(prompt, completion, **row) -> float | dict[str, float]

prompt      the user's text; if the row has messages (messages, conversations, a list as prompt, a history),
            those before the answer: [{"role", "content"}, …]
completion  the text of the answer
row         the row's columns by keyword: those that the function names, or all with **row

A dict holds parts; its reward is "reward" if it has that, else their sum. Several functions: the sum of
theirs, each a part. None: this function has no say about this answer.
"""

from __future__ import annotations

import math
import reprlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, cast, get_args

from unfreeze.core.errors import ConfigError
from unfreeze.data.rows.row import Conversation, Message
from unfreeze.untrusted.json_object import is_object

Outcome = Literal[
    "ok",
    "error",
    "timeout",
    "not a number",
    "no value",
    "memory",
    "processes",
    "ended",
    "garbage",
    "skipped",
    "cut",
    "no tokens",
    "refused",
    "unreadable",
]
"""error: it raised. timeout: it took too long, or too much CPU. not a number: NaN, infinite, or another type.
no value: every function returned None. memory: it ran out of its limit. processes: it started too many.
ended: its process is gone. garbage: its process answered something else. skipped: it was not waited for,
because too many before it took too long. cut: the answer was cut off, and such answers are left out. no
tokens: an agent that never asked the model. refused, unreadable: a judge did not judge, or in another form.
"""
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)

MAX_PARTS = 64
MAX_NAME = 80  # characters of a part's name
MAX_ALL = 1024  # parts of all functions together
MAX_MESSAGE = 500  # characters of a message, and of what a grader printed
SHARE = 0.2
"""Share of answers without a reward at which a run stops."""

TEXTS = ("prompt/completion", "question/answer", "instruction/output")
"""Shapes of rows whose prompt is a text."""


@dataclass(frozen=True)
class Graded:
    """The reward of one answer.

    reward   None unless outcome is "ok"
    message  why there is none, on one line; of a judge its words
    printed  the start of what the grader printed
    """

    reward: float | None
    parts: dict[str, float] = field(default_factory=dict[str, float])
    outcome: Outcome = "ok"
    message: str = ""
    printed: str = ""

    def as_json(self) -> dict[str, Any]:
        """The fields of a line of a rollout file."""
        return {name: value for name, value in asdict(self).items() if name != "printed"}


def prompt_of(row: Conversation) -> str | list[Message]:
    """Return a reward's first argument: the user's text, or the messages of a row that has messages."""
    texts = [message["content"] for message in row.messages if message["role"] == "user"]
    if row.shape in TEXTS and len(texts) == 1 and isinstance(texts[0], str):
        in_list = isinstance(row.columns.get(prompt_column(row)), list)
        return row.messages if in_list else texts[0]
    return row.messages


def prompt_column(row: Conversation) -> str:
    """Return the name of the column that holds the row's prompt."""
    return row.shape.partition("/")[0]


def combined(graded: Mapping[str, Graded]) -> Graded:
    """Return the reward of an answer from several sources, such as an environment and functions: their sum.

    A source that failed decides the outcome; one without a say ("no value") is left out.
    """
    failed = [each for each in graded.values() if each.outcome not in ("ok", "no value")]
    having = {name: each for name, each in graded.items() if each.reward is not None}
    if failed or not having:
        return (failed or list(graded.values()))[0]
    parts = {f"{name}.{part}": value for name, each in having.items() for part, value in each.parts.items()}
    rewards = {name: each.reward or 0.0 for name, each in having.items()}
    return Graded(sum(rewards.values()), {**rewards, **parts}, printed=next(iter(having.values())).printed)


class NoNumber(Exception):
    """A function returned something that is no reward."""


def score(values: Mapping[str, object]) -> Graded:
    """Return the reward of an answer from each function's result, by the function's name."""
    reward, parts, spoke = 0.0, dict[str, float](), False
    try:
        for name, value in values.items():
            own = _parts(name, value) if is_object(value) else {}
            if value is None or (is_object(value) and not own):
                continue
            spoke = True
            worth = own.get("reward", sum(own.values())) if is_object(value) else number(value, name)
            for part, each in own.items():
                if part != "reward":
                    parts[part if len(values) == 1 else f"{name}.{part}"] = each
            if len(values) > 1:
                parts[name] = worth
            reward += worth
        number(reward, "the sum")
    except NoNumber as error:
        return Graded(None, outcome="not a number", message=str(error))
    if not spoke:
        return Graded(None, outcome="no value", message=f"{', '.join(values)} returned None")
    return Graded(reward, parts)


def _parts(name: str, value: Mapping[Any, Any]) -> dict[str, float]:
    if not value or len(value) > MAX_PARTS:
        raise NoNumber(f"{name} returned a dict of {len(value)} parts; 1 to {MAX_PARTS} are possible")
    wrong = [part for part in value if not isinstance(part, str) or len(part) > MAX_NAME]
    if wrong:
        raise NoNumber(f"{name} returned a part named {_short(wrong[0])}; names are short texts")
    return {part: number(each, f"{name}: {part}") for part, each in value.items() if each is not None}


def number(value: object, name: str) -> float:
    """Return a finite float. Numbers of numpy and torch count, texts and lists don't. Raises NoNumber."""
    kind = type(value).__name__
    if isinstance(value, list | tuple):
        count = len(cast("Sequence[Any]", value))
        remedy = "it is called with one answer, unlike TRL's, which gets a batch"
        raise NoNumber(f"{name} returned a {kind} of {count}, not a number; {remedy}")
    try:
        result = float(value) if hasattr(type(value), "__float__") or isinstance(value, int) else None  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise NoNumber(f"{name} returned {_short(value)}, not a number: {error}") from None
    if result is None:
        raise NoNumber(f"{name} returned a {kind}, not a number: {_short(value)}")
    if not math.isfinite(result):
        raise NoNumber(f"{name} returned {result}")
    return result


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 60


def _short(value: object) -> str:
    return _SHORT.repr(value)


def checked(reply: Mapping[str, Any]) -> Graded | None:
    """Return the Graded that a grader's process sent as JSON; None if it is none."""
    reward, parts, outcome = reply.get("reward"), reply.get("parts"), reply.get("outcome")
    if not is_object(parts) or outcome not in OUTCOMES or len(parts) > MAX_ALL:
        return None
    values = [*parts.values(), *([] if reward is None else [reward])]
    if not all(type(value) in (int, float) and math.isfinite(value) for value in values):
        return None
    if (reward is None) == (outcome == "ok"):
        return None
    message = str(reply.get("message", ""))[:MAX_MESSAGE]
    floats = {str(name)[: 2 * MAX_NAME]: float(value) for name, value in parts.items()}
    return Graded(None if reward is None else float(reward), floats, outcome, message)


def outcomes(graded: Sequence[Graded]) -> dict[str, int]:
    """Count the outcomes, those that occur, in the order of OUTCOMES."""
    count = Counter(each.outcome for each in graded)
    return {outcome: count[outcome] for outcome in OUTCOMES if count[outcome]}


def refuse_failures(graded: Sequence[Graded], share: float = SHARE, *, look: str = "") -> None:
    """Raise ConfigError if more than `share` of the answers have no reward.

    look: a command that shows the rewards of some answers
    """
    failed = [each for each in graded if each.outcome != "ok"]
    if len(failed) <= share * len(graded):
        return
    kinds = ", ".join(f"{count} {outcome}" for outcome, count in outcomes(failed).items())
    raise ConfigError(
        f"{len(failed)} of {len(graded)} answers have no reward ({kinds}), more than {share:.0%}; the first:"
        f" {failed[0].message}",
        next=f"{look or 'unfreeze reward show my.py --model M --data F'} shows it; mend the reward",
    )
