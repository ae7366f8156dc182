"""Claims about streamed experts: the numbers of the resident model to the bit in both dtypes and every recompute
mode, as few reads as two buffers allow, and nothing reads a buffer that is not its own."""

from __future__ import annotations

import gc
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from adapted import adapted, batch, same, step

from unfreeze import models
from unfreeze.checkpoint import open_checkpoint, save_checkpoint
from unfreeze.commands.demo import TINY_K2
from unfreeze.core.errors import CheckpointError, ConfigError
from unfreeze.core.layout import RESIDENT
from unfreeze.core.taps import Tap
from unfreeze.generate.open import open_model
from unfreeze.models.publish import published
from unfreeze.models.recompute import RECOMPUTE
from unfreeze.parallel.placement.residency import Slot, Streamed, buffer_bytes, reads_of, streamed_bytes
from unfreeze.parallel.processes.lanes import HostLane

SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "max_position_embeddings": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}
FAMILIES = {
    "bf16, a dense layer between": {
        "model_type": "qwen3_moe",
        "num_experts": 6,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "mlp_only_layers": [2],
        "decoder_sparse_step": 1,
        "dtype": "bfloat16",
    },
    "a decay per channel, experts under w1, w2, w3": {
        "model_type": "kimi_linear",
        "num_key_value_heads": 4,
        "num_experts": 6,
        "num_experts_per_token": 2,
        "moe_intermediate_size": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "linear_num_heads": 2,
        "linear_head_dim": 16,
        "dtype": "bfloat16",
    },
    "two passes through the experts of a layer": {
        "model_type": "chain_of_experts",
        "n_routed_experts": 6,
        "n_shared_experts": 1,
        "moe_intermediate_size": 32,
        "inner_iter": 2,
        "dtype": "bfloat16",
    },
    "biases, fused and transposed": {
        "model_type": "gpt_oss",
        "num_local_experts": 4,
        "sliding_window": 8,
        "rope_theta": 1e4,
        "rms_norm_eps": 1e-5,
        "swiglu_limit": 7.0,
        "dtype": "bfloat16",
    },
}


def opened(folder: Path, dtype: torch.dtype, experts: str) -> models.Decoder:
    """The model with adapters that are not zero."""
    return adapted(open_model(open_checkpoint(folder), dtype, "cpu", layout=RESIDENT.but(experts=experts)))


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory) -> Path:
    """A random checkpoint of five layers whose experts are dense on disk."""
    config = {**SIZES, **FAMILIES[request.param]}
    folder = tmp_path_factory.mktemp("family") / "model"
    model = models.build(models.shape(config), dtype=torch.float32, device="cpu")
    models.initialize(model, 0)
    save_checkpoint(folder, config, published(model, config))
    return folder


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_resident_models_numbers_to_the_bit(dtype: torch.dtype, recompute: str) -> None:
    """Two steps of several documents in chunks, idle buffers full of NaN."""
    given = batch(64, 4, 256) if dtype == torch.float32 else batch(12, 3, 256)  # bf16 is slow on some CPUs
    wanted = step(opened(TINY_K2, dtype, "device"), recompute, given)
    assert len(wanted) > 70
    for experts in ("disk", "host"):
        model = opened(TINY_K2, dtype, experts)
        assert isinstance(model.residency, Streamed)
        model.residency.poison = True
        assert all(same(step(model, recompute, given), wanted) for _ in range(2)), experts


ASKED = [Tap(1, "q"), Tap(1, "input"), Tap(3, "v"), Tap(3, "k_plain")]


@pytest.mark.parametrize("recompute", ["layers", "elementwise", "nothing"])
@pytest.mark.parametrize("alone", [False, True])
def test_what_an_objective_reads_inside_layers_changes_nothing_about_it(recompute: str, alone: bool) -> None:
    """The same bits; alone: backward begins in the middle of the model, with layers that were not asked for since."""
    given = batch(64, 4, 256)
    wanted = step(opened(TINY_K2, torch.float32, "device"), recompute, given, ASKED, alone=alone)
    for experts in ("disk", "host"):
        model = opened(TINY_K2, torch.float32, experts)
        assert isinstance(model.residency, Streamed)
        model.residency.poison = True
        assert all(same(step(model, recompute, given, ASKED, alone=alone), wanted) for _ in range(2)), experts


