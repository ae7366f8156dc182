"""unfreeze export RUN --for peft|vllm|sglang: write a run's adapter as another program reads it.

What was written is read again and compared before it says done.

peft: one stacked pair per layer of experts, as peft >= 0.19 loads it over transformers. RUN/adapter is laid
out like that already.

vllm, sglang: two-dimensional tensors per expert, with one r and one lora_alpha for all.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator
from tyro.conf import Positional, arg

from unfreeze.config.parse import Folder, Frozen, ModelName, parse, writing
from unfreeze.core.command import Common
from unfreeze.core.errors import ConfigError
from unfreeze.job.device import say
from unfreeze.tracking.live import LoadProgress

Reader = Literal["peft", "vllm", "sglang"]
LAYOUT: dict[Reader, Literal["peft", "per-expert"]] = {
    "peft": "peft",
    "vllm": "per-expert",
    "sglang": "per-expert",
}


class Config(Frozen):
    FLAT: ClassVar[dict[str, str]] = {"run": "run", "for": "reader"}

    run: Annotated[ModelName, Positional, arg(metavar="RUN")] = Field(
        description="run folder or adapter folder"
    )
    reader: Reader = Field(default="peft", description="the program that will read the adapter")
    layout: Literal["peft", "vllm", "sglang", "per-expert"] | None = Field(
        default=None, description="earlier name of --for; per-expert stands for vllm"
    )
    out: Folder = Field(default="", description="folder to write; default RUN/export-<reader>")

    @model_validator(mode="after")
    def _one_reader(self) -> Config:
        """`layout` is an earlier name of `for`."""
        if self.layout and "reader" in self.model_fields_set and self.reader != self.earlier:
            raise ValueError(f"for {self.reader} and layout {self.layout} are two readers: give --for alone")
        return self

    @property
    def earlier(self) -> Reader:
        """The reader that `layout` stands for."""
        return "vllm" if self.layout == "per-expert" else self.layout or "peft"

    @property
    def read_by(self) -> Reader:
        return self.earlier if self.layout else self.reader


def main(arguments: list[str], common: Common) -> dict[str, Any]:
    """As `export`."""
    return export(
        parse(Config, arguments, command="export", description=__doc__ or "", positional=True), common
    )


def export(config: Config, common: Common) -> dict[str, Any]:
    """Load the run's adapter on its base, write it, verify ΔW of every site in the written file.

    -> path, for, layout, verified.
    """
    from unfreeze.generate.source import open_source

    if not Path(config.run).is_dir():
        raise ConfigError(
            f"{config.run} is not a folder",
            next="give a run's folder (runs/<name>), or the folder of an adapter",
        )
    source, manifest = open_source(config.run, say(common))
    if source.adapter is None:
        raise ConfigError(
            f"{config.run} has no adapter to export; it is a whole model", next=f"use {source.base} as it is"
        )
    from unfreeze.adapters import load_adapter, save_adapter, verify_adapter
    from unfreeze.generate.open import open_model

    with LoadProgress(quiet=common.quiet) as progress:
        model = open_model(manifest, progress=progress)
    load_adapter(model, source.adapter)
    layout = LAYOUT[config.read_by]
    target = Path(config.out) if config.out else Path(config.run) / f"export-{config.read_by}"
    with writing(target, "out"):
        save_adapter(model, target, layout, base_name=source.base, prefix=manifest.prefix)
    verified = verify_adapter(model, target)
    say(common)(
        f"{target}: for {config.read_by}; {verified.matrices} matrices at {verified.sites} places read"
        f" again and equal ({verified.nonzero} not zero, largest relative difference"
        f" {verified.max_difference:.1g})"
    )
    return {"path": str(target), "for": config.read_by, "layout": layout, "verified": asdict(verified)}
