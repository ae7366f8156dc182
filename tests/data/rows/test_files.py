"""Data files: six shapes, and for every bad row its number and field."""

import json
import random
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unfreeze.core.errors import DataError
from unfreeze.data import BadRow, Conversation, Text, read_rows
from unfreeze.data.rows import lines
from unfreeze.data.rows.files import FORMS, Again, read_places

TALK = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]


def test_every_form_stands_in_the_one_list_of_them():
    text = (Path(__file__).parents[3] / "docs" / "reference" / "data.md").read_text(encoding="utf-8")
    listed = text.partition("| given | read |")[2].partition("\n\n")[0]
    assert [ending for ending in (*FORMS, ".gz") if f"{ending}`" not in listed] == []
    assert ".docx`" not in listed  # control arm


def rows_of(tmp_path, *lines: str | bytes | dict, name="data.jsonl", on_bad=None):
    path = tmp_path / name
    path.write_bytes(b"\n".join(encode(line) for line in lines) + b"\n")
    return list(read_rows(path, on_bad))


def encode(line) -> bytes:
    return line if isinstance(line, bytes) else (line if isinstance(line, str) else json.dumps(line)).encode()


@pytest.mark.parametrize(
    "row, shape, messages",
    [
        ({"messages": TALK}, "messages", TALK),
        ({"prompt": "Q", "completion": "A"}, "prompt/completion", TALK),
        ({"prompt": TALK[:1], "completion": TALK[1:]}, "prompt/completion", TALK),
        ({"question": "Q", "answer": "A"}, "question/answer", TALK),
        ({"instruction": "Q", "output": "A"}, "instruction/output", TALK),
        ({"instruction": "Q", "input": "", "output": "A"}, "instruction/output", TALK),
        (
            {"instruction": "Sum", "input": "1 2", "output": "A"},
            "instruction/output",
            [{"role": "user", "content": "Sum\n\n1 2"}, TALK[1]],
        ),
        (
            {"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]},
            "conversations",
            TALK,
        ),
        (
            {
                "system": "S",
                "conversations": [
                    {"from": "user", "value": "Q"},
                    {"from": "assistant", "value": "A"},
                    {"from": "tool", "value": ""},
                ],
            },
            "conversations",
            [{"role": "system", "content": "S"}, *TALK, {"role": "tool", "content": ""}],
        ),
        (
            {"system": "S", "question": "Q", "answer": "A", "id": 7},
            "question/answer",
            [{"role": "system", "content": "S"}, *TALK],
        ),
        ({"system": "S", "messages": TALK}, "messages", [{"role": "system", "content": "S"}, *TALK]),
        (
            {"system": "S", "messages": [{"role": "system", "content": "S"}, *TALK]},
            "messages",
            [{"role": "system", "content": "S"}, *TALK],
        ),
        (
            {"system": "S", "prompt": TALK[:1], "completion": TALK[1:]},
            "prompt/completion",
            [{"role": "system", "content": "S"}, *TALK],
        ),
        (
            {"instruction": "Q", "output": "A", "system": "S", "history": [["Q", "A"]]},
            "instruction/output",
            [{"role": "system", "content": "S"}, *TALK, *TALK],
        ),
        ({"instruction": "Q", "output": "A", "history": []}, "instruction/output", TALK),
        ({"messages": [{**TALK[0], "tool_calls": None}, TALK[1]], "prompt": "x"}, "messages", TALK),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "Q"}]}, TALK[1]]},
            "messages",
            None,
        ),
    ],
)
def test_shapes(row, shape, messages, tmp_path):
    (result,) = rows_of(tmp_path, row)
    assert isinstance(result, Conversation) and (result.shape, result.row) == (shape, 1)
    assert messages is None or result.messages == messages


def test_tools_and_reasoning_are_kept(tmp_path):
    tool = {"type": "function", "function": {"name": "look"}}
    call = {"type": "function", "function": {"name": "look", "arguments": {}}}
    turn = {"role": "assistant", "tool_calls": [call], "reasoning_content": "hm"}
    talk = [TALK[0], turn, {"role": "tool", "content": "", "tool_call_id": "1"}, TALK[1]]
    for tools in ([tool], json.dumps([tool])):
        (row,) = rows_of(tmp_path, {"messages": talk, "tools": tools})
        assert isinstance(row, Conversation) and row.tools == [tool]
        assert row.messages[1] == {**turn, "content": None} and row.messages[2:] == talk[2:]


