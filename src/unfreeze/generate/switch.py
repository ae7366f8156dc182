"""Several adapters of one model; at most one is attached."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from unfreeze.adapters import attached, detach, load_adapter, put, sites
from unfreeze.core.errors import UserError, nearest

BASE = "base"


class Switch:
    """The loaded adapters, by name. "base" is the model without any.

    All stay in memory; switching moves no tensor.
    """

    def __init__(self, model: nn.Module, name: str):
        """`name`: name of the adapter that is already attached to the model, if any."""
        self._model = model
        self._adapters: dict[str, dict[str, nn.Module]] = {BASE: {}}
        self.now = BASE
        if sites(model):
            self._keep(name)

    @property
    def names(self) -> list[str]:
        return list(self._adapters)

    def load(self, name: str, folder: Path) -> None:
        """Load an adapter beside the others, and attach it. Raises AdapterError as load_adapter does."""
        before = self.now
        detach(self._model)
        try:
            load_adapter(self._model, folder)
        except UserError:
            self.use(before)
            raise
        self._model.requires_grad_(False)
        self._keep(name)

    def use(self, name: str) -> None:
        """Attach only the named adapter. Raises UserError for an unknown name."""
        if name not in self._adapters:
            known = ", ".join(self._adapters)
            raise UserError(
                f"there is no {name!r} here{nearest(name, self._adapters)}", next=f"one of {known}"
            )
        detach(self._model)
        put(self._model, self._adapters[name])
        self.now = name

    def _keep(self, name: str) -> None:
        free = (f"{name}-{n}" if n > 1 else name for n in range(1, len(self._adapters) + 2))
        self.now = next(other for other in free if other not in self._adapters)
        self._adapters[self.now] = attached(self._model)
