"""The plan of a run whose experts stream: its bytes against torch's own count, where experts go with "auto", and what
is proposed for machines that are not here."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from unfreeze import models
from unfreeze.adapters import LoraConfig, attach
from unfreeze.checkpoint import open_checkpoint, save_checkpoint
from unfreeze.core.batch import Batch
from unfreeze.core.errors import DoesNotFit
from unfreeze.core.layout import GIB, RESIDENT
from unfreeze.generate.open import open_model
from unfreeze.kernels.attention import workspace
from unfreeze.kernels.expert_mlp import loop_cpu, release_scratch
from unfreeze.models.publish import published
from unfreeze.objectives.cross_entropy import cross_entropy
from unfreeze.parallel.machine import Hardware
from unfreeze.parallel.plan import (
    USABLE,
    Work,
    measure_sizes,
    plan,
    plan_here,
    plan_lines,
    refuse_if_too_large,
    what_fits,
)

CONFIG = {
    "model_type": "qwen3_moe",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 192,
    "norm_topk_prob": True,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
MACHINE = Hardware("cpu", "machine", 2, 2**34, 2**34)


def batch_of(tokens: int, documents: int) -> Batch:
    length = tokens // documents
    ids = torch.randint(0, 512, (tokens,), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(tokens) % length
    return Batch(ids, ids.roll(-1), torch.ones(tokens), positions, torch.arange(0, tokens, length))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("streamed") / "model"
    model = models.build(models.shape(CONFIG), dtype=torch.float32, device="cpu")
    models.initialize(model, 0)
    save_checkpoint(folder, CONFIG, published(model, CONFIG))
    return folder


def test_all_memory_of_a_streamed_run_is_predicted_within_a_tenth(folder, live, monkeypatch):
    """From opening the model to the second step, without the optimizer, which is exact."""
    # torch's dispatch modes see the thread they are set in
    monkeypatch.setattr(loop_cpu, "WORKERS_FROM", math.inf)
    monkeypatch.setattr(workspace, "SPREAD_FROM", math.inf)
    release_scratch()
    manifest, given = open_checkpoint(folder), batch_of(256, 4)

    def peak(experts: str, buffer: int = 0) -> int:
        watch = live.Live([given.tokens_T, given.targets_T, given.weights_T, given.positions_T])
        with watch:
            model = open_model(
                manifest, torch.bfloat16, layout=RESIDENT.but(experts=experts, buffer=buffer / GIB)
            )
            attach(model, LoraConfig(rank=4), 0)
            watch.peak = watch.now  # the model was on meta before, which counts as well
            for _ in range(2):
                model.zero_grad(set_to_none=True)
                loss = cross_entropy(model.hidden(given, models.RECOMPUTE["layers"]), model.lm_head, given)
                (loss.sum / loss.count).backward()
        return watch.peak

    def planned(experts: str, buffer: int = 0) -> int:
        made = plan_here(
            models.shape(manifest.config),
            manifest,
            LoraConfig(rank=4),
            layout=RESIDENT.but(recompute="layers", experts=experts, buffer=buffer / GIB),
            tokens=256,
            dtype="bfloat16",
            device="cpu",
            longest=64,
        )
        return made.training - made.terms["optimizer"]

    peaks = {experts: peak(experts) for experts in ("disk", "device")}
    stated = {experts: planned(experts) for experts in peaks}
    assert all(0.9 < stated[experts] / peaks[experts] < 1.1 for experts in peaks), (stated, peaks)
    saved = peaks["device"] - peaks["disk"]
    assert saved == pytest.approx(stated["device"] - stated["disk"], abs=2**17)
    # four of six layers' experts are not there; control: a plan that forgets to stream is seen
    assert stated["device"] - stated["disk"] == 4 * 16 * 3 * 256 * 192 * 2
    assert stated["device"] / peaks["disk"] > 1.1

    # in groups of four experts: buffers of a quarter, and three rows of each row more
    quarter = 4 * 3 * 256 * 192 * 2
    stated["groups"], peaks["groups"] = planned("disk", quarter), peak("disk", quarter)
    assert 0.9 < stated["groups"] / peaks["groups"] < 1.1, (stated, peaks)
    assert peaks["groups"] < peaks["disk"]


def test_the_plan_says_how_often_layers_come(folder):
    manifest = open_checkpoint(folder)
    made = plan_here(
        models.shape(manifest.config),
        manifest,
        LoraConfig(rank=4),
        layout=RESIDENT.but(experts="disk"),
        tokens=1024,
        dtype="bfloat16",
        device="cpu",
    )
    (line,) = [line for line in plan_lines(made) if "experts from disk" in line]
    assert (
        "6 layers of 4.5 MiB" in line
        and "10 in the first micro-batch, 8 in each later one (36.0 MiB)" in line
    )


def test_experts_in_the_host_memory_of_a_gpu_are_another_memory(folder):
    sizes = measure_sizes(
        models.meta_model(models.shape(CONFIG), open_checkpoint(folder), torch.bfloat16), None
    )
    gpu = Hardware("cuda", "gpu", 2, 2**34, 2**34, host=2**30)
    work, host = Work(tokens=256, rank=4), RESIDENT.but(experts="host")
    made, resident = plan(sizes, host, work, gpu), plan(sizes, RESIDENT, work, gpu)
    experts = 6 * 16 * 3 * 256 * 192 * 2
    assert made.host == experts and resident.host == 0 and made.fits
    assert resident.total - made.total == experts - experts // 3
    assert not plan(sizes, host, work, replace(gpu, host=experts)).fits  # 0.92 of it may be used


def test_inputs_of_layers_in_the_host_memory_of_a_gpu(folder):
    """Of 6 layers' inputs and the last output, the device has three tensors; five are in host memory."""
    sizes = measure_sizes(
        models.meta_model(models.shape(CONFIG), open_checkpoint(folder), torch.bfloat16), LoraConfig()
    )
    gpu = Hardware("cuda", "gpu", 2, 2**34, 2**34, host=2**30)
    work, stream = Work(tokens=8192, longest=512, rank=1), 8192 * 256 * 2
    made, host = plan(sizes, RESIDENT, work, gpu), plan(sizes, RESIDENT.but(boundary="host"), work, gpu)
    name = "boundary activations"
    assert made.terms[name] == 7 * stream and host.terms[name] == 3 * stream
    assert made.total - host.total == 4 * stream and (made.host, host.host) == (0, 5 * stream)
    assert not plan(sizes, host.layout, host.work, replace(gpu, host=host.host)).fits
    # without recompute no input is kept alone
    nothing = RESIDENT.but(recompute="nothing")
    assert plan(sizes, nothing.but(boundary="host"), work, gpu).terms == plan(sizes, nothing, work, gpu).terms
    # proposed where it is enough
    small = replace(gpu, available=math.ceil((made.total - stream) / USABLE))
    assert "--place.boundary host" in dict(what_fits(plan(sizes, RESIDENT, work, small)))
    on_cpu = replace(small, kind="cpu")
    assert "--place.boundary host" not in dict(what_fits(plan(sizes, RESIDENT, work, on_cpu)))


