"""The work of a decode step against independent counts: the header of the checkpoint's files, torch's FLOP counter
on transformers' model and on our own step, the cache of a real prefill, the experts that a real step chose."""

import json
import time

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import unfreeze
from benchmarks.harness import limits, shapes
from benchmarks.harness.checkpoints import make
from benchmarks.harness.generation import make_adapter, prompts_of
from benchmarks.harness.peers import deepseek
from unfreeze import models
from unfreeze.adapters import LoraConfig, attach
from unfreeze.adapters.layouts import save_adapter
from unfreeze.core.dtypes import ITEMSIZE
from unfreeze.generate.engine import batch_of

ROWS, LENGTH = 3, 10.5


def tensors_in(folder):
    """name -> (dtype, shape), from the headers of a folder's safetensors files."""
    tensors = {}
    for file in folder.glob("*.safetensors"):
        data = file.read_bytes()
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        header.pop("__metadata__", None)
        tensors |= {name: (entry["dtype"], entry["shape"]) for name, entry in header.items()}
    return tensors


def numel(shape):
    return int(torch.Size(shape).numel())


@pytest.fixture
def moe(tiny, tmp_path):
    make(tmp_path / "moe", shapes.kimi(num_hidden_layers=3))
    return tmp_path / "moe"


@pytest.fixture
def dense(tiny, tmp_path):
    make(tmp_path / "dense", shapes.qwen("qwen3", shapes.QWEN3_06B))
    return tmp_path / "dense"


def test_bytes_of_a_moe_step_are_those_of_the_files(moe, tiny):
    """3 of 8 experts of the first mixture and 5 of the second, with adapters that are held in float32."""
    make_adapter(moe, moe.parent / "adapter")
    decoder = unfreeze.load(moe.parent / "adapter", dtype="bfloat16").decoder
    # experts one by one: fused pairs hold zeros
    save_adapter(decoder, moe.parent / "single", layout="per-expert")
    part = {1: 3 / 8, 2: 5 / 8}
    total = 0.0
    for name, (dtype, shape) in [*tensors_in(moe).items(), *tensors_in(moe.parent / "single").items()]:
        layer = int(name.split("layers.")[1].split(".")[0]) if "layers." in name else 0
        share = part[layer] if ".experts." in name else 1.0
        share = ROWS / tiny["vocab_size"] if "embed_tokens" in name else share
        size = 2 if "lora_" in name or name.endswith("e_score_correction_bias") else ITEMSIZE[dtype]
        total += 0 if name.endswith("weight_shape") else share * numel(shape) * size

    cache = decoder.new_cache(ROWS, 16)
    with torch.no_grad():
        decoder.prefill(batch_of(prompts_of(ROWS, 8, 256)), cache)
    total += cache.nbytes / 16 * LENGTH
    work = limits.work(decoder, ROWS, LENGTH, [3.0, 5.0], 2)
    assert work.read == pytest.approx(total, rel=1e-12)

    weights = (3 + 5) * 3 * tiny["hidden_size"] * tiny["moe_intermediate_size"]
    for name, (_, shape) in tensors_in(moe).items():
        share = ROWS / tiny["vocab_size"] if "embed_tokens" in name else 1.0
        weights += share * numel(shape) if ".experts." not in name and len(shape) > 1 else 0
    assert work.weights == pytest.approx(weights, rel=1e-12)


@pytest.mark.parametrize("dtype, size", [("bfloat16", 2), ("float32", 4)])
def test_bytes_of_a_dense_step_are_those_of_the_files(dense, dtype, size):
    """A tied head is read whole, once; in float32 the weights stay in bf16, and the cache is float32."""
    decoder = unfreeze.load(dense, dtype=dtype).decoder
    held = {name: 4 if size == 4 and len(shape) == 1 else 2 for name, (_, shape) in tensors_in(dense).items()}
    total = sum(numel(shape) * held[name] for name, (_, shape) in tensors_in(dense).items())
    cache = decoder.new_cache(ROWS, 16)
    with torch.no_grad():
        decoder.prefill(batch_of(prompts_of(ROWS, 8, 256)), cache)
    total += cache.nbytes / 16 * LENGTH
    work = limits.work(decoder, ROWS, LENGTH, [], size)
    assert decoder.shape.tied and work.read == pytest.approx(total, rel=1e-12)


def transformers_flop(model, cached):
    """FLOP of transformers' model for one token after `cached` ones."""
    tokens_1L = torch.arange(2, cached + 3)[None]
    with torch.no_grad():
        past = model(tokens_1L[:, :cached], use_cache=True).past_key_values if cached else None
        with FlopCounterMode(display=False) as counter:
            model(tokens_1L[:, cached:], past_key_values=past, use_cache=True)
    return counter.get_total_flops()


@pytest.mark.parametrize("cached", [0, 7])
def test_arithmetic_of_a_dense_step_is_what_torch_counts(dense, cached):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(dense, attn_implementation="eager")
    decoder = unfreeze.load(dense, dtype="float32").decoder
    counted = transformers_flop(theirs, cached)
    assert limits.work(decoder, 1, cached + 1, [], 4).flop == counted
    assert limits.work(decoder, ROWS, cached + 1, [], 4).flop == ROWS * counted


