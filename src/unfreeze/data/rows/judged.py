"""Read rows with two answers to one prompt, or one labelled answer, in the shapes that data sets use.

chosen/rejected     the answers: two texts, two lists of messages, or one message each. The prompt is one of
                    prompt       a text or messages (TRL, UltraFeedback, which repeats it in both lists);
                                 a text of "Human:" turns that ends with "Assistant:" is split into turns
                    question, input   a text, with system (Intel/orca_dpo_pairs and its successors)
                    instruction, input, history, system   as in alpaca (LLaMA-Factory)
                    conversations, messages   the earlier turns (LLaMA-Factory, ShareGPT)
                    nothing: the turns that both lists start with; for two texts with "Human:" and
                    "Assistant:" (Anthropic/hh-rlhf) the turns they share; for two other texts, the
                    tokens they share
prompt/completion/label   KTO: like sft's rows, with a label: true, false, 0 or 1, "chosen" or "rejected"
messages/label      the same, with the answer as the last turn

The prompt is in both and never trained on. The answers are assistant turns, checked like those of sft's rows.
Equal answers, empty answers and different prompts are refused, as are answers that would be compared without
their prompt or after another answer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import takewhile

from unfreeze.config.synonyms import COMMANDS
from unfreeze.core.errors import DataError
from unfreeze.data.rows.fields import MAX_DEPTH, deeper_than, json_type, list_of, text_of
from unfreeze.data.rows.row import Judged, Text
from unfreeze.data.rows.shapes import (
    SHAPES,
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
"""Accepted values of a label, in lower case."""
PAIR = ("chosen", "rejected")
_SPEAKER = re.compile(r"(?:^|\n\n)(Human|Assistant): ?")
_ANSWERS = (*PAIR, "completion")
_TURNS = ("prompt", "conversations", "messages")
_LIST_AS_TEXT = re.compile(r"""\s*\[\s*\{\s*['"](role|content|from|value)['"]\s*:""")
"""Start of a list of messages that was written into a text cell by json or Python's str."""
_WHICH = (
    "better_response_id safer_response_id preference_strength overall_preference preference winner"
    " winner_model_a choice chosen_idx labels"
).split()
"""Columns that say which of a row's answers is better (PKU-SafeRLHF, HelpSteer2, arenas, SHP)."""
_BESIDE = ("system", "tools", "functions", "input", "history", "prompt", "source", "id", "category")
"""Columns of a row with one answer that are no second one."""
_PROMPTS = ("query", "context", "history", "post", "problem", "user", "user_prompt", "instruct", "input_text")
_LABEL_NAMES = ("kto_tag", "desirable", "thumbs_up", "is_desirable")
Item = tuple[str, object]
"""A message and its location in the row."""


def judged_from_dict(fields: Fields, row: int = 0, renames: Mapping[str, str] | None = None) -> Judged:
    """Read one JSON object as a pair of answers, or as a labelled answer.

    renames: field -> column, from --columns. Raises DataError naming the field that is missing or wrong.
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
    # an answer is a text or messages, so chosen_response matches and chosen_rating does not
    others = [other for other in there if other not in PAIR and isinstance(there[other], str | list | dict)]
    near = {  # or a typo
        name: next((other for other in others if name in other.lower()), near_field(name, others))
        for name in missing
    }
    which = next((name for name in _WHICH if name in there), None)
    if which is not None and len(missing) == len(PAIR) and not any(near.values()):
        return DataError(
            f"row {row}: field {which!r} says which answer is better"
            f" ({json_type(there[which])}); a pair needs the better one as chosen, the other as rejected",
            next="convert to prompt, chosen, rejected by that field; --columns would fit only some rows",
        )
    label = next((name for name in _LABEL_NAMES if name in there), None)
    if label is not None:
        answer = "" if "completion" in there or "messages" in there else ",completion=NAME"
        answer = ",completion=output" if answer and "output" in there else answer
        return DataError(
            f"row {row}: not a pair of answers; field {label!r} looks like a label",
            next=f"--loss kto --columns label={label}{answer}",
        )
    if (
        len(missing) == len(PAIR)
        and not renames
        and not any(near.values())
        and (shape := _one_answer(others))
    ):
        return DataError(
            f"row {row}: not a pair of answers but one ({shape}); sft learns it", next=COMMANDS["train"].next
        )
    columns = {**renames, **{name: word or "NAME" for name, word in near.items()}}
    names = ", ".join(sorted(there)[:20]) or "none"
    several = len(missing) > 1
    return DataError(
        f"row {row}: not a pair of answers: field{'s' * several} {' and '.join(map(repr, missing))}"
        f" {'are' if several else 'is'} missing; fields: {names}",
        next="--columns " + ",".join(f"{ours}={column}" for ours, column in columns.items()),
    )


def _one_answer(fields: Sequence[str]) -> str:
    """The fields that sft reads, if there is none beside them that could be another answer; else ""."""
    for needed, _ in SHAPES.values():
        if set(needed) <= set(fields) <= {*needed, *_BESIDE}:
            return ", ".join(needed)
    return ""


def _pair(fields: Fields, row: int) -> Judged:
    answers = [fields[name] for name in PAIR]
    if len({isinstance(answer, str) for answer in answers}) > 1:
        raise DataError(
            f"row {row}: chosen is {json_type(answers[0])}, rejected is {json_type(answers[1])};"
            " both must have the same type"
        )
    if answers[0] == answers[1]:
        raise DataError(
            f"row {row}: chosen and rejected are the same answer, so neither is preferred",
            next="remove the row, or --data.on-bad-row skip",
        )
    prompt = _asked(fields, row)
    if prompt is None and all(isinstance(answer, str) for answer in answers):
        texts = [text_of(answer, row, name) for name, answer in zip(PAIR, answers, strict=True)]
        if not all(_SPEAKER.match(text) for text in texts):
            _check_shared(texts, fields, row)
            return Judged(Text(texts[0], row), Text(texts[1], row), row, "chosen/rejected")
        talks = [_transcript(text, row, name) for name, text in zip(PAIR, texts, strict=True)]
    else:
        talks = [_talk(prompt or [], fields[name], row, name) for name in PAIR]
    begins = sum(1 for _ in takewhile(lambda two: two[0][1] == two[1][1], zip(*talks, strict=False)))
    _check_ways(talks, begins, row)
    if prompt:
        _check_prompt(prompt, talks[0][begins:], row)
    rest = {name: value for name, value in fields.items() if name in ("system", "tools", "functions")}
    answer_rows = [conversation_of(talk, rest, row, "chosen/rejected", prompt=begins) for talk in talks]
    return Judged(answer_rows[0], answer_rows[1], row, "chosen/rejected")


def _check_ways(talks: Sequence[Sequence[Item]], begins: int, row: int) -> None:
    """Check that both have their own turns after the shared ones, starting with the assistant's."""
    for name, talk in zip(PAIR, talks, strict=True):
        if len(talk) == begins:
            raise DataError(f"row {row}: field {name} has no answer after the shared turns")
        role = _role(talk[begins][1])
        if role != "assistant":
            raise DataError(
                f"row {row}: the prompts differ: {name} has another {role!r} turn at {talk[begins][0]};"
                " answers to different prompts are not compared",
                next="give both the same prompt, or remove the row, or --data.on-bad-row skip",
            )
        if not any(_role(item) == "assistant" for _, item in talk[begins:]):
            raise DataError(f"row {row}: field {name} has no assistant turn")


def _check_prompt(prompt: Sequence[Item], answer: Sequence[Item], row: int) -> None:
    """Refuse an answer after an answer: a prompt that already ends with an answer or the start of one."""
    if answer and _role(prompt[-1][1]) == "assistant" and _role(answer[0][1]) == "assistant":
        raise DataError(
            f"row {row}: the prompt ends with an assistant turn ({prompt[-1][0]}), so the answer would"
            " be a second one",
            next="remove it from the prompt; if both answers continue it, put it at the start of both",
        )


def _check_shared(texts: Sequence[str], fields: Fields, row: int) -> None:
    """Check that two texts without a prompt field share at least their first word."""
    if _LIST_AS_TEXT.match(texts[0]):
        _talk([], texts[0], row, "chosen")
    chosen, rejected = (text.split(maxsplit=1)[0] for text in texts)
    if chosen == rejected:
        return
    others = [name for name, value in fields.items() if name not in PAIR and isinstance(value, str | list)]
    near = next((name for name in others if name in _PROMPTS), None)
    raise DataError(
        f"row {row}: no prompt: chosen and rejected start differently; other fields:"
        f" {', '.join(sorted(others)[:20]) or 'none'}",
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
            next="use true for the good answers, or --columns label=NAME",
        )
    if "completion" in fields:
        prompt, shape = _asked(fields, row), "prompt/completion/label"
        if prompt is None:
            raise DataError(f"row {row}: field 'prompt' is missing", next="--columns prompt=NAME")
        talk = _talk(prompt, fields["completion"], row, "completion")
        begins = len(prompt)
        _check_prompt(prompt, talk[begins:], row)
    else:
        name = next((name for name in ("messages", "conversations") if name in fields), None)
        if name is None:
            raise DataError(
                f"row {row}: a label without an answer: field 'completion' is missing; fields:"
                f" {', '.join(sorted(fields)[:20])}",
                next="--columns prompt=NAME,completion=NAME",
            )
        talk, shape = _items(fields[name], row, name), f"{name}/label"
        begins = len(talk) - 1
        if _role(talk[-1][1]) != "assistant":
            raise DataError(
                f"row {row}: {talk[-1][0]} is a turn of {_role(talk[-1][1])!r}; the label applies to the last"
                " turn, which must be the assistant's",
                next="remove the turns after the answer, or --data.on-bad-row skip",
            )
    rest = {name: value for name, value in fields.items() if name in ("system", "tools", "functions")}
    answer_row = conversation_of(talk, rest, row, shape, prompt=begins)
    return Judged(answer_row if desirable else None, None if desirable else answer_row, row, shape)


def _asked(fields: Fields, row: int) -> list[Item] | None:
    """Return the turns before the answers, if the row has a field for them."""
    name = next((name for name in _TURNS if isinstance(fields.get(name), list) and fields[name]), None)
    # UltraFeedback repeats its chosen answer in `messages`
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


def _talk(prompt: Sequence[Item], answer: object, row: int, name: str) -> list[Item]:
    """Return the prompt's turns and the answer; if the answer's list repeats the prompt, include it once."""
    if isinstance(answer, str):
        if _LIST_AS_TEXT.match(answer):
            raise DataError(
                f"row {row}: field {name} is a list of messages written as text",
                next="write it as a list (jsonl, parquet), or as JSON in a csv",
            )
        return [*prompt, (name, {"role": "assistant", "content": text_of(answer, row, name)})]
    items = _items([answer] if is_object(answer) else answer, row, name)
    if not prompt or _role(items[0][1]) in ("assistant", "tool"):
        return [*prompt, *items]
    before = [item for _, item in prompt]
    if [item for _, item in items[: len(before)]] == before:
        return items
    if len(before) == 1 and any(_said(item) == _said(before[0]) for _, item in items):
        return items  # a system prompt comes first, or the prompt is the last of several questions
    raise DataError(
        f"row {row}: field {name} starts with a different prompt than the row's", next="keep one of them"
    )


def _items(value: object, row: int, name: str) -> list[Item]:
    """Return messages with their locations; ShareGPT's (from, value) become (role, content)."""
    items: list[Item] = []
    for i, item in enumerate(list_of(value, row, name)):
        if is_object(item) and "from" in item and "role" not in item:
            role = SHAREGPT_ROLES.get(str(item["from"]), str(item["from"]))
            item = {"role": role, "content": item.get("value")}
        items.append((f"{name}[{i}]", item))
    return items


def _spoken(fields: dict[str, object], row: int) -> dict[str, object]:
    """Split a text prompt of "Human:" turns that ends with "Assistant:" into turns."""
    prompt = fields.get("prompt")
    if not isinstance(prompt, str) or not _SPEAKER.match(prompt):
        return fields
    turns = [message for _, message in _transcript(prompt, row, "prompt")]
    if _role(turns[-1]) != "assistant" or _said(turns[-1]):
        return fields
    # the space after "Assistant:" belongs to the format, not to the answer
    bare = {name: text.strip() for name in _ANSWERS if isinstance(text := fields.get(name), str)}
    return {**fields, "prompt": turns[:-1], **bare}


def _transcript(text: str, row: int, name: str) -> list[Item]:
    """Return the turns of "Human: …" and "Assistant: …", separated by empty lines."""
    parts = _SPEAKER.split(text)[1:]
    roles = {"Human": "user", "Assistant": "assistant"}
    return [
        (f"{name} (turn {i + 1})", {"role": roles[speaker], "content": content.strip()})
        for i, (speaker, content) in enumerate(zip(parts[::2], parts[1::2], strict=True))
    ]


def _role(item: object) -> str:
    return str(item.get("role")) if is_object(item) else ""


def _said(item: object) -> str:
    return str(item.get("content")).strip() if is_object(item) else ""
