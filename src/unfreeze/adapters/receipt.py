"""The receipt: proof, from the first step that has a gradient, that everything meant to train has learned.

See docs/why/trust.md L4 and L5.

    receipt = Receipt(model)       before the step: records the weights' values, and watches which outputs
                                   get gradients
    taken = receipt.take(probe)    after the update, while the step's gradients still exist
    check(taken)                   raises AdapterError if a trained matrix was left out

A site is one matrix; an expert has three (gate, up, down) in every layer. If the weight itself trains, its
own gradient counts. If an adapter trains, the gradients of A and B count together: A's is zero at the first
step, because B is zero then.

Weight decay moves every weight, used or not, so movement counts only with a gradient.

T tokens, E experts, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from unfreeze.adapters.output_change import Groups, first_tokens, output_changes
from unfreeze.adapters.reach import Reach, Sum
from unfreeze.adapters.snapshot import Snapshot, change_since, sample, snapshot, trained_parameters
from unfreeze.core.batch import Batch
from unfreeze.core.errors import AdapterError
from unfreeze.core.rows import Rows
from unfreeze.models import Decoder
from unfreeze.models.blocks.experts import Experts
from unfreeze.models.blocks.linear import PackedHolder
from unfreeze.models.groups import GROUPS, INDEXER, group_of
from unfreeze.models.only import divided

# AdamW's epsilon: a smaller gradient moves a weight by less than half the learning rate, which may round away
TINY = 1e-8
NO_GRADIENT, NOT_MOVED, TOO_SMALL = "no gradient", "not moved", "gradient below 1e-8, no movement"
NAMES_IN_MESSAGE = 4  # names of exceptions; receipt.json has all of them
Gradient = Callable[[str], Tensor | None]
Part = Callable[[str], tuple[Rows | None, int]]
"""Name of a trained parameter -> (its local rows, None: all; number of processes that hold the same)."""


@dataclass
class Taken:
    """A receipt.

    groups      see make_receipt.
    exceptions  [{group, sites, count, why}]: sites that were reached and have no gradient, or did not move.
    """

    groups: Groups = field(default_factory=dict)
    exceptions: list[dict[str, Any]] = field(default_factory=list)


class Receipt:
    """Watches a model until `take`.

    weights   name -> the tensor that the optimizer updates, if not the parameter itself: the fp32 master of a
              half precision weight, in which a first movement may round away
    gradient  name -> the last step's gradient; default: the parameter's `grad`
    """

    def __init__(
        self, model: Decoder, weights: Mapping[str, Tensor] | None = None, gradient: Gradient | None = None
    ):
        parameters = dict(trained_parameters(model))
        self._model, self._weights = model, {**parameters, **(weights or {})}
        self._gradient: Gradient = gradient or (lambda name: parameters[name].grad)
        self._before, self._reach = snapshot(self._weights), Reach(model)
        self._frozen = {name: part.checksums() for name, part in divided(model)}

    def pass_over(self) -> None:
        """Skip the last step, which had no gradient or no update and proves nothing; wait for the next."""
        self._reach.forget()

    def take(self, probe: Batch | None, sum_: Sum | None = None, part: Part | None = None) -> Taken:
        """Measure, then stop watching. sum_: sums over the processes that share the step; all of them call.

        part: this process's part of a parameter; None: all of each. The receipt is the same on all.
        """
        if sum_ is not None:
            self._reach.over_processes(sum_, self._model.device)
        trained = {name: own.rows for name, own in divided(self._model)}
        over = Over(sum_, part, self._model.device, trained)
        taken = make_receipt(
            self._model, self._weights, self._gradient, self._before, self._reach, probe, over
        )
        for name, own in divided(self._model):
            entry = taken.groups[group_of(name)]
            moved = sum(a != b for a, b in zip(self._frozen[name], own.checksums(), strict=True))
            entry["frozen_moved"] = entry.get("frozen_moved", 0) + moved
        self._reach.close()
        self._before = Snapshot()
        return taken


class Over:
    """The processes of a receipt; by default each holds everything.

    trained: parameter name -> its rows, for weights of which only some rows train (models/only.py).
    """

    def __init__(
        self,
        sum_: Sum | None = None,
        part: Part | None = None,
        device: torch.device | str = "cpu",
        trained: Mapping[str, Rows] | None = None,
    ):
        self._sum, self._part, self._device, self.trained = sum_, part, device, trained or {}

    def part(self, name: str) -> tuple[Rows | None, int]:
        """(local rows of the parameter, copies); a replicated parameter is counted by one process."""
        rows, copies = (None, 1) if self._part is None else self._part(name)
        return self.trained.get(name, rows), copies

    def sums(self, numbers: Sequence[float]) -> list[float]:
        """Each number summed over the processes."""
        if self._sum is None or self._part is None:
            return list(numbers)
        total = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        self._sum([total])
        return total.tolist()

    def any(self, masks: Sequence[Tensor]) -> list[Tensor]:
        """Each mask, true where it is true in at least one process."""
        if self._sum is None or self._part is None:
            return list(masks)
        together = torch.cat([mask.double() for mask in masks]) if masks else torch.zeros(0)
        self._sum([together])
        return [part.gt(0) for part in together.split([len(mask) for mask in masks])]


@dataclass
class ReceiptSite:
    """Results for a site, or for one projection of all E experts of a layer.

    Tensors are bool [1], or [E]; then `name` has a * for the expert.
    """

    group: str
    name: str
    reached: Tensor
    moved: Tensor
    had: Tensor  # a gradient
    large: Tensor  # an element of it is TINY or more


@torch.no_grad()
def make_receipt(
    model: Decoder,
    weights: Mapping[str, Tensor],
    gradient: Gradient,
    before: Snapshot,
    reach: Reach,
    probe: Batch | None,
    over: Over | None = None,
) -> Taken:
    """Make the receipt as plain JSON values, without judging them (see `check`).

    Per group:

    parameters     base weights of the group (logical count: a packed 4-bit weight is one)
    trained        parameters that train (adapter factors, or the weights themselves); 0: frozen
    sites          trained matrices; sites_reached: those whose output had a gradient; sites_moved: those that
                   also had a gradient and moved
    grad_norm      L2 norm of the step's gradient, before clipping
    moved          L2 norm of the change of the trained parameters that had a gradient, without movement by
                   weight decay alone; extrapolated from a sample if no copy was affordable
    experts        routed experts over all layers; experts_reached: those that had a gradient
    output_change  max |Δ logit| over at most 256 tokens, with only this group's training in effect against no
                   training. Every token goes to the same experts in both. None without a probe, or if weights
                   were too large to copy
    rounding       the output_change that rounding alone may cause: half a unit in the last place of the
                   largest logit, in the computation's dtype
    frozen_moved   rows of partly trained weights that do not train and whose bits changed: 0, or a fault
    connected      False if the logits stay the same even with the adapter multiplied by 4,096. None if
                   unknown: no probe, no matrix of the group reached, fully trained weights whose first step
                   changes no logit, or the indexer, which only chooses keys
    """
    over = over or Over()
    groups: Groups = {name: _empty(count) for name, count in _base_parameters(model).items()}
    sites, squares = _measured(model, weights, gradient, before, reach, over)

    # over the processes: add the numbers; a flag of one part is a flag of the site
    numbers = iter(over.sums([number for own in squares.values() for number in own]))
    for group in squares:
        entry = groups.setdefault(group, _empty(0))
        entry["trained"] = round(next(numbers))
        entry["grad_norm"], entry["moved"] = math.sqrt(next(numbers)), math.sqrt(next(numbers))
    masks = iter(over.any([mask for site in sites.values() for mask in (site.moved, site.had, site.large)]))
    for site in sites.values():
        site.moved, site.had, site.large = next(masks), next(masks), next(masks)
    silent = over.any([_silent(site, model, before, over) for site in sites.values()])
    for site, pruned in zip(sites.values(), silent, strict=True):
        site.reached = site.reached & ~pruned

    _count(groups, list(sites.values()))
    # per group: the effect of its training on the output
    trained_groups = sorted({site.group for site in sites.values()})
    if probe is not None and trained_groups:
        tokens = first_tokens(probe)
        for group, change in output_changes(model, before, trained_groups, tokens, over.sums).items():
            groups[group].update(change)
            # no gradient was expected, so nothing could move; or it moves the output by its choices alone
            if not groups[group]["sites_reached"] or group == INDEXER:
                groups[group]["connected"] = None
    ordered = {name: groups[name] for name in GROUPS if name in groups}
    in_order = [site for name in ordered for site in sites.values() if site.group == name]
    return Taken(ordered, [exception for site in in_order for exception in _exceptions(site)])


def _measured(
    model: Decoder,
    weights: Mapping[str, Tensor],
    gradient: Gradient,
    before: Snapshot,
    reach: Reach,
    over: Over,
) -> tuple[dict[str, ReceiptSite], dict[str, list[float]]]:
    """Gradient and movement of this process's trained parameters: (its sites, its groups).

    A group has [trained parameters, gradient², movement²]; several processes may hold the same.
    """
    squares: dict[str, list[float]] = {}
    sites: dict[str, ReceiptSite] = {}
    for name, weight in weights.items():
        group, (rows, copies) = group_of(name), over.part(name)
        own = squares.setdefault(group, [0.0, 0.0, 0.0])
        g, delta, share = gradient(name), *change_since(weight, before.kept[name], name in before.full)
        own[0] += weight.numel() / copies
        if g is not None:
            own[1] += _norm(g) ** 2 / copies
            if before.kept[name] is not None:  # decay cannot move a zero
                delta = delta * (g if name in before.full else sample(g)).ne(0)
            own[2] += float(delta.double().square().sum()) / share / copies
        names = _before(model, name) if group == "experts" else ()
        for site, owner, part in _parts(name, names, weight if g is None else g):
            count, here = len(part), slice(None)
            if group == "experts" and rows is not None:
                count, here = rows.of, rows.slice
            if site not in sites:
                none = torch.zeros(count, dtype=torch.bool, device=weight.device)
                reached = reach.of(owner, count, weight.device, bias=site.endswith(".bias"))
                if name in over.trained and group == "experts":
                    mine = torch.zeros_like(reached)
                    mine[here] = True
                    reached = reached & mine
                sites[site] = ReceiptSite(group, site, reached, none, none.clone(), none.clone())
            if g is not None and part.numel():
                largest = part.flatten(1).abs().amax(1).float()
                sites[site].had[here] |= largest > 0
                sites[site].large[here] |= largest >= TINY
        for site, _, part in _parts(name, names, delta) if g is not None else ():
            here = rows.slice if group == "experts" and rows is not None else slice(None)
            sites[site].moved[here] |= part.flatten(1).ne(0).any(1)
    return sites, squares


def _count(groups: Groups, sites: Sequence[ReceiptSite]) -> None:
    """Add to the groups: sites, those reached and moved, and experts that had a gradient in any matrix."""
    experts: dict[str, Tensor] = {}  # layer -> mask
    for site in sites:
        entry = groups[site.group]
        entry["sites"] += site.reached.numel()
        entry["sites_reached"] += int(site.reached.sum())
        entry["sites_moved"] += int((site.reached & site.moved).sum())
        if site.group == "experts":
            layer = site.name.split(".*.")[0]
            experts[layer] = experts[layer] | site.had if layer in experts else site.had
    if experts:
        groups["experts"].update(
            experts=sum(mask.numel() for mask in experts.values()),
            experts_reached=sum(int(mask.sum()) for mask in experts.values()),
        )


def _before(model: Decoder, name: str) -> tuple[str, ...]:
    """The matrices before the activation, of the experts that own a parameter."""
    experts = model.get_submodule(f"{name.split('.experts.')[0]}.experts")
    assert isinstance(experts, Experts)
    return experts.activation.projections


def _parts(name: str, names: Sequence[str], weight: Tensor) -> Iterator[tuple[str, str, Tensor]]:
    """(site, module that computes its output, its elements [E, …] or [1, …]) of a trained parameter.

    Stacked experts have gate and up in one parameter: two sites. names: of the matrices before the
    activation.
    """
    site = name.split(".adapter.")[0].removesuffix(".weight")
    if group_of(name) != "experts":
        yield site, site.removesuffix(".bias"), weight[None]
        return
    experts, projection = f"{name.split('.experts.')[0]}.experts", name.split(".experts.")[1]
    if "down" not in projection:
        for part, half in zip(names, weight.chunk(len(names), dim=1), strict=True):
            yield f"{experts}.*.{part}", experts, half
    else:
        yield f"{experts}.*.down_proj", experts, weight


def _silent(site: ReceiptSite, model: Decoder, before: Snapshot, over: Over) -> Tensor:
    """Mask of local experts that cannot have a gradient, because another of their matrices is zero.

    Such experts were pruned: each of an expert's matrices gets its gradient through the others.
    """
    pruned = torch.zeros_like(site.reached)
    missing = site.reached & ~site.had
    if site.group != "experts" or not missing.any():
        return pruned
    name, own = site.name.split(".*.")
    experts = model.get_submodule(name)
    assert isinstance(experts, Experts)
    others = [part for part in (*experts.activation.projections, "down_proj") if part != own]
    rows, _ = over.part(f"{name}.{own if own == 'down_proj' else experts.first}.weight")
    held = experts.held if rows is None else rows
    for e in missing.nonzero().flatten().tolist():
        if held.first <= e < held.last:
            zero = [_all_zero(experts, name, part, e - held.first, before) for part in others]
            pruned[e] = any(zero)
    return pruned


def _all_zero(experts: Experts, name: str, part: str, e: int, before: Snapshot) -> bool:
    """True if `part` of expert `e` was zero before the step: its weight, and its adapter."""
    down, names = part == "down_proj", experts.activation.projections
    if before.kept.get(f"{name}.adapter.{'down' if down else 'gate_up'}_B") is not None:
        return False
    stack = part if down else experts.first
    trained, held = f"{name}.{stack}.weight", getattr(experts, stack).value()
    if trained in before.kept:
        before_step = before.kept[trained]
        if before_step is None:
            return True
        weight = before_step[e]
    else:
        weight = held[e] if isinstance(held, Tensor) else held[e].dequantize()
    if not down:
        weight = weight.chunk(len(names))[names.index(part)]
    return not bool(weight.any())


def _exceptions(site: ReceiptSite) -> Iterator[dict[str, Any]]:
    """The site's entries in the list of exceptions.

    Experts are ranges: "model.layers.1.mlp.experts.0-7,12.down_proj".
    """
    still = site.reached & ~site.moved
    kinds = {
        NO_GRADIENT: still & ~site.had,
        NOT_MOVED: still & site.large,
        TOO_SMALL: still & site.had & ~site.large,
    }
    for why, mask in kinds.items():
        if mask.any():
            name = site.name.replace("*", _ranges(mask.nonzero().flatten().tolist()))
            yield {"group": site.group, "sites": name, "count": int(mask.sum()), "why": why}


def _ranges(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] -> "0-2,5"."""
    pieces: list[list[int]] = []
    for number in numbers:
        if pieces and pieces[-1][1] == number - 1:
            pieces[-1][1] = number
        else:
            pieces.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in pieces)


