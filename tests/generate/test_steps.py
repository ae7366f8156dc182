"""Steps that can be recorded: equal to ordinary ones across widths, batches and attentions; replayed by a
tape that holds host numbers as a CUDA
graph does; refused with the reason where the launches ask for a value.
"""

import json
import logging
import weakref
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from unfreeze import models
from unfreeze.core.errors import UserError
from unfreeze.generate import steps as steps_file
from unfreeze.generate.engine import Engine, batch_of
from unfreeze.generate.recorded import Recorded
from unfreeze.generate.sampling import Sampling
from unfreeze.generate.steps import Replayed, launched, replayed, step_by_record, width_of
from unfreeze.kernels import cuda_graph
from unfreeze.kernels.choice import choose, predicted, record
from unfreeze.kernels.choice.op import Candidate
from unfreeze.kernels.cuda_graph import CannotCapture
from unfreeze.kernels.expert_mlp import fused_expert_mlp
from unfreeze.kernels.expert_mlp.grouped import Grouped
from unfreeze.models.blocks import experts
from unfreeze.models.blocks.cache import Cache
from unfreeze.models.blocks.residency import RESIDENT
from unfreeze.models.blocks.step_pass import StepWithin

KINDS = ("gqa", "gqa-qk-norm", "mla-moe")  # of conftest.py
PROMPTS = [[3, 17, 42, 8, 60, 11, 5], [70, 2], list(range(20, 33)), [9]]
SAMPLED = Sampling(max_new_tokens=40, temperature=1.0, seed=0)
plain = partial(Replayed, impl="reference")


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    """Widths 8, 16, 32, 64 within a short generation."""
    monkeypatch.setattr(steps_file, "NARROWEST", 8)
    monkeypatch.setattr(choose, "_CHOSEN", {})
    steps_file._say.cache_clear()


def generated(model, steps, prompts=PROMPTS, sampling=SAMPLED, **how):
    return Engine(model, steps=steps, **how).generate(prompts, sampling)


def same(ours, theirs, atol=1e-5):
    assert [done.tokens for done in ours] == [done.tokens for done in theirs]
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(torch.tensor(a.logprobs), torch.tensor(b.logprobs), rtol=0, atol=atol)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_step_within_a_width_equals_a_step_across_every_edge(build, kind, rows):
    """float32, the same tokens through both: 1e-5 of logits of size 1 to 10, and the caches hold the same
    numbers."""
    model = build(kind)
    one, other = model.new_cache(rows, 64), model.new_cache(rows, 64)
    for cache in (one, other):
        model.prefill(batch_of(PROMPTS[:rows]), cache)
    step, within, widths = launched(model, one), plain(model, other), set()
    for turn in range(40):
        tokens = [(7 * turn + 13 * row) % 89 for row in range(rows)]
        widths.add(width_of(max(other.lengths) + 1, 64))
        torch.testing.assert_close(within(tokens), step(tokens), rtol=1e-5, atol=1e-5)
    assert one.lengths == other.lengths and widths >= {16, 32, 64}
    for layer, stores in one.layers.items():
        for a, b in zip(stores, other.layers[layer], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_control_arm_without_its_mask_a_step_sees_what_is_not_there(build, monkeypatch):
    model = build("gqa")
    one, other = model.new_cache(4, 64), model.new_cache(4, 64)
    for cache in (one, other):
        model.prefill(batch_of(PROMPTS), cache)
    made = StepWithin.__post_init__

    def bare(self):
        made(self)
        self.mask_S11N = None

    monkeypatch.setattr(StepWithin, "__post_init__", bare)
    assert (plain(model, other)([1, 2, 3, 4]) - launched(model, one)([1, 2, 3, 4])).abs().max() > 0.05


@pytest.mark.parametrize("sampling", [SAMPLED, replace(SAMPLED, temperature=0.0)], ids=["sampled", "greedy"])
@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[:1]], ids=["batched", "single"])
@pytest.mark.parametrize("kind", KINDS)
def test_generation_is_the_same_token_for_token(build, kind, prompts, sampling):
    model = build(kind)
    same(generated(model, plain, prompts, sampling), generated(model, launched, prompts, sampling))


