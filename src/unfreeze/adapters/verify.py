"""Proof after every save: the file holds the same ΔW as the model, per expert and per linear layer.

The file is read again, with separate arithmetic (docs/why/trust.md R5). It shares no decoding with read.py:
the same error in writing and reading would cancel there, but shows here.

E experts, R rank, N probe vectors.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unfreeze.adapters.attach import sites
from unfreeze.adapters.dora import Dora
from unfreeze.adapters.embeddings import embedding_adapter, split_embeddings
from unfreeze.adapters.files import read_files
from unfreeze.adapters.layouts import beside_lora, projections
from unfreeze.adapters.lora import LowRank
from unfreeze.adapters.names import in_ours, keys_in_ours, swapped, theirs
from unfreeze.adapters.tokens import LEAF, split_rows
from unfreeze.adapters.whole import split_off
from unfreeze.checkpoint import nested
from unfreeze.config.adapter import rank_and_scale
from unfreeze.core.errors import AdapterError

NUM_PROBES = 4  # one random vector already misses a wrong ΔW with probability 0
TOLERANCE = 1e-9  # float64 sums of at most some thousand products, relative to the size of ΔW
# the same if the file has another scale than the model, so that B was multiplied by their ratio and rounded
# to float32 once (2^-24 an element, against which probes cancel a little)
ROUNDED = 1e-6


@dataclass(frozen=True)
class Verified:
    """The number of comparisons, and the largest relative difference.

    A matrix is one linear, or one projection of one expert. nonzero: matrices that are not zero.
    """

    sites: int
    matrices: int
    nonzero: int
    max_difference: float


@torch.no_grad()
def verify_adapter(
    model: nn.Module,
    directory: str | Path,
    without: Container[str] = frozenset(),
    files: tuple[dict[str, Any], dict[str, Tensor]] | None = None,
    values: Mapping[str, Tensor] | None = None,
) -> Verified:
    """Compare ΔW = scale · B A of the file with the model's, in float64.

    For every linear and every projection of every expert. ΔW is compared through ΔW·V with V [in, 4] random
    normal: equal ΔW give equal products, different ones almost surely different products, and no [out, in]
    matrix is computed (K2's would be 69,120 matrices of 117 MB).

    without: names of sites that were left out of the file on purpose. files: adapter_config.json and the
    tensors, if they are read already (adapters/shards.py). values: as in save_adapter. Weights that train
    fully must be equal to the bit. Raises AdapterError that counts the differences and names the first.
    """
    config, tensors = files or read_files(Path(directory))
    others, of_tokens = split_rows(tensors)
    others, of_embeddings = split_embeddings(others)
    tensors, whole = split_off(config, others)
    whole |= of_embeddings
    whole |= {f"{name}.{LEAF}": rows for name, rows in of_tokens.items()}
    config = in_ours(model, config)
    own = keys_in_ours(model, tensors)
    plain = {nested.model_name(own[name]): tensor for name, tensor in tensors.items()}
    names = plain.keys()
    count = nonzero = 0
    worst, faults, used = 0.0, [*_other_whole(model, whole, values), *_of_embeddings(model, config)], set()
    for name, scale, A_RI, B_OR in _matrices(model):
        if name in without:
            continue
        # ΔW·V of the model, and of the file
        width = A_RI.shape[-1]
        generator = torch.Generator().manual_seed(width)
        V_IN = torch.randn(width, NUM_PROBES, dtype=torch.float64, generator=generator)
        wanted = scale * (B_OR.double().cpu() @ (A_RI.double().cpu() @ V_IN))
        try:
            experts = _experts(model, name)
            product, in_file = _product(name, config, plain, V_IN, used, experts, swapped(model))
        except KeyError as error:
            faults.append(f"{name}: the file has no {error.args[0]!r}")
            continue
        except RuntimeError as error:  # shapes that cannot be multiplied
            faults.append(f"{name}: {error}")
            continue

        # |wanted - product| / |wanted| of each matrix
        count, nonzero = count + wanted.shape[0], nonzero + int(wanted.flatten(1).any(1).sum())
        size = wanted.flatten(1).norm(dim=1).clamp_min(torch.finfo(torch.float64).tiny)
        difference = (wanted - product).flatten(1).norm(dim=1) / size
        worst = max(worst, difference.max().item())
        limit = TOLERANCE if math.isclose(scale, in_file, rel_tol=1e-12) else ROUNDED
        wrong = (difference > limit).nonzero().flatten().tolist()
        faults += [
            f"{name}{f' of expert {e}' if len(difference) > 1 else ''}: ΔW differs by {difference[e]:.2g} of"
            " its size"
            for e in wrong
        ]

    faults += _lengths(model, plain, without, used)

    # entries only in the file; a pair of zeros belongs to layers that a reader fuses with adapted ones
    zero = {name for name in names - used if "lora_B" in name and not plain[name].any()}
    extra = sorted(names - used - zero - {name.replace("lora_B", "lora_A") for name in zero})
    faults += [f"{name} is in the file and belongs to no adapter of the model" for name in extra]
    if faults:
        raise AdapterError(
            f"{directory}: the saved adapter is not the model's: {len(faults)} differences; first:"
            f" {faults[0]}",
            next="save it again; report it",
        )
    return Verified(sum(site.name not in without for site in sites(model)), count, nonzero, worst)


def _lengths(
    model: nn.Module, plain: Mapping[str, Tensor], without: Container[str], used: set[str]
) -> list[str]:
    """Faults of DoRA's m: each must be the file's, bit for bit."""
    faults: list[str] = []
    for site in sites(model):
        if isinstance(site.adapter, Dora) and site.name not in without:
            used.add(key := f"{site.name}.lora_magnitude_vector")
            if key not in plain or not torch.equal(plain[key].cpu(), site.adapter.m.detach().cpu()):
                faults.append(f"{site.name}: m is not the file's")
    return faults


def _of_embeddings(model: nn.Module, config: Mapping[str, Any]) -> Iterator[str]:
    """Fault of the embeddings' rank and scale in adapter_config.json; their factors are compared apart."""
    for name, adapter in embedding_adapter(model).items():
        rank, scale = rank_and_scale(config, theirs(model, name))
        if rank != adapter.rank or not math.isclose(scale, adapter.scale, rel_tol=1e-12):
            yield f"{name}: rank {rank} and scale {scale:g}, but the model has {adapter.extra_repr()}"


def _other_whole(
    model: nn.Module, whole: Mapping[str, Tensor], values: Mapping[str, Tensor] | None
) -> Iterator[str]:
    """Differences between the file and the modules that train fully."""
    in_file = {nested.model_name(name): tensor for name, tensor in whole.items()}
    for name, tensor in beside_lora(model, values):
        written = in_file.pop(nested.model_name(name), None)
        if written is None:
            yield f"{name} trains fully and is not in the file"
        elif not torch.equal(written, tensor.cpu()):
            yield f"{name} differs from the model's"
    yield from (f"{name} is in the file and does not train fully in the model" for name in in_file)


def _matrices(model: nn.Module) -> list[tuple[str, float, Tensor, Tensor]]:
    """(name, scale, A [E or 1, R, in], B [E or 1, out, R]) of every adapted projection."""
    result = []
    for site in sites(model):
        if isinstance(site.adapter, LowRank):
            A, B, scale = site.adapter.factors()
            result.append((site.name, scale, A[None], B[None]))
        else:
            result += [
                (f"{site.name}.{p}", scale, A, B) for p, (A, B, scale) in projections(site.adapter).items()
            ]
    return result


def _experts(model: nn.Module, name: str) -> Any:
    """The experts that `name` belongs to; None for a linear."""
    return model.get_submodule(name.rsplit(".experts.", 1)[0] + ".experts") if ".experts." in name else None


def _product(
    name: str,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    V_IN: Tensor,
    used: set[str],
    experts: Any,
    turned: bool,
) -> tuple[Tensor, float]:
    """(ΔW·V from the file, [E or 1, out, N]; its scale in the file, the first expert's)."""
    if experts is None:
        parameter = f"{name}.weight"
        targeted = any(
            f".{parameter}".endswith(f".{target}") for target in config.get("target_parameters") or []
        )
        scale = rank_and_scale(config, parameter if targeted else name)[1]
        return scale * _pair(tensors, name, used, V_IN)[None], scale
    site, projection = name.rsplit(".", 1)
    held = experts.held
    if f"{site}.{held.first}.{projection}.lora_A.weight" in tensors:
        keys = [f"{site}.{e}.{projection}" for e in range(held.first, held.last)]
        scales = [rank_and_scale(config, key)[1] for key in keys]
        pairs = [_pair(tensors, key, used, V_IN) for key in keys]
        return torch.stack([s * pair for s, pair in zip(scales, pairs, strict=True)]), scales[0]
    return _fused_product(site, projection, config, tensors, V_IN, used, experts, turned)


def _pair(tensors: Mapping[str, Tensor], key: str, used: set[str], V_IN: Tensor) -> Tensor:
    used.update((f"{key}.lora_A.weight", f"{key}.lora_B.weight"))
    A, B = tensors[f"{key}.lora_A.weight"], tensors[f"{key}.lora_B.weight"]
    return B.double() @ (A.double() @ V_IN)


def _fused_product(
    site: str,
    projection: str,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    V_IN: Tensor,
    used: set[str],
    experts: Any,
    turned: bool,
) -> tuple[Tensor, float]:
    """peft's own formula: ΔW[e] = B.reshape(out, r, E)[:, :, e] · A.reshape(E, r, in)[e].

    turned: peft reads the base's [E, in, out] as [E, out, in], so this ΔW is transposed. Its rows have the
    base's order: gate's first, or gate and up in turn (gpt-oss).
    Source: peft 0.21, ParamWrapper.get_delta_weight.
    """
    stacked = "down_proj" if projection == "down_proj" else experts.first
    both = f"{site}.base_layer.lora_A.weight" in tensors
    key = f"{site}.base_layer" if both and stacked == experts.first else site
    used.update((f"{key}.lora_A.weight", f"{key}.lora_B.weight"))
    A, B = tensors[f"{key}.lora_A.weight"].double(), tensors[f"{key}.lora_B.weight"].double()
    own = len(experts.held)
    A, B = A.reshape(own, -1, A.shape[-1]), B.reshape(B.shape[0], -1, own)
    scale = rank_and_scale(config, f"{site}.{stacked}")[1]
    formula = "ore,eri,on->ein" if turned else "ore,eri,in->eon"
    product = scale * torch.einsum(formula, B, A, V_IN)
    if stacked == "down_proj":
        return product, scale
    parts = experts.activation.split(product, 1)
    return parts[experts.activation.projections.index(projection)], scale
