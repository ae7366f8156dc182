"""The tensors of a GGUF: name, shape and type, and the rows that are written into each.

llama.cpp wants q's and k's rows of Llama and Mistral in another order, Gemma's norms as 1 + w, and experts
stacked with gate and up apart. Names are those of gguf's TensorNameMap. Vectors, norms and routers are
float32.

E experts, D model width, I expert width.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from unfreeze.compress.deltas import GATE, UP
from unfreeze.compress.gguf.families import Family, divisors
from unfreeze.compress.gguf.weights import Weights
from unfreeze.core.errors import ConfigError

BLOCK = 32  # weights of a row that share a scale in q8_0
_ROUTER = re.compile(r"blk\.\d+\.ffn_gate_inp(_shexp)?\.weight")
_LAYER = re.compile(r"layers\.(\d+)\.")


@dataclass(frozen=True)
class Planned:
    """A tensor to write.

    kind   "F32", "BF16" or "Q8_0"
    parts  float32 tensors whose rows, one below the other, are the tensor
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    parts: Callable[[], Iterator[Tensor]]


def planned(weights: Weights, family: Family, to: str) -> list[Planned]:
    """Every tensor of the file, in the model's order. to: "BF16" or "Q8_0"."""
    tensors: list[Planned] = []
    for parameter, shape in weights.parameters.items():
        site = next((site for site in weights.stacks if parameter.startswith(f"{site}.")), "")
        if site and parameter.endswith(".weight"):
            tensors += _experts(weights, family, site, parameter, to)
            continue
        disk = weights.disk_name(parameter)
        if site:
            tensors += _expert_biases(weights, parameter, shape)
            continue
        name = gguf_name(weights, family, parameter)
        _check_bias(name, disk, family)
        read = partial(_read, weights, family, parameter, name)
        if shape[0] == 1 and name.endswith("_shexp.weight"):
            shape = shape[1:]  # a gate of one row
        tensors.append(Planned(name, shape, kind_of(name, shape, to), read))
    if family.own_head and weights.shape.tied:
        embedding = next(tensor for tensor in tensors if tensor.name == "token_embd.weight")
        tensors.append(Planned("output.weight", embedding.shape, embedding.kind, embedding.parts))
    return [*_rope_tensors(weights, family), *tensors]


def kind_of(name: str, shape: tuple[int, ...], to: str) -> str:
    """The type of a tensor: rows that are no multiple of 32 stay BF16 in q8_0."""
    if (
        len(shape) == 1
        or name.endswith("_norm.weight")
        or not name.endswith(".weight")
        or _ROUTER.fullmatch(name)
    ):
        return "F32"
    return "BF16" if to == "Q8_0" and shape[-1] % BLOCK else to


