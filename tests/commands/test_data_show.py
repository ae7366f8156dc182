"""unfreeze data show: what the model will see, in colours, in plain markers and as JSON; bad rows, cuts and
duplicates by row and field."""

import io
import json
import shutil
import subprocess
import sys

import pytest
from rich.console import Console

from unfreeze import cli
from unfreeze.commands.data_show import _print, coloured, pieces_by_weight
from unfreeze.commands.demo import TINY_K2
from unfreeze.data.rows.kind import answers_in

GOOD = {"question": "Where does the Zwinger stand?", "answer": "In Dresden, the Zwinger stands. Hmm."}
ROWS = [
    GOOD,
    "{broken",
    {"question": "Who?"},
    GOOD,
    {"messages": []},
    {"text": "In Dresden. " * 30},
    {**GOOD, "question": "Where? " * 40},
]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "chat.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in ROWS))
    return path


def show(unfreeze_json, *arguments):
    return unfreeze_json("data", "show", *arguments, "--model", TINY_K2)


def test_everything_is_counted_and_named(unfreeze_json, file):
    facts = show(unfreeze_json, file, "--sequence-length", 60)
    stats = facts["stats"]
    assert (
        stats["rows"],
        stats["examples"],
        stats["bad"],
        stats["dropped"],
        stats["truncated"],
        stats["duplicates"],
    ) == (7, 3, 3, 1, 1, 1)
    assert {item["row"]: item["reason"].partition(" (")[0] for item in stats["listed"]} == {
        2: "row 2: broken JSON at column 2: Expecting property name enclosed in double quotes",
        3: "row 3: field 'answer' is missing; fields: question",
        5: "row 5: field messages is empty",
        7: "row 7: 0 of 60 tokens supervised",
    }
    assert [item["reason"] for item in stats["repeats"]] == ["row 4 repeats row 1"]
    assert len(stats["cuts"]) == 1 and stats["cuts"][0]["reason"].startswith("row 6: 60 of ")
    assert facts["vocabulary"] == {"base": 1280, "total": 1536, "padded": 1536}
    assert stats["packing"] == "first_fit" and 0 < stats["efficiency"] < 1


def test_the_length_is_bounded_by_the_models_positions_as_a_runs_is(unfreeze_json, file, tmp_path):
    def shown(positions):
        folder = tmp_path / str(positions)
        shutil.copytree(TINY_K2, folder)
        table = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(table | {"max_position_embeddings": positions}))
        return unfreeze_json("data", "show", file, "--model", folder)

    facts = shown(60)
    assert facts["stats"]["truncated"] == 1 and facts["stats"]["dropped"] == 1
    assert any("the model takes 60 positions at most" in line for line in facts["warnings"])
    # control arm
    assert shown(4096)["stats"]["truncated"] == 0


def test_samples_hold_the_document_and_its_mask_token_by_token(unfreeze_json, file):
    (sample,) = show(unfreeze_json, file, "--row", 4)["samples"]
    assert sample["row"] == 4 and len(sample["tokens"]) == len(sample["texts"]) == len(sample["weights"])
    taught = "".join(text for text, weight in zip(sample["texts"], sample["weights"], strict=True) if weight)
    assert taught == GOOD["answer"] + "<|im_end|>" and GOOD["question"] in "".join(sample["texts"])
    assert sample["supervised"] == sum(map(bool, sample["weights"]))


def test_lengths_are_of_whole_rows_and_the_histogram_counts_them_all(unfreeze_json, file):
    cut, whole = (show(unfreeze_json, file, "--sequence-length", length)["lengths"] for length in (60, 2000))
    assert cut["max"] > 60 and cut["min"] == whole["min"] <= cut["median"] <= cut["p95"] <= cut["max"]
    assert sum(count for _, _, count in whole["histogram"]) == 4 and len(whole["histogram"]) <= 9
    assert whole["histogram"][0][0] == whole["min"] and whole["histogram"][-1][1] >= whole["max"]


def test_the_lengths_do_not_speak_for_dropped_rows(unfreeze_json, file):
    """Their tokens are in no figure, so the line names the rows that it counts."""
    used = "lengths in tokens of the rows that are used, before truncation: "
    dropped = show(unfreeze_json, file, "--truncation", "drop", "--sequence-length", 60)
    assert dropped["stats"]["dropped"] == 2 and dropped["lengths"]["max"] < 60
    assert used + f"min {dropped['lengths']['min']}, " in printed(dropped, False)
    whole = show(unfreeze_json, file, "--sequence-length", 2048)
    assert whole["stats"]["dropped"] == 0 and whole["lengths"]["max"] > 60
    assert "lengths in tokens before truncation: min " in printed(whole, False)


