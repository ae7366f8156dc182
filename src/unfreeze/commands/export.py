"""unfreeze export RUN --layout per-expert|peft: write a run's adapter in a layout other tools load.

What was written is read again and compared before it says done.

per-expert   two-dimensional tensors per expert, as vLLM and prime-rl read them; Kimi's default.
peft         one stacked pair per layer through target_parameters, as peft >= 0.19 loads it over transformers.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from tyro.conf import Positional, arg

from unfreeze.config.parse import Folder, Frozen, ModelName, parse, writing
from unfreeze.core.command import Common
from unfreeze.core.errors import ConfigError
from unfreeze.job.device import say
from unfreeze.tracking.live import LoadProgress


class Config(Frozen):
    run: Annotated[ModelName, Positional, arg(metavar="RUN")] = Field(
        description="run folder or adapter folder"
    )
    layout: Literal["per-expert", "peft"] = Field(
        default="per-expert", description="how the adapter is laid out on disk"
    )
    out: Folder = Field(default="", description="folder to write; default RUN/export-<layout>")


def main(arguments: list[str], common: Common) -> dict[str, Any]:
    """As `export`."""
    return export(
        parse(Config, arguments, command="export", description=__doc__ or "", positional=True), common
    )


def export(config: Config, common: Common) -> dict[str, Any]:
    """Load the run's adapter on its base, write it, verify ΔW of every site in the written file.

    -> path, layout, verified.
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
    target = Path(config.out) if config.out else Path(config.run) / f"export-{config.layout}"
    with writing(target, "out"):
        save_adapter(model, target, config.layout, base_name=source.base, prefix=manifest.prefix)
    verified = verify_adapter(model, target)
    say(common)(
        f"{target}: {config.layout} layout; {verified.matrices} matrices at {verified.sites} places read"
        f" again and equal ({verified.nonzero} not zero, largest relative difference"
        f" {verified.max_difference:.1g})"
    )
    return {"path": str(target), "layout": config.layout, "verified": asdict(verified)}
