"""Answers asked for by several workers."""

import threading
import time

import pytest

from unfreeze.core.errors import ConfigError
from unfreeze.teach.answers import Answer
from unfreeze.teach.once import Kept, read_kept


def test_workers_are_never_further_ahead_than_at_once(tmp_path):
    """Requests cost money: while the look at a result takes long, no more are sent."""
    sent: list[int] = []
    looked: list[int] = []

    def ask(row: int) -> Answer:
        sent.append(row)
        if row % 3 == 0:
            raise ConfigError("no", next="none")
        return Answer("yes", "stop")

    def leave(come) -> bool:
        if come is None:
            return False
        time.sleep(0.01)  # a consumer that the machine keeps waiting
        assert len(sent) <= len(looked) + 3
        looked.append(1)
        return len(looked) == 20

    with_answers = Kept(ask, str, tmp_path / "kept.jsonl", at_once=3)
    with_answers(range(40), leave)
    with_answers.wait()
    assert len(looked) == 20 and 20 <= len(sent) <= 22
    with_answers(range(40), lambda come: False)  # the rest, to the end: nobody waits for ever
    with_answers.wait()
    assert len(with_answers.known) == sum(row % 3 != 0 for row in range(40))


def test_workers_that_run_in_this_thread_come_to_an_end(tmp_path):
    """As a drill starts them: each would wait for itself if it waited for the look at a result."""
    in_turn = Kept(lambda row: Answer("yes", "stop"), str, tmp_path / "kept.jsonl", at_once=2, start=_here)
    assert len(in_turn(range(9), lambda come: False)) == len(in_turn.known) == 9


def _here(work) -> None:
    work()


def test_ctrl_c_while_a_worker_starts_leaves_none_behind(tmp_path):
    """It comes after the thread runs, and before its start has returned: the answer is paid for."""
    asked = threading.Event()

    def ask(row):
        asked.set()
        time.sleep(0.2)
        return Answer("yes", "stop")

    def interrupted(work):
        threading.Thread(target=work, daemon=True).start()
        assert asked.wait(5)
        raise KeyboardInterrupt

    kept = Kept(ask, str, tmp_path / "kept.jsonl", at_once=2, start=interrupted)
    with pytest.raises(KeyboardInterrupt):
        kept(["a", "b"], lambda come: False)
    kept.wait()
    assert list(kept.known) == ["a"] and len(read_kept(tmp_path / "kept.jsonl")) == 1
