"""LoRA on the token embeddings, beside that on the output head, which is a linear layer.

    row(id) = W[id] + scale · B A[:, id]        A [R, V], B [D, R]

At the start A is zero and B random, as in peft: a new adapter changes nothing. A head that is tied to the
embeddings keeps the base's weight, and has a pair of its own if lora.targets names it (peft's rule without
ensure_weight_tying).

T tokens, D model width, V vocabulary, R rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unfreeze.adapters.lora import generator_of
from unfreeze.adapters.names import ours, theirs
from unfreeze.checkpoint import nested
from unfreeze.config.adapter import rank_and_scale
from unfreeze.config.lora import LoraConfig
from unfreeze.core.errors import AdapterError
from unfreeze.models import Decoder
from unfreeze.models.blocks.embedding import Embedding
from unfreeze.models.targets import names_embeddings

TABLE = "model.embed_tokens"
HALVES = {"A": "lora_embedding_A", "B": "lora_embedding_B"}


class EmbeddingLowRank(nn.Module):
    """The factors of LoRA on an Embedding; A fp32 [R, V], B fp32 [D, R]."""

    def __init__(self, A: Tensor, B: Tensor, scale: float):
        super().__init__()
        self.A, self.B, self.scale = nn.Parameter(A), nn.Parameter(B), scale

    def embed(self, tokens_T: Tensor, x_TD: Tensor) -> Tensor:
        """The rows with their updates, in the rows' dtype."""
        thin_TR = F.embedding(tokens_T, self.A.t()) * self.scale
        return x_TD + (thin_TR.to(x_TD.dtype) @ self.B.t().to(x_TD.dtype))

    @property
    def rank(self) -> int:
        return len(self.A)

    @property
    def alpha(self) -> float:
        """scale · rank, without the rounding of the division that made the scale."""
        return float(f"{self.scale * self.rank:.15g}")

    def extra_repr(self) -> str:
        return f"rank={self.rank}, scale={self.scale:g}"


def embedding_adapter(model: nn.Module) -> dict[str, EmbeddingLowRank]:
    """Module name -> the adapter of the embeddings, if they have one."""
    return {
        name: module.adapter
        for name, module in model.named_modules()
        if isinstance(module, Embedding) and isinstance(module.adapter, EmbeddingLowRank)
    }


def attach_embeddings(model: nn.Module, config: LoraConfig, seed: int, device: torch.device) -> None:
    """Attach a new adapter to the embeddings if lora.targets names them. B is drawn from (seed, its name)."""
    if not names_embeddings(config.targets):
        return
    table = model.get_submodule(TABLE)
    assert isinstance(table, Embedding)
    vocabulary, width = table.weight.shape
    B_DR = torch.randn(width, config.rank, generator=generator_of(f"{seed}:{TABLE}")).to(device)
    A_RV = torch.zeros(config.rank, vocabulary, device=device)
    table.adapter = EmbeddingLowRank(A_RV, B_DR, config.scale_of("embeddings"))


# --- files


def split_embeddings(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(other tensors, those of LoRA on the embeddings) of an adapter's file."""
    own = {name: tensor for name, tensor in tensors.items() if ".lora_embedding_" in name}
    return {name: tensor for name, tensor in tensors.items() if name not in own}, own


def without_base(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors but for the base's embeddings and head, which peft saves beside adapters of them.

    Raises AdapterError if they are not this base's: peft then trained on a resized or another one.
    """
    kept: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        module = nested.model_name(ours(model, name.removesuffix(".base_layer.weight")))
        if not name.endswith(".base_layer.weight") or module not in (TABLE, "lm_head"):
            kept[name] = tensor
            continue
        weight = model.get_submodule(module).weight
        assert isinstance(weight, Tensor)
        same = weight.shape == tensor.shape
        if same and not weight.is_meta:
            same = torch.equal(weight.detach().cpu().to(tensor.dtype), tensor)
        if not same:
            raise AdapterError(
                f"{name} is another than the base's: the adapter was trained on other embeddings",
                next="give the base that it was trained on: --base DIR",
            )
    return kept


def decoded_embeddings(
    model: nn.Module, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> EmbeddingLowRank | None:
    """The adapter of a file, float32 on the host; None if there is none. Raises AdapterError for a misfit."""
    if not tensors:
        return None
    if config.get("use_dora"):
        raise AdapterError(
            "the adapter has DoRA on the embeddings (embed_tokens), which is not built",
            next="merge it in peft: merge_and_unload()",
        )
    named = {nested.model_name(ours(model, key)): tensor for key, tensor in tensors.items()}
    table = model.get_submodule(TABLE)
    assert isinstance(table, Embedding)
    vocabulary, width = table.weight.shape
    rank, scale = rank_and_scale(config, theirs(model, TABLE))
    shapes = {f"{TABLE}.{HALVES['A']}": (rank, vocabulary), f"{TABLE}.{HALVES['B']}": (width, rank)}
    if {name: tuple(tensor.shape) for name, tensor in named.items()} != shapes:
        there = {name: tuple(tensor.shape) for name, tensor in named.items()}
        raise AdapterError(
            f"the adapter of the embeddings has {there}, but the model needs {shapes}",
            next="check that the adapter was trained on this model, with the same vocabulary",
        )
    A_RV, B_DR = (named[f"{TABLE}.{HALVES[half]}"].float().clone() for half in "AB")
    return EmbeddingLowRank(A_RV, B_DR, scale)


def put_embeddings(model: Decoder, adapter: EmbeddingLowRank) -> None:
    """Attach it; on a model that has one, of the same rank and scale, overwrite that."""
    table = model.model.embed_tokens
    if isinstance(table.adapter, EmbeddingLowRank):
        if table.adapter.A.shape != adapter.A.shape or table.adapter.scale != adapter.scale:
            raise AdapterError("the adapter of the embeddings has another rank or scale than the file's")
        with torch.no_grad():
            table.adapter.A.copy_(adapter.A)
            table.adapter.B.copy_(adapter.B)
        return
    table.adapter = adapter.to(model.device)


def entries_of_embeddings(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(transformers' name, tensor) of the embeddings' factors."""
    for name, adapter in embedding_adapter(model).items():
        for half, leaf in HALVES.items():
            yield theirs(model, f"{name}.{leaf}"), getattr(adapter, half).detach().float().contiguous()
