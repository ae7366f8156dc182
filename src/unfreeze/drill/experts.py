"""M1 to M4: faults of mixtures of experts. E experts, T tokens, K experts per token."""

from __future__ import annotations

from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from unfreeze import models
from unfreeze.core.schema import Event, TrainEvent
from unfreeze.drill.fault import Fault, Outcome, measured, said
from unfreeze.drill.processes import PATIENCE, train_together
from unfreeze.drill.sandbox import ROWS, Sandbox
from unfreeze.evaluate.gap import TOLERANCE, log_probability_gap
from unfreeze.generate.engine import Engine
from unfreeze.generate.sampling import Sampling
from unfreeze.models import Decoder
from unfreeze.models.blocks.passes import PackedPass
from unfreeze.objectives.cross_entropy import cross_entropy
from unfreeze.parallel.processes.collectives import Processes
from unfreeze.report.events import of_kind, read_events
from unfreeze.report.experts import ExpertWatch
from unfreeze.train.balance import LossFreeBalance
from unfreeze.train.optim import AdamW
from unfreeze.train.step import train_step

FAMILY = "deepseek_v3"


def starve(model: Decoder, awake: int = 2) -> Decoder:
    """Make the router choose only the first `awake` experts."""
    for moe in model.moe_layers().values():
        moe.gate.e_score_correction_bias[awake:] = -100.0  # type: ignore[index]
    return model


def idle_experts(sandbox: Sandbox) -> Outcome:
    """Train a checkpoint in two processes, where six of eight experts never get a token."""
    run = sandbox.fresh("two")
    config = sandbox.sft_config(
        model=starved_checkpoint(sandbox), out=run, micro_batches=2, tokens_per_step=256
    )
    seconds = train_together(config, run)
    train = of_kind(read_events(run / "events.jsonl"), TrainEvent)
    steps = [event.get("expert_load", {})["1"] for event in train]
    idle = min(load.count(0) for load in steps)
    line = (
        f"2 processes, {idle} of 8 experts idle: {len(steps)} of 4 steps, finished after"
        f" {seconds:.0f} s (limit {PATIENCE:.0f})"
    )
    return measured(Processes.sum_, line, holds=len(steps) == 4 and idle == 6)


def gradients_to_reduce(sandbox: Sandbox) -> Outcome:
    """List the gradients that replicas would all-reduce.

    Once with all experts used, once with six of eight idle on this replica.
    """
    sets = []
    for model in (sandbox.model(FAMILY), starve(sandbox.model(FAMILY))):
        optimizer = AdamW(model)
        train_step(
            model,
            optimizer,
            [sandbox.batch([40, 30])],
            cross_entropy,
            learning_rate=1e-3,
            max_norm=1.0,
            recompute=models.keep_inputs,
        )
        sets.append(
            [
                (name, tuple(g.shape))
                for name in optimizer.parameters
                if (g := optimizer.gradient(name)) is not None
            ]
        )
    same = sets[0] == sets[1]
    line = (
        f"{len(sets[1])} gradients to add up with 6 of 8 experts idle, {len(sets[0])} with all in use; the"
        f" same names and shapes: {same}"
    )
    return measured(train_step, line, holds=same)


def starved_checkpoint(sandbox: Sandbox) -> Path:
    return sandbox.write(sandbox.config(FAMILY), sandbox.fresh("starved"), change=starve)


def balance_out_of_step(sandbox: Sandbox) -> Outcome:
    """Run loss-free balancing with 2 micro-batches, recompute and an evaluation after each step.

    There must be one update per step, and each token must count once.
    """
    model = sandbox.model(FAMILY)
    balance, batches, steps = (
        LossFreeBalance(model, 0.01),
        [sandbox.batch([40, 30]), sandbox.batch([20, 9], seed=1)],
        3,
    )

    def evaluate(state: Any, result: Any) -> None:
        with torch.no_grad():
            state.model.hidden(batches[0])

    events = sandbox.loop(model, [batches], steps, after_update=(balance,), on_step=[evaluate])
    loads = [sum(event.get("expert_load", {})["1"]) for event in of_kind(events, TrainEvent)]
    expected = 2 * sum(batch.num_tokens for batch in batches)  # top-2
    moved = float(balance.biases[1].abs().max())
    line = (
        f"{balance.num_updates} updates in {steps} steps, {loads} choices counted per step ({expected} made);"
        f" the bias moved by {moved:g}"
    )
    return measured(
        LossFreeBalance,
        line,
        holds=balance.num_updates == steps and loads == [expected] * steps and moved > 0,
    )


