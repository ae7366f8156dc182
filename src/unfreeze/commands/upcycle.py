"""unfreeze upcycle MODEL --experts 8 --top-k 2 --out DIR: make a mixture of experts of a dense model.

llama and mistral become mixtral, qwen2 becomes qwen2_moe, qwen3 becomes qwen3_moe. Every expert is a copy of
the dense MLP, so the outputs stay the same. With --add-experts N a mixture gets N more, which stay closed
until training opens them. It works file by file: to continue after an interruption, run the same
command again.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field
from tyro.conf import Positional, arg

from unfreeze.config.parse import Folder, Frozen, ModelName, parse, writing
from unfreeze.core.command import Common
from unfreeze.core.errors import ConfigError
from unfreeze.core.torchrun import started
from unfreeze.core.units import format_count
from unfreeze.job.end.card import hub_id, license_of, usage
from unfreeze.job.opening.device import say
from unfreeze.tracking.live import LoadProgress

if TYPE_CHECKING:
    from unfreeze.checkpoint import Manifest
    from unfreeze.compress.shards import Record
    from unfreeze.compress.upcycle import Work

EXPERTS, TOP_K = 8, 2


class Config(Frozen):
    model: Annotated[ModelName, Positional, arg(metavar="MODEL")] = Field(
        description="checkpoint folder, or Hugging Face id org/name"
    )
    out: Folder = Field(description="folder to write")
    experts: int | None = Field(default=None, description=f"experts of a layer; default {EXPERTS}")
    top_k: int | None = Field(default=None, description=f"experts that a token uses; default {TOP_K}")
    add_experts: int | None = Field(
        default=None, description="experts that a mixture gets in addition, closed at first"
    )
    noise: float = Field(
        default=0.0,
        ge=0,
        description="noise on the new experts' weights, relative to their size; 0: exact copies",
    )
    drop: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="share of the new experts' channels that is drawn anew (Drop-Upcycling: 0.5)",
    )
    router_std: float = Field(
        default=0.02, gt=0, description="standard deviation of the new router's weights"
    )
    seed: int = Field(default=0, ge=0, description="seed of the router, the noise and the new channels")


def main(arguments: list[str], common: Common) -> dict[str, Any]:
    """Parse the arguments and call `upcycle`."""
    config = parse(Config, arguments, command="upcycle", description=__doc__ or "", positional=True)
    return upcycle(config, common)


def upcycle(config: Config, common: Common) -> dict[str, Any]:
    """Write the mixture and say how much its outputs differ.

    -> path, family, experts, top_k, added (ranges of the new experts), change (of a layer's output, relative;
    0 for closed experts), parameters, active (per token), dense (of the model before), carried.
    """
    from unfreeze.checkpoint import open_checkpoint

    if started().size > 1:
        raise ConfigError(
            f"upcycle runs in one process, but torchrun started {started().size}",
            next=f"without torchrun: unfreeze upcycle {config.model} --out {config.out}",
        )
    manifest, out = open_checkpoint(config.model, progress=say(common)), Path(config.out)
    check(config, manifest, out)

    from unfreeze.compress import upcycle as by_shards
    from unfreeze.compress.draws import Change
    from unfreeze.compress.grow import grown_work

    # refuse everything that can be refused before writing a byte
    change = Change(config.seed, config.noise, config.drop)
    flags: dict[str, Any] = {name: getattr(config, name) for name in ("noise", "drop", "router_std", "seed")}
    if config.add_experts is not None:
        flags["add_experts"] = config.add_experts
        work = grown_work(manifest, config.add_experts, change)
    else:
        flags |= {"experts": config.experts or EXPERTS, "top_k": config.top_k or TOP_K}  # 0 is refused
        wish = by_shards.Upcycle(flags["experts"], flags["top_k"], change, config.router_std)
        work = by_shards.dense_work(manifest, wish)
    try:
        with writing(out, "out"), LoadProgress("upcycle", quiet=common.quiet) as progress:
            record = by_shards.write(work, out, by_shards.inputs_of(manifest, **flags), progress)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"finished files stay in {out}; to continue, run the same command again"
        ) from None
    result = _facts(config, manifest, work, out) | {"carried": record.more["carried"]}
    record.more["settings"] = {
        name: result[name] for name in ("family", "experts", "top_k", "added", "change")
    }
    with writing(out, "out"):
        record.write(out)
        _write_card(out, manifest, config, result, record)
    for line in _sentences(result, config):
        say(common)(line)
    return result


def check(config: Config, manifest: Manifest, out: Path) -> None:
    """Raise ConfigError for a model or numbers that cannot be upcycled."""
    from unfreeze import models

    if not manifest.tensors:
        raise ConfigError(f"{manifest.path} has no weights", next="give a folder with *.safetensors files")
    if out.resolve() == manifest.path.resolve():
        raise ConfigError(f"out = {out} is the model's own folder", next="give another folder")
    if manifest.is_packed() or manifest.scheme() is not None:
        raise ConfigError(
            f"{manifest.path} is quantized; experts are made of unquantized weights",
            next="take the bf16 release, or write one: unfreeze merge RUN --to bf16 --out DIR",
        )
    experts = _experts(manifest)
    if config.add_experts is None and experts:
        raise ConfigError(
            f"{manifest.path} is a mixture of {experts} experts already",
            next=f"unfreeze upcycle {config.model} --add-experts {experts} --out {config.out}",
        )
    if config.add_experts is not None:
        if not experts:
            kind = manifest.config.get("model_type")
            raise ConfigError(
                f"--add-experts is for mixtures; {manifest.path} is a dense {kind}",
                next=f"unfreeze upcycle {config.model} --experts 8 --top-k 2 --out {config.out}",
            )
        if config.experts is not None or config.top_k is not None:
            raise ConfigError(
                "--add-experts keeps a mixture's own experts and top-k",
                next="leave out --experts and --top-k",
            )
        if config.add_experts < 1:
            raise ConfigError(
                f"--add-experts {config.add_experts}: at least 1", next=f"--add-experts {experts}"
            )
        models.shape(manifest.config)
        return
    _check_counts(EXPERTS if config.experts is None else config.experts, config)


def _check_counts(experts: int, config: Config) -> None:
    top_k = TOP_K if config.top_k is None else config.top_k
    if experts < 2:
        raise ConfigError(f"--experts {experts}: a mixture has at least 2", next="--experts 8 --top-k 2")
    if top_k > experts:
        raise ConfigError(
            f"--top-k {top_k} is more than --experts {experts}", next=f"--top-k {min(TOP_K, experts)}"
        )
    if top_k < 2:
        raise ConfigError(
            f"--top-k {top_k}: the weights of the chosen sum to 1, so with one the router gets no gradient",
            next="--top-k 2",
        )


def _experts(manifest: Manifest) -> int:
    """The number of experts of a checkpoint; 0 for a dense one and for a family that is not known."""
    from unfreeze import models
    from unfreeze.core.errors import CheckpointError

    try:
        return models.shape(manifest.config).num_experts
    except CheckpointError:
        if manifest.config.get("model_type") in models.FAMILIES.keys() | models.ONLY_HERE:
            raise  # a family that is known, with a field that is not
        return 0


def _facts(config: Config, manifest: Manifest, work: Work, out: Path) -> dict[str, Any]:
    """The result's figures, read back from the written folder."""
    from math import prod

    from unfreeze import models
    from unfreeze.checkpoint import open_checkpoint
    from unfreeze.compress.measured import largest_change

    written = open_checkpoint(out)
    shape, before = models.shape(written.config), _experts(manifest)
    total = sum(prod(info.shape) for info in written.tensors.values())
    assert shape.moe is not None
    each = shape.moe.matrices * (shape.moe.latent or shape.hidden_size) * shape.moe.intermediate_size
    idle = each * (shape.num_experts - shape.experts_per_token)
    layers = sum(shape.is_moe(layer) for layer in range(shape.num_layers))
    return {
        "path": str(out),
        "family": shape.model_type,
        "experts": shape.num_experts,
        "top_k": shape.experts_per_token,
        "added": f"{before}-{shape.num_experts - 1}" if before else "",
        "change": 0.0 if before else largest_change(manifest, written, config.seed),
        "parameters": total,
        "active": total - idle * layers,
        "dense": sum(prod(info.shape) for info in manifest.tensors.values()),
    }


