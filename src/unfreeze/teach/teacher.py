"""Teachers that are queried while training: a checkpoint, a run, or the model without its adapters.

A teacher is frozen and computes in the run's dtype. It runs once per micro-batch, at the supervised rows.
T tokens of a micro-batch, N supervised ones, B rows of a block, D the teacher's width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from unfreeze.checkpoint.same import same_weights
from unfreeze.config.adapter import rounded_as
from unfreeze.config.distill import BASE
from unfreeze.core.errors import CheckpointError, ConfigError
from unfreeze.teach.second import Beside, Objective, Second
from unfreeze.teach.vocabulary import Vocabulary, refuse_other, vocabulary

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from unfreeze.checkpoint.manifest import Manifest
    from unfreeze.core.batch import Batch, Loss
    from unfreeze.data.tokens.tokenizer import Tokenizer
    from unfreeze.generate.source import ModelSource
    from unfreeze.models import Decoder
    from unfreeze.models.blocks.taps import Taps
    from unfreeze.objectives.divergence import LogProbs, Teacher
    from unfreeze.parallel.plan.aside import Aside
    from unfreeze.teach.inside import Inside

ToObjective = Callable[["Teacher", int], Objective]
"""(teacher function, vocabulary size) -> objective."""


class AsTrained(NamedTuple):
    """A run that was trained through the rounding of its merge, computing as it was trained.

    open    (name, say) -> its model; its base is packed again if the run packed it
    round   (model, manifest, adapter): round it from now on
    nbytes  (model on meta, adapter, dtype, device) -> bytes that its rounding takes
    """

    open: Callable[[str, Callable[[str], None] | None], tuple[ModelSource, Manifest]]
    round: Callable[[Decoder, Manifest, Path], None]
    nbytes: Callable[[Decoder, Path, torch.dtype, torch.device], int]


class Asked(Second):
    """A second model queried while training: a checkpoint folder, a Hub id, a run, an adapter's folder.

    name        as the user wrote it
    temperature divisor of its logits
    minimise    (its outputs, vocabulary size) -> the objective
    beta        as in the objective; determines its block of logits for the plan
    inside      layers to compare too
    loss        the objective in words
    shares      True if adapters train, so that an adapter of the model's own base needs no second copy of
                it
    as_trained  for runs that were trained through a rounding; None: their adapters compute as LoRA
    """

    def __init__(
        self,
        name: str,
        minimise: ToObjective,
        *,
        temperature: float = 1.0,
        beta: float = 0.0,
        inside: Inside | None = None,
        loss: str = "",
        shares: bool = False,
        as_trained: AsTrained | None = None,
    ):
        self.as_trained = as_trained
        self.name, self.minimise, self.temperature, self.beta = name, minimise, temperature, beta
        self.inside, self.loss, self.shares = inside, loss, shares
        self._words, self._start = 0, cast("Manifest | None", None)
        self._meta: dict[torch.dtype, Decoder] = {}
        self._opened: tuple[ModelSource, Manifest] | None = None

    def open(self, say: Callable[[str], None] | None = None) -> None:
        """Resolve the name; a Hub id is downloaded. Raises UserError if it cannot be read."""
        self._opened = self._found(say)

    @property
    def opened(self) -> tuple[ModelSource, Manifest]:
        """The resolved model."""
        self._opened = self._found()
        return self._opened

    def _found(self, say: Callable[[str], None] | None = None) -> tuple[ModelSource, Manifest]:
        from unfreeze.generate.source import open_source

        if self._opened is not None:
            return self._opened
        source, manifest = open_source(self.name, say)
        rounded = self._rounded(source)
        return rounded.open(self.name, say) if rounded else (source, manifest)

    def _rounded(self, source: ModelSource) -> AsTrained | None:
        """Return how it was trained if that was through a rounding, else None."""
        through = source.adapter is not None and rounded_as(source.adapter) is not None
        return self.as_trained if through else None

    def check(self, start: Manifest, tokenizer: Tokenizer) -> None:
        """Raise CheckpointError for another vocabulary, ConfigError for the model itself as a teacher."""
        source, manifest = self.opened
        self._start = start
        own = self._vocabulary(manifest)
        refuse_other(vocabulary(tokenizer), own, self.name)
        as_long = manifest.longer == start.longer
        if source.adapter is None and as_long and same_weights(manifest, start):
            itself = manifest.path.resolve() == start.path.resolve()
            what = "is the model itself" if itself else f"looks like a copy of the model ({start.path})"
            raise ConfigError(
                f"the teacher {self.name} {what}, so nothing would be learned",
                next=(
                    f"another --teacher; or --teacher {BASE} --alpha 0.5: the model with its adapters off,"
                    " without a second copy"
                ),
            )
        self._words = own.size

    def _vocabulary(self, manifest: Manifest) -> Vocabulary:
        from unfreeze.data.tokens.tokenizer import check_vocab, has_tokenizer, load_tokenizer
        from unfreeze.models import shape

        if not has_tokenizer(manifest.path):
            raise CheckpointError(
                f"the teacher {self.name} has no tokenizer, so its ids cannot be matched to the model's",
                next=f"copy its tokenizer.json (or tiktoken.model) into {manifest.path}",
            )
        tokenizer = load_tokenizer(manifest.path)
        check_vocab(tokenizer, shape(manifest.config).vocab_size)
        return vocabulary(tokenizer)

    def said(self, start: Manifest) -> str:
        """'learns from: runs/t (kimi_k2, 2.4 MB, frozen); forward KL, temperature 1'."""
        from unfreeze.models import shape
        from unfreeze.report.run import decimal_bytes

        source, manifest = self.opened
        size = decimal_bytes(manifest.nbytes + adapter_bytes(source.adapter))
        kind = shape(manifest.config).kind
        if self._on_the_same(start):
            kind, size = "an adapter of the same base", decimal_bytes(adapter_bytes(source.adapter))
        return f"learns from: {self.name} ({kind}, {size}, frozen); {self.loss}"

    def _on_the_same(self, start: Manifest) -> bool:
        """Return True for an adapter on the model's own base: if adapters train, one base serves both.

        One that was trained through a rounding has rounded weights of its own.
        """
        source, manifest = self.opened
        if self._rounded(source):
            return False
        same = source.adapter is not None and manifest.path.resolve() == start.path.resolve()
        return same and self.shares and manifest.longer == start.longer

    def aside(self, beside: Beside) -> Aside:
        """Return its memory for the plan."""
        source, manifest = self.opened
        adds = {"more": adapter_bytes(source.adapter), "shared": self._on_the_same(beside.start)}
        aside = self._aside(manifest, beside, **adds)
        if (rounded := self._rounded(source)) and source.adapter is not None:
            size = rounded.nbytes(self._meta[beside.dtype], source.adapter, beside.dtype, beside.device)
            aside = replace(aside, stays=aside.stays + size)
        return aside

    def _aside(self, manifest: Manifest, beside: Beside, **more: Any) -> Aside:
        from unfreeze.models import meta_model, shape
        from unfreeze.objectives.divergence import bytes_per_logit, divergence_rows
        from unfreeze.parallel.plan.aside import aside_of

        start, tokens, longest, dtype = beside.start, beside.tokens, beside.longest, beside.dtype
        device, trained = beside.device, beside.head_trains
        if (model := self._meta.get(dtype)) is None:
            stored = device.type == "cpu"
            model = self._meta[dtype] = meta_model(shape(manifest.config), manifest, dtype, as_stored=stored)
        student = shape(start.config)
        rows = divergence_rows(0, student.vocab_size, dtype, device, trained, self.beta)
        each = bytes_per_logit(dtype, self.beta) + dtype.itemsize * (student.softcap is not None)
        aside = aside_of(model, tokens, longest, device, loss_rows=rows, loss_bytes=each, **more)
        if self.inside is None:
            return aside
        own = meta_model(student, start, dtype)
        read = self.inside.read(own, model, tokens, longest, dtype.itemsize)
        return replace(
            aside, tapped=read.tapped, compared=read.compared, later=read.later, learnt=read.trained
        )

    def objective(self, model: Decoder, device: torch.device, dtype: str) -> Objective:
        """Load it, frozen (only the adapter if on the model's own base), and return the objective."""
        if self._start is None or not self._on_the_same(self._start):
            return self._minimised(model, self._loaded(device, dtype))
        adapter = self.opened[0].adapter
        assert adapter is not None  # _on_the_same found one
        return self._minimised(model, model, own=True, adapters=adapters_of(model, adapter))

    def load(self, device: torch.device, dtype: str) -> Teacher:
        """Load its weights."""
        return partial(teacher_log_probs, self._loaded(device, dtype), self._words, self.temperature)

    def _minimised(self, model: Decoder, teacher: Decoder, **how: Any) -> Objective:
        says = partial(teacher_log_probs, teacher, self._words, self.temperature, **how)
        if self.inside is None:
            return self.minimise(says, self._words)

        def words(hidden_TD: Tensor, lm_head: nn.Module, batch: Batch, teacher_says: Teacher) -> Loss:
            return self.minimise(teacher_says, self._words)(hidden_TD, lm_head, batch)

        # it has a field `taps`, so it is called with one more argument (train/step.py)
        compared = self.inside.objective(model, teacher, lambda batch, taps: says(batch, taps=taps), words)
        return cast(Any, compared)

    def _loaded(self, device: torch.device, dtype: str) -> Decoder:
        from unfreeze.adapters.read import load_adapter
        from unfreeze.generate.open import dtype_of, open_model
        from unfreeze.models.finite import bad_weight

        source, manifest = self.opened
        teacher = open_model(manifest, dtype_of(dtype), device, as_stored=True)
        if source.adapter is not None:
            load_adapter(teacher, source.adapter)
        if bad := bad_weight(teacher, updated=False):
            raise CheckpointError(
                f"the teacher {self.name} holds {bad[0]} in {bad[1]}: nothing can be learned from it",
                next="download its checkpoint again; unfreeze doctor looks at every weight",
            )
        if (rounded := self._rounded(source)) and source.adapter is not None:
            rounded.round(teacher, manifest, source.adapter)
        return teacher.eval().requires_grad_(False)


class BaseAsked(Asked):
    """The model itself with its adapters disabled: no second copy in memory, and no file is read."""

    def __init__(self, minimise: ToObjective, **options: Any):
        super().__init__(BASE, minimise, **options)

    def open(self, say: Callable[[str], None] | None = None) -> None:
        """Do nothing: the model itself is open."""

    def check(self, start: Manifest, tokenizer: Tokenizer) -> None:
        self._words = vocabulary(tokenizer).size

    def said(self, start: Manifest) -> str:
        return f"learns from: itself with its adapters off, no second copy; {self.loss}"

    def aside(self, beside: Beside) -> Aside:
        return self._aside(beside.start, beside, shared=True)

    def objective(self, model: Decoder, device: torch.device, dtype: str) -> Objective:
        return self._minimised(model, model, own=True)


def adapters_of(model: Decoder, folder: Path) -> dict[str, nn.Module]:
    """Load a folder's adapter by module name, frozen and unattached; the model keeps its own."""
    from unfreeze.adapters import attached, load_adapter, without_adapters

    with without_adapters(model):
        load_adapter(model, folder)
        adapters = attached(model)
    for adapter in adapters.values():
        adapter.requires_grad_(False)
    return adapters


def adapter_bytes(folder: Path | None) -> int:
    """Return the bytes of an adapter's files; 0 without one."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors")) if folder else 0


def teacher_log_probs(
    teacher: Decoder,
    words: int,
    temperature: float,
    batch: Batch,
    *,
    own: bool = False,
    adapters: Mapping[str, nn.Module] | None = None,
    taps: Taps | None = None,
) -> LogProbs:
    """Return log softmax(z / τ) over the first `words` ids, at the supervised rows, a block at a time.

    Until the last block, the teacher's hidden states of these rows, [N, D], stay alive.
    own: the teacher is the trained model; `adapters` temporarily replace its own, or none.
    taps: filled along the way.
    """
    import torch

    from unfreeze.adapters import with_adapters
    from unfreeze.models.recompute import keep_inputs

    off: Callable[[], Any] = partial(with_adapters, teacher, adapters or {}) if own else nullcontext
    with torch.no_grad(), off(), teacher.looking():
        hidden_TD = teacher.hidden(batch, recompute=keep_inputs, taps=taps)
        hidden_ND = hidden_TD.index_select(0, batch.supervised())
        del hidden_TD

    def log_q(rows: slice, log_p_BV: Tensor) -> Tensor:
        # half-precision logits are freed before their softmax exists: bytes_per_logit counts no more
        with torch.no_grad(), off():
            z_BV = teacher.lm_head(hidden_ND[rows])[:, :words].to(log_p_BV.dtype)
        if temperature != 1:
            z_BV /= temperature
        return z_BV.log_softmax(-1)

    return log_q
