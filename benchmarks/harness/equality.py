"""Runs on several processes, and how far the result of each is from a run on one process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.harness.sides import python_path
from unfreeze import models
from unfreeze.adapters import LoraConfig, attach
from unfreeze.checkpoint import open_checkpoint, save_checkpoint
from unfreeze.checkpoint.save import write_safetensors
from unfreeze.core.batch import Batch
from unfreeze.core.errors import UserError
from unfreeze.core.layout import RESIDENT
from unfreeze.data import Example, pack
from unfreeze.generate.open import open_model, open_sharded
from unfreeze.models import Decoder
from unfreeze.models.blocks.experts import Experts
from unfreeze.models.publish import published
from unfreeze.objectives.cross_entropy import cross_entropy
from unfreeze.parallel.processes.collectives import open_group
from unfreeze.parallel.processes.mesh import ONE, Mesh, mesh_of
from unfreeze.train.optim import AdamW
from unfreeze.train.step import forward_backward, optim_step

LORA: dict[str, Any] = {"rank": 4, "alpha": 8.0, "targets": ("all-linear",)}
MICRO_BATCHES = 4
LONGEST = 300.0  # seconds after which an arm counts as hanging
COLUMNS = ("expert op", "y", "expert gradients", "gradients", "losses")


@dataclass(frozen=True)
class Arm:
    """A run: its processes, how many of them share one set of experts, and the places of the weights.

    experts  place of the experts
    rest     place of all other weights

    train    "all": every weight, sharded over several processes (FSDP2)
    """

    name: str
    processes: int
    split: int = 1
    experts: Literal["device", "disk"] = "device"
    rest: Literal["device", "peers"] = "device"
    train: Literal["adapters", "all"] = "adapters"


def run_arm(arm: Arm, job: Mapping[str, Any], folder: Path) -> float:
    """Start the arm's processes and wait. -> seconds. The tensors of each are in folder/<arm>-<rank>."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "PYTHONPATH": python_path(),
        "WORLD_SIZE": str(arm.processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": str(job["threads"]),
    }
    request = json.dumps({"arm": asdict(arm), "folder": str(folder), **job})
    started = time.perf_counter()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import side; side({request!r})"],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(arm.processes)
    ]
    try:
        errors = [process.communicate(timeout=LONGEST)[1] for process in processes]
    except subprocess.TimeoutExpired:
        raise UserError(f"{arm.name}: no answer after {LONGEST:.0f} s", next="report it") from None
    finally:
        for process in processes:
            process.kill()
    failed = [error for process, error in zip(processes, errors, strict=True) if process.returncode]
    if failed:
        raise UserError(f"{arm.name}: a process ended with {failed[0][-800:]}", next="report it")
    return time.perf_counter() - started


def side(request: str) -> None:
    """Train as one process of an arm; write the y, gradients and losses of this process to its file."""
    job = json.loads(request)
    arm = Arm(**job["arm"])
    torch.set_num_threads(job["threads"])
    with open_group(torch.device("cpu")) as group:
        manifest = open_checkpoint(job["model"])
        mesh = mesh_of(group, arm.split, models.shape(manifest.config).num_experts)
        held, tensors = mesh.held, dict[str, torch.Tensor]()
        if arm.train == "all":
            if group.size == 1:
                model = open_model(manifest, torch.float32)
            else:
                model, sharded = open_sharded(manifest, group, torch.float32, "cpu")
                held = sharded.held
        else:
            model = open_model(
                manifest, torch.float32, mesh=mesh, layout=RESIDENT.but(experts=arm.experts, rest=arm.rest)
            )
            adapted(model, mesh)
            tensors["op"] = torch.tensor(op_apart(model, mesh, job["model"]))
        steps = [drawn(model.shape.vocab_size, job["length"], step) for step in range(job["steps"])]
        optimizer, losses = AdamW(model, held=held), list[float]()  # before a pass: it gathers the head
        with torch.no_grad():
            for index in group.share(range(MICRO_BATCHES)):
                tensors[f"y.{index}"] = model.hidden(steps[0][index])
        for step, batches in enumerate(steps):
            gradients = forward_backward(
                model, optimizer, batches, cross_entropy, recompute=models.keep_inputs, group=group
            )
            losses.append(gradients.loss)
            for name in optimizer.parameters if step == 0 else ():
                if (gradient := optimizer.gradient(name)) is not None:
                    tensors[f"gradient.{name}"] = gradient.clone()
                    if (rows := held(name).rows) is not None:
                        tensors[f"rows.{name}"] = torch.tensor([rows.first, rows.last])
            optim_step(optimizer, gradients, learning_rate=1e-3, max_norm=1.0)
        tensors["losses"] = torch.tensor(losses, dtype=torch.float64)
        write_safetensors(Path(job["folder"]) / f"{arm.name}-{group.rank}", tensors)


