"""Bytes of a layout, place by place, on machines that may not be here.

Each of n devices gets t = T / n of a step's T tokens. Layouts that no run supports yet are counted too;
Layout.not_built names what is missing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from unfreeze.core.errors import ConfigError
from unfreeze.core.layout import GIB, Layout
from unfreeze.core.process import COMPILED, PROCESS
from unfreeze.core.units import format_bytes
from unfreeze.kernels.expert_mlp import expert_groups, workspace_bytes
from unfreeze.models.blocks.experts import UNEVEN, bytes_at_work
from unfreeze.parallel.machine import Hardware
from unfreeze.parallel.plan.counts import Counts
from unfreeze.parallel.plan.fleet import Fleet
from unfreeze.parallel.plan.sizes import Sizes
from unfreeze.parallel.plan.terms import MOMENT_BYTES, STATE, USABLE, Plan, Work, plan

BUFFERS = 2  # layers on a device at once when layers are streamed: one computes while the next arrives
# A buffer holds a layer's experts. In groups it holds at most a twelfth of the device's memory: on an H200
# the 9.5 GB of a Kimi-K2 layer, on a card of 32 GB a quarter of the layer at a time.
BUFFER_SHARE = 12
ROOM = 64 << 20  # bytes of rows, 16 D each with all that is held of them


@dataclass(frozen=True)
class Places:
    """name -> bytes, of the fullest device and of all host memory.

    disk: bytes read again in each pass. compiled: maximum bytes of kernels when they are compiled.
    """

    device: dict[str, int]
    host: dict[str, int]
    device_usable: int
    host_usable: int
    disk: int = 0
    compiled: int = 0

    @property
    def fits(self) -> bool:
        return self.over == ""

    @property
    def roomy(self) -> bool:
        """True if it fits together with the memory of a CPU's compiled kernels, which is in no term."""
        return self.fits and sum(self.device.values()) + self.compiled <= self.device_usable

    @property
    def over(self) -> str:
        """The place that is too small: "device", "host" or ""."""
        if sum(self.device.values()) > self.device_usable:
            return "device"
        return "host" if sum(self.host.values()) > self.host_usable else ""


def bytes_by_place(sizes: Sizes, counts: Counts, work: Work, fleet: Fleet, layout: Layout) -> Places:
    """Return the bytes of a step. `work.tokens` and `work.micro_batches` are one device's."""
    n, here = fleet.count, fullest_share(counts, layout.sharing)
    local = _local(sizes, counts, fleet.kind, layout.sharing)
    of_layer = int(counts.layer_experts * here)
    if layout.sharing > 1:
        work = replace(work, chunk=None)

    # each device is a process of its own with as many micro-batches; they sum their gradients
    work = replace(work, micro_batches=work.micro_batches * n, processes=work.processes * n)
    here_alone = layout.but(experts="device", rest="device")  # experts and rest are counted below
    planned = _step(local, here_alone, work, Hardware(fleet.kind, fleet.name, 1, fleet.memory, fleet.memory))
    terms = dict(planned.terms)
    in_float32 = terms.pop("base")  # for sharded weights: their shards' difference to the full weights
    if fleet.kind == "cpu" and not fleet.here:  # this machine's free memory already excludes this process
        terms["interpreter and libraries"] = PROCESS
    host: dict[str, int] = {}

    # weights
    if layout.experts == "device":
        experts = int(counts.experts_bytes * here)
    else:
        experts = BUFFERS * min(of_layer, layout.buffer_bytes or of_layer)
        if layout.experts == "host":
            host["experts"] = counts.experts_bytes * n // layout.sharing
    whole, with_two_layers = counts.rest_bytes, counts.ends_bytes + BUFFERS * counts.layer_rest
    in_parts = (whole - counts.ends_bytes) // n + with_two_layers
    rest = {"device": whole, "peers": in_parts, "host": with_two_layers}[layout.rest]
    frozen = "the frozen rest" if work.rank is not None else "the other weights" if experts else "weights"
    if layout.rest == "host":
        host[frozen] = whole
    weights = {"experts": experts, frozen: rest}
    if layout.sharded:
        weights = {"a part of the weights": experts + rest + in_float32}

    # trained state: float32 factors, gradients and moments. If it is in host memory, a device has the factors
    # and gradients of BUFFERS layers in the compute dtype
    if layout.adapters == "host":
        trained = sizes.adapter_parameters(work.rank, work.experts_rank)
        host["adapters, gradients, optimizer"] = int(trained * (8 + MOMENT_BYTES[work.optimizer_moments]))
        numbers = local.adapter_parameters(work.rank, work.experts_rank)
        terms = {name: size for name, size in terms.items() if name not in STATE}
        terms["adapters of two layers"] = 2 * BUFFERS * local.compute_bytes * numbers // counts.num_layers
    if layout.boundary == "host":
        host["boundary activations"] = n * (planned.host - planned.host_moments)
    if layout.optimizer == "host" and layout.adapters == "device":
        host["moments"] = n * planned.host_moments
    return Places(
        device={name: size for name, size in {**weights, **terms}.items() if size},
        host={name: size for name, size in host.items() if size},
        device_usable=int(fleet.memory * USABLE),
        host_usable=int(fleet.host * USABLE),
        disk=counts.experts_bytes * n // layout.sharing if layout.experts == "disk" else 0,
        compiled=COMPILED if fleet.kind == "cpu" else 0,
    )


