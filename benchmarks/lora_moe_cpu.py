"""LoRA on every expert of a Kimi-format INT4 checkpoint: unfreeze beside transformers + peft, in one run, step by step in turn.

    python benchmarks/lora_moe_cpu.py --append benchmarks/results/cpu.jsonl

The checkpoint is random, in Kimi-K2-Thinking's on-disk format: hidden 1024, 8 layers, 128 experts, top-8, expert width 512, vocabulary 8192,
0.9 GB. Job: LoRA rank 8 on the five attention projections and all routed experts, bf16, AdamW, 2,048 tokens per step (4 documents of 512).
Each side is its own process, loads the checkpoint, warms up, then they step in turn (A B A B …), so that drift of the machine hits both.
Reported: tokens/s from the median step, peak resident memory over loading and over training, and the ratios. Peers: `peft-experts` (experts
through target_parameters), `peft-experts-checkpointing`, `peft-attention` (experts untrained, eager experts: their fastest).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

SIZE = {
    "hidden_size": 1024, "num_hidden_layers": 8, "n_routed_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
    "intermediate_size": 2560, "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": 384, "kv_lora_rank": 128,
    "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64, "vocab_size": 8192,
}  # fmt: skip
CONFIG = {
    **SIZE, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 0, "eos_token_id": 1, "first_k_dense_replace": 1, "hidden_act": "silu", "initializer_range": 0.02,
    "max_position_embeddings": 262144, "moe_layer_freq": 1, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "norm_topk_prob": True,
    "num_nextn_predict_layers": 0, "rms_norm_eps": 1e-5, "rope_theta": 50000.0, "routed_scaling_factor": 2.827, "scoring_func": "sigmoid",
    "tie_word_embeddings": False, "topk_method": "noaux_tc", "torch_dtype": "bfloat16",
    "rope_scaling": {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 64.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                     "original_max_position_embeddings": 4096, "type": "yarn"},
    "quantization_config": {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed", "kv_cache_scheme": None,
        "config_groups": {"group_0": {"targets": ["Linear"], "input_activations": None, "output_activations": None, "weights": {
            "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "dynamic": False, "actorder": None,
            "block_structure": None, "observer": "minmax", "observer_kwargs": {}}}},
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]},
}  # fmt: skip
ATTENTION = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
DOCUMENTS, LENGTH = 4, 512


def make_checkpoint(folder: Path) -> None:
    """Random weights with the spread of a trained model's; experts quantized on Kimi's grid. Written once, then reused."""
    from unfreeze import models
    from unfreeze.checkpoint import save_checkpoint
    from unfreeze.checkpoint.keymap import disk_tensors
    from unfreeze.quant import Int4

    shape, codec = models.shape(CONFIG), Int4(group_size=32)
    generator = torch.Generator().manual_seed(0)

    def parameters():
        for name, tensor in models.build(shape, dtype=torch.bfloat16, device="meta").state_dict().items():
            noise = torch.randn(tensor.shape, generator=generator)
            if name.endswith("e_score_correction_bias"):
                yield name, noise * 0.05
            elif tensor.dim() == 1:
                yield name, (1 + 0.05 * noise).bfloat16()
            elif ".experts." in name:
                parts = codec.quantize(noise / math.sqrt(tensor.shape[-1]))
                yield from ((f"{name.removesuffix('.weight')}.{suffix}", part) for suffix, part in parts.items())
            else:
                yield name, (noise if "embed" in name else noise / math.sqrt(tensor.shape[-1])).bfloat16()

    folder.mkdir(parents=True, exist_ok=True)
    save_checkpoint(folder, CONFIG, disk_tensors(parameters(), models.rules(shape), codec), max_shard_bytes=200 * 2**20)


def unfreeze_step(checkpoint: Path, side: str):
    """Our side of the job: one function that does forward, backward and AdamW on [DOCUMENTS, LENGTH] tokens and gives the loss."""
    from unfreeze import models
    from unfreeze.adapters import LoraConfig, attach
    from unfreeze.checkpoint import open_checkpoint
    from unfreeze.core.batch import Batch
    from unfreeze.generate.model import open_model
    from unfreeze.objectives.cross_entropy import cross_entropy

    model = open_model(open_checkpoint(checkpoint), dtype=torch.bfloat16, device="cpu")
    targets = ("attention",) if side == "unfreeze-attention" else ("attention", "experts")
    attach(model, LoraConfig(rank=8, alpha=16, targets=targets), seed=0)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-4, fused=True)
    starts, positions = torch.arange(DOCUMENTS) * LENGTH, torch.arange(LENGTH).repeat(DOCUMENTS)
    through = models.THROUGH[{"unfreeze-keep": "nothing", "unfreeze-layers": "layers"}.get(side, "selective")]

    def step(tokens_BS: torch.Tensor) -> float:
        weights = torch.ones(DOCUMENTS, LENGTH)
        weights[:, -1] = 0
        batch = Batch(tokens_BS.flatten(), tokens_BS.roll(-1, 1).flatten(), weights.flatten(), positions, starts)
        loss = cross_entropy(model.hidden(batch, through), model.lm_head, batch)
        (loss.sum / loss.count).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.sum.detach()) / loss.count

    return step, sum(p.numel() for p in trained)


def peft_step(checkpoint: Path, side: str):
    """The peer's side: transformers + peft as their documentation says, experts through target_parameters."""
    import transformers
    from peft import LoraConfig, get_peft_model

    transformers.utils.logging.set_verbosity_error()
    options = {"experts_implementation": "eager"} if side == "peft-attention" else {}
    model = transformers.DeepseekV3ForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16, **options)
    model.requires_grad_(False)
    experts = [] if side == "peft-attention" else ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.0, target_modules=list(ATTENTION), target_parameters=experts or None)
    if side.endswith("checkpointing"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model = get_peft_model(model, config)
    model.train()
    if side.endswith("checkpointing"):
        model.enable_input_require_grads()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-4)

    def step(tokens_BS: torch.Tensor) -> float:
        loss = model(input_ids=tokens_BS, labels=tokens_BS, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step, sum(p.numel() for p in trained)


def memory(field: str) -> int:
    """VmHWM (peak) or VmRSS (now) of this process in bytes."""
    found = re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0


def worker(side: str, checkpoint: Path) -> None:
    """One side in its own process: says when it is loaded, then does a step per line on stdin."""
    torch.set_num_threads(os.cpu_count() or 1)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print goes to stderr; stdout carries the protocol
    started = time.perf_counter()
    step, trained = (unfreeze_step if side.startswith("unfreeze") else peft_step)(checkpoint, side)
    print(json.dumps({"load_seconds": time.perf_counter() - started, "load_peak": memory("VmHWM"), "trained": trained}), file=out, flush=True)
    Path("/proc/self/clear_refs").write_text("5")  # restart the peak at the current resident size
    generator = torch.Generator().manual_seed(0)
    for _ in sys.stdin:
        tokens_BS = torch.randint(2, SIZE["vocab_size"], (DOCUMENTS, LENGTH), generator=generator)
        started = time.perf_counter()
        loss = step(tokens_BS)
        result = {"seconds": time.perf_counter() - started, "loss": loss, "peak": memory("VmHWM"), "resident": memory("VmRSS")}
        print(json.dumps(result), file=out, flush=True)


class Side:
    """A worker process and what it has measured."""

    def __init__(self, name: str, checkpoint: Path):
        self.name, self.steps = name, []
        command = [sys.executable, __file__, "--worker", name, "--checkpoint", str(checkpoint)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.loaded = self._read()

    def _read(self) -> dict:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended with code {self.process.wait()}")
        return json.loads(line)

    def step(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        self.steps.append(self._read())

    def row(self, warmup: int) -> dict:
        seconds = [s["seconds"] for s in self.steps[warmup:]]
        tokens = DOCUMENTS * LENGTH
        resident = [s["resident"] for s in self.steps]
        return {
            "side": self.name, "tokens_per_second": round(tokens / statistics.median(seconds), 1),
            "fastest": round(tokens / min(seconds), 1), "slowest": round(tokens / max(seconds), 1), "steps": len(seconds),
            "train_peak_bytes": max(s["peak"] for s in self.steps), "load_peak_bytes": self.loaded["load_peak"],
            "load_seconds": round(self.loaded["load_seconds"], 2), "trained_parameters": self.loaded["trained"],
            "resident_after_step_2": resident[1] if len(resident) > 1 else None, "resident_last": resident[-1],
            "loss_first": self.steps[0]["loss"], "loss_last": self.steps[-1]["loss"],
        }  # fmt: skip


def machine() -> dict:
    """CPU name, cores and library versions, so that a row can be read later."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    name = re.search(r"model name\s*:\s*(.*)", info)
    family = re.search(r"cpu family\s*:\s*(\d+)", info)
    model = re.search(r"model\s*:\s*(\d+)", info)
    cpu = f"{name[1]} family {family[1]} model {model[1]}" if name and family and model else platform.processor()
    versions = {m: __import__(m).__version__ for m in ("torch", "transformers", "peft")}
    return {"cpu": cpu, "cores": os.cpu_count(), "python": platform.python_version(), **versions}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, help="where the random checkpoint is, or is made; default: a temporary folder")
    parser.add_argument("--sides", nargs="+", default=["unfreeze", "peft-experts"])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--append", type=Path, help="append the rows to this .jsonl")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return worker(arguments.worker, arguments.checkpoint)
    folder = arguments.checkpoint or Path(tempfile.mkdtemp(prefix="lora-moe-"))
    if not (folder / "config.json").exists():
        make_checkpoint(folder)
    sides = [Side(name, folder) for name in arguments.sides]
    for _ in range(arguments.warmup + arguments.steps):
        for side in sides:
            side.step()
    rows = [side.row(arguments.warmup) for side in sides]
    stamp = {"benchmark": "lora_moe_cpu", "date": time.strftime("%Y-%m-%d"), "machine": machine(), "shape": SIZE, "rank": 8}
    for row in rows:
        ratio = rows[0]["tokens_per_second"] / row["tokens_per_second"]
        share = rows[0]["train_peak_bytes"] / row["train_peak_bytes"]
        print(
            f"{row['side']:28} {row['tokens_per_second']:8.1f} tokens/s   train peak {row['train_peak_bytes'] / 1e9:6.2f} GB   "
            f"load peak {row['load_peak_bytes'] / 1e9:6.2f} GB   {rows[0]['side']} is {ratio:.2f} x as fast at {share:.2f} of the memory"
        )
        if arguments.append:
            arguments.append.parent.mkdir(parents=True, exist_ok=True)
            with arguments.append.open("a") as file:
                file.write(json.dumps({**stamp, **row, "ratio_to_first": round(ratio, 3)}) + "\n")
    if arguments.checkpoint is None:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
