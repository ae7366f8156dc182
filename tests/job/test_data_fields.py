"""The data fields of a training recipe, from TOML and flags to what is trained on and said in the data
event."""

import json

import pytest

from unfreeze import cli
from unfreeze.commands.demo import TINY_K2
from unfreeze.config.parse import from_keywords, parse
from unfreeze.core.errors import ConfigError
from unfreeze.recipes.sft import Config
from unfreeze.report.events import LEAKED
from unfreeze.report.html import summary_lines

pytestmark = pytest.mark.usefixtures("fewer_layers")


def rows(count, name):
    return [{"question": f"{name} number {i}?", "answer": f"Number {i}, it is. Hmm."} for i in range(count)]


@pytest.fixture
def files(tmp_path):
    for name, count in (("a", 20), ("b", 6)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(count, name)))
    return [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]


@pytest.fixture
def sft(unfreeze_json, files, tmp_path, read_events):
    """Two steps on both files -> the data event and the warnings."""

    def run(*arguments, data=None, out="run"):
        out = tmp_path / out
        unfreeze_json(
            "sft",
            "--model",
            TINY_K2,
            "--data",
            *(data or files),
            "--out",
            out,
            "--tokens-per-step",
            128,
            "--steps",
            1,
            "--watch.samples",
            1,
            "--lora.rank",
            1,
            "--dtype",
            "float32",
            *arguments,
        )
        return read_events(out, "data")[-1], [event["message"] for event in read_events(out, "warning")]

    return run


def test_files_weights_packing_and_a_held_out_share_are_said(sft):
    data, _ = sft(
        "--data.weights",
        1,
        0.5,
        "--training.packing",
        "best_fit",
        "--validation-fraction",
        0.2,
        "--data.truncation",
        "head",
    )
    assert (
        data["files"] == {"a.jsonl": 20, "b.jsonl": 6}
        and data["packing"] == "best_fit"
        and 0.3 < data["efficiency"] <= 1
    )
    assert 1 <= data["held_out"] <= 12
    assert (
        f"batches are {100 * data['efficiency']:.1f} % full; {data['held_out']} documents"
        " held out" in data["summary"]
    )


def test_rows_of_a_validation_file_that_are_trained_on_are_left_out_of_it(sft, files, tmp_path):
    held = tmp_path / "both.jsonl"
    held.write_text(files[1].read_text() + "".join(json.dumps(row) + "\n" for row in rows(3, "held")))
    data, warnings = sft("--validation", held)
    said = "6 of 9 validation documents are also in the training data, so they are left out of validation"
    assert data["held_out"] == 3 and warnings == [said]


def test_a_validation_file_of_nothing_but_training_rows_is_refused(files, tmp_path, capsys):
    command = ["sft", "--quiet", "--model", TINY_K2, "--data", files[1], "--validation", files[1]]
    assert cli.main([*map(str, command), "--out", str(tmp_path / "run"), "--steps", "1"]) == 2
    said = capsys.readouterr().err
    assert "6 of 6 validation documents are also in the training data" in said and "none is held out" in said
    assert "--validation-fraction 0.1" in said and not (tmp_path / "run").exists()


def test_a_validation_file_of_other_rows_is_not_warned_about(sft, files):
    data, warnings = sft("--validation", files[1], data=files[:1])
    assert data["held_out"] == 6 and data["rows"] == 20 and not warnings


def test_what_a_validation_file_loses_is_said(sft, files, tmp_path):
    path = tmp_path / "held.jsonl"
    path.write_text(json.dumps(rows(1, "held")[0]) + "\n{broken\n")
    _, warnings = sft("--validation", path, "--data.on-bad-row", "skip")
    assert (
        len(warnings) == 1
        and warnings[0].startswith("validation file: 2 rows (question/answer 1)")
        and "1 bad" in warnings[0]
    )


def test_one_path_or_a_list_in_toml(tmp_path, files):
    toml = tmp_path / "run.toml"
    toml.write_text(f'model = "m"\ndata = ["{files[0]}", "{files[1]}"]\ndata_weights = [1, 0.25]\n')
    config = parse(Config, [str(toml)], command="sft", description="")
    assert (
        config.data.files == tuple(map(str, files))
        and config.data.weights == (1.0, 0.25)
        and config.run_dir.name == "m-a+b"
    )
    assert config.record()["data.files"] == [str(file) for file in files]
    toml.write_text(f'model = "m"\ndata = "{files[0]}"\n')
    one = parse(Config, [str(toml)], command="sft", description="")
    assert (
        one.data.files == (str(files[0]),)
        and one.record()["data.files"] == str(files[0])
        and one.run_dir.name == "m-a"
    )


