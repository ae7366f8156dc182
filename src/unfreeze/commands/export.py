"""unfreeze export RUN --for peft|vllm|sglang|gguf|ollama: write a run for another program.

The written file is read back and compared with the run's adapter.

peft: one stacked A/B pair per MoE layer, as peft >= 0.19 loads it over transformers. RUN/adapter already
has this layout.

vllm, sglang: two-dimensional tensors per expert, with one r and one lora_alpha for all.

gguf, ollama: the merged model, or any checkpoint, as one file for llama.cpp (bf16 or q8_0); for Ollama with a
Modelfile. --adapter-only: the adapter alone, as GGUF-LoRA.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator
from tyro.conf import Positional, arg

from unfreeze.checkpoint.manifest import read_json
from unfreeze.commands.export_gguf import export_gguf
from unfreeze.config.adapter import rounded_as
from unfreeze.config.parse import Folder, Frozen, ModelName, parse, writing
from unfreeze.core.command import Common
from unfreeze.core.errors import ConfigError
from unfreeze.core.events import RESOLVED
from unfreeze.core.field import about
from unfreeze.job.end.card import CARD, HUB_ID, hub_id, refuse_other_files, write_beside
from unfreeze.job.end.push import check_push, push
from unfreeze.job.merge_aware import write_rounded
from unfreeze.job.opening.device import say
from unfreeze.job.opening.source import open_as_trained
from unfreeze.job.trained import TOKENIZER_FILES
from unfreeze.models import ONLY_HERE
from unfreeze.tracking.live import LoadProgress

if TYPE_CHECKING:
    from unfreeze.adapters.readers import Drop
    from unfreeze.adapters.readers import Reader as ReaderRules
    from unfreeze.checkpoint import Manifest
    from unfreeze.models import Decoder

Reader = Literal["peft", "vllm", "sglang", "gguf", "ollama"]
GGUF = ("gguf", "ollama")


class Config(Frozen):
    run: Annotated[ModelName, Positional, arg(metavar="RUN")] = Field(
        description="run folder or adapter folder; for gguf also a checkpoint"
    )
    reader: Reader = Field(
        default="peft",
        description="the program that will read it",
        json_schema_extra=about("Options", name="for"),
    )
    layout: Literal["peft", "vllm", "sglang", "per-expert"] | None = Field(
        default=None, description="old name of --for; per-expert means vllm"
    )
    base: ModelName = Field(
        default="", description="base checkpoint of an adapter, if the one it names is not on this machine"
    )
    base_id: str = Field(default="", description="Hub id org/name of the base; default: the adapter's own")
    out: Folder = Field(default="", description="folder to write, or FILE.gguf; default RUN/export-<reader>")
    type: Literal["bf16", "q8_0"] = Field(
        default="bf16", description="weights of a GGUF: bfloat16, or 8 bits with a scale per 32"
    )
    adapter_only: bool = Field(default=False, description="for gguf: the adapter alone, as GGUF-LoRA")
    push: str = Field(
        default="", description="also upload it to the Hub as org/name; a new repository is private"
    )
    yes: bool = Field(default=False, description="upload without asking")

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        """Check base_id, and that `layout` (the earlier name of `for`) does not contradict `for`."""
        if self.base_id and not HUB_ID.fullmatch(self.base_id):
            raise ValueError(f"base_id = {self.base_id!r} is not a Hub id (org/name)")
        if self.layout and "reader" in self.model_fields_set and self.reader != self.earlier:
            raise ValueError(
                f"for {self.reader} and layout {self.layout} contradict each other: give --for alone"
            )
        only = {"type", "adapter_only"} & self.model_fields_set
        if only and self.read_by not in GGUF:
            raise ValueError(f"{min(only).replace('_', '-')} is for gguf: give --for gguf")
        if self.read_by in GGUF and (self.push or self.base_id):
            raise ValueError("push and base-id are for adapters of peft, vllm and sglang")
        if self.read_by == "ollama" and self.adapter_only:
            raise ValueError("ollama needs a whole model: leave adapter-only out, or give --for gguf")
        return self

    @property
    def earlier(self) -> Reader:
        """The reader that `layout` stands for."""
        return "vllm" if self.layout == "per-expert" else self.layout or "peft"

    @property
    def read_by(self) -> Reader:
        return self.earlier if self.layout else self.reader


def main(arguments: list[str], common: Common) -> dict[str, Any]:
    """Parse the arguments and call `export`."""
    return export(
        parse(Config, arguments, command="export", description=__doc__ or "", positional=True), common
    )


def export(config: Config, common: Common) -> dict[str, Any]:
    """Load the run's adapter on its base, write it, and verify ΔW of every module in the written file.

    -> path, pushed, for, layout, verified, dropped (names that the reader doesn't apply).
    """
    if config.read_by in GGUF:
        return export_gguf(config, common)
    if not Path(config.run).is_dir():
        raise ConfigError(
            f"{config.run} is not a folder",
            next="give a run's folder (runs/<name>), or the folder of an adapter",
        )
    if config.push:
        check_push(config.push, yes=config.yes, common=common)
    source, manifest = open_as_trained(config.run, say(common), config.base)
    if (kind := manifest.config.get("model_type")) in ONLY_HERE:
        what = "it" if source.adapter is None else "the adapter"
        raise ConfigError(
            f"no program but unfreeze has models of type {kind}, so nothing could load {what}",
            next=f"unfreeze generate {config.run}, or unfreeze serve {config.run}",
        )
    if source.adapter is None:
        from unfreeze.compress.gguf.families import FAMILIES

        whole = shlex.quote(config.run)
        raise ConfigError(
            f"{config.run} has no adapter to export; others read {source.base}, a whole model, as it is",
            next=f"unfreeze export {whole} --for gguf" if kind in FAMILIES else f"unfreeze serve {whole}",
        )
    name = config.base_id or _named(source.adapter) or source.base
    if config.push and not (config.base_id or hub_id(name)):
        raise ConfigError(
            f"the adapter names its base {name}, a folder that only this machine has",
            next="give the base's id on the Hub: --base-id org/name",
        )
    target = Path(config.out) if config.out else Path(config.run) / f"export-{config.read_by}"
    exported = (Path(config.run), source.adapter, manifest.path)
    if target.resolve() in [folder.resolve() for folder in exported]:
        raise ConfigError(f"out = {target} is the folder being exported", next="give another folder")
    refuse_other_files(target, manifest.path, TOKENIZER_FILES)
    from unfreeze.adapters import load_adapter, save_adapter, verify_adapter
    from unfreeze.adapters.layouts import dropped
    from unfreeze.adapters.readers import READERS
    from unfreeze.generate.open import open_model

    with LoadProgress(quiet=common.quiet) as progress:
        model = open_model(manifest, progress=progress)
    load_adapter(model, source.adapter)
    reader = READERS[config.read_by]
    left_out = dropped(model, reader)
    with writing(target, "out"):
        save_adapter(model, target, base_name=name, prefix=manifest.prefix, reader=reader)
        run = Path(config.run) if (Path(config.run) / RESOLVED).is_file() else None
        write_beside(
            target,
            manifest,
            name,
            run,
            TOKENIZER_FILES,
            reader=reader.name,
            left_out=list(left_out),
            base_id=config.base_id,
            rounded=rounded_as(source.adapter),
        )
        write_rounded(target, None)  # it is exported as LoRA
    verified = verify_adapter(model, target, without=left_out)
    for line in _said_of(reader, left_out, model, manifest, target):
        say(common)(line)
    say(common)(
        f"wrote {target} for {reader.name} and read it back: {verified.matrices} matrices of {verified.sites}"
        f" modules match ({verified.nonzero} of them not zero, largest relative difference"
        f" {verified.max_difference:.1g})"
    )
    files = {"adapter_model.safetensors", "adapter_config.json", CARD, *TOKENIZER_FILES}
    address = push(target, config.push, files, yes=config.yes) if config.push else ""
    if config.push:
        say(common)(f"uploaded: {address}" if address else "not uploaded")
    return {
        "path": str(target),
        "pushed": address,
        "for": reader.name,
        "layout": reader.layout,
        "verified": asdict(verified),
        "dropped": list(left_out),
    }


def _named(adapter: Path) -> str:
    """Base model named in an adapter's config."""
    return str(read_json(adapter / "adapter_config.json").get("base_model_name_or_path") or "")


def _said_of(
    reader: ReaderRules, left_out: Mapping[str, Drop], model: Decoder, manifest: Manifest, target: Path
) -> Iterator[str]:
    """Say which modules the reader ignores and why, how to avoid that, and which flag the reader needs."""
    from unfreeze.adapters import sites
    from unfreeze.models.targets import targets_of

    program, adapted = f"{reader.name} {reader.version}", sites(model)
    model_type = str(manifest.config.get("model_type"))
    if issue := (reader.refuses or {}).get(model_type):
        yield f"warning: {program} cannot load adapters of {model_type}: {issue}"
    for drop in dict.fromkeys(left_out.values()):
        names = [name for name, why in left_out.items() if why is drop]
        leaves = sorted({name.rsplit(".", 1)[-1] for name in names})
        issue = f" ({drop.issue})" if drop.issue else ""
        yield (
            f"warning: {program} does not apply {' and '.join(leaves)}: {drop.why}{issue}. {len(names)} of"
            f" {len(adapted)} adapted modules are left out, so its answers differ from the model you trained"
        )
    if left_out:
        targets = " ".join(targets_of([site.name for site in adapted if site.name not in left_out], model))
        yield f"next time: --lora.targets {targets} trains what {reader.name} applies"
    rank = int(read_json(target / "adapter_config.json")["r"])
    if flag := reader.room_for(rank):
        yield f"rank {rank}: start {reader.name} with {flag}"
