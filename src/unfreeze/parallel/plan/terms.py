"""The arithmetic: what a run asks for -> bytes per term.

Peak = what stays (base, adapter, gradients, optimizer) + what a step holds at its worst moment: boundary
activations, what recompute keeps, the expert workspace, and the larger of one layer's recompute and the loss
block. Loading comes at another time: the base and a read buffer per thread.

T tokens of a micro-batch, D model width, V vocabulary, N rows of a block of logits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from unfreeze.checkpoint.stream import CHUNK, THREADS
from unfreeze.models.recompute import Recompute
from unfreeze.parallel.machine import Hardware
from unfreeze.parallel.plan.sizes import Sizes

if TYPE_CHECKING:
    from unfreeze.parallel.plan.seconds import Seconds

MOMENT_BYTES = {"float32": 8.0, "int8": 2.0 + 8.0 / 256}  # per trained parameter: train/moments.py
GRADIENT_BYTES = 4  # adapters and their gradients are fp32
LOAD_BUFFERS = THREADS * CHUNK  # checkpoint/stream.py: one buffer per reading thread
# per token: tokens, targets, positions (int64), weights (float32), and which are supervised
BATCH_BYTES = 3 * 8 + 4 + 8
SAVED = 0.7  # of a layer's worst moment: the share that autograd keeps; a fit to small CPU runs
USABLE = 0.92  # of the free memory: allocator fragmentation and what the interpreter and BLAS take besides


@dataclass(frozen=True)
class Work:
    """What a run asks for.

    tokens          of one micro-batch; a step has micro_batches of them, one after the other
    rank            None: no adapter, every weight trains
    experts_rank    None: as rank
    recompute       "layers" keeps each layer's input, "selective" also what attention and experts made,
                    "elementwise" also outputs of linear layers, "nothing" (is recomputed) all activations
    keep_layers     how many layers, from the last, keep more than their input; None: all
    loss_rows, loss_bytes  rows of the largest block of logits, and bytes alive per logit of it
                    (kernels/linear_cross_entropy.block_cost)
    receipt_bytes   the most that copies of trained weights take during the first step, where every weight
                    trains (adapters/snapshot.py)
    chunk           tokens that go through a recomputed layer at once, in whole documents (models/chunks.py);
                    None: all
    longest         tokens of the longest document; None: as many as there are
    """

    tokens: int
    rank: int | None = None
    experts_rank: int | None = None
    recompute: Recompute = "layers"
    keep_layers: int | None = None
    optimizer_moments: Literal["float32", "int8"] = "float32"
    loss_rows: int = 2048
    loss_bytes: int = 10
    micro_batches: int = 1
    receipt_bytes: int = 0
    chunk: int | None = None
    longest: int | None = None

    def at_once(self, compute_bytes: int) -> int:
        """Tokens for which one layer's inner activations are alive at the same time.

        All of them where half-precision weights train (models/recompute.py).
        """
        whole = self.recompute == "nothing" or (self.rank is None and compute_bytes < 4)
        if whole or self.chunk is None or self.longest is None:
            return self.tokens
        return min(self.tokens, max(self.chunk, self.longest))


@dataclass(frozen=True)
class Plan:
    """The bytes of a run.

    terms    name -> bytes at the worst moment of a step; they add up.
    beside   the smaller of one layer's recompute and the loss block: it comes at another moment.
    load     bytes while loading.
    avoided  bytes that packed weights would take in addition if they were expanded.
    time     seconds of a micro-batch and an update; None where rates of the device are not known.
    rates    where the rates come from, in words.
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
    time: Seconds | None = None
    rates: str = ""

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
        """One entry per device (today there is one)."""
        return [self.total]

    @property
    def max_over_min(self) -> float:
        return max(self.per_device) / min(self.per_device)

    @property
    def fits(self) -> bool:
        return self.total <= self.usable


def plan(sizes: Sizes, work: Work, hardware: Hardware) -> Plan:
    """Bytes per term. Weights, adapter, gradients and optimizer are exact.

    A step's activations are within about 15 % (tests/parallel).
    """
    stream = work.tokens * sizes.hidden_size * sizes.compute_bytes
    boundary, kept, layer = _activations(sizes, work, stream)
    smaller, larger = sorted((layer, _loss(sizes, work, stream)), key=lambda moment: sum(moment.values()))

    # Copies of the adapter of one layer's experts in the computation's dtype: its factors, their gradient,
    # and on CUDA their columns of the workspace.
    copies = 3 if hardware.kind == "cuda" else 2
    cast = copies * sizes.compute_bytes * sizes.cast_per_rank * (work.experts_rank or work.rank or 0)
    return Plan(
        terms={
            "base": sizes.base,
            **_stays(sizes, work),
            "batch and rotary tables": work.tokens * (BATCH_BYTES + sizes.tables),
            "boundary activations": boundary,
            **kept,
            **larger,
            "expert workspace": sizes.workspace + cast,
        },
        beside=smaller,
        load=sizes.base + LOAD_BUFFERS,
        usable=int(hardware.available * USABLE),
        avoided=sizes.expanded - sizes.base,
        adapter_parameters=sizes.adapter_parameters(work.rank, work.experts_rank),
        hardware=hardware,
        work=work,
        sizes=sizes,
    )