@pytest.mark.parametrize(
    "more, says",
    [
        (["--data.weights", "1", "2", "3"], "data.weights has 3 numbers for 2 data files"),
        (["--validation", "v.jsonl", "--validation-fraction", "0.1"], "exclude each other"),
        (["--validation-fraction", "1"], "--validation-fraction 1: must be less than 1.0"),
        (["--validation-fraction", "-0.5"], "--validation-fraction -0.5: must be at least 0.0"),
    ],
)
def test_fields_that_do_not_go_together(files, more, says):
    with pytest.raises(ConfigError, match=says):
        parse(Config, ["--model", "m", "--data", *map(str, files), *more], command="sft", description="")


def test_files_that_are_not_there_are_refused_before_the_model_is_opened(files, capsys):
    for more, says in (
        ([], "data = 'absent.jsonl' is not a file or folder"),
        (["--validation", "absent.txt"], "validation = 'absent.txt' is not a file or folder"),
    ):
        data = [files[0], files[1] if more else "absent.jsonl"]
        assert cli.main(["sft", "--model", "nowhere", "--data", *map(str, data), *more]) == 2
        assert says in capsys.readouterr().err


def test_a_pattern_and_a_folder_are_kept_as_written_and_a_new_file_is_refused(
    sft, files, tmp_path, monkeypatch, capsys
):
    """What --data became stands in the run's record; a run goes on, or is found finished, with the same files only."""
    monkeypatch.chdir(tmp_path)
    said, _ = sft("--data.weights", 0.5, data=["*.jsonl"])
    assert said["files"] == {"a.jsonl": 20, "b.jsonl": 6} and said["efficiency"]
    resolved = json.loads((tmp_path / "run" / "resolved_config.json").read_text())
    assert resolved["data.files"] == str(tmp_path / "*.jsonl") and resolved["data.weights"] == [0.5]
    assert resolved["data_files"] == dict.fromkeys(map(str, files), "*.jsonl")
    command = ["sft", "--model", str(TINY_K2), "--data", "*.jsonl", "--data.weights", "0.5", "--out", "run"]
    command += "--tokens-per-step 128 --steps 1 --watch.samples 1 --lora.rank 1 --dtype float32".split()
    assert cli.main(command) == 0 and "is already finished" in capsys.readouterr().err
    (tmp_path / "c.jsonl").write_text(files[0].read_text())
    assert cli.main(command) == 2
    assert f'data_files.{tmp_path / "c.jsonl"}: absent -> "*.jsonl"' in capsys.readouterr().err


def test_columns_of_a_csv_file_and_held_out_rows_of_a_folder(sft, tmp_path):
    data = tmp_path / "t.csv"
    data.write_text("task,reply\n" + "".join(f"What is {i}?,{i}\n" for i in range(20)))
    (tmp_path / "held").mkdir()
    (tmp_path / "held" / "h.csv").write_text("task,reply\nWho?,I.\n")
    (tmp_path / "held" / "i.csv").write_text("task,reply\nWho else?,You.\n")
    columns = "prompt=task,completion=reply"
    said, _ = sft("--columns", columns, "--validation", tmp_path / "held", data=[data])
    assert said["shapes"] == {"prompt/completion": 20} and said["held_out"] == 2
    resolved = json.loads((tmp_path / "run" / "resolved_config.json").read_text())
    assert resolved["data.columns"] == ["prompt=task", "completion=reply"]


@pytest.mark.parametrize(
    "columns, says",
    [
        ("promt=task", "'promt' is no field of a row; nearest: 'prompt'"),
        ("prompt", "'prompt' is not FIELD=COLUMN"),
        ("prompt=question,prompt=answer", "the field 'prompt' is named twice"),
        (
            "prompt=qestion,completion=answer",
            "row 1: there is no column 'qestion'; nearest: 'question'; there are: answer",
        ),
    ],
)
def test_wrong_columns_are_named(columns, says, files, capsys):
    more = ["--data", str(files[0]), "--columns", columns, "--out", str(files[0].parent / "run")]
    assert cli.main(["sft", "--model", str(TINY_K2), *more]) == 2
    assert says in capsys.readouterr().err