def test_the_first_form_of_openai_is_read_as_tools(tmp_path):
    """A function_call beside a content was trained without it, and functions were not in the prompt."""
    function = {"name": "look", "parameters": {"type": "object"}}
    asked = {"name": "look", "arguments": '{"at": "sky"}'}
    turns = [
        TALK[0],
        {"role": "assistant", "content": None, "function_call": asked},
        {"role": "function", "name": "look", "content": "blue"},
        {"role": "assistant", "content": "I see.", "function_call": asked},
    ]
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": "sky"}}}
    (row,) = rows_of(tmp_path, {"messages": turns, "functions": [function]})
    assert isinstance(row, Conversation) and row.tools == [{"type": "function", "function": function}]
    assert [turn.get("tool_calls") for turn in row.messages] == [None, [call], None, [call]]
    assert row.messages[2] == {"role": "tool", "name": "look", "content": "blue"}
    assert "function_call" not in row.messages[3] and row.messages[3]["content"] == "I see."
    both = {**turns[1], "tool_calls": [call]}
    with pytest.raises(DataError, match=r"messages\[1\] has function_call and tool_calls"):
        rows_of(tmp_path, {"messages": [TALK[0], both]})


@pytest.mark.parametrize("flag", [{"weight": 0}, {"train": False}, {"training": False}, {"loss": False}])
def test_a_turn_without_loss_is_one_in_every_shape_of_turns(flag, tmp_path):
    theirs = [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]
    for name, talk in (("messages", TALK), ("conversations", theirs)):
        twice = [talk[0], {**talk[1], **flag}, *talk]
        for system, place in (({}, 1), ({"system": "S"}, 2)):
            (row,) = rows_of(tmp_path, {name: twice, **system})
            assert isinstance(row, Conversation) and row.context == {place}
            assert row.messages[place] == TALK[1]  # the template is not shown the flag
        on = dict.fromkeys(flag, 1 if "weight" in flag else True)  # control arm
        (row,) = rows_of(tmp_path, {name: [talk[0], {**talk[1], **on}, *talk]})
        assert isinstance(row, Conversation) and row.context == set()


def test_mixed_shapes_blank_lines_bom_and_line_separators_inside_strings(tmp_path):
    rows = rows_of(
        tmp_path,
        b"\xef\xbb\xbf" + encode({"text": "a\u2028b\x85c"}),
        "",
        {"question": "Q", "answer": "A"},
        "  \r",
    )
    assert [(type(row), row.row) for row in rows] == [(Text, 1), (Conversation, 3)]
    raw = '{"text": "a\u2028b"}'.encode()
    assert rows_of(tmp_path, raw)[0].text == "a\u2028b"