def test_rows_that_finish_leave_the_batch_in_the_middle_of_a_width(build):
    model = build("gqa")
    whole = generated(model, launched)
    stop_ids = frozenset({whole[0].tokens[4], whole[2].tokens[11], whole[3].tokens[20]})
    ended = generated(model, launched, stop_ids=stop_ids)
    assert len({len(done.tokens) for done in ended}) >= 3
    same(generated(model, plain, stop_ids=stop_ids), ended)


def test_widths():
    assert [width_of(n, 1000) for n in (1, 8, 9, 16, 17, 512, 513, 1000)] == [
        8,
        8,
        16,
        16,
        32,
        512,
        1000,
        1000,
    ]


@torch.no_grad()
def test_a_full_cache_is_refused_as_an_ordinary_step_refuses_it(build):
    model = build("gqa")
    cache = model.new_cache(1, 2)
    model.prefill(batch_of([[1, 2]]), cache)
    with pytest.raises(UserError, match="holds 2 positions and all are filled"):
        plain(model, cache)([3])


# ---- a tape in the place of a CUDA graph
# -------------------------------------------------------------------------------------------------

WAITS = ("_local_scalar_dense", "nonzero", "_unique2", "unique_dim", "masked_select", "bincount")


class Tape(TorchDispatchMode):
    """Every operation with the very tensors and numbers it was given: replayed, it reads and writes the same
    memory, and numbers of the host stay."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.removeprefix("aten::")
        if name in WAITS:
            raise CannotCapture(f"{name} asks the device for a value")
        out = function(*args, **(kwargs or {}))
        self.made.append((function, args, kwargs or {}, out))
        return out

    def play(self):
        for function, args, kwargs, out in self.made:
            inputs = {
                t.untyped_storage().data_ptr()
                for t in tree_leaves((args, kwargs))
                if isinstance(t, torch.Tensor)
            }
            for held, new in zip(tree_leaves(out), tree_leaves(function(*args, **kwargs)), strict=True):
                # else a view, or written in place
                if isinstance(held, torch.Tensor) and held.untyped_storage().data_ptr() not in inputs:
                    held.copy_(new)


class Taped:
    """The seam: what kernels/cuda_graph/capture.py does, by a tape."""

    def __init__(self):
        self.recorded, self.replayed = [], 0

    def __call__(self, launches):
        if launches.captured is None:
            with Tape() as tape:
                output = launches.run(*launches.buffers)
            launches.captured = (tape, output)
            self.recorded.append((launches.rows, len(tape.made)))
        tape, output = launches.captured
        self.replayed += 1
        output.fill_(float("nan"))  # nothing of the recording's own results may be what is read
        tape.play()
        return output


@pytest.fixture
def taped(monkeypatch, tmp_path):
    """The tape as the op's candidate, no records and no predictions: every kernel is its reference, plain
    torch, which a tape can hold."""
    made = Taped()
    candidate = Candidate(lambda: made, lambda *_: "")
    monkeypatch.setattr(cuda_graph, "OP", replace(cuda_graph.OP, candidates={"taped": candidate}))
    monkeypatch.setattr(record, "user_folder", lambda: tmp_path / "own")
    monkeypatch.setattr(record, "COMMITTED", tmp_path / "none")
    looks = tuple(look for look in choose.LOOKS if look is not choose._predicted)
    monkeypatch.setattr(choose, "LOOKS", looks)
    monkeypatch.setattr(choose, "_loaded", lambda op, name, load: load())
    return made


def grouped(monkeypatch):
    """The experts' part for CUDA, on the CPU."""

    def with_part(x_TD, ids_TK, weights_TK, gate_up, down, factors=None, impl="auto", reuse=None, **rest):
        return fused_expert_mlp(x_TD, ids_TK, weights_TK, gate_up, down, factors, Grouped(), reuse, **rest)

    monkeypatch.setattr(experts, "expert_mlp", with_part)


@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[:1]], ids=["batched", "single"])
@pytest.mark.parametrize("kind", ["gqa", "gqa-qk-norm"])
def test_replaying_gives_the_tokens_of_launching(build, kind, prompts, taped):
    model = build(kind)
    same(generated(model, partial(Replayed, impl="taped"), prompts), generated(model, launched, prompts))
    assert len(taped.recorded) == len({16, 32, 64}) and taped.replayed > 25, (
        "one recording per width, and most steps replayed"
    )