@pytest.mark.parametrize("recompute", ["layers", "nothing"])
def test_dense_experts_biases_and_layers_without_experts(family: Path, recompute: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        given = batch(48, 4, 97) if dtype == torch.float32 else batch(12, 3, 97)
        wanted = step(opened(family, dtype, "device"), recompute, given)
        for experts in ("disk", "host"):
            model = opened(family, dtype, experts)
            assert isinstance(model.residency, Streamed)
            model.residency.poison = True
            assert all(same(step(model, recompute, given), wanted) for _ in range(2)), experts


def test_files_of_the_hubs_cache_and_reads_that_come_in_pieces_give_the_same_bits(
    tmp_path, monkeypatch
) -> None:
    """A snapshot is symlinks to blobs; a read of a network disk may return less than it was asked for."""
    given = batch(64, 4, 256)
    wanted = step(opened(TINY_K2, torch.float32, "device"), "layers", given)
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "0", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(path for path in TINY_K2.iterdir() if path.is_file()):
        shutil.copy(file, blobs / str(number))
        (snapshot / file.name).symlink_to(Path("../../blobs") / str(number))
    reads, preadv = [0], os.preadv

    def short(descriptor: int, buffers: Any, offset: int) -> int:
        reads[0] += 1
        first = memoryview(buffers[0]).cast("B")
        return preadv(descriptor, [first[: max(1, len(first) // 3)]], offset)

    monkeypatch.setattr(os, "preadv", short)
    assert same(step(opened(snapshot, torch.float32, "disk"), "layers", given), wanted)
    assert reads[0] > 1000


@pytest.mark.parametrize("recompute", ["layers", "nothing"])
def test_control_arm_another_layers_experts_are_seen(recompute: str) -> None:
    given = batch(64, 4, 256)
    wanted = step(opened(TINY_K2, torch.float32, "device"), recompute, given)
    model = opened(TINY_K2, torch.float32, "host")
    assert isinstance(model.residency, Streamed)
    begin = model.residency.source.begin
    model.residency.source.begin = lambda layer, into: begin(max(0, layer - 1), into)  # type: ignore[method-assign]
    assert not same(step(model, recompute, given), wanted)


def test_control_arm_a_layer_that_is_not_visited_again_before_its_backward(monkeypatch) -> None:
    """Autograd keeps the graph, and the buffer holds another layer by then."""
    given = batch(64, 4, 256)
    wanted = step(opened(TINY_K2, torch.float32, "device"), "nothing", given)
    monkeypatch.setattr("unfreeze.models.recompute.visited_again", lambda y, layer, residency: y)
    assert not same(step(opened(TINY_K2, torch.float32, "disk"), "nothing", given), wanted)


def test_control_arm_without_its_buffer_nan_is_seen() -> None:
    """A residency that poisons, and then does not fetch."""
    model = opened(TINY_K2, torch.float32, "host")
    assert isinstance(model.residency, Streamed)
    model.residency.poison = True
    model.residency.source.begin = lambda layer, into: lambda: None  # type: ignore[method-assign]
    assert not bool(step(model, "layers", batch(64, 4, 256))["loss"].isfinite())


def test_reads_are_those_that_two_buffers_need(family: Path) -> None:
    """2 L - 2 for the first pass, 2 L - 4 for each later one: both turns find two layers here. A pass without
    backward reads all L, but the first two where backward left them."""
    model = opened(family, torch.float32, "disk")
    assert isinstance(model.residency, Streamed)
    given, layers = batch(96, 4, 97), len({id(moe.experts) for moe in model.moe_layers().values()})
    step(model, "layers", given)
    assert model.residency.reads == reads_of(layers, first=True) == 2 * layers - 2
    for _ in range(2):
        step(model, "layers", given)
    assert model.residency.reads == 2 * layers - 2 + 2 * (2 * layers - 4)
    assert reads_of(layers, first=False) == 2 * layers - 4
    before = model.residency.reads
    with torch.no_grad():
        model.hidden(given)
        model.hidden(given)
    assert model.residency.reads - before == 2 * layers - 2


@pytest.mark.parametrize(("layers", "first", "later"), [(1, 1, 0), (2, 2, 0), (3, 4, 2), (60, 118, 116)])
def test_reads_of(layers: int, first: int, later: int) -> None:
    assert (reads_of(layers, first=True), reads_of(layers, first=False)) == (first, later)


def test_what_came_is_counted_once() -> None:
    model = opened(TINY_K2, torch.float32, "disk")
    assert isinstance(model.residency, Streamed)
    step(model, "layers", batch(64, 4, 256))
    came, again = model.residency.take(), model.residency.take()
    each = sum(info.nbytes for name, info in open_checkpoint(TINY_K2).tensors.items() if is_expert(name, 1))
    assert (came.reads, came.bytes) == (4, 4 * each)
    assert came.seconds > 0 and came.waited >= 0 and came.hidden is not None and 0 <= came.hidden <= 1
    assert (again.reads, again.bytes, again.seconds, again.hidden) == (0, 0, 0, None)


def is_expert(name: str, layer: int) -> bool:
    return f"layers.{layer}.mlp.experts." in name and not name.endswith("weight_shape")


def test_what_autograd_kept_is_the_same_object_with_the_same_version() -> None:
    """Bytes arrive without torch knowing: no version counter moves, else "nothing" would be refused."""
    model = opened(TINY_K2, torch.float32, "host")
    held = {name: (buffer, buffer._version) for name, buffer in model.named_buffers() if ".experts." in name}
    step(model, "nothing", batch(64, 4, 256))
    found = dict(model.named_buffers())
    assert held and all(
        found[name] is old and old._version == version for name, (old, version) in held.items()
    )


def test_only_two_layers_have_memory() -> None:
    model = opened(TINY_K2, torch.bfloat16, "disk")
    storages = {
        buffer.untyped_storage().data_ptr(): buffer.untyped_storage().nbytes()
        for name, buffer in model.named_buffers()
        if ".experts." in name and "counts" not in name
    }
    assert len(storages) == 2 and sum(storages.values()) == buffer_bytes(streamed_bytes(model.layers))


def test_memory_files_and_threads_are_flat() -> None:
    model = opened(TINY_K2, torch.float32, "disk")
    process, given = psutil.Process(), batch(8, 2, 256)

    def now() -> tuple[int, int, int]:
        return process.memory_info().rss, process.num_fds(), threading.active_count()

    for _ in range(4):
        step(model, "layers", given)
    gc.collect()
    memory, files, threads = now()
    for _ in range(12):
        step(model, "layers", given)
    gc.collect()
    after = now()
    assert after[1] <= files and after[2] <= threads  # fewer: those of another test ended
    assert after[0] - memory < 2 * 2**20  # one layer's experts are 221 KB, those of 12 steps 5 MB


def test_files_close_and_threads_end_with_the_model(family: Path) -> None:
    def files() -> set[str]:
        return {file.path for file in psutil.Process().open_files() if Path(file.path).is_relative_to(family)}

    gc.collect()
    before = set(threading.enumerate())  # one of another test may end meanwhile
    assert not files()
    model = opened(family, torch.float32, "disk")
    step(model, "layers", batch(96, 4, 97))
    begun = set(threading.enumerate()) - before
    assert files() and begun
    assert isinstance(model.residency, Streamed)
    model.residency.close()
    assert not files() and not any(thread.is_alive() for thread in begun)


def test_a_file_that_ends_early_is_one_error_and_can_be_read_again(family: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    folder.mkdir()
    for file in family.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    given = batch(96, 4, 97)
    wanted = step(opened(family, torch.float32, "device"), "layers", given)
    model = opened(folder, torch.float32, "disk")
    (shard,) = folder.glob("*.safetensors")
    whole = shard.read_bytes()
    os.truncate(shard, 1000)
    with pytest.raises(CheckpointError, match="longer when it was opened"):
        step(model, "layers", given)
    shard.write_bytes(whole)
    with pytest.raises(CheckpointError, match="written to while it was in use"):
        step(model, "layers", given)
    assert same(step(opened(folder, torch.float32, "disk"), "layers", given), wanted)


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    config = {**SIZES, "model_type": "qwen3", "num_hidden_layers": 1}
    model = models.build(models.shape(config), dtype=torch.float32, device="cpu")
    models.initialize(model, 0)
    save_checkpoint(tmp_path / "dense", config, published(model, config))
    with pytest.raises(ConfigError, match=r"place\.experts is disk, and this model has no routed experts"):
        open_model(open_checkpoint(tmp_path / "dense"), layout=RESIDENT.but(experts="disk"))


def test_the_thread_that_copies_begins_with_the_lanes_device() -> None:
    """On a GPU of another number than 0 a stream's context would else leave one on GPU 0."""
    said: list[tuple[str, bool]] = []
    main = threading.current_thread()

    class Written(HostLane):
        def begin_thread(self) -> None:
            said.append(("begins", threading.current_thread() is main))

        @contextmanager
        def copying(self, after: float) -> Iterator[None]:
            said.append(("copies", threading.current_thread() is main))
            yield

    layers, slots = [object(), object()], [Slot(4, "cpu")] * 2
    source = SimpleNamespace(begin=lambda index, slot: lambda: None, close=lambda: None)
    residency = Streamed(layers, [4, 4], slots, source, Written())
    residency.visit(layers[0])
    residency.close()
    aside = [what for what, in_main in said if not in_main]
    assert aside[:2] == ["begins", "copies"] and aside.count("begins") == 1


@pytest.mark.parametrize("pair", [(0, 3), (3, 0)])
def test_what_was_sent_for_and_not_visited_never_overwrites_what_is_visited(pair: tuple[int, int]) -> None:
    """A source that is under way from `begin` on, as a gather is, and slower the first time. The pass turns round
    unlike the prefetch expected, so two layers come into one buffer."""
    slots, began = [Slot(1, "cpu") for _ in range(2)], list[threading.Thread]()

    class Gathers:
        name = "peers"

        def begin(self, layer: int, into: Slot) -> Any:
            late = 0.2 if len(began) == 1 else 0.0  # the one that is sent for behind the first visit

            def write() -> None:
                threading.Event().wait(late)
                into.bytes.fill_(layer)

            began.append(threading.Thread(target=write))
            began[-1].start()
            return began[-1].join

        def close(self) -> None:
            pass

    layers = [object() for _ in range(4)]
    residency = Streamed(layers, [1] * 4, slots, Gathers(), HostLane())
    for index in pair:
        residency.visit(layers[index])
    for thread in began:
        thread.join()
    residency.close()
    assert int(slots[pair[1] % 2].bytes[0]) == pair[1]
