"""Launches and bytes of a step on a GPU, counted without one (docs/measured/launches.md).

    python -m benchmarks.launches FOLDER_OF_CONFIGS [MODEL …] [--keep before|after]
                                  [--write docs/measured/launches.md]

Counted, not measured: the whole model runs forward and backward on torch's meta device with the code that
runs on an H200 (benchmarks/harness/on_meta.py). --keep writes the counts into
benchmarks/results/launches.json, from which the page is made. Documents have 2,048 tokens; adapters of rank
16 are on every layer; a micro-batch is a step. "before" is the commit before these changes (acf9a4bd).
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import date
from itertools import chain
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.harness.on_meta import Flash, Launches, as_on_an_h200
from unfreeze import models
from unfreeze.adapters import LoraConfig, attach
from unfreeze.adapters import lora as low_rank
from unfreeze.commands.plan import Config, plan_on
from unfreeze.core.batch import Batch
from unfreeze.core.layout import Layout
from unfreeze.core.rows import share
from unfreeze.kernels import expert_mlp, linear_cross_entropy
from unfreeze.kernels.attention import sdpa
from unfreeze.kernels.expert_mlp import backend, release_scratch
from unfreeze.kernels.expert_mlp.grouped import Grouped
from unfreeze.models import Decoder
from unfreeze.models.blocks import experts as experts_block
from unfreeze.parallel.placement import dispatch
from unfreeze.parallel.plan.fleet import fleet
from unfreeze.parallel.plan.rates import DEVICE_LAUNCH, MEMORY_SHARE
from unfreeze.parallel.processes.collectives import Alone, InFlight
from unfreeze.parallel.processes.mesh import Mesh
from unfreeze.quant.codec import Codec
from unfreeze.quant.int4 import Int4
from unfreeze.quant.mxfp4 import Mxfp4
from unfreeze.train.optim import AdamW

RESULTS = Path(__file__).parent / "results" / "launches.json"
RANK, DOCUMENT = 16, 2048
ADAMW_BYTES = 28  # per parameter: master, m and v read and written, gradient read
ABOUT = (
    "An operation that is no view is a launch, and so is a call of a Triton kernel; its bytes are its"
    " operands' (a kernel that reads a part of one is counted with all of it). Flash attention counts one"
    f" launch a direction. Host: launches times {DEVICE_LAUNCH * 1e6:.0f} µs, which the device hides if its"
    " own work takes longer.",
)
Counts = dict[str, tuple[int, int]]
"""Group of ops -> (launches, bytes)."""


@dataclass(frozen=True)
class Case:
    """A model as one device runs it.

    config     the name of its config.json
    tokens     of a micro-batch on one device
    codec      of its packed experts; None: bf16
    split      processes that share the experts: rows are routed evenly
    hardware   for which the plan derives the seconds of a step
    """

    config: str
    tokens: int
    recompute: str
    codec: Codec | None = None
    split: int = 1
    hardware: str = "1xH100"


CASES = {
    "Qwen3-30B-A3B": Case("Qwen--Qwen3-30B-A3B", 4096, "layers"),
    "Kimi-K2-Thinking": Case("Kimi-K2-Thinking", 4096, "elementwise", Int4(32), 8, "8xH200"),
    "gpt-oss-20b": Case("gpt-oss-20b", 4096, "layers", Mxfp4(), hardware="1xRTX4090+64GB"),
    "Llama-3.1-8B": Case("meta-llama--Meta-Llama-3.1-8B", 4096, "nothing"),
}


class Even(Alone):
    """Process 0 of `size` that route alike: it receives as many rows as it sends. An exchange is a launch."""

    def __init__(self, size: int, launches: Launches):
        self.size, self._launches = size, launches

    def exchange(self, rows: Tensor, send: Sequence[int], receive: Sequence[int]) -> InFlight:
        if not rows.is_meta:  # counts of rows per expert: everyone has the same
            return InFlight(rows[: receive[0]].repeat(self.size), lambda: None)
        arrived = rows.new_empty((sum(receive), *rows.shape[1:]))
        self._launches.report("all-to-all", [rows, arrived], "exchange")
        return InFlight(arrived, lambda: None)


def count(config: dict[str, Any], case: Case) -> Counts:
    """Launches and bytes of a step of the model, by group of ops."""
    release_scratch()
    launches = Launches(RANK)
    with ExitStack() as patches:
        patches.enter_context(as_on_an_h200(launches.report))
        patches.enter_context(_as_on_cuda(config, case, launches))
        model = _model(config, case, launches)
        optimizer = AdamW(model)
        with launches:
            _step(model, optimizer, case, launches)
    release_scratch()
    return {group: (launches.launches[group], launches.bytes[group]) for group in sorted(launches.launches)}


def _step(model: Decoder, optimizer: AdamW, case: Case, launches: Launches) -> None:
    """Forward, backward, the gradients' norm and the update, as train/step.py without its read."""
    tokens, device = case.tokens, "meta"
    kinds = (torch.int64, torch.int64, torch.float32, torch.int64)
    rows = [torch.empty(tokens, dtype=kind, device=device) for kind in kinds]
    ids_T, targets_T, weights_T, positions_T = rows
    batch = Batch(ids_T, targets_T, weights_T, positions_T, torch.arange(0, tokens, min(tokens, DOCUMENT)))
    hidden_TD = model.hidden(batch, models.RECOMPUTE[cast("Any", case.recompute)])
    loss, *_ = linear_cross_entropy.head_cross_entropy(hidden_TD, model.lm_head, targets_T, weights_T)
    loss.backward()
    optimizer.grad_norm()
    launches.report("adamw", [], "optimizer")
    launches.bytes["optimizer"] += ADAMW_BYTES * sum(p.numel() for p in optimizer.parameters.values())


