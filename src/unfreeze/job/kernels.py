"""What a run says of its kernels: which implementation of each op runs, and what decided it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unfreeze.core.schema import KernelChoice

if TYPE_CHECKING:
    from unfreeze.train.state import State
    from unfreeze.train.step import StepResult


def predicted_words(device: str, dtype: str) -> str:
    """What a run's start says of kernels that run unmeasured on "cpu" or "cuda"; "" where there are none."""
    import torch

    from unfreeze.generate.open import dtype_of
    from unfreeze.kernels.choice.predicted import expected

    ops = expected(torch.device(device), dtype_of(dtype))
    count = "1 op" if len(ops) == 1 else f"up to {len(ops)} ops"
    return f"; kernels of {count} predicted, not measured" if ops else ""


class KernelChoices:
    """The hook that tells what was chosen since the last step."""

    def __init__(self) -> None:
        self._told = 0

    def __call__(self, state: State, result: StepResult) -> None:
        from unfreeze.kernels.choice.choose import choices

        made = choices()
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
