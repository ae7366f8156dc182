"""The check of `unfreeze doctor` that loads the model: one forward pass is finite."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from unfreeze.core.units import format_bytes, plural
from unfreeze.job.doctor.finding import Finding

if TYPE_CHECKING:
    from unfreeze.job.doctor.checks import Subject

SMOKE_TOKENS = 32
# the numerics check loads no larger model: 4 GiB take seconds to read, 594 GB take an hour
SMOKE_BYTES = 4 * 2**30


def check_numerics(subject: Subject) -> Iterator[Finding]:
    """Run one forward pass of 32 tokens: every number must be finite. Yields nothing for a new model."""
    if subject.parts.new:
        return
    if subject.manifest.nbytes > SMOKE_BYTES:
        size = format_bytes(subject.manifest.nbytes)
        yield Finding(
            "numerics", "skip", f"the model has {size}; this check loads at most {format_bytes(SMOKE_BYTES)}"
        )
        return
    import torch

    from unfreeze.data import Example, pack
    from unfreeze.generate.open import dtype_of, open_model
    from unfreeze.objectives.cross_entropy import cross_entropy

    # no warnings: check_checkpoint has reported these notes
    model = open_model(
        subject.manifest,
        dtype_of(subject.config.memory.dtype),
        subject.device,
        warn=lambda note: None,
        as_stored=True,
    )
    kept = model.state_dict().keys()  # scales of packed weights are buffers; codes of one byte are no numbers
    stored = [*model.named_parameters(), *(each for each in model.named_buffers() if each[0] in kept)]
    wide = [each for each in stored if each[1].element_size() > 1]
    worst = [name for name, tensor in wide if not bool(tensor.isfinite().all())]
    if worst:
        yield Finding(
            "numerics",
            "fault",
            f"{plural(len(worst), 'tensor')} with NaN or infinity; first: {worst[0]}",
            "download the checkpoint again",
        )
        return
    tokens = [(7 * i) % subject.shape.vocab_size for i in range(SMOKE_TOKENS)]
    batch = pack([Example(tokens, [0.0] + [1.0] * (SMOKE_TOKENS - 1))]).to(subject.device)
    with torch.no_grad():
        hidden_TD = model.hidden(batch)
        loss = cross_entropy(hidden_TD, model.lm_head, batch)
    largest, mean = float(hidden_TD.abs().max()), float(loss.sum) / float(loss.count)
    line = (
        f"{SMOKE_TOKENS} tokens in {subject.config.memory.dtype}: largest hidden value {largest:.3g}, loss"
        f" {mean:.2f}"
    )
    narrow = subject.config.memory.dtype != "float32"
    finite = bool(hidden_TD.isfinite().all()) and mean == mean
    yield Finding(
        "numerics",
        "ok" if finite else "fault",
        line,
        "" if finite else "--dtype float32, or: " * narrow + "unfreeze dev bisect MODEL --against hf",
    )