def test_latent_attention_and_experts_are_replayed_too(build, taped, monkeypatch):
    """In bf16, which grouped GEMMs take: the same launches on the same numbers, so the same bits as launching
    within the width."""
    grouped(monkeypatch)
    model = build("mla-moe", torch.bfloat16)
    ours, theirs = generated(model, partial(Replayed, impl="taped")), generated(model, plain)
    same(ours, theirs, atol=0)
    assert taped.replayed > 25


def test_rows_that_finish_are_recorded_anew(build, taped):
    model = build("gqa")
    whole = generated(model, launched)
    stop_ids = frozenset({whole[0].tokens[4], whole[2].tokens[11]})
    same(
        generated(model, partial(Replayed, impl="taped"), stop_ids=stop_ids),
        generated(model, launched, stop_ids=stop_ids),
    )
    assert len({rows for rows, _ in taped.recorded}) > 1


def test_control_arm_a_number_of_the_host_in_the_step_would_be_replayed_as_it_was(build, taped, monkeypatch):
    model = build("gqa")
    want, within = generated(model, launched), models.Decoder.step_within

    def planted(self, tokens_S, positions_S, cache, width):
        return within(self, tokens_S, torch.tensor(cache.lengths), cache, width)

    monkeypatch.setattr(models.Decoder, "step_within", planted)
    assert [d.tokens for d in generated(model, plain)] == [d.tokens for d in want], (
        "launched anew each time, it is right"
    )
    assert [d.tokens for d in generated(model, partial(Replayed, impl="taped"))] != [d.tokens for d in want]


def test_experts_that_ask_for_values_are_refused_with_the_reason_said_once(build, taped, caplog):
    """The reference of the experts, as it runs in float64 here and in float32 on CUDA, asks which experts
    there are."""
    model = build("mla-moe", torch.float64)
    with caplog.at_level(logging.WARNING, logger="unfreeze"):
        ours = [generated(model, partial(Replayed, impl="taped")) for _ in range(2)]
    said = [entry.message for entry in caplog.records if "cannot be recorded" in entry.message]
    assert len(said) == 1 and "_unique2 asks the device for a value" in said[0] and taped.replayed == 0
    for found in ours:
        same(found, generated(model, launched))


@torch.no_grad()
def test_memory_that_runs_out_ends_recording_and_frees_what_was_recorded(build, taped, caplog, monkeypatch):
    """Widths 16 and 32: the second recording fails, and the first is not replayed again."""
    model, first, real = build("gqa"), [], Taped.__call__

    def full(self, launches):
        if first and launches.captured is None:
            raise CannotCapture("no memory")
        output = real(self, launches)
        first.append(weakref.ref(launches.captured[0]))
        return output

    monkeypatch.setattr(Taped, "__call__", full)
    one, other = model.new_cache(4, 64), model.new_cache(4, 64)
    for cache in (one, other):
        model.prefill(batch_of(PROMPTS), cache)
    step, recorded = launched(model, one), Replayed(model, other, impl="taped")
    with caplog.at_level(logging.WARNING, logger="unfreeze"):
        for turn in range(30):
            tokens = [(7 * turn + 13 * row) % 89 for row in range(4)]
            torch.testing.assert_close(recorded(tokens), step(tokens), rtol=1e-5, atol=1e-5)
    said = [entry.message for entry in caplog.records if "cannot be recorded" in entry.message]
    assert len(said) == 1 and said[0].endswith("no memory") and first and first[0]() is None


def test_a_record_decides(build, taped, tmp_path):
    model = build("gqa")
    same(generated(model, replayed), generated(model, launched))
    assert taped.replayed == 0, "no record: launched"
    row = {
        "op": "replay",
        "device": "cpu",
        "dtype": "float32",
        "bucket": "2 to 16 rows",
        "candidate": "taped",
        "error_forward": 0.0,
        "error_backward": 0.0,
        "median_us": 100.0,
        "reference_median_us": 200.0,
        "spread_us": 1.0,
        "reference_spread_us": 1.0,
        "date": "2026-01-01",
    }
    file = tmp_path / "own" / f"{record.device_key(torch.device('cpu'))}.json"
    file.parent.mkdir()
    file.write_text(json.dumps([row]))
    record.read.cache_clear()
    choose._CHOSEN.clear()
    same(generated(model, replayed), generated(model, launched))
    assert taped.replayed > 25
    before = taped.replayed
    same(generated(model, replayed, PROMPTS[:1]), generated(model, launched, PROMPTS[:1]))
    assert taped.replayed == before, "of one row nothing is recorded"
    record.read.cache_clear()