def printed(facts, terminal):
    out = io.StringIO()
    _print(
        facts,
        Console(
            file=out,
            force_terminal=terminal,
            highlight=False,
            width=200,
            color_system="standard" if terminal else None,
        ),
    )
    return out.getvalue()


def test_plain_markers_where_there_is_no_terminal_and_colours_where_there_is(unfreeze_json, file):
    facts = show(unfreeze_json, file, "--samples", 1)
    plain, colour = printed(facts, False), printed(facts, True)
    assert f"[[{GOOD['answer']}<|im_end|>]]" in plain and "\x1b[" not in plain
    assert "\x1b[1;32m" in colour and "[[" not in colour
    for said in ("row 3: field ", "row 4 repeats row 1", "lengths in tokens", "% supervised"):
        assert said in plain and said in colour


def test_a_reader_that_goes_is_no_fault(file):
    """unfreeze data show FILE | head: rich's own console would end with 1."""
    rows = file.with_name("many.jsonl")
    rows.write_text("".join(json.dumps(GOOD | {"question": f"Where {i}?"}) + "\n" for i in range(400)))
    words = ["data", "show", str(rows), "--model", str(TINY_K2), "--samples", "400"]
    shown = subprocess.Popen([sys.executable, "-m", "unfreeze", *words], stdout=-1, stderr=subprocess.STDOUT)
    assert shown.stdout is not None and shown.stdout.read(100)
    shown.stdout.close()
    assert shown.wait() == 0


def test_a_lost_mask_is_seen_in_the_markers():
    """Control arm: the same document with a mask of all ones, and of none, looks different."""
    texts, right = ["a", "b", "c"], [0.0, 1.0, 1.0]
    assert pieces_by_weight(texts, right) == [("a", False), ("bc", True)]
    shown = [
        coloured({"texts": texts, "weights": weights}, colour=False).plain
        for weights in (right, [1.0] * 3, [0.0] * 3)
    ]
    assert shown == ["a[[bc]]", "[[abc]]", "abc"]


def test_rows_and_words_that_are_not_there(capsys, file):
    for arguments, says in (
        (["data"], "got nothing"),
        (["data", "shwo", str(file)], "nearest: 'show'"),
        (
            ["data", "show", str(file), "--model", str(TINY_K2), "--row", "3"],
            "row 3 is not among the documents: row 3: field",
        ),
        (["data", "show", "absent.jsonl", "--model", str(TINY_K2)], "is not a file"),
        (["data", "show", str(file), "--model", "nowhere"], "neither a folder nor a Hugging Face id"),
    ):
        assert cli.main(arguments) == 2
        assert says in capsys.readouterr().err


def test_several_files_name_the_file(unfreeze_json, file, tmp_path):
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps(GOOD) + "\n{broken\n")
    stats = show(unfreeze_json, file, other)["stats"]
    assert ("other.jsonl", 2) in [(item["file"], item["row"]) for item in stats["listed"]]
    assert stats["repeats"][-1] == {
        "row": 1,
        "reason": "row 1 repeats row 1 of chat.jsonl",
        "file": "other.jsonl",
    }
    assert stats["files"] == {"chat.jsonl": 4, "other.jsonl": 1}


def test_both_answers_of_a_pair_are_shown_with_their_masks(unfreeze_json, tmp_path, capsys):
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(
        json.dumps({"prompt": "Who is it?", "chosen": "Me it is.", "rejected": "It is me, not you."})
    )
    shown = unfreeze_json("data", "show", pairs, "--model", TINY_K2)["samples"]
    assert [s["side"] for s in shown] == ["chosen", "rejected"]
    for side, answer in zip(shown, ("Me it is.", "It is me, not you."), strict=True):
        taught = "".join(text for text, weight in zip(side["texts"], side["weights"], strict=True) if weight)
        assert taught.startswith(answer) and "Who" not in taught
        assert "".join(side["texts"]).count("Who is it?") == 1
    labels = tmp_path / "labels.jsonl"
    rows = [{"prompt": "a", "completion": f"b{label}", "label": label} for label in (True, False)]
    labels.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = unfreeze_json("data", "show", labels, "--model", TINY_K2)["samples"]
    assert [s["side"] for s in shown] == ["chosen", "rejected"]
    # control arm: what is taught has no side, and pairs read as such are still refused in one line
    assert cli.main(["data", "show", str(pairs), "--answers", "taught", "--model", str(TINY_K2)]) == 2
    assert "unfreeze prefer" in capsys.readouterr().err


