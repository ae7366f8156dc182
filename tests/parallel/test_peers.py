"""Claims about the frozen rest gathered from peers: the numbers of weights that are always here, to the bit, in both
dtypes and every recompute mode, with split experts and with experts from disk; as many gathers on every process; each
byte read by one of them.

This file is also a script, started once: it imports everything, then forks the two processes (see each).
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from unfreeze import models
from unfreeze.adapters import LoraConfig, attach
from unfreeze.checkpoint import open_checkpoint, save_checkpoint
from unfreeze.checkpoint import stream as reading
from unfreeze.checkpoint.manifest import TensorInfo
from unfreeze.checkpoint.resolve import Placement, resolve
from unfreeze.checkpoint.stream import LoadStats
from unfreeze.commands.demo import TINY_K2
from unfreeze.core.batch import Batch
from unfreeze.core.errors import CheckpointError, ConfigError, UserError
from unfreeze.core.layout import RESIDENT
from unfreeze.core.taps import Tap
from unfreeze.generate.open import open_model
from unfreeze.models.blocks.taps import Taps
from unfreeze.models.publish import published
from unfreeze.models.recompute import RECOMPUTE
from unfreeze.objectives.cross_entropy import cross_entropy
from unfreeze.parallel.placement import owned, peers
from unfreeze.parallel.placement.peers import part_bytes, rest_bytes, rest_names, rest_of
from unfreeze.parallel.placement.place import check_coverage
from unfreeze.parallel.placement.residency import Streamed, buffer_bytes, reads_of, streams_of
from unfreeze.parallel.placement.units import layout_of
from unfreeze.parallel.processes.collectives import Group, Processes
from unfreeze.parallel.processes.mesh import ONE, Mesh, mesh_of
from unfreeze.train.optim import AdamW
from unfreeze.train.step import train_step

DENSE = {
    "model_type": "qwen3",
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 104,
    "num_hidden_layers": 5,
    "max_position_embeddings": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}
Numbers = dict[str, torch.Tensor]
EXCHANGES = (
    "all_reduce",
    "all_to_all_single",
    "broadcast",
    "all_gather",
    "all_gather_single",
    "all_gather_into_tensor",
)


def batch(rank: int) -> Batch:
    """Several documents on the first process, a single one on the second."""
    tokens, length = (24, 6) if rank == 0 else (10, 10)
    ids = torch.randint(0, 97, (tokens,), generator=torch.Generator().manual_seed(rank))
    return Batch(
        ids, ids.roll(-1), torch.ones(tokens), torch.arange(tokens) % length, torch.arange(0, tokens, length)
    )


def opened(folder: Path, dtype: torch.dtype, mesh: Mesh, **places: Any) -> models.Decoder:
    """The model with adapters that are not zero."""
    model = open_model(open_checkpoint(folder), dtype, "cpu", mesh=mesh, layout=RESIDENT.but(**places))
    attach(model, LoraConfig(rank=4), 0)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and name.endswith("B"):
            torch.nn.init.normal_(parameter, std=0.02, generator=torch.Generator().manual_seed(3))
    for each in streams_of(model.residency):
        each.poison = True
    return model


def step(
    model: models.Decoder, recompute: str, given: Batch, asked: Sequence[Tap] = (), *, alone: bool = False
) -> Numbers:
    """The loss, and every gradient by name. asked: taps whose squares are added; alone: without cross entropy."""
    model.zero_grad()
    taps = Taps(asked)
    loss = cross_entropy(model.hidden(given, RECOMPUTE[recompute], taps=taps), model.lm_head, given)
    squares = [tensor.float().pow(2).sum() for tensor in taps.found.values()]
    torch.stack(squares + [loss.sum] * (not alone)).sum().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.sum.detach(), **found}


def same(one: Numbers, other: Numbers) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def from_peers(model: models.Decoder) -> Streamed:
    (found,) = [each for each in streams_of(model.residency) if each.source.name == "peers"]
    return found


@contextmanager
def gathers() -> Iterator[list[int]]:
    """The bytes of every gather."""
    calls: list[int] = []
    before = Processes.gather

    def noting(self: Processes, whole: torch.Tensor, part: torch.Tensor) -> Callable[[], object]:
        calls.append(len(part))
        return before(self, whole, part)

    Processes.gather = noting  # type: ignore[method-assign]
    try:
        yield calls
    finally:
        Processes.gather = before  # type: ignore[method-assign]


@contextmanager
def read_log() -> Iterator[list[tuple[str, int, int]]]:
    """(file, first byte, last byte) of every read."""
    log: list[tuple[str, int, int]] = []
    before = reading._read_fully

    def noting(descriptor: int, run: Any, targets: Any) -> None:
        log.append((run.file.name, run.offset, run.offset + run.nbytes))
        before(descriptor, run, targets)

    reading._read_fully = noting
    try:
        yield log
    finally:
        reading._read_fully = before


@contextmanager
def exchanges() -> Iterator[list[tuple[str, bool]]]:
    """(name, whether the main thread called it) of every exchange of torch's, in order."""
    calls: list[tuple[str, bool]] = []
    names = [name for name in EXCHANGES if hasattr(dist, name)]
    before = {name: getattr(dist, name) for name in names}

    def noting(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            calls.append((name, threading.current_thread() is threading.main_thread()))
            return before[name](*arguments, **named)

        return call

    try:
        for name in names:
            setattr(dist, name, noting(name))
        yield calls
    finally:
        for name in names:
            setattr(dist, name, before[name])


def order(facts: dict[str, Any], mesh: Mesh) -> None:
    """Which thread queues what, in two steps of split experts from disk, the rest from peers; and where a
    thread beside the visitor queues the gathers."""
    split = mesh_of(mesh.all, 2, 16)
    for name in ("order", "beside"):
        model = opened(TINY_K2, torch.float32, split, experts="disk", rest="peers")
        optimizer = AdamW(model, held=split.held)
        if name == "beside":  # the planted bug: as a thread's copies go
            source = from_peers(model).source
            begin = source.begin
            source.begin = lambda layer, into, begin=begin: lambda: begin(layer, into)()  # type: ignore[method-assign]
        with exchanges() as calls:
            for _ in range(2):
                train_step(
                    model,
                    optimizer,
                    [batch(0), batch(1)],
                    cross_entropy,
                    learning_rate=1e-3,
                    max_norm=1.0,
                    recompute=RECOMPUTE["layers"],
                    group=mesh.all,
                )
        facts[name] = calls


def numbers(facts: dict[str, Any], mesh: Mesh, dense: Path) -> None:
    """The bits, for every place that experts may have."""
    given = batch(mesh.all.rank)
    split = mesh_of(mesh.all, 2, 16)
    cases: dict[str, tuple[Path, Mesh, str]] = {
        "tiny-k2": (TINY_K2, mesh, "device"),
        "dense": (dense, mesh, "device"),
        "split": (TINY_K2, split, "device"),
        "disk": (TINY_K2, mesh, "disk"),
        "split, disk": (TINY_K2, split, "disk"),
    }
    for name, (folder, of, experts) in cases.items():
        for dtype in DTYPES if name in ("tiny-k2", "dense") else ("float32",):
            here = opened(folder, DTYPES[dtype], of, experts=experts)
            parts = opened(folder, DTYPES[dtype], of, experts=experts, rest="peers")
            facts[f"{name} {dtype}"] = [
                same(step(parts, mode, given), wanted)
                for mode in (RECOMPUTE if name == "tiny-k2" else ("layers", "nothing"))
                for wanted in [step(here, mode, given)]
                for _ in range(2)
            ]
            if dtype != "float32" or name in ("split", "disk"):
                continue  # what is read inside of layers: in float32, and in both places at once
            asked = [Tap(1, "q"), Tap(1, "input"), Tap(2, "v")]
            facts[f"{name} {dtype}"] += [
                same(
                    step(parts, mode, given, asked, alone=alone), step(here, mode, given, asked, alone=alone)
                )
                for mode in ("layers", "nothing")
                for alone in (False, True)
            ]


def loading(facts: dict[str, Any], mesh: Mesh, dense: Path) -> None:
    stats: list[LoadStats] = []
    for name, folder in {"tiny-k2": TINY_K2, "dense": dense}.items():
        with read_log() as log:
            model = open_model(
                open_checkpoint(folder), layout=RESIDENT.but(rest="peers"), mesh=mesh, loaded=stats.append
            )
        facts[f"read {name}"] = log
        facts[f"bytes {name}"] = stats[-1].bytes, list(stats[-1].bytes_by_rank)
    memory = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in model.model.layers.parameters()
    }
    source = from_peers(model).source
    assert isinstance(source, peers.Peers)
    facts["memory"] = [len(memory), sum(memory.values()), sum(map(len, source._parts))]

    # a process that cannot read ends the others
    before = owned.stream
    if mesh.all.rank == 1:

        def stream(*arguments: Any) -> LoadStats:
            raise CheckpointError("a disk that fails")

        owned.stream = stream
    try:
        open_model(open_checkpoint(dense), layout=RESIDENT.but(rest="peers"), mesh=mesh)
    except UserError as error:
        facts["unreadable"] = str(error)
    owned.stream = before


