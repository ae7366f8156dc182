"""Claims about boundary activations in host memory: the same gradients to the bit, all that backward reads came from
there, the device holds two at once, the memory is used again, and copies and computation wait for each other."""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from adapted import adapted, batch, same, step

from unfreeze import models
from unfreeze.checkpoint import open_checkpoint
from unfreeze.commands.demo import TINY_K2
from unfreeze.core.errors import UserError
from unfreeze.core.taps import Tap
from unfreeze.generate.open import open_model
from unfreeze.models.blocks import boundary
from unfreeze.models.recompute import RECOMPUTE
from unfreeze.parallel.placement.boundary import BoundaryInHost
from unfreeze.parallel.processes.lanes import HostLane

KEEPING = [name for name in RECOMPUTE if name != "nothing"]


def opened(dtype: torch.dtype) -> models.Decoder:
    """The model with adapters that are not zero."""
    return adapted(open_model(open_checkpoint(TINY_K2), dtype, "cpu"))


@pytest.mark.parametrize("recompute", KEEPING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_gradients_to_the_bit(dtype: torch.dtype, recompute: str) -> None:
    """Three steps, of which the second is larger, in chunks; what nobody may read is NaN."""
    model = opened(dtype)
    few = 64 if dtype == torch.float32 else 12  # bf16 is slow on some CPUs
    sizes = [batch(few, 4), batch(2 * few, 8), batch(few, 4)]
    wanted = [step(model, recompute, given) for given in sizes]
    assert len(wanted[0]) > 70
    model.boundary = BoundaryInHost(model.layers, HostLane())
    model.boundary.poison = True
    assert all(same(step(model, recompute, given), of) for given, of in zip(sizes, wanted, strict=True))


@pytest.mark.parametrize("recompute", KEEPING)
def test_what_an_objective_reads_is_still_there(recompute: str) -> None:
    """A tapped input stays on the device as long as its reader; its layer's own copy goes and comes."""
    model, given = opened(torch.float32), batch(64, 4)
    asked = [Tap(1, "input"), Tap(1, "q"), Tap(2, "v")]
    wanted = step(model, recompute, given, asked)
    model.boundary = BoundaryInHost(model.layers, HostLane())
    assert all(same(step(model, recompute, given, asked), wanted) for _ in range(2))


class Wrong(BoundaryInHost):
    """Planted: a layer gets what the first one had."""

    def _buffer(self, kept):
        return super()._buffer(SimpleNamespace(layer=0, shape=kept.shape, dtype=kept.dtype))


def test_a_buffer_that_is_another_layers_is_seen() -> None:
    model, given = opened(torch.float32), batch(128, 4)
    wanted = step(model, "layers", given)
    model.boundary = Wrong(model.layers, HostLane())
    assert not same(step(model, "layers", given), wanted)


class Counting:
    """A boundary that looks, whenever a layer is about to be computed, how many inputs of layers are alive."""

    def __init__(self, inner: boundary.Boundary):
        self.inner, self.seen, self.most = inner, [], 0

    def _look(self, x_TD: torch.Tensor) -> None:
        self.seen.append(weakref.ref(x_TD.untyped_storage()))
        self.most = max(self.most, len({id(at) for ref in self.seen if (at := ref()) is not None}))

    def keep(self, ctx, layer, x_TD) -> None:
        self.inner.keep(ctx, layer, x_TD)
        self._look(x_TD)

    def give(self, ctx):
        x_TD = self.inner.give(ctx)
        for kept in getattr(self.inner, "_kept", []):
            if kept is not None and kept.on_device is not None:
                self._look(kept.on_device)
        self._look(x_TD)
        return x_TD


def test_the_device_holds_two_at_once() -> None:
    """Control: kept on the device there are as many as layers."""
    model, given = opened(torch.float32), batch(128, 4)
    layers = len(model.layers)
    assert layers > 2
    most = {}
    for name, inner in {
        "host": BoundaryInHost(model.layers, HostLane()),
        "device": boundary.ON_DEVICE,
    }.items():
        model.boundary = Counting(inner)
        step(model, "layers", given)
        most[name] = model.boundary.most
    assert most == {"host": 2, "device": layers}


def test_host_memory_is_used_again() -> None:
    model, given = opened(torch.bfloat16), batch(24, 4)
    model.boundary = host = BoundaryInHost(model.layers, HostLane())
    step(model, "layers", given)
    before = [b.data_ptr() for b in host._buffers if b is not None]
    assert host.nbytes == (len(model.layers) - 1) * 24 * model.shape.hidden_size * 2
    step(model, "layers", batch(12, 4))
    step(model, "layers", given)
    assert [b.data_ptr() for b in host._buffers if b is not None] == before


def test_a_second_forward_before_the_backward_is_refused() -> None:
    model, given = opened(torch.float32), batch(64, 4)
    model.boundary = BoundaryInHost(model.layers, HostLane())
    first = model.hidden(given, RECOMPUTE["layers"])
    model.hidden(given, RECOMPUTE["layers"])
    with pytest.raises(UserError, match="run forward again before its backward"):
        first.sum().backward()


class Written(HostLane):
    """A lane that writes down who waits for what; moments are numbers."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.now = 0

    def mark(self) -> int:
        self.now += 1
        return self.now

    def follow(self, mark: int) -> None:
        self.said.append(f"compute waits for {mark}")

    @contextmanager
    def copying(self, after: int):
        self.said.append(f"copy behind {after}")
        yield


def test_copies_and_computation_wait_for_each_other() -> None:
    lane, layers = Written(), [torch.nn.Identity() for _ in range(3)]
    host = BoundaryInHost(layers, lane)
    contexts = [SimpleNamespace() for _ in layers]
    for ctx, layer in zip(contexts, layers, strict=True):
        host.keep(ctx, layer, torch.zeros(2, 2))
    # an input is given up when its copy is done, while the next layer has begun; the last one is not copied
    assert lane.said == ["copy behind 1", "compute waits for 2", "copy behind 3", "compute waits for 4"]
    lane.said.clear()
    host.give(contexts[2])
    assert lane.said == ["copy behind 5"]  # layer 1's comes while layer 2 is computed again
    host.give(contexts[1])
    host.give(contexts[0])
    assert lane.said[1:] == ["compute waits for 6", "copy behind 7", "compute waits for 8"]


def test_memory_that_a_broken_off_backward_sent_for_is_free_when_it_has_come() -> None:
    lane, layers = Written(), [torch.nn.Identity() for _ in range(3)]
    host = BoundaryInHost(layers, lane)
    contexts = [SimpleNamespace() for _ in layers]
    for ctx, layer in zip(contexts, layers, strict=True):
        host.keep(ctx, layer, torch.zeros(2, 2))
    host.give(contexts[2])  # sends for layer 1's, until 6
    lane.said.clear()
    for layer in layers[:2]:
        host.keep(SimpleNamespace(), layer, torch.ones(2, 2))
    assert lane.said == ["copy behind 7", "compute waits for 8", "compute waits for 6", "copy behind 9"]
