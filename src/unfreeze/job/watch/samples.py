"""Prompts from held-out rows, else from training rows, answered before and after training, for the report.

A row that cannot be asked becomes a warning event.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard

from unfreeze.core.errors import DataError, UserError

if TYPE_CHECKING:
    import torch

    from unfreeze.core.schema import PromptSource
    from unfreeze.data import Example, Row, Tokenizer
    from unfreeze.data.rows.row import Answers
    from unfreeze.evaluate.gap import Gap
    from unfreeze.generate.model import Model
    from unfreeze.parallel.processes.collectives import Group
    from unfreeze.train.run import Run

ANSWER = 64  # tokens of a sample answer at most: enough to see style, cheap beside a step
WORDS = 8  # of a text's opening
ROUNDS = 8  # times as many rows as samples are looked at for prompts that differ


@dataclass(frozen=True)
class Prompt:
    """What is asked: the text the report shows, and the ids the model sees."""

    shown: str
    tokens: list[int]


class Samples:
    """What a run says: `own` prompts, then the first `count` of the rows that it holds out, or trains on.

    Each prompt once: rows may be several answers to one question.

    Of a conversation the prompt ends before an answer, of a text after its eighth word.
    Made from rows that were accepted, so a bad row that the run skips is skipped here too. A row that cannot
    be asked (it begins with the assistant and says nothing else, or its prompt leaves less than ANSWER
    positions) is a warning event, once, at step 0.
    """

    def __init__(
        self,
        run: Run,
        speaker: Model,
        tokenizer: Tokenizer,
        data: Sequence[str],
        examples: Sequence[Example],
        count: int,
        own: Sequence[Prompt] = (),
        *,
        group: Group,
        columns: Sequence[str] = (),
        answers: Answers = "taught",
        source: PromptSource = "training data",
    ):
        self._source: PromptSource = source
        self._run, self._speaker, self._group = run, speaker, group
        self._prompts, self._own = list(own), len(own)
        room = speaker.decoder.shape.max_positions - ANSWER
        asked, tried = {tuple(prompt.tokens) for prompt in own}, 0
        for row in rows_used(data, examples, count, columns, answers):
            if tried == count:
                break
            try:
                prompt = prompt_of(row, tokenizer)
                if tuple(prompt.tokens) in asked:
                    continue
                asked.add(tuple(prompt.tokens))
                if len(prompt.tokens) > room:
                    raise DataError(
                        f"row {row.row}: its prompt of {len(prompt.tokens)} tokens leaves less than {ANSWER}"
                        " of the model's positions"
                    )
                self._prompts.append(prompt)
                tried += 1
            except DataError as error:
                tried += 1
                if run.step == 0:
                    run.events.emit("warning", 0, message=f"no sample of {error.message}")

    def say(self, when: str, step: int) -> None:
        """Greedy answers to all prompts in one batch, and their trainer/sampler gap (evaluate/gap.py).

        when is "before", "during" or "after". During training only own prompts are asked: answers take longer
        than a validation.
        Process 0 answers alone, while the others wait; where a pass needs all processes, all sample the
        tokens that process 0 chose.
        """
        asked = self._prompts[: self._own] if when == "during" else self._prompts
        if not asked:
            return
        if self._group.lockstep:
            self._say(when, step, asked)
        else:
            self._group.on_rank0(lambda: self._say(when, step, asked))

    def _say(self, when: str, step: int, asked: Sequence[Prompt]) -> None:
        from unfreeze.evaluate.gap import gap_of_answers
        from unfreeze.generate.sampling import NotFinite

        started = time.perf_counter()
        prompts = [prompt.tokens for prompt in asked]
        try:
            answers = self._speaker.complete(prompts, max_new_tokens=ANSWER)
        except NotFinite as error:
            raise self._of_the_file(error, step) from error
        for index, (prompt, answer) in enumerate(zip(asked, answers, strict=True)):
            self._run.events.emit(
                "sample",
                step,
                when=when,
                index=index,
                prompt=prompt.shown,
                text=answer.text,
                source="your prompts" if index < self._own else self._source,
            )
        gap = gap_of_answers(self._speaker.engine, prompts, answers)
        seconds = time.perf_counter() - started
        warned = self._gap_warning(gap)
        self._run.events.emit("gap", step, when=when, **gap.as_dict(), seconds=seconds, **warned)

    def _of_the_file(self, error: UserError, step: int) -> UserError:
        """The error; where a weight came so from its file, one that says so."""
        from unfreeze.models.finite import bad_weight
        from unfreeze.train.events import DOWNLOAD, of_the_file
        from unfreeze.train.optim import NonFinite

        found = bad_weight(self._speaker.decoder, updated=step > 0)
        return NonFinite(of_the_file(*found), next=DOWNLOAD) if found else error

    def _gap_warning(self, gap: Gap) -> dict[str, str]:
        """Give a warning field if the gap is larger than rounding explains.

        In bfloat16 rounding hides such gaps: no limit.
        """
        import torch

        from unfreeze.evaluate.gap import TOLERANCE

        if gap.max <= TOLERANCE or self._speaker.decoder.lm_head.dtype != torch.float32:
            return {}
        row, token = gap.worst
        where = f"sample {row}, answer token {token}"
        return {
            "warning": (
                f"the sampler and the trainer differ by {gap.max:.2g} nats at {where} (limit {TOLERANCE:g} in"
                " float32): the cached and the packed pass do not compute the same"
            )
        }


def of_the_first(group: Group, device: torch.device, tokens: list[int]) -> list[int]:
    """The tokens that process 0 sampled: where two are equally likely, rounding may part the processes."""
    import torch

    chosen = torch.tensor(tokens, device=device)
    group.broadcast(chosen, 0)
    return [int(token) for token in chosen]


def own_prompts(texts: Sequence[str], tokenizer: Tokenizer, *, chat: bool) -> list[Prompt]:
    """The config's `prompts`: each a user's message (chat), or a text to be continued."""
    from unfreeze.data import encode_chat, encode_prompt

    return [
        Prompt(
            text,
            (
                encode_chat(tokenizer, [{"role": "user", "content": text}])
                if chat
                else encode_prompt(tokenizer, text)
            ),
        )
        for text in texts
    ]


def rows_used(
    data: Sequence[str],
    examples: Sequence[Example],
    count: int,
    columns: Sequence[str] = (),
    answers: Answers = "taught",
) -> Iterator[Row]:
    """The first ROUNDS x `count` rows of the files that became examples.

    They come `count` at a time; it reads no further than the last that is asked for. Of rows with two answers
    the chosen one: both have the same prompt.
    """
    from unfreeze.data import Examples, read_rows

    known = Examples.of(examples)
    used: list[tuple[int, int]] = list(
        dict.fromkeys(zip(known.sources_N.tolist(), known.rows_N.tolist(), strict=True))
    )[: ROUNDS * count]
    for first in range(0, len(used), max(1, count)):
        wanted = used[first : first + count]
        found: dict[tuple[int, int], Row] = {}
        for source in sorted({source for source, _ in wanted}):
            missing = {number for file, number in wanted if file == source}
            # bad rows are counted by data.encode_files, not here
            for row in read_rows(Path(data[source]), lambda bad: None, columns, answers):
                if row.row in missing:
                    found[source, row.row] = row if answers == "taught" else row.answers[0]
                    missing.remove(row.row)
                if not missing:
                    break
        yield from (found[row] for row in wanted if row in found)


def prompt_of(row: Row, tokenizer: Tokenizer) -> Prompt:
    """The prompt of a row: up to its first answer that something precedes.

    Raises DataError where there is none, or the template refuses it.
    """
    from unfreeze.data import Conversation, encode_chat, encode_prompt

    if not isinstance(row, Conversation):
        opening = " ".join(row.text.split()[:WORDS])
        return Prompt(opening, encode_prompt(tokenizer, opening))
    place = next(
        (i for i, message in enumerate(row.messages) if message["role"] == "assistant" and i > 0), None
    )
    if place is None:
        raise DataError(f"row {row.row}: it begins with the assistant, and nothing asks for another answer")
    before = row.messages[:place]
    return Prompt(_shown(before[-1]), encode_chat(tokenizer, before, row.tools))


def _shown(message: Mapping[str, object]) -> str:
    """A message's words; its content may be a text, a list of text parts, or nothing beside tool calls."""
    content = message.get("content")
    return "".join(part["text"] for part in content) if _are_parts(content) else str(content or "")


def _are_parts(content: object) -> TypeGuard[list[dict[str, str]]]:
    return isinstance(content, list)
