"""Random weights for pretraining from scratch."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import torch
from torch import Tensor, nn

from unfreeze.core.errors import CheckpointError
from unfreeze.models.blocks.norm import LayerNorm, RMSNorm
from unfreeze.models.blocks.routers import HashRouter
from unfreeze.models.decoder import Decoder

INTO_RESIDUAL = (
    "o_proj.weight",
    "down_proj.weight",
    "fc2.weight",
    "out_proj.weight",
    "output_linear.weight",
    "fc2_latent_proj.weight",
)
"""Ends of the names of projections back into the residual stream."""


def initialize(model: Decoder, seed: int, put: Callable[[str, Tensor], None] | None = None) -> None:
    """Initialise every weight ~ N(0, initializer_range²), norms' gains 1, biases 0.

    Projections back into the residual stream are scaled by 1/sqrt(2 · layers), so that its variance does not
    grow with depth (GPT-2, Radford et al. 2019). Deterministic in `seed`.

    put: stores a parameter's values by name, for a process that holds only some of its rows
    (parallel/placement/fsdp.py); every process draws all rows.
    """
    generator = torch.Generator().manual_seed(seed)
    norms = [module for module in model.modules() if isinstance(module, (RMSNorm, LayerNorm))]
    done = {id(parameter) for norm in norms for parameter in norm.parameters()}
    std = model.shape.initializer_range
    with torch.no_grad():
        for norm in norms:
            norm.reset()
        for path, module in model.named_modules():
            draws = getattr(
                module, "drawn", None
            )  # decays, hyper-connections: modules with values of their own
            for part, drawn in draws(generator).items() if draws is not None else ():
                parameter = module.get_parameter(part)
                done.add(id(parameter))
                parameter.copy_(drawn) if put is None else put(f"{path}.{part}", drawn)
        for router in model.modules():
            if isinstance(router, HashRouter):
                router.draw_table(generator)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                nn.init.ones_(buffer)
        for name, parameter in model.named_parameters():
            if id(parameter) in done:
                continue
            if name.endswith(".bias"):
                nn.init.zeros_(parameter)
            else:
                scale = std / (2 * model.shape.num_layers) ** 0.5 if name.endswith(INTO_RESIDUAL) else std
                drawn = torch.randn(parameter.shape, generator=generator) * scale
                parameter.copy_(drawn) if put is None else put(name, drawn)


def first_value(model: Decoder, name: str, generator: torch.Generator) -> Tensor:
    """The first value of one parameter, or persistent buffer, by the rules of `initialize`.

    In float32 on the CPU; the model may be on "meta". Parameters that their module draws together need
    generators of the same seed. Raises CheckpointError for one that no rule covers.
    """
    path, _, own = name.rpartition(".")
    module = model.get_submodule(path)
    tensor = getattr(module, own)
    pieces = name.split(".")
    for cut in range(len(pieces) - 1, 0, -1):
        draws = getattr(model.get_submodule(".".join(pieces[:cut])), "drawn", None)
        drawn = draws(generator).get(".".join(pieces[cut:])) if draws is not None else None
        if drawn is not None:
            return drawn.float()
    if isinstance(module, (RMSNorm, LayerNorm)):
        norm = deepcopy(module).to_empty(device="cpu")
        norm.reset()
        return getattr(norm, own).detach().float()
    if isinstance(module, HashRouter) or not tensor.is_floating_point():
        raise CheckpointError(
            f"{name} is a table or a packed weight; it has no first values",
            next="keep the one that is there: --init copy",
        )
    if not isinstance(tensor, nn.Parameter):
        return torch.ones(tensor.shape) if own == "layer_scalar" else torch.zeros(tensor.shape)
    if own == "bias":
        return torch.zeros(tensor.shape)
    std = model.shape.initializer_range
    scale = std / (2 * model.shape.num_layers) ** 0.5 if name.endswith(INTO_RESIDUAL) else std
    return torch.randn(tensor.shape, generator=generator) * scale
