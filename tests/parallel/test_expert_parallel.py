"""Experts split over processes train as one process does (docs/why/trust.md M1).

Process-heavy: this file is also a script (see main). It imports everything and makes what one process makes
once, then forks 2 processes and 4, which are a split of 4 and, as 2 x 2, a split of 2 beside two processes of
data. Each compares what it holds.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from unfreeze import models
from unfreeze.adapters import LoraConfig, attach
from unfreeze.core.batch import Batch, Loss
from unfreeze.core.rows import Rows
from unfreeze.core.taps import Tap
from unfreeze.data import Example, pack
from unfreeze.models.blocks.experts import Experts
from unfreeze.models.recompute import recompute_policy
from unfreeze.objectives.cross_entropy import cross_entropy
from unfreeze.parallel.placement.dispatch import RowsDispatch, make_room, split_experts
from unfreeze.parallel.processes.collectives import ALONE, Group, InFlight
from unfreeze.parallel.processes.mesh import HeldPart, Mesh, mesh_of
from unfreeze.train.optim import AdamW
from unfreeze.train.step import train_step

SMALL = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "initializer_range": 0.2}
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        **SMALL,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "n_routed_experts": 7,  # over 2 and over 4 processes in uneven parts
        "num_experts_per_tok": 3,  # more than two, so that the order of the sum over experts shows
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
    },
    "chain_of_experts": {
        **SMALL,
        "num_attention_heads": 2,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "inner_iter": 2,
    },
    "qwen2_moe": {
        **SMALL,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 80,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
    "gpt_oss": {
        **SMALL,
        "num_local_experts": 4,
        "intermediate_size": 48,
        "head_dim": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "kimi_linear": {
        **SMALL,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_experts": 7,
        "num_experts_per_token": 2,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "linear_num_heads": 2,
        "linear_head_dim": 8,
        "layer_types": ["full_attention", "linear_attention"],
    },
    "lfm2_moe": {
        **SMALL,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "num_dense_layers": 1,
        "layer_types": ["full_attention", "conv"],
    },
    "llama4_text": {
        **SMALL,
        "intermediate_size": 48,
        "intermediate_size_mlp": 80,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "interleave_moe_layer_step": 2,
    },
    "gemma4_text": {
        **SMALL,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "layer_types": ["sliding_attention", "full_attention"],
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 24,
        "per_layer_config": {"1": {"head_dim": 32}},
    },
}
"""One of each kind of mixture: plain, gated shared expert, biases, scaled inputs, norms around it."""
ROUTINGS = ("random", "skewed", "starved", "one expert", "one token", "no token")
RECOMPUTE = ("layers", "selective", "elementwise", "nothing")
STEPS = 6


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30))


# the expert op alone


def routed(routing: str, tokens: int, E: int, K: int, seed: int) -> tuple[Tensor, Tensor]:
    """(ids [T, K], weights [T, K])."""
    logits = torch.randn(tokens, E, generator=torch.Generator().manual_seed(seed))
    if routing in ("skewed", "starved"):
        logits[:, 0] += 5
    if routing == "starved":
        logits[:, 3:5] = -100
    weights, ids = logits.softmax(-1).topk(K)
    if routing == "one expert":
        ids, weights = ids[:, :1] * 0 + 2, weights[:, :1]
    return ids, weights


class Factors(nn.Module):
    def __init__(self, E: int, D: int, I: int, R: int):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        for name, shape in {
            "gate_up_A": (E, 2 * R, D),
            "gate_up_B": (E, 2 * I, R),
            "down_A": (E, R, I),
            "down_B": (E, D, R),
        }.items():
            setattr(self, name, nn.Parameter(0.1 * torch.randn(shape, generator=generator)))

    def factors(self) -> Any:
        from unfreeze.kernels.expert_mlp import ExpertFactors

        return ExpertFactors(
            self.gate_up_A, self.gate_up_B, self.down_A, self.down_B, scale=2.0, down_scale=2.0
        )


def experts_of(E: int, D: int, dtype: torch.dtype) -> Experts:
    generator = torch.Generator().manual_seed(0)
    experts = Experts(E, D, 16, codec=None, dtype=dtype, device="cpu")
    for parameter in experts.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * D**-0.5)
        parameter.requires_grad_(False)
    experts.adapter = Factors(E, D, 16, 4)
    return experts


def through(experts: Experts, x: Tensor, ids: Tensor, weights: Tensor, dy: Tensor) -> list[Tensor]:
    """[y, dx, dweights, gradients of the factors]."""
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    y = experts(x, ids, weights)
    y.backward(dy)
    assert isinstance(experts.adapter, nn.Module)
    factors = [p.grad if p.grad is not None else torch.zeros_like(p) for p in experts.adapter.parameters()]
    return [y.detach(), x.grad, weights.grad, *factors]  # type: ignore[list-item]


def op(
    mesh: Mesh, routing: str, dtype: torch.dtype, shift: int = 0, room: int | None = None
) -> dict[str, float | bool]:
    """How far the split op is from one process's on the rows of all, for this process's rows and experts.

    shift: of the experts that each process holds (control arm). room: rows that it has memory for."""
    E, D, K, group = 7, 24, 3, mesh.experts
    counts = [20 + 7 * rank for rank in range(group.size)]
    counts[1] = {"one token": 1, "no token": 0}.get(routing, counts[1])
    generator = torch.Generator().manual_seed(2)
    x, dy = (torch.randn(sum(counts), D, generator=generator).to(dtype) for _ in range(2))
    ids, weights = routed(routing, sum(counts), E, K, seed=3)
    mine = slice(sum(counts[: group.rank]), sum(counts[: group.rank + 1]))
    expected = through(experts_of(E, D, dtype), x, ids, weights, dy)

    split = experts_of(E, D, dtype)
    whole = Mesh(mesh.all, mesh.data, mesh.experts, E)
    rows = [whole.rows_of(index) for index in range(group.size)]
    own = rows[group.rank]
    for module in split.modules():
        for parameter in module.parameters(recurse=False):
            parameter.data = parameter.data.roll(shift, 0)[own.slice].clone()
    split.dispatch = RowsDispatch(group, rows, room)
    sizes, here = [0], split.here
    split.here = lambda x, *rest: sizes.append(len(x)) or here(x, *rest)  # type: ignore[method-assign]
    found = through(split, x[mine], ids[mine], weights[mine], dy[mine])
    expected = [t[mine] for t in expected[:3]] + [t[own.slice] for t in expected[3:]]
    return {
        "equal": all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)),
        "y": relative(found[0], expected[0]),
        "factors": max(relative(a, b) for a, b in zip(found[3:], expected[3:], strict=True)),
        "rest": max(relative(a, b) for a, b in zip(found[:3], expected[:3], strict=True)),
        "most": max(sizes),
        "calls": len(sizes) - 1,
    }


# whole models


def batches(count: int, step: int = 0) -> list[Batch]:
    """A micro-batch of the second process is one document; the first's last document is unsupervised."""
    generator = torch.Generator().manual_seed(11 + step)
    made = []
    for index in range(count):
        lengths = [9] if index == 1 else [5, 12, 3 + index]
        documents = [torch.randint(1, 97, (n,), generator=generator).tolist() for n in lengths]
        examples = [Example(tokens, [0.0, *[1.0] * (len(tokens) - 1)]) for tokens in documents]
        if index == 0:
            examples[-1] = Example(documents[-1], [0.0] * len(documents[-1]))
        made.append(pack(examples))
    return made