def gguf_name(weights: Weights, family: Family, parameter: str) -> str:
    """gguf's name of a parameter. Raises ConfigError for one that llama.cpp does not have in this family."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    arch = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == family.arch)
    names = get_tensor_name_map(arch, weights.shape.num_layers)
    disk = weights.disk_name(parameter)
    for whole, part in (
        (r"(.*layers\.\d+\.).*e_score_correction_bias", "block_sparse_moe.e_score_correction.bias"),
        (r"(.*layers\.\d+\.)layer_scalar", "layer_scalar.weight"),
        (r"(.*)\.sinks", ".sinks.weight"),
    ):
        if match := re.fullmatch(whole, disk):
            disk = match[1] + part
    layer = _LAYER.search(disk)
    if disk.endswith(".router.scale") and layer:
        return f"blk.{layer[1]}.ffn_gate_inp.scale"
    if disk.endswith(".router.per_expert_scale") and layer:
        return f"blk.{layer[1]}.ffn_down_exps.scale"
    name = names.get_name(disk, try_suffixes=(".weight", ".bias"))
    if name is None:
        raise ConfigError(
            f"llama.cpp has no tensor for {disk} in this family", next="serve it here: unfreeze serve"
        )
    return name


def _check_bias(name: str, disk: str, family: Family) -> None:
    """Refuse a bias that llama.cpp does not read: it would refuse the file."""
    module = disk.split(".")[-2]
    fixed = {"q_proj", "k_proj", "v_proj", "e_score_correction_bias", "router", *family.biases}
    if name.endswith(".bias") and module not in fixed and "exp_probs" not in name:
        raise ConfigError(
            f"llama.cpp has no bias of {module} in {family.arch}, and {disk} is one",
            next="serve it here: unfreeze serve",
        )


def _read(weights: Weights, family: Family, parameter: str, name: str) -> Iterator[Tensor]:
    """A parameter as the file has it."""
    tensor, shape = weights.read(parameter), weights.shape
    if family.pairs and re.search(r"\.attn_[qk]\.", name):
        tensor = paired(tensor, shape.num_heads if ".attn_q." in name else shape.num_kv_heads)
    if family.one_plus and name.endswith("norm.weight"):
        tensor = tensor + 1
    yield tensor


def paired(rows: Tensor, heads: int) -> Tensor:
    """Rows [heads · 2 · half, …] in the order x0, x_half, x1, x_half+1, … of each head.

    llama.cpp rotates neighbours; transformers rotates x_i with x_(i+half).
    """
    return (
        rows.view(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
    )


def _experts(weights: Weights, family: Family, site: str, parameter: str, to: str) -> Iterator[Planned]:
    """A stack of experts' matrices, read one expert at a time. Gemma 4 keeps gate and up together."""
    owner, projection = weights.stacks[site], parameter.removesuffix(".weight").rpartition(".")[2]
    E, D, I = owner.num_experts, owner.hidden_size, owner.intermediate_size
    layer = _LAYER.search(parameter)
    assert layer is not None
    block = f"blk.{layer[1]}"

    def every(half: int | None) -> Iterator[Tensor]:
        for expert in range(E):
            whole = weights.expert(site, projection, expert)
            yield whole if half is None else owner.activation.split(whole, 0)[half]

    if projection == "down_proj":
        rows = {"ffn_down_exps": ((E, D, I), None)}
    elif family.arch == "gemma4":
        rows = {"ffn_gate_up_exps": ((E, 2 * I, D), None)}
    else:
        rows = {"ffn_gate_exps": ((E, I, D), GATE), "ffn_up_exps": ((E, I, D), UP)}
    for name, (shape, half) in rows.items():
        whole = f"{block}.{name}.weight"
        yield Planned(whole, shape, kind_of(whole, shape, to), partial(every, half))


def _expert_biases(weights: Weights, parameter: str, shape: tuple[int, ...]) -> Iterator[Planned]:
    """gpt-oss' biases [E, …] of gate and up, which alternate, and of down."""
    layer = _LAYER.search(parameter)
    assert layer is not None
    block = f"blk.{layer[1]}"

    def every(first: int, step: int) -> Iterator[Tensor]:
        yield weights.read(parameter)[:, first::step]

    if "down_proj" in parameter:
        yield Planned(f"{block}.ffn_down_exps.bias", shape, "F32", partial(every, 0, 1))
        return
    half = (shape[0], shape[1] // 2)
    yield Planned(f"{block}.ffn_gate_exps.bias", half, "F32", partial(every, 0, 2))
    yield Planned(f"{block}.ffn_up_exps.bias", half, "F32", partial(every, 1, 2))


def _rope_tensors(weights: Weights, family: Family) -> Iterator[Planned]:
    """Divisors of the rotary frequencies: llama3's, longrope's two sets, Gemma 4's still pairs."""
    rope = weights.shape.rope
    assert rope.computed is not None
    tables: dict[str, list[float] | tuple[float, ...]] = {}
    if rope.computed.kind == "llama3" or family.arch == "gemma4":
        tables["rope_freqs.weight"] = divisors(rope)
    if rope.computed.kind == "longrope":
        tables["rope_factors_long.weight"] = rope.computed.long
        tables["rope_factors_short.weight"] = rope.computed.divisors
    for name, numbers in tables.items():
        yield Planned(name, (len(numbers),), "F32", partial(_once, list(numbers)))


def _once(numbers: list[float]) -> Iterator[Tensor]:
    yield torch.tensor(numbers, dtype=torch.float32)
