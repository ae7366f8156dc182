"""Rows of two answers to one prompt, or of an answer with a label, in the shapes that data sets have.

chosen/rejected     the answers: two texts, two lists of messages, or a message each. Their prompt is
                    prompt       a text or messages (TRL, UltraFeedback, which repeats it in both lists);
                                 a text of "Human:" turns that ends with "Assistant:" is these turns
                    question, input   a text, with system (Intel/orca_dpo_pairs and its successors)
                    instruction, input, history, system   as alpaca has them (LLaMA-Factory)
                    conversations, messages   the turns before (LLaMA-Factory, ShareGPT)
                    nothing: the turns that both lists begin with; of two texts with "Human:" and "Assistant:"
                    (Anthropic/hh-rlhf) the turns they share; of two other texts the tokens they share
prompt/completion/label   KTO: as sft's rows, with a label: true, false, 0 or 1, "chosen" or "rejected"
messages/label      the same with the answer as the last turn

What is asked stands in both and is never taught; the answers are turns of the assistant, checked as those of
sft's rows are. Equal and empty answers, and prompts that differ, are refused; so is what would be compared
without its prompt, or behind a first answer.
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
    history_of,
    near_field,
    refuse_other_senses,
    with_input,
)
from unfreeze.untrusted.json_object import is_object

LABEL_VALUES = {"true": True, "1": True, "1.0": True, "chosen": True} | {
    "false": False, "0": False, "0.0": False, "rejected": False
}  # fmt: skip
"""What a label may be, in small letters."""
PAIR = ("chosen", "rejected")
_SPEAKER = re.compile(r"(?:^|\n\n)(Human|Assistant): ?")
_ANSWERS = (*PAIR, "completion")
_TURNS = ("prompt", "conversations", "messages")
_LIST_AS_TEXT = re.compile(r"""\s*\[\s*\{\s*['"](role|content|from|value)['"]\s*:""")
"""How a list of messages begins that was written into a cell, by json or by Python's str."""
_WHICH = (
    "better_response_id safer_response_id preference_strength overall_preference preference winner"
    " winner_model_a choice chosen_idx labels"
).split()
"""Columns that say which of a row's answers is the better one (PKU-SafeRLHF, HelpSteer2, arenas, SHP)."""
_PROMPTS = ("query", "context", "history", "post", "problem", "user", "user_prompt", "instruct", "input_text")
_LABEL_NAMES = ("kto_tag", "desirable", "thumbs_up", "is_desirable")
Item = tuple[str, object]
"""A message and where it stands in the row."""


def judged_from_dict(fields: Fields, row: int = 0, renames: Mapping[str, str] | None = None) -> Judged:
    """One JSON object as a pair of answers, or as an answer with a label.

    renames: field -> column, as --columns gave them. Raises DataError naming the field that is missing or
    wrong.
    """
    if deeper_than(fields, MAX_DEPTH):
        raise DataError(f"row {row}: nested deeper than {MAX_DEPTH} levels", next="flatten the row")
    there = _spoken({name: value for name, value in fields.items() if value is not None}, row)
    refuse_other_senses(there, row)
    if all(name in there for name in PAIR):
        return _pair(there, row)
    if "label" in there and not any(name in there for name in PAIR):
        return _labelled(there, row)
    raise _no_pair(there, row, renames or {})


def _no_pair(there: Fields, row: int, renames: Mapping[str, str]) -> DataError:
    missing = [name for name in PAIR if name not in there]
    # an answer is a text or messages: chosen_response, not chosen_rating
    others = [other for other in there if other not in PAIR and isinstance(there[other], str | list | dict)]
    near = {  # or a slip of the pen
        name: next((other for other in others if name in other.lower()), near_field(name, others))
        for name in missing
    }
    which = next((name for name in _WHICH if name in there), None)
    if which is not None and len(missing) == len(PAIR) and not any(near.values()):
        return DataError(
            f"row {row}: which answer is the better one stands in field {which!r}"
            f" ({json_type(there[which])}), and a pair has it as chosen, the other as rejected",
            next="write rows of prompt, chosen, rejected by that field; --columns would fit some rows alone",
        )
    label = next((name for name in _LABEL_NAMES if name in there), None)
    if label is not None:
        answer = "" if "completion" in there or "messages" in there else ",completion=NAME"
        answer = ",completion=output" if answer and "output" in there else answer
        return DataError(
            f"row {row}: no pair of answers; field {label!r} looks like a label",
            next=f"--loss kto --columns label={label}{answer}",
        )
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
            next="remove the row, or --data.on-bad-row skip",
        )
    asked = _asked(fields, row)
    if asked is None and all(isinstance(answer, str) for answer in answers):
        texts = [text_of(answer, row, name) for name, answer in zip(PAIR, answers, strict=True)]
        if not all(_SPEAKER.match(text) for text in texts):
            _check_shared(texts, fields, row)
            return Judged(Text(texts[0], row), Text(texts[1], row), row, "chosen/rejected")
        talks = [_transcript(text, row, name) for name, text in zip(PAIR, texts, strict=True)]
    else:
        talks = [_talk(asked or [], fields[name], row, name) for name in PAIR]
    begins = sum(1 for _ in takewhile(lambda two: two[0][1] == two[1][1], zip(*talks, strict=False)))
    _check_ways(talks, begins, row)
    if asked:
        _check_prompt(asked, talks[0][begins:], row)
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
                next="give both the same prompt, or remove the row, or --data.on-bad-row skip",
            )
        if not any(_role(item) == "assistant" for _, item in talk[begins:]):
            raise DataError(f"row {row}: field {name} has no turn of the assistant")


