"""Find a weight that is NaN or infinite."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from unfreeze.core.rows import here


def bad_weight(model: nn.Module, *, updated: bool) -> tuple[str, str] | None:
    """("NaN" or "infinity", name) of the first weight with such a value; None if all are finite.

    updated: True once training has changed the trainable weights; they are then skipped. Of sharded weights,
    only local shards are checked.
    """
    for name, whole in [*model.named_parameters(), *model.named_buffers()]:
        tensor = here(whole)
        if not (whole.requires_grad and updated) and is_bad(tensor):
            return "NaN" if bool(tensor.isnan().any()) else "infinity", name
    return None


def is_bad(tensor: Any) -> bool:
    """True if it is a tensor of floats that are not all finite."""
    return (
        isinstance(tensor, Tensor)
        and tensor.is_floating_point()
        and not bool(tensor.detach().isfinite().all())
    )
