"""L1 to L9: faults of loading and placement."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from unfreeze import models
from unfreeze.adapters import LoraConfig, attach
from unfreeze.adapters.lora import LowRank
from unfreeze.checkpoint import open_checkpoint
from unfreeze.checkpoint.resolve import resolve
from unfreeze.checkpoint.stream import stream
from unfreeze.core.units import format_bytes
from unfreeze.data import load_tokenizer
from unfreeze.drill.fault import Fault, Outcome, measured, must_refuse, said
from unfreeze.drill.sandbox import TINY_K2, Sandbox
from unfreeze.generate.open import open_model
from unfreeze.job.opening.device import ALLOCATOR, allocator_line, pick_device, set_allocator
from unfreeze.job.watch.receipts import receipt_of
from unfreeze.models.blocks.moe import MoE
from unfreeze.objectives.cross_entropy import cross_entropy
from unfreeze.parallel.machine import resident_bytes
from unfreeze.parallel.placement.place import check_coverage, place
from unfreeze.parallel.plan import plan_here, plan_lines
from unfreeze.parallel.processes.collectives import ALONE
from unfreeze.quant import Int4
from unfreeze.quant.formats import FOREIGN
from unfreeze.train.optim import AdamW
from unfreeze.train.step import train_step

MEMORY_STEPS = 50
CODES = Int4().suffixes[0]
UNREAD, UNREAD_FORMAT = next(iter(FOREIGN.items()))
"""An unsupported format: suffix of its codes, and its name."""


def expanded_on_load(sandbox: Sandbox) -> Outcome:
    """Compare a loaded 4-bit checkpoint's memory with its files, and with its size in bf16."""
    manifest = open_checkpoint(TINY_K2)
    stats: list[Any] = []
    model = open_model(manifest, torch.bfloat16, loaded=stats.append)
    held = sum(
        tensor.nbytes for tensor in {id(t): t for t in [*model.parameters(), *model.buffers()]}.values()
    )
    packed = [buffer for name, buffer in model.named_buffers() if name.endswith(CODES)]
    line = (
        f"read {format_bytes(stats[0].bytes)} of {format_bytes(manifest.nbytes)} in files,"
        f" {format_bytes(held)} held in memory, {len(packed)} stacks still 4-bit words; expanded to bf16 it"
        f" would be {format_bytes(stats[0].expanded_bytes)}"
    )
    # 1 %: counters, and shape tensors that are checked and dropped
    whole = stats[0].bytes == manifest.nbytes and held <= 1.01 * manifest.nbytes
    return measured(
        stream, line, holds=whole and bool(packed) and all(buffer.dtype == torch.int32 for buffer in packed)
    )


def fragmenting_allocator(sandbox: Sandbox) -> Outcome:
    """Remove the allocator setting that a CUDA process needs before it starts."""
    with allocator_setting(None):
        pick_device("cpu")
        line, expandable = allocator_line()
    return measured(set_allocator, f"PYTORCH_CUDA_ALLOC_CONF was removed; {line}", holds=expandable)


def fragmenting_setting(sandbox: Sandbox) -> Outcome:
    """Set the allocator without expandable segments: the setting is kept, and the plan reports it."""
    with allocator_setting("max_split_size_mb:128"):
        pick_device("cpu")
        return said(
            allocator_line,
            allocator_line()[0],
            says="max_split_size_mb:128 has no expandable segments, so memory may fragment",
        )


@contextmanager
def allocator_setting(value: str | None) -> Iterator[None]:
    """Set or remove the setting, and restore the environment afterwards."""
    before = {name: os.environ.pop(name) for name in ALLOCATOR if name in os.environ}
    try:
        if value is not None:
            os.environ[ALLOCATOR[0]] = value
        yield
    finally:
        for name in ALLOCATOR:
            os.environ.pop(name, None)
        os.environ.update(before)