def test_arithmetic_of_a_moe_step_is_what_torch_counts(moe):
    """Of one position: transformers expands keys and values, [H, n + r + v] wide, which is not the cache."""
    pytest.importorskip("transformers")
    theirs = deepseek(str(moe), "attention", "cpu", "float32").eval()
    theirs.set_attn_implementation("eager")
    decoder = unfreeze.load(moe, dtype="float32").decoder
    expanded = 3 * 2 * 4 * (16 + 16 + 16)
    counted = transformers_flop(theirs, 0) - expanded
    ours = limits.work(decoder, 1, 1.0, [2.0, 2.0], 4).flop - limits.attention(decoder.shape)
    assert ours == counted


def step_flop(decoder, length):
    """FLOP that torch counts in our own step of ROWS rows, after `length` tokens each."""
    cache = decoder.new_cache(ROWS, 32)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        decoder.prefill(batch_of(prompts_of(ROWS, length, 256)), cache)
        with FlopCounterMode(display=False) as counter:
            decoder.step(torch.arange(2, 2 + ROWS), cache)
    return counter.get_total_flops()


@pytest.mark.parametrize("family", ["moe", "dense"])
def test_arithmetic_of_attention_grows_as_in_our_own_step(tiny, family):
    """In float64 every op is plain torch. MLA's sums there run over the rotary columns too, which are dropped."""
    config = shapes.kimi() if family == "moe" else shapes.qwen("qwen3", shapes.QWEN3_06B)
    decoder = models.build(models.shape(config), dtype=torch.float64, device="cpu")
    models.initialize(decoder, seed=0)
    grown = step_flop(decoder, 12) - step_flop(decoder, 7)
    dropped = 2 * 2 * 4 * tiny["qk_rope_head_dim"] if family == "moe" else 0
    assert grown == 5 * ROWS * (limits.attention(decoder.shape) + dropped)


def test_arithmetic_of_adapters_is_what_peft_adds(dense):
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(dense, attn_implementation="eager")
    before = transformers_flop(theirs, 0)
    theirs = peft.get_peft_model(theirs, peft.LoraConfig(r=4, target_modules="all-linear"))
    decoder = unfreeze.load(dense, dtype="float32").decoder
    plain = limits.work(decoder, 1, 1.0, [], 4).flop
    attach(decoder, LoraConfig(rank=4), seed=0)
    assert limits.work(decoder, 1, 1.0, [], 4).flop - plain == transformers_flop(theirs, 0) - before


def test_the_experts_of_a_step_are_those_that_a_step_chose(moe):
    """The packed pass that counts them, against the counters of a prefill and a step."""
    decoder = unfreeze.load(moe, dtype="float32").decoder
    prompts = prompts_of(1, 9, 256) * 5  # rows that differ only where they are counted
    answers = [[index + 2, index + 3] for index in range(5)]
    cache = decoder.new_cache(5, 16)
    with torch.no_grad():
        decoder.prefill(batch_of(prompts), cache)
        for layer in decoder.moe_layers().values():
            layer.counts_E.zero_()
        decoder.step(torch.tensor([answer[0] for answer in answers]), cache)
    chosen = [int((layer.counts_E > 0).sum()) for layer in decoder.moe_layers().values()]
    assert limits.experts_read(decoder, prompts, answers) == chosen and max(chosen) > 2
    assert limits.experts_read(decoder, prompts[:1], answers[:1]) == [2.0, 2.0]
    assert all("choose" not in vars(layer.gate) for layer in decoder.moe_layers().values())


def test_only_the_end_of_a_long_prompt_is_routed(moe, monkeypatch):
    monkeypatch.setattr(limits, "CONTEXT", 4)
    decoder = unfreeze.load(moe, dtype="float32").decoder
    lengths = []
    hidden = decoder.hidden
    monkeypatch.setattr(decoder, "hidden", lambda batch: lengths.extend(batch.lengths()) or hidden(batch))
    limits.experts_read(decoder, prompts_of(2, 20, 256), [[2, 3, 4], [5, 6, 7]])
    assert lengths == [6, 6]


def test_the_read_rate_is_not_below_that_of_a_copy():
    """A copy reads as much and writes as much again."""
    nbytes = 2**26
    source = torch.ones(nbytes // 8, dtype=torch.int64)
    target, times = torch.empty_like(source), []
    for _ in range(5):
        started = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - started)
    assert max(limits.read_rate(nbytes, "cpu").values()) >= nbytes / min(times)


def test_the_buffer_does_not_fit_into_the_largest_cache(tmp_path):
    for index, size in enumerate(("32K", "1024K", "65536K")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(f"{size}\n")
    assert limits.buffer_bytes(tmp_path) == 16 * 2**26 and limits.buffer_bytes(tmp_path / "none") == 2**29


@pytest.mark.parametrize(
    "read, flop, limit, seconds", [(4e9, 1e12, "bytes", 2.0), (1e9, 9e12, "arithmetic", 3.0)]
)
def test_the_limit_is_the_longer_of_reading_and_arithmetic(read, flop, limit, seconds):
    entry = {"read_bytes": read, "flop": flop, "step_seconds": 6.0}
    stated = limits.limited(entry, {"read_rate": 2e9, "gemm_rate": 3e12})
    assert (stated["limit"], stated["limit_seconds"]) == (limit, seconds)
    assert stated["limit_share"] == pytest.approx(seconds / 6) and stated["read_rate"] == 2e9
