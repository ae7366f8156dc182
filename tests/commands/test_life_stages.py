"""Stages of a life are read by their commands' parsers before the first runs; a key covers what a stage reads."""

import json
from pathlib import Path

import pytest

from unfreeze.commands import life, life_stages
from unfreeze.config.life import Life, Stage, read_life
from unfreeze.core.command import Common
from unfreeze.core.errors import ConfigError

QUIET = Common(quiet=True, json=True)
GOOD = """
[[stages]]
name = "make"
python = "make.py"
[[stages]]
name = "clean"
run = "data clean {make}/raw --on-bad-row skip"
[[stages]]
name = "tok"
run = "tokenizer train {clean} --vocab=512"
[[stages]]
name = "born"
run = "pretrain {make}/run.toml --tokenizer {tok} --steps 5"
[[stages]]
name = "wide"
run = "upcycle {born} --experts 4 --top-k 2"
[[stages]]
name = "tuned"
run = "sft --model {wide} --data {make}/a.jsonl --rank 4"
[[stages]]
name = "further"
run = "grpo --adapter {tuned} --data {make}/a.jsonl --reward right.py --steps 5"
[[stages]]
name = "swept"
run = "sft --model {wide} --data {make}/a.jsonl --sweep learning_rate=1e-4,1e-3"
[[stages]]
name = "one"
run = "merge {further} --to bf16 --no-check"
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("make.py", "right.py"):
        Path(name).write_text("")
    Path("life.toml").write_text(f'out = "out"\n{GOOD}')
    return Path("life.toml")


def dry(file):
    return life.main([str(file), "--dry-run"], QUIET)


def test_every_command_of_a_life_is_read_without_its_inputs(file, capsys):
    commands = {stage["name"]: stage["command"] for stage in dry(file)["stages"]}
    assert commands["clean"] == "unfreeze data clean out/make/raw out/clean --on-bad-row skip"
    assert commands["one"] == "unfreeze merge out/further --to bf16 --no-check --out out/one"


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("--no-check", "--no-chek", "stage 'one': there is no flag --no-chek.*--no-check"),
        ("--to bf16", "--to bf17", "stage 'one': .*bf17"),
        ("--rank 4", "--rnk 4", "stage 'tuned': there is no flag --rnk.*--rank"),
        ("--rank 4", "--rank four", "stage 'tuned': .*rank.*four"),
        ("--rank 4", "--train all --rank 4", "stage 'tuned': .*has no adapters"),
        ("--reward right.py --steps", "--reward right.py --stepps", "stage 'further': .*--stepps.*--steps"),
        ("run.toml --tokenizer", "run.toml --tokeniser", "stage 'born': there is no flag --tokeniser"),
        ("--vocab=512", "--vocabulary=512", "stage 'tok': there is no flag --vocabulary"),
        ("tokenizer train {clean}", "tokenizer show {clean}", "stage 'tok': tokenizer show makes no folder"),
        ("--on-bad-row skip", "--on-bad-row skp", "stage 'clean': .*skp"),
        ("--experts 4", "--experts 4 --help", "stage 'wide' asks for help"),
        ("--model {wide} --data {make}/a.jsonl --rank 4", "--rank 4", "stage 'tuned': unfreeze sft needs"),
    ],
)
def test_a_wrong_flag_of_a_late_stage_is_refused_before_the_first(file, before, after, message):
    file.write_text(file.read_text().replace(before, after, 1))
    with pytest.raises(ConfigError, match=message):
        dry(file)
    ran: list[object] = []
    with pytest.raises(ConfigError, match=message):
        life.main([str(file)], QUIET, launch=lambda *words: ran.append(words) or (0, {}))
    assert not ran and not Path("out").exists()


def test_the_example_is_accepted(monkeypatch):
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    assert len(dry("examples/lives/small.toml")["stages"]) == 11


@pytest.mark.parametrize(
    "changed", ["given.jsonl", "equal.jsonl", "inside.jsonl", "right.py", "near.py", "pack/deep.py", "none"]
)
def test_a_key_covers_every_file_that_a_stage_reads(tmp_path, monkeypatch, changed):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pack").mkdir()
    contents = {
        "given.jsonl": "{}", "equal.jsonl": "{}", "inside.jsonl": "{}", "other.jsonl": "{}",
        "run.toml": '[data]\nfiles = ["inside.jsonl"]\n',
        "right.py": "import json, near\nfrom pack import deep\n",
        "near.py": "", "pack/deep.py": "", "pack/__init__.py": "",
    }  # fmt: skip
    for name, content in contents.items():
        Path(name).write_text(content)
    run = "grpo run.toml --data=equal.jsonl --validation given.jsonl --reward right.py:reward"
    one = Life(out="out", stages=(Stage(name="g", run=run),))
    before = life_stages.keys_of(one)
    Path(changed if changed != "none" else "other.jsonl").write_text("# other")
    assert (life_stages.keys_of(one) == before) == (changed == "none")
    (tmp_path / "run.toml").write_text(
        "[data"
    )  # what cannot be parsed names no files, and its stage says why
    (tmp_path / "right.py").write_text("def")
    assert life_stages.keys_of(one) != before


def test_words_that_can_be_no_file_are_passed_over(tmp_path):
    assert life_stages.files_of(["a" * 5000, "\0", "~nobody-of-this-name/x", "--lone", ""]) == []


def test_an_example_of_a_life_has_stages(file):
    assert read_life(file).stages[1].words[0] == "data" and json.dumps(GOOD)
