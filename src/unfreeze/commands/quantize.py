"""unfreeze quantize MODEL --to int4|int8|fp8|mxfp4|nvfp4|nf4 --out DIR: a bf16 model in a quantized format.

Each weight becomes the nearest number of the format. Of a mixture the routed experts are quantized, of a
dense model every linear layer. Router, norms and embeddings stay as they are; the head too, unless --modules
names it. It works file by file: to continue after an interruption, run the same command again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field
from tyro.conf import Positional, arg

from unfreeze.commands import quantize_rows
from unfreeze.commands.quantize_rows import name
from unfreeze.config.columns import Columns
from unfreeze.config.parse import Folder, Frozen, ModelName, parse, writing
from unfreeze.config.sft import PackedFormat, PackedModules
from unfreeze.core.command import Common
from unfreeze.core.errors import CheckpointError, ConfigError
from unfreeze.core.field import about
from unfreeze.core.torchrun import started
from unfreeze.core.units import format_bytes
from unfreeze.job.end.card import hub_id, license_of, usage
from unfreeze.job.opening.device import say
from unfreeze.tracking.live import LoadProgress
from unfreeze.untrusted.json_object import read_object

if TYPE_CHECKING:
    from unfreeze.compress.quantize.write import Record
    from unfreeze.compress.work import MergeWork

TITLES = {
    "int4": "INT4 (compressed-tensors pack-quantized, groups of 32)",
    "int8": "INT8 (compressed-tensors pack-quantized, a scale per row)",
    "fp8": "FP8 e4m3 (compressed-tensors float-quantized, a scale per row)",
    "mxfp4": "MXFP4 (e2m1, a power of two per 32 weights)",
    "nvfp4": "NVFP4 (compressed-tensors nvfp4-pack-quantized)",
    "nf4": "NF4 (bitsandbytes, double quantization)",
}


class Config(Frozen):
    model: Annotated[ModelName, Positional, arg(metavar="MODEL")] = Field(
        description="checkpoint folder in bf16, or Hugging Face id org/name"
    )
    to: PackedFormat = Field(
        description="the format to write: Kimi-K2's INT4, INT8, FP8, MXFP4, NVFP4, or bitsandbytes' NF4"
    )
    out: Folder = Field(description="folder to write")
    modules: tuple[PackedModules, ...] = Field(
        default=(),
        description=(
            "what to quantize: experts (the routed ones; default of a mixture), all-linear (default of a"
            " dense model), lm_head in addition"
        ),
    )
    calibrate: Folder = Field(
        default="", description="rows to correct the rounding on; without it: round to nearest"
    )
    method: Literal["gptq", "awq", "awq-gptq"] = Field(
        default="gptq",
        description=(
            "with --calibrate: gptq makes up for rounded columns in later ones; awq scales input channels,"
            " then rounds to nearest; awq-gptq: both"
        ),
    )
    measure: Folder = Field(
        default="",
        description=(
            "rows to measure perplexity and KL to the original on; default: a tenth of --calibrate's rows"
        ),
    )
    columns: Columns = Field(
        default=(),
        description="column names in --calibrate and --measure, FIELD=COLUMN",
        json_schema_extra=about("Options", name="data.columns", alias="columns"),
    )


def main(arguments: list[str], common: Common) -> dict[str, Any]:
    """Parse the arguments and call `quantize`."""
    config = parse(Config, arguments, command="quantize", description=__doc__ or "", positional=True)
    return quantize(config, common)


def quantize(config: Config, common: Common) -> dict[str, Any]:
    """Write the quantized checkpoint and say how far its weights moved.

    -> path, to, modules, before and after (bytes), bits (per quantized weight), bits_all (per weight of the
    whole checkpoint), moved (group -> matrices, weights, error), kept (groups that stayed, and why), carried,
    calibrated and measured (quantize_rows.py; None without rows).
    """
    from unfreeze.checkpoint import open_checkpoint

    if config.columns and not (config.calibrate or config.measure):
        raise ConfigError(
            "--columns has no effect without rows", next="--calibrate FILE or --measure FILE, or leave it out"
        )
    if started().size > 1:
        raise ConfigError(
            f"quantize runs in one process, but torchrun started {started().size}",
            next=f"without torchrun: unfreeze quantize {config.model} --to {config.to} --out {config.out}",
        )
    refuse_adapters(Path(config.model), config)
    if config.method != "gptq" and not config.calibrate:
        raise ConfigError(
            f"--method {config.method} needs rows to choose its scales on", next="add --calibrate FILE"
        )
    if config.method != "gptq" and config.to == "nvfp4":
        raise ConfigError(
            f"--method {config.method} is not built for nvfp4: q, k and v, gate and up share a number there,"
            " which the search of scales does not know",
            next="--method gptq",
        )

    from unfreeze.compress import shards
    from unfreeze.compress.quantize import write as by_shards
    from unfreeze.compress.quantize.work import quantize_work

    out, new = Path(config.out), f"a new folder: --out {config.out}-{config.to}"
    if out.resolve() != Path(config.model).resolve():
        shards.refuse_others(by_shards.Record({}), out, new)  # before a model is downloaded
    manifest = open_checkpoint(config.model, progress=say(common))
    if out.resolve() == manifest.path.resolve():
        raise ConfigError(f"out = {out} is the model's own folder", next="give another folder")

    # refuse everything that can be refused before writing a byte
    work = quantize_work(manifest, config.to, config.modules)
    by_shards.refuse_other_weights(work, out, new)
    assert work.packing is not None
    if (tokenizer := manifest.path / "tokenizer.json").is_file():
        read_object(tokenizer, CheckpointError)  # carried over: with a cut one the result would not load
    inputs = by_shards.inputs_of(manifest, config.to, tuple(work.packing.modules))
    rows = quantize_rows.rows_of(config.calibrate, config.measure, config.columns, manifest, say(common))
    inputs["calibrate"] = quantize_rows.digest(rows)
    if rows is not None and rows.corrected_on:
        inputs["method"] = config.method
    try:
        with writing(out, "out"):
            calibration = quantize_rows.calibrate(rows, work, out, inputs, common.quiet)
            if calibration is not None:
                scales = calibration if config.method != "gptq" else None
                work = quantize_work(manifest, config.to, config.modules, calibration.round, scales)
            with LoadProgress("quantize", quiet=common.quiet) as progress:
                record = by_shards.write(work, out, inputs, progress)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"finished files stay in {out}; to continue, run the same command again"
        ) from None
    result = facts(config, work, record) | quantize_rows.results(rows, calibration, work, record, out)
    quantize_rows.mark_scaled(result)
    names = ("before", "after", "bits", "bits_all", "moved", "kept", "calibrated", "measured")
    record.more |= {name: result[name] for name in names}
    with writing(out, "out"):
        record.write(out)
        write_card(config, work, record, result)
    quantize_rows.remove(out)
    for line in (*quantize_rows.sentences(result), *sentences(result, work)):
        say(common)(line)
    return result


def refuse_adapters(folder: Path, config: Config) -> None:
    """Raise ConfigError for a run with adapters, or an adapter's folder, in place of a model."""
    from unfreeze.core.events import RESOLVED
    from unfreeze.generate.source import ADAPTER_CONFIG

    whole = (folder / "config.json").is_file() or (folder / "model" / "config.json").is_file()
    if not whole and ((folder / RESOLVED).is_file() or (folder / ADAPTER_CONFIG).is_file()):
        how = f"--to {config.to}" if config.to == "int4" else "--to bf16"
        then = "" if config.to == "int4" else ", then quantize DIR"
        raise ConfigError(
            f"{folder} has adapters; quantize takes a whole model",
            next=f"unfreeze merge {folder} {how} --out DIR{then}",
        )


