"""Rows to generate an answer for: everything before the last answer, which the row may or may not contain.

Any shape of shapes.py works, also without its answer: {"prompt": …}, {"question": …},
{"instruction": …, "input": …}, or messages that end with the user's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from unfreeze.core.errors import DataError
from unfreeze.data.rows.row import Conversation
from unfreeze.data.rows.shapes import Fields, row_from_dict
from unfreeze.untrusted.json_object import is_list, is_object

PAIRS = (("prompt", "completion"), ("question", "answer"), ("instruction", "output"))
STAND_IN = "-"  # placeholder for the missing answer; removed again
LISTS = {
    "messages": ("role", {"role": "assistant", "content": STAND_IN}),
    "conversations": ("from", {"from": "gpt", "value": STAND_IN}),
}


def asked_from_dict(fields: Fields, row: int = 0, renames: Mapping[str, str] | None = None) -> Conversation:
    """Return the messages before the row's last assistant turn, with the row's columns.

    Errors as for row_from_dict.
    """
    there = {name: value for name, value in fields.items() if value is not None}
    for name, (who, answer) in LISTS.items():
        turns = there.get(name)
        last = turns[-1] if is_list(turns) and turns else None
        if is_list(turns) and is_object(last) and last.get(who) not in ("assistant", "gpt"):
            there[name] = [*turns, answer]
    for question, answer_field in PAIRS:
        if question in there and answer_field not in there:
            several = isinstance(there[question], list)
            there[answer_field] = [LISTS["messages"][1]] if several else STAND_IN
    built = row_from_dict(there, row, renames)
    if not isinstance(built, Conversation):
        raise DataError(
            f"row {row}: a plain text has no prompt to answer",
            next='rows of {"prompt": "…"}, or of messages that end with the user',
        )
    last = max(i for i, message in enumerate(built.messages) if message["role"] == "assistant")
    if not last:
        raise DataError(f"row {row}: it starts with the assistant's turn, so there is no prompt")
    before = frozenset(i for i in range(last) if built.messages[i]["role"] == "assistant")
    return replace(built, messages=built.messages[:last], context=before, columns=fields)
