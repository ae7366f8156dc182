"""A signal in one process: all leave the step together, whichever of them it reached."""

from types import SimpleNamespace

import pytest

from unfreeze.core.errors import StepLeft
from unfreeze.data.rows.row import Conversation
from unfreeze.data.store.examples import Example
from unfreeze.parallel.processes.collectives import ALONE
from unfreeze.rollout.answering import Asked, sampled
from unfreeze.rollout.sampled import Sampled

QUESTIONS = [Asked(Example([1, 2], [0.0, 1.0], n), Conversation([], row=n), (n,)) for n in range(2)]


class How:
    """One answer to each prompt; a signal came if `leaves`."""

    def __init__(self, leaves: bool):
        self.leaves = leaves

    def sample(self, questions, n, *, greedy=False):
        if self.leaves:
            raise StepLeft
        return [[Sampled([each.row.row], "text", "end", [-1.0])] * n for each in questions]


def group(other: str, heard: list[str]):
    """The first of two processes; the other sends `other`."""

    def texts(text: str) -> list[str]:
        heard.append(text)
        return [text, other]

    return SimpleNamespace(size=2, rank=0, lockstep=False, share=lambda places: places[::2], texts=texts)


def test_all_leave_if_one_did():
    theirs = '[[1, [{"tokens": [7], "text": "", "stop": "end", "log_p": [0.0], "experts": null, "fed": [],'
    theirs += ' "turns": [], "faults": {}, "graded": null}]]]'
    for leaves, other in ((True, theirs), (False, "null"), (True, "null")):
        heard: list[str] = []
        with pytest.raises(StepLeft):
            sampled(How(leaves), QUESTIONS, 1, group(other, heard))
        assert len(heard) == 1 and (heard[0] == "null") == leaves  # it is told before it leaves
    every = sampled(How(False), QUESTIONS, 1, group(theirs, []))
    assert [answer.tokens for (answer,) in every] == [[0], [7]]


def test_one_process_leaves_alone():
    with pytest.raises(StepLeft):
        sampled(How(True), QUESTIONS, 1, ALONE)