def _sentences(result: dict[str, Any], config: Config) -> list[str]:
    counts = f"{format_count(result['parameters'])} weights, {format_count(result['active'])} per token"
    lines = [
        f"{result['family']}: {result['experts']} experts, {result['top_k']} per token; {counts}"
        f" (before: {format_count(result['dense'])})"
    ]
    if result["added"]:
        lines += [
            "The outputs are the same: the new experts are never chosen until training raises their bias.",
            f'Train the new ones alone: unfreeze pretrain … --training.only "experts {result["added"]}"'
            " --optimizer.balance-rate 0.02",
        ]
    elif config.noise or config.drop:
        lines.append(
            f"warning: --noise and --drop change the outputs: of an MLP by {100 * result['change']:.2g} %"
        )
    else:
        lines.append(f"The outputs are the same: an MLP's differ by {result['change']:.1e} (float32)")
    return [*lines, f"wrote {result['path']}. Its plan: unfreeze plan --model {result['path']}"]


def _write_card(
    out: Path, manifest: Manifest, config: Config, result: dict[str, Any], record: Record
) -> None:
    """Write README.md: the model it was made of, how, and its licence. It names no local paths."""
    from unfreeze.checkpoint.beside import BASE_CARD, CARD
    from unfreeze.checkpoint.manifest import UPCYCLE
    from unfreeze.checkpoint.save import write_file

    identity = hub_id(config.model)
    name = identity or manifest.path.resolve().name
    how = "copies of experts" if result["added"] else "copies of the dense MLP"
    how += f", noise {config.noise:g}" if config.noise else ""
    how += f", {100 * config.drop:g} % of the channels drawn anew" if config.drop else ""
    lines = ["---", *([f"base_model: {identity}"] if identity else []), "pipeline_tag: text-generation"]
    lines += [
        *license_of(manifest.path),
        "tags:",
        "- moe",
        "- unfreeze",
        "---",
        "",
        f"# {name}, upcycled",
        "",
    ]
    lines += [
        f"A mixture of {result['experts']} experts, {result['top_k']} per token, made of {name} with"
        f" unfreeze: {how}, seed {config.seed}. It is not trained yet.",
        "",
    ]
    lines += usage("FOLDER_OR_ID_OF_THIS_MODEL", str(result["family"]))
    lines += [f"`{UPCYCLE}` has the settings and the files' SHA-256.", ""]
    if BASE_CARD in record.more["carried"]:
        lines += [f"The base's own card is [{BASE_CARD}]({BASE_CARD}).", ""]
    write_file(out / CARD, "\n".join(lines))
