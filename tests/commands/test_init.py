"""unfreeze init: a run.toml whose numbers follow from data, model and memory, and which sft takes unchanged."""

import json
import math
import re
import shlex
import tomllib
from types import SimpleNamespace

import pytest

from unfreeze import cli
from unfreeze.commands import init
from unfreeze.config.parse import parse
from unfreeze.config.sft import Config
from unfreeze.core.command import Common
from unfreeze.core.errors import ConfigError, DoesNotFit
from unfreeze.data import encode_file, load_tokenizer
from unfreeze.drill.sandbox import Sandbox
from unfreeze.job.planning import proposal
from unfreeze.job.planning.plan import Planning
from unfreeze.job.planning.proposal import AIM_STEPS, Proposal
from unfreeze.train import fit


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return Sandbox(tmp_path_factory.mktemp("init")).checkpoint("llama")


def rows(folder, count, words=3, name="chat.csv"):
    lines = [f"What is {i}?,{'It is. ' * (words + i % 5)}Hmm." for i in range(count)]
    (folder / name).write_text("task,reply\n" + "\n".join(lines) + "\n")
    return folder / name


COLUMNS = "prompt=task,completion=reply"


def test_swapped_arguments_are_answered_with_the_command(checkpoint, tmp_path, monkeypatch, unfreeze_json):
    monkeypatch.chdir(tmp_path)
    rows(tmp_path, 6)
    with pytest.raises(ConfigError, match="MODEL comes first, then DATA") as error:
        init.main(["chat.csv", str(checkpoint), "--columns", COLUMNS], Common(quiet=True))
    words = shlex.split(error.value.next)
    assert words[:2] == ["unfreeze", "init"] and unfreeze_json(*words[1:])["file"] == "run.toml"


def test_the_file_is_what_sft_takes_and_its_reasons_are_true(
    checkpoint, tmp_path, monkeypatch, unfreeze_json
):
    monkeypatch.chdir(tmp_path)
    rows(tmp_path, 6)
    made = unfreeze_json("init", checkpoint, "chat.csv", "--columns", COLUMNS)
    text = (tmp_path / "run.toml").read_text()
    config = parse(Config, ["run.toml"], command="sft", description="")
    assert made["next"] == "unfreeze sft run.toml" and not list(tmp_path.glob(".*"))
    assert config.model == str(checkpoint) and config.data.files == ("chat.csv",)
    assert config.data.columns == ("prompt=task", "completion=reply")
    table = tomllib.loads(text)
    assert all(
        table[place.split(".")[0]][place.split(".")[1]] == value for place, value in made["fields"].items()
    )
    # oracle: the rows encoded at the model's own length
    examples = encode_file("chat.csv", load_tokenizer(checkpoint), 512, columns=COLUMNS.split(",")).examples
    longest = max(example.num_tokens for example in examples)
    assert f"the longest of 6 documents has {longest} tokens" in text
    assert config.data.sequence_length == math.ceil(longest / 64) * 64
    assert config.data.validation_fraction == 0 and all("# " in line for line in text.splitlines() if " = " in line[:40] and "[" not in line and not line.startswith(("model", "files", "columns")))  # fmt: skip
    # it trains, unchanged
    result = unfreeze_json("sft", "run.toml", "--watch.samples", 0)
    assert result["finished"] and result["steps"] == round(config.training.epochs) == AIM_STEPS