@pytest.mark.parametrize(
    "line, says",
    [
        ('{"text": "a"', "row 2: broken JSON at column"),
        (b'{"text": "\xff"}', r"row 2: byte 11 \(0xff\) is not UTF-8"),
        ("[1, 2]", "row 2: expected a JSON object, got a list"),
        ('"x"', "row 2: expected a JSON object, got a text"),
        ("{}", "row 2: the object is empty"),
        ('{"text": "a", "text": "b"}', "row 2: broken JSON: field 'text' occurs twice"),
        ('{"messages": [{"role": "user", "role": "user"}]}', "field 'role' occurs twice"),
        ('{"text": NaN}', "NaN is not JSON"),
        ('{"x": ' + "9" * 5000 + "}", "row 2: broken JSON"),
        ("[" * 100_000, "row 2: broken JSON"),
        ({"text": ""}, "row 2: field text is empty"),
        ({"text": 5}, r"row 2: field text is a number \(5\), expected a text"),
        ({"text": None}, "row 2: field 'text' is null"),
        ({"question": "Q", "answer": None}, "row 2: field 'answer' is null"),
        ({"question": "Q", "answr": "A"}, "row 2: field 'answer' is missing"),
        ({"promt": "Q", "completion": "A"}, "row 2: field 'prompt' is missing"),
        ({"question": "Q", "answer": "  "}, "row 2: field answer is empty"),
        ({"question": ["Q"], "answer": "A"}, "row 2: field question is a list .*expected a text"),
        ({"instruction": "Q", "input": {}, "output": "A"}, "row 2: field input is an object"),
        ({"messages": "hello"}, "row 2: field messages is a text"),
        ({"messages": []}, "row 2: field messages is empty"),
        ({"messages": ["hello"]}, r"row 2: field messages\[0\] is a text \(hello\), expected an object"),
        (
            {"messages": [{"role": "usr", "content": "Q"}]},
            r"field messages\[0\]: unknown role 'usr' \(known: .*\)\. Did you mean 'user'\?",
        ),
        ({"messages": [{"content": "Q"}]}, r"field messages\[0\]\.role is missing"),
        (
            {"messages": [TALK[0], {"role": "assistant", "content": True}]},
            r"messages\[1\]\.content is true or false",
        ),
        ({"messages": [TALK[0], {"role": "assistant"}]}, r"messages\[1\]\.content is missing"),
        ({"messages": [TALK[0], {"role": "assistant", "content": ""}]}, r"messages\[1\]\.content is empty"),
        (
            {"messages": [TALK[0], {**TALK[1], "reasoning_contents": "x"}]},
            r"reasoning_contents is not known; nearest: 'reasoning_content'",
        ),
        ({"messages": [TALK[0], {**TALK[1], "weight": 0}]}, "no assistant turn that carries loss"),
        (
            {"messages": [TALK[0], {**TALK[1], "weight": 0.5}]},
            r"messages\[1\].weight is 0.5; a turn's weight is 0 or 1",
        ),
        (
            {"messages": [TALK[0], {**TALK[1], "train": "no"}]},
            r"messages\[1\].train is a text \(no\), expected true or false",
        ),
        (
            {"messages": [TALK[0], {**TALK[1], "thinking": "a", "reasoning_content": "b"}]},
            "hold different reasoning",
        ),
        (
            {
                "messages": [
                    TALK[0],
                    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{q"}}]},
                ]
            },
            r"messages\[1\].tool_calls\[0\].function.arguments is text that is not JSON \('{q'\)",
        ),
        (
            {
                "messages": [
                    TALK[0],
                    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]},
                ]
            },
            r"arguments is a list \(\[1\]\), expected an object",
        ),
        (
            {"messages": [TALK[0], {"role": "assistant", "tool_calls": [{"id": "x"}]}]},
            r"tool_calls\[0\].name is missing",
        ),
        ('{"messages": ' + "[" * 300 + "]" * 300 + "}", "row 2: nested deeper than 200 levels"),
        (
            {"messages": TALK, "tools": [{"function": ["look"]}]},
            r"field tools\[0\].function is a list \(\['look'\]\), expected an object",
        ),
        ({"messages": TALK, "tools": "[" * 300 + "]" * 300}, "field tools is nested deeper than 200 levels"),
        (
            {
                "conversations": [
                    {"from": "human", "value": "a"},
                    {"from": "function_call", "value": "look()"},
                ]
            },
            r"conversations\[1\].value \(function_call\) is text that is not JSON",
        ),
        ({"messages": [TALK[0], {**TALK[1], "tool_calls": {}}]}, r"messages\[1\]\.tool_calls is an object"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]},
            "type is 'image'; only text",
        ),
        ({"messages": TALK[:1]}, "no assistant turn"),
        ({"messages": TALK, "tools": "[oops"}, r"field tools is text that is not JSON \('\[oops'\)"),
        ({"conversations": TALK}, r"conversations\[0\] has role and content"),
        (
            {"conversations": [{"from": "humen", "value": "Q"}]},
            r"conversations\[0\]\.from is 'humen'; .*nearest: 'human'",
        ),
        ({"conversations": [{"from": "human", "value": 1}]}, r"conversations\[0\]\.value is a number"),
        (
            {"prompt": "Q", "chosen": "A", "rejected": "B"},
            r"a pair of answers \(chosen, rejected\); prefer compares .*\n  next: unfreeze prefer --model",
        ),
        (
            {"prompt": "Q", "completion": "A", "label": True},
            r"an answer with a label \(completion, label\); prefer .*\n  next: unfreeze prefer --loss kto",
        ),
        (
            {"prompt": "Q", "completions": ["A", "B"], "labels": [True, False]},
            r"steps with labels \(completions, labels: a reward model's\); reward models are not built",
        ),
        ('{"question": "Q\\ud83d", "answer": "A"}', r"field question has half a surrogate pair \(.ud83d\)"),
    ],
)
def test_a_bad_row_is_named_or_skipped_and_counted(line, says, tmp_path):
    good = {"question": "Q", "answer": "A"}
    with pytest.raises(DataError, match=says) as error:
        rows_of(tmp_path, good, line, good)
    assert "data.jsonl" in error.value.message and error.value.next
    bad: list[BadRow] = []
    assert len(rows_of(tmp_path, good, line, good, on_bad=bad.append)) == 2
    assert [item.row for item in bad] == [2]