@pytest.mark.parametrize("device, replays", [("cuda", True), ("cuda", False), ("cpu", False)])
@pytest.mark.parametrize("hinders", ["", "exchanges", "streamed weights", "a state"])
def test_on_cuda_steps_are_within_widths_and_recorded_where_a_replay_does_the_same(
    device, replays, hinders, monkeypatch
):
    """A replay would neither talk to other processes nor copy the next layer's weights to the device.

    And recording a step runs it three times, each of which would move a recurrent state on.
    """
    monkeypatch.setattr(steps_file, "pays", lambda *_: replays)
    model = SimpleNamespace(device=torch.device(device), dtype=torch.bfloat16)
    model.exchanges, model.state_bytes = hinders == "exchanges", lambda: 8 * (hinders == "a state")
    model.residency = SimpleNamespace(visit=print) if hinders == "streamed weights" else RESIDENT
    step = step_by_record(model, Cache(1, 64))
    assert isinstance(step, Replayed) == (device == "cuda")
    assert isinstance(step, Recorded) == (device == "cpu" and hinders in ("", "a state"))
    if device == "cuda":
        assert step.impl == ("auto" if replays and not hinders else "reference")


@pytest.mark.parametrize("op_is", ["right", "a result of the step before"])
def test_the_check_of_a_replay_runs_on_the_ops_own_launches(op_is):
    last = []

    def candidate(launches):
        last.append(launches.run(*launches.buffers))
        return last[-1] if op_is == "right" else last[-1].roll(1, -1)

    case, cpu = cuda_graph.OP.cases[1], torch.device("cpu")
    fault = predicted.fault(cuda_graph.OP, case, lambda: candidate, cpu, torch.bfloat16, 2e-2)
    assert bool(fault) == (op_is != "right") and len(last) == 1


@pytest.mark.parametrize("kind", ["gqa", "mla-moe"])
def test_shapes_of_attention_in_a_generation(build, kind, monkeypatch):
    """Step by step one for each token; within widths the powers of two, and after a refusal still those."""
    shapes, attention = [], torch.nn.functional.scaled_dot_product_attention

    def seen(q, k, v, **how):
        shapes.append(k.shape[2])  # of steps only: the prefill has another function on a CPU
        return attention(q, k, v, **how)

    def refuses(launches, impl):
        if impl != "reference":
            raise CannotCapture("it waits")
        return launches.run(*launches.buffers)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", seen)
    model, long = build(kind), replace(SAMPLED, max_new_tokens=60)
    counts = []
    for steps in (launched, plain, Replayed):
        shapes.clear()
        if steps is Replayed:
            monkeypatch.setattr(steps_file, "replay", refuses)
        generated(model, steps, PROMPTS[1:2], long)
        counts.append(len(set(shapes)))
    assert counts[0] == 59 and counts[1:] == [4, 4]  # 8, 16, 32 and the cache's 62


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[:1]], ids=["batched", "single"])
@pytest.mark.parametrize(
    "kind, dtype", [("gqa", torch.float32), ("gqa-qk-norm", torch.float32), ("mla-moe", torch.bfloat16)]
)
def test_a_cuda_graph_gives_the_tokens_of_launching(build, kind, dtype, prompts, monkeypatch):
    """In float32 those of ordinary steps; in bf16 attention over another width may round otherwise, so those
    of steps within the same width."""
    model = build(kind, dtype).cuda()
    graphs = []
    from unfreeze.kernels.cuda_graph import capture

    make = capture.capture
    monkeypatch.setattr(capture, "capture", lambda launches: graphs.append(1) or make(launches))
    want = generated(model, launched if dtype == torch.float32 else plain, prompts)
    same(generated(model, partial(Replayed, impl="cuda_graph"), prompts), want, atol=1e-4)
    assert len(graphs) == 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_cuda_experts_in_float32_are_refused_and_generation_goes_on(build, caplog):
    model = build("mla-moe").cuda()
    with caplog.at_level(logging.WARNING, logger="unfreeze"):
        ours = generated(model, partial(Replayed, impl="cuda_graph"))
    assert "cannot be recorded" in caplog.text
    same(ours, generated(model, launched), atol=1e-4)