SHOWS = 1e-8
"""Learning rate below which rounding may hide one step's change of the output, amplified or not."""


def check(taken: Taken, learning_rate: float | None = None) -> None:
    """Raise AdapterError if a trained matrix was left out.

    That is: no gradient though its output had one, a gradient and no movement, or no effect on the output.
    learning_rate: of the step; the error names it if it is the likelier cause of no effect.
    """
    for name, entry in taken.groups.items():
        if entry["trained"] and not math.isfinite(entry["grad_norm"]):
            raise AdapterError(
                f"{_facts(name, entry)}: the gradient is not finite",
                next="look at the batch's rows, or try --learning-rate lower",
            )
    for why, next_ in (
        (NO_GRADIENT, "report it with the model's config.json; receipt.json has all names"),
        (NOT_MOVED, "check --learning-rate and the warm-up; receipt.json has all names"),
    ):
        if line := _sentence(taken, why):
            raise AdapterError(line, next=next_)
    for name, entry in taken.groups.items():
        if entry["connected"] is False and learning_rate is not None and learning_rate < SHOWS:
            raise AdapterError(
                f"{_facts(name, entry)}, but the output is the same with and without it: the learning rate of"
                f" this step is {learning_rate:g}, too small to change it",
                next="--learning-rate 1e-4 to 1e-3 for adapters",
            )
        if entry["connected"] is False:
            raise AdapterError(
                f"{_facts(name, entry)}, but the output is the same with and without it. Likely cause: the"
                " forward pass bypasses these adapters",
                next=(
                    "report it with the model's config.json; --lora.targets without this group trains the"
                    " other groups"
                ),
            )


