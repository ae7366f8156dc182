"""The plan against the bytes a step on a GPU holds at its worst moment, at true size: counted on meta by torch's
own dispatch, with the backend for CUDA and the references of the other ops; the table also has the kernels that
are predicted there, which launch nothing. Two layers, rank 16, adapters everywhere; weights, moments and the head's loss are left out on both sides. Routing is even, while the plan
leaves a quarter for the fullest group of experts.

    python tests/parallel/test_peak_on_meta.py --write docs/peak.md
"""

import functools
import sys
import weakref
from datetime import date
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from unfreeze import models
from unfreeze.adapters import LoraConfig, attach
from unfreeze.adapters import lora as low_rank
from unfreeze.bench.kimi_slice import KIMI
from unfreeze.core.batch import Batch
from unfreeze.kernels import expert_mlp
from unfreeze.kernels.attention import sdpa
from unfreeze.kernels.choice import choose as choosing
from unfreeze.kernels.choice import predicted
from unfreeze.kernels.expert_mlp import backend, release_scratch
from unfreeze.kernels.expert_mlp.grouped import Grouped
from unfreeze.models.blocks import experts as experts_block
from unfreeze.parallel.machine import Hardware
from unfreeze.parallel.plan import Work, measure, plan
from unfreeze.quant.int4 import Int4


class Attention(torch.autograd.Function):
    """The bytes of a flash kernel: output and log-sum-exp. On meta torch would hold all scores."""

    @staticmethod
    def forward(ctx, q, k, v):
        o = q.new_empty((*q.shape[:3], v.shape[3]))
        ctx.save_for_backward(q, k, v, o, torch.empty(q.shape[:3], device=q.device))
        return o

    @staticmethod
    def backward(ctx, grad):
        q, k, v, _, _ = ctx.saved_tensors
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


class Peak(TorchDispatchMode):
    """Bytes of all storages that live, and the most there ever were."""

    def __init__(self, there):
        super().__init__()
        self.now = self.peak = 0
        self.live = {tensor.untyped_storage()._cdata: 0 for tensor in there}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                self.count(tensor.untyped_storage())
        return out

    def count(self, storage):
        key = storage._cdata
        if key not in self.live:
            self.live[key] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.gone, key)

    def gone(self, key):
        self.now -= self.live.pop(key, 0)


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
CASES = [
    *(
        (name, tokens, recompute)
        for name in MODELS
        for tokens in (8192, 65536)
        for recompute in ("layers", "selective")
    )
]


def as_on_an_h200(patch: pytest.MonkeyPatch) -> None:
    """Kernels are chosen for tensors on meta as on an H200 that nobody measured; they launch nothing."""
    for module in ("triton.runtime.jit", "triton.runtime.interpreter"):
        pytest.importorskip(module)
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    patch.setenv("TRITON_INTERPRET", "0")
    for kernel in (JITFunction, InterpretedFunction):
        patch.setattr(kernel, "run", lambda *_, **__: None)
    patch.setattr(predicted, "wrong", lambda *_: "")
    patch.setattr(choosing, "_CHOSEN", {})
    patch.setattr(choosing, "_WRONG", {})
    patch.setattr(choosing, "device_key", lambda device: "nvidia-h200")
    patch.setattr(choosing, "speaking_for", lambda *_: ("nvidia-h200", []))
    real = choosing._choose

    def on_cuda(op, device, dtype, bucket, impl):
        return real(op, torch.device("cuda", 0) if device.type == "meta" else device, dtype, bucket, impl)

    patch.setattr(choosing, "_choose", on_cuda)