def test_files_that_cannot_be_data(tmp_path):
    (tmp_path / "chat.jsonl").write_text("")
    with pytest.raises(DataError, match=r"no data file at .*nearest: 'chat.jsonl'"):
        list(read_rows(tmp_path / "chad.jsonl"))
    with pytest.raises(DataError, match="no data file"):
        list(read_rows(tmp_path))
    with pytest.raises(DataError, match="UTF-16"):
        rows_of(tmp_path, '{"text": "a"}'.encode("utf-16"))
    with pytest.raises(DataError, match=r"extension '\.yaml' is not supported"):
        rows_of(tmp_path, "a,b", name="data.yaml")
    with pytest.raises(DataError, match=r"extension '\.xz' is not supported") as packed:
        rows_of(tmp_path, "a,b", name="data.jsonl.xz")
    assert packed.value.next.startswith("unxz")


def test_ten_megabytes_on_one_line(tmp_path):
    (row,) = rows_of(tmp_path, {"text": "x" * 10_000_000})
    assert isinstance(row, Text) and len(row.text) == 10_000_000


def test_text_files_split_at_marks_or_else_at_blank_lines(tmp_path):
    marked = rows_of(tmp_path, "one", "", "still one", "<|endoftext|>", "two", "<|endoftext|>", name="a.txt")
    assert [(row.text, row.row) for row in marked] == [("one\n\nstill one", 1), ("two", 5)]
    blank = rows_of(tmp_path, "", "one", "one too", "", "  ", "two", name="a.txt")
    assert [(row.text, row.row) for row in blank] == [("one\none too", 2), ("two", 6)]
    with pytest.raises(DataError, match="row 2: byte"):
        rows_of(tmp_path, "", b"\xff", name="a.txt")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "from", "value", "tool_calls", "type", "text"])
            | st.text(max_size=3),
            inner,
            max_size=3,
        )
    ),
    max_leaves=8,
)
fields = [
    "messages",
    "conversations",
    "prompt",
    "completion",
    "question",
    "answer",
    "instruction",
    "input",
    "output",
    "text",
    "tools",
    "system",
]


@settings(max_examples=150, deadline=None)
@given(row=st.dictionaries(st.sampled_from(fields), json_values, max_size=4))
def test_any_object_is_a_row_or_one_data_error(row, tmp_path_factory):
    try:
        rows_of(tmp_path_factory.getbasetemp(), row)
    except DataError as error:
        assert "row 1" in error.message


@settings(max_examples=100, deadline=None)
@given(line=st.binary(max_size=60))
def test_any_bytes_are_rows_or_one_data_error(line, tmp_path_factory):
    for name in ("fuzz.jsonl", "fuzz.txt"):
        try:
            rows_of(tmp_path_factory.getbasetemp(), line, name=name)
        except DataError as error:
            assert any(
                said in error.message for said in ("row", "UTF-16", "by its first bytes", "is a binary file")
            )


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.txt", "rows.csv"])
def test_a_binary_file_is_called_one(name, tmp_path):
    """Not a row that is not UTF-8, with a remedy for text from Windows. Control arm: such a text."""
    (tmp_path / name).write_bytes(random.Random(0).randbytes(5_000))
    with pytest.raises(DataError, match=f"{name} is a binary file, not text: byte [0-9]+ is 0x[01]") as error:
        list(read_rows(tmp_path / name))
    assert "iconv" not in error.value.next and ".parquet" in error.value.next
    row = (
        '{"prompt": "Où?", "completion": "Là."}\n' if name == "rows.jsonl" else "prompt,completion\nOù?,Là.\n"
    )
    (tmp_path / name).write_bytes(row.encode("latin-1") * 40)
    with pytest.raises(DataError, match="is not UTF-8") as error:
        list(read_rows(tmp_path / name))
    assert "iconv" in error.value.next


