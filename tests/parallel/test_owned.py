"""Processes that load a checkpoint together: each byte is read once, as many bytes by each, the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from unfreeze import models
from unfreeze.checkpoint import open_checkpoint, save_checkpoint
from unfreeze.checkpoint import stream as streaming
from unfreeze.checkpoint.resolve import resolve
from unfreeze.commands.demo import TINY_K2
from unfreeze.core.errors import CheckpointError, UserError
from unfreeze.generate.open import open_model
from unfreeze.parallel.placement.owned import owned
from unfreeze.parallel.placement.place import check_coverage
from unfreeze.parallel.processes.collectives import ALONE, Alone
from unfreeze.parallel.processes.mesh import Mesh


class Told(Alone):
    """One of several processes, one after the other: what another broadcasts is taken from what it left."""

    def __init__(self, rank: int, size: int, left: dict[tuple[str, int], list[Tensor]], name: str):
        self.rank, self.size, self._left, self._name = rank, size, left, name
        self._asked: dict[int, int] = {}
        self.failed = False

    def any(self, value: bool) -> bool:
        return value or self.failed

    def broadcast(self, tensor: Tensor, source: int) -> None:
        place = self._asked[source] = self._asked.get(source, -1) + 1
        kept = self._left.setdefault((self._name, source), [])
        if source == self.rank:
            kept += [tensor.clone()] * (place == len(kept))
        elif place < len(kept):
            tensor.copy_(kept[place])


def meshes(size: int, split: int, num_experts: int, left: dict[tuple[str, int], list[Tensor]]) -> list[Mesh]:
    return [
        Mesh(
            Told(r, size, left, "all"),
            Told(r // split, size // split, left, f"data {r % split}") if split < size else ALONE,
            Told(r % split, split, left, f"experts {r // split}"),
            num_experts,
        )
        for r in range(size)
    ]


@pytest.fixture(scope="module")
def fused(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """gpt-oss as released: stacks of experts, transposed, with biases; and a head that is tied and stored."""
    config = {
        "model_type": "gpt_oss",
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "tie_word_embeddings": True,
    }
    folder = tmp_path_factory.mktemp("fused") / "model"
    model = models.build(models.shape(config), dtype=torch.float32, device="cpu")
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_()
    from unfreeze.models.publish import published

    tensors = dict(published(model, config))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_checkpoint(folder, config, tensors.items())
    return folder


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """The read log: (file, first byte, last byte) of every read."""
    log: list[tuple[str, int, int]] = []
    before = streaming._read_fully

    def noted(descriptor, run, targets):
        log.append((run.file.name, run.offset, run.offset + run.nbytes))
        return before(descriptor, run, targets)

    monkeypatch.setattr(streaming, "_read_fully", noted)
    return log


def merged(log: list[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    """Neighbours together. Two reads of one byte are an error."""
    spans: list[tuple[str, int, int]] = []
    for file, first, last in sorted(log):
        if spans and spans[-1][0] == file and first < spans[-1][2]:
            raise AssertionError(f"{file}: byte {first} is read twice")
        if spans and spans[-1][0] == file and first == spans[-1][2]:
            spans[-1] = (file, spans[-1][1], last)
        else:
            spans.append((file, first, last))
    return spans


@pytest.mark.parametrize(("size", "split"), [(2, 1), (2, 2), (4, 4), (4, 2), (3, 3)])
@pytest.mark.parametrize("which", ["per expert, packed", "fused, transposed"])
def test_each_byte_is_read_by_one_process_and_the_weights_are_the_whole_ones(
    which: str, size: int, split: int, fused: Path, reads: list[tuple[str, int, int]]
):
    folder = TINY_K2 if which.startswith("per") else fused
    manifest = open_checkpoint(str(folder))
    whole = open_model(manifest)
    taken = merged(list(reads))
    expected = {**dict(whole.named_parameters()), **{k: v for k, v in whole.state_dict().items()}}
    left: dict[tuple[str, int], list[Tensor]] = {}
    by_rank: list[list[tuple[str, int, int]]] = []

    # twice: what a later process reads is not there when an earlier one asks for the first time
    for again in (False, True):
        by_rank.clear()
        for mesh in meshes(size, split, whole.shape.num_experts, left):
            reads.clear()
            stats: list[streaming.LoadStats] = []
            try:
                model = open_model(manifest, mesh=mesh, loaded=stats.append)
            except CheckpointError:  # an alias that is compared with what has not come yet
                assert not again and which.startswith("fused")
                continue
            by_rank.append(list(reads))
            if not again:
                continue
            for name, tensor in [*model.named_parameters(), *model.state_dict().items()]:
                rows = mesh.held(name).rows
                other = expected[name] if rows is None else expected[name][rows.slice]
                assert torch.equal(tensor, other), name
            assert (
                stats[0].bytes_by_rank
                == tuple(sum(b - a for _, a, b in log) for log in by_rank)
                + (stats[0].bytes_by_rank[len(by_rank) :])
            )
    assert merged([read for log in by_rank for read in log]) == taken
    counts = stats[0].bytes_by_rank
    assert sum(counts) == stats[0].bytes and max(counts) <= 1.03 * min(counts)


def test_control_arm_a_byte_that_is_read_twice_is_seen():
    with pytest.raises(AssertionError, match="byte 5 is read twice"):
        merged([("f", 0, 8), ("f", 5, 9)])


def test_control_arm_experts_of_another_process_leave_a_hole():
    manifest = open_checkpoint(str(TINY_K2))
    model = models.meta_model(models.shape(manifest.config), manifest, torch.float32)
    from unfreeze.parallel.placement.place import _wanted

    params = {name: (kind, tuple(t.shape)) for name, (t, kind) in _wanted(model, None).items()}
    placements = resolve(manifest, models.rules(model.shape), params)
    division = owned(placements, params, meshes(2, 2, model.shape.num_experts, {})[1])
    with pytest.raises(CheckpointError, match="left uninitialised"):
        check_coverage(division.mine, params)


def test_all_stop_where_one_cannot_read(reads: list[tuple[str, int, int]]):
    manifest = open_checkpoint(str(TINY_K2))
    mesh = meshes(2, 2, 16, {})[0]
    mesh.all.failed = True
    with pytest.raises(UserError, match="another process could not read its part"):
        open_model(manifest, mesh=mesh)
