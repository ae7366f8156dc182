"""unfreeze export --for gguf|ollama: a run's merged model, or a checkpoint, as one file for llama.cpp."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from unfreeze.config.parse import writing
from unfreeze.core.command import Common
from unfreeze.core.errors import ConfigError
from unfreeze.core.files import write_file
from unfreeze.core.units import format_bytes, plural
from unfreeze.job.opening.device import say
from unfreeze.job.opening.source import open_as_trained
from unfreeze.tracking.live import LoadProgress

if TYPE_CHECKING:
    from unfreeze.checkpoint import Manifest
    from unfreeze.compress.gguf.vocabulary import Vocabulary
    from unfreeze.compress.gguf.weights import Weights
    from unfreeze.data.tokens.tokenizer import Tokenizer
    from unfreeze.generate.source import ModelSource

FILE_TYPES = {"BF16": 32, "Q8_0": 7}  # gguf.LlamaFileType
MODELFILE = "Modelfile"


class Asked(Protocol):
    """The fields of the command that are read here (commands/export.py)."""

    @property
    def run(self) -> str: ...
    @property
    def out(self) -> str: ...
    @property
    def base(self) -> str: ...
    @property
    def type(self) -> Literal["bf16", "q8_0"]: ...
    @property
    def adapter_only(self) -> bool: ...
    @property
    def read_by(self) -> str: ...


def export_gguf(config: Asked, common: Common) -> dict[str, Any]:
    """Write the GGUF, and for Ollama a Modelfile beside it.

    -> path, for, type, bytes, tensors, pre (the tokenizer's splitter), modelfile.
    """
    from unfreeze import models
    from unfreeze.compress.gguf.families import family_of, remarks, settings

    # first what no option can change, and without torch: at once
    source, manifest = open_as_trained(config.run, say(common), config.base)
    shape = models.shape(manifest.config)
    family = family_of(shape)
    if config.adapter_only and source.adapter is None:
        raise ConfigError(f"{config.run} has no adapter: it is a whole model", next="without --adapter-only")
    path = _path(config)

    from unfreeze.compress.gguf.file import nbytes, need_gguf, write_gguf

    need_gguf()
    import torch

    from unfreeze.compress.deltas import Deltas, NoChanges
    from unfreeze.compress.gguf.lora import planned_lora
    from unfreeze.compress.gguf.tensors import planned
    from unfreeze.compress.gguf.vocabulary import vocabulary_of
    from unfreeze.compress.gguf.weights import Weights

    # refuse everything that can be refused before writing a byte
    model = models.meta_model(shape, manifest, torch.float32)
    deltas = Deltas(model, source.adapter) if source.adapter is not None else None
    weights, to = Weights(manifest, model, deltas or NoChanges()), config.type.upper()
    lines: list[str] = []
    vocabulary: Vocabulary | None = None
    if deltas is not None and config.adapter_only:
        tensors, table = planned_lora(weights, deltas, family)
    else:
        shape = weights.shape  # with the adapter's new tokens
        vocabulary = vocabulary_of(manifest.tokens, shape.vocab_size, family.arch, manifest.path)
        tensors = planned(weights, family, to)
        own = {f"{family.arch}.{key}": value for key, value in settings(shape, family)}
        table = {"general.type": "model", "general.file_type": FILE_TYPES[to], **own}
        lines = [*remarks(shape, family), *vocabulary.remarks]
    table = {"general.name": _name(config, source), "general.quantization_version": 2, **table}
    with writing(path.parent, "out"), LoadProgress("export", quiet=common.quiet) as progress:
        add = [vocabulary.add_to] if vocabulary is not None else []
        write_gguf(path, family.arch, table, tensors, add, progress)
        beside = _modelfile(path, manifest, source, vocabulary) if config.read_by == "ollama" else ""
    for line in [*lines, *_said_of(path, config, weights, len(tensors), beside)]:
        say(common)(line)
    return {
        "path": str(path),
        "for": config.read_by,
        "type": "f32" if config.adapter_only else config.type,
        "bytes": path.stat().st_size,
        "data_bytes": sum(map(nbytes, tensors)),
        "tensors": len(tensors),
        "pre": vocabulary.pre if vocabulary is not None else None,
        "modelfile": beside,
    }


def _path(config: Asked) -> Path:
    """The file to write: --out FILE.gguf, or in --out FOLDER, or in RUN/export-<reader>. Refused if there."""
    run = Path(config.run)
    if config.out.endswith(".gguf"):
        path = Path(config.out)
    elif config.out or run.is_dir():
        folder = Path(config.out) if config.out else run / f"export-{config.read_by}"
        kind = "lora" if config.adapter_only else config.type
        path = folder / f"{run.resolve().name}-{kind}.gguf"
    else:
        raise ConfigError(f"{config.run} is not a folder, so out has no default", next="--out FOLDER")
    beside = [path.parent / MODELFILE] if config.read_by == "ollama" else []
    for file in [path, *beside]:
        if file.exists():
            raise ConfigError(f"{file} exists", next="remove it, or give another --out")
    return path


def _name(config: Asked, source: ModelSource) -> str:
    """general.name: the last part of the run's or model's name."""
    return Path(config.run).resolve().name if Path(config.run).is_dir() else source.base.rpartition("/")[2]


def _modelfile(path: Path, manifest: Manifest, source: ModelSource, vocabulary: Vocabulary | None) -> str:
    """Write the Modelfile beside the GGUF -> its path."""
    from unfreeze.compress.gguf.modelfile import form_of, modelfile
    from unfreeze.config.template import template_values
    from unfreeze.data.tokens.tokenizer import load_tokenizer

    assert vocabulary is not None
    variables = template_values(source.template_variables)
    tokenizer = load_tokenizer(manifest.tokens, template_variables=variables, base=manifest.path)
    form = form_of(_renderer(tokenizer)) if tokenizer.template is not None else None
    file = path.parent / MODELFILE
    write_file(file, modelfile(path.name, form, vocabulary.stops))
    return str(file)


def _renderer(tokenizer: Tokenizer) -> Any:
    """The chat template as a function of the turns; llama.cpp and Ollama add BOS by themselves."""

    def render(turns: Sequence[dict[str, str]], opened: bool) -> str:
        text = tokenizer.chat.render(list(turns), add_generation_prompt=opened)
        bos = tokenizer.variables.get("bos_token")
        return text.removeprefix(bos) if isinstance(bos, str) and tokenizer.add_bos else text

    return render


def _said_of(path: Path, config: Asked, weights: Weights, tensors: int, beside: str) -> Iterator[str]:
    """Say the file that was written, and the command that reads it."""
    size = format_bytes(path.stat().st_size)
    yield f"wrote {path}: {plural(tensors, 'tensor')} of {weights.shape.kind}, {size}"
    if config.adapter_only:
        yield f"llama-cli -m BASE.gguf --lora {path}"
    elif beside:
        known = "TEMPLATE" in Path(beside).read_text(encoding="utf-8")
        if not known:
            yield "the chat template is not text around turns, so Ollama takes the file's own, if it knows it"
        yield f"ollama create {path.stem} -f {beside}"
    else:
        yield f"llama-cli -m {path}"