def with_routes(count: int, step: int = 0) -> list[Batch]:
    """The same with experts given to two of three tokens: those that another sampler chose."""
    made = []
    for index, batch in enumerate(batches(count, step)):
        drawn = torch.rand(batch.num_tokens, 1, 7, generator=torch.Generator().manual_seed(index))
        routes_TLK = drawn.argsort(2)[:, :, :3].to(torch.int16)
        routes_TLK[::3] = -1
        made.append(replace(batch, extras={"routes": routes_TLK}))
    return made


def experts_in(family: str) -> int:
    return models.shape({**FAMILIES[family], "model_type": family}).num_experts


def decoder(family: str, mesh: Mesh | None, train: str = "adapters") -> models.Decoder:
    config = {**FAMILIES[family], "model_type": family}
    model = models.build(models.shape(config), dtype=torch.float32, device="cpu")
    models.initialize(model, 0)
    for name, tensor in model.named_parameters():
        if name.endswith("bias"):  # `initialize` makes them 0
            tensor.data.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(5)))
    if mesh is not None:
        split_experts(model, mesh)
    if train == "adapters":
        attach(model, LoraConfig(rank=2, targets=("attention", "experts")), 0)
        for (
            name,
            parameter,
        ) in model.named_parameters():  # B as after some training, the same on every process
            if name.endswith("_B") or name.endswith(".B"):
                drawn = torch.Generator().manual_seed(len(name))
                held = model.get_submodule(name.split(".adapter.")[0])
                of = held.held if isinstance(held, Experts) else Rows(0, len(parameter), len(parameter))
                whole = torch.randn((of.of, *parameter.shape[1:]), generator=drawn)
                parameter.data.copy_(0.1 * whole[of.slice])
    return model


