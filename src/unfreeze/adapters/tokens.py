"""Rows of the embeddings and of the output head that train alone: those of new tokens.

peft calls them trainable_token_indices: the file holds the rows themselves, not their change. A tied head
shares the rows of the embeddings, unless a file of peft has rows of other tokens for it.

T tokens, D model width, V vocabulary, n rows that train.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unfreeze.adapters.embeddings import TABLE
from unfreeze.adapters.names import ours, theirs
from unfreeze.checkpoint import nested
from unfreeze.core.errors import AdapterError
from unfreeze.kernels.recompute import Reuse
from unfreeze.models import Decoder
from unfreeze.models.blocks.embedding import Embedding
from unfreeze.models.blocks.linear import Linear, WholeAdapter
from unfreeze.models.blocks.saved import Skip
from unfreeze.models.vocabulary import grow_vocabulary, mean_rows, refuse_vocabulary

HEAD = "lm_head"
LEAF = "token_adapter.trainable_tokens_delta"
"""End of peft's name of the rows."""


class TokenRows(nn.Module, WholeAdapter):
    """Rows [n, D] float32 that stand in place of those of some ids, in the embeddings or the head."""

    def __init__(self, ids: Sequence[int], rows: Tensor, vocab_size: int):
        super().__init__()
        self.rows = nn.Parameter(rows.detach().float().clone())
        numbers = torch.tensor(list(ids), device=rows.device)
        places = torch.full((vocab_size,), -1, device=rows.device)
        places[numbers] = torch.arange(len(numbers), device=rows.device)
        self.register_buffer("ids", numbers, persistent=False)
        self.register_buffer("places", places, persistent=False)

    ids: Tensor
    places: Tensor

    def embed(self, tokens_T: Tensor, x_TD: Tensor) -> Tensor:
        """The base's rows of the tokens, with these in place of their own."""
        place_T = self.places[tokens_T]
        own_TD = F.embedding(place_T.clamp(min=0), self.rows).to(x_TD.dtype)
        return torch.where((place_T >= 0)[..., None], own_TD, x_TD)

    def output(self, linear: Linear, x_TI: Tensor, reuse: Reuse | Skip | None) -> Tensor:
        """The head's logits, with these rows' in place of their own."""
        own_Tn = F.linear(x_TI, self.rows.to(x_TI.dtype))
        return linear.plain(x_TI, reuse).index_copy(-1, self.ids, own_Tn)

    def extra_repr(self) -> str:
        return f"{len(self.rows)} rows"


def token_rows(model: nn.Module) -> dict[str, TokenRows]:
    """Module name -> its rows that train: the embeddings, and a head that is not tied to them."""
    rows: dict[str, TokenRows] = {}
    for name, module in model.named_modules():
        own = getattr(module, "adapter", None) if isinstance(module, (Embedding, Linear)) else None
        if isinstance(own, TokenRows):
            rows[name] = own
    return rows


def _each_once(model: nn.Module) -> dict[str, TokenRows]:
    """As `token_rows`, a tied head's only under the embeddings."""
    once: dict[int, tuple[str, TokenRows]] = {}
    for name, own in token_rows(model).items():
        once.setdefault(id(own), (name, own))
    return dict(once.values())


def train_new_tokens(
    model: Decoder, ids: Sequence[int], parts: tuple[tuple[int, ...], ...], size: int
) -> None:
    """Grow the vocabulary to `size`, and let the rows of `ids` train, from the mean of their parts' rows.

    The base without adapters has the same first values. Raises AdapterError if embeddings or head have an
    adapter already.
    """
    refuse_vocabulary(model)
    _refuse_taken(model)
    old = {name: cast(nn.Parameter, module.weight) for name, module in _ends(model)}
    means = {name: mean_rows(weight.detach(), parts) for name, weight in old.items()}
    grow_vocabulary(model, size)
    with torch.no_grad():
        for name, module in _ends(model):
            cast(nn.Parameter, module.weight)[torch.tensor(list(ids), device=model.device)] = means[name].to(
                cast(nn.Parameter, module.weight).dtype
            )
    put_rows(model, {name: (ids, rows) for name, rows in means.items()})


def put_rows(model: Decoder, rows: Mapping[str, tuple[Sequence[int], Tensor]]) -> None:
    """Attach rows by module name; a tied head shares those of the embeddings if they have the same ids."""
    table, head = model.model.embed_tokens, model.lm_head
    for name, module in ((TABLE, table), (HEAD, head)):
        if name in rows:
            ids, values = rows[name]
            own = TokenRows(ids, values.to(model.device), model.shape.vocab_size)
            setattr(module, "adapter", own)  # noqa: B010  an Embedding's or a Linear's
    apart = TABLE in rows and HEAD in rows and list(rows[TABLE][0]) != list(rows[HEAD][0])
    if model.shape.tied and isinstance(table.adapter, TokenRows) and not apart:
        setattr(head, "adapter", table.adapter)  # noqa: B010  a WholeAdapter


