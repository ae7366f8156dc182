"""Train every expert of a checkpoint that is larger than the memory allowed: experts come from disk.

`unfreeze dev bench beyond --gigabytes 12 --tokens 2048`, about 10 minutes, one of them to write the
checkpoint.

A Kimi-format model with INT4 experts: hidden 2048, 10 experts of width 8192 in each layer of 0.28 GB, one
expert a token, no shared expert, and as many layers as make up the gigabytes. Codes are random bits, scales
give weights of a trained model's spread. LoRA rank 4 on every linear layer, bf16, documents of 512 tokens,
everything recomputed. Each side is a process of its own; its peak is its whole resident memory, from its
start to its last step.
--beside adds the same job with all experts in memory, in turn: what streaming costs, and whether the losses
are the same to the bit. The checkpoint is removed at the end unless --checkpoint names a folder, where it is
found the next time; --clean removes it from there.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from benchmarks.harness.training import MeasuredInTurn, appended_to, command, computed_here, say, show
from unfreeze.config.parse import Folder, parse
from unfreeze.core.command import Common
from unfreeze.core.errors import ConfigError, DoesNotFit
from unfreeze.core.units import format_bytes

if TYPE_CHECKING:
    import torch

    from benchmarks.harness.sides import Side, Worker

LENGTH = 512
LORA: dict[str, Any] = {"rank": 4, "alpha": 8.0, "targets": ("all-linear",)}
SIZES = {
    "hidden_size": 2048,
    "n_routed_experts": 10,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 8192,
    "n_shared_experts": 0,
    "intermediate_size": 4096,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 256,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "vocab_size": 8192,
}
BESIDE = 2**30  # bytes that stay free on the disk
DRAWN = 2**26  # random bits that are drawn; every expert gets them from another place on


class Config(MeasuredInTurn):
    """What is measured."""

    gigabytes: float = Field(default=12.0, gt=0, description="10^9 bytes of experts, in whole layers")
    tokens: int = Field(default=2048, ge=LENGTH, description="tokens per step, a multiple of 512")
    steps: int = Field(default=2, ge=1, description="timed steps of each side; the median counts")
    beside: bool = Field(default=False, description="measure the job with all experts in memory too")
    recompute: Literal["layers", "selective", "elementwise", "nothing"] = Field(
        default="layers", description="what is computed again in backward"
    )
    optimizer_moments: Literal["float32", "int8"] = Field(
        default="float32", description="AdamW's moments, 8 bytes per trained parameter or 2.03"
    )
    checkpoint: Folder = Field(
        default="",
        description="folder where the random checkpoint is, or is made and kept; default: a temporary one",
    )
    clean: bool = Field(default=False, description="remove the checkpoint from that folder at the end")


def main(arguments: list[str], common: Common) -> dict[str, Any]:
    """-> rows, file."""
    return measure(parse(Config, arguments, command="dev bench beyond", description=__doc__ or ""), common)


def measure(
    config: Config, common: Common, sizes: Mapping[str, int] | None = None, length: int = LENGTH
) -> dict[str, Any]:
    """The benchmark at any size: `sizes` replace those of SIZES, `length` is that of a document."""
    from benchmarks.cases.growth import whole_documents
    from benchmarks.harness.rows import Stamp
    from benchmarks.harness.sides import Side, Sides

    whole_documents((config.tokens,), length)
    model = model_of(config.gigabytes, sizes or {})
    stamp = Stamp.now("beyond", command("beyond", config), threads=config.threads or None)
    job = {"documents": config.tokens // length, "length": length, "recompute": config.recompute}
    job["moments"] = config.optimizer_moments
    with checkpoint(config, model, common) as folder:
        places = ["disk", *(["device"] if config.beside else [])]
        plans = {place: planned(folder, place, config, length) for place in places}
        sides = [
            Side(
                NAMES[place],
                "benchmarks.cases.beyond:trainer",
                job | {"checkpoint": str(folder), "experts": place},
                threads=config.threads,
            )
            for place in places
        ]
        with Sides(sides, say(common)) as running:
            running.take_turns("step", warmup=config.warmup, rounds=config.steps)
            found = {side.name: results(side, config.tokens) for side in running}
        on_disk = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    settings = {
        "shape": {name: model[name] for name in (*SIZES, "num_hidden_layers")},
        "checkpoint_bytes": on_disk,
        "rank": LORA["rank"],
        "targets": list(LORA["targets"]),
        "dtype": computed_here(),
        "length": length,
        "tokens_per_step": config.tokens,
        "recompute": config.recompute,
        "optimizer_moments": config.optimizer_moments,
        "steps": config.steps,
        "warmup": config.warmup,
    }
    rows = []
    streamed = found[NAMES["disk"]]
    for place in places:
        entry = found[NAMES[place]]
        compared: dict[str, Any] = {"loss": "nothing to compare with: without --beside"}
        if config.beside:
            apart = [abs(a - b) for a, b in zip(entry["losses"], streamed["losses"], strict=True)]
            compared = {"losses, against the other side": max(apart)}
        entry |= {"planned_bytes": plans[place], "correctness": compared, "note": note(entry, on_disk)}
        if place == "device":
            entry["first_side_speed"] = streamed["tokens_per_second"] / entry["tokens_per_second"]
            entry["first_side_memory"] = streamed["peak_bytes"] / entry["peak_bytes"]
        rows.append(stamp.row(NAMES[place], settings, entry))
    return show(rows, appended_to(config), common)


NAMES = {"disk": "experts from disk", "device": "experts in memory"}


def model_of(gigabytes: float, sizes: Mapping[str, int]) -> dict[str, Any]:
    """config.json with as many layers as make up the gigabytes, and a dense one before them."""
    from benchmarks.harness import kimi
    from unfreeze.quant import Int4

    each = {**SIZES, **sizes}
    D, I = each["hidden_size"], each["moe_intermediate_size"]
    codec = Int4(group_size=32)
    of_layer = each["n_routed_experts"] * (2 * codec.nbytes(I, D) + codec.nbytes(D, I))
    layers = max(1, -(-int(gigabytes * 1e9) // of_layer))
    made = kimi.config(**each, num_hidden_layers=1 + layers)
    made["first_k_dense_replace"] = 1
    return made


@contextmanager
def checkpoint(config: Config, model: Mapping[str, Any], common: Common) -> Iterator[Path]:
    """The folder of the checkpoint, which is written where it is not there yet.

    Raises ConfigError where the folder holds another model, DoesNotFit where the disk has no room.
    """
    from unfreeze.checkpoint.manifest import read_json

    given = Path(config.checkpoint) if config.checkpoint else None
    with tempfile.TemporaryDirectory(prefix="unfreeze-bench-") as temporary:
        folder = (given or Path(temporary)) / "model"
        try:
            if (folder / "config.json").is_file():
                if read_json(folder / "config.json") != model:
                    raise ConfigError(
                        f"checkpoint = {config.checkpoint!r} holds another model than this benchmark's",
                        next="give an empty folder, or the --gigabytes that it was made with",
                    )
            else:
                there = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
                need, free = int(config.gigabytes * 1.2e9), shutil.disk_usage(there).free
                if need + BESIDE > free:
                    raise DoesNotFit(
                        f"gigabytes = {config.gigabytes:g} takes {format_bytes(need)} of the disk of"
                        f" {folder}; {format_bytes(free)} are free, {format_bytes(BESIDE)} of them stay so",
                        next="--gigabytes 2, or --checkpoint FOLDER on another disk",
                    )
                say(common)(f"writing {config.gigabytes:g} GB to {folder}")
                write(folder, dict(model))
            yield folder
        finally:
            if given is not None and config.clean:
                shutil.rmtree(folder, ignore_errors=True)
                say(common)(f"removed {folder}")


def write(folder: Path, model: dict[str, Any]) -> None:
    """The random checkpoint: codes are one run of random bits, taken from another place for each tensor."""
    import math

    import torch

    from benchmarks.harness.checkpoints import make
    from unfreeze.checkpoint.tensors import TORCH_DTYPE

    # codes 1 to 15 are -7 to 7, and 0 once more instead of -8: with a mean of -0.5 each matrix would send
    # all tokens the same way, and after a few layers all would choose one expert
    bits = torch.randint(0, 256, (DRAWN,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    bits += 8 * (bits % 16 == 0)
    bits += 128 * (bits < 16)
    taken = 0

    def packed(codec: Any, shape: torch.Size, generator: torch.Generator) -> dict[str, torch.Tensor]:
        nonlocal taken
        parts = {}
        for suffix, (kind, sizes) in codec.parts(*shape[-2:]).items():
            dtype, whole = TORCH_DTYPE[kind], (*shape[:-2], *sizes)
            if dtype.is_floating_point:  # codes are -7 to 7 and so have a spread of 4.2
                noise = 1 + 0.1 * torch.randn(whole, generator=generator)
                parts[suffix] = (noise / (4.2 * math.sqrt(shape[-1]))).to(dtype)
                continue
            size = math.prod(whole) * dtype.itemsize
            taken = (taken + 8191 * 64) % DRAWN
            runs = bits.roll(-taken).repeat(-(-size // DRAWN))[:size]
            parts[suffix] = runs.view(dtype).view(whole)
        return parts

    make(folder, model, packed)


def planned(folder: Path, place: Any, config: Config, length: int) -> int:
    """Bytes of the plan, without the interpreter."""
    from unfreeze import models
    from unfreeze.adapters import LoraConfig
    from unfreeze.checkpoint import open_checkpoint
    from unfreeze.core.layout import RESIDENT
    from unfreeze.parallel.plan import plan_here

    manifest = open_checkpoint(str(folder))
    return plan_here(
        models.shape(manifest.config),
        manifest,
        LoraConfig(**LORA),
        tokens=config.tokens,
        dtype=computed_here(),
        device="cpu",
        layout=RESIDENT.but(recompute=config.recompute, experts=place),
        optimizer_moments=config.optimizer_moments,
        longest=length,
    ).total


def trainer(
    checkpoint: str, experts: Any, documents: int, length: int, recompute: Any, moments: Any = "float32"
) -> Worker:
    """A Worker that trains with experts from there. calls: step() -> loss, what came, how many experts
    learned; state() as in job.trainer."""
    import torch

    from benchmarks.harness.job import training_worker
    from benchmarks.harness.sides import Worker
    from unfreeze.adapters import LoraConfig, attach
    from unfreeze.checkpoint import open_checkpoint
    from unfreeze.core.layout import RESIDENT
    from unfreeze.generate.open import open_model
    from unfreeze.parallel.machine import resident_bytes
    from unfreeze.parallel.placement.residency import Streamed

    before, dtype = resident_bytes(), getattr(torch, computed_here())
    model = open_model(open_checkpoint(checkpoint), dtype, "cpu", layout=RESIDENT.but(experts=experts))
    attach(model, LoraConfig(**LORA), seed=0)
    worker = training_worker(
        model, documents, length, recompute, check=dict, runtime_bytes=before, moments=moments
    )
    residency = model.residency if isinstance(model.residency, Streamed) else None

    def step() -> dict[str, Any]:
        if residency is not None:
            residency.take()
        found = worker.calls["step"]()
        given = [moe.counts_E for moe in model.moe_layers().values()]  # of this step
        found["experts_trained"] = sum(int((count > 0).sum()) for count in given)
        if residency is None:
            return found
        came = residency.take()
        return found | {
            "reads": came.reads,
            "read_bytes": came.bytes,
            "transfer_seconds": came.seconds,
            "waited_seconds": came.waited,
            "hidden": came.hidden,
        }

    experts_there = sum(moe.experts.num_experts for moe in model.moe_layers().values())
    return Worker({**worker.calls, "step": step}, {**worker.facts, "experts": experts_there})


def results(side: Side, tokens: int) -> dict[str, Any]:
    """A side's figures; peak_bytes from its start to its last step."""
    seconds = sorted(side.values("step", "seconds"))
    state = side.call("state")
    replies = side.replies["step"]
    came = {
        name: [reply[name] for reply in replies]
        for name in ("reads", "read_bytes", "transfer_seconds", "waited_seconds", "hidden")
        if name in replies[0]
    }
    return {
        "tokens_per_second": tokens / side.median("seconds"),
        "fastest": tokens / seconds[0],
        "slowest": tokens / seconds[-1],
        "step_seconds": side.median("seconds"),
        "cpu_seconds": side.median("cpu_seconds"),
        "steps": len(seconds),
        "peak_bytes": max(side.peak(), side.loaded["load_peak"]),
        "load_peak_bytes": side.loaded["load_peak"],
        "load_seconds": side.loaded["load_seconds"],
        "state_bytes": {name: state[name] for name in ("weights", "gradients", "optimizer")},
        "runtime_bytes": side.loaded["runtime_bytes"],
        "trained_parameters": side.loaded["trained_parameters"],
        "experts": side.loaded["experts"],
        "experts_trained": min(reply["experts_trained"] for reply in replies),
        "losses": [reply["loss"] for reply in replies],
        **came,
    }


def note(entry: Mapping[str, Any], on_disk: int) -> str:
    """The figures that the target is about, in a sentence."""
    words = (
        f"{format_bytes(on_disk)} on disk, peak {format_bytes(entry['peak_bytes'])},"
        f" {entry['experts_trained']:,} of {entry['experts']:,} experts trained in each step,"
        f" {entry['step_seconds']:.1f} s a step"
    )
    if not entry.get("reads", [0])[-1]:
        return words
    rate = entry["read_bytes"][-1] / max(1e-9, entry["transfer_seconds"][-1]) / 1e9
    return (
        f"{words}; {entry['reads'][-1]} layers ({format_bytes(entry['read_bytes'][-1])}) came at {rate:.1f}"
        f" GB/s, {entry['hidden'][-1]:.0%} of it under computation"
    )
