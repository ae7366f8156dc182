"""unfreeze distill --prepare FOLDER: run the teacher once over every document and store its outputs.

Training then reads the folder (--teacher FOLDER), without the teacher in memory. The same command resumes an
interrupted preparation; documents already stored are skipped.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unfreeze.config.distill import BASE, Config
from unfreeze.config.parse import writing as written
from unfreeze.core.command import Common
from unfreeze.core.errors import CheckpointError, ConfigError
from unfreeze.core.torchrun import started
from unfreeze.core.units import format_bytes, plural
from unfreeze.job.data import check_vocabulary, longer_by, sequence_length
from unfreeze.job.end.folder import with_files
from unfreeze.job.opening.device import pick_device, say
from unfreeze.job.opening.processes import opened_start
from unfreeze.job.parts import Parts
from unfreeze.kernels.precision import precision
from unfreeze.teach.address import base_url, is_url
from unfreeze.teach.coding import Coding, top_of
from unfreeze.teach.served import Asking
from unfreeze.teach.store import FORMAT, StoreWriter, asked_about, is_store, one_writer, refuse_other_head
from unfreeze.teach.teacher import Asked

if TYPE_CHECKING:
    from unfreeze.core.batch import Batch
    from unfreeze.data import Example
    from unfreeze.objectives.divergence import Teacher

BLOCK = 128  # positions whose logits are in memory at once
SAMPLED = 256  # at most this many tensors are hashed, 4096 bytes each, to identify a teacher


def ask_ahead(config: Config, parts: Parts, common: Common) -> dict[str, Any]:
    """-> teacher (the folder), documents, tokens, bytes, bytes_per_token, asked (number of new documents)."""
    teacher, url = parts.second, is_url(config.teacher)
    if not url and (not isinstance(teacher, Asked) or config.teacher == BASE or is_store(config.teacher)):
        raise ConfigError(
            f"--prepare needs a teacher in a folder, a run or a server, not {config.teacher!r}",
            next="--teacher DIR_OR_RUN_OR_URL",
        )
    if url and config.distillation.temperature != 1:
        raise ConfigError(
            f"temperature = {config.distillation.temperature:g}: a server gives probabilities at"
            " temperature 1 only",
            next="leave --temperature out",
        )
    if started().size > 1:
        raise ConfigError("--prepare runs in one process", next="run it without torchrun")

    # tokenizer and rows, as a run with this config has them
    data, distillation = config.data, config.distillation
    start = opened_start(config, parts, common)

    from unfreeze import models
    from unfreeze.config.template import template_time, template_values
    from unfreeze.data import encoded_files, load_tokenizer
    from unfreeze.teach.vocabulary import vocabulary
    from unfreeze.tracking.live import EncodeProgress

    shape = models.shape(start.config)
    now, variables = template_time(data.template_date), template_values(data.template_variables)
    tokenizer = load_tokenizer(start.path, now=now, template_variables=variables)
    check_vocabulary(tokenizer, shape, start)
    if teacher is not None:
        teacher.check(start, tokenizer)
    tokens = config.tokens_per_micro_batch
    length = sequence_length(data, tokens, shape.max_positions)
    with EncodeProgress(quiet=common.quiet) as progress, longer_by(length, data.sequence_length, tokens):
        dataset = encoded_files(
            with_files(config).data.files,
            tokenizer,
            length,
            truncation=data.truncation,
            on_bad_row=data.on_bad_row,
            columns=data.columns,
            progress=progress,
            **parts.encoding,
        )

    # the folder: new, or partly filled
    words = vocabulary(tokenizer)
    coding = Coding(distillation.coding, min(distillation.top_k, words.size), words.size)
    head = {
        "format": FORMAT,
        "teacher": _name(teacher) if isinstance(teacher, Asked) else _served(config),
        "vocabulary": {"size": words.size, "hash": words.hash},
        "temperature": float(distillation.temperature),
        "top_k": coding.top_k,
        "coding": coding.name,
        "bytes_per_token": coding.nbytes,
    }
    folder, show = Path(config.prepare), say(common)
    server = None
    if url:  # refuse before creating a folder
        if is_store(folder):
            refuse_other_head(folder, head)
        server = Asking(config.teacher, config.endpoint, folder, coding, dataset.examples, show)
    documents, supervised = len(dataset.examples), int(dataset.examples.supervised_N.sum())
    with written(folder, "prepare"), one_writer(folder):
        writing = StoreWriter(folder, head, coding)
        before = len(writing.done)
        if server is not None:
            server.into(writing, tokenizer)
        elif isinstance(teacher, Asked):
            _ask_all(teacher, config, writing, asked_about(dataset.examples, writing, tokens), show)
        writing.finish(documents=documents, tokens=supervised)
    size = sum(path.stat().st_size for path in writing.folder.glob("part-*"))
    show(
        f"{writing.folder}: {supervised:,} tokens of {plural(documents, 'document')},"
        f" {coding.nbytes} bytes a token, {format_bytes(size)}"
    )
    show(f"next: the same command with --teacher {writing.folder} instead of --prepare")
    return {
        "teacher": str(writing.folder),
        "documents": documents,
        "tokens": supervised,
        "bytes": size,
        "bytes_per_token": coding.nbytes,
        "asked": len(writing.done) - before,
    }


def _ask_all(
    teacher: Asked,
    config: Config,
    writing: StoreWriter,
    batches: Iterator[tuple[list[Example], Batch]],
    show: Callable[[str], None],
) -> None:
    """Load the teacher if documents are missing, and ask about these."""
    if (first := next(batches, None)) is None:
        return
    device, before = pick_device(config.memory.device, config.memory.threads), len(writing.done)
    model = teacher.load(device, precision(config.memory.dtype, device).name)
    try:
        for examples, batch in chain([first], batches):
            ask(writing, model, examples, batch.to(device))
            show(f"asked about {plural(len(writing.done) - before, 'document')}")
    finally:  # also on Ctrl-C: keep the outputs so far
        writing.flush()


def ask(writing: StoreWriter, teacher: Teacher, examples: Sequence[Example], batch: Batch) -> None:
    """Store the teacher's outputs for a batch of documents. Raises CheckpointError for a NaN."""
    import numpy as np
    import torch

    log_q, rows, like = teacher(batch), len(batch.supervised()), torch.empty(0, device=batch.tokens_T.device)
    coding = writing.coding
    blocks = [slice(first, min(first + BLOCK, rows)) for first in range(0, rows, BLOCK)]
    ends = np.cumsum([0, *(example.num_supervised for example in examples)])
    raw: list[Any] = []
    for block in blocks:
        ids_BK, log_q_BK, rest_B = top_of(log_q(block, like), coding.top_k)
        bad_B = np.isnan(log_q_BK).any(1) | np.isnan(rest_B)
        if bad_B.any():  # softmax turns one NaN into a row of NaN
            token = block.start + int(bad_B.argmax())
            row = examples[int(np.searchsorted(ends, token, side="right")) - 1].row
            raise CheckpointError(
                f"the teacher's output is NaN at a token of row {row}",
                next="use --dtype float32; if that is already so, download the teacher again",
            )
        raw.append(coding.encode(ids_BK, log_q_BK, rest_B))
    rows_NB = np.concatenate(raw or [np.empty((0, coding.nbytes), np.uint8)])
    for example, (first, end) in zip(examples, pairwise(ends), strict=True):
        writing.add(example.checksum, rows_NB[first:end])


def _served(config: Config) -> str:
    """Name a server teacher: its model and its address."""
    return f"{config.endpoint.served_name or 'model'} at {base_url(config.teacher)}"


def _name(teacher: Asked) -> str:
    """Name a local teacher: its name and a hash of its config, headers, SAMPLED tensors and adapter.

    The headers alone are not enough: two saves of one run have the same.
    """
    source, manifest = teacher.opened
    infos = sorted(manifest.tensors.values(), key=lambda info: info.name)
    tensors = [(info.name, info.dtype, info.shape, info.offset) for info in infos]
    digest = hashlib.sha256(json.dumps([manifest.config, tensors], sort_keys=True, default=str).encode())
    for info in infos[:: -(-len(infos) // SAMPLED) or 1]:
        with info.file.open("rb") as file:
            file.seek(info.offset)
            digest.update(file.read(min(info.nbytes, 4096)))
    for path in sorted(source.adapter.glob("*.safetensors")) if source.adapter else ():
        digest.update(path.read_bytes())
    return f"{Path(teacher.name).name} {digest.hexdigest()[:12]}"
