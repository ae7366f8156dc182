"""--help shows the fields most people set, --help-all every one, in 80 columns; other tools' words are
answered with ours."""

import io
from contextlib import redirect_stdout

import pytest

from unfreeze import cli
from unfreeze.config import help, synonyms
from unfreeze.config.training import FIRST, HELP
from unfreeze.recipes import pretrain, sft


def said(*arguments):
    out = io.StringIO()
    with redirect_stdout(out), pytest.raises(SystemExit) as ended:
        cli.main(list(arguments))
    assert ended.value.code == 0
    return out.getvalue()


def test_the_front_page_is_one_screen_under_headings(capsys):
    assert cli.main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24 and {"Train", "Look", "Ship"} <= set(lines) and max(map(len, lines)) <= 80
    assert cli.main(["dev"]) == 0 and set(cli.DEV) <= set(capsys.readouterr().out.split())


def test_the_old_spelling_of_a_developers_command_and_the_new_are_one(capsys):
    assert cli.main(["dev", "kernels"]) == cli.main(["kernels"]) == 2
    assert cli.main(["dev", "sft"]) == 2
    assert "no command 'dev sft'" in capsys.readouterr().err


@pytest.mark.parametrize("recipe, module", [("sft", sft), ("pretrain", pretrain)])
def test_help_shows_some_fields_and_help_all_every_one(recipe, module):
    short, full = said(recipe, "--help"), said(recipe, "--help-all")
    fields = dict(help._flat(module.Config))
    flags = {name: f"--{name.replace('_', '-')}" for name in fields}
    assert all(f"  {flag}" in full for flag in flags.values())
    shown = [name for name, flag in flags.items() if f"  {flag} " in short]
    assert shown and set(shown) <= set(FIRST) and len(shown) <= 14
    assert max(map(len, full.splitlines())) <= 100 and "{None}" not in full and "MISSING" not in full


def test_every_field_of_a_run_has_a_heading():
    listed = {name for names in HELP.values() for name in names}
    assert listed == {name for module in (sft, pretrain) for name, _ in help._flat(module.Config)}


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--lr", "1e-4"], "no flag --lr; it is called --learning-rate here"),
        (["--max-seq-length", "512"], "it is called --sequence-length here (tokens)"),
        (
            ["--per_device_train_batch_size", "4"],
            "it is called --tokens-per-step here (tokens of one optimizer step",
        ),
        (["--lora-r", "8"], "it is called --lora.rank here"),
        (["--output-dir", "x"], "it is called --out here"),
        (["--learning-rat", "1"], "nearest: '--learning-rate'"),
    ],
)
def test_a_flag_of_another_tool_is_answered_with_ours(arguments, says, capsys):
    assert cli.main(["sft", "--model", "m", "--data", "d.jsonl", *arguments]) == 2
    assert says in capsys.readouterr().err


WAYS = [
    ("merge", "merge_and_unload"),
    ("dpo", "is not built"),
    ("train", "unfreeze sft --model"),
    ("init", "examples/"),
]


@pytest.mark.parametrize("word, says", WAYS)
def test_a_command_of_another_tool_is_answered_with_the_shortest_way(word, says, capsys):
    assert cli.main([word]) == 2
    assert says in capsys.readouterr().err


def test_every_synonym_names_a_field_that_exists_and_shadows_none():
    known = {name for module in (sft, pretrain) for name, _ in help._flat(module.Config)}
    assert {field for field, _ in synonyms.FIELDS.values()} <= known
    assert not synonyms.FIELDS.keys() & known and not synonyms.COMMANDS.keys() & cli.COMMANDS.keys()
    assert len(synonyms.FIELDS) >= 60


def test_likeness_only_where_the_word_is_near(capsys):
    assert cli.main(["kernles"]) == 2 and "nearest: 'kernels'" in capsys.readouterr().err
    assert cli.main(["zebra"]) == 2 and "nearest" not in capsys.readouterr().err
