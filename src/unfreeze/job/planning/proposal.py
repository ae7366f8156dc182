"""Propose settings for a first run, from the data's lengths, the model's shape and this machine's memory.

Each has a reason, for `unfreeze init` to write. They are a starting point, not an optimum.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from unfreeze.config.lora import LoraConfig
from unfreeze.config.names import nested
from unfreeze.config.sft import ALL_RATE, Config
from unfreeze.core.units import format_bytes, format_count, plural
from unfreeze.job.data import steps_of
from unfreeze.job.end.folder import with_files
from unfreeze.job.opening.device import pick_device
from unfreeze.job.planning.plan import Planning
from unfreeze.job.trained import Adapters
from unfreeze.kernels.precision import AUTO, precision

if TYPE_CHECKING:
    from unfreeze.checkpoint import Manifest
    from unfreeze.data import Dataset
    from unfreeze.models import Shape
    from unfreeze.parallel.plan import Plan

LONGEST = 32_768
"""Largest sequence length, in tokens, that is proposed."""
STEPS_AN_EPOCH = 50
"""The proposal lowers tokens per step to reach this many steps an epoch."""
SMALL_MODEL = 50e6
"""Below this many parameters, adapters learn little at 2e-4. The demo has 2 million and uses 1e-3."""
LARGE_MODEL = 20e9
"""From this many parameters on, half the learning rate is proposed: QLoRA (arXiv:2305.14314) took 2e-4 for
7 and 13 billion parameters, 1e-4 for 33 and 65."""
AIM_STEPS = 100
"""Proposed minimum of steps: 45 steps on 120 rows left three of four answers of tiny-k2 unchanged."""
HELD_OUT = 0.05


@dataclass(frozen=True)
class ProposedField:
    """A config field (`place`: its dotted name), its value and the reason."""

    place: str
    value: object
    reason: str


@dataclass
class Proposal:
    """Model and data of a first run, and the settings proposed for them."""

    model: str
    data: Sequence[str]
    columns: Sequence[str]
    manifest: Manifest
    parameters: int | None

    @cached_property
    def shape(self) -> Shape:
        from unfreeze import models

        return models.shape(self.manifest.config)

    @cached_property
    def dataset(self) -> Dataset:
        """The rows encoded at the greatest length, so that few are cut. Bad rows are counted."""
        return self._encoded(min(self.shape.max_positions, LONGEST))

    def _encoded(self, length: int) -> Dataset:
        from unfreeze.data import encoded_files, load_tokenizer

        data = with_files(self.config({})).data
        tokenizer = load_tokenizer(self.manifest.path)
        return encoded_files(data.files, tokenizer, length, on_bad_row="skip", columns=data.columns)

    def config(self, more: Mapping[str, object]) -> Config:
        """Config of the run with `more` fields (dotted name -> value)."""
        fields = {"model": self.model, "data.files": tuple(self.data), "data.columns": tuple(self.columns)}
        return Config.model_validate(nested({**fields, **more}))

    def plan(self, config: Config) -> Plan:
        """Memory plan of this config on this machine."""
        assert config.lora is not None
        trained = Adapters(config.lora, config.seed)
        trained.check(self.manifest)
        lengths = self.dataset.examples.lengths_N.clip(max=config.tokens_per_micro_batch).tolist()
        device = pick_device(config.memory.device)
        return Planning(config, trained, self.manifest, self.shape, device, lengths).first()[1]

    def choices(self) -> list[ProposedField]:
        """Every choice, in the order of the file. Raises DoesNotFit if no settings fit."""
        from unfreeze.parallel.plan import refuse_if_too_large

        wanted = self._length(), self._tokens(self._length())
        tried: Plan | None = None
        for length, micro_batches, rank in _smaller(*wanted):
            tokens = max(wanted[1], length)
            values = {
                "data.sequence_length": length,
                "training.tokens_per_step": tokens,
                "memory.micro_batches": micro_batches,
                "lora.rank": rank,
                "lora.alpha": 2.0 * rank,
            }
            plan = self.plan(self.config(values))
            if plan.fits:
                data = list(self._data(length))
                chosen = {**values, **{choice.place: choice.value for choice in data}}
                return [*data, *self._training(chosen), *self._memory(values, plan)]
            tried = tried or plan
        assert tried is not None
        refuse_if_too_large(tried)
        return []

    def _length(self) -> int:
        """Length of the longest document, rounded up to a multiple of 64."""
        longest = int((self.dataset.examples.lengths_N + self.dataset.examples.cuts_N).max())
        return min(-(-max(longest, 64) // 64) * 64, self.shape.max_positions, LONGEST)

    def _tokens(self, length: int) -> int:
        """Power of two giving about STEPS_AN_EPOCH steps an epoch; 512 to 16,384, at least one document."""
        aim = self.dataset.stats.tokens / STEPS_AN_EPOCH
        power = 2 ** round(math.log2(max(aim, 1)))
        return max(min(max(power, 512), 16_384), length)

    def _data(self, length: int) -> Iterator[ProposedField]:
        examples, stats = self.dataset.examples, self.dataset.stats
        whole_N = examples.lengths_N + examples.cuts_N
        over = int((whole_N > length).sum())
        reason = f"the longest of {plural(len(examples), 'document')} has {int(whole_N.max()):,} tokens"
        if over:
            most = length == self.shape.max_positions
            reason += (
                f"; {over:,} are cut:"
                f" {'the model takes no longer ones' if most else 'a larger value takes more memory'}"
            )
        yield ProposedField("data.sequence_length", length, reason)
        if stats.bad:
            reason = f"{stats.bad:,} of {stats.rows:,} rows cannot be read; unfreeze data show lists them"
            yield ProposedField("data.on_bad_row", "skip", reason)
        if len(examples) >= 200:
            held = f"about {round(HELD_OUT * len(examples)):,} documents, to tell learning from memorising"
            yield ProposedField("data.validation_fraction", HELD_OUT, held)

    def _training(self, values: Mapping[str, Any]) -> Iterator[ProposedField]:
        tokens, stats, length = int(values["training.tokens_per_step"]), self.dataset.stats, self._length()
        cut = int(values["data.sequence_length"]) < length
        examples = (self._encoded(int(values["data.sequence_length"])) if cut else self.dataset).examples

        def steps(epochs: float) -> int:
            return steps_of(self.config({**values, "training.epochs": epochs}), examples)[0]

        epochs = 3.0 if stats.tokens < 20e6 else 1.0
        why = "usual for some thousand rows" if epochs == 3 else "with this much data one pass teaches most"
        if steps(epochs) < AIM_STEPS:
            epochs, why = float(math.ceil(AIM_STEPS / steps(1))), "the data is small"
        yield ProposedField("training.epochs", epochs, f"{why}; {plural(steps(epochs), 'step')} in all")
        reason = f"{format_count(stats.tokens)} tokens give {plural(steps(1), 'step')} an epoch"
        yield ProposedField("training.tokens_per_step", tokens, reason)
        rate = 2e-4
        if self.parameters:
            rate = 1e-3 if self.parameters < SMALL_MODEL else 1e-4 if self.parameters >= LARGE_MODEL else rate
        size = f"{format_count(self.parameters)} parameters" if self.parameters else "unknown size"
        reason = (
            f"{size}; QLoRA used 2e-4 for 7 and 13 billion, 1e-4 for more, our demo 1e-3 for 2 million."
            " Tune this first."
            f' With train = "all": {ALL_RATE:g}, without [lora].'
        )
        yield ProposedField("optimizer.learning_rate", rate, reason)

    def _memory(self, values: Mapping[str, Any], plan: Plan) -> Iterator[ProposedField]:
        here = precision(AUTO, pick_device("auto"))
        yield ProposedField("memory.dtype", AUTO, f"{here.name} here: {here.why}")
        fits = f"{format_bytes(plan.total)} planned of {format_bytes(plan.usable)} usable"
        yield ProposedField(
            "memory.micro_batches",
            int(values["memory.micro_batches"]),
            f"{fits}; raise it if memory is short",
        )
        rank = int(values["lora.rank"])
        reason = f"{format_count(plan.adapter_parameters)} trained parameters" + (
            "" if rank == LoraConfig().rank else "; 16 takes more memory than this machine has"
        )
        yield ProposedField("lora.rank", rank, reason)
        yield ProposedField("lora.alpha", values["lora.alpha"], "2 x rank")


def _smaller(length: int, tokens: int) -> Iterator[tuple[int, int, int]]:
    """Yield (length, micro-batches, rank), each needing less memory than the one before."""
    for shorter in (length, *(length // 2**i for i in range(1, 8) if length // 2**i >= 256)):
        parts = [2**i for i in range(12) if tokens // 2**i >= shorter] or [1]
        for rank in (16, 8, 4):
            for micro_batches in parts if rank == 16 else parts[-1:]:
                yield shorter, micro_batches, rank
