"""Random weights for pretraining from scratch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from unfreeze.models.blocks.norm import LayerNorm, RMSNorm
from unfreeze.models.blocks.routers import HashRouter
from unfreeze.models.decoder import Decoder


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
                into_residual = name.endswith(
                    (
                        "o_proj.weight",
                        "down_proj.weight",
                        "fc2.weight",
                        "out_proj.weight",
                        "output_linear.weight",
                        "fc2_latent_proj.weight",
                    )
                )
                scale = std / (2 * model.shape.num_layers) ** 0.5 if into_residual else std
                drawn = torch.randn(parameter.shape, generator=generator) * scale
                parameter.copy_(drawn) if put is None else put(name, drawn)
