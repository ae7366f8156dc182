"""Planned memory and speed of well-known releases on machines for rent (docs/measured/plans.md).

    python benchmarks/plans.py FOLDER_OF_CONFIGS --write docs/measured/plans.md

FOLDER_OF_CONFIGS has Kimi-K2-Thinking.json and Qwen--Qwen3-30B-A3B.json as published. Every figure is
derived from counted bytes, products and launches (src/unfreeze/parallel/plan/seconds.py, passes.py) and facts
of the devices (machines.toml). One H100 took 8 % less to 13 % more for three models (h100.md).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from unfreeze.commands.plan import Config, plan_on
from unfreeze.config.lora import LoraConfig
from unfreeze.core.errors import UserError
from unfreeze.core.units import format_of
from unfreeze.parallel.plan.fleet import fleet

MACHINES = {
    "Kimi-K2-Thinking": ("8xH200", "1xH200+768GB", "8xH100", "8xH100+1TB", "16xH100", "1xRTX5090+768GB"),
    "Qwen--Qwen3-30B-A3B": ("1xRTX4090+128GB", "1xL40S+128GB", "1xH100", "1xH200", "8xH100"),
}
RANKS = (8, 16)
NEEDED = (
    "Qwen--Qwen3-0.6B",
    "Qwen--Qwen3-8B",
    "gpt-oss-20b",
    "Qwen--Qwen3-30B-A3B",
    "Qwen--Qwen3-235B-A22B-FP8",
    "Kimi-K2-Thinking",
)
SMALLEST_FIRST = ("1xRTX4090+128GB", "1xH100", "1xH200+768GB", "8xH100", "8xH200", "16xH200")
DERIVED = "derived, not measured"
HEAD = "| machine | rank | fits | tokens a step | a device | host memory | tokens/s | longest term | layout |"


def needed(configs: Path) -> list[str]:
    """The table of README: for each release the first of SMALLEST_FIRST on which a run fits."""
    lines = ["| release | adapters on every layer, rank 16 | every weight |", "|---|---|---|"]
    for release in NEEDED:
        cells: list[str] = []
        for train in ("adapters", "all"):
            cell = "–"
            for words in SMALLEST_FIRST:
                config = Config(model=str(configs / f"{release}.json"), train=train, tokens_per_step=16_384)
                try:
                    planned = plan_on(config, fleet(words))
                except UserError:  # packed weights are not trained
                    cell = "quantized: adapters only"
                    break
                places = planned.choice.places
                if planned.fits:
                    host = sum(places.host.values())
                    more = f" + {host / 2**30:,.0f} GiB of host memory" if host else ""
                    cell = f"{words}: {sum(places.device.values()) / 2**30:,.0f} GiB a GPU{more}"
                    break
            cells.append(cell)
        lines.append(f"| {release.rpartition('--')[2]} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("configs", type=Path)
    options.add_argument("--write", type=Path)
    arguments = options.parse_args()
    page = ["# Plans for well-known releases", "", (__doc__ or "").strip(), ""]
    page += ["## Smallest machine that fits", ""]
    page += ["16,384 tokens a step; of " + ", ".join(SMALLEST_FIRST) + ".", "", *needed(arguments.configs)]
    for release, machines in MACHINES.items():
        plans = []
        page += [
            "",
            f"## {release.rpartition('--')[2]}",
            "",
            HEAD,
            "|---|---:|---|---:|---:|---:|---:|---|---|",
        ]
        for words in machines:
            for rank in RANKS:
                config = Config(model=str(arguments.configs / f"{release}.json"), lora=LoraConfig(rank=rank))
                planned = plan_on(config, fleet(words))
                plans.append(planned)
                choice, places = planned.choice, planned.choice.places
                rate = f"{choice.tokens_per_second:,.0f}, {DERIVED}" if planned.fits else "–"
                not_built = "; not built yet: " + ", ".join(choice.not_built) if choice.not_built else ""
                fits = "yes" if planned.fits else f"no: {places.over}"
                device = format_of(sum(places.device.values()), places.device_usable)
                host = format_of(sum(places.host.values()), places.host_usable)
                cells = (
                    words,
                    str(rank),
                    fits,
                    f"{choice.tokens:,}",
                    device,
                    host if places.host else "–",
                    rate,
                    choice.time.dominating if choice.time else "–",
                    choice.layout.words(planned.counts.num_experts) + not_built,
                )
                page.append(f"| {' | '.join(cells)} |")
        refused = [p for p in plans if not p.fits and p.proposals]
        page += [
            "",
            *(f"- {p.fleet.name}, rank {p.rank}: fits with {'; or '.join(p.proposals)}" for p in refused),
        ]
    text = "\n".join(page) + "\n"
    if arguments.write:
        arguments.write.write_text(text, encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
