"""Seconds of a step, term by term, on machines that may not be here.

The rates of each kind of work come from rates.py: device facts (machines.toml) or records.

T tokens a step on n devices, t = T / n of each; D model width, I expert width, E experts, K per token.
rows = t · K · imbalance · fullest, of the device with the most experts (⌈E / s⌉ if s devices share them),
with fullest = ⌈E / s⌉ s / E; m = t · K · imbalance · s / E rows per expert. v is the number of forward
visits: 2 if layers are recomputed, else 1. Backward is one more visit, for the input's gradient, and a second
one if weights train.

    experts    rows · (6 D I · visits + 2 A · (v + 2)) / experts(m)   A adapter numbers of an expert;
                                                                 experts(m) = R · m / (m + h)
    expansion  E here · 3 D I · B · x / expansion                packed experts only: B bytes, codes and 2;
                                                                 x = 2, or v + 1 if loaded in groups
    passes     rows · 2 · (14 D + 16 I) / passes                 gather, SwiGLU, combine, and their backward;
                                                                 adapters and exchange: passes.py
    dense      t · 2 · (N · visits + A · (v + 2)) / dense        N weights of layers, A numbers of adapters
    norms      t · 2 D · (v + 1) / 2 / norms                     two per layer; a record has both directions
    elementwise, adapters' traffic   passes.py / passes
    attention  t · A · seen · (v + 2.5) / attention              A FLOP per pair, documents of L tokens:
                                                                 L / 2 are seen, or less in a window
    router     t · 2 · router · visits / routers                 float32
    all-to-all 5 · rows · (n - 1) / n · 2 D / (0.75 link)        x, y, x again, dy, dx
    stream     bytes of experts here · 2 / host link             forward and backward, overlapped
    gather     rest · (n - 1) / n · 2 / link                     likewise; for sharded weights all of them
    head       t · 2 · D V · 2 / head                            3 if it trains; never recomputed
    optimizer  trained here / optimizer                          moments in host memory: 8 B · trained here /
                                                                 host link if that is longer
    sums       2 · 4 B · trained here · (c - 1) / c / link       c devices hold a copy; sharded: half
    orthogonalisation  its FLOP / dense                          with Muon; divided by n if sharded
    waits      grouped products · (experts · launch + wait)      only where they are a loop over experts
    launches   launches · launch                                 the part the device does not hide
    host       the update's Python after the read                on a GPU, which is idle meanwhile

    step = Σ over layers of max(compute + all-to-all, stream + gather) + head + optimizer + launches + host

link: NVLink inside a host. Between hosts each GPU has one port, which all-to-all uses alone; data that all
GPUs of a host receive alike comes through all of its ports.
With several micro-batches, t is one micro-batch's, and every term except optimizer and sums occurs once per
micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from unfreeze.core.layout import Layout
from unfreeze.kernels.expert_mlp import expert_groups
from unfreeze.parallel.plan import passes
from unfreeze.parallel.plan.counts import Counts
from unfreeze.parallel.plan.fleet import PER_HOST, Fleet
from unfreeze.parallel.plan.rates import Rates
from unfreeze.parallel.plan.sampling import Rollout

DISK = 3e9  # bytes/s per process, with one NVMe drive each
# NCCL's all-to-all over NVLink reaches about 340 of 450 GB/s (nccl-tests, published); derived, not measured
ALL_TO_ALL_SHARE = 0.75
NETWORK = 50e9  # bytes/s per GPU between hosts, one direction: one port of 400 Gb/s each
HOST_MEMORY = 200e9  # bytes/s of AdamW on the host
IMBALANCE = 1.1  # busiest device over the mean, if experts are split
# terms of a step that its micro-batches share
ONCE = ("optimizer", "orthogonalisation", "sum of gradients", "host")


@dataclass(frozen=True)
class Seconds:
    """The seconds of a step.

    terms    name -> seconds, as if each were alone
    step     seconds of the step, with transfers overlapped by computation
    shown    of the transfers, the part not hidden by computation
    forward  the forward pass's share of a layer's computation
    rollout  of a step with rewards, of which this is one pass; None: it has none
    """

    terms: dict[str, float]
    step: float
    shown: float
    forward: float
    rollout: Rollout | None = None

    @property
    def dominating(self) -> str:
        return max(self.terms, key=lambda name: self.terms[name])

    def of_passes(self, count: int) -> float:
        """Seconds of a step of `count` times as many micro-batches: an update comes once."""
        return count * self.step - (count - 1) * sum(self.terms.get(name, 0.0) for name in ONCE)


@dataclass(frozen=True)
class Step:
    """A step of `tokens` on all devices, in documents of `length`.

    trained: parameters that one device trains, of routed "experts" and of everything else, "dense".
    adapted: share of linear layers' widths that have adapters.
    orthogonal: FLOP of Muon's orthogonalisation; 0 with AdamW.
    """

    tokens: int
    length: int
    trained: Mapping[str, int]
    every_weight: bool = False
    micro_batches: int = 1
    adapted: float = 1.0
    orthogonal: float = 0.0


def seconds(
    counts: Counts,
    fleet: Fleet,
    rates: Rates,
    layout: Layout,
    step: Step,
    *,
    imbalance: float = IMBALANCE,
    second: float = 0.0,
) -> Seconds:
    """Return the seconds of a step. second: those of a second model per micro-batch (asking)."""
    trained, micro_batches = step.trained, step.micro_batches
    n, D, I = fleet.count, counts.hidden_size, counts.expert_width
    before = counts.matrices - 1
    link, host = (
        (fleet.device.link_gb_s * 1e9, fleet.device.host_gb_s * 1e9) if fleet.device else (math.inf, math.inf)
    )
    t, here = step.tokens / n / micro_batches, sum(trained.values())
    visits = _visits(layout, every_weight=step.every_weight)

    # routed experts
    mean_rows = t * counts.experts_per_token * (imbalance if layout.sharing > 1 else 1.0)
    held, mean_held = -(-counts.num_experts // layout.sharing), counts.num_experts / layout.sharing
    rows = mean_rows * (held / mean_held if layout.sharing > 1 else 1.0)
    terms: dict[str, float] = dict.fromkeys(("experts", "expansion", "passes over rows"), 0.0)
    groups = (
        expert_groups(held, counts.expert_input, I, torch.bfloat16, fleet.kind, before)
        if counts.moe_layers
        else 1
    )
    if counts.num_experts and counts.moe_layers:
        of_layer = trained.get("experts", 0) / counts.moe_layers / held
        flops = rows * 2 * (counts.expert_weights * (visits.experts + visits.backward))
        flops += rows * 2 * of_layer * (visits.experts + 2)
        terms["experts"] = counts.mixtures * flops / rates.of_experts(mean_rows / mean_held)
        if counts.packed:
            expansions = visits.experts + 1 if groups > 1 else 2
            moved = held * counts.expert_weights * counts.expanded * expansions
            terms["expansion"] = counts.mixtures * moved / rates.expansion
        of_row = 2 * (14 * D + 16 * I)
        of_row += passes.of_exchange(counts, visits.experts) if layout.sharing > 1 else 0
        of_row += (
            passes.of_expert_adapters(counts, visits.experts) if of_layer and not step.every_weight else 0
        )
        terms["passes over rows"] = counts.mixtures * rows * of_row / rates.passes

    # all other layers' work, for every token
    terms |= _dense(counts, rates, step, t, visits, layout)
    layers = sum(terms.values())
    exchange = 0.0
    if layout.sharing > 1:
        away = (layout.sharing - 1) / layout.sharing
        between = ALL_TO_ALL_SHARE * (link if layout.sharing <= PER_HOST else NETWORK)
        exchange = counts.mixtures * 5 * rows * away * 2 * D / between

    # transfers meanwhile, over their own links. What all GPUs of a host receive alike comes through all of
    # its ports; the last host may have fewer GPUs
    alike = link if n <= PER_HOST else min(link, NETWORK * (n % PER_HOST or PER_HOST))
    by_host, gathered = _arriving(counts, layout, n, host, alike)
    stream = max(sum(by_host.values()), *gathered.values())

    # forward computes less than backward but streams as much
    forward = 1 / (visits.experts + 1 + visits.backward)
    shown = sum(max(0.0, stream / 2 - (layers + exchange) * share) for share in (forward, 1 - forward))
    queued = passes.launches(counts, visits.dense, visits.experts, groups) * rates.launch
    waits = passes.grouped_products(counts, visits.experts) * (held * rates.launch + rates.loop)
    terms |= {
        "all-to-all": exchange,
        **by_host,
        **gathered,
        "second model": second,
        "head": t * 2 * D * counts.vocab_size * (3 if step.every_weight else 2) / rates.head,
        "optimizer": _update(layout, here / rates.optimizer / (n if layout.sharded else 1), here, n, host),
        "orthogonalisation": step.orthogonal / rates.dense / (n if layout.sharded else 1),
        "waits of grouped products": waits if rates.loop else 0.0,
        "launches": max(0.0, queued - layers),
        "host": passes.after_the_read(counts) * rates.launch if fleet.kind == "cuda" else 0.0,
    }
    # gradients of replicated weights: a sum travels both ways; for sharded weights only one way
    copies = {"dense": n, "experts": max(1, n // layout.sharing)}  # a run plans one of its devices
    over = {"dense": alike, "experts": NETWORK if layout.sharing > 1 else alike}
    ways = 1 if layout.sharded else 2
    terms["sum of gradients"] = sum(
        ways * 4 * numbers * (copies[part] - 1) / copies[part] / over[part]
        for part, numbers in trained.items()
    )
    idle = terms["waits of grouped products"] + terms["launches"]
    terms = {name: s * (1 if name in ONCE else micro_batches) for name, s in terms.items() if s}
    each = layers + exchange + shown + idle + second + terms.get("head", 0.0) / micro_batches
    whole = micro_batches * each + sum(terms.get(name, 0.0) for name in ONCE)
    return Seconds(terms, whole, micro_batches * shown, forward)


@dataclass(frozen=True)
class _Visits:
    """Forward visits of experts (and attention) and of linear layers, and backward's products per weight."""

    experts: int
    dense: int
    backward: int