def _check_prompt(asked: Sequence[Item], answer: Sequence[Item], row: int) -> None:
    """Refuse an answer behind an answer: the prompt holds one already, or the beginning of one."""
    if answer and _role(asked[-1][1]) == "assistant" and _role(answer[0][1]) == "assistant":
        raise DataError(
            f"row {row}: the prompt ends with a turn of the assistant ({asked[-1][0]}), so the answer would"
            " be a second one",
            next="leave it out of the prompt; where it begins both answers, write it in front of them",
        )


def _check_shared(texts: Sequence[str], fields: Fields, row: int) -> None:
    """Two texts without a prompt begin with it: with one word at least."""
    if _LIST_AS_TEXT.match(texts[0]):
        _talk([], texts[0], row, "chosen")
    chosen, rejected = (text.split(maxsplit=1)[0] for text in texts)
    if chosen == rejected:
        return
    others = [name for name, value in fields.items() if name not in PAIR and isinstance(value, str | list)]
    near = next((name for name in others if name in _PROMPTS), None)
    raise DataError(
        f"row {row}: no prompt: chosen and rejected begin with other words, there are also:"
        f" {', '.join(sorted(others)[:20]) or 'no other texts'}",
        next=f"--columns prompt={near or 'NAME'}",
    )


def _labelled(fields: Fields, row: int) -> Judged:
    label = fields["label"]
    desirable = (
        LABEL_VALUES.get(str(label).strip().lower()) if isinstance(label, bool | int | float | str) else None
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
        _check_prompt(asked, talk[begins:], row)
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
        if _role(talk[-1][1]) != "assistant":
            raise DataError(
                f"row {row}: {talk[-1][0]} is a turn of {_role(talk[-1][1])!r}: the label is of the last"
                " turn, which is the assistant's",
                next="leave out what comes behind the answer, or --data.on-bad-row skip",
            )
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
        before: list[Item] = [("history", turn) for turn in history_of(fields.get("history"), row)]
        return [*before, ("instruction", {"role": "user", "content": with_input(fields, row)})]
    name = next((name for name in ("question", "input") if fields.get(name)), None)
    if name is None:
        return None
    return [(name, {"role": "user", "content": text_of(fields[name], row, name)})]


def _talk(asked: Sequence[Item], answer: object, row: int, name: str) -> list[Item]:
    """The turns before, and the answer; where the answer's list begins with them, once."""
    if isinstance(answer, str):
        if _LIST_AS_TEXT.match(answer):
            raise DataError(
                f"row {row}: field {name} is a list of messages written as text",
                next="write the list itself (jsonl, parquet), or in a csv as JSON",
            )
        return [*asked, (name, {"role": "assistant", "content": text_of(answer, row, name)})]
    items = _items([answer] if is_object(answer) else answer, row, name)
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
        if is_object(item) and "from" in item and "role" not in item:
            role = SHAREGPT_ROLES.get(str(item["from"]), str(item["from"]))
            item = {"role": role, "content": item.get("value")}
        items.append((f"{name}[{i}]", item))
    return items


def _spoken(fields: dict[str, object], row: int) -> dict[str, object]:
    """A row whose prompt is a text of "Human:" turns, ending with "Assistant:", with these turns instead."""
    prompt = fields.get("prompt")
    if not isinstance(prompt, str) or not _SPEAKER.match(prompt):
        return fields
    turns = [message for _, message in _transcript(prompt, row, "prompt")]
    if _role(turns[-1]) != "assistant" or _said(turns[-1]):
        return fields
    # the space behind "Assistant:" is the form's, not the answer's
    bare = {name: text.strip() for name in _ANSWERS if isinstance(text := fields.get(name), str)}
    return {**fields, "prompt": turns[:-1], **bare}


def _transcript(text: str, row: int, name: str) -> list[Item]:
    """Turns of "Human: …" and "Assistant: …", each behind an empty line."""
    parts = _SPEAKER.split(text)[1:]
    roles = {"Human": "user", "Assistant": "assistant"}
    return [
        (f"{name} (turn {i + 1})", {"role": roles[speaker], "content": said.strip()})
        for i, (speaker, said) in enumerate(zip(parts[::2], parts[1::2], strict=True))
    ]


def _role(item: object) -> str:
    return str(item.get("role")) if is_object(item) else ""


def _said(item: object) -> str:
    return str(item.get("content")).strip() if is_object(item) else ""
