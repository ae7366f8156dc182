"""--help shows the fields most people set, --help-all every one, in 80 columns; other tools' words are
answered with ours."""

import io
import re
from contextlib import redirect_stdout

import pytest

from unfreeze import cli
from unfreeze.commands import plan
from unfreeze.config import synonyms
from unfreeze.config.names import earlier, fields, spellings
from unfreeze.config.recipes import CONFIGS
from unfreeze.core.field import HEADINGS
from unfreeze.recipes import distill, prefer, pretrain, sft


def said(*arguments):
    out = io.StringIO()
    with redirect_stdout(out), pytest.raises(SystemExit) as ended:
        cli.main(list(arguments))
    assert ended.value.code == 0
    return out.getvalue()


def test_the_front_page_is_one_screen_under_headings(capsys):
    assert cli.main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    wide = [line for line in lines if len(line) > 80]
    assert len(lines) <= 40, (
        "unfreeze --help is one screen of 40 lines: put a command for developers into DEV of cli.py, or join two"
    )
    assert not wide, f"shorten the summary in cli.py to fit 80 columns: {wide}"
    assert {"Train", "Look", "Ship"} <= set(lines)
    assert cli.main(["dev"]) == 0 and set(cli.DEV) <= set(capsys.readouterr().out.split())


def test_the_old_spelling_of_a_developers_command_and_the_new_are_one(capsys):
    assert cli.main(["dev", "kernels"]) == cli.main(["kernels"]) == 2
    assert cli.main(["dev", "sft"]) == 2
    assert "no command 'dev sft'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "recipe, module", [("sft", sft), ("distill", distill), ("prefer", prefer), ("pretrain", pretrain)]
)
def test_help_shows_some_fields_and_help_all_every_one(recipe, module):
    short, full = said(recipe, "--help"), said(recipe, "--help-all")
    known = fields(module.Config)
    flags = {name: f"--{each.short.replace('_', '-')}" for name, each in known.items()}
    missing = [name for name, flag in flags.items() if f"  {flag}" not in full]
    assert not missing, f"--help-all lacks {missing}"
    shown = [name for name, flag in flags.items() if re.search(f"  {flag}[ \n]", short)]
    assert shown and set(shown) == {name for name, each in known.items() if each.about.first}
    assert len(shown) <= 15
    whole = " ".join(full.split())
    assert all(f"[{name}]" in whole for name, each in known.items() if each.about.alias)
    old = [word for word in earlier(module.Config) if f"  --{word.replace('_', '-')} " in full]
    assert not old, f"--help-all shows names of earlier versions: {old}"
    assert "--place.split auto|N " in full  # a word or a number
    assert max(map(len, full.splitlines())) <= 100 and "{None}" not in full and "MISSING" not in full


@pytest.mark.parametrize("command, config", [*CONFIGS.items(), ("plan", plan.Config)])
def test_every_field_has_a_heading_and_those_that_most_people_set_come_first(command, config):
    known = fields(config).values()
    bare = [each.name for each in known if each.about.heading == "Options"]
    assert not bare, f"say by about(HEADING) under which heading of --help-all these stand: {bare}"
    text = said(command, "--help-all")
    titles = [line[:-1] for line in text.splitlines() if line[:-1] in HEADINGS]
    assert titles == sorted(titles, key=HEADINGS.index)
    of = {each.short.replace("_", "-"): each.about.first for each in known}
    for heading in titles:
        group = text.partition(f"\n{heading}:\n")[2].partition("\n\n")[0]
        first = [of[flag] for flag in re.findall(r"^  --([\w.-]+)", group, re.MULTILINE)]
        assert first and first == sorted(first, reverse=True), (heading, group)


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--lr", "1e-4"], "no flag --lr; it is called --learning-rate here"),
        (["--max-seq-length", "512"], "it is called --sequence-length here (tokens)"),
        (
            ["--per_device_train_batch_size", "4"],
            "it is called --tokens-per-step here (tokens per optimizer step",
        ),
        (["--lora-r", "8"], "it is called --rank here"),
        (["--output-dir", "x"], "it is called --out here"),
        (
            ["--batch-size", "4", "--gradient_accumulation_steps", "2", "--lora_r", "8"],
            "And there is no flag --lora_r; it is called --rank here",
        ),
        (["--batch-size", "4", "--lora_r", "8"], "no flag --batch-size; it is called --tokens-per-step here"),
        (["--load_in_4bit"], "a 4-bit or 8-bit checkpoint is trained in its own format"),
        (["--learning-rat", "1"], "nearest: '--learning-rate'"),
    ],
)
def test_a_flag_of_another_tool_is_answered_with_ours(arguments, says, capsys):
    assert cli.main(["sft", "--model", "m", "--data", "d.jsonl", *arguments]) == 2
    assert says in capsys.readouterr().err


WAYS = [
    ("fuse", "unfreeze merge RUN"),
    ("dpo", "unfreeze prefer --model"),
    ("reward-model", "are not built"),
    ("train", "unfreeze sft --model"),
    ("wizard", "unfreeze init MODEL DATA"),
]


@pytest.mark.parametrize("word, says", WAYS)
def test_a_command_of_another_tool_is_answered_with_the_shortest_way(word, says, capsys):
    assert word not in cli.COMMANDS, (
        f"{word} is a command now: take it out of WAYS in tests/config/test_help.py"
    )
    assert cli.main([word]) == 2
    assert says in capsys.readouterr().err


def test_every_synonym_names_a_field_that_exists_and_shadows_none():
    known = {each.short for config in CONFIGS.values() for each in fields(config).values()}
    every = {name for config in CONFIGS.values() for name in spellings(config)}
    assert {field for field, _ in synonyms.FIELDS.values()} <= known
    shadowed = synonyms.FIELDS.keys() & every | synonyms.COMMANDS.keys() & cli.COMMANDS.keys()
    assert not shadowed, (
        f"{sorted(shadowed)} exist here: take them out of _FIELDS or _COMMANDS in config/synonyms.py"
    )
    assert len(synonyms.FIELDS) >= 60


def test_likeness_only_where_the_word_is_near(capsys):
    assert cli.main(["kernles"]) == 2 and "nearest: 'kernels'" in capsys.readouterr().err
    assert cli.main(["zebra"]) == 2 and "nearest" not in capsys.readouterr().err


def test_a_choice_that_means_unset_is_not_shown_as_an_empty_word():
    text = said("sft", "--help-all")
    assert "--merge-aware same|int4|" in text and " |" not in text
