"""Work that can be captured: a function that does the same on the same memory at every call.

Whatever that memory holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from unfreeze.core.errors import UserError


class CannotCapture(UserError):
    """These launches cannot be captured; the message is the reason.

    The attempt changes nothing beyond the effects of a call.
    """


@dataclass
class Launches:
    """A function that can be captured, and the buffers it reads: run(*buffers) -> a tensor.

    It must not read a number from the device, and no number that changes between calls may be on the host.
    Inputs change by being written to `buffers`. Calling it twice in a row must have the effect of one call:
    capturing calls it before it replays it.

    rows: tokens processed at once. captured: what an implementation keeps; it is freed with this object.
    """

    run: Callable[..., Tensor]
    buffers: tuple[Tensor, ...]
    rows: int
    dtype: torch.dtype
    captured: object = field(default=None, init=False, repr=False)

    @property
    def device(self) -> torch.device:
        return self.buffers[0].device
