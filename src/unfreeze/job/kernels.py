"""What a run says of its kernels: which implementation of each op runs, and what decided it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from unfreeze.core.schema import KernelChoice

if TYPE_CHECKING:
    import torch

    from unfreeze.train.state import State
    from unfreeze.train.step import StepResult


def predicted_ops(device: torch.device, dtype: str) -> list[str]:
    """Ops of which a kernel runs unmeasured on that device, once it is checked.

    Ops that the model does not have are among them: what ran, the events say.
    """
    from unfreeze.generate.open import dtype_of
    from unfreeze.kernels.choice.predicted import expected

    return expected(device, dtype_of(dtype))


def stepped(device: torch.device, dtype: str) -> Path | None:
    """The file that says "a run in this dtype has made a step here", so that the next compiles nothing."""
    from unfreeze.kernels.loops.on_disk import stamp

    return stamp(dtype, f"stepped-{device.type}")


def compiles(device: torch.device, dtype: str) -> bool:
    """Whether the first step compiles: no run has made one here in this dtype."""
    made = stepped(device, dtype)
    return made is None or not made.exists()


class KernelChoices:
    """The hook that tells what was chosen since the last step."""

    def __init__(self, dtype: str) -> None:
        self._told, self._dtype = 0, dtype

    def __call__(self, state: State, result: StepResult) -> None:
        from unfreeze.kernels.choice.choose import choices

        made = choices()
        if not self._told and (file := stepped(state.model.device, self._dtype)) is not None:
            with suppress(OSError):
                file.touch()
        if len(made) == self._told:
            return
        new = list(made.items())[self._told :]
        self._told = len(made)
        rows = [
            KernelChoice(
                op=inputs.op,
                bucket=inputs.bucket,
                dtype=str(inputs.dtype).removeprefix("torch."),
                runs=choice.runs,
                origin=choice.origin,
                why=choice.why,
            )
            for inputs, choice in new
        ]
        state.run.events.emit("kernels", state.step, choices=rows)
