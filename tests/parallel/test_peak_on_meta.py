"""The plan against the bytes a step on a GPU holds at its worst moment, at true size: counted on meta by torch's
own dispatch, with the backend for CUDA and the kernels that are predicted there, which launch nothing. The table
also has the references, which run where a kernel fails its check. Two layers, rank 16, adapters everywhere;
weights, moments and the head's loss are left out on both sides. Routing is even, while the plan leaves a quarter
for the fullest group of experts.

    python tests/parallel/test_peak_on_meta.py --write docs/measured/peak.md
"""

import functools
import sys
from contextlib import nullcontext
from dataclasses import replace
from datetime import date
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import pytest
import torch

from benchmarks.harness.on_meta import as_on_an_h200
from benchmarks.harness.shapes import KIMI_K2 as KIMI
from unfreeze import models
from unfreeze.adapters import LoraConfig, attach, dora, pissa
from unfreeze.adapters import lora as low_rank
from unfreeze.core.batch import Batch
from unfreeze.core.layout import RESIDENT
from unfreeze.kernels import expert_mlp
from unfreeze.kernels.attention import DocumentLayout, Mask, sdpa
from unfreeze.kernels.expert_mlp import backend, release_scratch
from unfreeze.kernels.expert_mlp.grouped import Grouped
from unfreeze.kernels.expert_mlp.loop_cuda import LoopCuda
from unfreeze.kernels.packed_attention import flash_cuda, packed_attention
from unfreeze.models.blocks import experts as experts_block
from unfreeze.models.blocks.attention import attention_bytes
from unfreeze.models.blocks.bytes import AttentionShape, Bytes
from unfreeze.parallel.machine import Hardware
from unfreeze.parallel.plan import Work, measure_sizes, plan
from unfreeze.quant.int4 import Int4


class Attention(torch.autograd.Function):
    """The bytes of a flash kernel: output and log-sum-exp, in backward the float32 sum of dq, and dk and dv of
    each query head. On meta torch would hold all scores."""

    @staticmethod
    def forward(ctx, q, k, v):
        o = q.new_empty((*q.shape[:3], v.shape[3]))
        ctx.save_for_backward(q, k, v, o, torch.empty(q.shape[:3], device=q.device))
        return o

    @staticmethod
    def backward(ctx, grad):
        q, k, v, o, _ = ctx.saved_tensors
        dq, sum_of_dq = torch.empty_like(q), torch.empty_like(q, dtype=torch.float32)
        grouped = k.shape[2] != q.shape[2]
        of_heads = [torch.empty_like(q), torch.empty_like(o)] if grouped else []
        dk, dv = torch.empty_like(k), torch.empty_like(v)
        del of_heads, sum_of_dq
        return dq, dk, dv


def in_one_call(do, q, k, v, o, lse, documents):
    """The bytes of a flash kernel's backward for all documents: as Attention's, of equal widths."""
    dq, sum_of_dq = torch.empty_like(q), torch.empty_like(q, dtype=torch.float32)
    of_heads = [torch.empty_like(q), torch.empty_like(q)] if k.shape[1] != q.shape[1] else []
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    del of_heads, sum_of_dq
    return dq, dk, dv


