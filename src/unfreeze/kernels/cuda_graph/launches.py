"""What can be captured: a function that does the same on the same memory at every call.

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

    Nothing has been changed by the attempt but what a call changes.
    """


@dataclass
class Launches:
    """A function that can be captured, and the buffers it reads: run(*buffers) -> a tensor.

    No number of it may come from the device to the host, and none that changes from call to call may lie on
    the host.
    Inputs change by being written into `buffers`. A call twice in a row must do what one does: capturing
    calls it before it replays it.
    rows: tokens that go through at once. captured: what an implementation keeps; it lives and ends with this
    object.
    """

    run: Callable[..., Tensor]
    buffers: tuple[Tensor, ...]
    rows: int
    dtype: torch.dtype
    captured: object = field(default=None, init=False, repr=False)

    @property
    def device(self) -> torch.device:
        return self.buffers[0].device