CAUSES = {
    NO_GRADIENT: (
        "got no gradient, though their output had one. Likely cause: a forward or backward pass that leaves"
        " these weights out"
    ),
    NOT_MOVED: (
        "had a gradient and did not move (weight decay aside). Likely causes: learning rate 0 at this step"
        " (warm-up), or missing from the optimizer"
    ),
}


def _sentence(taken: Taken, why: str) -> str:
    """One sentence on all sites of a kind: affected and total sites per group, then the first names."""
    of_kind = [exception for exception in taken.exceptions if exception["why"] == why]
    if not of_kind:
        return ""
    counts: dict[str, int] = {}
    for exception in of_kind:
        counts[exception["group"]] = counts.get(exception["group"], 0) + exception["count"]
    groups = ", ".join(
        f"{name}: {count:,} of {taken.groups[name]['sites_reached']:,} matrices"
        for name, count in counts.items()
    )
    names = ", ".join(exception["sites"] for exception in of_kind[:NAMES_IN_MESSAGE])
    more = f" and {len(of_kind) - NAMES_IN_MESSAGE} more entries" if len(of_kind) > NAMES_IN_MESSAGE else ""
    return f"{groups} {CAUSES[why]}. They are {names}{more}"


def _facts(name: str, entry: Mapping[str, Any]) -> str:
    return (
        f"{name}: {entry['trained']:,} trained parameters, gradient norm {entry['grad_norm']:.3g}, moved"
        f" {entry['moved']:.3g}"
    )


