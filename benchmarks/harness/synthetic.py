"""Random weights with the spread of a trained model's, drawn on the device that uses them.

No checkpoint on disk, no zeros, experts on Kimi's grid. A GPU's speed depends on the bits it multiplies
(power), so weights are Gaussian and codes use the whole grid.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from unfreeze.adapters import LoraConfig, attach
from unfreeze.adapters.attach import sites
from unfreeze.models import Decoder
from unfreeze.models.blocks.linear import PackedHolder
from unfreeze.models.blocks.norm import RMSNorm
from unfreeze.quant.codec import Packed

CHUNK = 2**26  # weights quantized at once: their float32 temporaries take 2 GB


@torch.no_grad()
def fill_random(model: nn.Module, seed: int) -> None:
    """Fill every weight with N(0, 1 / in), norms with 1 ± 0.05, biases with ± 0.02.

    Packed weights are quantized from such numbers, a few experts at a time.
    """
    device = next(model.parameters()).device
    generator = torch.Generator(device=device).manual_seed(seed)
    norms = {id(p) for module in model.modules() if isinstance(module, RMSNorm) for p in module.parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) in norms:
            parameter.normal_(1.0, 0.05, generator=generator)
        elif name.endswith(".bias"):
            parameter.normal_(0.0, 0.02, generator=generator)
        else:
            # the embedding too: it may be the head
            parameter.normal_(0.0, 1 / math.sqrt(parameter.shape[-1]), generator=generator)
    for module in model.modules():
        if isinstance(module, PackedHolder) and module.codec is not None:
            _fill_packed(module.packed, generator)


def _fill_packed(packed: Packed, generator: torch.Generator) -> None:
    *lead, out, width = packed.shape
    parts = {suffix: part.view(-1, *part.shape[len(lead) :]) for suffix, part in packed.parts.items()}
    count = math.prod(lead)
    step = max(1, CHUNK // (out * width))
    for start in range(0, count, step):
        stop = min(count, start + step)
        noise = torch.randn(
            stop - start, out, width, generator=generator, device=generator.device, dtype=torch.bfloat16
        ) / math.sqrt(width)
        for suffix, part in packed.codec.quantize(noise).items():
            parts[suffix][start:stop] = part


def attach_random(model: Decoder, config: LoraConfig, seed: int) -> None:
    """Attach LoRA with a nonzero B, as after some steps; else half of its arithmetic would be on zeros."""
    attach(model, config, seed=seed)
    with torch.no_grad():
        for site in sites(model):
            for name, parameter in site.adapter.named_parameters():
                if name.endswith("B"):
                    parameter.normal_(0.0, 1e-3)


def relative_error(actual: Tensor, exact: Tensor) -> float:
    """|actual - exact| / |exact|, Frobenius norms in float64."""
    actual, exact = actual.detach().double(), exact.detach().double()
    return float((actual - exact).norm() / exact.norm())
