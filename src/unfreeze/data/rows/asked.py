"""Rows that are asked: what stands before a row's last answer, whether the row has that answer or not.

Any shape of shapes.py will do, and also one without its answer: {"prompt": …}, {"question": …},
{"instruction": …, "input": …}, messages that end with the user's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from unfreeze.core.errors import DataError
from unfreeze.data.rows.row import Conversation
from unfreeze.data.rows.shapes import Fields, row_from_dict
from unfreeze.untrusted.json_object import is_list, is_object

PAIRS = (("prompt", "completion"), ("question", "answer"), ("instruction", "output"))
STAND_IN = "-"  # for the answer that is to come, and is cut off again
LISTS = {
    "messages": ("role", {"role": "assistant", "content": STAND_IN}),
    "conversations": ("from", {"from": "gpt", "value": STAND_IN}),
}


def asked_from_dict(fields: Fields, row: int = 0, renames: Mapping[str, str] | None = None) -> Conversation:
    """The messages before a row's last answer of the assistant. Errors as of row_from_dict."""
    there = {name: value for name, value in fields.items() if value is not None}
    for name, (who, answer) in LISTS.items():
        turns = there.get(name)
        last = turns[-1] if is_list(turns) and turns else None
        if is_list(turns) and is_object(last) and last.get(who) not in ("assistant", "gpt"):
            there[name] = [*turns, answer]
    for asked, answered in PAIRS:
        if asked in there and answered not in there:
            several = isinstance(there[asked], list)
            there[answered] = [LISTS["messages"][1]] if several else STAND_IN
    built = row_from_dict(there, row, renames)
    if not isinstance(built, Conversation):
        raise DataError(
            f"row {row}: a text asks nothing",
            next='rows of {"prompt": "…"}, or of messages that end with the user',
        )
    last = max(i for i, message in enumerate(built.messages) if message["role"] == "assistant")
    if not last:
        raise DataError(f"row {row}: it begins with the assistant, and nothing asks for an answer")
    before = frozenset(i for i in range(last) if built.messages[i]["role"] == "assistant")
    return replace(built, messages=built.messages[:last], context=before)
