"""Measure one true Kimi-K2 layer on a GPU, with an eighth of its experts, beside what was predicted.

`unfreeze dev bench layer`, about three minutes. The predictions were written down before there was a GPU.

Every row says what was predicted, above which time the prediction is refuted, what was measured, and how far
the numbers are from float64.
Routing is balanced, then skewed. From the slice a node of eight GPUs is derived by a formula whose
assumptions are printed with it: no node was measured. The slice is made smaller until it fits the GPU;
predictions are about the whole slice on one H200.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from pydantic import Field
from rich.console import Console
from rich.table import Table

from benchmarks.harness.kimi_slice import KIMI, ExpertOps, KimiSlice, Routing, Slice
from benchmarks.harness.rows import Row, Stamp, append, where
from benchmarks.harness.timing import Timing, timed, wait
from unfreeze.config.parse import Folder, Frozen, parse
from unfreeze.core.command import Common
from unfreeze.core.errors import ConfigError, DoesNotFit
from unfreeze.core.units import format_bytes
from unfreeze.kernels.loops.scratch import release_scratch, scratch_bytes
from unfreeze.parallel.machine import Hardware, hardware
from unfreeze.parallel.plan import USABLE

RATE = "grouped rate at 341 rows per expert"
# item -> (prediction in words, met up to, refuted above) in ms; RATE: (in words, met from, refuted below)
PREDICTED: dict[str, tuple[str, float, float]] = {
    "expand": ("1.5 ms", 1.5, 1.8),
    "gate/up forward": ("6.4 ms", 6.4, 7.7),
    "down forward": ("3.3 ms", 3.3, 4.0),
    "input gradient of gate/up": ("6.6 ms", 6.6, 8.0),
    "the eight thin adapter GEMMs": ("1.4 to 2.0 ms", 2.0, 3.0),
    "MoE layer forward": ("12 to 13.5 ms", 13.5, 16.0),
    "MoE layer recompute + backward": ("20 to 22 ms", 22.0, 26.0),
    "attention, shared expert and norms, all passes": ("19 to 20 ms", 20.0, 25.0),
    "one whole layer": ("52 to 56 ms", 56.0, 65.0),
    RATE: ("420 to 480 TFLOP/s", 420.0, 350.0),
}
NODE_TOKENS, GPUS, LAYERS, MOE_LAYERS, TRANSFERS, OPTIMIZER = 65536, 8, 61, 60, 300, 0.03
BANDWIDTHS, IMBALANCES, OVERLAPS = (300, 350, 400), (1.0, 1.1, 1.3), (0.0, 0.65)
TARGET = 15900


class Config(Frozen):
    repeats: Annotated[int, Field(ge=3, le=200)] = Field(
        default=20, description="timed calls of each row; the median and quartiles are kept"
    )
    append: Folder = Field(
        default="",
        description=(
            "file the rows are appended to; default: benchmarks/results/<device>.jsonl of the checkout"
        ),
    )


@dataclass(frozen=True)
class Item:
    """One measured row.

    flop: of one call, counted from the shapes; 0 where none is claimed. bytes: read and written, for
    `expand`.
    """

    name: str
    routing: Routing
    timing: Timing
    correctness: dict[str, float | str]
    flop: float = 0.0
    bytes: float = 0.0

    @property
    def tflops(self) -> float | None:
        return self.flop / self.timing.ms / 1e9 if self.flop else None

    def verdict(self, comparable: str) -> str:
        """Judge a time: met, missed (slower than predicted, not refuted) or refuted.

        `comparable` says why the prediction is not about this run, "" if it is.
        """
        if self.name not in PREDICTED:
            return ""
        if comparable:
            return comparable
        _, predicted, limit = PREDICTED[self.name]
        if self.name == RATE:
            rate = self.tflops or 0.0
            return "met" if rate >= predicted else "missed" if rate >= limit else "refuted"
        return "met" if self.timing.ms <= predicted else "missed" if self.timing.ms <= limit else "refuted"

    def results(self, comparable: str) -> dict[str, Any]:
        predicted, _, limit = PREDICTED.get(self.name, ("", None, None))
        return {
            **self.timing.results(),
            "correctness": self.correctness,
            "tflops": self.tflops,
            "gb_per_second": self.bytes / self.timing.ms / 1e6 if self.bytes else None,
            "predicted": predicted,
            "refuted_beyond": limit,
            "verdict": self.verdict(comparable),
        }


def main(arguments: list[str], common: Common) -> dict[str, Any]:
    """Measure; -> rows, node (the derived figures), path."""
    config = parse(Config, arguments, command="dev bench layer", description=__doc__ or "")
    if not torch.cuda.is_available():
        raise ConfigError(
            "bench layer needs a CUDA device and there is none here; its rows stay not measured",
            next="run it on a machine with a GPU",
        )
    device = torch.device("cuda", torch.cuda.current_device())
    found = hardware(device)
    sizes = fitting(Slice(KIMI, experts=48, tokens=8192, sequence=2048, rank=16), found)
    why = comparable(sizes, found)
    console = Console(stderr=True, quiet=common.quiet)
    console.print(
        f"{found.name}: {sizes.experts} experts, {sizes.tokens:,} tokens, {sizes.rows:,} rows, rank"
        f" {sizes.rank}{why and f' ({why})'}"
    )
    items, memory = measure(sizes, device, config.repeats)
    node = derive(items) if sizes.whole else []
    stamp = Stamp.now("layer", shlex.join(["unfreeze", "bench", "layer", *arguments]), device)
    rows, path = as_rows(stamp, sizes, items, memory, node, why), where(config.append, device)
    append(rows, path)
    show(
        items, memory, node, why, Console(file=sys.stderr if common.json else sys.stdout, quiet=common.quiet)
    )
    return {"rows": [row.model_dump() for row in rows], "node": node, "path": str(path) if path else None}


def fitting(sizes: Slice, found: Hardware) -> Slice:
    """Give the largest slice that fits; tokens are halved before experts.

    Raises DoesNotFit where not even 8 experts and 1,024 tokens do.
    """
    usable = found.available * USABLE
    for experts in (48, 24, 16, 8):
        for tokens in (8192, 4096, 2048, 1024):
            smaller = replace(sizes, experts=experts, tokens=tokens)
            if smaller.nbytes() <= usable:
                return smaller
    raise DoesNotFit(
        f"the smallest slice (8 experts, 1,024 tokens) takes {format_bytes(smaller.nbytes())},"
        f" {format_bytes(int(usable))} usable on {found.name}",
        next="free the GPU's memory, or take a larger one",
    )


def comparable(sizes: Slice, found: Hardware) -> str:
    """Why the predictions are not about this run; "" where they are."""
    if not sizes.whole:
        return "smaller slice, not comparable"
    return "" if "H200" in found.name else "predicted for an H200"


def measure(sizes: Slice, device: torch.device, repeats: int) -> tuple[list[Item], dict[str, int]]:
    """All rows, and bytes: what the plan says beside what was measured."""
    built = KimiSlice(sizes, device)
    items: list[Item] = []
    for part in (op_items, rate_item, layer_items):
        items += part(built, repeats)
        release_scratch()  # the next part has workspaces of its own names
    return items, memory_of(built)


def op_items(built: KimiSlice, repeats: int) -> Iterator[Item]:
    """Expansion and GEMMs one by one, on balanced rows."""
    ids_TK = built.routed("balanced")
    ops = ExpertOps(built, ids_TK)
    n, D, I, Q, P = ids_TK.numel(), ops.D, ops.I, ops.Q, ops.P
    errors = ops.errors()
    weights = ops.E * 3 * D * I

    def item(
        name: str, work: Any, correctness: dict[str, float | str], flop: float = 0.0, moved: float = 0.0
    ) -> Item:
        return Item(name, "balanced", timed(work, built.device, repeats=repeats), correctness, flop, moved)

    yield item(
        "expand",
        ops.expand,
        {"largest difference from the codec": ops.expand_error(built)},
        moved=weights * (0.5625 + 2),
    )
    for name, work, flop in (
        ("gate/up forward", ops.gate_up_forward, 4.0 * n * D * I),
        ("down forward", ops.down_forward, 2.0 * n * D * I),
        ("input gradient of gate/up", ops.gate_up_input_gradient, 4.0 * n * D * I),
    ):
        yield item(name, work, {"32 rows against float64": errors[name]}, flop)
    thin = 4.0 * n * (Q * D + P * I + P * D + 2 * I * Q)
    yield item("the eight thin adapter GEMMs", ops.thin, {"compared": "within the MoE layer's rows"}, thin)


def rate_item(built: KimiSlice, repeats: int) -> Iterator[Item]:
    """gate/up forward with a quarter of the rows: 341 per expert on the whole slice."""
    ids_TK = built.routed("balanced")[: built.sizes.tokens // 4]
    ops = ExpertOps(built, ids_TK)
    error = ops.errors()["gate/up forward"]
    timing = timed(ops.gate_up_forward, built.device, repeats=repeats)
    yield Item(
        RATE, "balanced", timing, {"32 rows against float64": error}, 4.0 * ids_TK.numel() * ops.D * ops.I
    )


def layer_items(built: KimiSlice, repeats: int) -> Iterator[Item]:
    """List what is measured of the layer.

    The mixture of experts, the dense parts beside it, the whole layer as training goes through it, and the
    head.
    """
    dense: dict[str, float | str] = dict(built.dense_errors())
    n, experts = built.sizes.rows, built.moe.experts
    forward = 6.0 * n * experts.hidden_size * experts.intermediate_size
    routings: tuple[Routing, ...] = ("balanced", "zipf")
    for routing in routings:
        ids_TK = built.routed(routing)
        exact: dict[str, float | str] = dict(built.expert_errors(ids_TK))
        busiest = (
            ids_TK.flatten().bincount(minlength=built.sizes.experts).max().item() * built.sizes.experts / n
        )
        both = {**exact, **dense, "busiest expert, times the mean": busiest}

        def item(
            name: str,
            work: Any,
            correctness: dict[str, float | str],
            flop: float = 0.0,
            routing: Routing = routing,
        ) -> Item:
            return Item(name, routing, timed(work, built.device, repeats=repeats), correctness, flop)

        yield item("MoE layer forward", built.forward(built.routed_layer), exact, forward)
        yield item(
            "MoE layer recompute + backward", built.forward_backward(built.routed_layer), exact, 3 * forward
        )
        yield item("one whole layer", built.forward_backward(built.recomputed("layers")), both)
        yield item(
            "one whole layer, attention and gate/up kept",
            built.forward_backward(built.recomputed("selective")),
            both,
        )
    once = timed(built.forward(built.dense), built.device, repeats=repeats)
    again = timed(built.forward_backward(built.dense), built.device, repeats=repeats)
    yield Item("attention, shared expert and norms, all passes", "balanced", added(once, again), dense)
    yield Item(
        "head and loss",
        "balanced",
        timed(built.head, built.device, repeats=max(3, repeats // 4)),
        {"compared": "tests/objectives"},
    )


def added(first: Timing, second: Timing) -> Timing:
    """Add the times of two works that run one after the other.

    Quartiles are added too, which makes the spread no smaller than it is.
    """
    peak = max(first.peak_bytes, second.peak_bytes)
    return Timing(
        first.ms + second.ms,
        first.low_ms + second.low_ms,
        first.high_ms + second.high_ms,
        first.repeats,
        peak,
    )


def memory_of(built: KimiSlice) -> dict[str, int]:
    """Give bytes as the plan states them and as measured.

    Of the expert op's workspace, and of what a recomputed layer keeps.
    """
    built.routed("balanced")
    release_scratch()
    built.forward_backward(built.recomputed("layers"))()
    wait(built.device)
    experts = built.moe.experts
    needs = experts.bytes(built.decoder.shape.experts_per_token, torch.bfloat16, "cuda")
    stated = needs.scratch + 2 * built.sizes.rank * needs.scratch_per_rank
    facts = {
        "workspace stated": stated + 4 * built.x_TD.numel(),
        "workspace measured": scratch_bytes(),
        "boundary stated": built.x_TD.nbytes,
    }
    if built.device.type == "cuda":
        before = torch.cuda.memory_allocated(built.device)
        y_TD = built.recomputed("layers")(built.x_TD.detach().requires_grad_())
        facts["boundary measured"] = torch.cuda.memory_allocated(built.device) - before
        del y_TD
    return facts


def derive(items: Sequence[Item]) -> list[dict[str, Any]]:
    """Derive the step time of eight GPUs from the slice, over the grid of assumptions.

    t = 60 t_moe imbalance + 61 t_attention + t_head + 300 (T 7/8 14,336 B) / BW (1 - overlap) + 0.03 s

    t_moe is forward + recompute + backward, of balanced and of skewed rows; T = 65,536 tokens per step of
    eight GPUs.
    """
    ms = {(item.name, item.routing): item.timing.ms for item in items}
    attention, head = (
        ms["attention, shared expert and norms, all passes", "balanced"],
        ms["head and loss", "balanced"],
    )
    found = []
    for routing in ("balanced", "zipf"):
        moe = ms["MoE layer forward", routing] + ms["MoE layer recompute + backward", routing]
        for bandwidth in BANDWIDTHS:
            for imbalance in IMBALANCES:
                for overlap in OVERLAPS:
                    transfer = (
                        TRANSFERS
                        * (NODE_TOKENS * (GPUS - 1) / GPUS * KIMI["hidden_size"] * 2)
                        / (bandwidth * 1e9)
                        * (1 - overlap)
                    )
                    compute = (MOE_LAYERS * moe * imbalance + LAYERS * attention + head) / 1e3
                    seconds = compute + transfer + OPTIMIZER
                    found.append(
                        {
                            "routing": routing,
                            "gb_per_second_between_gpus": bandwidth,
                            "imbalance": imbalance,
                            "overlap": overlap,
                            "seconds": seconds,
                            "derived_tokens_per_second": NODE_TOKENS / seconds,
                        }
                    )
    return found


def as_rows(
    stamp: Stamp,
    sizes: Slice,
    items: Sequence[Item],
    memory: dict[str, int],
    node: list[dict[str, Any]],
    why: str,
) -> list[Row]:
    settings = {name: getattr(sizes, name) for name in ("experts", "tokens", "rows", "sequence", "rank")} | {
        "dtype": "bfloat16"
    }
    rows = [stamp.row(item.name, {**settings, "routing": item.routing}, item.results(why)) for item in items]
    rows.append(stamp.row("memory", settings, dict(memory)))
    said = {"label": "derived from one-GPU slices", "target": TARGET, "grid": node}
    rows.append(
        stamp.row("node", settings, said)
        if node
        else stamp.row("node", settings, not_run="the slice is not whole, so no node is derived")
    )
    return rows


def show(
    items: Sequence[Item], memory: dict[str, int], node: list[dict[str, Any]], why: str, console: Console
) -> None:
    """The table, memory, and the node's figures with their assumptions."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for head in (
        "item",
        "routing",
        "predicted",
        "refuted beyond",
        "measured",
        "quartiles",
        "TFLOP/s",
        "verdict",
        "largest error",
        "peak",
    ):
        table.add_column(head)
    for item in items:
        predicted, _, limit = PREDICTED.get(item.name, ("", None, None))
        timing, errors = (
            item.timing,
            [
                value
                for name, value in item.correctness.items()
                if isinstance(value, float) and "busiest" not in name
            ],
        )
        table.add_row(
            item.name,
            item.routing,
            predicted,
            "" if limit is None else f"{limit:g}",
            f"{timing.ms:.2f} ms",
            f"{timing.low_ms:.2f} to {timing.high_ms:.2f}",
            f"{item.tflops:.0f}" if item.tflops else "",
            item.verdict(why),
            f"{max(errors):.1e}" if errors else "",
            format_bytes(timing.peak_bytes),
        )
    console.print(table)
    console.print(", ".join(f"{name} {format_bytes(size)}" for name, size in memory.items()))
    if node:
        console.print(
            f"a node of eight, {NODE_TOKENS:,} tokens per step: derived from one-GPU slices, not measured;"
            f" target {TARGET:,}, no overlap"
        )
    for row in node:
        console.print(
            f"  {row['routing']:<8} {row['gb_per_second_between_gpus']} GB/s, imbalance {row['imbalance']},"
            f" overlap {row['overlap']:.2f}: {row['derived_tokens_per_second']:,.0f} tokens/s"
        )