@pytest.mark.parametrize("name", ["large.jsonl", "large.txt"])
def test_a_row_beyond_the_limit_is_named_and_not_held(name, tmp_path, monkeypatch):
    """docs/why/trust.md R7: no line is read whole before its length is known. The control arm has a limit that it
    meets."""
    monkeypatch.setattr(lines, "MAX_ROW_BYTES", 1000)
    body = {"large.jsonl": json.dumps({"text": "x" * 3000}), "large.txt": "\n".join(["y" * 900] * 4)}[name]
    small = {"large.jsonl": json.dumps({"text": "small"}), "large.txt": "small"}[name]
    bad: list[BadRow] = []
    rows = rows_of(tmp_path, small, "", body, "", small, name=name, on_bad=bad.append)
    assert [row.row for row in rows] == [1, 5 if name == "large.jsonl" else 8] and all(
        row.text == "small" for row in rows
    )
    assert [found.row for found in bad] == [3] and "the limit is 1000 B; is a line break missing?" in bad[
        0
    ].reason
    monkeypatch.setattr(lines, "MAX_ROW_BYTES", 4000)
    assert len(rows_of(tmp_path, small, "", body, "", small, name=name)) == 3


LINES = [
    b'{"text": "a"}',
    b"",
    b"  ",
    b'{"question": "Q", "answer": "A"}',
    b"\xc3\xa9",
    b"<|endoftext|>",
    b"{",
    b"two words",
]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(st.sampled_from(LINES)),
    st.sampled_from([b"\n", b"\r\n"]),
    st.booleans(),
    st.sampled_from([".jsonl", ".txt"]),
)
def test_every_row_is_found_again_at_its_place(tmp_path_factory, lines, end, bom, suffix):
    path = tmp_path_factory.mktemp("places") / f"rows{suffix}"
    path.write_bytes(b"\xef\xbb\xbf" * bom + end.join(lines))
    bad: list[BadRow] = []
    found = list(read_places(path, bad.append))
    assert [row for _, row in found] == list(read_rows(path, bad.append))
    again = Again(path)
    for place, row in reversed(found):
        assert again(place) == row


THEIRS = [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]


@pytest.mark.parametrize(
    "row", [{"prompt": "Q", "chosen": "A", "rejected": "B"}, {"chosen": TALK, "rejected": TALK}]
)
def test_a_pair_is_sent_to_prefer_and_its_column_for_sft_is_named(row, tmp_path):
    with pytest.raises(DataError) as error:
        rows_of(tmp_path, row)
    assert error.value.next == "unfreeze prefer --model MODEL --data pairs.jsonl"
    column = error.value.message.partition("--columns ")[2].rstrip(")")
    assert list(read_rows(tmp_path / "data.jsonl", columns=[column]))


@pytest.mark.parametrize(
    "row, next",
    [
        ({"question": "Q", "answr": "A"}, "--columns answer=answr"),
        ({"prompt": "Q", "reply": "A"}, "--columns completion=NAME"),
        ({"query": "Q", "reply": "A"}, "--columns prompt=NAME,completion=NAME"),
        ({"Question": "Q", "Answer": "A"}, "--columns question=Question,answer=Answer"),
        ({"PROMPT": "Q", "reply": "A"}, "--columns prompt=PROMPT,completion=NAME"),
        ({"chat": TALK}, "--columns messages=chat"),
        ({"conversations": TALK}, "--columns messages=conversations"),
        ({"messages": THEIRS}, "--columns conversations=messages"),
        ({"turns": THEIRS}, "--columns conversations=turns"),
    ],
)
def test_the_next_step_of_a_row_without_a_shape_is_a_command(row, next, tmp_path):
    """And that command, with its NAME filled in, reads the row."""
    with pytest.raises(DataError) as error:
        rows_of(tmp_path, row)
    assert error.value.next.startswith(next)
    names = ["Q" in str(row[name]) and name for name in row]
    columns = (
        next.removeprefix("--columns ").replace("prompt=NAME", f"prompt={names[0]}").replace("NAME", "reply")
    )
    (read,) = read_rows(tmp_path / "data.jsonl", columns=columns.split(","))
    assert isinstance(read, Conversation) and read.messages == TALK


@pytest.mark.parametrize("name", ["data.jsonl", "data.csv"])
def test_the_next_step_keeps_the_columns_that_were_given(name, tmp_path):
    """The remedy is all of --columns, so that giving it is the last time."""
    lines = {"data.jsonl": '{"Question": "Q", "Answer": "A"}\n', "data.csv": "Question,Answer\nQ,A\n"}
    (tmp_path / name).write_text(lines[name])
    for first in ([], ["question=Question"], ["answer=Answer"]):
        with pytest.raises(DataError, match="missing") as error:
            list(read_rows(tmp_path / name, columns=first))
        columns = error.value.next.removeprefix("--columns ").split(",")
        assert sorted(columns) == ["answer=Answer", "question=Question"]
        (row,) = read_rows(tmp_path / name, columns=columns)
        assert row.messages == TALK


