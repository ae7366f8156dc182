"""The step that loads the model: what a process of two does before the weights are read, and after."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from unfreeze.core.layout import RESIDENT, Layout
from unfreeze.generate import model as generate_model
from unfreeze.job import setup
from unfreeze.parallel.placement import dispatch
from unfreeze.parallel.plan.places import room
from unfreeze.parallel.processes import mesh as meshes
from unfreeze.parallel.processes import numa
from unfreeze.parallel.processes.collectives import ALONE, Alone, Group
from unfreeze.parallel.processes.mesh import Mesh

DEVICE = torch.device("cuda", 1)
COUNTS: Any = SimpleNamespace(experts_per_token=8, num_experts=384, hidden_size=7168)
TOKENS = 65_536


class SecondOfTwo(Alone):
    rank, size = 1, 2


Said = list[tuple[Any, ...]]


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Said:
    """Calls of `placed` in order; nothing is loaded."""
    calls: Said = []

    def noted(name: str, result: object = None) -> Any:
        return lambda *given: (calls.append((name, *given)), result)[1]

    model = SimpleNamespace(device=DEVICE, layers=[])
    engine = SimpleNamespace(agreed=None)
    monkeypatch.setattr(numa, "bind", noted("bind"))
    monkeypatch.setattr(dispatch, "make_room", noted("make_room"))

    def mesh_of(everyone: Group, split: int, num_experts: int) -> Mesh:
        return Mesh(everyone, ALONE, everyone if split > 1 else ALONE, num_experts)

    monkeypatch.setattr(meshes, "mesh_of", mesh_of)
    monkeypatch.setattr(setup, "load_weights", lambda *given: noted("load", model)())
    monkeypatch.setattr(setup, "keep_boundary", lambda *given: None)
    monkeypatch.setattr(generate_model, "Model", lambda *given, **how: SimpleNamespace(engine=engine))
    monkeypatch.setattr(generate_model, "end_ids", lambda *given: ())
    return calls


def placed(layout: Layout, group: Alone) -> setup.Placed:
    trained = SimpleNamespace(attach=lambda model, **options: None, agree=lambda model, group: None)
    given: Any = SimpleNamespace(
        config=SimpleNamespace(muon=SimpleNamespace(qk_clip=0.0)),
        parts=SimpleNamespace(trained=trained, objective=None, second=None, beside=lambda model, own: own),
        group=group,
        shape=SimpleNamespace(num_experts=COUNTS.num_experts),
        device=DEVICE,
        folder=SimpleNamespace(step=0),
        common=SimpleNamespace(quiet=True),
        start=None,
        tokenizer=None,
        planning=SimpleNamespace(model=SimpleNamespace(counts=COUNTS)),
    )
    plan: Any = SimpleNamespace(layout=layout, work=SimpleNamespace(tokens=TOKENS))
    return setup.placed(given, plan, SimpleNamespace())  # type: ignore[arg-type]


def test_a_process_is_bound_to_its_gpus_cores_before_experts_are_loaded_to_the_host(said: Said) -> None:
    """Linux puts a page where it is touched first, so binding it later moves nothing."""
    placed(RESIDENT.but(experts="host"), SecondOfTwo())
    assert said == [("bind", DEVICE, 1), ("load",)]


@pytest.mark.parametrize(
    ("experts", "group"), [("host", Alone()), ("device", SecondOfTwo()), ("disk", SecondOfTwo())]
)
def test_a_process_that_pins_no_experts_beside_another_stays_unbound(
    experts: str, group: Alone, said: Said
) -> None:
    placed(RESIDENT.but(experts=experts), group)
    assert said == [("load",)]


def test_split_experts_have_the_room_that_the_plan_counted(said: Said) -> None:
    """Of a layer's rows, 8 a token from each of the two; without it a process would take any number."""
    at = placed(RESIDENT.but(split=2), SecondOfTwo())
    rows = room(COUNTS, TOKENS, 2)
    assert rows >= TOKENS * 8
    assert said == [("load",), ("make_room", at.model, rows)]
