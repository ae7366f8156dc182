"""Fields of the loop's events in events.jsonl: start, train and error."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from unfreeze.core.balance import balance
from unfreeze.core.process import take_begun
from unfreeze.train.nonfinite import Named
from unfreeze.train.optim import NonFinite
from unfreeze.train.run import latest
from unfreeze.train.state import State
from unfreeze.train.step import StepResult
from unfreeze.train.suspects import SUSPECTS


def emit_start(state: State, processes: int = 1) -> None:
    """Emit the start event: number of steps, resumed or new, and number of processes."""
    config = state.run.config
    steps = state.schedule.steps
    words = {"model": str(config.get("model", "")), "data": str(config.get("data", ""))}
    several: dict[str, Any] = {"processes": processes} if processes > 1 else {}
    if (begun := take_begun()) is not None:
        several["begun"] = begun
    if state.metrics:
        several["metrics"] = list(state.metrics)
    state.run.events.emit("start", state.step, steps=steps, resumed=state.step > 0, **words, **several)


def train_fields(
    result: StepResult,
    seconds: float,
    memory: dict[str, int],
    cursor: dict[str, Any],
    names: Mapping[int, str],
) -> dict[str, Any]:
    """Return the fields of a train event: plain numbers, all finite.

    train_step raises before a NaN gets here; a metric may still be null. cursor: position after the step's
    batches. names: of the mixtures of experts (Decoder.moe_names).
    """
    load, replayed = (
        {names[layer]: counts for layer, counts in of_all.items()}
        for of_all in (result.expert_load, result.replayed)
    )
    return {
        "loss": result.loss,
        **({"epoch": cursor["passes"]} if "passes" in cursor else {}),
        "tokens": result.tokens,
        "supervised_tokens": result.supervised_tokens,
        "seconds": seconds,
        "learning_rate": result.learning_rate,
        "grad_norm": result.grad_norm,
        **memory,
        "peak_bytes": max(memory["peak_bytes"], result.peak_bytes),
        **{name: value if math.isfinite(value) else None for name, value in result.metrics.items()},
        **(_expert_fields(load) if load else {}),
        **({"experts_flipped": _flipped(replayed)} if replayed else {}),
        **({"warning": result.warning, "applied": result.applied} if result.warning else {}),
    }


def _expert_fields(load: dict[str, list[int]]) -> dict[str, Any]:
    """Return tokens per expert, and their balance (docs/why/trust.md M3).

    For each layer: max violation, entropy and the number of dead experts.
    """
    return {
        "expert_load": load,
        "expert_balance": {layer: balance(counts_E) for layer, counts_E in load.items()},
    }


def _flipped(replayed: dict[str, list[int]]) -> dict[str, float]:
    """Return for each layer the share of replayed choices that its router would not have made."""
    return {layer: flipped / choices for layer, (choices, flipped, _) in replayed.items()}


DOWNLOAD = "download the checkpoint again; unfreeze doctor checks every weight"


def of_the_file(what: str, weight: str) -> str:
    """Return the message for a weight that was already NaN or infinite in its file."""
    return f"{what} from {weight}, a weight that no step changed: the checkpoint holds {what}"


def emit_nonfinite(error: NonFinite, named: Named, state: State) -> NonFinite:
    """Emit a train event without a loss, for the report.

    Return the error, completed with what the replay found and where the run can resume.
    """
    step, last, shown = state.step + 1, latest(state.run.path), state.run.shown
    line = named.line
    state.run.events.emit("train", step, loss=None, grad_norm=None, error=f"{error.message}. {line}")
    saved = f"the last save is {shown / 'state' / last.name}" if last else "nothing was saved before"
    if named.weight:
        what = "infinity" if line.startswith("infinity") else "NaN"
        return NonFinite(
            f"step {step}: {of_the_file(what, named.weight)}. The weights were not updated; {saved}",
            next=DOWNLOAD,
        )
    rows = f"look at the rows of this step ({shown / SUSPECTS})"
    if step == 1:
        then = (
            f"check the kernels: unfreeze doctor --gpu (on a CPU --ops); then {rows}, and lower learning_rate"
        )
    else:
        then = f"{rows}, lower learning_rate (a tenth), or lengthen the warm-up"
    return NonFinite(
        f"step {step}: {error.message}. {line}. The weights were not updated; {saved}", next=then
    )