def _ends(model: Decoder) -> list[tuple[str, Embedding | Linear]]:
    """Embeddings and head; the head only if it is not tied."""
    table, head = model.model.embed_tokens, model.lm_head
    return [(TABLE, table)] if model.shape.tied else [(TABLE, table), (HEAD, head)]


def _refuse_taken(model: Decoder) -> None:
    for name, module in _ends(model):
        if module.adapter is not None or "trained_beside" in module.__dict__:
            raise AdapterError(
                f"lora.new_tokens trains rows of {name}, which has an adapter or trains fully already",
                next="leave embed_tokens and lm_head out of lora.targets and lora.train_too",
            )


# --- files


def split_rows(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(other tensors, those of trainable_token_indices by our or transformers' module name) of a file."""
    ends = f".{LEAF}"
    rows = {name.removesuffix(ends): tensor for name, tensor in tensors.items() if name.endswith(ends)}
    return {name: tensor for name, tensor in tensors.items() if not name.endswith(ends)}, rows


def decoded_rows(
    model: Decoder, config: Mapping[str, Any], rows: Mapping[str, Tensor]
) -> dict[str, tuple[list[int], Tensor]]:
    """Module name -> (ids, rows) of an adapter's file. Raises AdapterError for what does not fit."""
    named = indices_of(config)
    if named and not rows:
        raise AdapterError(
            f"trainable_token_indices names tokens of {', '.join(named)}, but the file has no rows of them",
            next="download the adapter again",
        )
    decoded: dict[str, tuple[list[int], Tensor]] = {}
    for key, tensor in rows.items():
        name = nested.model_name(ours(model, key))
        leaf = name.rsplit(".", 1)[-1]
        ids = next((own for module, own in named.items() if name == module or module.endswith(leaf)), None)
        if name not in (TABLE, HEAD) or ids is None:
            raise AdapterError(f"{key} has rows of tokens, but is neither the embeddings nor the head")
        if tuple(tensor.shape) != (len(ids), model.shape.hidden_size):
            raise AdapterError(
                f"{key} is {tuple(tensor.shape)}, but trainable_token_indices has {len(ids)} ids and the"
                f" model width is {model.shape.hidden_size}"
            )
        decoded[name] = (ids, tensor)
    beyond = [id for ids, _ in decoded.values() for id in ids if id >= model.shape.vocab_size]
    if beyond and not model.shape.tied and len(decoded) < 2:
        raise AdapterError(
            f"the adapter has a row of the {'embeddings' if TABLE in decoded else 'head'} alone for token"
            f" {beyond[0]}, which the base does not have",
            next="in peft: trainable_token_indices={'embed_tokens': ids, 'lm_head': ids}",
        )
    return decoded


def indices_of(config: Mapping[str, Any]) -> dict[str, list[int]]:
    """trainable_token_indices by module; a list alone is of the embeddings (peft's rule)."""
    indices: Any = config.get("trainable_token_indices") or {}
    return {"embed_tokens": indices} if isinstance(indices, list) else dict(indices)


def load_rows(model: Decoder, rows: Mapping[str, tuple[Sequence[int], Tensor]]) -> None:
    """Grow the vocabulary for these rows, write them into the base's new rows too, and attach them."""
    most = max((max(ids) for ids, _ in rows.values() if len(ids)), default=-1) + 1
    before = model.shape.vocab_size
    grow_vocabulary(model, most)
    with torch.no_grad():
        for name, module in _ends(model):
            if name in rows and most > before:
                ids, values = rows[name]
                new = torch.tensor([id >= before for id in ids])
                weight = cast(nn.Parameter, module.weight)
                weight[torch.tensor(list(ids))[new].to(weight.device)] = values[new].to(weight)
    put_rows(model, rows)


@torch.no_grad()
def fill_rows(model: nn.Module, rows: Mapping[str, tuple[Sequence[int], Tensor]], directory: object) -> None:
    """Overwrite the rows that a model trains by a file's. Raises AdapterError if the ids differ."""
    own = token_rows(model)
    present = {name: own[name].ids.tolist() for name in own if name in rows or name == TABLE}
    if present != {name: list(ids) for name, (ids, _) in rows.items()}:
        raise AdapterError(
            f"{directory}: rows of other tokens train in this model than in the file",
            next="load the adapter on a model that has none",
        )
    for name, (_, values) in rows.items():
        own[name].rows.copy_(values)


def entries_of_rows(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(transformers' name, float32 rows) of the rows that train."""
    for name, own in _each_once(model).items():
        yield theirs(model, f"{name}.{LEAF}"), own.rows.detach().float().contiguous()


def indices_to_save(model: nn.Module) -> dict[str, list[int]] | None:
    """trainable_token_indices for adapter_config.json; peft ties the head to the embeddings by itself."""
    named = {
        theirs(model, name).rsplit(".", 1)[-1]: own.ids.tolist() for name, own in _each_once(model).items()
    }
    return named or None