class Tapped:
    """Cross entropy, and squares of what layers are made of."""

    taps = frozenset({Tap(1, "q"), Tap(1, "input"), Tap(0, "v")})

    def __call__(self, hidden_TD: Tensor, lm_head: Any, batch: Batch, found: Any) -> Loss:
        loss = cross_entropy(hidden_TD, lm_head, batch)
        return Loss(loss.sum + sum(x.pow(2).sum() for x in found.values()) / 10, loss.count, loss.metrics)


TAPPED = Tapped()


def train(
    family: str,
    group: Group,
    mesh: Mesh | None,
    parts: int,
    *,
    steps: int = 1,
    recompute: str = "layers",
    held: Callable[[str], HeldPart] | None = None,
    learning_rate: float = 1e-3,
    what: str = "adapters",
    objective: Any = cross_entropy,
    room: int | None = None,
    made: Callable[[int, int], list[Batch]] = batches,
) -> tuple[list[float], list[float], dict[str, Tensor], list[Any]]:
    """(losses, gradient norms, the last step's gradients, expert loads and replays)."""
    model = decoder(family, mesh, what)
    if room is not None:
        make_room(model, room)
    optimizer = AdamW(model, held=held or (mesh.held if mesh else None))
    policy = recompute_policy(recompute, model.layers)
    losses, norms, loads = [], [], []
    for step in range(steps):
        result = train_step(
            model,
            optimizer,
            made(parts, step),
            objective,
            learning_rate=learning_rate,
            max_norm=1.0,
            recompute=policy,
            group=group,
        )
        losses, norms = [*losses, result.loss], [*norms, result.grad_norm]
        loads.append((result.expert_load, result.replayed))
    gradients = {name: optimizer.gradient(name) for name in optimizer.parameters}
    return losses, norms, {name: g.clone() for name, g in gradients.items() if g is not None}, loads


def compared(
    found: tuple[list[float], list[float], dict[str, Tensor], list[Any]],
    expected: tuple[list[float], list[float], dict[str, Tensor], list[Any]],
    mesh: Mesh,
) -> dict[str, Any]:
    """The worst relative difference of losses, norms, gradients and own experts' gradients."""
    own = {
        name: g if (rows := mesh.held(name).rows) is None else g[rows.slice]
        for name, g in expected[2].items()
    }
    worst = {name: relative(found[2][name], own[name]) for name in own}
    return {
        "losses": max(abs(a - b) / abs(b) for a, b in zip(found[0], expected[0], strict=True)),
        "norms": max(abs(a - b) / abs(b) for a, b in zip(found[1], expected[1], strict=True)),
        "gradients": max(worst.values()),
        "experts": max((w for name, w in worst.items() if ".experts." in name), default=0.0),
        "loads": found[3] == expected[3],
        "same names": found[2].keys() == own.keys(),
    }


class Mean:
    """The control arm's group: what it sums becomes a mean."""

    def __init__(self, group: Group):
        self.group, self.rank, self.size = group, group.rank, group.size

    def sum_(self, tensors: list[Tensor]) -> None:
        self.group.sum_(tensors)
        for tensor in tensors:
            tensor /= self.size