def of_one(sizes: Sizes, counts: Counts, kind: str, split: int) -> Sizes:
    """Return the sizes of one of `split` processes that share the experts; the fullest of them."""
    if split == 1:
        return sizes
    here = fullest_share(counts, split)
    elsewhere = counts.experts_bytes - int(counts.experts_bytes * here)
    return replace(
        _local(sizes, counts, kind, split),
        base=sizes.base - elsewhere,
        expanded=sizes.expanded - int((counts.experts_bytes + sizes.expanded - sizes.base) * (1 - here)),
        streamed=tuple(int(size * here) for size in sizes.streamed),
    )


def exchanged(counts: Counts, size: int) -> int:
    """Return bytes per token of rows in a layer's backward beside the expert op's own.

    Numbers have `size` bytes. K rows of each: x as received, dy as sent and as received, dx. A process may
    receive more rows than it sends;
    UNEVEN times as many are counted.
    """
    return int(4 * UNEVEN * counts.experts_per_token * counts.hidden_size * size)


def room(counts: Counts, tokens: int, split: int) -> int:
    """Return the rows of split experts that a process has memory for, if each works on `tokens`.

    UNEVEN times the mean of the process with the most experts. Never fewer than what takes ROOM bytes, so
    that small models are not cut.
    """
    mean = tokens * counts.experts_per_token * split * fullest_share(counts, split)
    return max(int(UNEVEN * mean), ROOM // (16 * counts.hidden_size))


def with_buffers(layout: Layout, counts: Counts, fleet: Fleet) -> Layout | None:
    """Return the layout with buffers of a share of the device's memory if `buffer` is "auto".

    None if a layer's experts cannot be loaded in such groups, or need none. Raises ConfigError for a
    requested buffer that is too small for one expert.
    """
    if layout.buffer == 0:
        return layout
    of_layer = int(counts.layer_experts * fullest_share(counts, layout.sharing))
    if layout.buffer != "auto":
        size = layout.buffer_bytes or 0
        if size < of_layer and not counts.can_come_in(size):
            one = format_bytes(counts.layer_experts // max(1, counts.num_experts))
            fault = (
                "they cannot be loaded in groups"
                if counts.come_whole
                else f"one expert of a layer takes {one}"
            )
            raise ConfigError(f"place.buffer is {layout.buffer:g}, but {fault}", next="--place.buffer auto")
        return layout if size < of_layer else layout.but(buffer=0.0)
    size = fleet.memory // BUFFER_SHARE
    if not counts.can_come_in(size) or size >= of_layer:
        return None
    return layout.but(buffer=size / GIB)


def fullest_share(counts: Counts, split: int) -> float:
    """Return the share of the experts on the fullest of `split` devices."""
    return -(-counts.num_experts // split) / counts.num_experts if counts.num_experts else 1.0


# the same for all layouts that differ only in the place of experts and rest; saves a tenth of a refusal's
# time
@lru_cache(maxsize=64)
def _local(sizes: Sizes, counts: Counts, kind: str, split: int) -> Sizes:
    """Return one device's model without the base: its share of the experts' adapters and the workspace."""
    experts_here = fullest_share(counts, split)
    workspace, layer = sizes.workspace, sizes.layer
    if kind == "cuda" and workspace:  # dense experts need none, and go at once
        held, widths = -(-counts.num_experts // split), (counts.expert_input, counts.expert_width)
        dtype = torch.bfloat16 if sizes.compute_bytes == 2 else torch.float32
        before = counts.matrices - 1
        workspace = workspace_bytes(held, *widths, dtype, "cuda", before)
        # fewer experts make fewer groups, so more of their rows are in use at once
        mine, undivided = (
            bytes_at_work(
                counts.experts_per_token,
                *widths,
                sizes.compute_bytes,
                expert_groups(experts, *widths, dtype, "cuda", before),
            )
            for experts in (held, counts.num_experts)
        )
        layer += mine - undivided
    rows = exchanged(counts, sizes.compute_bytes) if split > 1 else 0
    return replace(
        sizes,
        base=0,
        layer=layer + rows,
        held=tuple(held + rows // 4 for held in sizes.held),  # x as received
        own=sizes.own + rows - rows // 4,
        workspace=workspace,
        cast_per_rank=int(sizes.cast_per_rank * experts_here),
        experts_largest=int(sizes.experts_largest * experts_here),
        experts_per_rank=int(sizes.experts_per_rank * experts_here),
    )


@lru_cache(maxsize=4096)
def _step(local: Sizes, layout: Layout, work: Work, here: Hardware) -> Plan:
    return plan(local, layout, work, here)
