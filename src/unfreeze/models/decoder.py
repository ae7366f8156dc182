"""The decoder every family shares: embed, layers, norm, head.

What differs between families (attention, MLP, rope) arrives as parts.
T tokens, D model width, V vocabulary, S sequences.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch
from torch import Tensor, nn

from unfreeze.core.batch import Batch
from unfreeze.core.errors import UserError
from unfreeze.kernels.attention import DocumentLayout
from unfreeze.models.blocks.boundary import ON_DEVICE, Boundary
from unfreeze.models.blocks.bytes import Block
from unfreeze.models.blocks.cache import Cache
from unfreeze.models.blocks.chain import again_of
from unfreeze.models.blocks.each import Assigned
from unfreeze.models.blocks.embedding import Embedding
from unfreeze.models.blocks.extend_pass import CannotExtend, ExtendPass
from unfreeze.models.blocks.linear import Linear, PackedHolder
from unfreeze.models.blocks.moe import MoE
from unfreeze.models.blocks.noise import Noise
from unfreeze.models.blocks.norm import RMSNorm
from unfreeze.models.blocks.passes import PackedPass, PrefillPass
from unfreeze.models.blocks.residency import RESIDENT, Residency
from unfreeze.models.blocks.shared_cache import SharedCache
from unfreeze.models.blocks.step_pass import StepPass, StepWithin
from unfreeze.models.blocks.taps import Taps
from unfreeze.models.chunks import chunk_tokens, document_groups
from unfreeze.models.layer import Layer
from unfreeze.models.recompute import RecomputePolicy, plain
from unfreeze.models.shape import Shape
from unfreeze.quant.codec import Packed

TOKENS = -1  # cache key of the tokens themselves, used by prepare_step


class Body(nn.Module):
    """embed_tokens, layers and norm; checkpoints call this `model`."""

    def __init__(self, embed_tokens: Embedding, layers: list[Layer], norm: RMSNorm):
        super().__init__()
        self.embed_tokens, self.layers, self.norm = embed_tokens, nn.ModuleList(layers), norm


class Decoder(nn.Module):
    """A causal language model over packed batches.

    hidden(batch) -> [T, D]; logits(hidden) -> [T, V] fp32; prefill and step with a Cache for generation.

    `dtype` is that of the computation; frozen matrices may be packed, or held in a narrower one. `residency`
    is notified before each layer is computed; parallel/placement/residency.py sets another one. `boundary`
    keeps the inputs of recomputed layers; parallel/placement/boundary.py has another one.
    """

    dtype: torch.dtype
    sharded = False  # True if its weights are sharded over processes (parallel/placement/fsdp.py)

    def __init__(self, shape: Shape, body: Body, lm_head: Linear):
        super().__init__()
        self.shape, self.model, self.lm_head = shape, body, lm_head
        self.residency: Residency = RESIDENT
        self.boundary: Boundary = ON_DEVICE
        self.assigned = Assigned()  # the adapter of each sequence, where several are attached
        self.while_looking: list[Callable[[], AbstractContextManager[None]]] = []  # contexts of `looking`

    @property
    def layers(self) -> list[Layer]:
        return list(self.model.layers)  # type: ignore[arg-type]

    @property
    def device(self) -> torch.device:
        return self.model.embed_tokens.weight.device

    def packed_weights(self) -> list[Packed]:
        """Every weight that stays packed."""
        holders = (module for module in self.modules() if isinstance(module, PackedHolder))
        return [holder.packed for holder in holders if holder.codec is not None]

    def moe_layers(self) -> dict[int, MoE]:
        """Layer index -> its mixture of experts, for the layers that have one.

        Pass p of a chain, from 1 on, has the number index + p · num_layers (blocks/chain.py).
        """
        mixtures = {index: getattr(layer, "moe", layer.mlp) for index, layer in enumerate(self.layers)}
        later = (again for layer in self.layers for again in again_of(layer))
        mixtures |= sorted((again.layer, again) for again in later)
        return {index: moe for index, moe in mixtures.items() if isinstance(moe, MoE)}

    def moe_names(self) -> dict[int, str]:
        """Key of moe_layers -> its name in events: "3" is layer 3, "3.1" its second pass."""
        depth = self.shape.num_layers
        return {
            key: f"{key % depth}.{key // depth}" if key >= depth else f"{key}" for key in self.moe_layers()
        }

    def unshard(self) -> None:
        """All-gather embedding, norm and head if weights are sharded. Does nothing here, like `reshard`."""

    def reshard(self) -> None:
        """Free the all-gathered weights. Does nothing here; fully_shard overrides it."""

    @property
    def exchanges(self) -> bool:
        """True if its experts are split over processes or its weights sharded among them.

        All processes then visit every layer equally often, so none runs it in chunks of its own documents.
        """
        return self.sharded or any(moe.experts.dispatch is not None for moe in self.moe_layers().values())

    @contextmanager
    def looking(self, *, backward: bool = False) -> Iterator[None]:
        """Run the model without training it.

        Afterwards the experts' token counts and torch's random state are restored. backward: a backward pass
        may run inside; the parameters' gradients are put aside and restored. Without it autograd records
        nothing.
        """
        counters = [
            counter for moe in self.moe_layers().values() for counter in (moe.counts_E, moe.replayed_3)
        ]
        counts = [counter.clone() for counter in counters]
        self.reshard()  # parameters are then the local shards, not all-gathered copies
        gradients = [(parameter, parameter.grad) for parameter in self.parameters()] if backward else []
        devices = [self.device] if self.device.type == "cuda" else []
        try:
            with (
                torch.random.fork_rng(devices),
                torch.set_grad_enabled(backward and torch.is_grad_enabled()),
                ExitStack() as contexts,
            ):
                for context in self.while_looking:
                    contexts.enter_context(context())
                for parameter, _ in gradients:
                    parameter.grad = None
                yield
        finally:
            for counter, before in zip(counters, counts, strict=True):
                counter.copy_(before)
            for parameter, gradient in gradients:
                parameter.grad = gradient

    def hidden(self, batch: Batch, recompute: RecomputePolicy = plain, taps: Taps | None = None) -> Tensor:
        """Hidden states after the final norm, [T, D]; document s attends to itself only.

        taps: collects the layer tensors it requests; backward may also start from them.
        """
        self.assigned.documents(batch.lengths())
        run = self.packed_pass(batch)
        x_TD = self.model.embed_tokens(batch.tokens_T)
        for index, layer in enumerate(self.layers):
            if taps is not None:
                x_TD = taps.enter(index, x_TD, run)
            x_TD = recompute(layer, x_TD, run)
        if taps is not None:
            x_TD = taps.enter(self.shape.num_layers, x_TD, run)
        return self.model.norm(x_TD)

    def packed_pass(self, batch: Batch) -> PackedPass:
        """The pass that every layer receives: rotary tables, where documents start, and given experts."""
        (cos_Tr, sin_Tr), named = self.shape.tables(batch.positions_T, self._lengths(batch))
        run = PackedPass(
            cos_Tr,
            sin_Tr,
            self._layout(batch),
            named=named,
            residency=self.residency,
            boundary=self.boundary,
            routes=self._routes(batch),
            tokens_T=batch.tokens_T,
            noise=None if batch.draw is None else Noise(batch.draw, batch.num_tokens),
        )

        # whole documents in chunks of at most `limit` tokens, which bound a layer's activations
        def chunk(rows: slice, starts: list[int]) -> tuple[slice, PackedPass]:
            layout = DocumentLayout.build(starts, rows.stop - rows.start, self.device)
            theirs = {name: (cos[rows], sin[rows]) for name, (cos, sin) in named.items()}
            routes = {layer: ids_TK[rows] for layer, ids_TK in run.routes.items()}
            own = PackedPass(cos_Tr[rows], sin_Tr[rows], layout, named=theirs, routes=routes)
            own.tokens_T = batch.tokens_T[rows]
            own.noise = None if run.noise is None else run.noise.part(rows)
            return rows, own

        limit = chunk_tokens(self.shape.num_experts, self.shape.experts_per_token, self.device.type)
        if limit is not None and limit < batch.num_tokens and not self.exchanges:
            groups = document_groups(batch.lengths(), limit)
            run.chunks = tuple(chunk(rows, starts) for rows, starts in _spans(groups))
        return run

    def _routes(self, batch: Batch) -> dict[int, Tensor]:
        """MoE layer -> the experts given to its tokens, [T, K]: its slice of extras["routes"], [T, L, K]."""
        routes_TLK = batch.extras.get("routes")
        if routes_TLK is None:
            return {}
        layers = self.moe_layers()
        each = {moe.gate.top_k for moe in layers.values()}
        if routes_TLK.shape[:2] != (batch.num_tokens, len(layers)) or each - {routes_TLK.shape[2]}:
            raise UserError(
                f"routes {list(routes_TLK.shape)} for {batch.num_tokens} tokens, {len(layers)} MoE layers and"
                f" {sorted(each)} experts per token: they come from another model"
            )
        return dict(zip(layers, routes_TLK.unbind(1), strict=True))

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """[T, D] -> [T, V] in float32, for scoring and sampling. Objectives never hold [T, V]."""
        return self.lm_head(hidden_TD).float()

    def new_cache(self, num_sequences: int, capacity: int, *, routes: bool = False) -> Cache:
        """An empty cache for S sequences of at most `capacity` positions. routes: with the chosen experts."""
        return Cache(num_sequences, capacity, routes=routes)

    def shared_cache(self, prompts: tuple[int, int], answers: tuple[int, int], *, routes: bool) -> Cache:
        """An empty cache whose rows share prompts; each pair is how many and how long at most."""
        return SharedCache(*answers, slots=prompts[0], longest=prompts[1], routes=routes)

    def cache_bytes(self) -> int:
        """Bytes of one position of one row of a cache, without routes."""
        numbers = sum(block.cached() for block in self.modules() if isinstance(block, Block))
        return numbers * self.dtype.itemsize + (8 if self.shape.rope.long is not None else 0)

    def state_bytes(self) -> int:
        """Bytes of one row of a cache that do not grow with its positions: recurrent states."""
        return sum(block.state_bytes(self.dtype) for block in self.modules() if isinstance(block, Block))

    def prefill(self, batch: Batch, cache: Cache, rows: Sequence[int] | None = None) -> Tensor:
        """Run documents through the model: document s fills row s of an empty cache. -> hidden [T, D].

        rows: the running rows to fill instead, one per document. What they held is forgotten, and the other
        rows stay as they are.
        """
        lengths, running = batch.lengths(), range(len(cache.lengths))
        places = list(running if rows is None else rows)
        wrong = len({*places}) != len(lengths) or len(places) != len(lengths) or not {*places} <= {*running}
        if wrong or max(lengths) > cache.longest or (rows is None and any(cache.lengths)):
            needed = "an empty row per document" if rows is None else f"one row per document, not {places}"
            raise UserError(
                f"prefill of {len(lengths)} documents, longest {max(lengths)}, into a cache of"
                f" {len(cache.lengths)} rows of {cache.longest}, filled {cache.lengths}: it needs {needed}"
            )
        cache.begin(places, lengths)
        lengths_T = torch.tensor(lengths)
        rows_T = torch.tensor(places).repeat_interleave(lengths_T).to(self.device)
        hidden_TD = self._fill(batch, rows_T, self._lengths(batch), cache)
        for row, length in zip(places, lengths, strict=True):
            cache.lengths[row] = length
        return hidden_TD

    def fill(
        self, batch: Batch, cache: Cache, rows: Sequence[int], first: Sequence[int] | None = None
    ) -> Tensor:
        """Run documents through the model, behind positions that their rows hold. -> hidden [T, D].

            rows   the row of each document; it need not run, and cache.lengths stays as it is
            first  positions that each row holds already; None: 0, as in `prefill`

        Raises CannotExtend for a model that reads a document from its beginning only: longrope, recurrent
        states, shortened layers, and a choice among blocks or keys (blocks/extend_pass.py).
        """
        lengths_T = torch.tensor(batch.lengths())
        rows_T = torch.tensor(list(rows)).repeat_interleave(lengths_T).to(self.device)
        if first is None or not any(first):
            return self._fill(batch, rows_T, self._lengths(batch), cache)
        if self.shape.rope.long is not None or cache.states:
            raise CannotExtend
        behind_T = torch.tensor(list(first)).repeat_interleave(lengths_T).to(self.device)
        positions_T = batch.positions_T + behind_T
        tables, named = self.shape.tables(positions_T)
        ends = [begin + length for begin, length in zip(first, batch.lengths(), strict=True)]
        self.assigned.documents(batch.lengths(), ends)
        run = ExtendPass(
            *tables,
            layout=self._layout(batch),
            named=named,
            cache=cache,
            rows_T=rows_T,
            positions_T=positions_T,
            tokens_T=batch.tokens_T,
            rows=list(rows),
            first=list(first),
            ends=ends,
        )
        return self._visit(batch.tokens_T, run)

    def holds(self, prompt: int, length: int) -> bool:
        """True if a row of `length` positions still holds its first `prompt` as their own prefill left them.

        False if it has outgrown longrope's short context since (prepare_step), or has a recurrent state,
        which is that of all its positions.
        """
        if self.state_bytes():
            return prompt == length
        short = self.shape.rope.short_until
        return self.shape.rope.long is None or (prompt > short) == (length > short)

    def _fill(self, batch: Batch, rows_T: Tensor, lengths_T: Tensor | None, cache: Cache) -> Tensor:
        """Write every token's keys and values to the cache, at its row and position. -> hidden [T, D]."""
        self.assigned.documents(batch.lengths())
        tables, named = self.shape.tables(batch.positions_T, lengths_T)
        run = PrefillPass(
            *tables,
            layout=self._layout(batch),
            named=named,
            cache=cache,
            rows_T=rows_T,
            positions_T=batch.positions_T,
            tokens_T=batch.tokens_T,
        )
        if self.shape.rope.long is not None:
            cache.write(TOKENS, rows_T, batch.positions_T, (batch.tokens_T,))
        return self._visit(batch.tokens_T, run)

    def prepare_step(self, cache: Cache) -> None:
        """Before a step: check room, and recompute the cache of rows that outgrow longrope's short context.

        Past short_until tokens all keys of a document use the frequencies of Rope.long, cached ones too.
        """
        cache.require_room()
        short = self.shape.rope.short_until
        rows = [row for row, length in enumerate(cache.lengths) if length == short]
        if self.shape.rope.long is None or not rows:
            return
        (tokens_SN,) = cache.layers[TOKENS]
        tokens_T = tokens_SN[rows, :short].flatten()
        positions_T = torch.arange(short, device=self.device).repeat(len(rows))
        starts_S = torch.arange(len(rows)) * short
        batch = Batch(tokens_T, tokens_T, torch.zeros(len(tokens_T)), positions_T, starts_S)
        rows_T = torch.tensor(rows, device=self.device).repeat_interleave(short)
        with self.assigned.only(rows):
            self._fill(batch, rows_T, torch.full_like(positions_T, short + 1), cache)

    def step(self, tokens_S: Tensor, cache: Cache) -> Tensor:
        """One new token per row, at position cache.lengths[row]. -> [S, D].

        The cache grows by one position.
        """
        self.prepare_step(cache)
        positions_S = torch.tensor(cache.lengths, device=self.device)
        rows_S = torch.arange(len(cache.lengths), device=self.device)
        tables, named = self.shape.tables(positions_S)
        run = StepPass(
            *tables, cache=cache, rows_T=rows_S, positions_T=positions_S, named=named, tokens_T=tokens_S
        )
        hidden_SD = self._step(tokens_S, run)
        cache.lengths = [length + 1 for length in cache.lengths]
        return hidden_SD

    def step_within(self, tokens_S: Tensor, positions_S: Tensor, cache: Cache, width: int) -> Tensor:
        """`step` with every number that changes between steps on the device. -> [S, D].

        positions_S: int64, each row's position, all below `width`. The kernel launches don't depend on the
        values of the two tensors, so a CUDA graph can record and replay them. The caller calls prepare_step
        before, and advances cache.lengths.
        """
        rows_S = torch.arange(len(tokens_S), device=self.device)
        tables, named = self.shape.tables(positions_S)
        run = StepWithin(*tables, cache, rows_S, positions_S, named, tokens_T=tokens_S, width=width)
        return self._step(tokens_S, run)

    def _step(self, tokens_S: Tensor, run: StepPass) -> Tensor:
        self.assigned.documents()
        if self.shape.rope.long is not None:
            run.cache.write(TOKENS, run.rows_T, run.positions_T, (tokens_S,))
        return self._visit(tokens_S, run)

    def _visit(self, tokens_T: Tensor, run: PrefillPass | StepPass) -> Tensor:
        x_TD = self.model.embed_tokens(tokens_T)
        for layer in self.layers:
            self.residency.visit(layer)
            x_TD = layer(x_TD, run)
        return self.model.norm(x_TD)

    def _lengths(self, batch: Batch) -> Tensor | None:
        """The length of each token's document, if the rotary tables need it."""
        if self.shape.rope.long is None:
            return None
        lengths_S = torch.tensor(batch.lengths())
        return lengths_S.repeat_interleave(lengths_S).to(self.device)

    def _layout(self, batch: Batch) -> DocumentLayout:
        return DocumentLayout.build(batch.starts_S, batch.num_tokens, self.device)


def _spans(groups: Sequence[Sequence[int]]) -> Iterator[tuple[slice, list[int]]]:
    """For each group of document lengths: (slice of its tokens, start of each document within it)."""
    begin = 0
    for lengths in groups:
        *starts, total = itertools.accumulate(lengths, initial=0)
        yield slice(begin, begin + total), starts
        begin += total
