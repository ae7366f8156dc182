"""A script for test_fsdp.py: one process that imports everything once, then forks the processes of runs that
train every weight, divided by FSDP2. Prints one JSON object."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.tensor
from safetensors.torch import save_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "train"))
import test_collectives as small
from sharding import forked

from unfreeze import models
from unfreeze.checkpoint import open_checkpoint
from unfreeze.checkpoint.save import disk_tensors, save_checkpoint
from unfreeze.core.batch import Batch, Loss
from unfreeze.core.errors import ConfigError
from unfreeze.core.rows import gathered
from unfreeze.core.taps import Tap
from unfreeze.drill.experts import starve
from unfreeze.generate.open import open_model, open_sharded
from unfreeze.job.end.divided import write_divided
from unfreeze.objectives.cross_entropy import cross_entropy
from unfreeze.parallel.processes.collectives import ALONE, Group
from unfreeze.teach.kept import Kept
from unfreeze.teach.second import Beginning
from unfreeze.train.follower import Follower, open_run
from unfreeze.train.optim import AdamW
from unfreeze.train.run import Run
from unfreeze.train.schedule import Schedule
from unfreeze.train.state import State, start_or_resume
from unfreeze.train.step import StepResult, train_step
from unfreeze.train.together import save_together

FAMILIES = ("deepseek_v3", "llama")  # a mixture with a head of its own; dense, with a tied head
HYBRID = "nemotron_h"  # a decay that stays in float32, experts of one matrix; two steps only
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
STEPS = 5
UP_TO_2_11 = {"all_gather_single": "all_gather_into_tensor", "reduce_scatter_single": "reduce_scatter_tensor"}
"""Collectives that torch 2.12 renamed."""
NEMOTRON = {
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts"), 1),
    **{name: small.CONFIG[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "rope_theta")},
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "ME*-",
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "ssm_state_size": 8,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "moe_latent_size": 24,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
}
LLAMA = (  # of CONFIG's fields those that a Llama has
    "vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads intermediate_size"
    " rms_norm_eps rope_theta max_position_embeddings initializer_range dtype"
).split()


def checkpoint(folder: Path, family: str, skewed: bool = False) -> Path:
    """A model of `family` as files. skewed: its router sends every token to experts 0 and 1."""
    model = small.decoder(family, NEMOTRON if family == HYBRID else {})
    if skewed:
        starve(model, awake=2)
    config = {**small.CONFIG, "dtype": "float32"}
    if family == "llama":
        config = {name: value for name, value in config.items() if name in LLAMA}
        config |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}
    elif family == HYBRID:
        config = {**NEMOTRON, "dtype": "float32"}
    rules, tied = models.rules(model.shape), models.tied(model.shape)
    kept = ((name, tensor) for name, tensor in model.state_dict().items() if name not in tied)
    save_checkpoint(folder, config, disk_tensors(kept, rules))
    return folder


def opened(
    files: Path, group: Group, dtype: torch.dtype, stats: list[Any] | None = None
) -> tuple[models.Decoder, Any]:
    """(model, held) on these processes: whole on one, else divided."""
    manifest = open_checkpoint(str(files))
    if group.size == 1:
        return open_model(manifest, dtype), None
    told = None if stats is None else stats.append
    model, sharded = open_sharded(manifest, group, dtype, "cpu", loaded=told)
    return model, sharded.held


def step(
    state: tuple[models.Decoder, AdamW],
    batches: list[Batch],
    group: Group,
    policy: str = "layers",
    objective: Any = cross_entropy,
) -> StepResult:
    model, optimizer = state
    return train_step(
        model,
        optimizer,
        batches,
        objective,
        learning_rate=1e-2,
        max_norm=1.0,
        recompute=models.recompute_policy(policy, model.layers),
        group=group,
    )


@contextmanager
def counted(calls: list[str]) -> Any:
    """The collectives that are called within, by name."""
    names = ("all_reduce", "all_gather_single", "reduce_scatter_single", "broadcast", "all_gather")
    of_torch = {name: name if hasattr(dist, name) else UP_TO_2_11[name] for name in names}
    before = {name: getattr(dist, of_torch[name]) for name in names}

    def counting(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            calls.append(name)
            return before[name](*arguments, **options)

        return call

    for name in names:
        setattr(dist, of_torch[name], counting(name))
    try:
        yield
    finally:
        for name in names:
            setattr(dist, of_torch[name], before[name])


def gradients(optimizer: AdamW) -> dict[str, Tensor]:
    """Of all weights, whole, on every process."""
    found = {}
    for name, parameter in optimizer.parameters.items():
        found[name] = gathered(parameter.grad) if name in optimizer._divided else optimizer.gradient(name)
    return {name: gradient.float().clone() for name, gradient in found.items()}


class Tapped:
    """Cross entropy, and squares of what layers are made of."""

    taps = frozenset({Tap(1, "q"), Tap(1, "input"), Tap(0, "v")})

    def __call__(self, hidden_TD: Tensor, lm_head: Any, batch: Batch, found: Any) -> Loss:
        loss = cross_entropy(hidden_TD, lm_head, batch)
        return Loss(loss.sum + sum(x.pow(2).sum() for x in found.values()) / 10, loss.count, loss.metrics)


def tapped(folder: Path, group: Group, policy: str) -> list[float]:
    """Loss and gradient norm of two steps whose objective reads inside layers."""
    model, held = opened(folder / "deepseek_v3", group, torch.float32)
    state = model, AdamW(model, held=held)
    results = [step(state, small.cut(4, True), group, policy, Tapped()) for _ in range(2)]
    return [number for result in results for number in (result.loss, result.grad_norm)]


def asked_first(folder: Path, group: Group) -> list[float]:
    """Losses of two steps of a run that asked its model about its documents before the first."""
    model, held = opened(folder / "deepseek_v3", group, torch.float32)
    batches = small.cut(4, True)
    kept = Kept("copy", lambda reference: cross_entropy)
    beginning = Beginning(
        model=model,
        batches=lambda: batches,
        count=len(batches),
        in_windows=False,
        data="",
        dtype="float32",
        folder=folder / f"asked-by-{group.size}",
        group=group,
        say=lambda line: None,
    )
    kept.source(iter(()), beginning)  # type: ignore[arg-type]
    state = model, AdamW(model, held=held)
    return [step(state, batches, group).loss for _ in range(2)]


def compared(folder: Path, group: Group) -> dict[str, Any]:
    """What these processes find: losses, norms, loads, collectives of each step; and the first gradients."""
    facts: dict[str, Any] = {"asked first": asked_first(folder, group)}
    for family in (*FAMILIES, HYBRID):
        for kind, dtype in DTYPES.items():
            stats: list[Any] = []
            model, held = opened(folder / family, group, dtype, stats)
            optimizer = AdamW(model, held=held, weight_decay=0.1)
            results, calls = [], []
            steps = STEPS if kind == "float32" else 4
            for number in range(steps if family != HYBRID else 2):
                batches = small.cut(8, False) if number % 2 else small.cut(4, True)  # a document each
                calls.append([])
                with counted(calls[-1]):
                    results.append(step((model, optimizer), batches, group))
                if (number == 0 and group.rank == 0) or (group.size > 1 and number == 0):
                    first = gradients(optimizer)
                    if group.rank == 0:
                        save_file(first, folder / f"{family}-{kind}-{group.size}.safetensors")
            facts[f"{family} {kind}"] = {
                "losses": [result.loss for result in results],
                "norms": [result.grad_norm for result in results],
                "loads": [result.expert_load for result in results],
                "calls": [" ".join(each) for each in calls],
                "bytes": stats[0].bytes_by_rank if stats else [],
                "rows": sum(len(master) for master in optimizer.masters.values()),
            }
    for policy in ("selective", "elementwise", "nothing"):
        model, held = opened(folder / "deepseek_v3", group, torch.float32)
        state = model, AdamW(model, held=held)
        facts[policy] = [step(state, small.cut(4, True), group, policy).loss for _ in range(2)]
        facts[f"taps {policy}"] = tapped(folder, group, policy)
    model, held = opened(folder / "skewed", group, torch.float32)
    state, calls = (model, AdamW(model, held=held)), []
    with counted(calls):
        results = [step(state, small.cut(4, True), group) for _ in range(2)]
    facts["skewed"] = {"losses": [result.loss for result in results], "calls": " ".join(calls)}
    facts["skewed"]["loads"] = [result.expert_load for result in results]
    return facts


def session(folder: Path, group: Group, until: int, dtype: torch.dtype, **options: Any) -> State:
    """A run to step `until` of deepseek_v3 with 4 micro-batches a step, and a save at its end."""
    with open_run(group, lambda: Run(folder, {}), lambda: Follower(folder, {})) as run:
        model, held = opened(folder.parent / "deepseek_v3", group, dtype)
        optimizer = AdamW(model, held=held, weight_decay=0.1, **options)
        state = start_or_resume(run, model, optimizer=optimizer, schedule=Schedule(1e-2, STEPS))
        losses = []
        while state.step < until:
            losses.append(step((model, optimizer), small.cut(4, True), group).loss)
            state.step += 1
        save_together(state, group=group)
        if group.rank == 0:
            with (folder / "losses.jsonl").open("a") as file:
                file.write("".join(f"{loss!r}\n" for loss in losses))
        return state


def written(folder: Path, family: str, group: Group, dtype: torch.dtype) -> None:
    """One step of `family`, and its checkpoint: divided among these processes, or of one."""
    model, held = opened(folder / family, group, dtype)
    optimizer = AdamW(model, held=held)
    step((model, optimizer), small.cut(4, True), group)
    manifest = open_checkpoint(str(folder / family))
    state = State(None, model, optimizer, Schedule(1e-2, STEPS))  # type: ignore[arg-type]
    with torch.no_grad():
        model.hidden(small.cut(4, True)[0])  # head and embedding stay gathered, as after a validation
    write_divided(state, manifest, folder / f"{family}-{dtype}-written-{group.size}", group, {})


def made_late(folder: Path, group: Group) -> dict[str, Any]:
    """What AdamW says behind a forward pass; and what a step moves where it is not told what is held here."""
    model, held = opened(folder / "deepseek_v3", group, torch.float32)
    before = {name: gathered(p).clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        model.hidden(small.cut(4, True)[0])
    try:
        said = str(AdamW(model, held=held))
    except ConfigError as error:
        said = error.message
    step((model, AdamW(model)), small.cut(4, True), group)
    model.reshard()  # what is gathered is a copy
    still = [name for name, p in model.named_parameters() if torch.equal(gathered(p), before[name])]
    return {"said": said, "still": still}


def work(folder: Path) -> dict[str, Any]:
    for family in (*FAMILIES, HYBRID):
        checkpoint(folder / family, family)
    checkpoint(folder / "skewed", "deepseek_v3", skewed=True)
    facts = {"1": [json.loads(json.dumps(compared(folder, ALONE)))]}

    def two(group: Group) -> None:
        found = compared(folder, group)
        model, held = opened(folder / "deepseek_v3", group, torch.float32)
        for unit in model.modules():  # the planted bug: means, as FSDP2 has them by default
            if hasattr(unit, "set_gradient_divide_factor"):
                unit.set_gradient_divide_factor(2.0)
        optimizer = AdamW(model, held=held)
        found["mean"] = step((model, optimizer), small.cut(4, True), group).grad_norm
        found["late"] = made_late(folder, group)
        (folder / f"facts-{group.rank}.json").write_text(json.dumps(found))
        session(folder / "resumed", group, 2, torch.float32)
        session(folder / "half", group, 2, torch.bfloat16)
        session(folder / "int8", group, 1, torch.float32, moments="int8")
        session(folder / "int8", group, 3, torch.float32, moments="int8")
        for family in FAMILIES:
            written(folder, family, group, torch.float32)
        written(folder, "llama", group, torch.bfloat16)

    codes = forked(2, two, 240)
    facts["2"] = [json.loads((folder / f"facts-{rank}.json").read_text()) for rank in (0, 1)]
    session(folder / "straight", ALONE, STEPS, torch.float32)
    session(folder / "resumed", ALONE, 4, torch.float32)
    session(folder / "half-straight", ALONE, 4, torch.bfloat16)
    session(folder / "half", ALONE, 4, torch.bfloat16)
    codes += forked(4, lambda group: session(folder / "resumed", group, STEPS, torch.float32) and None)
    for family in FAMILIES:
        written(folder, family, ALONE, torch.float32)
    written(folder, "llama", ALONE, torch.bfloat16)
    return {"codes": codes, **facts}


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(work(Path(sys.argv[1]))))
