"""`unfreeze generate` as scripts see it: text with the ids that were sampled, and ids alone."""

import json
import shutil

import pytest

import unfreeze
from unfreeze import cli
from unfreeze.commands.demo import TINY_K2
from unfreeze.generate.engine import Engine


@pytest.fixture
def no_tokenizer(tmp_path):
    folder = tmp_path / "ids only"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(TINY_K2 / name, folder / name)
    return folder


def test_tokens_are_those_that_were_sampled(unfreeze_json):
    """The stop id is among them, and no text encodes to it: encoding the text again would lose it."""
    result = unfreeze_json(
        "generate",
        TINY_K2,
        "--prompt",
        "What is the capital of France?",
        "--mode",
        "chat",
        "--max-new-tokens",
        40,
    )
    model = unfreeze.load(TINY_K2)
    done = model.chat_batch(["What is the capital of France?"], max_new_tokens=40)[0]
    facts = {"text": done.text, "finish_reason": "stop", "stop_reason": "end"}
    assert result == facts | {"tokens": done.tokens}
    assert model.tokenizer.decode(result["tokens"]) == result["text"]


def test_text_mode_continues_and_stops_at_a_text(unfreeze_json):
    whole = unfreeze_json("generate", TINY_K2, "--prompt", "The capital of France is", "--max-new-tokens", 12)
    assert whole["text"] == unfreeze.load(TINY_K2).generate("The capital of France is", max_new_tokens=12)
    stop = whole["text"].strip()[2:5]
    stopped = unfreeze_json(
        "generate",
        TINY_K2,
        "--prompt",
        "The capital of France is",
        "--mode",
        "text",
        "--max-new-tokens",
        12,
        "--stop",
        stop,
    )
    assert stopped["text"] == whole["text"].split(stop)[0]
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", "stop word")


def test_ids_go_in_and_out_without_a_tokenizer(no_tokenizer, unfreeze_json, capsys):
    result = unfreeze_json("generate", no_tokenizer, "--tokens", 1, 403, 407, "--max-new-tokens", 5)
    assert (
        result["tokens"] == unfreeze.load(no_tokenizer).generate([1, 403, 407], max_new_tokens=5)
        and result["text"] == ""
    )
    assert (
        cli.main(
            ["generate", str(no_tokenizer), "--tokens", "1", "403", "407", "--max-new-tokens", "5", "--quiet"]
        )
        == 0
    )
    assert capsys.readouterr().out == " ".join(map(str, result["tokens"])) + "\n"
    assert cli.main(["generate", str(no_tokenizer), "--prompt", "Paris", "--quiet"]) == 2
    assert "has no tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give either prompt or tokens"),
        (["--prompt", "a", "--tokens", "1"], "give either prompt or tokens"),
        (["--tokens", "1", "--mode", "chat"], "mode chat needs a text"),
        (["--prompt", "a", "--device", "gpu"], "--device = 'gpu': should be auto, cpu, cuda or cuda:N"),
        (["--prompt", "a", "--top-p", "0"], "--top-p 0: must be more than 0.0"),
        (["--prompt", "a", "--stop", ""], "--stop : needs a character"),
        (["--prompt", "a", "--stop", "x", ""], "needs a character"),
        (["--prompt", "a", "--temperature", "nan"], "--temperature = 'nan' is not a finite number"),
        (["--prompt", "a", "--temperature", "-1"], "--temperature -1: must be at least 0.0"),
        (["--prompt", "a", "--seed", str(2**64)], f"--seed {2**64}: must be at most {2**64 - 1}"),
        (["--prompt", "a", "--seed", str(-(2**63) - 1)], f"must be at least -{2**63}"),
    ],
)
def test_what_cannot_be_meant_is_refused(arguments, words, capsys):
    assert cli.main(["generate", str(TINY_K2), *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error and "Traceback" not in error


def test_full_positions_are_one_plain_line_and_none_when_quiet(tmp_path, capsys):
    folder = tmp_path / "short"
    shutil.copytree(TINY_K2, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 8}))
    arguments = ["generate", str(folder), "--tokens", "5", "6", "7", "--max-new-tokens", "50"]
    assert cli.main(arguments) == 0
    error = capsys.readouterr().err
    # what is loaded at once has no line of its own
    assert error == "stopped after 5 tokens: the model's 8 positions are full\n"
    assert cli.main([*arguments, "--quiet"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("as_json", [True, False])
def test_ctrl_c_prints_what_is_there(monkeypatch, capsys, as_json):
    arguments = ["generate", str(TINY_K2), "--prompt", "The capital of", "--max-new-tokens", "30"]
    whole = unfreeze.load(TINY_K2).complete(["The capital of"], max_new_tokens=30)[0]
    step, count = Engine._step, []

    def interrupts(self, step_of, tokens):
        count.append(1)
        if len(count) == 4:
            raise KeyboardInterrupt
        return step(self, step_of, tokens)

    monkeypatch.setattr(Engine, "_step", interrupts)
    assert cli.main([*arguments, *["--json"] * as_json]) == 130
    said = capsys.readouterr()
    assert said.err.splitlines()[-1] == "interrupted after 4 tokens"
    if as_json:
        result = json.loads(said.out)
        assert result["tokens"] == whole.tokens[:4] and whole.text.startswith(result["text"])
        assert (result["finish_reason"], result["stop_reason"]) == ("stop", "interrupted")
    else:
        assert said.out.strip() and whole.text.startswith(said.out[:-1])


def test_a_limit_that_was_reached_is_said(capsys):
    assert cli.main(["generate", str(TINY_K2), "--tokens", "5", "6", "--max-new-tokens", "3"]) == 0
    assert capsys.readouterr().err == "stopped after 3 tokens: --max-new-tokens allows no more\n"


def test_a_home_folder_is_found(monkeypatch, unfreeze_json):
    monkeypatch.setenv("HOME", str(TINY_K2.parent))
    assert len(unfreeze_json("generate", "~/tiny-k2", "--tokens", 5, "--max-new-tokens", 2)["tokens"]) == 2
