"""Who holds which experts: every expert once among those that share them, and copies that count once in a norm."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from unfreeze.core.errors import ConfigError, UserError
from unfreeze.core.rows import Rows, share
from unfreeze.parallel.processes.collectives import ALONE, TIMEOUT, Alone, Processes
from unfreeze.parallel.processes.mesh import ONE, Mesh, check_copies, mesh_of, mesh_over


class Place(Alone):
    """A place in a group of which the others are not there."""

    def __init__(self, rank: int, size: int, different: bool = False):
        self.rank, self.size, self.different = rank, size, different

    def any(self, value: bool) -> bool:
        return value or self.different

    def check_replicas(self, tensors):
        self.checked = list(tensors)


def mesh(rank: int, size: int, split: int, num_experts: int) -> Mesh:
    data = Place(rank // split, size // split) if split < size else ALONE
    return Mesh(Place(rank, size), data, Place(rank % split, split), num_experts)


@pytest.mark.parametrize(("experts", "parts"), [(8, 2), (7, 4), (384, 8), (5, 5)])
def test_every_row_is_in_one_part_and_the_parts_differ_by_one_row_at_most(experts, parts):
    cut = [share(experts, index, parts) for index in range(parts)]
    assert [row for rows in cut for row in range(rows.first, rows.last)] == list(range(experts))
    assert max(map(len, cut)) - min(map(len, cut)) <= 1


def test_experts_are_held_in_part_and_all_else_whole():
    for rank in range(4):
        here = mesh(rank, 4, 2, 7)
        expert = here.held("model.layers.1.mlp.experts.adapter.gate_up_A")
        assert expert.rows == share(7, rank % 2, 2) and expert.summed is here.data and expert.copies == 2
        for name in ("model.layers.1.mlp.shared_experts.up_proj.adapter.A", "lm_head.weight"):
            other = here.held(name)
            assert other.rows is None and other.summed is here.all and other.copies == 4
    whole = ONE.held("model.layers.1.mlp.experts.adapter.gate_up_A")
    assert whole.rows is None and whole.copies == 1 and ONE.rows is None


def test_the_squares_of_all_parts_over_their_copies_are_the_square_of_the_norm():
    """Σ over processes of |own part|² / copies, for a tensor of experts and one that all hold."""
    gradient = {name: torch.randn(6, 3) for name in ("mlp.experts.adapter.A", "o_proj.adapter.A")}
    total = 0.0
    for rank in range(4):
        for name, whole in gradient.items():
            held = mesh(rank, 4, 2, 6).held(name)
            own = whole if held.rows is None else whole[held.rows.slice]
            total += float(own.square().sum()) / held.copies
    assert total == pytest.approx(sum(float(g.square().sum()) for g in gradient.values()))


@pytest.mark.parametrize(
    ("split", "processes", "experts", "said", "next_"),
    [
        (3, 4, 8, "place.split is 3, which does not divide the 4 processes", "--place.split 1 or 2 or 4"),
        (2, 1, 8, "place.split is 2, but there is only one process", "torchrun --nproc-per-node 2"),
        (4, 4, 2, "place.split is 4 and the model has 2 experts", "--place.split 2"),
        (2, 2, 0, "has no experts", "--place.split 1"),
    ],
)
def test_a_split_that_cannot_be_is_refused_in_one_line(split, processes, experts, said, next_):
    with pytest.raises(ConfigError, match=said) as caught:
        mesh_of(Place(0, processes), split, experts)
    assert next_ in caught.value.next


def test_copies_are_compared_where_they_are_and_all_stop_where_one_group_differs():
    here = mesh(0, 4, 2, 8)
    tensors = {"experts.A": torch.ones(2), "norm.weight": torch.ones(2)}
    check_copies(here.all, tensors, here.held)
    assert here.data.checked == ["experts.A"] and here.all.checked == ["norm.weight"]
    here.all.different = True
    with pytest.raises(UserError, match="other processes hold different values"):
        check_copies(here.all, tensors, here.held)


def test_rows_outside_the_tensor_are_a_mistake():
    with pytest.raises(ValueError, match="rows 2:9 of 8"):
        Rows(2, 9, 8)


@pytest.fixture
def connected() -> Iterator[timedelta]:
    """torch.distributed with one process; -> the limit of its exchanges, which is not this package's."""
    limit = timedelta(seconds=10)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=limit)
    yield limit
    dist.destroy_process_group()


def limit_of(group: dist.ProcessGroup | None) -> timedelta:
    assert group is not None
    return group._get_backend(torch.device("cpu")).options._timeout  # type: ignore[attr-defined]


def test_exchanges_inside_a_mesh_wait_as_long_as_those_of_all(connected: timedelta) -> None:
    """torch gives a group of a mesh its back end's limit: for nccl 10 minutes, and a run would end."""
    devices = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "experts"))
    assert limit_of(devices.get_group("experts")) == connected < TIMEOUT
    experts = mesh_over(devices, Processes(torch.device("cpu")), 8).experts
    assert isinstance(experts, Processes) and limit_of(experts._group) == TIMEOUT