@contextmanager
def counted(calls: list[str]) -> Iterator[None]:
    """Note the name of every collective."""
    names = ("all_reduce", "all_to_all_single", "broadcast", "all_gather")
    before = {name: getattr(dist, name) for name in names}

    def noting(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            calls.append(name)
            return before[name](*arguments, **named)

        return call

    try:
        for name in names:
            setattr(dist, name, noting(name))
        yield
    finally:
        for name in names:
            setattr(dist, name, before[name])


def more(group: Group, mesh: Mesh, eight: Mesh) -> dict[str, Any]:
    """Every kind of mixture, every mode of recomputation, and all weights trained."""
    facts: dict[str, Any] = {}
    for family in FAMILIES:
        theirs = Mesh(mesh.all, mesh.data, mesh.experts, experts_in(family))
        one = alone(family, group.size)
        facts[f"family {family}"] = compared(train(family, group, theirs, group.size), one, theirs)
    one = alone("deepseek_v3", group.size)
    modes = {mode: train("deepseek_v3", group, mesh, group.size, recompute=mode) for mode in RECOMPUTE}
    for mode, found in modes.items():
        facts[f"recompute {mode}"] = compared(found, one, mesh) | {
            "bits": all(torch.equal(found[2][n], g) for n, g in modes["layers"][2].items())
        }
    for mode in ("layers", "elementwise", "nothing"):
        little = train("deepseek_v3", group, mesh, group.size, recompute=mode, room=9)
        facts[f"pieces {mode}"] = compared(little, one, mesh)
    for mode in ("layers", "nothing"):
        one = alone("deepseek_v3", group.size, recompute=mode, objective=TAPPED)
        two = train("deepseek_v3", group, mesh, group.size, recompute=mode, objective=TAPPED)
        facts[f"taps {mode}"] = compared(two, one, mesh)
    for mode in ("layers", "nothing"):
        one = alone("deepseek_v3", group.size, recompute=mode, made=with_routes)
        two = train("deepseek_v3", group, mesh, group.size, recompute=mode, made=with_routes)
        flipped = [counts[1] for counts in one[3][0][1].values()]
        facts[f"routes {mode}"] = compared(two, one, mesh) | {"flipped": min(flipped)}
    whole = alone("qwen2_moe", group.size, what="all")
    split = train("qwen2_moe", group, eight, group.size, what="all")
    return facts | {"all weights": compared(split, whole, eight)}


def wrong(group: Group, mesh: Mesh, eight: Mesh) -> dict[str, Any]:
    """Control arms: gradients of experts summed over all processes, and means for sums."""
    one = alone("qwen2_moe", group.size)
    arms: dict[str, Callable[[str], HeldPart]] = {
        "right": eight.held,
        "summed over all": lambda name: HeldPart(None, group, group.size),
        "a mean": lambda name: HeldPart(eight.held(name).rows, Mean(group), eight.held(name).copies),
    }
    return {
        name: compared(train("qwen2_moe", group, eight, group.size, held=held), one, eight)
        for name, held in arms.items()
    }


@functools.cache
def alone(family: str, parts: int, steps: int = 1, what: str = "adapters", **options: Any) -> Any:
    """What one process makes."""
    return train(family, ALONE, None, parts, steps=steps, what=what, **options)


def main(folder: Path, forked: Callable[..., list[int]]) -> list[int]:
    """-> exit codes of the processes; process r of n leaves facts-n-r.json."""
    torch.set_num_threads(1)
    for processes in (2, 4):
        alone("deepseek_v3", processes, STEPS)
        alone("qwen2_moe", processes)
    for family in FAMILIES:
        alone(family, 2)
    alone("qwen2_moe", 2, what="all")
    for mode in ("layers", "nothing"):
        alone("deepseek_v3", 2, recompute=mode, objective=TAPPED)
        alone("deepseek_v3", 2, recompute=mode, made=with_routes)
    return [
        code for processes in (2, 4) for code in forked(processes, lambda group: each(folder, group), 300)
    ]


def each(folder: Path, group: Group) -> None:
    """What each process does."""
    facts: dict[str, Any] = {}
    meshes = {"ep": mesh_of(group, group.size, 7)}
    if group.size == 4:
        meshes["ep x dp"] = mesh_of(group, 2, 7)
    for name, mesh in meshes.items():
        for routing in ROUTINGS:
            facts[f"op {name} {routing}"] = op(mesh, routing, torch.float32)
            facts[f"pieces {name} {routing}"] = op(mesh, routing, torch.float32, room=20)
        facts[f"op {name} bf16"] = op(mesh, "random", torch.bfloat16)
        facts[f"op {name} shifted"] = op(mesh, "random", torch.float32, shift=1)

        # some steps of a model against one process
        one = alone("deepseek_v3", group.size, STEPS)
        calls: list[str] = []
        with counted(calls):
            many = train("deepseek_v3", group, mesh, group.size, steps=STEPS)
        facts[f"train {name}"] = compared(many, one, mesh)
        facts[f"calls {name}"] = calls

    # the rest once each: kinds of mixtures and of recomputation on 2 processes, control arms on 2 x 2
    mesh = meshes.get("ep x dp", meshes["ep"])
    eight = Mesh(mesh.all, mesh.data, mesh.experts, 8)
    rest = more if group.size == 2 else wrong
    facts |= rest(group, mesh, eight)
    (folder / f"facts-{group.size}-{group.rank}.json").write_text(json.dumps(facts))


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory, forkserver: Any) -> dict[int, list[dict[str, Any]]]:
    """Number of processes -> what each of them found; a hang ends with an alarm."""
    folder = tmp_path_factory.mktemp("split")
    path = os.pathsep.join([str(Path(__file__).parents[1] / "train"), *(p for p in sys.path if p)])
    process = forkserver.run(
        [__file__, folder], env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, timeout=400
    )
    assert process.returncode == 0, process.stderr[-6000:]
    return {
        n: [json.loads((folder / f"facts-{n}-{rank}.json").read_text()) for rank in range(n)] for n in (2, 4)
    }