def _model(config: dict[str, Any], case: Case, launches: Launches) -> Decoder:
    shape = models.shape(config)

    def codec_for(part: str) -> Codec | None:
        return case.codec if ".experts." in part and "shared" not in part else None

    model = models.build(shape, dtype=torch.bfloat16, device="meta", codec_for=codec_for)
    if case.split > 1:
        group = Even(case.split, launches)
        dispatch.split_experts(model, Mesh(group, Alone(), group, shape.num_experts))
    attach(model, LoraConfig(rank=RANK), 0, device="meta")
    return model


@contextmanager
def _as_on_cuda(config: dict[str, Any], case: Case, launches: Launches) -> Iterator[None]:
    """Put what no kernel choice decides as on CUDA: the experts' backend, flash attention, and routing."""
    shape = models.shape(config)
    fused = functools.partial(expert_mlp.fused_expert_mlp, backend=Grouped())
    held = len(share(shape.num_experts, 0, case.split)) if shape.num_experts else 1
    rows = case.tokens * shape.experts_per_token
    ends = [(e + 1) * rows // held for e in range(held)]
    find = dispatch.RowsDispatch.home

    def even(self: dispatch.RowsDispatch, ids_TK: Tensor) -> dispatch.Home:
        ids = (torch.arange(ids_TK.numel()) % self.rows.of).view(ids_TK.shape)
        for _ in range(12):  # its own operations, which run on the host here
            launches.report("home", [], "exchange")
        home = find(self, ids)
        on_meta = {
            name: getattr(home, name).to("meta") for name in ("token_n", "place_TK", "slot_TK", "ids_N1")
        }
        return replace(home, **on_meta)

    def attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return cast(Tensor, Flash.apply(q, k, v, launches.report))

    def experts(*arguments: Any, impl: str = "", **named: Any) -> Tensor:
        return fused(*arguments, **named)

    with ExitStack() as patches:
        for place, name, value in (
            (experts_block, "expert_mlp", experts),
            (sdpa, "torch_attention", attention),
            (backend.DeviceRouting, "ends", ends),
            (dispatch.RowsDispatch, "home", even),
            (low_rank.LowRank, "reset", lambda *_: None),
            (low_rank.ExpertLowRank, "reset", lambda *_: None),
        ):
            patches.enter_context(patch.object(place, name, value))
        yield


def derived(config: Path, case: Case) -> float:
    """Seconds of that step on case.hardware, as the plan derives them."""
    place = Layout.model_validate({"recompute": case.recompute, "split": case.split})
    tokens = case.tokens * fleet(case.hardware).count
    wish = Config(model=str(config), lora=LoraConfig(rank=RANK), tokens_per_step=tokens, place=place)
    time = plan_on(wish, fleet(case.hardware)).choice.time
    assert time is not None
    return time.step


def _speeds(case: Case, kept: dict[str, Any], name: str) -> str:
    """The derived tokens/s of the trees: more bytes take longer, by the rate of the device's memory."""
    machine = fleet(case.hardware)
    assert machine.device is not None
    tokens, step = case.tokens * machine.count, kept["after"]["seconds"][name]
    more = sum(b for _, b in kept["before"]["counts"][name].values())
    more -= sum(b for _, b in kept["after"]["counts"][name].values())
    before = step + more / (MEMORY_SHARE * machine.device.memory_gb_s * 1e9)
    return (
        f"Derived, not measured, on {case.hardware}: {tokens / step:,.0f} tokens/s, of a step of {step:.2f} s"
        f" (the plan's); with the bytes of before {tokens / before:,.0f}, of {before:.2f} s."
    )


def page(kept: dict[str, Any]) -> str:
    """The page of the kept counts: before and after, by model and group."""
    lines = ["# Launches and bytes of a step, counted", "", (__doc__ or "").strip(), "", *ABOUT]
    whens = [when for when in ("before", "after") if kept[when]["counts"]]
    for name, case in CASES.items():
        by_tree: list[Counts] = [kept[when]["counts"].get(name, {}) for when in whens]
        split = f", experts split over {case.split}" if case.split > 1 else ""
        lines += ["", f"## {name}", ""]
        lines += [f"{case.tokens:,} tokens a device, recompute {case.recompute}{split}.", ""]
        lines += [f"| ops | {' | '.join(f'launches {when} | GB {when}' for when in whens)} |"]
        lines += [f"|---|{'---:|---:|' * len(whens)}"]
        rows = {
            group: [counts.get(group, (0, 0)) for counts in by_tree] for group in sorted({*chain(*by_tree)})
        }
        rows["**sum**"] = [
            (sum(n for n, _ in counts.values()), sum(b for _, b in counts.values())) for counts in by_tree
        ]
        for group, cells in rows.items():
            lines.append(f"| {group} | " + " | ".join(f"{n:,} | {b / 1e9:,.1f}" for n, b in cells) + " |")
        host = " | ".join(f"{n * DEVICE_LAUNCH:.2f} | " for n, _ in rows["**sum**"])
        lines.append(f"| host, s | {host} |")
        if name in kept["after"].get("seconds", {}):
            lines += ["", _speeds(case, kept, name)]
    dates = [f"{when}: {kept[when]['date']}, torch {kept[when]['torch']}" for when in whens]
    return "\n".join([*lines, "", "; ".join(dates) + ".", ""])


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("configs", type=Path)
    options.add_argument("models", nargs="*", choices=[[], *CASES], default=[])
    options.add_argument("--keep", choices=("before", "after"))
    options.add_argument("--write", type=Path)
    arguments = options.parse_args()
    nothing: dict[str, Any] = {"counts": {}}
    kept = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {"before": nothing, "after": nothing}
    counts: dict[str, Counts] = {}
    seconds: dict[str, float] = {}
    for name in arguments.models or CASES:
        case = CASES[name]
        config = arguments.configs / f"{case.config}.json"
        counts[name], seconds[name] = count(json.loads(config.read_text()), case), derived(config, case)
        for group, (number, size) in counts[name].items():
            print(f"{name:18} {group:24} {number:8,} {size / 1e9:10.1f} GB", flush=True)
    if arguments.keep:
        kept[arguments.keep] = {
            "date": str(date.today()),
            "torch": torch.__version__,
            "counts": {**kept[arguments.keep]["counts"], **counts},
            "seconds": {**kept[arguments.keep].get("seconds", {}), **seconds},
        }
        RESULTS.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    if arguments.write:
        arguments.write.write_text(page(kept), encoding="utf-8")


if __name__ == "__main__":
    main()