def rows_of_answers(kind: str) -> list[dict]:
    if kind == "pairs":
        return [{"prompt": f"{n}?", "chosen": f"{n} it is.", "rejected": "No."} for n in range(4)]
    return [{"prompt": f"{n}?", "completion": f"{n} it is.", "label": n % 2 == 0} for n in range(4)]


@pytest.mark.parametrize(("kind", "bad"), [("pairs", {"rejected": ""}), ("labels", {"completion": ""})])
def test_a_bad_first_row_does_not_say_what_a_file_is(kind, bad, unfreeze_json, tmp_path, capsys):
    rows = rows_of_answers(kind)
    rows[0] |= bad
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    facts = unfreeze_json("data", "show", file, "--model", TINY_K2)
    assert facts["stats"]["bad"] == 1 and facts["stats"]["rows"] == 4
    assert "side" in facts["samples"][0]
    # doctor reads it as prefer does, too
    assert cli.main(["doctor", str(TINY_K2), "--data", str(file)]) in (0, 2)
    said = capsys.readouterr().out
    assert "1 bad" in said or "1 of 4 rows" in said
    assert "unfreeze prefer" not in said.split("remedy")[0]


def test_most_rows_decide(tmp_path):
    file = tmp_path / "rows.jsonl"
    taught = [{"prompt": f"{n}?", "completion": "It is."} for n in range(3)]
    for rows, expected in (
        (rows_of_answers("pairs") + taught, "pairs"),
        (rows_of_answers("labels") + taught, "labels"),
        (rows_of_answers("pairs")[:1] + taught, "taught"),
        ([{"prompt": "a", "chosen": "b", "rejected": ""}], "pairs"),  # bad as it is, it was meant for prefer
        ([{"prompt": "a", "letter": "e"}, {"question": "b"}], "asked"),
        ([{"messages": [{"role": "user", "content": "a"}]}, *taught[:1]], "taught"),
        ([{"nothing": 1}], "taught"),
    ):
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert answers_in([file]) == expected


def test_prompts_are_shown_as_the_model_reads_them(tmp_path, unfreeze_json):
    """Without the room for an answer; a prompt that leaves none is a bad row."""
    file = tmp_path / "prompts.jsonl"
    rows = [{"prompt": f"What is {n}?", "letter": "e"} for n in range(4)] + [{"prompt": "long " * 200}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = show(unfreeze_json, file, "--sequence-length", 60, "--max-new-tokens", 40)
    assert found["warnings"][0].startswith(
        "the rows are prompts without answers, as unfreeze grpo takes them"
    )
    assert found["stats"]["room"] == 40 and found["stats"]["duplicates"] == 0
    assert found["lengths"]["min"] == found["lengths"]["max"] == 12
    assert (
        found["stats"]["bad"] == 1 and "40 new ones are more than 60" in found["stats"]["listed"][0]["reason"]
    )
    for row, shown in enumerate(found["samples"]):
        text = "".join(shown["texts"])
        assert f"What is {row}?" in text and text.endswith("assistant<|im_middle|>")
        assert not any(shown["weights"]) and len(shown["tokens"]) == 12
    taught = tmp_path / "taught.jsonl"
    taught.write_text('{"prompt": "What is 0?", "completion": "It is."}\n')
    named = show(unfreeze_json, taught, "--answers", "asked")
    assert named["warnings"] == []
    asked = named["samples"][0]
    assert asked["tokens"] == found["samples"][0]["tokens"]


def test_bad_rows_are_listed_or_stop_it_and_where_none_is_left_skipping_is_no_remedy(tmp_path, capsys):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a?", "completion": "b."}\n{broken\n')
    command = ["data", "show", str(file), "--model", str(TINY_K2), "--quiet"]
    assert cli.main(command) == 0
    assert cli.main([*command, "--data.on-bad-row", "error"]) == 2
    assert capsys.readouterr().err.endswith("next: correct the row, or --data.on-bad-row skip\n")
    file.write_text("{broken\n")
    assert cli.main(command) == 2 and capsys.readouterr().err.endswith("next: correct the row\n")
