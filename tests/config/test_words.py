"""What a newcomer types wrong is answered in plain words: values, flags, commands."""

import re
import shlex

import pytest

import unfreeze
from unfreeze import cli
from unfreeze.commands.demo import TINY_K2
from unfreeze.config.parse import parse
from unfreeze.config.sft import Config
from unfreeze.core.errors import CheckpointError, ConfigError

PYDANTIC = re.compile(r"Input should|valid (integer|number|tuple|string)|type_error|instantiated|parse for")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--steps", "three"], "--steps = 'three' is not a whole number"),
        (["--steps=3.5"], "--steps = '3.5' is not a whole number"),
        (["--steps"], "--steps needs a value: a whole number"),
        (
            ["--optimizer.schedule"],
            "--optimizer.schedule needs a value: one of cosine, linear, constant, wsd",
        ),
        (["--steps", "3", "4"], "--steps takes one value, got also '4'"),
        (["--learning-rate", "fast"], "--learning-rate = 'fast' is not a number"),
        (["--lora.rank", "x"], "--lora.rank = 'x' is not a whole number"),
        (["--data.weights", "1", "two"], "--data.weights = 'two' is not a number"),
        (
            ["--optimizer.schedule", "cosin"],
            "--optimizer.schedule = 'cosin' is not one of 'cosine', 'linear', 'constant', 'wsd'",
        ),
        (
            ["--watch.track", "wandb", "foo"],
            "--watch.track = 'foo' is not one of 'tensorboard', 'wandb', 'trackio'",
        ),
        (["--model", "m", "--data", "d", "--steps", "0"], "--steps 0: must be at least 1"),
        (
            ["--model", "m", "--data", "d", "--optimizer.warmup", "2"],
            "--optimizer.warmup 2: must be at most 1",
        ),
        (
            ["--model", "m", "--data", "d", "--optimizer.clip", "nan"],
            "--optimizer.clip = 'nan' is not a finite number",
        ),
        (["--learning-rate", "-1"], "--learning-rate -1: must be more than 0"),
        (["--model", "m", "--data"], "--data needs values: text"),
        # the flag that is none comes before the fields that are missing
        (["--modle", "x"], "there is no flag --modle; nearest: '--model'"),
    ],
)
def test_a_wrong_flag_is_said_in_words_of_people(flags, said):
    with pytest.raises(ConfigError) as caught:
        parse(Config, flags, command="sft", description="")
    assert said in caught.value.message and not PYDANTIC.search(caught.value.message)


def test_a_model_in_the_place_of_the_file_is_answered_with_the_command_that_was_meant(tmp_path):
    model = tmp_path / "my model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    for first in (str(model), "org/name-1.5"):
        with pytest.raises(ConfigError, match="is a model") as caught:
            parse(Config, [first, "--data", "x.jsonl", "--steps", "3"], command="sft", description="")
        start, *words = shlex.split(caught.value.next)
        assert (start, words.pop(0)) == ("unfreeze", "sft")
        config = parse(Config, words, command="sft", description="")
        assert (config.model, config.data.files, config.training.steps) == (first, ("x.jsonl",), 3)
    with pytest.raises(ConfigError) as caught:
        parse(Config, [str(model), "x.jsonl"], command="sft", description="")
    assert caught.value.next.endswith("--data x.jsonl")
    # control arm: a file that is not there
    with pytest.raises(ConfigError, match="is not a file"):
        parse(Config, ["runs/none.toml"], command="sft", description="")


def test_every_weight_beside_lora_is_answered_with_what_to_remove(tmp_path):
    text = 'model = "m"\n[data]\nfiles = "d"\n[optimizer]\nlearning_rate = 2e-4\n'
    (tmp_path / "run.toml").write_text(text + "[lora]\nrank = 8\n")
    given = [str(tmp_path / "run.toml"), "--train", "all"]
    with pytest.raises(ConfigError, match=r"no adapters, but lora\.rank is given") as caught:
        parse(Config, given, command="sft", description="")
    assert (
        "the whole table [lora]" in caught.value.next and "also learning_rate = 0.0002" in caught.value.next
    )
    # control arm: without it the file is a run
    (tmp_path / "run.toml").write_text(text)
    assert parse(Config, given, command="sft", description="").lora is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"steps": "three"}, "steps = 'three' is not a whole number"),
        ({"steps": True}, "steps = True is not a whole number"),
        ({"data_weights": "x"}, "data_weights = 'x' is not a list"),
        ({"data_weights": [1, "x"]}, "data_weights = [1, 'x']: 'x' is not a number"),
        ({"prompts": [1]}, "prompts = [1]: 1 is not text"),
        ({"track": ["foo"]}, "track = ['foo']: 'foo' is not one of 'tensorboard', 'wandb', 'trackio'"),
        ({"rank": "x"}, "unfreeze.sft: rank = 'x' is not a whole number"),
        ({"save_minutes": -1}, "save_minutes = -1: must be at least 0"),
    ],
)
def test_a_wrong_value_in_python_is_too(given, said):
    with pytest.raises(ConfigError) as caught:
        unfreeze.sft(**{"model": "m", "data": "d.jsonl", **given})
    assert said in caught.value.message and not PYDANTIC.search(caught.value.message)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("trian", "unfreeze sft --model MODEL"),
        ("comapre", "nearest: 'compare'"),
        ("dotcor", "nearest: 'doctor'"),
        ("sewep", "--sweep learning_rate=1e-4,2e-4"),
    ],
)
def test_swapped_letters_of_a_command_find_it(word, said, capsys):
    assert cli.main([word]) == 2
    assert said in capsys.readouterr().err


def test_control_arm_a_word_that_is_near_nothing_gets_no_suggestion(capsys):
    assert cli.main(["xyzzy"]) == 2
    assert capsys.readouterr().err.startswith("ConfigError: there is no command 'xyzzy'\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["chat", str(TINY_K2), "What?"], "'What?' is unexpected; chat takes no question as an argument"),
        (["generate", str(TINY_K2), "Once upon"], 'next: unfreeze generate RUN --prompt "…"'),
        (["data", "show", "qa.csv"], "next: unfreeze data show qa.csv --model MODEL"),
        (["distill", "--model", "m"], "next: unfreeze distill --model m --data FILE --teacher DIR_OR_RUN"),
        (["plan", str(TINY_K2), "--hardware", "4090"], "nearest: '1xRTX4090'"),
        (["sft", "--gpus", "2"], "torchrun starts one process per GPU"),
        (["sft", "--zero3"], "--place.weights sharded"),
        (["sft", "--accelerator", "gpu"], "it is called --device here"),
        (["sft", "--unsloth"], "kernels are chosen for the machine"),
        (["sft", "--merge"], "next: unfreeze merge RUN --to bf16"),
    ],
)
def test_what_newcomers_type_is_answered_with_the_command_that_was_meant(words, said, capsys):
    assert cli.main(words) == 2
    assert said in capsys.readouterr().err


def test_a_folder_of_runs_and_a_name_that_is_near_none(tmp_path, capsys):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "events.jsonl").write_text("")
        (tmp_path / name / "resolved_config.json").write_text("{}")
    assert cli.main(["compare", str(tmp_path)]) == 2
    assert f"{tmp_path} holds 2 runs\n  next: unfreeze compare {tmp_path}/*\n" in capsys.readouterr().err
    for name, remedy in (
        ("frist", f"the nearest: {tmp_path}/first"),
        ("none", f"{tmp_path} holds: {tmp_path}/first,"),
    ):
        with pytest.raises(CheckpointError) as raised:
            unfreeze.load(tmp_path / name)
        assert raised.value.next.startswith(remedy)
