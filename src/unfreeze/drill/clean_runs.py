"""Ten clean runs of different families, which must raise no alarm under the guards of the drill."""

from __future__ import annotations

from dataclasses import dataclass

from unfreeze.config import sft as fields
from unfreeze.config.tables import Training
from unfreeze.core.errors import UserError
from unfreeze.drill.sandbox import ROWS, TINY_K2, Sandbox
from unfreeze.job.doctor.checks import examine
from unfreeze.recipes import sft
from unfreeze.report.events import read_events

ALARMS = ("warning", "warn", "guard", "skip", "spike", "nonfinite")
"""Kinds of events that report a problem."""


@dataclass(frozen=True)
class CleanRun:
    """A family in one dtype; "tiny-k2" is the packaged checkpoint."""

    family: str
    dtype: str

    @property
    def title(self) -> str:
        return f"{self.family} in {self.dtype}"


RUNS = tuple(
    CleanRun(family, dtype)
    for family, dtype in (
        ("llama", "float32"),
        ("llama", "bfloat16"),
        ("qwen2", "float32"),
        ("qwen3", "float32"),
        ("qwen3_moe", "float32"),
        ("qwen3_moe", "bfloat16"),
        ("deepseek_v3", "float32"),
        ("deepseek_v3-int4", "float32"),
        ("deepseek_v3-int4", "bfloat16"),
        ("tiny-k2", "float32"),
    )
)


def alarms_of(run: CleanRun, sandbox: Sandbox) -> list[str]:
    """List every warning, fault or refusal of one clean run.

    Runs doctor, trains, and repeats the command in the same folder.
    """
    model = TINY_K2 if run.family == "tiny-k2" else sandbox.checkpoint(run.family)
    data, out = sandbox.rows(ROWS), sandbox.fresh("clean")
    alarms = doctored(str(model), str(data))
    try:
        config = {
            "model": model,
            "data": data,
            "out": out,
            "dtype": run.dtype,
            "micro_batches": 2,
            "tokens_per_step": 256,
            "samples": 1,
        }
        result = sandbox.sft(**config, save_every=2)
        again = sandbox.sft(**config, save_every=2)
        if not (result["finished"] and again["steps"] == result["steps"]):
            alarms.append(
                f"finished {result['finished']}, {result['steps']} steps, {again['steps']} when repeated"
            )
    except UserError as error:
        return [*alarms, f"{type(error).__name__}: {error.message}"]
    events = read_events(out / "events.jsonl")
    alarms += [
        f"event {event['kind']}: {event}"
        for event in events
        if event["kind"] in ALARMS or event.get("warning")
    ]
    return alarms


def doctored(model: str, data: str) -> list[str]:
    """Warnings and faults of the doctor, except those about the machine."""
    config = sft.Config(model=model, data=fields.Data(files=(data,)), training=Training(steps=8))
    findings = examine(config, sft.parts(config), has_data=True)
    return [
        f"doctor, {f.check}: {f.line}"
        for f in findings
        if f.level in ("warn", "fault") and f.check != "machine"
    ]