MESHES = [(2, "ep"), (4, "ep"), (4, "ep x dp")]


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(("processes", "mesh"), MESHES)
def test_the_split_op_equals_the_whole_one_to_the_bit(facts, processes, mesh, routing):
    """y, dx, dweights and the gradients of A and B, in float32, of uneven numbers of experts and tokens."""
    assert all(fact[f"op {mesh} {routing}"]["equal"] for fact in facts[processes])


@pytest.mark.parametrize(("processes", "mesh"), MESHES)
def test_in_bf16_a_row_is_rounded_once_more_on_its_way_back(facts, processes, mesh):
    """2^-9 of a row at most, K = 3 rows: 2.9e-3 of the norm as measured; A's and B's gradients have no part."""
    for fact in facts[processes]:
        assert fact[f"op {mesh} bf16"]["y"] < 5e-3 and fact[f"op {mesh} bf16"]["factors"] == 0.0


@pytest.mark.parametrize(("processes", "mesh"), MESHES)
def test_control_arm_experts_shifted_by_one_show(facts, processes, mesh):
    assert all(fact[f"op {mesh} shifted"]["y"] > 0.1 for fact in facts[processes])


def close(found: dict[str, Any], limit: float = 1e-5) -> bool:
    worst = max(found[name] for name in ("losses", "norms", "gradients", "experts"))
    return worst < limit and found["loads"] and found["same names"]


@pytest.mark.parametrize(("processes", "mesh"), MESHES)
def test_six_steps_are_those_of_one_process(facts, processes, mesh):
    """Losses within 1e-5. Updates amplify the rounding of tiny gradients: one process that takes its four
    micro-batches the other way round has gradients 2.7e-5 apart at the tenth step. Norms: 1.1e-4 with AVX2."""
    for fact in facts[processes]:
        found = fact[f"train {mesh}"]
        assert found["losses"] < 1e-5 and found["norms"] < 2e-4 and found["gradients"] < 1e-3
        assert found["loads"]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_kind_of_mixture_splits(facts, family):
    assert all(close(fact[f"family {family}"]) for fact in facts[2])


def test_all_modes_of_recompute_give_the_same_bits_and_all_weights_train(facts):
    for fact in facts[2]:
        assert all(close(fact[f"recompute {m}"]) and fact[f"recompute {m}"]["bits"] for m in RECOMPUTE)
        assert close(fact["all weights"]) and close(fact["taps layers"]) and close(fact["taps nothing"])


@pytest.mark.parametrize("mode", ["layers", "nothing"])
def test_given_experts_are_replayed_wherever_they_are_held(facts, mode):
    """Losses, gradients, loads, and the counts of replayed and flipped choices over all processes."""
    assert all(close(fact[f"routes {mode}"]) and fact[f"routes {mode}"]["flipped"] > 10 for fact in facts[2])


