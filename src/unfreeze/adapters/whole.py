"""Modules that train fully beside adapters: peft's modules_to_save.

The trained weights stand in the module in place of the base's, which are kept: `take_off` puts them back, so
that the model without its adapters is the base. No tensor moves.

On disk they have the module's own names beside the LoRA factors, as peft writes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from unfreeze.adapters.names import ours, theirs
from unfreeze.checkpoint import nested
from unfreeze.core.errors import AdapterError
from unfreeze.core.torch_types import parameters_of
from unfreeze.models.whole import chosen_modules, tied_pairs, trainable_modules, trained_dtype

_PLACE = "trained_beside"  # attribute of a module: (its WholeWeights, the base's parameters, its `widened`)


class WholeWeights(nn.Module):
    """The weights of one module that train in place of the base's, by name ("weight", "bias")."""

    def __init__(self, weights: Mapping[str, nn.Parameter]):
        super().__init__()
        for name, weight in weights.items():
            self.register_parameter(name, weight)


def wholes(model: nn.Module) -> dict[str, WholeWeights]:
    """Module name -> its own weights, for every module of which they are in place."""
    placed = {name: module.__dict__.get(_PLACE) for name, module in model.named_modules()}
    return {name: cast(WholeWeights, place[0]) for name, place in placed.items() if place is not None}


def train_too(model: nn.Module, patterns: Sequence[str]) -> dict[str, WholeWeights]:
    """Let the modules that the patterns name train, from the base's values. -> their weights by module name.

    A tied head shares the embeddings' weight, as in the base. Raises AdapterError as `chosen_modules`.
    """
    chosen = modules_named(model, patterns)
    fresh: dict[int, nn.Parameter] = {}
    for module in chosen.values():
        weights: dict[str, nn.Parameter] = {}
        for name, base in module.named_parameters(recurse=False):
            if id(base) not in fresh:
                dtype = trained_dtype(module, base)
                fresh[id(base)] = nn.Parameter(base.detach().to(dtype, copy=True))
            weights[name] = fresh[id(base)]
        put_on(module, WholeWeights(weights))
    return wholes(model)