def facts(config: Config, work: MergeWork, record: Record) -> dict[str, Any]:
    """The result's figures."""
    from unfreeze.compress.quantize.work import kept
    from unfreeze.quant.codec import parts_nbytes

    assert work.packing is not None
    before = work.manifest.nbytes
    after = sum(parts_nbytes(weight.outputs.values()) for weight in work.weights)
    weights = sum(prod(info.shape) for info in work.manifest.tensors.values())
    packed = [weight for weight in work.weights if weight.to is not None]
    size = sum(parts_nbytes(weight.outputs.values()) for weight in packed)
    return {
        "path": config.out,
        "to": config.to,
        "modules": list(work.packing.modules),
        "before": before,
        "after": after,
        "bits": 8 * size / sum(moved.weights for moved in record.moved.values()),
        "bits_all": 8 * after / weights,
        "moved": {group: asdict(moved) for group, moved in record.moved.items()},
        "kept": [asdict(row) for row in kept(work)],
        "carried": record.more["carried"],
    }


def sentences(result: dict[str, Any], work: MergeWork) -> Iterator[str]:
    """Sizes; how far the weights moved; what stayed and why; who reads it; the next command."""
    yield (
        f"{format_bytes(result['before'])} are {format_bytes(result['after'])} in {result['to']}:"
        f" {result['bits']:.2f} bits for each quantized weight, {result['bits_all']:.2f} over all"
    )
    rows = (
        f"{name(group)} {100 * moved['error']:.2g} % ({moved['matrices']:,} matrices)"
        for group, moved in result["moved"].items()
    )
    yield f"The weights moved, relative to their size: {', '.join(rows)}"
    for why in dict.fromkeys(row["why"] for row in result["kept"]):
        groups = ", ".join(
            f"{name(row['group'])} ({format_bytes(row['nbytes'])})"
            for row in result["kept"]
            if row["why"] == why
        )
        yield f"Left as they are ({why}): {groups}"
    yield reader(result["to"], work)
    path = result["path"]
    train = f"unfreeze sft --model {path} --data FILE"
    yield f"wrote {path}. To talk with it: unfreeze chat {path}; to train it: {train}"


