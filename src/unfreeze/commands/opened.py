"""The model that is planned, and the second one of a run that has one: shapes and dtypes, no memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from unfreeze.config.lora import LoraConfig
from unfreeze.core.errors import ConfigError
from unfreeze.teach.second import Beside

if TYPE_CHECKING:
    import torch

    from unfreeze.checkpoint import Manifest
    from unfreeze.commands.plan import Config
    from unfreeze.models import Decoder
    from unfreeze.parallel.plan.aside import Aside
    from unfreeze.parallel.plan.counts import Counts
    from unfreeze.parallel.plan.sizes import Sizes
    from unfreeze.teach.second import Second


Build = Callable[["torch.dtype", bool], "Decoder"]
"""(dtype of the computation, whether frozen matrices stay as stored) -> the model on "meta"."""


@dataclass
class Opened:
    """A model on "meta" (shapes, dtypes, no memory) and what its blocks say: the same in every plan of it.

    One for each dtype that it is computed in, and on a CPU one whose frozen matrices stay as stored.
    """

    build: Build
    start: Manifest
    second: Second | None = None
    models: dict[tuple[torch.dtype, bool], tuple[Decoder, Counts]] = field(default_factory=dict)
    found: dict[tuple[torch.dtype, str, tuple[str, ...] | None], Sizes] = field(default_factory=dict)

    def model(self, dtype: torch.dtype, lora: LoraConfig | None, kind: str) -> tuple[Decoder, Counts]:
        """As it is held on a device of that kind, and what it counts."""
        from unfreeze.parallel.plan.counts import counts

        key = dtype, lora is not None and kind == "cpu"
        if key not in self.models:
            model = self.build(*key)
            self.models[key] = model, counts(model)
        return self.models[key]

    def sizes(self, dtype: torch.dtype, lora: LoraConfig | None, kind: str) -> Sizes:
        """For a device of that kind; the adapters' rank is not in it."""
        from unfreeze.parallel.plan import measure_sizes

        key = dtype, kind, lora and lora.targets
        if key not in self.found:
            self.found[key] = measure_sizes(self.model(dtype, lora, kind)[0], lora, kind)
        return self.found[key]

    def aside(
        self, dtype: torch.dtype, kind: str, length: int, *, every_weight: bool
    ) -> Callable[[int], Aside] | None:
        """Tokens of a device's micro-batch -> what the second model takes beside them."""
        import torch

        second = self.second
        if second is None:
            return None
        # a GPU that is not here is taken to have this machine's block of logits, as work_of takes it
        here = kind == "cpu" or torch.cuda.is_available()
        device = torch.device(kind if here else "cpu")

        @cache
        def aside(tokens: int) -> Aside:
            return second.aside(Beside(self.start, tokens, min(length, tokens), dtype, device, every_weight))

        return aside


def open_for_plan(config: Config) -> Opened:
    """From a checkpoint's headers or a config.json alone."""
    from unfreeze import models
    from unfreeze.checkpoint import open_checkpoint
    from unfreeze.checkpoint.manifest import Manifest, read_config

    path = Path(config.model)
    if path.suffix == ".json" and not path.is_file():
        raise ConfigError(
            f"model = {config.model!r} is not a file", next="give --model a release's config.json"
        )
    if path.suffix == ".json" or ((path / "config.json").is_file() and not list(path.glob("*.safetensors"))):
        fields = read_config(path)
        start = Manifest(path=path, config=fields, tensors={}, prefix="", files=())
        return Opened(lambda dtype, kept: models.from_config(fields, dtype, as_stored=kept), start)
    start = open_checkpoint(config.model)
    shape = models.shape(start.config)
    return Opened(lambda dtype, kept: models.meta_model(shape, start, dtype, as_stored=kept), start)