def modules_named(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    """`chosen_modules`, by our names or transformers'; {} without patterns."""
    return chosen_modules(model, patterns, lambda name: theirs(model, name)) if patterns else {}


def put_on(module: nn.Module, own: WholeWeights) -> None:
    """Put these weights in the module's place for them; the base's are kept."""
    take_off(module)
    parameters = parameters_of(module)
    base = {name: parameters[name] for name, _ in own.named_parameters(remove_duplicate=False)}
    module.__dict__[_PLACE] = (own, base, getattr(module, "widened", None))
    parameters.update(dict(own.named_parameters(remove_duplicate=False)))
    if "widened" in module.__dict__:
        module.__dict__["widened"] = None


def take_off(module: nn.Module) -> None:
    """Put the base's weights back, if the module has others."""
    if (place := module.__dict__.pop(_PLACE, None)) is None:
        return
    _, base, widened = place
    parameters_of(module).update(base)
    if "widened" in module.__dict__:
        module.__dict__["widened"] = widened


def take_all_off(model: nn.Module) -> None:
    """`take_off` of every module."""
    for module in model.modules():
        take_off(module)


# --- files


def split_off(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(LoRA's tensors, those of modules_to_save) of an adapter's file."""
    if not config.get("modules_to_save"):
        return dict(tensors), {}
    apart = {name: tensor for name, tensor in tensors.items() if ".lora_" not in name}
    return {name: tensor for name, tensor in tensors.items() if name not in apart}, apart


def decoded_whole(
    model: nn.Module, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> dict[str, dict[str, Tensor]]:
    """Our name of a module -> its tensors by name, from those of modules_to_save in a file.

    Raises AdapterError for a module that the model doesn't have, a missing or a mismatched tensor.
    """
    known = trainable_modules(model)
    decoded: dict[str, dict[str, Tensor]] = {}
    faults: list[str] = []
    for key, tensor in tensors.items():
        module, _, leaf = nested.model_name(ours(model, key)).rpartition(".")
        owner = known.get(module)
        own = dict(owner.named_parameters(recurse=False)) if owner is not None else {}
        buffers = dict(owner.named_buffers(recurse=False)) if owner is not None else {}
        if leaf in own and own[leaf].shape == tensor.shape:
            decoded.setdefault(module, {})[leaf] = tensor
        elif leaf in own:
            faults.append(f"{key} is {tuple(tensor.shape)}, but the model has {tuple(own[leaf].shape)}")
        elif leaf not in buffers:
            faults.append(f"{key} is no weight of a module that can train fully")
        elif not _same(buffers[leaf], tensor):  # peft saves buffers too, which it does not train
            faults.append(f"{key} differs from the base's, but is no weight that trains")
    for module, own in decoded.items():
        lacking = [name for name, _ in known[module].named_parameters(recurse=False) if name not in own]
        faults += [f"{module}.{name} is missing" for name in lacking]
    present = [theirs(model, name) for name in decoded]
    faults += [
        f"{named} has no weight in the file"
        for named in config.get("modules_to_save") or ()
        if not any(name.endswith(named) for name in present)
    ]
    if faults:
        others = f" ({len(faults)} such faults)" if len(faults) > 1 else ""
        raise AdapterError(
            f"modules_to_save do not fit this model: {faults[0]}{others}",
            next="check that the adapter was trained on this model",
        )
    return {name: decoded[name] for name in known if name in decoded}


def _same(buffer: Tensor, tensor: Tensor) -> bool:
    if buffer.is_meta:
        return buffer.shape == tensor.shape
    return buffer.shape == tensor.shape and torch.equal(buffer.cpu().float(), tensor.cpu().float())


@torch.no_grad()
def fill_whole(model: nn.Module, decoded: Mapping[str, Mapping[str, Tensor]]) -> dict[str, WholeWeights]:
    """New WholeWeights with these values by module name, trainable, on the base's device; none is put on.

    A tied head gets the embeddings' own weight if both have the same values.
    """
    known, filled = trainable_modules(model), dict[str, WholeWeights]()
    for name, tensors in decoded.items():
        module = known[name]
        weights: dict[str, nn.Parameter] = {}
        for leaf, base in module.named_parameters(recurse=False):
            device = "cpu" if base.is_meta else base.device
            value = tensors[leaf].to(device=device, dtype=trained_dtype(module, base), copy=True)
            weights[leaf] = nn.Parameter(value)
        filled[name] = WholeWeights(weights)
    for table, head in tied_pairs(known):
        if {table, head} <= decoded.keys() and torch.equal(decoded[table]["weight"], decoded[head]["weight"]):
            filled[head].register_parameter("weight", cast(nn.Parameter, filled[table].weight))
    return filled


def entries_of_whole(
    model: nn.Module, values: Mapping[str, Tensor] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """(transformers' name, float32 tensor as in a file) of every weight and buffer of these modules.

    values: parameter name -> the tensor to write, if not the parameter itself: the master of a half-precision
    weight. A tied head is written too: peft reads each module by itself.
    """
    values = values or {}
    by_id = {id(parameter): name for name, parameter in model.named_parameters()}
    for name, own in wholes(model).items():
        for leaf, parameter in own.named_parameters():
            value = values.get(by_id.get(id(parameter), ""), parameter)
            yield theirs(model, f"{name}.{leaf}"), value.detach().float().contiguous()
        module = model.get_submodule(name)
        persistent = module.state_dict(keep_vars=True)
        for leaf, buffer in module.named_buffers(recurse=False):
            if leaf in persistent:
                yield theirs(model, f"{name}.{leaf}"), buffer.detach().contiguous()


def tied_whole(model: nn.Module) -> bool:
    """True if the embeddings and the head train fully as one weight."""
    ids = [id(parameter) for own in wholes(model).values() for parameter in own.parameters()]
    return len({*ids}) < len(ids)


def modules_to_save(model: nn.Module) -> list[str]:
    """Names for adapter_config.json: the last part of a name where it means chosen modules only, else all.

    peft takes every module whose name ends in the text, whatever stands before it ("norm" also means
    input_layernorm), and does not adapt what is inside of it.
    """
    chosen = {theirs(model, name) for name in wholes(model)}
    every = {theirs(model, name) for name, _ in model.named_modules()}
    names: set[str] = set()
    for name in chosen:
        leaf = name.rsplit(".", 1)[-1]
        alone = all(other in chosen for other in every if other.endswith(leaf) or f".{leaf}." in f".{other}.")
        names.add(leaf if alone else name)
    return sorted(names)
