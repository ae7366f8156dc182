"""Write docs/measured/ops.md: the doctor's table of this CPU, and of a card that does not exist.

    python benchmarks/ops_page.py

The card's kernels run in Triton's interpreter, in float32: their errors are real, they have no times. One
kernel is made wrong on purpose, so that the page shows what a fault looks like.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "measured" / "ops.md"
WRONG = ("rms_norm", "triton")  # the kernel that is made wrong on the card


def main() -> None:
    """Measure this CPU, check the card in a second process, write the page."""
    if "--card" in sys.argv:
        print(json.dumps(list(card())))
        return
    doctor = subprocess.run(
        [sys.executable, "-m", "unfreeze", "doctor", "--ops", "--json"], capture_output=True, text=True
    )
    if not doctor.stdout:
        raise SystemExit(doctor.stderr)
    mock = subprocess.run(
        [sys.executable, __file__, "--card"],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"TRITON_INTERPRET": "1"},
    )
    PAGE.write_text(
        page(json.loads(doctor.stdout.splitlines()[-1]), json.loads(mock.stdout)), encoding="utf-8"
    )


def card() -> Iterator[dict[str, Any]]:
    """Check the smallest case of each Triton kernel, and every function that others call."""
    import torch

    from unfreeze.kernels.choice import checked, measure, ops
    from unfreeze.kernels.choice import choose as choosing

    cpu, dtype = torch.device("cpu"), torch.float32

    def interpreted(op: Any, device: torch.device, dtype: torch.dtype, bucket: str) -> list[str]:
        return [
            name
            for name, part in op.candidates.items()
            if "triton" in name and part.can("cpu", dtype, bucket)
        ]

    checked.running = interpreted
    real = choosing.implementation_of

    def implementation_of(op: Any, name: str, device: torch.device, dtype: torch.dtype) -> Any:
        right = real(op, name, device, dtype)
        return wrong_by_a_percent(right) if (op.name, name) == WRONG else right

    for module in (checked, measure):
        module.implementation_of = implementation_of
    for op in map(ops.import_op, ops.OPS):
        faults, met = checked.of_uses(op, cpu, dtype), set[str]()
        for case in op.cases:
            names = [name for name in interpreted(op, cpu, dtype, case.bucket) if name not in met]
            if not names or dtype not in case.dtypes:
                continue
            met |= {*names}
            _, errors, wrong = measure.candidates_of(op, case, cpu, dtype)
            for name in names:
                yield {
                    "op": op.name,
                    "inputs": case.bucket,
                    "kernel": name,
                    "error": max(errors[name].forward, errors[name].backward) if name in errors else None,
                    "wrong": (faults | wrong).get(name, ""),
                    "uses": sorted(
                        {use.name for use in op.uses if name in interpreted(op, cpu, dtype, use.bucket)}
                    ),
                }


def wrong_by_a_percent(right: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel, with a result that is 1 % too large."""
    return lambda *arguments: 1.01 * right(*arguments)


def page(cpu: dict[str, Any], mock: list[dict[str, Any]]) -> str:
    """The page's text."""
    import torch

    from unfreeze.core.cpu import processor
    from unfreeze.parallel.machine import num_cores

    machine = f"{processor()} ({cpu['device']}), {num_cores()} cores, torch {torch.__version__}"
    rows = [
        f"| {row['op']} | {row['bucket']} | {row['dtype']} | {row['runs'] or '–'} | {of_cpu(row)} |"
        for row in cpu["rows"]
    ]
    of_card = [
        f"| {' | '.join((row['op'], row['inputs'], row['kernel'], verdict(row)))} |"
        f" {', '.join(row['uses']) or '–'} |"
        for row in mock
    ]
    return "\n".join(
        [
            "# Every kernel against float64",
            "",
            "Made by `python benchmarks/ops_page.py`. [What the table means](../howto/gpu.md).",
            "",
            "## This CPU",
            "",
            f"`unfreeze doctor --ops` on {machine}, {date.today().isoformat()}. Speed is the time of plain",
            "torch over the kernel's, forward and backward together; error is the largest of outputs and",
            "gradients, as a share of the norm. Within 5 % of plain torch, plain torch runs. `fused` of",
            "expert_mlp runs whatever its speed: it keeps no expanded expert for backward.",
            "",
            "| op | inputs | dtype | runs | kernel: speed, error |",
            "|---|---|---|---|---|",
            *rows,
            "",
            "## A card that does not exist",
            "",
            "An H100 ran these kernels (h100.md). Here Triton's interpreter runs them on the CPU, in float32",
            "and at the smallest inputs, as `unfreeze doctor --gpu` checks them on a card, without times.",
            f"`{WRONG[1]}` of {WRONG[0]} was made 1 % too large on purpose: it is found, and would not run.",
            "",
            "| op | inputs | kernel | largest error | functions checked beside the op |",
            "|---|---|---|---|---|",
            *of_card,
            "",
        ]
    )


def of_cpu(row: dict[str, Any]) -> str:
    """The kernels of a row, or the reason why it was not checked."""
    if row["untimed"]:
        return f"not checked: {row['untimed']}"
    plain = row["us"]["reference"]
    words = [
        f"{name} {plain / us:.2f} x, {max(row['error'][name]):.0e}"
        for name, us in row["us"].items()
        if name != "reference"
    ]
    words += [f"**{name} is wrong**: {why}" for name, why in row["wrong"].items()]
    return "; ".join(words)


def verdict(row: dict[str, Any]) -> str:
    """The error of a kernel, or its fault."""
    return f"**wrong**: {row['wrong']}" if row["wrong"] else f"{row['error']:.0e}"


if __name__ == "__main__":
    main()