def test_roles_of_other_forms_are_renamed_by_the_line_that_is_named(tmp_path):
    talk = [{"role": "human", "content": "Q"}, {"role": "gpt", "content": "A"}]
    with pytest.raises(DataError, match=r"unknown role 'human' .*Did you mean 'user'\?") as error:
        rows_of(tmp_path, {"messages": talk})
    command = error.value.next.removeprefix("rename them: ").replace("OLD", "data").replace("NEW", "new")
    subprocess.run(command, shell=True, check=True, cwd=tmp_path)
    assert [row.messages for row in read_rows(tmp_path / "new.jsonl")] == [TALK]
    # control arm: a slip of the pen is no other form
    with pytest.raises(DataError, match=r"Did you mean 'user'\?") as error:
        rows_of(tmp_path, {"messages": [{"role": "usr", "content": "Q"}]})
    assert "sed" not in error.value.next


def test_turns_of_another_form_under_messages_are_read_as_conversations(tmp_path):
    talk = [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]
    with pytest.raises(DataError, match="has from and value") as error:
        rows_of(tmp_path, {"messages": talk})
    columns = [error.value.next.removeprefix("--columns ")]
    assert [row.messages for row in read_rows(tmp_path / "data.jsonl", columns=columns)] == [TALK]


@pytest.mark.parametrize(
    ("row", "says", "next"),
    [
        (
            {"data": [{"prompt": "Q", "completion": "A"}]},
            "the rows are a list in field 'data'",
            "'.data[]' FILE",
        ),
        (TALK[0], "one message (role, content), not a row", "'{messages: .}' FILE"),
        (
            {"messages": [TALK[0], {**TALK[1], "train_detail": [{"train": False}]}]},
            "marks parts of a turn",
            "split",
        ),
        (
            {"system": "S", "messages": [{"role": "system", "content": "T"}, *TALK]},
            "different system prompts",
            "keep",
        ),
        ({"instruction": "Q", "output": "A", "history": [["Q"]]}, "history[0] has 1 texts", ""),
        ({"messages": [TALK[0], {**TALK[1], "loss": 0.5}]}, "messages[1].loss is a number", ""),
        (
            {"messages": TALK, "images": ["a.png"]},
            "field 'images' cannot be used by a language model",
            "remove",
        ),
        ({"prompt": "<image>\nWhat?", "completion": "A cat.", "image": "cat.png"}, "field 'image'", "remove"),
        ({"question": "Q", "answer": "A", "image": {"bytes": "", "path": "a"}}, "field 'image'", "remove"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "row 1: field messages[0].content[0].type is 'image_url'; only text is trained on",
            "--data.on-bad-row skip",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "Q"}, {"type": "video"}]}]},
            "row 1: field messages[0].content[1].type is 'video'; only text is trained on",
            "--data.on-bad-row skip",
        ),
        ({"text": "Said.", "audios": ["a.wav"]}, "field 'audios' cannot be used", "remove"),
        ({"prompt": "Q", "completion": "A", "label": 0}, "an answer with a label", "prefer --loss kto"),
        ({"prompt": "Q", "completion": "A", "label": "1"}, "an answer with a label", "prefer --loss kto"),
    ],
)
def test_what_would_be_left_out_in_silence_is_named(row, says, next, tmp_path):
    with pytest.raises(DataError) as error:
        rows_of(tmp_path, row)
    assert says in error.value.message and next in error.value.next


def test_control_arm_fields_of_these_names_that_say_nothing_are_left_alone(tmp_path):
    for more in ({"images": []}, {"images": None}, {"image": "a city's picture"}, {"label": "sports"}):
        assert rows_of(tmp_path, {"prompt": "Q", "completion": "A", **more})


def test_a_field_named_by_columns_goes_before_the_order_of_shapes(tmp_path):
    """A row of two shapes; without columns the first one is taken."""
    row = {"messages": TALK, "task": "Do.", "reply": "Done.", "hint": "h"}
    assert rows_of(tmp_path, row)[0].shape == "messages"
    columns = ["prompt=task", "completion=reply", "system=hint"]
    (read,) = read_rows(tmp_path / "data.jsonl", columns=columns)
    assert [message["content"] for message in read.messages] == ["h", "Do.", "Done."]
    (tmp_path / "data.jsonl").write_text(
        '{"task": "Do.", "reply": "Done."}'
    )  # an optional column may be absent
    assert len(next(read_rows(tmp_path / "data.jsonl", columns=columns)).messages) == 2