def unpacked(model: str, folder: Path) -> None:
    """Write a checkpoint of the model's shape with random float32 weights, because codes cannot train."""
    config = {name: of for name, of in open_checkpoint(model).config.items() if name != "quantization_config"}
    config |= {"dtype": "float32"}
    random_model = models.build(models.shape(config), dtype=torch.float32, device="cpu")
    models.initialize(random_model, 0)
    save_checkpoint(folder, config, published(random_model, config))


def op_apart(model: Decoder, mesh: Mesh, path: str, tokens: int = 96) -> float:
    """The largest difference between this process's part of the expert op and the op with all experts here.

    Each process that shares experts has `tokens` tokens; the op with all experts gets the tokens of all.
    """
    whole = open_model(open_checkpoint(path), torch.float32)
    adapted(whole, ONE)
    layer, moe = next(iter(whole.moe_layers().items()))
    size, width = mesh.experts.size * tokens, moe.experts.hidden_size
    generator = torch.Generator().manual_seed(3)
    x, dy = (torch.randn(size, width, generator=generator) for _ in range(2))
    scores = torch.randn(size, moe.experts.num_experts, generator=generator)
    scores[:, 0] += 4  # an expert of many tokens, and one of none
    scores[:, 3] -= 100
    weights, ids = scores.softmax(-1).topk(moe.gate.top_k)
    mine = slice(mesh.experts.rank * tokens, (mesh.experts.rank + 1) * tokens)
    rows = moe.experts.held.slice if mesh.rows is None else mesh.rows.slice

    def through(experts: Experts, part: slice) -> tuple[list[Tensor], list[Tensor]]:
        x_TD, weights_TK = x[part].clone().requires_grad_(), weights[part].clone().requires_grad_()
        y_TD = experts(x_TD, ids[part], weights_TK)
        parameters = [p for name, p in experts.named_parameters() if name.startswith("adapter.")]
        gradients = torch.autograd.grad(y_TD, [x_TD, weights_TK, *parameters], dy[part])
        return [y_TD.detach(), *gradients[:2]], list(gradients[2:])

    of_tokens, of_experts = through(moe.experts, slice(None))
    actual = through(model.moe_layers()[layer].experts, mine)
    expected = [t[mine] for t in of_tokens] + [t[rows] for t in of_experts]
    return max(apart(a, b) for a, b in zip([*actual[0], *actual[1]], expected, strict=True))


def apart(actual: Tensor, expected: Tensor) -> float:
    """|actual - expected| / |expected|; 0 only if they are bit-identical."""
    return float((actual - expected).norm() / expected.norm().clamp_min(1e-30))


def adapted(model: Decoder, mesh: Mesh) -> None:
    """Attach adapters with nonzero B, the same on every process."""
    attach(model, LoraConfig(**LORA), 0)
    for name, parameter in model.named_parameters():
        if name.endswith(("_B", ".B")):
            rows = mesh.held(name).rows
            shape = (len(parameter) if rows is None else rows.of, *parameter.shape[1:])
            whole = 0.02 * torch.randn(shape, generator=torch.Generator().manual_seed(len(name)))
            parameter.data.copy_(whole if rows is None else whole[rows.slice])


def drawn(vocabulary: int, length: int, step: int) -> list[Batch]:
    """The micro-batches of a step: documents of unequal length; one of the batches is a single short one."""
    generator = torch.Generator().manual_seed(step)
    micro_batches: list[Batch] = []
    for index in range(MICRO_BATCHES):
        lengths = [length // 4] if index == 1 else [length, length // 2 + index]
        documents = [torch.randint(0, vocabulary, (n,), generator=generator).tolist() for n in lengths]
        micro_batches.append(
            pack([Example(tokens, [0.0, *[1.0] * (len(tokens) - 1)]) for tokens in documents])
        )
    return micro_batches


def worst(folder: Path, arm: Arm, first: Arm) -> dict[str, float | str]:
    """COLUMNS -> the largest relative difference of any process from the first arm's single process.

    rows.NAME says which rows of a tensor a process has; tensors without it are whole.
    """
    expected = load_file(folder / f"{first.name}-0")
    differences: dict[str, float] = {
        name: 0.0 for name in COLUMNS if arm.train == "adapters" or name != COLUMNS[0]
    }
    for rank in range(arm.processes):
        tensors = load_file(folder / f"{arm.name}-{rank}")
        if "op" in tensors:
            differences["expert op"] = max(differences["expert op"], float(tensors.pop("op")))
        rows = {
            name: slice(*tensors.pop(name).tolist()) for name in list(tensors) if name.startswith("rows.")
        }
        for name, tensor in tensors.items():
            other = expected[name]
            if (part := rows.get(name.replace("gradient.", "rows.", 1))) is not None:
                other = other[part]
            if name == "losses":
                differences["losses"] = max(
                    differences["losses"], float(((tensor - other) / other).abs().max())
                )
                continue
            difference = apart(tensor, other)
            columns = ["y"] if name.startswith("y.") else ["gradients"]
            columns += ["expert gradients"] if ".experts." in name else []
            for column in columns:
                differences[column] = max(differences[column], difference)
    return {**differences}


def shown(value: Any) -> str:
    return "–" if value is None else "equal" if value == 0 else f"{value:.1e}"
