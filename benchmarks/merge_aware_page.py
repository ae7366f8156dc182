"""The page docs/measured/merge_aware.md, from the rows of benchmarks/merge_aware.py."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

from unfreeze.core.files import write_file
from unfreeze.parallel.machine import hardware

MIXTURES = ("tiny-k2", "qwen3_moe")
TARGETS = ("experts", "all-linear")
RATES = ("3e-3", "1e-3", "1e-4", "3e-4")
SEEDS = (0, 1, 2)
BY_REWARDS = "tiny-k2, by rewards"
STEPS = 40
REWARDED = 40  # steps of GRPO
METHODS = {
    "LoRA, kept apart": ("plain", ""),
    "LoRA, merged, refit": ("plain", "refit"),
    "LoRA, merged, keep": ("plain", "keep"),
    "LoRA, merged, keep-change": ("plain", "keep-change"),
    "merge-aware, refit": ("aware, refit", "refit"),
    "merge-aware, keep-change": ("aware", "keep-change"),
    "merge-aware from 0.8, keep-change": ("aware from .8", "keep-change"),
}
APART = "LoRA, kept apart"
NEAREST = "LoRA, merged, refit"
HEAD = """# Merge-aware training: what one INT4 checkpoint keeps

`python -m benchmarks.merge_aware --write docs/measured/merge_aware.md`, {date}, {machine}. Two mixtures with
INT4 experts in groups of 32 learn to answer like Yoda: tiny-k2 (Kimi-K2's architecture, 16 experts), and a
qwen3_moe of 3 layers and 12 experts that the command makes from nothing on tiny-k2's corpus. {steps} steps
of 1,024 tokens, LoRA of rank 16, a tenth of the rows held out. Gain: base − merged in held-out loss, as per
cent of base − adapter of ordinary LoRA before merging, at its best rate, on the same seed. Yoda and facts:
per cent of 117 other questions that the merged folder answers, through transformers, with one Yoda sentence,
and with the right fact. Every row is in `benchmarks/results/merge_aware/rows.json`.

`refit`, `keep` and `keep-change` are of [--scales](../reference/merge.md#scales-of-quantized-formats).
Merge-aware training (`--merge-aware int4`) goes forward through the rounded weights. Stochastic
rounding on kept scales is left out: it keeps the same length as `keep-change`, with more noise.
"""


@dataclass(frozen=True)
class Row:
    """One run, merged in one way: way of `merge --scales`.

    base, adapter, merged   held-out losses (of BY_REWARDS: mean rewards); adapter is the unrounded W + ΔW
    change, kept            the experts' ‖ΔW‖ / ‖W‖, and size × cosine of what the rounding left of it
    """

    mixture: str
    targets: str
    seed: int
    rate: str
    arm: str
    way: str
    base: float
    adapter: float
    merged: float
    yoda: float
    facts: float
    change: float
    kept: float

    @property
    def key(self) -> tuple[object, ...]:
        return self.mixture, self.targets, self.seed, self.rate, self.arm, self.way


class Rows:
    """rows.json: read at the start, written after every row."""

    def __init__(self, folder: Path):
        self.path = folder / "rows.json"
        known = json.loads(self.path.read_text()) if self.path.is_file() else []
        self.all = [Row(**row) for row in known]

    def add(self, row: Row) -> None:
        self.all.append(row)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = ",\n".join(json.dumps(asdict(row), ensure_ascii=False) for row in self.all)
        write_file(self.path, f"[\n{lines}\n]\n")

    def get(self, **of: object) -> list[Row]:
        return [row for row in self.all if all(getattr(row, name) == value for name, value in of.items())]


def loss(row: Row, method: str) -> float:
    return row.adapter if method == APART else row.merged


def runs_of(rows: Rows, method: str, **of: object) -> list[Row]:
    """The rows of a method; the adapter kept apart is in every row of plain LoRA."""
    arm, way = METHODS[method]
    return rows.get(arm=arm, way=way or "refit", **of)


def best(rows: Rows, method: str, **of: object) -> Row | None:
    """The row of seed 0 with the lowest loss: its rate is the method's."""
    return min(runs_of(rows, method, seed=0, **of), key=lambda row: loss(row, method), default=None)


def shares(rows: Rows, method: str, mixture: str, targets: str) -> list[tuple[Row, float]]:
    """(row, gain in per cent) of each seed, at the method's rate."""
    chosen, own = (best(rows, name, mixture=mixture, targets=targets) for name in (APART, method))
    if chosen is None or own is None:
        return []
    pairs: list[tuple[Row, float]] = []
    for seed in SEEDS:
        of = {"mixture": mixture, "targets": targets, "seed": seed}
        apart = runs_of(rows, APART, rate=chosen.rate, **of)
        for row in runs_of(rows, method, rate=own.rate, **of):
            if apart:
                gained = apart[0].base - apart[0].adapter
                pairs.append((row, 100 * (row.base - loss(row, method)) / gained))
    return pairs


def table(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in (columns, ["---"] * len(columns), *lines))


def summary(rows: Rows) -> str:
    """A line per method: its worst gain at its best rates, and how often a merge to the nearest is better."""
    columns = [
        "method",
        "worst gain at its best rates",
        "runs",
        "rates at which merging with refit loses less",
    ]
    lines: list[list[str]] = []
    for method in METHODS:
        gains = [
            gain
            for mixture in MIXTURES
            for targets in TARGETS
            for _, gain in shares(rows, method, mixture, targets)
        ]
        beaten = [loss(row, method) > loss(plain, NEAREST) for row, plain in beside(rows, method)]
        worst = f"{min(gains):.1f} %" if gains else "not run"
        lines.append([method, worst, str(len(gains)), f"{sum(beaten)} of {len(beaten)}"])
    return table(columns, lines)


def beside(rows: Rows, method: str) -> Iterator[tuple[Row, Row]]:
    """(row of seed 0, plain merging's of the same rate)."""
    for row in runs_of(rows, method, seed=0):
        of = {"mixture": row.mixture, "targets": row.targets, "rate": row.rate, "seed": 0}
        if row.mixture in MIXTURES and (plain := runs_of(rows, NEAREST, **of)):
            yield row, plain[0]


def chosen_table(rows: Rows) -> str:
    columns = "mixture|adapters on|method|rate|seeds|held-out loss|gain: mean (worst)|Yoda|facts".split("|")
    lines: list[list[str]] = []
    for mixture in MIXTURES:
        for targets in TARGETS:
            for method in METHODS:
                of = shares(rows, method, mixture, targets)
                if not of:
                    lines.append([mixture, targets, method, *["not run"] * 6])
                    continue
                own, gains = [row for row, _ in of], [gain for _, gain in of]
                mean = statistics.fmean
                scores = ["", ""]
                if method != APART:
                    scores = [
                        f"{mean(row.yoda for row in own):.0f} %",
                        f"{mean(row.facts for row in own):.0f} %",
                    ]
                lost = f"{mean(loss(row, method) for row in own):.3f}"
                gain = f"{mean(gains):.1f} % ({min(gains):.1f} %)"
                lines.append([mixture, targets, method, own[0].rate, str(len(own)), lost, gain, *scores])
    return table(columns, lines)


def curve_table(rows: Rows) -> str:
    """Held-out losses of seed 0 at every rate; base first."""
    columns = ["mixture", "adapters on", "rate", "base", *METHODS, "experts' ‖ΔW‖/‖W‖"]
    lines: list[list[str]] = []
    for mixture in MIXTURES:
        for targets in TARGETS:
            for rate in RATES:
                of = {"mixture": mixture, "targets": targets, "rate": rate, "seed": 0}
                by = {method: runs_of(rows, method, **of) for method in METHODS}
                if not by[APART]:
                    continue
                plain = by[APART][0]
                cells = [f"{loss(own[0], method):.3f}" if own else "not run" for method, own in by.items()]
                lines.append([mixture, targets, rate, f"{plain.base:.3f}", *cells, f"{plain.change:.3f}"])
    return table(columns, lines)


def reward_table(rows: Rows) -> str:
    columns = "seed|rate|method|reward: base, adapter, merged|gain|Yoda|facts|experts' ‖ΔW‖/‖W‖".split("|")
    lines: list[list[str]] = []
    of = rows.get(mixture=BY_REWARDS)
    for row in sorted(
        of, key=lambda row: (row.seed, row.rate, [*METHODS.values()].index((row.arm, row.way)))
    ):
        method = next(name for name, how in METHODS.items() if how == (row.arm, row.way))
        gain = "?"
        if apart := rows.get(mixture=BY_REWARDS, seed=row.seed, rate=row.rate, arm="plain"):
            gain = f"{100 * (row.merged - row.base) / (apart[0].adapter - apart[0].base):.0f} %"
        values = f"{row.base:.3f}, {row.adapter:.3f}, {row.merged:.3f}"
        scores = f"{row.yoda:.0f} %", f"{row.facts:.0f} %", f"{row.change:.3f}"
        lines.append([str(row.seed), row.rate, method, values, gain, *scores])
    return table(columns, lines)


def page(rows: Rows) -> str:
    head = HEAD.format(date=date.today(), machine=hardware().name, steps=STEPS)
    parts = [
        head,
        summary(rows),
        "## Each method at its best rate\n",
        "Rates were chosen on seed 0 by the held-out loss of what the method publishes.\n",
        chosen_table(rows),
        "## Every rate, seed 0: held-out losses\n",
        curve_table(rows),
    ]
    if rows.get(mixture=BY_REWARDS):
        parts += [
            "## Reinforcement\n",
            f"{REWARDED} steps of GRPO with `examples/rewards/yoda.py` from tiny-k2 that 28 steps of `sft`"
            " have warmed up and `merge` has written in INT4. Rewards are means of the held-out questions."
            " Gain: of what ordinary LoRA gains before merging, at the same rate.\n",
            reward_table(rows),
        ]
    costs = rows.path.with_name("cost.json")
    if costs.is_file():
        parts += ["## Cost\n", cost_table(json.loads(costs.read_text()))]
    return "\n".join(parts)


def cost_table(record: dict[str, Any]) -> str:
    columns = ["mixture", "adapters on", "method", "step", "peak memory of the process"]
    lines = [
        [row["mixture"], row["targets"], row["arm"], f"{row['seconds']:.3f} s", f"{row['mib']:,.0f} MiB"]
        for row in record["rows"]
    ]
    about = (
        f"One thread, {record['machine']}, {record['date']}; `python -m benchmarks.merge_aware --cost`.\n\n"
    )
    apart, merged = (record["answers"][name] for name in ("adapter kept apart", "merged"))
    answered = (
        f"\nAnswering all questions with tiny-k2, adapters on all layers: {apart:.2f} s with the adapter kept"
    )
    return about + table(columns, lines) + f"{answered} apart, {merged:.2f} s merged.\n"
