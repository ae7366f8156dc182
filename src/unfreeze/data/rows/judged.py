"""Rows of two answers to one prompt, or of an answer with a label, in the shapes that data sets have.

chosen/rejected     the answers: two texts, two lists of messages, or a message each. Their prompt is
                    prompt       a text or messages (TRL, UltraFeedback, which repeats it in both lists)
                    question, input   a text, with system (Intel/orca_dpo_pairs and its successors)
                    instruction, input, system   as alpaca has them (LLaMA-Factory)
                    conversations, messages   the turns before (LLaMA-Factory, ShareGPT)
                    nothing: the turns that both lists begin with; of two texts with "Human:" and "Assistant:"
                    (Anthropic/hh-rlhf) the turns they share; of two other texts the tokens they share
prompt/completion/label   KTO: as sft's rows, with a label: true, false, 0 or 1, "chosen" or "rejected"
messages/label      the same with the answer as the last turn

What is asked stands in both and is never taught; the answers are turns of the assistant, checked as those of
sft's rows are. Equal and empty answers, and prompts that differ, are refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import takewhile

from unfreeze.core.errors import DataError
from unfreeze.data.rows.fields import MAX_DEPTH, deeper_than, json_type, list_of, text_of
from unfreeze.data.rows.row import Judged, Text
from unfreeze.data.rows.shapes import (
    SHAREGPT_ROLES,
    Fields,
    conversation_of,
    near_field,
    refuse_other_senses,
    with_input,
)

LABELS = {"true": True, "1": True, "1.0": True, "chosen": True} | {
    "false": False, "0": False, "0.0": False, "rejected": False
}  # fmt: skip
"""What a label may be, in small letters."""
PAIR = ("chosen", "rejected")
_SPEAKER = re.compile(r"(?:^|\n\n)(Human|Assistant): ?")
_TURNS = ("prompt", "conversations", "messages")
Item = tuple[str, object]
"""A message and where it stands in the row."""


def judged_from_dict(fields: Fields, row: int = 0, renames: Mapping[str, str] | None = None) -> Judged:
    """One JSON object as a pair of answers, or as an answer with a label.

    renames: field -> column, as --columns gave them. Raises DataError naming the field that is missing or
    wrong.
    """
    if deeper_than(fields, MAX_DEPTH):
        raise DataError(f"row {row}: nested deeper than {MAX_DEPTH} levels", next="flatten the row")
    there = {name: value for name, value in fields.items() if value is not None}
    refuse_other_senses(there, row)
    if all(name in there for name in PAIR):
        return _pair(there, row)
    if "label" in there and not any(name in there for name in PAIR):
        return _labelled(there, row)
    raise _no_pair(there, row, renames or {})


def _no_pair(there: Fields, row: int, renames: Mapping[str, str]) -> DataError:
    missing = [name for name in PAIR if name not in there]
    others = [other for other in there if other not in PAIR]
    near = {  # chosen_response, or a slip of the pen
        name: next((other for other in others if name in other.lower()), near_field(name, others))
        for name in missing
    }
    columns = {**renames, **{name: word or "NAME" for name, word in near.items()}}
    names = ", ".join(sorted(there)[:20]) or "none"
    several = len(missing) > 1
    return DataError(
        f"row {row}: no pair of answers: field{'s' * several} {' and '.join(map(repr, missing))}"
        f" {'are' if several else 'is'} missing, there are: {names}",
        next="--columns " + ",".join(f"{ours}={column}" for ours, column in columns.items()),
    )


def _pair(fields: Fields, row: int) -> Judged:
    answers = [fields[name] for name in PAIR]
    if len({isinstance(answer, str) for answer in answers}) > 1:
        raise DataError(
            f"row {row}: chosen is {json_type(answers[0])}, rejected is {json_type(answers[1])};"
            " both must have one form"
        )
    if answers[0] == answers[1]:
        raise DataError(
            f"row {row}: chosen and rejected are the same answer; nothing is preferred",
            next="remove the row, or --on-bad-row skip",
        )
    asked = _asked(fields, row)
    if asked is None and all(isinstance(answer, str) for answer in answers):
        texts = [text_of(answer, row, name) for name, answer in zip(PAIR, answers, strict=True)]
        if not all(_SPEAKER.match(text) for text in texts):
            return Judged(Text(texts[0], row), Text(texts[1], row), row, "chosen/rejected")
        talks = [_transcript(text, row, name) for name, text in zip(PAIR, texts, strict=True)]
    else:
        talks = [_talk(asked or [], fields[name], row, name) for name in PAIR]
    begins = sum(1 for _ in takewhile(lambda two: two[0][1] == two[1][1], zip(*talks, strict=False)))
    _check_ways(talks, begins, row)
    rest = {name: value for name, value in fields.items() if name in ("system", "tools", "functions")}
    made = [conversation_of(talk, rest, row, "chosen/rejected", prompt=begins) for talk in talks]
    return Judged(made[0], made[1], row, "chosen/rejected")


def _check_ways(talks: Sequence[Sequence[Item]], begins: int, row: int) -> None:
    """Both must go on after what they share, and the assistant does."""
    for name, talk in zip(PAIR, talks, strict=True):
        if len(talk) == begins:
            raise DataError(f"row {row}: field {name} has no answer of its own")
        role = _role(talk[begins][1])
        if role != "assistant":
            raise DataError(
                f"row {row}: the prompts differ: {name} has another turn of {role!r} at {talk[begins][0]};"
                " answers to different prompts are not compared",
                next="give both the same prompt, or remove the row, or --on-bad-row skip",
            )
        if not any(_role(item) == "assistant" for _, item in talk[begins:]):
            raise DataError(f"row {row}: field {name} has no turn of the assistant")


def _labelled(fields: Fields, row: int) -> Judged:
    label = fields["label"]
    desirable = (
        LABELS.get(str(label).strip().lower()) if isinstance(label, bool | int | float | str) else None
    )
    if desirable is None:
        raise DataError(
            f"row {row}: field label is {json_type(label)}, expected true or false (or 1 and 0)",
            next="write what is wanted as true, or --columns label=NAME",
        )
    if "completion" in fields:
        asked, shape = _asked(fields, row), "prompt/completion/label"
        if asked is None:
            raise DataError(f"row {row}: field 'prompt' is missing", next="--columns prompt=NAME")
        talk = _talk(asked, fields["completion"], row, "completion")
        begins = len(asked)
    else:
        name = next((name for name in ("messages", "conversations") if name in fields), None)
        if name is None:
            raise DataError(
                f"row {row}: a label and no answer: field 'completion' is missing, there are:"
                f" {', '.join(sorted(fields)[:20])}",
                next="--columns prompt=NAME,completion=NAME",
            )
        talk, shape = _items(fields[name], row, name), f"{name}/label"
        begins = len(talk) - 1
    rest = {name: value for name, value in fields.items() if name in ("system", "tools", "functions")}
    made = conversation_of(talk, rest, row, shape, prompt=begins)
    return Judged(made if desirable else None, None if desirable else made, row, shape)


def _asked(fields: Fields, row: int) -> list[Item] | None:
    """The turns before the answers, where the row has a field for them."""
    name = next((name for name in _TURNS if isinstance(fields.get(name), list) and fields[name]), None)
    # UltraFeedback repeats its chosen answer as `messages`
    if name is not None and not (name == "messages" and isinstance(fields.get("chosen"), list)):
        return _items(fields[name], row, name)
    if "prompt" in fields:
        return [("prompt", {"role": "user", "content": text_of(fields["prompt"], row, "prompt")})]
    if "instruction" in fields:
        return [("instruction", {"role": "user", "content": with_input(fields, row)})]
    name = next((name for name in ("question", "input") if fields.get(name)), None)
    if name is None:
        return None
    return [(name, {"role": "user", "content": text_of(fields[name], row, name)})]


def _talk(asked: Sequence[Item], answer: object, row: int, name: str) -> list[Item]:
    """The turns before, and the answer; where the answer's list begins with them, once."""
    if isinstance(answer, str):
        return [*asked, (name, {"role": "assistant", "content": text_of(answer, row, name)})]
    items = _items([answer] if isinstance(answer, dict) else answer, row, name)
    if not asked or _role(items[0][1]) in ("assistant", "tool"):
        return [*asked, *items]
    before = [item for _, item in asked]
    if [item for _, item in items[: len(before)]] == before:
        return items
    if len(before) == 1 and any(_said(item) == _said(before[0]) for _, item in items):
        return items  # a system prompt stands before it, or it is the last of several questions
    raise DataError(
        f"row {row}: field {name} begins with another prompt than the row's", next="keep one of them"
    )


def _items(value: object, row: int, name: str) -> list[Item]:
    """Messages with their places; those of ShareGPT (from, value) under our names."""
    items: list[Item] = []
    for i, item in enumerate(list_of(value, row, name)):
        if isinstance(item, dict) and "from" in item and "role" not in item:
            role = SHAREGPT_ROLES.get(str(item["from"]), str(item["from"]))
            item = {"role": role, "content": item.get("value")}
        items.append((f"{name}[{i}]", item))
    return items


def _transcript(text: str, row: int, name: str) -> list[Item]:
    """Turns of "Human: …" and "Assistant: …", each behind an empty line."""
    parts = _SPEAKER.split(text)[1:]
    roles = {"Human": "user", "Assistant": "assistant"}
    return [
        (f"{name} (turn {i + 1})", {"role": roles[speaker], "content": said.strip()})
        for i, (speaker, said) in enumerate(zip(parts[::2], parts[1::2], strict=True))
    ]


def _role(item: object) -> str:
    return str(item.get("role")) if isinstance(item, dict) else ""


def _said(item: object) -> str:
    return str(item.get("content")).strip() if isinstance(item, dict) else ""