def unequal_devices(sandbox: Sandbox) -> Outcome:
    """Compare the plan's bytes with those of the placed model.

    Compares largest over smallest device, and the base weights.
    """
    manifest = open_checkpoint(TINY_K2)
    plan = plan_here(
        models.shape(manifest.config),
        manifest,
        LoraConfig(rank=2),
        tokens=256,
        dtype="bfloat16",
        device="cpu",
    )
    model = open_model(manifest, torch.bfloat16)
    held = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
    ratio = next((line.strip() for line in plan_lines(plan) if "largest / smallest" in line), "")
    off = abs(held - plan.terms["base"]) / held
    line = (
        f"{ratio}; base planned {format_bytes(plan.terms['base'])}, placed {format_bytes(held)}"
        f" ({100 * off:.1f} % off)"
    )
    return measured(plan_lines, line, holds="largest / smallest 1.00" in ratio and off < 0.01)


def unknown_target(sandbox: Sandbox) -> Outcome:
    config = LoraConfig(rank=2, targets=("q_porj",))
    return must_refuse(lambda: attach(sandbox.model("llama"), config, seed=0), says="nearest: 'q_proj'")


def silent_adapter(sandbox: Sandbox) -> Outcome:
    """Run a forward pass that skips the experts' adapters, as a fused path could."""
    model = sandbox.model("deepseek_v3-int4")
    attach(model, LoraConfig(rank=2), seed=0)
    for moe in model.moe_layers().values():
        adapter = moe.experts.adapter
        moe.experts.forward = without_adapter(moe.experts, adapter)
    return must_refuse(lambda: first_step(sandbox, model), says="experts: ")


def without_adapter(experts: Any, adapter: Any) -> Callable[..., Tensor]:
    kind = type(experts)

    def forward(*arguments: Any) -> Tensor:
        experts.adapter = None
        try:
            return kind.forward(experts, *arguments)
        finally:
            experts.adapter = adapter

    return forward


def lose_gradients(optimizer: AdamW, pattern: str, experts: Callable[[int], slice] | None = None) -> None:
    """Zero the gradients of the matching parameters between backward and update.

    experts: for stacked experts, zero only the slice experts(E).
    """
    collect = optimizer.collect

    def lossy() -> None:
        collect()
        for name, parameter in optimizer.parameters.items():
            if re.search(pattern, name) and parameter.grad is not None:
                parameter.grad[slice(None) if experts is None else experts(len(parameter))] = 0

    optimizer.collect = lossy


def dead_sites(
    pattern: str, says: str, experts: Callable[[int], slice] | None = None
) -> Callable[[Sandbox], Outcome]:
    """Make a fault that zeroes gradients of the matching adapters between backward and update.

    experts: for stacked experts, only the slice experts(E).
    """

    def plant(sandbox: Sandbox) -> Outcome:
        model = sandbox.model("deepseek_v3-int4")
        attach(model, LoraConfig(rank=2), seed=0)
        optimizer = AdamW(model)
        lose_gradients(optimizer, pattern, experts)
        return must_refuse(lambda: first_step(sandbox, model, optimizer), says=says)

    return plant


def first_step(sandbox: Sandbox, model: models.Decoder, optimizer: AdamW | None = None) -> None:
    """Run one training step, and the receipt that every run makes after it."""
    from types import SimpleNamespace

    from unfreeze.core.events import EventLog

    optimizer, folder = optimizer or AdamW(model), sandbox.fresh("receipt")
    folder.mkdir()
    examples = sandbox.examples([40, 20, 60])
    run = SimpleNamespace(path=folder, events=EventLog(None))
    state: Any = SimpleNamespace(
        model=model, optimizer=optimizer, step=0, run=run, schedule=SimpleNamespace(steps=1)
    )
    dataset: Any = SimpleNamespace(examples=examples)
    (receipt,) = receipt_of(state, dataset, ALONE, stop=True)
    result = train_step(
        model,
        optimizer,
        [sandbox.batch([40, 20, 60])],
        cross_entropy,
        learning_rate=1e-3,
        max_norm=1.0,
        recompute=models.keep_inputs,
    )
    state.step = 1
    receipt(state, result)