def reader(to: str, work: MergeWork) -> str:
    """One sentence: the programs that load this format with these modules."""
    from unfreeze.compress.quantize.declared import NOT_IN_TRANSFORMERS
    from unfreeze.models import ONLY_HERE

    kind = work.model.shape.model_type
    if kind in ONLY_HERE:
        return f"No other program has models of type {kind}."
    if kind in NOT_IN_TRANSFORMERS:
        return f"transformers 5.23 does not load quantized weights of a {kind}. unfreeze does."
    experts = any(weight.group == "experts" for weight in work.weights if weight.to is not None)
    if kind == "gpt_oss" and to == "mxfp4":
        return "transformers 5.23 and servers load it as they load gpt-oss's own release."
    if to == "fp8" and experts:
        return (
            "transformers 5.23 loads it with compressed-tensors; vLLM 0.33 and SGLang 0.5.23 refuse such FP8"
            " experts."
        )
    if to == "mxfp4":
        other = "leaves its experts empty" if experts else "refuses it"
        return f"transformers 5.23 loads it with compressed-tensors; SGLang 0.5.23 {other}."
    if to in ("int4", "int8", "fp8") or (to == "nvfp4" and not experts):
        return "transformers 5.23 loads it with compressed-tensors."
    if to == "nvfp4":
        return (
            "transformers 5.23 has no loader for NVFP4 experts: it leaves out a number of each and computes"
            " nonsense. unfreeze loads it."
        )
    if experts:
        return (
            "transformers 5.23, vLLM 0.33 and SGLang 0.5.23 have no loader for NF4 experts. unfreeze loads"
            " it."
        )
    return "transformers 5.23 and SGLang 0.5.23 load it with bitsandbytes; vLLM 0.33 does not."


def write_card(config: Config, work: MergeWork, record: Record, result: dict[str, Any]) -> None:
    """Write README.md: the model, the format, how far its weights moved, who loads it; no local paths."""
    from unfreeze.checkpoint.beside import BASE_CARD, CARD
    from unfreeze.checkpoint.manifest import QUANTIZE
    from unfreeze.checkpoint.save import write_file

    manifest = work.manifest
    identity = hub_id(config.model)
    base = identity or manifest.path.resolve().name
    lines = ["---", *([f"base_model: {identity}"] if identity else []), "pipeline_tag: text-generation"]
    lines += ["base_model_relation: quantized"] if identity else []
    lines += [*license_of(manifest.path), "tags:", "- unfreeze", f"- {config.to}", "---", ""]
    lines += [f"# {base}, {config.to.upper()}", ""]
    way = "" if result["calibrated"] else " to nearest"
    lines += [
        f"{base} in {TITLES[config.to]}, rounded{way} with unfreeze. Weights only: activations are not"
        f" rounded. {format_bytes(result['before'])} became {format_bytes(result['after'])},"
        f" {result['bits']:.2f} bits for each quantized weight.",
        "",
        "| weights | matrices | moved, relative to their size |",
        "|---|---|---|",
    ]
    for group, moved in result["moved"].items():
        lines.append(f"| {name(group)} | {moved['matrices']:,} | {100 * moved['error']:.2g} % |")
    for row in result["kept"]:
        lines.append(f"| {name(row['group'])} | {row['matrices']:,} | 0: as in the base ({row['why']}) |")
    lines += ["", *quantize_rows.card(result), reader(config.to, work), ""]
    lines += usage("FOLDER_OR_ID_OF_THIS_MODEL", str(manifest.config.get("model_type")))
    lines += [f"`{QUANTIZE}` has the settings and the files' SHA-256.", ""]
    if BASE_CARD in record.more["carried"]:
        lines += [f"The base's own card is [{BASE_CARD}]({BASE_CARD}).", ""]
    write_file(Path(config.out) / CARD, "\n".join(lines))
