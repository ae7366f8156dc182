"""Answers -> rows that sft, prefer and their like read, each with its origin and its cost.

    messages   {"messages": […, the answer], "source": …}
    pairs      {"prompt": […], "chosen": […], "rejected": […], "source": …}
    labels     {"messages": […, the seed's answer], "label": true, "score": 8, "source": …}

source has seed, prompt, model, endpoint, recipe, plan, time, cost_usd and usage. cost_usd is what is booked
for the requests of the row, the most that they can cost; usage is the server's own count.

The files are made anew of all answers, so a rerun without new ones writes the same bytes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from unfreeze.core.files import write_file
from unfreeze.data.rows.row import Conversation, Message
from unfreeze.rollout.verdicts import Verdict
from unfreeze.synth.judging import pair_of
from unfreeze.synth.plan import LEFT_OUT, ROWS, Plan, recipe_hash
from unfreeze.synth.prompts import Request, Requests, Seed, filled
from unfreeze.synth.recipe import Recipe
from unfreeze.synth.validate import contaminated, fault_of, repeated, thought_apart
from unfreeze.teach.answers import Answer
from unfreeze.teach.ledger import Booked
from unfreeze.untrusted.json_object import is_object

LEAKED = "shares words with an evaluation set"
BETTER = ("messages", "prompt", "chosen")
ALL = (*BETTER, "rejected")
Known = Mapping[str, Answer]


@dataclass
class Written:
    """Number of rows, those left out by reason, and what the server's usage comes to."""

    path: Path
    rows: int = 0
    left_out: Counter[str] = field(default_factory=Counter[str])
    usage_usd: float = 0.0
    usage_refused: int = 0
    usage_fault: str = ""


@dataclass
class Made:
    """A row, and why it is left out, or ""."""

    row: dict[str, Any]
    fault: str = ""


