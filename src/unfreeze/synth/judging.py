"""The second stage of pairs: a judge's questions about two answers, which are known only when these are.

Their price is in the plan: an answer counts as prompts.ANSWER_BYTES bytes a token there, and a longer one is
left out instead of sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unfreeze.synth.prompts import Request, Requests
from unfreeze.synth.recipe import Recipe
from unfreeze.synth.validate import fault_of, thought_apart
from unfreeze.teach.answers import Answer

Known = Mapping[str, Answer]


def pair_of(own: Sequence[Request], known: Known, recipe: Recipe) -> tuple[list[Answer], str]:
    """Return the two answers of a seed, [] if one is missing, and why they make no pair, or ""."""
    held = [known.get(request.key) for request in own]
    answers = [thought_apart(answer) for answer in held if answer]
    if len(answers) < len(own):
        return [], ""
    faults = (fault for answer in answers if (fault := fault_of(answer, recipe)))
    alike = "two equal answers" if answers[0].text == answers[1].text else ""
    return answers, next(faults, alike)


def questions_of(requests: Requests, known: Known) -> list[Request]:
    """Return the judge's questions about pairs that are complete."""
    questions: list[Request] = []
    for seed, own in zip(requests.seeds if requests.judges else [], requests.by_seed, strict=False):
        answers, fault = pair_of(own, known, requests.recipe)
        if answers and not fault:
            questions += requests.questions(seed, [answer.text for answer in answers])
    return questions


def questions_missing(requests: Requests, known: Known) -> list[Request]:
    """Return those questions that have no verdict."""
    return [question for question in questions_of(requests, known) if question.key not in known]


def most_of(requests: Requests, known: Known) -> tuple[int, int, int]:
    """Return (requests, tokens read, tokens written) of what has no answer, at most, with all attempts."""
    missing = [request for request in requests.first if request.key not in known]
    missing += questions_missing(requests, known)
    count = len(missing)
    read, written = (sum(getattr(request, name) for request in missing) for name in ("read", "written"))
    for seed, own in zip(requests.seeds if requests.judges else [], requests.by_seed, strict=False):
        if any(request.key not in known for request in own):  # its questions are not known yet
            count += 2
            read += 2 * requests.most_judged(seed)
            written += 2 * requests.recipe.judge.max_tokens
    return count, requests.recipe.tries * read, requests.recipe.tries * written