SHARED = {"rms_norm_eps": 1e-6, "max_position_embeddings": 131072, "num_hidden_layers": 2}
DENSE = {"head_dim": 128, "num_key_value_heads": 8, "hidden_size": 4096, "num_attention_heads": 32, **SHARED}
KIMI_48, KIMI_384 = (
    {**KIMI, "n_routed_experts": experts, "num_hidden_layers": 2, "first_k_dense_replace": 0}
    for experts in (48, 384)
)
MODELS = {
    "Kimi-K2, 48 experts, INT4": KIMI_48,
    "Kimi-K2, 384 experts, INT4": KIMI_384,
    "Qwen3-30B-A3B": {
        **SHARED,
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
    },
    "Qwen2.5-7B": {
        **SHARED,
        "model_type": "qwen2",
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
    "Qwen3-8B": {**DENSE, "model_type": "qwen3", "vocab_size": 151936, "intermediate_size": 12288},
    "Llama-3.1-8B": {**DENSE, "model_type": "llama", "vocab_size": 128256, "intermediate_size": 14336},
}
OTHERS = {  # other blocks: fused projections, norms behind parts, windows, heads that differ, a plain MLP
    "Phi-4": {
        **SHARED,
        "model_type": "phi3",
        "vocab_size": 100352,
        "hidden_size": 5120,
        "intermediate_size": 17920,
        "num_attention_heads": 40,
        "num_key_value_heads": 10,
    },
    "OLMo-2-7B": {
        **SHARED,
        "model_type": "olmo2",
        "vocab_size": 100352,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_attention_heads": 32,
    },
    "Gemma-3-12B": {
        **SHARED,
        "model_type": "gemma3_text",
        "vocab_size": 262208,
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
    },
    "Gemma-3-4B, of narrower windows than its documents": {
        **SHARED,
        "model_type": "gemma3_text",
        "vocab_size": 262208,
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "sliding_window": 1024,
    },
    "Gemma-4-31B": {
        **SHARED,
        "model_type": "gemma4_text",
        "vocab_size": 262208,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "hidden_size_per_layer_input": 0,
        "sliding_window": 4096,
    },
    "Granite-3-8B": {**DENSE, "model_type": "granite", "vocab_size": 49152, "intermediate_size": 12800},
    "nanochat": {
        **SHARED,
        "model_type": "nanochat",
        "vocab_size": 65536,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_attention_heads": 16,
    },
}
LLAMA = {**DENSE, "base_model_type": "llama", "vocab_size": 128256, "intermediate_size": 14336}
OTHERS |= {
    f"Llama-3.1-8B with {part}": {
        **LLAMA,
        "model_type": "unfreeze_parts",
        "parts": [{"at": "layers.*", "part": part}],
    }
    for part in ("sandwich_norm", "branch_norm", "post_norm", "deep_norm")
}
CASES = [
    *(
        (name, tokens, recompute)
        for name in MODELS
        for tokens in (8192, 65536)
        for recompute in ("layers", "selective", "elementwise", "nothing")
    )
]
PLAIN = LoraConfig(rank=16)
pytestmark = pytest.mark.usefixtures("interpreted")


def peak(
    live: ModuleType,
    name: str,
    tokens: int,
    recompute: str,
    patch: pytest.MonkeyPatch,
    kernels: bool = True,
    by=Grouped,
    lora: LoraConfig = PLAIN,
) -> tuple[int, int]:
    """(counted, planned) bytes of a step but weights, adapter, moments and loss. by: the experts' backend."""
    release_scratch()
    with as_on_an_h200() if kernels else nullcontext():
        return _peak(live, name, tokens, recompute, patch, by, lora)


def _peak(
    live: ModuleType, name: str, tokens: int, recompute: str, patch: pytest.MonkeyPatch, by, lora: LoraConfig
) -> tuple[int, int]:
    config = (MODELS | OTHERS)[name]
    experts = config.get("n_routed_experts") or config.get("num_experts")
    fused = functools.partial(expert_mlp.fused_expert_mlp, backend=by())
    patch.setattr(
        experts_block,
        "expert_mlp",
        lambda x, ids, w, up, down, factors=None, impl="", reuse=None, **rest: fused(
            x, ids, w, up, down, factors, reuse=reuse, **rest
        ),
    )
    if experts:
        ends = [(e + 1) * tokens * 8 // experts for e in range(experts)]
        patch.setattr(backend.DeviceRouting, "ends", ends)
    patch.setattr(flash_cuda, "backward", in_one_call)
    patch.setattr(sdpa, "torch_attention", lambda q, k, v, scale: Attention.apply(q, k, v))
    for module in (low_rank.LowRank, low_rank.ExpertLowRank):
        patch.setattr(module, "reset", lambda *_: None)
    packed = "INT4" in name
    model = models.build(
        models.shape(config),
        dtype=torch.bfloat16,
        device="meta",
        codec_for=lambda part: Int4(32) if packed and ".experts." in part and "shared" not in part else None,
    )
    sizes = measure_sizes(model, lora, "cuda")
    attach(model, lora, 0, device="meta", restored=True)
    kinds = (torch.int64, torch.int64, torch.float32, torch.int64)
    batch = Batch(
        *(torch.empty(tokens, dtype=kind, device="meta") for kind in kinds), torch.arange(0, tokens, 2048)
    )
    watch = live.Live([*model.parameters(), *model.buffers()])
    with watch:
        model.hidden(batch, models.RECOMPUTE[recompute]).sum().backward()
    work = Work(tokens=tokens, rank=16, loss_rows=0, loss_bytes=0, longest=2048)
    terms = plan(
        sizes, RESIDENT.but(recompute=recompute), work, Hardware("cuda", "H200", 1, 2**40, 2**40)
    ).terms
    release_scratch()
    frozen = sum(start.A.nbytes + start.B.nbytes for _, start in pissa.starts(model))  # there from the start
    return watch.peak, sum(
        size for term, size in terms.items() if term not in ("base", "adapter", "optimizer")
    ) - frozen


@pytest.mark.parametrize(
    "name, tokens, recompute",
    [case for case in CASES if case[1] == 8192 or case[2] in ("layers", "selective")],
)
def test_the_plan_is_within_a_tenth_at_true_size(name, tokens, recompute, live, monkeypatch):
    counted, planned = peak(live, name, tokens, recompute, monkeypatch)
    assert 0.9 * counted <= planned <= 1.1 * counted


@pytest.mark.parametrize("recompute", ["layers", "nothing"])
@pytest.mark.parametrize("kind", ["dora", "pissa"])
def test_the_plan_holds_for_other_adapters(kind, recompute, live, monkeypatch):
    """DoRA keeps x (W + ΔW)ᵀ beside each output; a start joins its factors to twice the rank."""
    monkeypatch.setattr(sys.modules[attach.__module__], "_refuse_unread", lambda *_: None)
    monkeypatch.setattr(dora.Dora, "begin", lambda *_: None)
    monkeypatch.setattr(dora.Dora, "reset", lambda *_: None)
    more = {"dora": True} if kind == "dora" else {"start": "pissa"}
    lora = LoraConfig(rank=16, **more)
    counted, planned = peak(live, "Qwen3-8B", 8192, recompute, monkeypatch, lora=lora)
    assert 0.9 * counted <= planned <= 1.1 * counted
    plain = peak(live, "Qwen3-8B", 8192, recompute, monkeypatch)
    assert plain[0] < counted and plain[1] < planned


@pytest.mark.parametrize("name", ["Kimi-K2, 48 experts, INT4", "Qwen3-30B-A3B"])
def test_the_plan_holds_where_grouped_gemms_cannot_run(name, live, monkeypatch):
    """The loop of torch.mm computes in slabs what kernels do in one pass."""
    counted, planned = peak(live, name, 8192, "layers", monkeypatch, by=LoopCuda)
    assert 0.93 * counted <= planned <= 1.1 * counted


@pytest.mark.parametrize("recompute", ["layers", "elementwise", "nothing"])
@pytest.mark.parametrize("name", OTHERS)
def test_the_plan_holds_for_blocks_of_other_families(name, recompute, live, monkeypatch):
    counted, planned = peak(live, name, 8192, recompute, monkeypatch)
    assert 0.95 * counted <= planned <= 1.05 * counted


@pytest.mark.parametrize(
    "shape, sinks",
    [(AttentionShape(16, 16, 192, 128, None), False), (AttentionShape(64, 8, 64, 64, 128), True)],
    ids=["Kimi-K2", "gpt-oss"],
)
def test_attention_in_one_call_takes_what_its_block_counts(shape, sinks, live, monkeypatch):
    monkeypatch.setattr(flash_cuda, "backward", in_one_call)
    T, (H, G, d, v, window, *_) = 4096, shape
    leaves = [meta_leaf(T, H, d), meta_leaf(T, G, d), meta_leaf(T, G, v), *([meta_leaf(H)] if sinks else [])]
    layout = DocumentLayout.build([0, 300, 1500], T, "meta")
    with as_on_an_h200(), live.Live(leaves) as watch:
        o = packed_attention(*leaves[:3], layout, 0.1, Mask(window), None, *leaves[3:])
        torch.autograd.grad(o, leaves, torch.empty_like(o))
    counted = attention_bytes(shape._replace(one_call=True), torch.bfloat16, "cuda")
    given = sum(leaf.nbytes for leaf in leaves[:3])
    assert watch.peak == pytest.approx(T * counted.peak - given, rel=1e-3)


def meta_leaf(*size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.bfloat16, device="meta", requires_grad=True)


def test_the_sum_of_what_each_block_has_in_its_own_backward_is_too_much(live, monkeypatch):
    """Control: at the worst moment one block is in its backward, and of the others there is what they hold."""

    def all_at_once(self: Bytes, after: Bytes) -> Bytes:
        return replace(real(self, after), own=self.own + after.own)

    real = Bytes.__add__
    monkeypatch.setattr(Bytes, "__add__", all_at_once)
    counted, planned = peak(live, "Kimi-K2, 384 experts, INT4", 65536, "layers", monkeypatch)
    assert planned > 1.25 * counted


def test_references_take_more_than_the_kernels_the_plan_is_for(live, monkeypatch):
    """Control: SwiGLU's reference makes another tensor as wide as a dense MLP."""
    counted, planned = peak(live, "Qwen2.5-7B", 8192, "layers", monkeypatch, kernels=False)
    assert planned < 0.88 * counted


class Remembered(torch.autograd.Function):
    """The identity, which keeps its gradient: nobody may add to it in place."""

    kept: ClassVar[list[torch.Tensor]] = []

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        Remembered.kept.append(grad)
        return grad


@pytest.mark.parametrize("remembered", [False, True])
def test_what_is_counted_is_what_torch_allocates(remembered, live):
    """Autograd sums in place where nobody else has a gradient; without the allowance that is a tensor more."""
    from torch.profiler import ProfilerActivity, profile

    first, second = (torch.nn.Linear(1024, 8, bias=False).requires_grad_(False) for _ in range(2))
    x = torch.randn(2048, 1024, requires_grad=True)

    def step() -> None:
        h = x * 1
        (first(h) + second(Remembered.apply(h) if remembered else h)).sum().backward()
        Remembered.kept.clear()
        x.grad = None

    step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        step()
    now = most = 0
    for event in found.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    counts = []
    for allowing in (True, False):
        with live.Live([first.weight, second.weight, x], allowing) as watch:
            step()
        counts.append(watch.peak)
    assert abs(counts[0] - most) < 0.05 * x.nbytes
    assert counts[1] - counts[0] == (0 if remembered else x.nbytes)


def main() -> None:
    import live

    lines = [
        "# Planned peak compared with counted bytes at true size",
        "",
        f"`python tests/parallel/test_peak_on_meta.py --write docs/measured/peak.md`, {date.today()}, torch"
        f" {torch.__version__}. No GPU was used: a step of two layers runs on torch's meta device with the CUDA"
        " code, and every tensor is counted. Adapters of rank 16, bf16; without weights, moments and the head's loss.",
        "",
        "Kernels: those that run on a GPU without measurements, which the plan assumes. References: the references of"
        " all ops except the experts' products. A reference runs if its kernel fails the check at first use.",
        "",
        "| model | tokens | recompute | planned, GB | kernels, GB | planned / counted | references, GB |",
        "|---|---:|---|---:|---:|---:|---:|",
    ]
    for name, tokens, recompute in CASES:
        row = f"| {name} | {tokens:,} | {recompute} |"
        for kernels in (True, False):
            with pytest.MonkeyPatch.context() as patch:
                counted, planned = peak(live, name, tokens, recompute, patch, kernels)
            if kernels:
                row += f" {planned / 1e9:.2f} | {counted / 1e9:.2f} | {planned / counted:.3f} |"
            else:
                row += f" {counted / 1e9:.2f} |"
        lines.append(row)
        print(row, flush=True)
    if "--write" in sys.argv:
        Path(sys.argv[sys.argv.index("--write") + 1]).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
