"""The model to plan for on "meta" (shapes and dtypes, no memory), with a run's second model and answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
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
    from unfreeze.job.planning.plan import Answering
    from unfreeze.models import Decoder
    from unfreeze.models.from_shape import Parameters
    from unfreeze.parallel.plan.aside import Aside
    from unfreeze.parallel.plan.counts import Counts
    from unfreeze.parallel.plan.sizes import Sizes
    from unfreeze.teach.second import Second


Build = Callable[["torch.dtype", bool], "Decoder"]
"""(dtype of the computation, True if frozen matrices stay as stored) -> the model on "meta"."""


@dataclass
class Opened:
    """A model on "meta" (shapes, dtypes, no memory) and its sizes, shared by all plans for it.

    It is built once per dtype, and once more for CPUs with frozen matrices as stored.
    second, answers: those of the run, if any (job/parts.py). new: True for a model that the run makes.
    """

    build: Build
    start: Manifest
    second: Second | None = None
    answers: Answering | None = None
    new: bool = False
    models: dict[tuple[torch.dtype, bool], tuple[Decoder, Counts]] = field(default_factory=dict)
    known_sizes: dict[tuple[torch.dtype, str, tuple[object, ...] | None], Sizes] = field(default_factory=dict)

    def model(self, dtype: torch.dtype, lora: LoraConfig | None, kind: str) -> tuple[Decoder, Counts]:
        """Return (the model as a device of that kind holds it, its counts)."""
        from unfreeze.parallel.plan.counts import counts

        key = dtype, lora is not None and kind == "cpu"
        if key not in self.models:
            model = self.build(*key)
            self.models[key] = model, counts(model)
        return self.models[key]

    @property
    def parameters(self) -> Parameters:
        """Numbers of parameters of a model without packed weights."""
        import torch

        from unfreeze.models.from_shape import count_parameters

        return count_parameters(self.model(torch.float32, None, "cpu")[0])

    def sizes(self, dtype: torch.dtype, lora: LoraConfig | None, kind: str) -> Sizes:
        """Sizes for a device of that kind. They do not depend on the adapters' rank."""
        from unfreeze.checkpoint.packing import packing_bytes
        from unfreeze.parallel.plan import measure_sizes

        key = dtype, kind, lora and (lora.targets, lora.dora, lora.start)
        if key not in self.known_sizes:
            sizes = measure_sizes(self.model(dtype, lora, kind)[0], lora, kind)
            self.known_sizes[key] = replace(sizes, packing=packing_bytes(self.start))
        return self.known_sizes[key]

    def packed(self, to: str, modules: tuple[str, ...]) -> Opened:
        """The same with its base packed while it is loaded."""
        from unfreeze import models
        from unfreeze.compress.quantize.onload import packed_on_load

        start = packed_on_load(self.start, to, modules)
        shape = models.shape(start.config)
        return Opened(
            lambda dtype, as_stored: models.meta_model(shape, start, dtype, as_stored=as_stored),
            start,
            self.second,
            self.answers,
        )

    def aside(
        self, dtype: torch.dtype, kind: str, length: int, *, every_weight: bool
    ) -> Callable[[int], Aside] | None:
        """Return a function: tokens of a device's micro-batch -> memory of the second model, if any."""
        import torch

        second = self.second
        if second is None:
            return None
        # assume this machine's block of logits for a GPU that is not here, as work_of does
        here = kind == "cpu" or torch.cuda.is_available()
        device = torch.device(kind if here else "cpu")

        @cache
        def aside(tokens: int) -> Aside:
            return second.aside(Beside(self.start, tokens, min(length, tokens), dtype, device, every_weight))

        return aside


def open_for_plan(config: Config, new: Manifest | None = None) -> Opened:
    """Open the model from a checkpoint's headers, or from a config.json alone; packed, if it is to be.

    new: a model whose config.json is not written yet.
    """
    opened = _as_it_is(config, new)
    return opened if config.quantize is None else opened.packed(config.quantize, config.quantize_modules)


def _as_it_is(config: Config, new: Manifest | None) -> Opened:
    from unfreeze import models
    from unfreeze.checkpoint import open_checkpoint
    from unfreeze.checkpoint.manifest import Manifest, read_config
    from unfreeze.models.longer import lengthened

    path = Path(config.model)
    if new is not None:
        start = lengthened(new, config.rope.longer)
        built = start.config
        return Opened(lambda dtype, as_stored: models.from_config(built, dtype, as_stored=as_stored), start)
    if path.suffix == ".json" and not path.is_file():
        raise ConfigError(
            f"model = {config.model!r} is not a file", next="give --model a release's config.json"
        )
    if path.suffix == ".json" or ((path / "config.json").is_file() and not list(path.glob("*.safetensors"))):
        alone = Manifest(path=path, config=read_config(path), tensors={}, prefix="", files=())
        start = lengthened(alone, config.rope.longer)
        fields = start.config
        return Opened(lambda dtype, as_stored: models.from_config(fields, dtype, as_stored=as_stored), start)
    start = lengthened(open_checkpoint(config.model), config.rope.longer)
    shape = models.shape(start.config)
    return Opened(lambda dtype, as_stored: models.meta_model(shape, start, dtype, as_stored=as_stored), start)