def _visits(layout: Layout, *, every_weight: bool) -> _Visits:
    experts = 2 if layout.recompute == "layers" else 1
    dense = 1 if layout.recompute in ("elementwise", "nothing") else 2
    return _Visits(experts, dense, 2 if every_weight else 1)


def _dense(
    counts: Counts, rates: Rates, step: Step, t: float, visits: _Visits, layout: Layout
) -> dict[str, float]:
    """Return the seconds of t tokens in everything but routed experts."""
    v, D = visits.dense, counts.hidden_size
    length = min(step.length, t)  # no document is longer than a micro-batch
    products = counts.dense * (v + visits.backward)
    adapted = 0.0 if step.every_weight else step.adapted
    adapters = 0 if step.every_weight else step.trained.get("dense", 0) * (v + 2)
    again = 2 if layout.recompute != "nothing" else 1  # passes between products are never kept
    elementwise = t * passes.elementwise(counts, again)
    return {
        "dense layers": t * 2 * (products + adapters) / rates.dense,
        "norms": t * counts.num_layers * 2 * D * (v + 1) / 2 / rates.norms,
        "elementwise": elementwise / rates.passes,
        "adapters' traffic": t * adapted * passes.of_adapters(counts, v) / rates.passes,
        "attention": t * counts.pairs(length) * (visits.experts + 2.5) / rates.attention,
        "routers": t * 2 * counts.router * (v + visits.backward) / rates.routers,
    }