def _empty(parameters: int) -> dict[str, Any]:
    return {
        "parameters": parameters,
        "trained": 0,
        "sites": 0,
        "sites_reached": 0,
        "sites_moved": 0,
        "grad_norm": 0.0,
        "moved": 0.0,
        "output_change": None,
        "rounding": None,
        "connected": None,
    }


def _base_parameters(model: nn.Module) -> dict[str, int]:
    """group -> weights of the model without adapters; tied ones once, packed ones by their logical shape.

    Experts that are split over processes are all counted.
    """
    held = {name: module.held for name, module in model.named_modules() if isinstance(module, Experts)}
    counts: dict[str, int] = {}

    def add(name: str, numbers: int) -> None:
        rows = held.get(f"{name.rpartition('.experts.')[0]}.experts")
        every = numbers if rows is None else numbers // len(rows) * rows.of
        counts[group_of(name)] = counts.get(group_of(name), 0) + every

    whole = {name: part.whole.numel() for name, part in divided(model)}
    for name, parameter in model.named_parameters():  # named_parameters lists a tied parameter once
        if ".adapter." not in name:
            add(name, whole.get(name, parameter.numel()))
    for name, module in model.named_modules():
        if isinstance(module, PackedHolder) and module.codec is not None:
            add(name, module.packed.numel)
    return counts


def _norm(gradient: Tensor) -> float:
    return float(gradient.detach().float().norm().double())