def peak(
    name: str, tokens: int, recompute: str, patch: pytest.MonkeyPatch, kernels: bool = False
) -> tuple[int, int]:
    """(counted, planned) bytes of a step but weights, adapter, moments and loss."""
    release_scratch()
    if kernels:
        as_on_an_h200(patch)
    config = MODELS[name]
    experts = config.get("n_routed_experts") or config.get("num_experts")
    fused = functools.partial(expert_mlp.fused_expert_mlp, backend=Grouped())
    patch.setattr(
        experts_block,
        "expert_mlp",
        lambda x, ids, w, up, down, factors=None, impl="", reuse=None: fused(
            x, ids, w, up, down, factors, reuse=reuse
        ),
    )
    if experts:
        ends = [(e + 1) * tokens * 8 // experts for e in range(experts)]
        patch.setattr(backend.DeviceRouting, "ends", ends)
    patch.setattr(sdpa, "torch_attention", lambda q, k, v, scale: Attention.apply(q, k, v))
    for module in (low_rank.LowRank, low_rank.ExpertLowRank):
        patch.setattr(module, "reset", lambda *_: None)
    packed = "INT4" in name
    model = models.build(
        models.shape(config),
        dtype=torch.bfloat16,
        device="meta",
        codec=Int4(32) if packed else None,
        packed=lambda part: packed and ".experts." in part and "shared" not in part,
    )
    lora = LoraConfig(rank=16)
    sizes = measure(model, lora, "cuda")
    attach(model, lora, 0, device="meta")
    kinds = (torch.int64, torch.int64, torch.float32, torch.int64)
    batch = Batch(
        *(torch.empty(tokens, dtype=kind, device="meta") for kind in kinds), torch.arange(0, tokens, 2048)
    )
    watch = Peak([*model.parameters(), *model.buffers()])
    with watch:
        model.hidden(batch, models.RECOMPUTE[recompute]).sum().backward()
    work = Work(tokens=tokens, rank=16, recompute=recompute, loss_rows=0, loss_bytes=0, longest=2048)
    terms = plan(sizes, work, Hardware("cuda", "H200", 1, 2**40, 2**40)).terms
    release_scratch()
    return watch.peak, sum(
        size for term, size in terms.items() if term not in ("base", "adapter", "optimizer")
    )


# The plan adds what every block holds in its own backward; counted is the worst moment, the MLP's backward. Of
# attention and the norms only what they keep is alive then: too much is planned where experts come in groups. Of
# Qwen2.5-7B's wide MLP, SwiGLU's reference makes two temporaries that the plan doesn't count: 0.86.
MISSED = (
    *(("Qwen2.5-7B", tokens, recompute) for tokens in (8192, 65536) for recompute in ("layers", "selective")),
    *(("Kimi-K2, 384 experts, INT4", 65536, recompute) for recompute in ("layers", "selective")),
    ("Kimi-K2, 384 experts, INT4", 8192, "selective"),
)


@pytest.mark.parametrize(
    "name, tokens, recompute",
    [
        pytest.param(
            *case, marks=pytest.mark.xfail(strict=True, reason="the plan misses by more than a tenth")
        )
        if case in MISSED
        else case
        for case in CASES
    ],
)
def test_the_plan_is_within_a_tenth_at_true_size(name, tokens, recompute, monkeypatch):
    counted, planned = peak(name, tokens, recompute, monkeypatch)
    assert 0.9 * counted <= planned <= 1.1 * counted


def main() -> None:
    lines = [
        "# The plan against counted bytes at true size",
        "",
        f"`python tests/parallel/test_peak_on_meta.py --write docs/peak.md`, {date.today()}, torch"
        f" {torch.__version__}. No GPU was used: a step of two layers on torch's meta device with the code of CUDA,"
        " every tensor counted. Adapters of rank 16, bf16; without weights, moments and the head's loss.",
        "References: of all ops but the experts' products. Kernels: those that run on a GPU nobody measured; they"
        " make fewer temporaries, so the plan asks for more than they need. Where experts come in groups it asks for a"
        " third too much: it adds what attention and the norms hold in their own backward to what the experts hold"
        " in theirs.",
        "",
        "| model | tokens | recompute | planned, GB | references, GB | planned / counted | kernels, GB |"
        " planned / counted |",
        "|---|---:|---|---:|---:|---:|---:|---:|",
    ]
    for name, tokens, recompute in CASES:
        row = f"| {name} | {tokens:,} | {recompute} |"
        for kernels in (False, True):
            with pytest.MonkeyPatch.context() as patch:
                counted, planned = peak(name, tokens, recompute, patch, kernels)
            row += "" if kernels else f" {planned / 1e9:.2f} |"
            row += f" {counted / 1e9:.2f} | {planned / counted:.3f} |"
        lines.append(row)
        print(row, flush=True)
    if "--write" in sys.argv:
        Path(sys.argv[sys.argv.index("--write") + 1]).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
