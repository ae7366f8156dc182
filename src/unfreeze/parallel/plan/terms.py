"""The arithmetic of the plan: settings of a run -> bytes per term.

Peak = what stays (base, adapter, optimizer, workspaces) + what a step holds at its worst moment: the loss,
the last layer's backward or the first layer's. From layer to layer, boundary activations and saved
activations are freed while gradients are added (see `_moments`).
Loading is earlier: the base, a read buffer per thread, and a matrix that is packed.

T tokens of a micro-batch, D model width, V vocabulary, N rows of a block of logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from unfreeze.checkpoint.stream import CHUNK, THREADS
from unfreeze.core.layout import Layout
from unfreeze.kernels.attention.by_blocks import scratch_bytes
from unfreeze.kernels.attention.workspace import workspace_bytes
from unfreeze.models.blocks.bytes import AttentionShape
from unfreeze.parallel.answers import Answers
from unfreeze.parallel.machine import Hardware
from unfreeze.parallel.placement.peers import part_bytes
from unfreeze.parallel.placement.residency import buffer_bytes
from unfreeze.parallel.plan.grouped import sizes_with_groups, units
from unfreeze.parallel.plan.sizes import Sizes
from unfreeze.parallel.processes.collectives import BUCKET

if TYPE_CHECKING:
    from unfreeze.parallel.plan.aside import Aside
    from unfreeze.parallel.plan.seconds import Seconds

STATE = ("adapter", "gradients", "optimizer")
"""Terms of trained state."""
MOMENT_BYTES = {"float32": 8.0, "int8": 2.0 + 8.0 / 256}  # per trained parameter: train/moments.py
MOMENTUM_BYTES = 4.0  # Muon's one moment
GRADIENT_BYTES = 4  # adapters, their gradients, and sums of gradients are fp32
MOMENT_SLOTS, MOMENT_CHUNK = 2, 64 << 20  # if they are in host memory: train/host_state.py
LOAD_BUFFERS = THREADS * CHUNK  # checkpoint/stream.py: one buffer per reading thread
# per token: tokens, targets, positions (int64), weights (float32), and the supervised mask
BATCH_BYTES = 3 * 8 + 4 + 8
USABLE = 0.92  # of the free memory; the remainder covers allocator fragmentation, the interpreter and BLAS


@dataclass(frozen=True)
class Work:
    """The computation of a run; the Layout says where things are.

    tokens          of one micro-batch; a step has micro_batches of them, one after the other
    rank            None: no adapter, every weight trains
    experts_rank    None: same as rank
    loss_rows, loss_bytes  rows of the largest block of logits, and bytes alive per logit of it
                    (kernels/linear_cross_entropy.block_cost)
    receipt_bytes   maximum bytes of copies of trained weights during the first step, if every weight
                    trains (adapters/snapshot.py)
    chunk           tokens that go through a recomputed layer at once, in whole documents
                    (models/chunks.py);
                    None: all
    longest         tokens of the longest document; None: all tokens
    mean_length     tokens of the document that a token is in, on average (for attention); None: `longest`
    processes       number over which micro-batches are dealt; they sum their gradients after backward
    threads         of a CPU, each with its own scratch; None: torch's setting
    aside           a second model that the loss reads (aside.py)
    answers         what the model samples from itself before a micro-batch; None: nothing
    """

    tokens: int
    rank: int | None = None
    experts_rank: int | None = None
    optimizer_moments: Literal["float32", "int8"] = "float32"
    optimizer: Literal["adamw", "muon"] = "adamw"
    loss_rows: int = 2048
    loss_bytes: int = 10
    micro_batches: int = 1
    receipt_bytes: int = 0
    chunk: int | None = None
    longest: int | None = None
    mean_length: float | None = None
    processes: int = 1
    threads: int | None = None
    aside: Aside | None = None
    answers: Answers | None = None

    @property
    def own_batches(self) -> int:
        """Micro-batches of the busiest process."""
        return -(-self.micro_batches // self.processes)

    def at_once(self, layout: Layout, compute_bytes: int) -> int:
        """Return the number of tokens whose inner activations of a layer are alive at the same time.

        All of them if half-precision weights train (models/recompute.py), or if weights are sharded.
        """
        whole = layout.recompute == "nothing" or (self.rank is None and compute_bytes < 4) or layout.sharded
        if whole or self.chunk is None or self.longest is None:
            return self.tokens
        return min(self.tokens, max(self.chunk, self.longest))


@dataclass(frozen=True)
class Plan:
    """The bytes of a run.

    terms    name -> bytes at the worst moment of a step; they add up
    beside   name -> bytes of terms that are larger at another moment
    load     bytes while loading
    avoided  additional bytes if packed weights were expanded
    time     seconds of a micro-batch and an update; None if the device's rates are unknown
    rates    where the rates come from, in words
    why      why `layout.recompute` was chosen, in words; "" if it was requested
    why_layout  the same for the rest of the layout
    host     bytes of experts, layer inputs and moments in host memory (if that is not the device's), and
             how much of it is usable
    host_moments  of them, those of the moments
    """

    terms: dict[str, int]
    beside: dict[str, int]
    load: int
    usable: int
    avoided: int
    adapter_parameters: int
    hardware: Hardware
    layout: Layout
    work: Work
    sizes: Sizes
    time: Seconds | None = None
    rates: str = ""
    why: str = ""
    why_layout: str = ""
    host: int = 0
    host_usable: int = 0
    host_moments: int = 0

    @property
    def training(self) -> int:
        """Bytes at the worst moment of a step."""
        return sum(self.terms.values())

    @property
    def total(self) -> int:
        """Bytes at the worst moment of the run, including loading."""
        return max(self.training, self.load)

    @property
    def per_device(self) -> list[int]:
        """One entry per device (today there is one)."""
        return [self.total]

    @property
    def max_over_min(self) -> float:
        return max(self.per_device) / min(self.per_device)

    @property
    def fits(self) -> bool:
        return self.total <= self.usable and self.host <= self.host_usable

    @property
    def over(self) -> float:
        """Bytes over usable bytes, for the fuller memory."""
        return max(self.total / max(1, self.usable), self.host / max(1, self.host_usable))


def plan(sizes: Sizes, layout: Layout, work: Work, hardware: Hardware) -> Plan:
    """Return the bytes per term of one process. Weights, adapter, gradients and optimizer are exact.

    A step's activations are within 10 % at true size (docs/measured/peak.md).
    sizes: if processes share the experts, those of one process (places.of_one).
    """
    come = units(sizes, layout.buffer_bytes)
    in_groups = len(come) > len(sizes.streamed)
    moments = (
        _moments(sizes_with_groups(sizes, come), layout, replace(work, chunk=None))
        if in_groups
        else _moments(sizes, layout, work)
    )
    # offloaded state does not affect the device's worst moment
    elsewhere = STATE if layout.adapters == "host" else ()
    worst = max(moments, key=lambda terms: sum(size for name, size in terms.items() if name not in elsewhere))
    names = {name for terms in moments for name in terms}
    beside = {name: max(terms.get(name, 0) for terms in moments) for name in sorted(names)}
    cast = sizes.cast_per_rank * (work.experts_rank or work.rank or 0)
    base, host = sizes.base, 0
    if layout.sharded:
        base += _here(sizes, work) * 4 - sizes.elements * sizes.compute_bytes
    buffers = buffer_bytes(come) if layout.experts != "device" else 0
    second, learnt = (work.aside.stays, work.aside.learnt) if work.aside else (0, 0)
    if layout.experts == "disk" or (layout.experts == "host" and hardware.kind != "cpu"):
        base -= sum(sizes.streamed)
        host = sum(sizes.streamed) if layout.experts == "host" else 0
    if layout.boundary_leaves:  # the last layer's input stays on the device
        host += (sizes.num_layers - 1) * work.tokens * sizes.stream_size * sizes.compute_bytes
    in_host = _moments_of(sizes, work) if layout.optimizer == "host" else 0
    gathered = 0
    if layout.rest == "peers":
        parts = [part_bytes(layer, work.processes) for layer in sizes.rest]
        base += sum(parts) - sum(sizes.rest)
        gathered = buffer_bytes([work.processes * part for part in parts])
    recomputed, longest = layout.recompute != "nothing", work.longest or work.tokens
    chosen = sizes.chosen_keys(work.tokens, longest, recomputed=recomputed)
    return Plan(
        terms={
            "base": base,
            **({"second model": second} if second else {}),
            **({"expert buffers": buffers} if buffers else {}),
            **({"gathered layers": gathered} if gathered else {}),
            **_stays(sizes, layout, work),
            **sizes.first_values(work.rank, work.experts_rank),
            # float32: itself, its gradient and its moments
            **({"projections": int(learnt * (8 + MOMENT_BYTES[work.optimizer_moments]))} if learnt else {}),
            "batch and rotary tables": work.tokens * (BATCH_BYTES + sizes.tables),
            **worst,
            **({"chosen keys": chosen} if chosen else {}),
            **({"rounding": sizes.rounding} if sizes.rounding else {}),
            "expert workspace": max(sizes.workspace + cast, work.aside.workspace if work.aside else 0),
            "attention workspace": _attention(sizes, work, hardware.kind),
        },
        beside={name: size for name, size in beside.items() if size > worst.get(name, 0)},
        load=base + second + buffers + gathered + LOAD_BUFFERS + sizes.packing,
        usable=int(hardware.available * USABLE),
        avoided=sizes.expanded - sizes.base,
        adapter_parameters=sizes.adapter_parameters(work.rank, work.experts_rank),
        hardware=hardware,
        layout=layout,
        work=work,
        sizes=sizes,
        host=host + in_host,
        host_usable=int(hardware.host * USABLE),
        host_moments=in_host,
    )


def beside(work: Work, aside: Aside) -> Work:
    """Return the Work with a second model, including its block of logits if it has its own."""
    work = replace(work, aside=aside)
    return replace(work, loss_rows=aside.loss_rows, loss_bytes=aside.loss_bytes) if aside.loss_rows else work


def replanned(before: Plan, layout: Layout | None = None, **work: Any) -> Plan:
    """Return the plan of the same model on the same machine with another layout or other work."""
    return plan(before.sizes, layout or before.layout, replace(before.work, **work), before.hardware)


def _stays(sizes: Sizes, layout: Layout, work: Work) -> dict[str, int]:
    """Return what stays during the whole run besides the base."""
    moments = _bytes_of_moments(sizes, work)
    if work.rank is not None:
        adapter, state = sizes.adapter_parameters(work.rank, work.experts_rank) * 4, _moments_of(sizes, work)
        if layout.optimizer == "device" or layout.adapters == "host":
            return {"adapter": adapter, "optimizer": state}
        largest = int(sizes.largest_factor(work.rank, work.experts_rank) * moments)
        slots = MOMENT_SLOTS * min(state, max(MOMENT_CHUNK, largest))
        return {"adapter": adapter, "optimizer": 0, "moments on their way": slots}

    if layout.sharded:
        here = _here(sizes, work)
        stays = {"adapter": 0, "optimizer": int(here * moments), "gathered weights": _gathered(sizes)}
        if work.receipt_bytes:
            stays["copies for the receipt"] = min(here * 4, work.receipt_bytes)
        return stays

    # Every weight trains. Weights in half precision have fp32 masters.
    weights = sizes.elements
    stays = {"adapter": 0, "optimizer": int(weights * (moments + 4 * (sizes.compute_bytes < 4)))}
    if work.receipt_bytes:  # copies of what the optimizer updates, fp32
        stays["copies for the receipt"] = min(weights * max(sizes.compute_bytes, 4), work.receipt_bytes)
    return stays


def _bytes_of_moments(sizes: Sizes, work: Work) -> float:
    """Return the bytes of the moments per trained parameter, on average if Muon moves some of them."""
    each, muon = MOMENT_BYTES[work.optimizer_moments], work.optimizer == "muon" and sizes.matrices
    return each + (MOMENTUM_BYTES - each) * sizes.matrices / sizes.elements if muon else each


def _moments_of(sizes: Sizes, work: Work) -> int:
    """Return the bytes of the adapters' moments, wherever they are."""
    return int(sizes.adapter_parameters(work.rank, work.experts_rank) * MOMENT_BYTES[work.optimizer_moments])


def _here(sizes: Sizes, work: Work) -> int:
    """Return the number of weights on the fullest process if all are sharded."""
    return -(-sizes.elements // work.processes)


def _gathered(sizes: Sizes) -> int:
    """Return the bytes of temporarily gathered weights, in the compute dtype and in float32, if sharded.

    Embedding, norm and head during a step; for the largest layer its weights, the next one's as they arrive,
    and its gradient, with a float32 copy for the reduction.
    """
    size = sizes.compute_bytes
    return sizes.ends * size + sizes.largest_layer * (2 * size + size + GRADIENT_BYTES)


def _gradients(sizes: Sizes, layout: Layout, work: Work) -> tuple[int, int, int]:
    """Return (all gradients, those alive when the last layer's backward starts, and when the first's does).

    Alive early are the sums of earlier micro-batches and, if the head trains, its gradient, V · D. At the
    first layer, its own and the embedding's are still to come (sizes.last_elements).
    """
    own_batches = work.own_batches
    if work.rank is not None:
        every = sizes.adapter_parameters(work.rank, work.experts_rank) * GRADIENT_BYTES
        return every, every if own_batches > 1 else 0, every

    # Sharded gradients are float32 rows. Those of embedding and head are full until backward ends, then with
    # a float32 copy for the reduction.
    if layout.sharded:
        rows = _here(sizes, work) * GRADIENT_BYTES
        head = min(sizes.ends, sizes.vocab_size * sizes.hidden_size) * sizes.compute_bytes
        whole = sizes.ends * (sizes.compute_bytes + GRADIENT_BYTES)
        return rows + whole, rows * (work.own_batches > 1) + head, rows + head

    # Half-precision gradients of several micro-batches are summed in fp32: 4 bytes per weight beside the
    # arriving gradient. With two micro-batches it is 2 bytes, because both gradients are in half precision
    # and each is freed when its sum is formed. In fp32 the arriving gradient is added in place.
    half = sizes.compute_bytes < 4
    sums = sizes.elements * ({1: 0, 2: 2}.get(own_batches, 4) if half else 4 * (own_batches > 1))
    came = sizes.compute_bytes * (half or own_batches == 1)  # bytes per arriving number
    arriving = sizes.elements * came + sizes.passing * sizes.compute_bytes
    head, last = sizes.vocab_size * sizes.hidden_size * came, sizes.last_elements * came
    return sums + arriving, sums + min(head, arriving), sums + arriving - last


def _moments(sizes: Sizes, layout: Layout, work: Work) -> list[dict[str, int]]:
    """Return the live memory at each candidate for the worst moment.

    They are those of `_micro_batch`, `_exchange`, `_answers` and, with Muon, of its largest update.
    """
    sums = work.processes > 1 and not layout.sharded
    moments = [*_micro_batch(sizes, layout, work), *([_exchange(sizes, work)] if sums else [])]
    if work.optimizer == "muon":
        every = sizes.elements * GRADIENT_BYTES if sums else _gradients(sizes, layout, work)[0]
        moments.append({"gradients": every, "orthogonalisation": sizes.orthogonal})
    return moments if work.answers is None else [*moments, _answers(sizes, work, work.answers)]


def _answers(sizes: Sizes, work: Work, answers: Answers) -> dict[str, int]:
    """Return the live memory while the model answers, before a step has gradients.

    The KV cache, and the larger of two: the prefill of at most a micro-batch of prompts, with a layer's input
    and output and its largest part, or the work on the logits of a step.
    """
    token = 2 * sizes.stream_size * sizes.compute_bytes + sizes.forward
    return {
        "KV cache of answers": answers.cache(sizes.cached, sizes.state),
        "sampling answers": max(work.tokens * token, answers.logits(sizes.vocab_size)),
    }


def _exchange(sizes: Sizes, work: Work) -> dict[str, int]:
    """Return the live memory after backward, while gradients are summed in fp32: 4 bytes per trained weight.

    Tensors are copied together into one buffer of at most BUCKET bytes; a larger one is reduced alone,
    without a copy (processes/collectives.py). A half-precision gradient stays alive until its fp32 sum has
    come back: 2 bytes per number in transit (train/optim.py).
    nccl's own memory is in no term.
    """
    trained = sizes.elements if work.rank is None else sizes.adapter_parameters(work.rank, work.experts_rank)
    sums = trained * GRADIENT_BYTES
    together, alone = min(BUCKET, sums), 0
    if work.rank is None and sizes.compute_bytes < 4 and work.own_batches == 1:
        together += together // 2
        alone = sizes.compute_bytes * sizes.largest
    return {"gradients": sums, "gradients on their way": max(together, alone)}


def _micro_batch(sizes: Sizes, layout: Layout, work: Work) -> list[dict[str, int]]:
    """Return the live memory at four moments of a micro-batch, without permanent terms.

    stream = T · D · bytes.

    loss   the layers' inputs and the last one's output, stream · (L + 1); T · Σ of what the last keep_layers
           keep (see `_kept`); the loss block
    last   the same inputs and the gradient of the last output; what layers keep, except the current one,
           which
           counts its own: T · sizes.layer. In chunks of C tokens: C · sizes.layer, what all layers keep, and
           the gradient of the layer's input, stream
    first  one input and one gradient, 2 · stream; T · sizes.layer, in chunks as above; the gradients that
           exist by then
    end    all gradients, and the gradient of the first layer's input, 2 · stream
    With offloaded inputs, two of them are on the device at once: 3 · stream in place of stream · (L + 1).
    Without recompute, a layer's inputs are part of what it holds: T · Σ sizes.held, at the end T · the
    last's.
    """
    stream = work.tokens * sizes.stream_size * sizes.compute_bytes
    every, early, late = _gradients(sizes, layout, work)
    if work.aside is not None:
        without = _micro_batch(sizes, layout, replace(work, aside=None))
        return _asking(without, work.aside, stream)
    end = {"gradients": every, "boundary activations": 2 * stream}
    loss = _loss(sizes, work, stream)
    if layout.recompute == "nothing":
        one, name = {"boundary activations": stream}, "all layers' activations"
        held = work.tokens * sum(sizes.held)
        return [
            {"gradients": early, **one, name: held, "loss block": loss},
            {"gradients": early, **one, name: held + work.tokens * sizes.own},
            {"gradients": late, **one, name: work.tokens * sizes.layer},
            end,
        ]
    at_once = work.tokens if sizes.whole.half else work.at_once(layout, sizes.compute_bytes)
    chunked = at_once < work.tokens
    alive = min(3, sizes.num_layers + 1) if layout.boundary_leaves else sizes.num_layers + 1
    boundary = {"boundary activations": stream * alive}
    layer = {"one layer's recompute": at_once * sizes.layer + stream * chunked}

    def others(bytes_by_layer: Sequence[int]) -> int:
        total = sum(bytes_by_layer)
        return total if chunked else total - max(bytes_by_layer, default=0)

    def own(bytes_by_layer: Sequence[int]) -> int:
        return bytes_by_layer[0] if chunked else 0

    return [
        {"gradients": early, **boundary, **_kept(sizes, layout, work, sum), "loss block": loss},
        {"gradients": early, **boundary, **_kept(sizes, layout, work, others), **layer},
        {"gradients": late, "boundary activations": 2 * stream, **_kept(sizes, layout, work, own), **layer},
        end,
    ]


def _asking(moments: list[dict[str, int]], aside: Aside, stream: int) -> list[dict[str, int]]:
    """Return the loss's moments with a second model: during its forward, and after it.

    If it reads layers too, those come third; of the token loss there remain the gradient and its hidden
    state. The gradients by layers wait for backward.
    """
    at_loss, *later = moments
    others = {name: size for name, size in at_loss.items() if name != "loss block"}
    outputs = {"what the second model said": aside.outputs}
    if not aside.compared:
        return [others | {"second model's forward": aside.forward}, at_loss | outputs, *later]
    read = "read inside of layers"
    return [
        others | {"second model's forward": aside.forward, read: aside.tapped},
        at_loss | outputs | {read: aside.tapped},
        others | outputs | {"loss block": 3 * stream, read: aside.compared},
        *(moment | {read: aside.later} for moment in later),
    ]


def _attention(sizes: Sizes, work: Work, kind: str) -> int:
    """Return the bytes of attention blocks for the longest document.

    A GPU's kernels keep them on the chip, except for softcapped scores, and in float32 for sinks and windows
    shorter than the document.
    """
    dtype, length = {2: torch.bfloat16, 4: torch.float32}[sizes.compute_bytes], work.longest or work.tokens
    threads = work.threads or torch.get_num_threads()

    def sized(shape: AttentionShape) -> int:
        *widths, window, by_blocks, _, _, _ = shape
        if (chosen := shape.chosen_scratch(work.tokens, length)) is not None:
            return chosen
        narrower = window is not None and window < length
        if by_blocks or narrower:
            return scratch_bytes(
                *widths, tokens=work.tokens, length=length, window=window if narrower else None
            )
        if kind != "cpu":
            return 0
        return workspace_bytes(*widths, tokens=work.tokens, length=length, dtype=dtype, threads=threads)

    return max(map(sized, sizes.attention), default=0)


def _kept(sizes: Sizes, layout: Layout, work: Work, count: Callable[[Sequence[int]], int]) -> dict[str, int]:
    """Return the bytes kept by the last keep_layers.

    count: sums over the relevant layers, given each one's bytes per token.
    """
    by_name: dict[str, tuple[int, ...]] = {}
    if layout.recompute in ("selective", "elementwise"):
        by_name["kept of attention and experts"] = sizes.kept
    if layout.recompute == "elementwise":
        by_name["kept of linear layers"] = sizes.products
    first = 0 if layout.keep_layers is None else max(0, sizes.num_layers - layout.keep_layers)
    return {
        name: work.tokens * count([size if layer >= first else 0 for layer, size in enumerate(by_layer)])
        for name, by_layer in by_name.items()
    }


def _loss(sizes: Sizes, work: Work, stream: int) -> int:
    """Return N · (V · loss_bytes + D · bytes) for a block of N rows and its rows' gradient, plus 3 · stream.

    The three are the hidden state, its supervised rows and their gradient. If the head trains in half
    precision over several blocks, V · D · 4 is added: the float32 sum of its gradient.
    """
    rows = min(work.loss_rows, work.tokens)
    row = sizes.vocab_size * work.loss_bytes + sizes.hidden_size * sizes.compute_bytes
    block = rows * row + 3 * stream
    if (work.rank is None or sizes.whole.head) and sizes.compute_bytes < 4 and work.tokens > work.loss_rows:
        block += sizes.vocab_size * sizes.hidden_size * 4
    return block
