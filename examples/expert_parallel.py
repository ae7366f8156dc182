"""Adapters on packed experts, with expert parallelism, in a training loop of one's own.

    torchrun --nproc-per-node 4 examples/expert_parallel.py --expert-parallel 2    # tiny-k2, on CPUs
    torchrun --nproc-per-node 8 examples/expert_parallel.py --expert-parallel 8 --model MODEL --data FILE

As engines such as torchtitan are built: a DeviceMesh with named dimensions, a model put onto it, torch's
optimizer, a plain loop. `--expert-parallel` neighbouring processes share one set of the packed experts, and
send each other the rows of tokens; the others work on other data. With the same settings its losses are those
of `unfreeze sft` in one process, within 1e-5 (tests/examples/test_trainers.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh

import unfreeze
from unfreeze import models
from unfreeze.adapters import LoraConfig, attach
from unfreeze.checkpoint import open_checkpoint
from unfreeze.data import Batches, check_vocab, encode_files, load_tokenizer
from unfreeze.generate.open import dtype_of, open_model
from unfreeze.objectives.cross_entropy import cross_entropy
from unfreeze.parallel.processes.collectives import Processes
from unfreeze.parallel.processes.gpus import local_device
from unfreeze.parallel.processes.mesh import Mesh, mesh_over

TINY_K2 = Path(unfreeze.__file__).parent / "assets" / "tiny-k2"


@dataclass(frozen=True)
class Config:
    expert_parallel: int = 1  # processes that share one set of experts
    model: str = str(TINY_K2)  # checkpoint folder, or Hugging Face id
    data: str = str(TINY_K2 / "yoda_train.jsonl")  # JSON Lines: messages, question/answer, …
    steps: int = 20
    tokens_per_step: int = 4096
    micro_batches: int = 4  # of all processes together; a multiple of their number
    rank: int = 16
    alpha: float = 32.0
    learning_rate: float = 1e-3
    clip: float = 1.0
    dtype: str = "float32"
    seed: int = 0


def sum_gradients(trained: dict[str, nn.Parameter], mesh: Mesh) -> Tensor:
    """Sum each gradient over the processes that hold the same parameter; return the norm of all gradients.

    An expert's gradient has the tokens of all its neighbours already, so it is summed over "data" only. A
    process whose tokens reached no expert of a layer takes part with zeros.
    """
    square = torch.zeros((), device=next(iter(trained.values())).device)  # nccl takes none of the host
    for name, parameter in trained.items():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        held = mesh.held(name)
        held.summed.sum_([parameter.grad])
        square += parameter.grad.square().sum() / held.copies
    mesh.all.sum_([square])
    return square.sqrt()


def main(config: Config) -> None:
    device = local_device(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda":
        torch.cuda.set_device(device)
        distributed.init_process_group("nccl", device_id=device)
    else:
        distributed.init_process_group("gloo")
    size = distributed.get_world_size()

    # The mesh, with n = expert_parallel: process r has index r % n among its neighbours, r // n among copies
    # of them.
    dimensions = (size // config.expert_parallel, config.expert_parallel)
    devices = init_device_mesh(device.type, dimensions, mesh_dim_names=("data", "experts"))
    manifest = open_checkpoint(config.model)
    shape = models.shape(manifest.config)
    mesh = mesh_over(devices, Processes(device), shape.num_experts)

    # The model: this process reads its experts only, and a share of the rest, which it sends to the others.
    # Then adapters, which start alike wherever an expert is held.
    decoder = open_model(manifest, dtype_of(config.dtype), device, mesh=mesh)
    attach(decoder, LoraConfig(rank=config.rank, alpha=config.alpha), config.seed)
    trained = {name: p for name, p in decoder.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), config.learning_rate, (0.9, 0.95), weight_decay=0.0)

    # Data: whole documents end to end, no padding. Every process draws the same micro-batches.
    tokenizer, tokens = load_tokenizer(manifest.path), config.tokens_per_step // config.micro_batches
    check_vocab(tokenizer, shape.vocab_size)
    examples = encode_files([config.data], tokenizer, min(shape.max_positions, tokens)).examples
    batches = Batches(examples, tokens, config.seed, micro_batches=config.micro_batches)

    for step in range(config.steps):
        drawn, _ = next(batches)
        # One count for all micro-batches of all processes, known to each: a mean per micro-batch would weigh
        # a token of a short one more. Every process takes as many micro-batches: a pass exchanges rows.
        count = max(sum(float(batch.weights_T.sum()) for batch in drawn), 1.0)
        total = torch.zeros((), device=device)
        for batch in drawn[distributed.get_rank() :: size]:
            on_device = batch.to(device)
            hidden_TD = decoder.hidden(on_device, models.RECOMPUTE["layers"])
            loss = cross_entropy(hidden_TD, decoder.lm_head, on_device).sum / count
            loss.backward()
            total += loss.detach()
        norm = sum_gradients(trained, mesh)
        for parameter in trained.values():
            assert parameter.grad is not None
            parameter.grad *= min(1.0, config.clip / (float(norm) + 1e-6))
        optimizer.step()
        optimizer.zero_grad()
        mesh.all.sum_([total])
        if mesh.all.rank == 0:
            print(
                f"step {step + 1}/{config.steps}  loss {float(total):.7f}  norm {float(norm):.5f}", flush=True
            )

    distributed.destroy_process_group()


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
