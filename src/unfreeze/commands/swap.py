"""unfreeze swap MODEL "layers.*.self_attn" moba --out DIR: put a part in place of a model's own.

The parts, with formula, source and options: unfreeze pretrain --help parts. --init copy keeps the parameters
that the part has too, under the same name; --init new draws all of the part's. Everything outside keeps its
bytes, packed experts too. Swapping a swapped model adds to its parts. `full` where attention is full already
copies the model. It works file by file: to continue after an interruption, run the same command again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from pydantic import Field
from tyro.conf import Positional, arg

from unfreeze.config.parse import Folder, Frozen, ModelName, parse, writing
from unfreeze.core.command import Common
from unfreeze.core.errors import ConfigError
from unfreeze.core.events import RESOLVED
from unfreeze.core.torchrun import started
from unfreeze.core.units import format_count
from unfreeze.job.end.card import hub_id, license_of
from unfreeze.job.opening.device import say
from unfreeze.tracking.live import LoadProgress

if TYPE_CHECKING:
    from unfreeze.compress.shards import Record
    from unfreeze.compress.swap import Swap
    from unfreeze.models import Decoder


class Config(Frozen):
    model: Annotated[ModelName, Positional, arg(metavar="MODEL")] = Field(
        description="checkpoint folder, or Hugging Face id org/name"
    )
    at: Annotated[str, Positional, arg(metavar="PLACE")] = Field(
        description='names of modules: "layers.*.self_attn", "layers.2-5.self_attn", "layers.*"'
    )
    part: Annotated[str, Positional, arg(metavar="PART")] = Field(
        description="the part to put there; unfreeze pretrain --help parts lists them"
    )
    out: Folder = Field(description="folder to write")
    init: Literal["copy", "new"] = Field(
        default="copy",
        description="copy: keep parameters that the part has, too; new: draw all of its parameters",
    )
    set: tuple[str, ...] = Field(default=(), description="options of the part, for example block=64 chosen=3")
    seed: int = Field(default=0, ge=0, description="seed of the drawn parameters")


def main(arguments: list[str], common: Common) -> dict[str, Any]:
    """Parse the arguments and call `swap`."""
    config = parse(Config, arguments, command="swap", description=__doc__ or "", positional=True)
    return swap(config, common)


def swap(config: Config, common: Common) -> dict[str, Any]:
    """Write the model with the part in place of its own.

    -> path, family, parts (of config.json), layers, modules, copied, drawn, dropped (parameters of the
    replaced modules), kept (bytes of all others are the model's own), same.
    """
    from unfreeze.checkpoint import open_checkpoint

    if started().size > 1:
        raise ConfigError(
            f"swap runs in one process, but torchrun started {started().size}",
            next="start it without torchrun",
        )
    check_folders(config)
    manifest, out = open_checkpoint(config.model, progress=say(common)), Path(config.out)
    if not manifest.tensors:
        raise ConfigError(f"{manifest.path} has no weights", next="give a folder with *.safetensors files")
    if out.resolve() == manifest.path.resolve():
        raise ConfigError(f"out = {out} is the model's own folder", next="give another folder")

    from unfreeze.compress import swap as by_shards
    from unfreeze.compress.swapped import Wish

    # refuse everything that can be refused before writing a byte
    wish = Wish(config.at, config.part, options_of(config.set), config.init, config.seed)
    work = by_shards.opened(manifest, wish)
    try:
        with writing(out, "out"), LoadProgress("swap", quiet=common.quiet) as progress:
            record = by_shards.write(work, out, progress)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"finished files stay in {out}; to continue, run the same command again"
        ) from None
    result = _facts(work, out)
    if record is not None:
        with writing(out, "out"):
            record.more["settings"] = {name: result[name] for name in ("parts", "copied", "drawn", "dropped")}
            record.write(out)
            _write_card(work, config, result, record)
    for line in _sentences(result, config):
        say(common)(line)
    return result


def check_folders(config: Config) -> None:
    """Raise ConfigError for a run or an adapter in place of a model."""
    folder = Path(config.model).expanduser()
    if (folder / "config.json").is_file():
        return
    if (folder / RESOLVED).is_file() and (folder / "model" / "config.json").is_file():
        raise ConfigError(
            f"{folder} is a training run, not a checkpoint", next=f"swap its model: {folder / 'model'}"
        )
    from unfreeze.compress.swapped import refuse_adapters

    refuse_adapters(folder)


def options_of(words: Sequence[str]) -> dict[str, Any]:
    """Options from NAME=VALUE: numbers, true and false as in JSON, all else a text."""
    options: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not (name and equals and value):
            raise ConfigError(f"--set {word!r} is no NAME=VALUE", next="--set block=64 chosen=3")
        if name in options:
            raise ConfigError(f"--set has {name!r} twice", next=f"keep one: --set {word}")
        options[name] = _value(value)
    return options


def _value(text: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, (bool, int, float)) else text


def _facts(work: Swap, out: Path) -> dict[str, Any]:
    """The result's figures; the written folder is opened and resolved again."""
    from unfreeze.checkpoint import open_checkpoint
    from unfreeze.compress.swap import resolved

    written = open_checkpoint(out)
    resolved(written)
    change = work.difference
    return {
        "path": str(out),
        "family": work.before.shape.model_type,
        "parts": written.config.get("parts", []),
        "layers": list(change.layers),
        "modules": len(change.modules),
        "copied": _count(work.after, change.copied),
        "drawn": _count(work.after, change.drawn),
        "dropped": _count(work.before, change.dropped),
        "tensors": [len(change.copied), len(change.drawn), len(change.dropped)],
        "same": work.nothing,
    }


def _count(model: Decoder, names: Iterable[str]) -> int:
    """Number of weights; of a packed matrix those that it stands for, not the words that hold them."""
    tensors, total, packed = model.state_dict(), 0, set[str]()
    for name in names:
        path, _, last = name.rpartition(".")
        module = model.get_submodule(path)
        codec = getattr(module, "codec", None)
        if codec is None or last not in codec.suffixes:
            total += tensors[name].numel()
        elif path not in packed:
            packed.add(path)
            total += cast(Any, module).packed.numel
    return total


def _sentences(result: dict[str, Any], config: Config) -> list[str]:
    place = f"{config.at} ({result['modules']} module{'s' if result['modules'] > 1 else ''})"
    if result["same"]:
        return [
            f"{config.part} is what {place} already is: {result['path']} is a copy of the model",
            f"Its layers: unfreeze inspect {result['path']}",
        ]
    counts = [f"{format_count(result[name])} parameters {name}" for name in ("copied", "drawn", "dropped")]
    return [
        f"{config.part} in place of {place}: {', '.join(counts)}; all others keep their bytes",
        f"wrote {result['path']}. Train it: unfreeze sft --train all --model {result['path']} --data FILE",
    ]


def _write_card(work: Swap, config: Config, result: dict[str, Any], record: Record) -> None:
    """Write README.md: the model it was made of, its parts, and its licence. It names no local paths."""
    from unfreeze.checkpoint.beside import BASE_CARD, CARD
    from unfreeze.checkpoint.manifest import SWAP
    from unfreeze.checkpoint.save import write_file

    identity, folder = hub_id(config.model), work.manifest.path
    name = identity or folder.resolve().name
    lines = ["---", *([f"base_model: {identity}"] if identity else []), "pipeline_tag: text-generation"]
    lines += [*license_of(folder), "tags:", "- unfreeze", "---", "", f"# {name}, with other parts", ""]
    lines += [
        f"Made of {name} with unfreeze (`unfreeze swap`, init {config.init}, seed {config.seed}). No other"
        " program computes these parts. It is not trained yet.",
        "",
    ]
    lines += [f"- `{json.dumps(part, ensure_ascii=False)}`" for part in result["parts"]]
    lines += ["", f"`{SWAP}` has the settings and the files' SHA-256.", ""]
    if BASE_CARD in record.more["carried"]:
        lines += [f"The base's own card is [{BASE_CARD}]({BASE_CARD}).", ""]
    write_file(Path(config.out) / CARD, "\n".join(lines))
