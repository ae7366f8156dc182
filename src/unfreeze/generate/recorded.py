"""A step of generation on a CPU from a recorded program (kernels/decode_step): one call for all layers.

The model's blocks record the program once per generation; a step then sets positions and rotary tables, looks
up the embeddings, and lets all cores work through the table. Activations are float32; in bfloat16 the inputs
of products are rounded, as in training.

S sequences, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unfreeze.kernels.decode_step.program import Program, Row
from unfreeze.models import Decoder
from unfreeze.models.blocks.cache import Cache
from unfreeze.models.blocks.recording import Recording
from unfreeze.models.blocks.step_pass import StepPass
from unfreeze.models.decoder import TOKENS


class Recorded:
    """The steps of one generation: calls like `launched` (generate/steps.py).

    Recorded at the first step, for all rows that the cache can hold, and anew if its tensors are replaced or
    adapters came that the program has no place for (models/blocks/each.py).
    """

    def __init__(self, model: Decoder, cache: Cache):
        self.model, self.cache = model, cache
        self._version = (-1, -1)  # of the cache and of the adapters when the program was recorded

    def __call__(self, tokens: Sequence[int]) -> Tensor:
        model, cache = self.model, self.cache
        model.prepare_step(cache)
        model.assigned.documents()
        tokens_S = torch.tensor(tokens)
        rows = len(tokens)
        rows_S, positions_S = torch.arange(rows), torch.tensor(cache.lengths)
        tables, named = model.shape.tables(positions_S)
        run = StepPass(*tables, cache, rows_S, positions_S, named, tokens_T=tokens_S)
        if model.shape.rope.long is not None:
            cache.write(TOKENS, rows_S, positions_S, (tokens_S,))
        if self._version != (cache.version, model.assigned.changes):
            self._record(run)
        self.recording.step(run, model.assigned)
        self.x.tensor[:rows] = model.model.embed_tokens(tokens_S)
        self.program.run(rows)
        for layer, ids_SK in self.recording.chosen.items():
            run.chose(layer, ids_SK[:rows])
        cache.lengths = [length + 1 for length in cache.lengths]
        return self.logits.tensor[:rows]

    def _record(self, run: StepPass) -> None:
        model, rows = self.model, self.cache.rows
        self._version = self.cache.version, model.assigned.changes
        self.program = program = Program(rows, model.dtype)
        self.recording = to = Recording(program, self.cache)
        to.present.run = run
        x = self.x = Row(torch.zeros(rows, model.shape.stream_size), program.pairs)
        for layer in model.layers:
            x = layer.record(to, x)
            program.reuse(x)
        self.logits = model.lm_head.record(to, model.model.norm.record(to, x))
        program.finish()
