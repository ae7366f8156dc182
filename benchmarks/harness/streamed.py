"""Training with experts that stream from disk: the checkpoint of --gigabytes, and the sides."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import shapes
from benchmarks.harness.case import Run, computed_here
from benchmarks.harness.checkpoints import make
from benchmarks.harness.job import planned, training_worker
from benchmarks.harness.sides import Side, Worker
from benchmarks.harness.training import speeds
from unfreeze.adapters import LoraConfig, attach
from unfreeze.checkpoint import open_checkpoint
from unfreeze.checkpoint.manifest import read_json
from unfreeze.checkpoint.tensors import TORCH_DTYPE
from unfreeze.core.errors import ConfigError, DoesNotFit
from unfreeze.core.layout import RESIDENT
from unfreeze.core.units import format_bytes
from unfreeze.generate.open import open_model
from unfreeze.parallel.machine import resident_bytes
from unfreeze.parallel.placement.residency import Streamed
from unfreeze.quant import Int4

LORA: dict[str, Any] = {"rank": 4, "alpha": 8.0, "targets": ("all-linear",)}
NAMES = {"disk": "experts from disk", "device": "experts in memory"}
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
DRAWN = 2**26  # random bytes; every tensor takes them from a different offset


def model_of(gigabytes: float, sizes: Mapping[str, int]) -> dict[str, Any]:
    """config.json with enough layers for `gigabytes`, after one dense layer."""
    each = {**SIZES, **sizes}
    D, I = each["hidden_size"], each["moe_intermediate_size"]
    codec = Int4(group_size=32)
    of_layer = each["n_routed_experts"] * (2 * codec.nbytes(I, D) + codec.nbytes(D, I))
    layers = max(1, -(-int(gigabytes * 1e9) // of_layer))
    config = shapes.kimi(**each, num_hidden_layers=1 + layers)
    config["first_k_dense_replace"] = 1
    return config


@contextmanager
def checkpoint(run: Run, model: Mapping[str, Any]) -> Iterator[Path]:
    """Yield the folder of the checkpoint; write it if it does not exist yet.

    Raises ConfigError if the folder holds another model, DoesNotFit if the disk is too full.
    """
    config = run.config
    place = Path(config.checkpoint) if config.checkpoint else None
    with tempfile.TemporaryDirectory(prefix="unfreeze-bench-") as temporary:
        folder = (place or Path(temporary)) / "model"
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
                run.say(f"writing {config.gigabytes:g} GB to {folder}")
                write(folder, dict(model))
            yield folder
        finally:
            if place is not None and config.clean:
                shutil.rmtree(folder, ignore_errors=True)
                run.say(f"removed {folder}")


def write(folder: Path, model: dict[str, Any]) -> None:
    """Write the random checkpoint: codes come from one block of random bytes, each tensor at a new offset."""
    # codes 1 to 15 are -7 to 7; code 0 (-8) becomes 8 (zero): with a mean of -0.5 each matrix would send all
    # tokens the same way, and after a few layers all would choose one expert
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


def planned_bytes(folder: Path, place: Any, config: Any, length: int) -> int:
    """Bytes of the plan, without the interpreter."""
    where, moments = {"recompute": config.recompute, "experts": place}, config.optimizer_moments
    return planned(str(folder), computed_here(), LORA, config.tokens, length, moments, **where).total


def trainer(
    checkpoint: str, experts: Any, documents: int, length: int, recompute: Any, moments: Any, dtype: str
) -> Worker:
    """A Worker that trains with its experts on that placement. calls: step() -> loss, bytes read, and the
    number of trained experts; state() as in job.trainer."""
    before = resident_bytes()
    model = open_model(
        open_checkpoint(checkpoint), getattr(torch, dtype), "cpu", layout=RESIDENT.but(experts=experts)
    )
    attach(model, LoraConfig(**LORA), seed=0)
    worker = training_worker(
        model, documents, length, recompute, check=dict, runtime_bytes=before, moments=moments
    )
    residency = model.residency if isinstance(model.residency, Streamed) else None

    def step() -> dict[str, Any]:
        if residency is not None:
            residency.take()
        result = worker.calls["step"]()
        counts = [moe.counts_E for moe in model.moe_layers().values()]  # of this step
        result["experts_trained"] = sum(int((count > 0).sum()) for count in counts)
        if residency is None:
            return result
        came = residency.take()
        return result | {
            "reads": came.reads,
            "read_bytes": came.bytes,
            "transfer_seconds": came.seconds,
            "waited_seconds": came.waited,
            "hidden": came.hidden,
        }

    experts_there = sum(moe.experts.num_experts for moe in model.moe_layers().values())
    return Worker({**worker.calls, "step": step}, {**worker.facts, "experts": experts_there})


def results(side: Side, tokens: int) -> dict[str, Any]:
    """A side's figures; peak_bytes counts from its start to its last step."""
    figures, replies = speeds(side, tokens), side.replies["step"]
    came = ("reads", "read_bytes", "transfer_seconds", "waited_seconds", "hidden")
    return figures | {
        "peak_bytes": max(figures["peak_bytes"], figures["load_peak_bytes"]),
        "experts": side.loaded["experts"],
        "experts_trained": min(reply["experts_trained"] for reply in replies),
        "losses": [reply["loss"] for reply in replies],
        **{name: [reply[name] for reply in replies] for name in came if name in replies[0]},
    }


def losses_apart(entry: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, float]:
    apart = [abs(a - b) for a, b in zip(entry["losses"], other["losses"], strict=True)]
    return {"losses, against the other side": max(apart)}


def note(entry: Mapping[str, Any], on_disk: int) -> str:
    """The figures of the target, in a sentence."""
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