def each(folder: Path, group: Group) -> None:
    """What each process does; process r leaves facts-r.json."""
    facts: dict[str, Any] = {}
    mesh, given, dense = mesh_of(group), batch(group.rank), folder / "dense"
    numbers(facts, mesh, dense)
    order(facts, mesh)
    loading(facts, mesh, dense)

    # how often layers come: a pass with backward, another, and one without
    model = opened(dense, torch.float32, mesh, rest="peers")
    with gathers() as calls:
        for _ in range(2):
            step(model, "layers", given)
        with torch.no_grad():
            model.hidden(given)
        facts["gathers"] = calls
    took = from_peers(model).take()
    facts["took"] = [took.reads, took.bytes, took.seconds > 0]

    # control arms: what is wrong must show
    wanted = step(opened(dense, torch.float32, mesh), "layers", given)

    def shifted(layer: int, into: Any) -> Callable[[], object]:
        bring = begin(layer, into)

        def wrong() -> None:
            bring()
            into.bytes.copy_(into.bytes.roll(len(into.bytes) // 2))

        return wrong

    for name, wrong in {"shifted": shifted, "not gathered": lambda layer, into: lambda: None}.items():
        model = opened(dense, torch.float32, mesh, rest="peers")
        begin = from_peers(model).source.begin
        from_peers(model).source.begin = wrong  # type: ignore[method-assign]
        found = step(model, "layers", given)
        facts[name] = same(found, wanted), bool(found["loss"].isfinite())
    (folder / f"facts-{group.rank}.json").write_text(json.dumps(facts))


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint of five layers without experts."""
    folder = tmp_path_factory.mktemp("peers")
    model = models.build(models.shape(DENSE), dtype=torch.float32, device="cpu")
    models.initialize(model, 0)
    save_checkpoint(folder / "dense", DENSE, published(model, DENSE))
    return folder / "dense"


@pytest.fixture(scope="module")
def facts(dense: Path, forkserver: Any) -> list[dict[str, Any]]:
    """What each of two processes found; a hang ends with an alarm."""
    folder = dense.parent
    path = os.pathsep.join([str(Path(__file__).parents[1] / "train"), *(p for p in sys.path if p)])
    process = forkserver.run(
        [__file__, folder], env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, timeout=250
    )
    assert process.returncode == 0, process.stderr[-6000:]
    return [json.loads((folder / f"facts-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize(
    "which",
    ["tiny-k2 float32", "tiny-k2 bf16", "dense float32", "dense bf16"]
    + [f"{name} float32" for name in ("split", "disk", "split, disk")],
)
def test_the_numbers_of_weights_that_are_here_to_the_bit(facts: list[dict[str, Any]], which: str) -> None:
    """Losses and gradients of two steps in each recompute mode, idle buffers full of NaN."""
    assert all(fact[which] and all(fact[which]) for fact in facts)


def test_control_arms_another_processs_part_and_a_layer_that_does_not_come_are_seen(
    facts: list[dict[str, Any]],
) -> None:
    assert all(not fact["shifted"][0] and fact["not gathered"] == [False, False] for fact in facts)


def test_every_process_gathers_as_often_whatever_its_rows_are(facts: list[dict[str, Any]]) -> None:
    """2 L - 2 layers in the first pass, 2 L - 4 in the next, L - 2 in one without backward; equal parts."""
    first, second = (fact["gathers"] for fact in facts)
    layers = DENSE["num_hidden_layers"]
    assert isinstance(layers, int)
    expected = reads_of(layers, first=True) + reads_of(layers, first=False) + layers - 2
    assert first == second and len(first) == expected
    assert all(fact["took"] == [expected, sum(first), True] for fact in facts)


def test_every_exchange_is_queued_by_the_visitor_in_one_order(facts: list[dict[str, Any]]) -> None:
    """NCCL would wait forever where two processes queue theirs differently. Two steps of split experts, which
    come from disk, the rest from peers: 2 L - 2 gathers, 2 L - 4, and between them the training's own."""
    first, second = (fact["order"] for fact in facts)
    names = [name for name, _ in first]
    assert first == second and all(main for _, main in first)
    assert sum(name.startswith("all_gather") for name in names) == reads_of(4, first=True) + reads_of(
        4, first=False
    )
    assert names.count("all_to_all_single") > 20 and "all_reduce" in names


def test_control_arm_a_gather_that_a_thread_queues_is_seen(facts: list[dict[str, Any]]) -> None:
    for fact in facts:
        beside = [name for name, main in fact["beside"] if not main]
        assert beside and all(name.startswith("all_gather") for name in beside)


@pytest.mark.parametrize("which", ["tiny-k2", "dense"])
def test_each_byte_is_read_by_one_process_and_as_many_by_each(
    facts: list[dict[str, Any]], which: str
) -> None:
    reads = sorted(tuple(read) for fact in facts for read in fact[f"read {which}"])
    assert all(a[0] != b[0] or a[2] <= b[1] for a, b in itertools.pairwise(reads))
    total, by_rank = facts[0][f"bytes {which}"]
    assert by_rank == [sum(b - a for _, a, b in fact[f"read {which}"]) for fact in facts]
    assert sum(by_rank) == total and max(by_rank) <= 1.03 * min(by_rank)


def test_a_process_holds_half_of_all_layers_and_two_of_them_as_planned(
    facts: list[dict[str, Any]], dense: Path
) -> None:
    model = open_model(open_checkpoint(dense))
    whole = sum(p.nbytes for p in model.layers[0].parameters())
    parts = [part_bytes(layer, 2) for layer in rest_bytes(model.layers)]
    for fact in facts:
        buffers, in_buffers, kept = fact["memory"]
        assert [buffers, in_buffers, kept] == [2, buffer_bytes([2 * part for part in parts]), sum(parts)]
        assert 2 * whole <= in_buffers <= 2 * whole + 4096  # aligned
        assert 5 * whole / 2 <= kept <= 5 * whole / 2 + 5 * 4096


def test_a_process_that_cannot_read_ends_the_others(facts: list[dict[str, Any]]) -> None:
    said = [fact["unreadable"] for fact in facts]
    assert "another process could not read its part" in said[0] and "a disk that fails" in said[1]


def test_one_process_has_no_peers() -> None:
    with pytest.raises(ConfigError, match=r"place\.rest is peers, but there is only one process"):
        open_model(open_checkpoint(TINY_K2), layout=RESIDENT.but(rest="peers"), mesh=ONE)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_the_parts_cover_a_layer(size: int) -> None:
    """What the processes read, together, is each weight once; none of it has to be given to the others."""
    manifest = open_checkpoint(TINY_K2)
    model = models.meta_model(models.shape(manifest.config), manifest, torch.bfloat16)
    params = {name: (t.dtype, tuple(t.shape)) for name, t in model.state_dict().items()}
    placements = resolve(manifest, models.rules(model.shape), params, ignore=models.ignored(model.shape))
    for index, layer in enumerate(model.layers):
        names = [name for name in rest_names(layer, f"model.layers.{index}") if name in params]
        assert names and not any(".experts." in name for name in names)
        layout = layout_of(names, params)
        theirs = [p for p in placements if p.param in layout and p.expected is None]
        rest = rest_of(layout, theirs, size)
        own = {name: params[name] for name in names}
        check_coverage([p for reads in rest.reads for p in reads], own)
        assert not any(rest.shared)
        if size > 1:  # control arm: without one of them there is a hole
            with pytest.raises(CheckpointError, match="left uninitialised"):
                check_coverage([p for reads in rest.reads[1:] for p in reads], own)


def test_what_cannot_be_cut_is_read_by_one_process_and_given_to_the_others() -> None:
    """A text beside a packed weight, whose numbers both parts of the layer may need."""
    layout = layout_of(["a", "b"], {"a": (torch.float32, (64,)), "b": (torch.float32, (64,))})
    info = TensorInfo("a", "F32", (64,), 256, Path("f"), 0)
    text = replace(info, name="b", dtype="U8", shape=(90,), offset=256, nbytes=90)
    whole = Placement(info, "a", (), 0, 64, 0)
    parsed = Placement(text, "b", (), 0, 64, 0, parse=lambda raw: [0.0] * 64)
    rest = rest_of(layout, [whole, parsed], 2)
    assert rest.part == 256 and rest.reads == [[whole], [parsed]] and rest.shared == [[], [parsed]]


if __name__ == "__main__":
    from sharding import forked

    torch.set_num_threads(1)
    sys.exit(int(any(forked(2, lambda group: each(Path(sys.argv[1]), group), 200))))
