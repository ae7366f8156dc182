"""The prompts that the next pass reads, and how much of each.

While rows run, a pass reads at most BESIDE tokens, then comes a step: nobody who is answered waits longer.
Prompts are read in the order of their arrival; one that has begun comes first, so none starves. A longer one
is read in parts if the model can (Decoder.fill), else in a pass of its own.

T tokens of a part, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from unfreeze.generate.choosing import likeliest
from unfreeze.generate.places import Seat
from unfreeze.generate.request import PromptScores
from unfreeze.generate.sampling import logprobs_of
from unfreeze.models import Decoder

BESIDE = 1024  # tokens of a pass while rows run
ALONE = 8192  # if none does: the activations of all its tokens are alive together
SMALLEST = 64  # tokens of a part that is not a prompt's last
WORTH_WAITING = 64  # tokens that a prompt shares with one of this pass: it joins in the next, and copies them
SCORED = 256  # positions whose logits are held at once


@dataclass(eq=False)
class Part:
    """A seat's part of the next pass: `count` tokens of its prompt behind the first `first`.

    followers  seats with the same prompt, which copy it
    """

    seat: Seat
    first: int
    count: int
    followers: list[Seat] = field(default_factory=list[Seat])

    @property
    def tokens(self) -> list[int]:
        return self.seat.request.prompt[self.first : self.first + self.count]

    @property
    def whole(self) -> bool:
        """True if its prompt is there after the pass."""
        return self.first + self.count == len(self.seat.request.prompt)

    @property
    def steps(self) -> bool:
        """True if it is a prompt's last token behind all others: a step of the rows that run reads it too."""
        last = self.whole and self.count == 1 and self.first > 0
        return last and not self.followers and not self.seat.request.prompt_logprobs


@dataclass(eq=False)
class Plan:
    """The parts of the next pass. extends: a prompt can be read in parts."""

    budget: int
    extends: bool
    parts: list[Part] = field(default_factory=list[Part])

    @property
    def left(self) -> int:
        """Return the tokens that may still come in."""
        return self.budget - sum(part.count for part in self.parts)

    def part(self, seat: Seat, first: int) -> Part | None:
        """Return the part of a seat that holds `first` positions; None if it has to wait."""
        if not self.extends:
            first = 0
        count, left = len(seat.request.prompt) - first, self.left
        if count > left and self.extends:
            count = left if left >= SMALLEST or not self.parts else 0
        elif count > left and self.parts:
            count = 0
        return Part(seat, first, count) if count > 0 else None

    def leader(self, seat: Seat) -> Part | None:
        """Return the part of a seat with the same prompt, which this one may copy."""
        request = seat.request
        for part in self.parts:
            other = part.seat.request
            scored = request.prompt_logprobs and other is not request
            if part.seat.version == seat.version and other.prompt == request.prompt and not scored:
                return part
        return None

    def shares_more(self, seat: Seat, reused: int) -> bool:
        """True if a prompt of this pass begins like the seat's for much more than `reused` tokens."""
        most = reused + WORTH_WAITING
        begin = seat.request.prompt[:most]
        return self.extends and any(
            part.seat.request.prompt[:most] == begin and part.seat.version == seat.version
            for part in self.parts
            if len(begin) == most
        )


def score_prompt(model: Decoder, hidden_TD: Tensor, part: Part, num_ids: int) -> None:
    """Add the scores of a part's tokens to its request: each position scores the token behind it."""
    request = part.seat.request
    scores = request.prompt_scores = request.prompt_scores or PromptScores([], [])
    behind = request.prompt[part.first + 1 : part.first + part.count + 1]
    for begin in range(0, len(behind), SCORED):
        ids = behind[begin : begin + SCORED]
        logits_TV = model.logits(hidden_TD[begin : begin + len(ids)])[:, :num_ids]
        known = [min(id, num_ids - 1) for id in ids]
        logprobs = logprobs_of(logits_TV, known)
        scores.logprobs += [
            each if id < num_ids else -torch.inf for id, each in zip(ids, logprobs, strict=True)
        ]
        if request.top:
            scores.top += likeliest(logits_TV, request.top)