def dead_experts(sandbox: Sandbox) -> Outcome:
    """Train a checkpoint whose router never chooses six of eight experts: the run must warn."""
    run = sandbox.fresh("run")
    sandbox.sft(
        model=starved_checkpoint(sandbox), data=sandbox.rows(ROWS * 40), out=run, tokens_per_step=2048
    )
    warnings = [
        str(event.get("warning") or event.get("message"))
        for event in read_events(run / "events.jsonl")
        if is_warning(event)
    ]
    return said(ExpertWatch, "; ".join(warnings), says="6 of 8 experts got no token")


def is_warning(event: Event) -> bool:
    return event["kind"] == "warning" or bool(event.get("warning"))


def routing_changes_in_recompute(sandbox: Sandbox) -> Outcome:
    """Train with a router that chooses other experts at each call: recompute must use the saved choice."""
    calls: dict[str, int] = {}
    gradients = {}
    for recompute in (models.plain, models.keep_inputs, models.selective):
        model = sandbox.model(FAMILY)
        calls[recompute.__name__] = 0
        for moe in model.moe_layers().values():
            moe.gate.choose = MethodType(restless(type(moe.gate).choose, calls, recompute.__name__), moe.gate)
        optimizer = AdamW(model)
        train_step(
            model,
            optimizer,
            [sandbox.batch([40, 30])],
            cross_entropy,
            learning_rate=1e-9,
            max_norm=0.0,
            recompute=recompute,
        )
        gradients[recompute.__name__] = torch.cat(
            [g.flatten() for n in optimizer.parameters if (g := optimizer.gradient(n)) is not None]
        )
    plain = gradients.pop("plain")
    worst = max(float((gradient - plain).norm() / plain.norm()) for gradient in gradients.values())
    line = (
        f"a router that chooses differently each time was called {calls['keep_inputs']} time per step;"
        f" gradients with recompute differ by {worst:.1g}"
    )
    return measured(PackedPass.reuse, line, holds=set(calls.values()) == {1} and worst <= 1e-6)


def restless(choose: Any, calls: dict[str, int], name: str) -> Any:
    def choose_otherwise(gate: Any, scores_TE: Tensor) -> Tensor:
        calls[name] += 1
        return (choose(gate, scores_TE) + calls[name] - 1) % scores_TE.shape[-1]

    return choose_otherwise


def trainer_and_sampler_part(sandbox: Sandbox) -> Outcome:
    """Compare log-probabilities of sampled tokens between sampler and trainer.

    The sampler decodes with a KV cache, the trainer runs one packed pass.
    """
    gaps = {}
    for family in ("llama", "qwen3_moe", FAMILY):
        sampling = Sampling(max_new_tokens=32, temperature=1.0, seed=0)
        gaps[family] = log_probability_gap(
            Engine(sandbox.model(family)), [[5, 17, 3, 88], [11]], sampling
        ).max
    by_family = ", ".join(f"{family} {gap:.1g}" for family, gap in gaps.items())
    line = f"largest log-probability gap between sampler and trainer: {by_family} (limit {TOLERANCE:g})"
    return measured(log_probability_gap, line, holds=max(gaps.values()) <= TOLERANCE)


FAULTS = [
    Fault("M1", "experts without tokens, while processes wait for each other", idle_experts),
    Fault("M1", "experts without tokens, left out of the all-reduce", gradients_to_reduce),
    Fault("M2", "balancing per micro-batch, per recomputation or in evaluation", balance_out_of_step),
    Fault("M3", "dead experts unnoticed", dead_experts),
    Fault("M4", "routing that changes between forward and recompute", routing_changes_in_recompute),
    Fault("M4", "routing that differs between trainer and sampler", trainer_and_sampler_part),
]