def test_columns_as_a_table_in_toml_and_in_python(tmp_path, files):
    toml = tmp_path / "run.toml"
    toml.write_text(
        f'model = "m"\n[data]\nfiles = "{files[0]}"\n[data.columns]\nprompt = "a, b"\ncompletion = "answer"\n'
    )
    config = parse(Config, [str(toml)], command="sft", description="")
    assert config.data.columns == ("prompt=a, b", "completion=answer")
    given = {"prompt": "a, b", "completion": "answer"}
    same = from_keywords(Config, {"model": "m", "data": str(files[0]), "columns": given}, function="sft")
    assert same.data.columns == config.data.columns
    with pytest.raises(ConfigError, match=r"data.files is a table"):
        from_keywords(Config, {"model": "m", "data": {"files": {"a": "b"}}}, function="sft")


@pytest.mark.parametrize(
    "written, name",
    [
        ("d/chat.jsonl", "m-chat"),
        ("d/chat.v2.jsonl.gz", "m-chat.v2"),
        ("d/*.jsonl", "m-d"),
        ("d/", "m-d"),
        ("hf:org/name:config:test", "m-name"),
    ],
)
def test_a_run_is_named_after_what_the_user_wrote(written, name):
    assert from_keywords(Config, {"model": "m", "data": written}, function="sft").run_dir.name == name


def test_a_mixture_and_great_losses_are_said_at_the_start_and_in_the_summary(sft, files, tmp_path):
    long = {"question": "Why?", "answer": "Because. " * 300}
    files[1].write_text("".join(json.dumps(row) + "\n" for row in [long] * 6))
    data, warned = sft("--data.weights", 1, 0.5, "--steps", 1)
    assert [line.partition(",")[0] for line in data["mixture"]] == [
        "a.jsonl x 1: 20 of 20 documents per epoch",
        "b.jsonl x 0.5: 3 of 6 documents per epoch",
    ]
    assert data["summary"].endswith("; ".join(data["mixture"]))
    cut, doubled = (line for line in warned if " rows (" in line)
    assert cut.startswith("6 of 26 rows (23 %) are cut to 128 tokens") and "raise --sequence-length" in cut
    assert doubled.startswith("5 of 26 rows (19 %) are duplicates (row 2 repeats row 1)")
    lines = "\n".join(summary_lines(tmp_path / "run"))
    assert f"warning, step 0: {cut}" in lines and f"warning, step 0: {doubled}" in lines


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--tokens-per-step", 8], "next: --tokens-per-step higher"),
        (
            ["--tokens-per-step", 8, "--sequence-length", 8],
            "next: --sequence-length and --tokens-per-step higher",
        ),
        (["--sequence-length", 8], "next: --sequence-length higher"),
        (["--tokens-per-step", 8, "--data.truncation", "error"], "next: --tokens-per-step higher"),
    ],
)
def test_rows_that_are_cut_too_short_name_what_bounds_them(flags, said, files, tmp_path, capsys):
    """The remedy names the flags without which it is the same refusal again."""
    command = ["sft", "--quiet", "--model", TINY_K2, "--data", files[0], "--out", tmp_path / "run", *flags]
    assert cli.main([str(word) for word in command]) == 2
    assert said in capsys.readouterr().err
    if "--data.truncation" in flags:  # data show lists the rows instead
        return
    show = ["data", "show", files[0], "--model", TINY_K2, *flags]
    assert cli.main([str(word) for word in show]) == 2
    assert said in capsys.readouterr().err


def test_held_out_rows_that_differ_by_a_blank_or_in_case_are_counted(sft, files, tmp_path):
    """Control arms: the rows of another file, and of a validation file that holds none of them."""
    near = [json.loads(line) for line in files[1].read_text().splitlines()][:2]
    near = [{key: f" {value.upper()} " for key, value in row.items()} for row in near]
    held = tmp_path / "near.jsonl"
    held.write_text("".join(json.dumps(row) + "\n" for row in [*near, *rows(3, "held")]))
    _, warnings = sft("--validation", held)
    assert warnings == [f"2 of 5 (but for case or white space) {LEAKED}"]

    copies = tmp_path / "copies.jsonl"
    lines = files[0].read_text().splitlines()
    twice = [
        {key: value + " " * i for key, value in json.loads(line).items()} for i in range(4) for line in lines
    ]
    copies.write_text("".join(json.dumps(row) + "\n" for row in twice))
    data, warnings = sft("--validation-fraction", 0.2, data=[copies], out="twice")
    (said,) = [words for words in warnings if words.endswith(LEAKED)]
    # of the other four held-out rows, all copies of one, none is trained on
    assert data["held_out"] == 16 and said == f"12 of 16 (but for case or white space) {LEAKED}"
    others = sft("--validation-fraction", 0.2, data=files[:1], out="once")[1]
    assert not any(words.endswith(LEAKED) for words in others)