def replace_work(before: Plan, **changes: Any) -> Plan:
    """The plan of the same model on the same machine with other work."""
    return plan(before.sizes, replace(before.work, **changes), before.hardware)


def _stays(sizes: Sizes, work: Work) -> dict[str, int]:
    """What is there during the whole run besides the base."""
    moments = MOMENT_BYTES[work.optimizer_moments]
    if work.rank is not None:
        trained = sizes.adapter_parameters(work.rank, work.experts_rank)
        return {
            "adapter": trained * 4,
            "gradients": trained * GRADIENT_BYTES,
            "optimizer": int(trained * moments),
        }

    # Every weight trains. Weights in half precision have fp32 masters, and gradients of several micro-batches
    # are summed in fp32: 4 bytes a weight beside the gradient that arrives. With two micro-batches it is 2
    # bytes, because both gradients are in half precision and each is freed when its sum is made.
    half, weights = sizes.compute_bytes < 4, sizes.elements
    sums = half * weights * {1: 0, 2: 2}.get(work.micro_batches, 4)
    stays = {
        "adapter": 0,
        "gradients": weights * sizes.compute_bytes + sums,
        "optimizer": int(weights * (moments + 4 * half)),
    }
    if work.receipt_bytes:  # copies of what the optimizer updates: fp32
        stays["copies for the receipt"] = min(weights * max(sizes.compute_bytes, 4), work.receipt_bytes)
    return stays


def _activations(sizes: Sizes, work: Work, stream: int) -> tuple[int, dict[str, int], dict[str, int]]:
    """(boundary, kept, layer), where stream = T · D · bytes.

    boundary   stream · (layers + 1): each layer's input, which recompute keeps, and the last one's output
    kept       T · Σ of what the last keep_layers keep (see _kept)
    layer      T · sizes.layer, once with recompute; without, SAVED of it for every other layer, which has
               what backward needs and no gradients yet. In chunks of C tokens
               C · sizes.layer, and the gradients of the layer's output and input, 2 · stream
    """
    if work.recompute == "nothing":
        layers = sizes.layer * (1 + SAVED * (sizes.num_layers - 1))
        return 0, {}, {"all layers' activations": int(work.tokens * layers)}
    at_once = work.at_once(sizes.compute_bytes)
    chunked = at_once < work.tokens
    kept: dict[str, int] = {}
    if work.recompute in ("selective", "elementwise"):
        kept["kept of attention and experts"] = work.tokens * _kept(sizes.kept, work, chunked)
    if work.recompute == "elementwise":
        kept["kept of linear layers"] = work.tokens * _kept(sizes.products, work, chunked)
    layer = {"one layer's recompute": at_once * sizes.layer + 2 * stream * chunked}
    return stream * (sizes.num_layers + 1), kept, layer


def _kept(by_layer: tuple[int, ...], work: Work, chunked: bool) -> int:
    """Bytes per token that the last keep_layers keep.

    The largest is left out: the layer being computed counts its own under "one layer's recompute". With
    chunks that term holds one chunk only, so all layers are counted here.
    """
    count = len(by_layer) if work.keep_layers is None else min(work.keep_layers, len(by_layer))
    keeping = sorted(by_layer[len(by_layer) - count :])
    return sum(keeping if chunked else keeping[:-1])


def _loss(sizes: Sizes, work: Work, stream: int) -> dict[str, int]:
    """N · V · loss_bytes for a block of N rows, plus 3 · stream, where stream = T · D · bytes.

    The three are the hidden state, its supervised rows and their gradient. Where the head trains in half
    precision over several blocks, V · D · 4 comes on top: the float32 sum of its gradient.
    """
    block = min(work.loss_rows, work.tokens) * sizes.vocab_size * work.loss_bytes + 3 * stream
    if work.rank is None and sizes.compute_bytes < 4 and work.tokens > work.loss_rows:
        block += sizes.vocab_size * sizes.hidden_size * 4
    return {"loss block": block}