def test_a_file_that_is_there_is_left_alone(checkpoint, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows(tmp_path, 3)
    (tmp_path / "run.toml").write_text("mine")
    assert cli.main(["init", str(checkpoint), "chat.csv", "--columns", COLUMNS]) == 2
    assert "run.toml exists and is not overwritten" in capsys.readouterr().err
    assert (tmp_path / "run.toml").read_text() == "mine"
    assert (
        cli.main(["init", str(checkpoint), "chat.csv", "--columns", COLUMNS, "--file", "b.toml", "--quiet"])
        == 0
    )
    assert (tmp_path / "b.toml").is_file()
    # as a run's folder is named elsewhere
    words = ["init", str(checkpoint), "chat.csv", "--columns", COLUMNS, "--out", "c.toml", "--quiet"]
    assert cli.main(words) == 0 and (tmp_path / "c.toml").is_file()


@pytest.mark.parametrize(
    "arguments, says",
    [
        ([], "unfreeze init needs MODEL and DATA"),
        (["MODEL"], "unfreeze init needs DATA"),
        (["MODEL", "nowhere.jsonl"], "'nowhere.jsonl' is not a file or folder"),
        (["/nowhere", "chat.csv"], "/nowhere does not exist"),
        (
            ["MODEL", "prompts.jsonl"],
            "prompts.jsonl has prompts without answers, as unfreeze grpo takes them",
        ),
        (["MODEL", "chat.csv"], "row 1: the first line of a csv file names its columns: no known field"),
    ],
)
def test_what_is_missing_is_named_and_nothing_is_written(
    arguments, says, checkpoint, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    rows(tmp_path, 3)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    assert cli.main(["init", *[word.replace("MODEL", str(checkpoint)) for word in arguments]]) == 2
    assert says in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"chat.csv", "prompts.jsonl"}


@pytest.fixture
def proposed(checkpoint, tmp_path):
    """-> propose(rows, words): {place: value} and the reasons."""

    def propose(count, words=3, parameters=10**9):
        from unfreeze.checkpoint import open_checkpoint

        path = rows(tmp_path, count, words)
        made = Proposal(
            str(checkpoint), [str(path)], COLUMNS.split(","), open_checkpoint(str(checkpoint)), parameters
        )
        choices = made.choices()
        return {choice.place: choice.value for choice in choices}, {
            choice.place: choice.reason for choice in choices
        }

    return propose


def test_more_data_has_more_tokens_a_step_fewer_passes_and_held_out_rows(proposed):
    small, why = proposed(6)
    large, _ = proposed(900)
    assert small["training.epochs"] == AIM_STEPS and "the data is small" in why["training.epochs"]
    assert large["training.epochs"] == 3 and large["data.validation_fraction"] == proposal.HELD_OUT
    assert large["training.tokens_per_step"] >= small["training.tokens_per_step"] == 512
    assert small["optimizer.learning_rate"] == 2e-4
    assert proposed(6, parameters=int(40e9))[0]["optimizer.learning_rate"] == 1e-4


def test_the_steps_are_counted_as_the_run_counts_them(checkpoint, tmp_path, monkeypatch, unfreeze_json):
    """240 rows of which some are held out, packed; control arm: the tokens over a step's are another number."""
    monkeypatch.chdir(tmp_path)
    rows(tmp_path, 240)
    unfreeze_json("init", checkpoint, "chat.csv", "--columns", COLUMNS)
    text, table = (tmp_path / "run.toml").read_text(), tomllib.loads((tmp_path / "run.toml").read_text())
    said = int(re.search(r"epochs = .*; ([\d,]+) steps in all", text)[1].replace(",", ""))

    def stopped(*arguments, **more):  # before its first step: what the run counted is written by then
        raise KeyboardInterrupt

    monkeypatch.setattr(fit, "train_step", stopped)
    assert cli.main(["sft", "run.toml", "--quiet", "--out", "run"]) == 130
    counted = json.loads((tmp_path / "run" / "resolved_config.json").read_text())["effective"]["steps"]
    examples = encode_file("chat.csv", load_tokenizer(checkpoint), 512, columns=COLUMNS.split(",")).examples
    training, tokens = table["training"], int(examples.lengths_N.sum())
    assert counted == said != tokens * training["epochs"] // training["tokens_per_step"]


def test_what_does_not_fit_is_made_smaller_step_by_step(proposed, monkeypatch):
    """Micro-batches first (the same gradient), then the rank, then the length; where nothing fits it is refused."""
    real, asked = Planning.first, []

    def of(limit):
        def first(planning):
            config = planning.config
            asked.append((config.data.sequence_length, config.memory.micro_batches, config.lora.rank))
            place, plan = real(planning)
            fits = config.tokens_per_micro_batch * config.lora.rank <= limit
            parameters = plan.adapter_parameters
            return place, SimpleNamespace(fits=fits, total=1, usable=2, adapter_parameters=parameters)

        return first

    monkeypatch.setattr(Planning, "first", of(128 * 16))
    values, _ = proposed(6)
    assert values["memory.micro_batches"] == 4 and values["lora.rank"] == 16
    monkeypatch.setattr(Planning, "first", of(values["data.sequence_length"] * 4))
    values, why = proposed(6)
    assert (
        values["lora.rank"] == 4
        and values["lora.alpha"] == 8
        and "more memory than this machine has" in why["lora.rank"]
    )
    tiny = SimpleNamespace(fits=False)
    monkeypatch.setattr(Planning, "first", lambda planning: (0, tiny))
    with pytest.raises(DoesNotFit):
        monkeypatch.setattr("unfreeze.parallel.plan.refuse_if_too_large", refuse)
        proposed(6)


def refuse(plan):
    if not plan.fits:
        raise DoesNotFit("peak 2 GiB, 1 GiB usable")


def test_bad_rows_are_left_out_and_said(checkpoint, tmp_path, monkeypatch, unfreeze_json):
    monkeypatch.chdir(tmp_path)
    good = [json.dumps({"prompt": f"What is {i}?", "completion": "It is."}) for i in range(5)]
    (tmp_path / "chat.jsonl").write_text("\n".join([*good, "{"]))
    made = unfreeze_json("init", checkpoint, "chat.jsonl")
    assert made["fields"]["data.on_bad_row"] == "skip"
    assert "1 of 6 rows cannot be read" in (tmp_path / "run.toml").read_text()


def test_names_that_toml_or_a_comment_could_not_hold(tmp_path):
    from unfreeze.commands import init

    names = ["a\x7fb.jsonl", "a\nb.jsonl", "ä.jsonl", 'a"b.jsonl']
    for name in names:
        assert tomllib.loads(f"name = {init._toml(name)}") == {"name": name}
    text = init.written(init.Config(model="org/name", data=("a.jsonl",), file="x\nlearning_rate = 1"), [])
    assert tomllib.loads(text) == {"model": "org/name", "data": {"files": "a.jsonl"}}
    with pytest.raises(ConfigError, match="is not UTF-8"):
        init._toml("a\udcff.jsonl")
