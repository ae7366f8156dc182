"""Passes over memory between the products of a step, its launches, and the host's own work.

All are counted from the code, and compared with its counts on the meta device (docs/measured/launches.md,
tests/parallel/plan/test_passes.py). Numbers of a token, of 2 bytes each, in v forward visits and a backward;
L layers, M of them with experts, D model width, I expert width, and sums over linear layers: `into` and `out`
of their widths, `inputs` of each different input once; activated, rotated and normed as in counts.Widths:

    elementwise  v (6 D L + 3 D M + 3 activated + 2 rotated + 2 normed)   residuals, SwiGLU, rotary, norms
                 + 6 D L + 6 D M + 5 activated + 2 rotated + 3 normed     their gradients
                 + 2 v joined + 8 joined                                  MLA's keys, and their gradients
                 + 3 (into - inputs)     sums of an input's gradients
    adapters     v (into + 2 out) + 3 into + 2 out     read x, add to y; read dy twice and x, add to dx

and of a row of an expert:

    adapters     packed: v (D + I) + 3 D + 5 I         read x and h; then dy twice, and x and h
                 else: v (3 D + 5 I) + 5 D + 7 I       their products are added to y and dx in memory
    exchange     (2 v + 4) D     if processes share experts: gathered and combined, in both directions
"""

from __future__ import annotations

from unfreeze.parallel.plan.counts import Counts

BYTES = 2
OF_LAYER, OF_VISIT = 15, 15  # launches of a layer beside its products and experts: in all, and a visit
OF_LINEAR, OF_LINEAR_VISIT = 8, 6  # of a linear layer with its adapter: backward, and a forward visit
OF_EXPERTS, OF_EXPERTS_VISIT = 75, 26  # of a layer's router and experts, for one group
OF_TENSOR = 4  # launches that AdamW's Python takes as long as, per tensor: 20 µs measured on a CPU
CALLS, CALLS_VISIT = 8, 4  # grouped products of a layer with adapters: backward, and a forward visit


def elementwise(counts: Counts, visits: int) -> float:
    """Return the bytes of a token in passes of dense layers, without two norms a layer, which have a rate."""
    widths, D = counts.widths, counts.hidden_size
    backward = 6 * D * (counts.num_layers + counts.mixtures)
    backward += 5 * widths.activated + 2 * widths.rotated + 3 * widths.normed + 8 * widths.joined
    sums = max(0, widths.into - widths.inputs)
    return visits * of_forward(counts) + BYTES * (backward + 3 * sums)


def of_forward(counts: Counts) -> float:
    """Return `elementwise` of one forward visit."""
    widths, D = counts.widths, counts.hidden_size
    passed = 6 * D * counts.num_layers + 3 * D * counts.mixtures
    passed += 3 * widths.activated + 2 * widths.rotated + 2 * widths.normed + 2 * widths.joined
    return BYTES * passed


def of_adapters(counts: Counts, visits: int) -> float:
    """Return the bytes of a token that adapters of every linear layer move, whatever their rank."""
    into, out = counts.widths.into, counts.widths.out
    return BYTES * (visits * (into + 2 * out) + 3 * into + 2 * out)


def of_exchange(counts: Counts, visits: int) -> float:
    """Return the bytes of a row of one layer that is gathered for other processes, and combined."""
    return BYTES * (2 * visits + 4) * counts.hidden_size


def of_expert_adapters(counts: Counts, visits: int) -> float:
    """Return the bytes of a row of one layer that adapters of its expert move."""
    D, I = counts.hidden_size, counts.expert_width
    if counts.packed:
        return BYTES * (visits * (D + I) + 3 * D + 5 * I)
    return BYTES * (visits * (3 * D + 5 * I) + 5 * D + 7 * I)


def launches(counts: Counts, visits: int, expert_visits: int, groups: int) -> int:
    """Return the launches of a micro-batch in all layers. groups: of a layer's experts."""
    each = counts.num_layers * (OF_LAYER + OF_VISIT * visits)
    each += counts.widths.linears * (OF_LINEAR + OF_LINEAR_VISIT * visits)
    return each + counts.mixtures * groups * (OF_EXPERTS + OF_EXPERTS_VISIT * expert_visits)


def launches_of_visit(counts: Counts) -> int:
    """Return the launches of one forward visit of all layers."""
    each = counts.num_layers * OF_VISIT + counts.widths.linears * OF_LINEAR_VISIT
    return each + counts.mixtures * OF_EXPERTS_VISIT


def grouped_products(counts: Counts, expert_visits: int) -> int:
    """Return the grouped products of a micro-batch: base and adapters, forward and backward."""
    return counts.mixtures * (CALLS + CALLS_VISIT * expert_visits)


def after_the_read(counts: Counts) -> int:
    """Return the host's work after a step's one read, in launches: the update's Python, by tensor."""
    return OF_TENSOR * (2 * counts.widths.linears + 4 * counts.moe_layers)
