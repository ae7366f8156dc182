"""The plan: bytes of a training run, term by term, before anything is loaded. Pure arithmetic; it never changes the config.

    plan_training(shape, manifest, lora, tokens=…, dtype=…, device=…)  ->  Plan      (measures the model on meta and the machine)
    plan(sizes, work, hardware)                                        ->  Plan      (numbers only)

Peak = what stays (base, adapter, gradients, optimizer) + what a step holds at its worst moment: boundary
activations, what recompute keeps, the expert workspace, and the larger of one layer's recompute and the loss
block. Loading comes at another time: the base and a read buffer per thread.

T tokens of a micro-batch, D model width, V vocabulary, E experts, K experts per token, I expert width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from unfreeze import models
from unfreeze.checkpoint.manifest import Manifest
from unfreeze.checkpoint.resolve import codec_of
from unfreeze.checkpoint.stream import CHUNK, THREADS
from unfreeze.config.lora import LoraConfig
from unfreeze.core.errors import DoesNotFit
from unfreeze.core.units import format_bytes, format_count, format_seconds
from unfreeze.kernels.linear_cross_entropy import block_cost
from unfreeze.models.blocks.attention import Attention
from unfreeze.models.blocks.experts import Experts
from unfreeze.models.blocks.linear import Linear, PackedHolder
from unfreeze.models.blocks.mlp import MLP
from unfreeze.models.blocks.norm import RMSNorm
from unfreeze.models.chunks import chunk_tokens
from unfreeze.models.fields import check_against_files
from unfreeze.models.targets import per_rank
from unfreeze.parallel.machine import Hardware, hardware

MOMENT_BYTES = {"float32": 8.0, "int8": 2.0 + 8.0 / 256}  # per trained parameter: train/moments.py
GRADIENT_BYTES = 4  # adapters and their gradients are fp32
LOAD_BUFFERS = THREADS * CHUNK  # checkpoint/stream.py: one buffer per reading thread
BATCH_BYTES = 3 * 8 + 4 + 8  # per token: tokens, targets, positions (int64), weights (float32), and which are supervised
GROUP_BYTES = 4 * 2**20  # kernels/expert_mlp/loop_cpu.py: weights and rows of a group of experts
# On a CPU a run takes more than plan and process: code that numba and oneDNN compile, their caches, the
# allocator's slack. Measured as peak - plan - process at planning (tiny-k2, Zen 4): 0.3 GiB in float32 on one
# core, 0.5 in bfloat16 on one, 0.8 in bfloat16 on two; it grows with the number of GEMM shapes.
KERNELS = "0.3 to 0.8 GiB for kernels as they are compiled"
MIN_TOKENS = 2  # of a micro-batch: one token has no next one to learn
USABLE = 0.92  # of the free memory: allocator fragmentation and what the interpreter and BLAS take besides


Recompute = Literal["layers", "selective", "elementwise", "nothing"]
LESS: dict[Recompute, tuple[Recompute, ...]] = {
    "nothing": ("elementwise", "selective", "layers"), "elementwise": ("selective", "layers"), "selective": ("layers",), "layers": (),
}  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """What the plan knows of a model in one dtype of computation.

    base            bytes of parameters and buffers as they will lie in memory (packed weights packed)
    elements        number of weights: what trains if every weight trains
    expanded        the same with every packed weight expanded to the computation's dtype
    layer           bytes per token at the worst moment of the largest layer's backward (see _layer_bytes)
    kept            bytes per token of what attention and experts made, layer by layer (see _kept_bytes)
    products        bytes per token of outputs of linear layers, likewise (see _product_bytes)
    workspace       bytes of the expert op's scratch before adapters (see expert_workspace); 0 without experts
    dense_per_rank, experts_per_rank   adapter parameters per unit of rank
    tables          bytes per token of the rotary cos and sin, float32
    cast_per_rank   elements per unit of rank that the expert op holds of one layer's adapter in the computation's dtype (B block-diagonal)
    """

    base: int
    expanded: int
    compute_bytes: int
    hidden_size: int
    num_layers: int
    vocab_size: int
    layer: int
    kept: tuple[int, ...] = ()
    products: tuple[int, ...] = ()
    workspace: int = 0
    dense_per_rank: int = 0
    experts_per_rank: int = 0
    cast_per_rank: int = 0
    elements: int = 0
    tables: int = 0


@dataclass(frozen=True)
class Work:
    """What a run asks for. tokens: of one micro-batch; a step has micro_batches of them. rank None: no adapter, every weight trains.
    recompute: "layers" (each layer's input is kept), "selective" (and what attention and experts made), "elementwise" (and outputs
    of linear layers) or "nothing" (all activations are).
    keep_layers: how many layers, from the last, are selective (elementwise) where recompute is; None: all.
    """

    tokens: int
    rank: int | None = None
    experts_rank: int | None = None
    recompute: Recompute = "layers"
    keep_layers: int | None = None
    optimizer_moments: Literal["float32", "int8"] = "float32"
    loss_rows: int = 2048  # of the largest block of logits, and bytes alive per logit of it: kernels/linear_cross_entropy.block_cost
    loss_bytes: int = 10
    tokens_per_second: float | None = None  # a measured rate on this machine; without one the plan gives no time
    micro_batches: int = 1  # one after the other: of several, half precision gradients are summed in fp32
    receipt_bytes: int = 0  # of copies of trained weights during the first step, at most (adapters/receipt.py), where every weight trains
    chunk: int | None = None  # tokens that go through a recomputed layer at once, in whole documents (models/chunks.py); None: all
    longest: int | None = None  # tokens of the longest document; None: as many as there are

    def at_once(self, compute_bytes: int) -> int:
        """Tokens whose inner activations of one layer are alive together. Where half precision trains: all (models/decoder.py)."""
        if self.chunk is None or self.longest is None or self.recompute == "nothing" or (self.rank is None and compute_bytes < 4):
            return self.tokens
        return min(self.tokens, max(self.chunk, self.longest))


@dataclass(frozen=True)
class Plan:
    """terms: name -> bytes at the worst moment of a step; they add up. beside: what comes at another moment
    and is smaller. load: bytes while loading. per_device: one entry per device (today there is one).
    """

    terms: dict[str, int]
    beside: dict[str, int]
    load: int
    usable: int
    avoided: int
    adapter_parameters: int
    hardware: Hardware
    work: Work
    sizes: Sizes

    @property
    def training(self) -> int:
        """Bytes at the worst moment of a step."""
        return sum(self.terms.values())

    @property
    def total(self) -> int:
        """Bytes at the worst moment of the run, loading included."""
        return max(self.training, self.load)

    @property
    def per_device(self) -> list[int]:
        return [self.total]

    @property
    def seconds_per_step(self) -> float | None:
        """From the measured rate that was given; None: not measured."""
        return self.work.tokens / self.work.tokens_per_second if self.work.tokens_per_second else None

    @property
    def fits(self) -> bool:
        return self.total <= self.usable

    def lines(self) -> list[str]:
        """The plan for people."""
        device, largest, smallest = self.hardware, max(self.per_device), min(self.per_device)
        width = max(len(name) for name in self.terms)
        lines = [f"plan for {device.name}: {device.cores} cores, {format_bytes(device.total)}, {format_bytes(self.usable)} usable now"]
        lines += [f"  {name:<{width}}  {format_bytes(size):>10}" for name, size in self.terms.items()]
        lines.append(f"  {'total':<{width}}  {format_bytes(self.total):>10}  of {format_bytes(self.usable)}")
        if device.process:
            lines.append(f"  beside it: this process {format_bytes(device.process)}, and {KERNELS}")
        lines.append(f"  1 device, largest / smallest {largest / smallest:.2f}; {self.work.tokens:,} tokens per pass")
        lines += [f"  at another moment: {name} {format_bytes(size)}" for name, size in (self.beside | {"loading": self.load}).items()]
        if self.avoided:
            lines.append(f"  packed weights stay packed: {format_bytes(self.avoided)} of expanded weights avoided")
        if self.adapter_parameters:
            lines.append(f"  {format_count(self.adapter_parameters)} adapter parameters")
        seconds = self.seconds_per_step
        rate = "not measured" if seconds is None else f"{format_seconds(seconds)} at {self.work.tokens_per_second:,.0f} tokens/s"
        lines.append(f"  time per pass: {rate}")
        return lines

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values: terms, total, usable, …, and the printed lines."""
        return {
            "terms": dict(self.terms),
            "beside": dict(self.beside),
            "total": self.total,
            "load": self.load,
            "usable": self.usable,
            "per_device": self.per_device,
            "max_over_min": max(self.per_device) / min(self.per_device),
            "expanded_avoided": self.avoided,
            "adapter_parameters": self.adapter_parameters,
            "seconds_per_pass": self.seconds_per_step,
            "fits": self.fits,
            "hardware": asdict(self.hardware),
            "lines": self.lines(),
        }

    def refuse_if_too_large(self) -> None:
        """Raise DoesNotFit with the arithmetic and with what would fit, each solved for and planned again."""
        if self.fits:
            return
        parts = " + ".join(f"{name} {format_bytes(size)}" for name, size in self.terms.items() if size)
        arithmetic = f"peak {format_bytes(self.total)}, {format_bytes(self.usable)} usable on {self.hardware.name}: {parts}"
        if self.load > self.training:
            arithmetic += f"; loading alone takes {format_bytes(self.load)}"
        fits = self.what_fits()
        if not fits:
            stays = self.terms["base"]
            raise DoesNotFit(
                f"{arithmetic}. No number of tokens and no rank fits: the base alone is {format_bytes(stays)}",
                next="use a machine with more memory, a smaller checkpoint, or one in 4 bits",
            )
        raise DoesNotFit(f"{arithmetic}. Fits with {', or '.join(said for _, said in fits)}", next=fits[0][0])

    def what_fits(self) -> list[tuple[str, str]]:
        """(flags, description with its bytes) of changes that fit.

        First those that leave the result as it is: fewer layers that keep activations (the largest number
        that fits), recompute, more micro-batches (the smallest number), the last two together. Then fewer
        tokens per step (the largest number) and a lower rank (the largest). Only if none of these fits: fewer
        tokens with rank 1.
        """
        found = []
        if self.work.recompute == "selective":
            most = self.sizes.num_layers if self.work.keep_layers is None else self.work.keep_layers
            fewer = _largest(most, lambda count: replace_work(self, keep_layers=count).fits)
            if 0 < fewer < most:
                found += replace_work(self, keep_layers=fewer).said_if_fits(f"--keep-layers {fewer}", f"keep_layers {fewer}")
        for mode in LESS[self.work.recompute]:
            found += replace_work(self, recompute=mode).said_if_fits(f"--recompute {mode}", f"recompute = {mode}")
        for start, flag, said in self._starts():
            found += start.fewer_tokens(flag, said)
        rank = self.work.rank
        if rank is not None:
            lower = _largest(rank, lambda r: self._with_rank(r).fits)
            if lower:
                found += self._with_rank(lower).said_if_fits(f"--lora.rank {lower}", f"lora.rank {lower}")
        if rank is not None and not found:
            for start, flag, said in self._starts():
                found += start._with_rank(1).fewer_tokens(f"{flag}--lora.rank 1 ", f"{said}lora.rank 1 and ")
        return found

    def said_if_fits(self, flags: str, said: str) -> list[tuple[str, str]]:
        """This plan as a proposal, or none."""
        return [(flags, f"{said} ({format_bytes(self.total)})")] if self.fits else []

    def fewer_tokens(self, flag: str = "", said: str = "") -> list[tuple[str, str]]:
        """The proposals with fewer tokens at once: the same step in more micro-batches, or a smaller step in
        as many."""
        parts = self.work.micro_batches
        tokens = _largest(self.work.tokens, lambda n: replace_work(self, tokens=n).fits)
        if tokens < MIN_TOKENS or tokens == self.work.tokens:
            return []
        # Upper bound of the requested step: tokens = step // micro_batches lost at most parts - 1.
        step = self.work.tokens * parts + parts - 1
        summed = _largest(self.work.tokens, lambda n: replace_work(self, tokens=n, micro_batches=max(parts, 3)).fits)  # gradients: from the third on
        found = []
        for more in sorted({2, 3, step // (summed + 1) + 1}):
            cut = replace_work(self, tokens=step // more, micro_batches=more)
            if more > parts and step // more >= MIN_TOKENS and not found:
                found += cut.said_if_fits(f"{flag}--micro-batches {more}", f"{said}micro_batches {more:,} of {step // more:,} tokens")
        smaller = replace_work(self, tokens=tokens)
        return found + smaller.said_if_fits(f"{flag}--tokens-per-step {tokens * parts}", f"{said}tokens_per_step {tokens * parts:,}")

    def _starts(self) -> list[tuple[Plan, str, str]]:
        """This plan, and where not all is recomputed the same with it: (plan, flags so far, words so far)."""
        least = replace_work(self, recompute="layers")
        recomputed = [] if self.work.recompute == "layers" else [(least, "--recompute layers ", "recompute = layers and ")]
        return [*recomputed, (self, "", "")]

    def _with_rank(self, rank: int) -> Plan:
        """rank and experts_rank lowered together, in proportion."""
        assert self.work.rank is not None
        experts = self.work.experts_rank
        scaled = None if experts is None else max(1, experts * rank // self.work.rank)
        return replace_work(self, rank=rank, experts_rank=scaled)


def replace_work(before: Plan, **changes: Any) -> Plan:
    """The plan of the same model on the same machine with other work."""
    return plan(before.sizes, replace(before.work, **changes), before.hardware)


def _largest(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest n in 1..limit with fits(n), by bisection (bytes grow with n); 0 where none does."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def plan(sizes: Sizes, work: Work, hardware: Hardware) -> Plan:
    """Bytes per term. Weights, adapter, gradients and optimizer are exact; a step's activations are within about 15 % (tests/parallel).

    batch      T · (BATCH_BYTES + sizes.tables)
    boundary   T · D · (layers + 1) · bytes: each layer's input, which recompute keeps, and the last one's output
    kept       T · Σ sizes.kept of the last keep_layers with recompute = selective, and of sizes.products with elementwise, but the largest: the
               layer at work has its own in its term. (In chunks it has a chunk's there, so all are counted)
    layer      T · sizes.layer, once with recompute, for every layer without. In chunks of C tokens C · sizes.layer, and the gradients of the layer's
               output and input, 2 · T · D · bytes
    loss       N · V · loss_bytes for blocks of N rows; the hidden state, its supervised rows and their gradient, 3 · T · D · bytes. Where the head
               trains in half precision and its rows are more than one block, V · D · 4: the float32 sum of its gradient
    workspace  the expert op's scratch and one layer's expert adapters with their gradients, in the computation's dtype
    """
    trained, bytes_, moments = work_parameters(sizes, work), sizes.compute_bytes, MOMENT_BYTES[work.optimizer_moments]
    if work.rank is None:  # every weight trains; half precision ones have fp32 masters, and of several micro-batches fp32 gradient sums
        half, weights = bytes_ < 4, sizes.elements * bytes_
        sums = half * sizes.elements * {1: 0, 2: 2}.get(work.micro_batches, 4)  # two arrive in half precision and make room for their sum
        stays = {"adapter": 0, "gradients": weights + sums, "optimizer": int(sizes.elements * (moments + 4 * half))}
        copies = sizes.elements * max(bytes_, 4)  # of what the optimizer updates: fp32
        stays |= {"copies for the receipt": min(copies, work.receipt_bytes)} if work.receipt_bytes else {}
    else:
        stays = {"adapter": trained * 4, "gradients": trained * GRADIENT_BYTES, "optimizer": int(trained * moments)}
    stream, at_once = work.tokens * sizes.hidden_size * bytes_, work.at_once(bytes_)
    cut, boundary = at_once < work.tokens, stream * (sizes.num_layers + 1)
    batch = work.tokens * (BATCH_BYTES + sizes.tables)
    layer = {"one layer's recompute": at_once * sizes.layer + 2 * stream * cut}
    kept = {"kept of attention and experts": work.tokens * _kept(sizes.kept, work, cut)} if work.recompute in ("selective", "elementwise") else {}
    if work.recompute == "elementwise":
        kept["kept of linear layers"] = work.tokens * _kept(sizes.products, work, cut)
    if work.recompute == "nothing":
        boundary, layer = 0, {"all layers' activations": work.tokens * sizes.layer * sizes.num_layers}
    loss = {"loss block": min(work.loss_rows, work.tokens) * sizes.vocab_size * work.loss_bytes + 3 * stream}
    if work.rank is None and bytes_ < 4 and work.tokens > work.loss_rows:
        loss["loss block"] += sizes.vocab_size * sizes.hidden_size * 4
    smaller, larger = sorted((layer, loss), key=lambda moment: sum(moment.values()))
    copies = 3 if hardware.kind == "cuda" else 2  # of an adapter: itself, its gradient, and on CUDA its columns of the workspace
    cast = copies * bytes_ * sizes.cast_per_rank * (work.experts_rank or work.rank or 0)
    return Plan(
        terms={
            "base": sizes.base, **stays, "batch and rotary tables": batch, "boundary activations": boundary, **kept, **larger,
            "expert workspace": sizes.workspace + cast,
        },
        beside=smaller,
        load=sizes.base + LOAD_BUFFERS,
        usable=int(hardware.available * USABLE),
        avoided=sizes.expanded - sizes.base,
        adapter_parameters=trained,
        hardware=hardware,
        work=work,
        sizes=sizes,
    )


def _kept(by_layer: tuple[int, ...], work: Work, cut: bool) -> int:
    """Bytes per token that the last keep_layers keep; without the largest of them if the layer at work is not
    cut into chunks, because its own term counts it."""
    count = len(by_layer) if work.keep_layers is None else min(work.keep_layers, len(by_layer))
    keeping = sorted(by_layer[len(by_layer) - count :])
    return sum(keeping if cut else keeping[:-1])


def work_parameters(sizes: Sizes, work: Work) -> int:
    """Adapter parameters: dense sites at `rank`, routed experts at `experts_rank` (or `rank`)."""
    if work.rank is None:
        return 0
    return sizes.dense_per_rank * work.rank + sizes.experts_per_rank * (work.experts_rank or work.rank)


def plan_training(
    shape: models.Shape,
    manifest: Manifest,
    lora: LoraConfig | None,
    *,
    tokens: int,
    dtype: str,
    device: torch.device | str,
    recompute: Recompute = "layers",
    keep_layers: int | None = None,
    optimizer_moments: Literal["float32", "int8"] = "float32",
    micro_batches: int = 1,
    longest: int | None = None,
    tokens_per_second: float | None = None,
    receipt_bytes: int = 0,
) -> Plan:
    """The plan of a training run on one device. `tokens` of one of `micro_batches`, in documents of at most `longest`; lora None: every weight
    trains; dtype "bfloat16" or "float32". With adapters micro_batches changes no byte, only what is proposed where the run doesn't fit
    (--tokens-per-step is of all of them).

    Nothing is read but the manifest, nothing allocated. Call `refuse_if_too_large` on the result.
    """
    kind = {"bfloat16": torch.bfloat16, "float32": torch.float32}[dtype]
    model = meta_model(shape, manifest, kind)
    place = torch.device(device)
    loss_rows, loss_bytes = block_cost(shape.vocab_size, kind, place, trained=lora is None)
    work = Work(
        tokens=tokens,
        rank=lora.rank if lora else None,
        experts_rank=lora.experts_rank if lora else None,
        recompute=recompute,
        keep_layers=keep_layers,
        optimizer_moments=optimizer_moments,
        micro_batches=micro_batches,
        loss_rows=loss_rows,
        loss_bytes=loss_bytes,
        chunk=chunk_tokens(shape.num_experts, shape.experts_per_token, place.type),
        longest=longest,
        tokens_per_second=tokens_per_second,
        receipt_bytes=receipt_bytes,
    )
    return plan(measure(model, lora, place.type), work, hardware(place))


def meta_model(shape: models.Shape, manifest: Manifest, dtype: torch.dtype) -> models.Decoder:
    """The model without memory, packed where the checkpoint is packed."""
    if manifest.tensors:
        check_against_files(shape, manifest)
    codec = codec_of(manifest)
    names = manifest.by_model_name()

    def packed(module: str) -> bool:
        return codec is not None and any(f"{module}.{suffix}" in names for suffix in codec.parts(1, 0))

    return models.build(shape, dtype=dtype, device="meta", codec=codec, packed=packed)


def measure(model: models.Decoder, lora: LoraConfig | None, kind: str = "cpu") -> Sizes:
    """Sizes of a model, which may be on meta and must not carry adapters yet, for a device of that kind ("cpu", "cuda")."""
    shape = model.shape
    compute = next(model.parameters()).dtype.itemsize
    dense_per_rank, experts_per_rank = per_rank(lora, model) if lora else (0, 0)
    experts = [m for m in model.modules() if isinstance(m, Experts)]
    packed = [m for m in model.modules() if isinstance(m, PackedHolder) and m.codec is not None]
    base = sum(t.nbytes for t in [*model.parameters(), *model.buffers()])  # a tied head is listed once
    return Sizes(
        base=base,
        elements=sum(p.numel() for p in model.parameters()),
        expanded=base + sum(m.packed.shape.numel() * compute - m.packed.nbytes for m in packed),
        compute_bytes=compute,
        hidden_size=shape.hidden_size,
        num_layers=shape.num_layers,
        vocab_size=shape.vocab_size,
        layer=max(_layer_bytes(layer, shape.experts_per_token, compute, kind) for layer in model.layers),
        kept=tuple(_kept_bytes(layer, shape.experts_per_token, compute) for layer in model.layers),
        products=tuple(_product_bytes(layer, compute) for layer in model.layers),
        workspace=max((expert_workspace(m, kind, compute, rank=0) for m in experts), default=0),
        dense_per_rank=dense_per_rank,
        experts_per_rank=experts_per_rank,
        tables=8 * len(shape.rope.inverse_frequency),
        cast_per_rank=max((m.num_experts * (3 * m.hidden_size + 5 * m.intermediate_size) for m in experts), default=0) if experts_per_rank else 0,
    )


def expert_workspace(experts: Experts, kind: str, compute: int, rank: int) -> int:
    """Bytes of expanded weights that one expert op holds at once, with the columns and rows that its adapter of `rank` has among them.

    cuda  all experts of the layer (kernels/expert_mlp/grouped.py): E · (3 D I + rank (3 D + 5 I)); rank 16 pads to itself, others to multiples of 8
    cpu   one expert, and GROUP_BYTES of a group of small ones
    """
    matrices = 3 * experts.hidden_size * experts.intermediate_size
    if kind == "cuda":
        return experts.num_experts * compute * (matrices + rank * (3 * experts.hidden_size + 5 * experts.intermediate_size))
    return GROUP_BYTES + matrices * compute


def _layer_bytes(layer: nn.Module, experts_per_token: int, compute: int, kind: str) -> int:
    """Bytes per token at the worst moment of a layer's backward.

    linears  2 · Σ out: every output (the next one's input) and as much again for gradients and activation results
    norms    2 fp32 copies of the input; the residual stream once
    experts  gate and up of each of the K rows, and the fp32 sums y and dx; on CUDA, where all experts work at once, also what backward holds
             of each row: three of width D (dy, dx, dx gathered), 4 I (dh, weighted h, gradients of gate and up) and an fp32 one of width D
    Fitted to what torch allocated, measured over families and dtypes: within 15 % (tests/parallel/test_plan.py).
    """
    linears = sum(m.out_features for m in layer.modules() if isinstance(m, Linear))
    norms = sum(m.weight.numel() for m in layer.modules() if isinstance(m, RMSNorm))
    residual = next(m.weight.numel() for m in layer.modules() if isinstance(m, RMSNorm))
    experts = [m for m in layer.modules() if isinstance(m, Experts)]
    routed = sum(experts_per_token * 2 * m.intermediate_size * compute + 8 * m.hidden_size for m in experts)
    if kind == "cuda":
        routed += sum(experts_per_token * (compute * (3 * m.hidden_size + 4 * m.intermediate_size) + 4 * m.hidden_size) for m in experts)
    return compute * (2 * linears + residual) + 8 * norms + routed


def _kept_bytes(layer: nn.Module, experts_per_token: int, compute: int) -> int:
    """Bytes per token that selective recompute keeps of a layer: attention's output, as wide as the query on CPU (padded values), a float32
    log-sum-exp per head, and gate and up of each of the K rows (counted with an eighth for padding)."""
    linears = {name.rpartition(".")[2]: m for name, m in layer.named_modules() if isinstance(m, Linear)}
    query = next(linears[name].out_features for name in ("q_b_proj", "q_proj") if name in linears)
    routed = sum(experts_per_token * 2 * m.intermediate_size * compute * 9 // 8 for m in layer.modules() if isinstance(m, Experts))
    return query * (compute + 1) + routed


def _product_bytes(layer: nn.Module, compute: int) -> int:
    """Bytes per token that elementwise recompute keeps in addition: outputs of the linear layers of
    multi-head attention and of a dense or shared MLP, except down_proj, whose output no gradient needs."""
    attention = sum(m.out_features for block in layer.modules() if isinstance(block, Attention) for m in block.modules() if isinstance(m, Linear))
    mlps = sum(m.gate_proj.out_features + m.up_proj.out_features for m in layer.modules() if isinstance(m, MLP))
    return compute * (attention + mlps)