def gate_in_training(sandbox: Sandbox) -> Outcome:
    """Compare train and eval mode, and check the gradient that reaches a trained router."""
    model, batch = sandbox.model("deepseek_v3"), sandbox.batch([40, 20])
    with torch.no_grad():
        modes = [model.train(mode).hidden(batch) for mode in (True, False)]
    model.train()
    loss = cross_entropy(model.hidden(batch), model.lm_head, batch)
    loss.sum.backward()
    routers = {layer: moe.gate.weight.grad for layer, moe in model.moe_layers().items()}
    norms = {layer: 0.0 if grad is None else float(grad.norm()) for layer, grad in routers.items()}
    difference = float((modes[0] - modes[1]).abs().max())
    by_layer = ", ".join(f"layer {layer} {norm:.3g}" for layer, norm in norms.items())
    line = f"train and eval mode differ by {difference:g}; gradient norm that reached the router: {by_layer}"
    return measured(MoE.forward, line, holds=difference == 0 and all(norm > 0 for norm in norms.values()))


def expanded_weights_pile_up(sandbox: Sandbox) -> Outcome:
    """Measure resident memory over MEMORY_STEPS with 4-bit experts.

    Measured once more if it grew: a process that has trained nothing before may still touch pages for the
    first time in step 3, which a leak does in every step.
    """
    model = sandbox.open(TINY_K2)
    attach(model, LoraConfig(rank=2), seed=0)
    optimizer, batch = AdamW(model), sandbox.batch([40, 20, 60])

    def measure() -> tuple[float, int]:
        resident: list[int] = []
        for _ in range(MEMORY_STEPS):
            train_step(
                model,
                optimizer,
                [batch],
                cross_entropy,
                learning_rate=1e-4,
                max_norm=1.0,
                recompute=models.keep_inputs,
            )
            resident.append(resident_bytes())
        return max(resident[2:]) / resident[1] - 1, resident[-1]

    growth, final = measure()
    if growth > 0.01:
        growth, final = measure()
    line = (
        f"resident memory grew by {100 * growth:.2f} % from step 2 to {MEMORY_STEPS} (limit 1 %),"
        f" {format_bytes(final)} at the end"
    )
    return measured(train_step, line, holds=growth <= 0.01)


def missing_shard(sandbox: Sandbox) -> Outcome:
    folder = sandbox.sharded("llama")
    sorted(folder.glob("*.safetensors"))[1].unlink()
    return must_refuse(lambda: sandbox.open(folder), says="is missing")


def truncated_file(sandbox: Sandbox) -> Outcome:
    folder = sandbox.copy("llama")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    return must_refuse(lambda: sandbox.open(folder), says="file is truncated")


def rewritten(
    change: Callable[[dict[str, Tensor]], None], says: str, family: str = "llama"
) -> Callable[[Sandbox], Outcome]:
    """Make a fault that changes the tensors of a copied checkpoint."""

    def plant(sandbox: Sandbox) -> Outcome:
        folder = sandbox.copy(family)
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors"
        )
        return must_refuse(lambda: sandbox.open(folder), says=says)

    return plant


def wrong_dtype(tensors: dict[str, Tensor]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int32)