@pytest.mark.parametrize(("processes", "mesh"), MESHES)
def test_every_process_makes_the_same_exchanges_whatever_the_routing(facts, processes, mesh):
    """Per step one layer of experts: counts, rows and weights there, results back; rows and weights again and
    results back in the recomputation; three in backward. So ten, and two sums of gradients and numbers (three
    where experts are summed over the data axis)."""
    first, *others = [fact[f"calls {mesh}"] for fact in facts[processes]]
    assert all(calls == first for calls in others)
    assert first.count("all_to_all_single") == 10 * STEPS
    assert first.count("all_reduce") == (3 if mesh == "ep x dp" else 2) * STEPS


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(("processes", "mesh"), MESHES)
def test_rows_beyond_the_plan_are_worked_off_in_pieces_that_fit(facts, processes, mesh, routing):
    """At most 20 rows at once where up to 105 come; the same numbers, with sums over tokens in another order."""
    for fact in facts[processes]:
        whole, pieces = fact[f"op {mesh} {routing}"], fact[f"pieces {mesh} {routing}"]
        assert pieces["most"] <= 20 and pieces["rest"] < 1e-6 and pieces["factors"] < 1e-6
    assert max(fact[f"op {mesh} {routing}"]["most"] for fact in facts[processes]) > 20
    # a piece is computed in forward, and again in backward
    assert max(fact[f"pieces {mesh} {routing}"]["calls"] for fact in facts[processes]) >= 4 > whole["calls"]


@pytest.mark.parametrize("mode", ["layers", "elementwise", "nothing"])
def test_a_model_trains_in_pieces_whatever_is_recomputed(facts, mode):
    assert all(close(fact[f"pieces {mode}"]) for fact in facts[2])


class Noting:
    """An exchange that notes when rows leave and when they are waited for: another one than torch's."""

    rank, size = 0, 1

    def __init__(self) -> None:
        self.seen: list[str] = []

    def exchange(self, rows: Tensor, send: Any, receive: Any) -> InFlight:
        self.seen.append("begin")
        return InFlight(rows, lambda: self.seen.append("wait"))


@pytest.mark.parametrize("recompute", ["nothing", "layers"])
def test_shared_experts_are_computed_while_rows_travel_forward_and_backward(recompute):
    """Between the start of an exchange and the wait for it, and the numbers are those without an exchange."""
    shape = {**FAMILIES["deepseek_v3"], "model_type": "deepseek_v3"}
    model, plain = (models.build(models.shape(shape), dtype=torch.float32, device="cpu") for _ in range(2))
    noting = Noting()
    for each_of in (model, plain):
        models.initialize(each_of, 0)
        attach(each_of, LoraConfig(rank=2), 0)
    (moe,) = model.moe_layers().values()
    moe.experts.dispatch = RowsDispatch(noting, [Rows(0, 7, 7)])
    down = moe.shared_experts.down_proj
    down.register_forward_hook(lambda *_: noting.seen.append("shared"))
    down.register_full_backward_hook(lambda *_: noting.seen.append("gradient"))
    (batch,) = batches(1)
    found = []
    for each_of in (model, plain):
        hidden = each_of.hidden(batch, recompute_policy(recompute, each_of.layers))
        hidden.square().sum().backward()
        found.append([hidden, *(p.grad for p in each_of.parameters() if p.grad is not None)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    # counts, then rows and weights, the shared experts, the results; in backward they come in reverse
    forward = "begin wait begin begin shared wait wait begin wait".split()
    backward = "begin wait begin begin gradient wait wait".split()
    again = "begin begin shared wait wait begin wait".split()  # counts are kept
    assert noting.seen == [*forward, *(again if recompute == "layers" else []), *backward]


def test_control_arms_a_sum_over_all_and_a_mean_show(facts):
    for fact in facts[4]:
        assert close(fact["right"])
        assert fact["summed over all"]["experts"] > 0.5
        assert fact["a mean"]["gradients"] > 0.4


if __name__ == "__main__":
    from sharding import forked

    sys.exit(int(any(main(Path(sys.argv[1]), forked))))
