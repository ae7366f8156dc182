"""Train some experts of a mixture: rows of its stacked weights, and of its routers; all else is frozen.

A stack of experts is one tensor [E, out, in]. Its trained rows become the parameter, and share its memory.
The forward pass uses the whole tensor, and the parameter gets the gradient of its rows. So the optimizer
holds nothing of the other experts, and neither an update nor weight decay can move them.

E experts, D model width.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from unfreeze.core.errors import ConfigError
from unfreeze.core.rows import Rows
from unfreeze.models.blocks.experts import ExpertWeight
from unfreeze.models.blocks.routers import Router
from unfreeze.models.decoder import Decoder

WORDS = re.compile(r"experts ([0-9]{1,6})(?:-([0-9]{1,6}))?")


def rows_of(words: str, num_experts: int) -> Rows:
    """The experts that `training.only` names: "experts 8-15" or "experts 8".

    Raises ConfigError for other words, and for experts that the model doesn't have.
    """
    match = WORDS.fullmatch(words.strip())
    if match is None:
        raise ConfigError(f"training.only = {words!r} is not known", next='training.only = "experts 8-15"')
    first, last = int(match[1]), int(match[2] or match[1])
    if not num_experts:
        raise ConfigError(f"training.only = {words!r}, but the model has no experts", next="remove it")
    if not first <= last < num_experts:
        raise ConfigError(
            f"training.only = {words!r}: the model's experts are 0 to {num_experts - 1}",
            next=f'training.only = "experts {num_experts // 2}-{num_experts - 1}"',
        )
    return Rows(first, last + 1, num_experts)


def train_only(model: Decoder, rows: Rows) -> None:
    """Freeze the model but for these experts of every layer and their rows of the router.

    Raises ConfigError if a process holds only some of the experts, or of their weights.
    """
    if model.exchanges:
        raise ConfigError(
            "training.only needs all experts on every process",
            next="leave out --place.weights and --place.share, or start one process",
        )
    model.requires_grad_(False)
    for moe in model.moe_layers().values():
        for weight in (moe.experts.gate_up_proj, moe.experts.down_proj):
            if weight.codec is not None:
                raise ConfigError("training.only trains unquantized experts", next="take a bf16 release")
            _divide(weight, rows)
        if type(moe.gate) is Router:  # others have more numbers per expert than a row
            _divide(moe.gate, rows)


def _divide(module: ExpertWeight | Router, rows: Rows) -> None:
    if isinstance(getattr(module, "part", None), Part):
        return  # by an earlier pass of a chain, whose passes share experts
    whole = module.weight.detach()
    module.part = Part(whole, rows)
    module.weight = nn.Parameter(whole[rows.slice])


class Part:
    """The trained rows of a weight. whole: all of it, of which the parameter is a view."""

    def __init__(self, whole: Tensor, rows: Rows):
        self.whole, self.rows = whole, rows

    def joined(self, parameter: Tensor) -> Tensor:
        """The whole weight, with a gradient for the parameter.

        Where the parameter's memory is exchanged for a copy (a receipt does so), the whole is a copy too.
        """
        whole = self.whole
        if parameter.data_ptr() != whole[self.rows.first].data_ptr():
            whole = whole.clone()
            whole[self.rows.slice] = parameter.detach()
        return cast(Tensor, _Joined.apply(parameter, whole, self.rows.slice))

    def checksums(self) -> list[int]:
        """One number for each frozen expert, of all its bits."""
        frozen = [e for e in range(self.rows.of) if not self.rows.first <= e < self.rows.last]
        return [_checksum(self.whole[e]) for e in frozen]


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, whole: Tensor, rows: slice) -> Tensor:
        ctx.rows = rows
        return whole.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0][ctx.rows].clone(), None, None  # the rest of the memory is freed


def _checksum(weight: Tensor) -> int:
    """The sum and the sum of squares of the bits as integers, modulo 2^64."""
    bits = weight.contiguous().view(torch.int16 if weight.element_size() == 2 else torch.int32).long()
    return int(bits.sum()) * 31 + int((bits * bits).sum())


def divided(model: nn.Module) -> Iterator[tuple[str, Part]]:
    """(parameter name, its part) of every weight of which only some rows train."""
    for name, module in model.named_modules():
        part = getattr(module, "part", None)
        if isinstance(part, Part):
            yield f"{name}.weight", part