def wrong_shape(tensors: dict[str, Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1]


def unexpected(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(2, 2)


def empty_tensor(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(0)


def other_packing(tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if name.endswith(CODES)]:
        tensors[name.replace(CODES, UNREAD)] = tensors.pop(name)


def lost_index_file(sandbox: Sandbox) -> Outcome:
    folder = sandbox.sharded("llama")
    index = folder / "model.safetensors.index.json"
    table = json.loads(index.read_text(encoding="utf-8"))
    name = next(iter(table["weight_map"]))
    table["weight_map"][name] = "model-00099-of-00099.safetensors"
    index.write_text(json.dumps(table), encoding="utf-8")
    return must_refuse(lambda: sandbox.open(folder), says="model-00099-of-00099.safetensors is missing")


def other_bits(sandbox: Sandbox) -> Outcome:
    folder = sandbox.copy("deepseek_v3-int4")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"] = 8
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return must_refuse(lambda: sandbox.open(folder), says="num_bits")


def hole_in_placing(sandbox: Sandbox) -> Outcome:
    """Drop one tensor from the key map: its parameter would stay uninitialised."""
    manifest = open_checkpoint(sandbox.checkpoint("deepseek_v3-int4"))
    shape = models.shape(manifest.config)
    params = {
        name: (t.dtype, tuple(t.shape))
        for name, t in models.meta_model(shape, manifest, torch.float32).state_dict().items()
    }
    placements = resolve(manifest, models.rules(shape), params)
    lost = next(i for i, placement in enumerate(placements) if placement.info.name.endswith(CODES))
    return must_refuse(
        lambda: check_coverage([*placements[:lost], *placements[lost + 1 :]], params),
        says="is left uninitialised",
    )


def meta_parameter(sandbox: Sandbox) -> Outcome:
    """Build an adapter on the meta device, which no file fills."""
    manifest = open_checkpoint(sandbox.checkpoint("llama"))
    model = models.meta_model(models.shape(manifest.config), manifest, torch.float32)
    model.lm_head.adapter = LowRank(32, 256, rank=4, scale=1.0, device="meta")
    return must_refuse(
        lambda: place(model, manifest, models.rules(model.shape), device="cpu"),
        says="has no memory and no file fills it",
    )


def remote_code(sandbox: Sandbox) -> Outcome:
    """Give a checkpoint's tokenizer its own Python file, which leaves a mark if it is run."""
    folder, marker = sandbox.copy("llama"), sandbox.fresh("ran")
    (folder / "tokenization_kimi.py").write_text(f"open({str(marker)!r}, 'w').close()\n", encoding="utf-8")
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings["auto_map"] = {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode("Hmm, a frog it is.", specials=False)
    same = ids == sandbox.tokenizer.encode("Hmm, a frog it is.", specials=False)
    line = (
        f"{tokenizer.named_size} ids read from tiktoken.model natively; tokenization_kimi.py was"
        f" {'run' if marker.exists() else 'not run'}"
    )
    return measured(load_tokenizer, line, holds=same and not marker.exists())


def only_remote_code(sandbox: Sandbox) -> Outcome:
    folder = sandbox.copy("llama")
    (folder / "tiktoken.model").unlink()
    (folder / "tokenization_kimi.py").write_text("raise SystemExit\n", encoding="utf-8")
    return must_refuse(lambda: load_tokenizer(folder), says="has no tokenizer")


FAULTS = [
    Fault("L1", "a 4-bit checkpoint expanded or packed again on load", expanded_on_load),
    Fault("L2", "the CUDA allocator left to fragment", fragmenting_allocator),
    Fault("L2", "an allocator setting without expandable segments", fragmenting_setting),
    Fault("L3", "one device with twice the weights", unequal_devices),
    Fault("L4", "an adapter target that matches nothing", unknown_target),
    Fault("L4", "adapters on experts that the forward pass forgets", silent_adapter),
    Fault("L4", "all routed experts without gradient", dead_sites(r"mlp\.experts", "got no gradient")),
    Fault(
        "L4",
        "the down_proj of every expert without gradient",
        dead_sites(r"mlp\.experts.*down", ".down_proj"),
    ),
    Fault(
        "L4",
        "half of the experts without gradient",
        dead_sites(r"mlp\.experts", ".experts.0-3.gate_proj", lambda E: slice(E // 2)),
    ),
    Fault(
        "L4",
        "one q_b_proj without gradient",
        dead_sites(r"layers\.1\..*q_b_proj", "They are model.layers.1.self_attn.q_b_proj"),
    ),
    Fault("L5", "a gate that does not train, or routes differently in training", gate_in_training),
    Fault("L6", "expanded weights that accumulate over the steps", expanded_weights_pile_up),
    Fault("L7", "a missing shard", missing_shard),
    Fault("L7", "a truncated file", truncated_file),
    Fault("L7", "a tensor of the wrong dtype", rewritten(wrong_dtype, "I32")),
    Fault("L7", "a tensor of the wrong shape", rewritten(wrong_shape, "1535")),
    Fault(
        "L7", "a tensor that belongs to nothing", rewritten(unexpected, "model.layers.2.mlp.up_proj.weight")
    ),
    Fault("L7", "an index that names a missing file", lost_index_file),
    Fault("L7", "another 4-bit format's names", rewritten(other_packing, UNREAD_FORMAT, "deepseek_v3-int4")),
    Fault("L7", "4-bit words declared as 8-bit", other_bits),
    Fault("L8", "a tensor of size zero", rewritten(empty_tensor, "[0]")),
    Fault("L8", "a parameter that no file fills", hole_in_placing),
    Fault("L8", "a parameter left on the meta device", meta_parameter),
    Fault("L9", "a tokenizer that brings code to run", remote_code),
    Fault("L9", "a tokenizer that is only code", only_remote_code),
]
