"""Answer prompts before and after training, for the report. Prompts come from held-out or training rows.

A row that gives no prompt becomes a warning event.
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

ANSWER = 64  # most tokens of a sample answer: enough to see its style, cheap beside a step
WORDS = 8  # words of a text used as prompt
ROUNDS = 8  # rows tried per sample, to find different prompts


@dataclass(frozen=True)
class Prompt:
    """A prompt: the text that the report shows, and the ids that the model gets."""

    shown: str
    tokens: list[int]


class Samples:
    """Sample answers: to `own` prompts, then to the first `count` held-out (or training) rows.

    Each prompt is used once, although several rows can have the same question.
    The prompt of a conversation stops before an answer, that of a text after its eighth word.
    Only rows that were encoded are used, so a bad row is skipped here too. A row without a usable prompt (it
    starts with the assistant and has nothing else, or leaves too few positions) is a warning event, once, at
    step 0. An answer has at most ANSWER tokens, and at most half of the model's positions.
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
        positions = speaker.decoder.shape.max_positions
        self._most = min(ANSWER, positions // 2)
        seen, tried = {tuple(prompt.tokens) for prompt in own}, 0
        for row in rows_used(data, examples, count, columns, answers):
            if tried == count:
                break
            try:
                prompt = prompt_of(row, tokenizer)
                if tuple(prompt.tokens) in seen:
                    continue
                seen.add(tuple(prompt.tokens))
                if len(prompt.tokens) > positions - self._most:
                    raise DataError(
                        f"row {row.row}: its prompt of {len(prompt.tokens)} tokens leaves fewer than"
                        f" {self._most} of the model's {positions} positions"
                    )
                self._prompts.append(prompt)
                tried += 1
            except DataError as error:
                tried += 1
                if run.step == 0:
                    run.events.emit("warning", 0, message=f"no sample of {error.message}")

    def say(self, when: str, step: int) -> None:
        """Answer all prompts greedily in one batch, and measure the trainer/sampler gap (evaluate/gap.py).

        when: "before", "during" or "after". During training only own prompts are answered, because answers
        take longer than a validation. Process 0 answers while the others wait. If a forward pass needs all
        processes, all use the tokens that process 0 samples.
        """
        prompts = self._prompts[: self._own] if when == "during" else self._prompts
        if not prompts:
            return
        if self._group.lockstep:
            self._say(when, step, prompts)
        else:
            self._group.on_rank0(lambda: self._say(when, step, prompts))

    def _say(self, when: str, step: int, asked_prompts: Sequence[Prompt]) -> None:
        from unfreeze.evaluate.gap import gap_of_answers
        from unfreeze.generate.sampling import NotFinite

        started = time.perf_counter()
        prompts = [prompt.tokens for prompt in asked_prompts]
        try:
            with self._speaker.decoder.looking():
                answers = self._speaker.complete(prompts, max_new_tokens=self._most)
        except NotFinite as error:
            raise self._of_the_file(error, step) from error
        for index, (prompt, answer) in enumerate(zip(asked_prompts, answers, strict=True)):
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
        """Return the error, or a clearer one if the file itself holds a non-finite weight."""
        from unfreeze.models.finite import bad_weight
        from unfreeze.train.events import DOWNLOAD, of_the_file
        from unfreeze.train.optim import NonFinite

        weight = bad_weight(self._speaker.decoder, updated=step > 0)
        return NonFinite(of_the_file(*weight), next=DOWNLOAD) if weight else error

    def _gap_warning(self, gap: Gap) -> dict[str, str]:
        """Return a warning field if the gap is larger than rounding explains.

        There is no limit in bfloat16, where rounding hides such gaps.
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
    """Broadcast the tokens that process 0 sampled: with equally likely tokens, rounding could differ."""
    import torch

    chosen = torch.tensor(tokens, device=device)
    group.broadcast(chosen, 0)
    return [int(token) for token in chosen]


def own_prompts(texts: Sequence[str], tokenizer: Tokenizer, *, chat: bool) -> list[Prompt]:
    """Encode the config's `prompts`, each as a user's message (chat) or as a text to continue."""
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
    """Yield the first ROUNDS x `count` rows of the files that became examples.

    Rows are read lazily, `count` at a time. A pair yields its chosen answer; both have the same prompt.
    """
    from unfreeze.data import Examples, read_rows

    known = Examples.of(examples)
    used: list[tuple[int, int]] = list(
        dict.fromkeys(zip(known.sources_N.tolist(), known.rows_N.tolist(), strict=True))
    )[: ROUNDS * count]
    for first in range(0, len(used), max(1, count)):
        wanted = used[first : first + count]
        rows: dict[tuple[int, int], Row] = {}
        for source in sorted({source for source, _ in wanted}):
            missing = {number for file, number in wanted if file == source}
            # bad rows are counted by data.encode_files, not here
            for row in read_rows(Path(data[source]), lambda bad: None, columns, answers):
                if row.row in missing:
                    rows[source, row.row] = row.answers[0] if answers in ("pairs", "labels") else row
                    missing.remove(row.row)
                if not missing:
                    break
        yield from (rows[row] for row in wanted if row in rows)


def prompt_of(row: Row, tokenizer: Tokenizer) -> Prompt:
    """Prompt of a row: everything before its first answer that is not its first message.

    Raises DataError if there is no such answer, or if the template refuses it.
    """
    from unfreeze.data import Conversation, encode_chat, encode_prompt

    if isinstance(row, Conversation) and row.columns:  # asked: all its messages are the prompt
        return Prompt(_shown(row.messages[-1]), encode_chat(tokenizer, row.messages, row.tools))
    if not isinstance(row, Conversation):
        opening = " ".join(row.text.split()[:WORDS])
        return Prompt(opening, encode_prompt(tokenizer, opening))
    place = next(
        (i for i, message in enumerate(row.messages) if message["role"] == "assistant" and i > 0), None
    )
    if place is None:
        raise DataError(f"row {row.row}: it starts with the assistant, and no later turn is answered")
    before = row.messages[:place]
    return Prompt(_shown(before[-1]), encode_chat(tokenizer, before, row.tools))


def _shown(message: Mapping[str, object]) -> str:
    """Text of a message, whose content can be a text, a list of text parts, or missing beside tool calls."""
    content = message.get("content")
    return "".join(part["text"] for part in content) if _are_parts(content) else str(content or "")


def _are_parts(content: object) -> TypeGuard[list[dict[str, str]]]:
    return isinstance(content, list)