def test_moments_in_the_host_memory_of_a_gpu(folder):
    """Two slots of the largest factor's moments, or of 64 MiB, take their place; saves have them as before."""
    sizes = measure_sizes(
        models.meta_model(models.shape(CONFIG), open_checkpoint(folder), torch.bfloat16), LoraConfig()
    )
    gpu = Hardware("cuda", "gpu", 2, 2**36, 2**36, host=2**34)
    model = models.meta_model(models.shape(CONFIG), open_checkpoint(folder), torch.bfloat16)
    attach(model, LoraConfig(rank=64, experts_rank=32), 0)
    largest = max(p.numel() for p in model.parameters() if p.requires_grad)
    assert sizes.largest_factor(64, 32) == largest == 16 * 2 * 32 * 256
    for rank, slots in ((1, lambda state: 2 * state), (1024, lambda state: 2 * 8 * largest // 32 * 1024)):
        work = Work(tokens=256, rank=rank)
        made, host = plan(sizes, RESIDENT, work, gpu), plan(sizes, RESIDENT.but(optimizer="host"), work, gpu)
        state = made.terms["optimizer"]
        assert state == 8 * made.adapter_parameters and host.terms["optimizer"] == 0
        assert (host.host, host.host_moments) == (state, state) and (made.host, made.host_moments) == (0, 0)
        assert host.terms["moments on their way"] == slots(state)
        assert host.total - made.total == slots(state) - state
    # proposed where it is enough, and not where the host is the device
    small = replace(gpu, available=math.ceil((made.total + host.total) / 2 / USABLE))
    assert "--place.optimizer host" in dict(what_fits(plan(sizes, RESIDENT, work, small)))
    assert "--place.optimizer host" not in dict(
        what_fits(plan(sizes, RESIDENT, work, replace(small, kind="cpu")))
    )


def test_streaming_is_proposed_first_where_experts_were_asked_onto_the_device(folder):
    sizes = measure_sizes(
        models.meta_model(models.shape(CONFIG), open_checkpoint(folder), torch.bfloat16), LoraConfig()
    )
    small = replace(MACHINE, available=int(55e6))
    made = plan(sizes, RESIDENT, Work(tokens=256, rank=4), small)
    (first, words), *_ = what_fits(made)
    assert not made.fits and first == "--place.experts disk" and words.startswith("--place.experts disk (")
    with pytest.raises(DoesNotFit, match=r"Fits with --place\.experts disk"):
        refuse_if_too_large(made)
    assert plan(sizes, RESIDENT.but(experts="disk"), Work(tokens=256, rank=4), small).fits
    every = what_fits(
        plan(sizes, RESIDENT, Work(tokens=256), small)
    )  # every weight trains, and does not stream
    assert not any(flags.startswith("--place") for flags, _ in every)
