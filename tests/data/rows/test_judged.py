"""Rows of two answers, in the shapes that published sets have: what is asked, what is compared, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from unfreeze.core.errors import DataError
from unfreeze.data import Conversation, Text, read_rows
from unfreeze.data.rows.judged import judged_from_dict
from unfreeze.data.rows.row import Judged

USER = {"role": "user", "content": "What colour is the sky?"}
SYSTEM = {"role": "system", "content": "Be brief."}
BLUE = {"role": "assistant", "content": "Blue."}
GREEN = {"role": "assistant", "content": "Green."}
ASKED, FIRST = USER["content"], {"role": "assistant", "content": "Which sky?"}
HUMAN = f"\n\nHuman: {ASKED}\n\nAssistant:"

# what each published set's rows look like -> the turns that both answers begin with
PUBLISHED = {
    "texts (TRL)": ({"prompt": ASKED, "chosen": "Blue.", "rejected": "Green."}, [USER]),
    "messages (TRL)": ({"prompt": [USER], "chosen": [BLUE], "rejected": [GREEN]}, [USER]),
    "implicit prompt (TRL, Capybara)": ({"chosen": [USER, BLUE], "rejected": [USER, GREEN]}, [USER]),
    "several turns": ({"chosen": [USER, FIRST, USER, BLUE], "rejected": [USER, FIRST, USER, GREEN]}, [USER, FIRST, USER]),
    "UltraFeedback binarized": (
        {
            "prompt": ASKED, "prompt_id": "1f", "chosen": [USER, BLUE], "rejected": [USER, GREEN],
            "messages": [USER, BLUE], "score_chosen": 8.5, "score_rejected": 7.0,
        },
        [USER],
    ),
    "Intel/orca_dpo_pairs": ({"system": "Be brief.", "question": ASKED, "chosen": "Blue.", "rejected": "Green."}, [SYSTEM, USER]),
    "distilabel-intel-orca": ({"system": "Be brief.", "input": ASKED, "chosen": "Blue.", "rejected": "Green."}, [SYSTEM, USER]),
    "an empty system prompt": ({"system": "", "question": ASKED, "chosen": "Blue.", "rejected": "Green."}, [USER]),
    "Anthropic/hh-rlhf": ({"chosen": f"{HUMAN} Blue.", "rejected": f"{HUMAN} Green."}, [USER]),
    "hh-rlhf, several turns": (
        {name: f"{HUMAN} Which sky?{HUMAN} {said}" for name, said in (("chosen", "Blue."), ("rejected", "Green."))},
        [USER, FIRST, USER],
    ),
    "Dahoas/rm-static: a prompt of turns": (
        {"prompt": f"{HUMAN} Which sky?{HUMAN}", "response": " Blue.", "chosen": " Blue.", "rejected": " Green."},
        [USER, FIRST, USER],
    ),
    "LLaMA-Factory, alpaca with history": (
        {
            "instruction": ASKED, "input": "", "history": [[ASKED, FIRST["content"]]],
            "chosen": "Blue.", "rejected": "Green.",
        },
        [USER, FIRST, USER],
    ),
    "LLaMA-Factory, alpaca": ({"instruction": ASKED, "input": "", "chosen": "Blue.", "rejected": "Green."}, [USER]),
    "LLaMA-Factory, sharegpt": (
        {
            "conversations": [{"from": "human", "value": ASKED}],
            "chosen": {"from": "gpt", "value": "Blue."}, "rejected": {"from": "gpt", "value": "Green."},
        },
        [USER],
    ),
    "messages and one message each": ({"messages": [USER], "chosen": BLUE, "rejected": GREEN}, [USER]),
    "a system prompt in both": ({"chosen": [SYSTEM, USER, BLUE], "rejected": [SYSTEM, USER, GREEN]}, [SYSTEM, USER]),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_rows_of_published_sets(name: str):
    fields, asked = PUBLISHED[name]
    row = judged_from_dict(fields, 3)
    for answer, said in ((row.chosen, BLUE), (row.rejected, GREEN)):
        assert isinstance(answer, Conversation) and answer.row == 3
        assert answer.messages == [*asked, said]
        assert answer.taught == [len(asked)]  # earlier turns of the assistant are asked, not compared


def test_two_texts_without_a_prompt_are_texts():
    row = judged_from_dict({"chosen": "The sky is blue.", "rejected": "The sky is green."})
    assert (row.chosen, row.rejected) == (Text("The sky is blue."), Text("The sky is green."))


@pytest.mark.parametrize(
    ("label", "desirable"),
    [
        *((label, True) for label in (True, 1, 1.0, "True", "chosen")),
        *((label, False) for label in (False, 0, "false", "rejected", "0")),
    ],
)
def test_labels(label: object, desirable: bool):
    for fields in (
        {"prompt": ASKED, "completion": "Blue.", "label": label},
        {"prompt": [USER], "completion": [BLUE], "label": label},
        {"messages": [USER, BLUE], "label": label},
    ):
        row = judged_from_dict(fields)
        there, absent = (row.chosen, row.rejected) if desirable else (row.rejected, row.chosen)
        assert absent is None and isinstance(there, Conversation) and there.messages == [USER, BLUE]


REFUSED = {
    "equal": ({"prompt": "a", "chosen": "b", "rejected": "b"}, "row 7: chosen and rejected are the same answer"),
    "equal lists": ({"chosen": [USER, BLUE], "rejected": [USER, BLUE]}, "the same answer"),
    "empty": ({"prompt": "a", "chosen": "b", "rejected": " "}, "row 7: field rejected is empty"),
    "empty turn": ({"chosen": [USER, BLUE], "rejected": [USER, {"role": "assistant", "content": ""}]}, "rejected[1].content is empty"),
    "null": ({"prompt": "a", "chosen": "b", "rejected": None}, "field 'rejected' is missing"),
    "other prompts": ({"chosen": [USER, BLUE], "rejected": [{"role": "user", "content": "And the sea?"}, BLUE]}, "row 7: the prompts differ"),
    "hh, other prompts": ({"chosen": f"{HUMAN} a", "rejected": "\n\nHuman: What?\n\nAssistant: b"}, "the prompts differ"),
    "hh, empty": ({"chosen": f"{HUMAN} a", "rejected": f"{HUMAN} "}, "is empty"),
    "one goes on": ({"chosen": [USER, BLUE], "rejected": [USER, BLUE, USER, GREEN]}, "field chosen has no answer after the shared turns"),
    "two prompts": ({"prompt": "And the sea?", "chosen": [USER, BLUE], "rejected": [USER, GREEN]}, "starts with a different prompt"),
    "no pair": ({"prompt": "a", "completion": "b"}, "row 7: not a pair of answers but one (prompt, completion)"),
    "half a pair": ({"prompt": "a", "chosen": "b"}, "field 'rejected' is missing; fields: chosen, prompt"),
    "two forms": ({"prompt": "a", "chosen": "b", "rejected": [GREEN]}, "both must have the same type"),
    "a label in words": ({"prompt": "a", "completion": "b", "label": "good"}, "field label is a text (good), expected true or false"),
    "a label of more": ({"prompt": "a", "completion": "b", "label": 3}, "expected true or false"),
    "a label of -1": ({"prompt": "a", "completion": "b", "label": -1}, "expected true or false"),
    "a label alone": ({"prompt": "a", "label": True}, "a label without an answer"),
    "a label of an earlier turn": ({"messages": [USER, BLUE, USER], "label": True}, "messages[2] is a turn of 'user'"),
    "an answer behind an answer": ({"messages": [USER, BLUE], "chosen": "Blue.", "rejected": "Green."}, "a second one"),
    "the beginning of an answer": ({"prompt": [USER, FIRST], "completion": [BLUE], "label": 1}, "prompt ends with an assistant turn (prompt[1])"),
    "a prompt of another name": ({"query": "a", "chosen": "b", "rejected": "c"}, "no prompt: chosen and rejected start differently"),
    "messages in a cell": ({"chosen": str([USER, BLUE]), "rejected": str([USER, GREEN])}, "field chosen is a list of messages written as text"),
    "PKU-SafeRLHF": ({"prompt": "a", "response_0": "b", "response_1": "c", "better_response_id": 1}, "field 'better_response_id' says which answer is better"),
    "HelpSteer2": ({"prompt": "a", "response_1": "b", "response_2": "c", "preference_strength": -2}, "'preference_strength' says which answer is better (a number (-2))"),
    "a picture": ({"prompt": "a", "chosen": "b", "rejected": "c", "images": ["x.png"]}, "'images'"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_bad_rows_are_refused_in_one_line(name: str):
    fields, said = REFUSED[name]
    with pytest.raises(DataError) as refused:
        judged_from_dict(fields, 7)
    assert said in refused.value.message and "\n" not in refused.value.message


def test_columns_near_to_ours_are_named():
    with pytest.raises(DataError) as refused:
        judged_from_dict({"prompt": "a", "chosen_response": "b", "rejected_response": "c"})
    assert "chosen=chosen_response,rejected=rejected_response" in refused.value.next
    for fields, says in (  # a rating is no answer (argilla); a label of another name (LLaMA-Factory)
        ({"prompt": "a", "chosen_rating": 5.0, "chosen_text": "b", "rejected_rating": 1.0, "rejected_text": "c"},
         "chosen=chosen_text,rejected=rejected_text"),
        ({"instruction": "a", "output": "b", "kto_tag": True}, "--loss kto --columns label=kto_tag,completion=output"),
        ({"query": "a", "chosen": "b", "rejected": "c"}, "--columns prompt=query"),
    ):  # fmt: skip
        with pytest.raises(DataError) as refused:
            judged_from_dict(fields)
        assert says in refused.value.next


@pytest.mark.parametrize("form", ["jsonl", "csv", "parquet"])
def test_the_same_rows_in_every_form_of_file(form: str, tmp_path: Path):
    fields = [{"prompt": ASKED, "chosen": "Blue.", "rejected": f"Green {n}."} for n in range(3)]
    path = tmp_path / f"pairs.{form}"
    if form == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in fields))
    else:
        import pandas

        frame = pandas.DataFrame(fields)
        frame.to_csv(path, index=False) if form == "csv" else frame.to_parquet(path)
    rows = list(read_rows(path, answers="pairs"))
    assert [row.row for row in rows] and all(isinstance(row, Judged) for row in rows)
    assert [row.rejected.messages[-1]["content"] for row in rows] == [f"Green {n}." for n in range(3)]
    # sft still refuses them by name
    with pytest.raises(DataError, match="a pair of answers"):
        list(read_rows(path))