class Rows:
    """Makes the rows of a plan's answers."""

    def __init__(self, plan: Plan, recipe: Recipe, requests: Requests, ledger: Booked, known: Known):
        self.plan, self.recipe, self.requests, self.ledger, self.known = plan, recipe, requests, ledger, known
        self._recipe_hash = recipe_hash(recipe)

    def made(self) -> list[Made]:
        """Return a row or a fault for each answer that is there, in the order of the seeds."""
        make = {"messages": self._messages, "pairs": self._pair, "labels": self._label}[self.recipe.kind]
        with_faults = [
            each
            for seed, own in zip(self.requests.seeds, self.requests.by_seed, strict=True)
            for each in make(seed, own)
        ]
        good = [each for each in with_faults if not each.fault]
        leaked = contaminated([_text_of(each.row, ALL) for each in good], self.recipe.check.against)
        for place, where in leaked.items():
            good[place].fault = LEAKED
            good[place].row["source"]["leaked"] = where
        repeats = repeated([_text_of(each.row, BETTER) for each in good], self.recipe.check.near)
        for place, other in repeats.items():
            good[place].fault = good[place].fault or "repeats another row"
            good[place].row["source"]["repeats"] = good[other].row["source"]["seed"]
        return with_faults

    def _messages(self, seed: Seed, own: Sequence[Request]) -> Iterator[Made]:
        for request in own:
            if (held := self.known.get(request.key)) is None:
                continue
            answer = thought_apart(held)
            row = {"messages": [*self.requests.row_turns(seed), self._turn(answer)]}
            yield Made(row | self._source(seed, [request]), fault_of(answer, self.recipe))

    def _pair(self, seed: Seed, own: Sequence[Request]) -> Iterator[Made]:
        answers, fault = pair_of(own, self.known, self.recipe)
        if not answers:
            return
        sent, order = list(own), (0, 1)
        if self.requests.judges and not fault:
            texts = [answer.text for answer in answers]
            questions = self.requests.questions(seed, texts)
            if not all(question.key in self.known for question in questions):
                return
            fault, order = self._compared(seed, texts, questions)
            sent += questions
        chosen, rejected = (answers[place] for place in order)
        row = {
            "prompt": self.requests.row_turns(seed),
            "chosen": [self._turn(chosen)],
            "rejected": [self._turn(rejected)],
        }
        yield Made(row | self._source(seed, sent), fault)

    def _compared(
        self, seed: Seed, texts: Sequence[str], questions: Sequence[Request]
    ) -> tuple[str, tuple[int, int]]:
        """Return (fault, places of the better and the worse answer)."""
        if not questions:
            return "too long for the judge", (0, 1)
        pairs = self.requests.pairs
        verdicts: list[Verdict] = []
        for question in questions:
            value = pairs.read(self.known[question.key].text)
            verdicts.append(Verdict(value, "ok" if value is not None else "unreadable"))
        row = Conversation(self.requests.row_turns(seed))
        graded = pairs.graded([(row, text) for text in texts], verdicts)
        one, two = (each.reward for each in graded)
        if one is None or two is None:
            return "the judge's verdict cannot be read", (0, 1)
        if one == two:
            return "a tie", (0, 1)
        return "", (0, 1) if one > two else (1, 0)

    def _label(self, seed: Seed, own: Sequence[Request]) -> Iterator[Made]:
        held = self.known.get(own[0].key)
        if held is None:
            return
        score = self.requests.scores.read(held.text)
        text = filled("{completion}", seed)
        row = {
            "messages": [*self.requests.row_turns(seed), {"role": "assistant", "content": text}],
            "label": score is not None and score >= self.recipe.judge.least,
            "score": score,
        }
        fault = "" if score is not None else "the judge's verdict cannot be read"
        yield Made(row | self._source(seed, own), fault)

    def _turn(self, answer: Answer) -> Message:
        thought = {"reasoning_content": answer.reasoning} if answer.reasoning else {}
        drop = self.recipe.reasoning == "drop"
        return {"role": "assistant", "content": answer.text, **({} if drop else thought)}

    def _source(self, seed: Seed, sent: Sequence[Request]) -> dict[str, Any]:
        abouts = [self.known[request.key].about for request in sent]
        models = list(dict.fromkeys(str(about.get("model") or self.recipe.model) for about in abouts))
        usages = [usage for about in abouts if is_object(usage := about.get("usage"))]
        counts = {
            name: sum(each[name] for each in usages if isinstance(each.get(name), int))
            for name in ("prompt_tokens", "completion_tokens")
        }
        faults = [about["usage_fault"] for about in abouts if about.get("usage_fault")]
        return {
            "source": {
                "seed": seed.name,
                "row": seed.row,
                "prompt": sent[0].body["messages"],
                "model": models[0] if len(models) == 1 else models,
                "endpoint": urlsplit(self.plan.endpoint).netloc,
                "recipe": self._recipe_hash,
                "plan": self.plan.identity,
                "time": abouts[-1].get("time"),
                "cost_usd": self.ledger.of(*(request.key for request in sent)),
                "usage": counts,
                **({"usage_refused": faults} if faults else {}),
            }
        }


def write_rows(
    folder: Path,
    plan: Plan,
    recipe: Recipe,
    requests: Requests,
    ledger: Booked,
    known: Known,
    out: Path | None = None,
) -> Written:
    """Write the rows and what was left out, each file atomically. out: of the rows; None: in the folder."""
    with_faults = Rows(plan, recipe, requests, ledger, known).made()
    written = Written(out or folder / ROWS)
    written.path.parent.mkdir(parents=True, exist_ok=True)
    rows = [each.row for each in with_faults if not each.fault]
    left = [{"fault": each.fault, **each.row} for each in with_faults if each.fault]
    write_file(written.path, _lines(rows))
    write_file(folder / LEFT_OUT, _lines(left))
    written.rows = len(rows)
    written.left_out.update(each.fault for each in with_faults if each.fault)
    for answer in known.values():
        usage = answer.about.get("usage")
        fault = answer.about.get("usage_fault", "")
        if usage and fault:
            written.usage_refused += 1
            written.usage_fault = written.usage_fault or fault
        elif is_object(usage):
            written.usage_usd += plan.price.of(usage["prompt_tokens"], usage["completion_tokens"])
    return written


def _text_of(row: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return what a row's turns say, without the system's."""
    turns = [turn for name in names for turn in row.get(name, ()) if turn["role"] != "system"]
    return "\n".join(turn["content"] for turn in turns)


def _lines(rows: Sequence[Mapping[str, Any]]) -> str:
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    return text.encode("utf-8", "backslashreplace").decode()  # half a surrogate pair: as JSON's \\ud800
