"""Sample from two models together: p ∝ p_T · p_S^γ, the teacher and the student that corrects it.

Each has its own KV cache; a step runs both. Product of experts and proxy-tuning (arXiv:2401.08565);
objectives/corrector.py trains the student for it.

T tokens, S sequences, D and E the two widths, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from unfreeze.core.batch import Batch
from unfreeze.generate.engine import Engine, EngineTokenizer
from unfreeze.generate.steps import launched
from unfreeze.models import Decoder
from unfreeze.models.blocks.cache import Cache


class Joint:
    """Two decoders as one, for Engine: hidden states are both side by side, [T, D + E].

    words   size of the vocabulary that both share; further rows of either head are padding
            (docs/why/trust.md N5)
    gamma   exponent of the student. 0: the teacher alone
    around  context of each teacher pass. If the teacher is the student's own base:
            partial(without_adapters, student)
    """

    def __init__(
        self,
        student: Decoder,
        teacher: Decoder,
        *,
        words: int,
        gamma: float = 1.0,
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
    ):
        self.student, self.teacher, self.words, self.gamma, self.around = (
            student,
            teacher,
            words,
            gamma,
            around,
        )
        self.shape, self.device = student.shape, student.device

    def new_cache(self, num_sequences: int, capacity: int, *, routes: bool = False) -> JointCache:
        """Return two caches. routes: the student's."""
        return JointCache(num_sequences, capacity, routes=routes)

    def cache_bytes(self) -> int:
        return self.student.cache_bytes() + self.teacher.cache_bytes()

    def state_bytes(self) -> int:
        return self.student.state_bytes() + self.teacher.state_bytes()

    def holds(self, prompt: int, length: int) -> bool:
        return self.student.holds(prompt, length) and self.teacher.holds(prompt, length)

    def prefill(self, batch: Batch, cache: JointCache, rows: Sequence[int] | None = None) -> Tensor:
        return self._both(lambda model, own: model.prefill(batch, own, rows), cache)

    def step(self, tokens_S: Tensor, cache: JointCache) -> Tensor:
        return self._both(lambda model, own: model.step(tokens_S, own), cache)

    def logits(self, hidden_TE: Tensor) -> Tensor:
        """Return log p_T + γ log p_S, [T, words] in float32; not normalised."""
        width = self.student.shape.hidden_size
        own_TV = self.student.logits(hidden_TE[:, :width])[:, : self.words].log_softmax(-1)
        with self.around():
            said_TV = self.teacher.logits(hidden_TE[:, width:])[:, : self.words].log_softmax(-1)
        return said_TV.add_(own_TV, alpha=self.gamma)

    def _both(self, run: Callable[[Decoder, Cache], Tensor], cache: JointCache) -> Tensor:
        own_TD = run(self.student, cache)
        with self.around():
            said_TE = run(self.teacher, cache.teacher)
        return torch.cat([own_TD, said_TE], 1)


class JointCache(Cache):
    """The student's cache together with the teacher's; rows come to both and leave both."""

    def __init__(self, num_sequences: int, capacity: int, *, routes: bool = False):
        super().__init__(num_sequences, capacity, routes=routes)
        self.teacher = Cache(num_sequences, capacity)

    def more(self, count: int) -> None:
        self.teacher.more(count)
        super().more(count)

    def fork(self, source: int, rows: Sequence[int], length: int) -> None:
        self.teacher.fork(source, rows, length)
        super().fork(source, rows, length)

    def keep(self, rows: list[int]) -> list[int]:
        self.teacher.keep(rows)
        return super().keep(rows)


def joint_engine(
    joint: Joint, tokenizer: EngineTokenizer | None = None, stop_ids: frozenset[int] = frozenset()
) -> Engine:
    """Return an Engine that samples from both. Its logprobs are of the mixture."""
    engine = Engine(joint, tokenizer=tokenizer, stop_ids=stop_ids, steps=launched)  # type: ignore[arg-type]
    engine.num_ids = min(engine.num_ids, joint.words)
    return engine
