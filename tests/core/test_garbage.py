"""Python looks for garbage as the user set it, before a command and after it, and while a model trains."""

import gc

import pytest

from unfreeze import cli
from unfreeze.core import garbage


@pytest.fixture
def mine():
    before = gc.get_threshold()
    gc.set_threshold(1234, 11, 12)
    yield (1234, 11, 12)
    gc.set_threshold(*before)


def test_it_is_put_off_once_and_taken_up_as_it_was(mine):
    garbage.put_off()
    garbage.put_off()
    assert gc.get_threshold() == garbage.RARELY
    garbage.take_up()
    assert gc.get_threshold() == mine
    gc.set_threshold(77, 7, 7)  # a program that never put it off keeps its own
    garbage.take_up()
    assert gc.get_threshold() == (77, 7, 7)


@pytest.mark.parametrize("line, code", [(["--version"], 0), (["no such command"], 2)])
def test_a_command_leaves_it_as_it_was(line, code, mine, monkeypatch, capsys):
    during = []
    real = cli._dispatch
    monkeypatch.setattr(cli, "_dispatch", lambda *given: during.append(gc.get_threshold()) or real(*given))
    assert cli.main(line) == code
    assert during == [garbage.RARELY] and gc.get_threshold() == mine


def test_steps_are_made_as_the_user_set_it(mine, chat_rows, tmp_path, monkeypatch, capsys):
    from unfreeze.commands.demo import TINY_K2
    from unfreeze.train import step

    during = []
    real = step.train_step
    monkeypatch.setattr(
        "unfreeze.train.fit.train_step", lambda *a, **k: during.append(gc.get_threshold()) or real(*a, **k)
    )
    line = [
        "sft",
        "--quiet",
        "--model",
        TINY_K2,
        "--data",
        chat_rows,
        "--steps",
        1,
        "--watch.samples",
        0,
        "--lora.rank",
        1,
        "--place.recompute",
        "nothing",
        "--dtype",
        "float32",
        "--out",
        tmp_path / "run",
    ]
    assert cli.main([*map(str, line), "--tokens-per-step", "256"]) == 0
    assert during == [mine]
