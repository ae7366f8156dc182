"""Small models with other parts, and what is asked of each: cached decoding, the future, documents apart."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from unfreeze import models
from unfreeze.core.batch import Batch

SIZES: dict[str, Any] = {
    "model_type": "unfreeze_parts",
    "base_model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.2,
}
LENGTHS = (40, 1, 90, 3)


def made(
    parts: Sequence[dict[str, Any]], dtype: torch.dtype = torch.float32, **fields: Any
) -> models.Decoder:
    """A random model; gains of norms are random too."""
    config = {**SIZES, **fields, "parts": list(parts)}
    model = models.build(models.shape(config), dtype=dtype, device="cpu")
    models.initialize(model, 0)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "conv1d" in name:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=draw))
    return model


def packed(documents: Sequence[Sequence[int]]) -> Batch:
    tokens = torch.tensor([token for document in documents for token in document])
    lengths = torch.tensor([len(document) for document in documents])
    positions = torch.cat([torch.arange(int(length)) for length in lengths])
    return Batch(tokens, tokens, torch.ones(len(tokens)), positions, lengths.cumsum(0) - lengths)


def documents(lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    draw = torch.Generator().manual_seed(3)
    return [torch.randint(61, (length,), generator=draw).tolist() for length in lengths]


@torch.no_grad()
def cached_difference(model: models.Decoder, prompts: Sequence[int], total: int, step: Any = None) -> float:
    """Largest difference of hidden states: prompts of these lengths, then tokens one by one up to `total`.

    step: a function(cache, tokens of the rows) in place of the model's own step.
    """
    rows = documents([total] * len(prompts))
    whole = model.hidden(packed(rows)).view(len(rows), total, -1)
    cache = model.new_cache(len(rows), total)
    first = model.prefill(packed([row[:length] for row, length in zip(rows, prompts, strict=True)]), cache)
    wanted = torch.cat([whole[row, :length] for row, length in enumerate(prompts)])
    worst = (first - wanted).abs().max()
    while max(cache.lengths) < total:
        places = list(cache.lengths)
        new = torch.tensor([rows[row][place] for row, place in enumerate(places)])
        got = model.step(new, cache) if step is None else step(cache, new)
        wanted = torch.stack([whole[row, place] for row, place in enumerate(places)])
        worst = torch.maximum(worst, (got - wanted).abs().max())  # it passes nan on, as max() does not
    return float(worst)


def seen(model: models.Decoder, batch: Batch, outputs: slice) -> Tensor:
    """Largest gradient of these outputs with respect to the embedding of each token, [T]."""
    held = {}
    hook = model.model.embed_tokens.register_forward_hook(
        lambda _module, _inputs, out: held.setdefault("x", out.detach().requires_grad_())
    )
    try:
        hidden = model.hidden(batch)
    finally:
        hook.remove()
    draw = torch.randn(hidden[outputs].shape, generator=torch.Generator().manual_seed(5)).to(hidden)
    (gradient,) = torch.autograd.grad((hidden[outputs] * draw).sum(), held["x"])
    return gradient.abs().amax(1)


def joined(batch: Batch) -> Batch:
    """The same tokens as one document: what a missing boundary would be."""
    return replace(batch, starts_S=torch.tensor([0]))


def gradients(model: models.Decoder, batch: Batch, recompute: Callable[..., Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    hidden = model.hidden(batch, recompute)
    draw = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(5)).to(hidden)
    (hidden * draw).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def held(model: models.Decoder, block: torch.nn.Module) -> float:
    """Bytes per token that a block's forward leaves for its backward, its input left out."""
    batch = packed(documents([512, 512]))
    run = model.packed_pass(batch)
    x_TD = torch.randn(batch.num_tokens, model.shape.hidden_size, requires_grad=True) * 1
    beside = {tensor.untyped_storage().data_ptr() for tensor in (x_TD, *model.parameters())}
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if tensor.is_floating_point() and storage.data_ptr() not in beside:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y_TD = block(x_TD, run)
    sizes[y_TD.untyped_storage().data_ptr()] = y_TD.untyped_storage().nbytes()
    return sum(sizes.values()) / batch.num_tokens