def _arriving(
    counts: Counts, layout: Layout, n: int, host: float, alike: float
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the seconds of weight transfers in a step: over the host link, and from other devices."""
    by_host: dict[str, float] = {}
    if layout.experts != "device":
        source = DISK if layout.experts == "disk" else host
        by_host["stream of experts"] = 2 * counts.experts_bytes / layout.sharing / source
    if layout.rest == "host":
        by_host["stream of the rest"] = 2 * counts.rest_bytes / host
    shared = counts.rest_bytes * (layout.rest == "peers")
    if layout.sharded:
        shared = counts.rest_bytes + counts.experts_bytes
    what = "gather of the weights" if layout.sharded else "gather of the rest"
    return by_host, {what: 2 * shared * (n - 1) / n / alike}


def asking(counts: Counts, rates: Rates, *, tokens: int, length: int) -> float:
    """Return the seconds of a second model per micro-batch: one forward through its layers, and its head."""
    D, I = counts.hidden_size, counts.expert_width
    total = tokens * 2 * (counts.dense / rates.dense + D * counts.vocab_size / rates.head)
    total += tokens * 2 * counts.router / rates.routers + tokens * counts.num_layers * D / rates.norms
    total += tokens * passes.of_forward(counts) / rates.passes
    total += tokens * counts.pairs(min(length, tokens)) / rates.attention
    if counts.num_experts and counts.moe_layers:
        rows = tokens * counts.experts_per_token
        rate = rates.of_experts(rows / counts.num_experts)
        # rates of a model without experts have none of them: theirs is then that of linear layers
        flops = rows * 2 * counts.expert_weights / (rate if math.isfinite(rate) else rates.dense)
        expanded = (
            counts.num_experts * counts.expert_weights * counts.expanded * counts.packed / rates.expansion
        )
        total += counts.mixtures * (flops + expanded + rows * (14 * D + 16 * I) / rates.passes)
    return total


def _update(layout: Layout, on_device: float, here: int, n: int, host: float) -> float:
    """Return the seconds of an update of `here` parameters on each of n devices. host: its link's bytes/s.

    Moments in host memory are float32 here: 8 bytes up and 8 down, over a link shared by a host's devices.
    """
    if layout.adapters == "host":
        return 28 * here * n / HOST_MEMORY
    if layout.optimizer == "host":
        return max(on_device, 8 * here / host, 16 * here * min(n, PER_HOST) / HOST_MEMORY)
    return on_device
