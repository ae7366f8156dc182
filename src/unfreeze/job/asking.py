"""unfreeze distill --prepare FOLDER: ask the teacher about every document once, and keep what it says.

Training then reads the folder (--teacher FOLDER), and the teacher need not be in memory. What was broken off
goes on with the same command; a document that is there already is not asked about again.
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
from unfreeze.core.units import format_bytes
from unfreeze.job.data import check_vocabulary, longer_by, sequence_length
from unfreeze.job.end.folder import with_files
from unfreeze.job.opening.device import pick_device, say
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

BLOCK = 128  # rows whose logits exist at once
SAMPLED = 256  # tensors at most, of whose bytes the first 4096 tell one teacher from another


def ask_ahead(config: Config, parts: Parts, common: Common) -> dict[str, Any]:
    """-> teacher: the folder; documents, tokens, bytes, bytes_per_token; asked: how many were new."""
    teacher, url = parts.second, is_url(config.teacher)
    if not url and (not isinstance(teacher, Asked) or config.teacher == BASE or is_store(config.teacher)):
        raise ConfigError(
            f"--prepare asks a teacher in a folder, a run or a server, not {config.teacher!r}",
            next="--teacher DIR_OR_RUN_OR_URL",
        )
    if url and config.distillation.temperature != 1:
        raise ConfigError(
            f"temperature = {config.distillation.temperature:g}: a server says its probabilities at 1",
            next="without --temperature",
        )
    if started().size > 1:
        raise ConfigError("--prepare is one process's work", next="give it without torchrun")

    # names, words, rows: as a run of this config has them
    data, asked = config.data, config.distillation
    start = parts.start(config.model, common)

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

    # the folder: new, or as far as it came
    words = vocabulary(tokenizer)
    coding = Coding(asked.coding, min(asked.top_k, words.size), words.size)
    head = {
        "format": FORMAT,
        "teacher": _name(teacher) if isinstance(teacher, Asked) else _served(config),
        "vocabulary": {"size": words.size, "hash": words.hash},
        "temperature": float(asked.temperature),
        "top_k": coding.top_k,
        "coding": coding.name,
        "bytes_per_token": coding.nbytes,
    }
    folder, tell = Path(config.prepare), say(common)
    server = None
    if url:  # what is refused is refused before there is a folder
        if is_store(folder):
            refuse_other_head(folder, head)
        server = Asking(config.teacher, config.endpoint, folder, coding, dataset.examples, tell)
    documents, supervised = len(dataset.examples), int(dataset.examples.supervised_N.sum())
    with written(folder, "prepare"), one_writer(folder):
        writing = StoreWriter(folder, head, coding)
        had = len(writing.done)
        if server is not None:
            server.into(writing, tokenizer)
        elif isinstance(teacher, Asked):
            _ask_all(teacher, config, writing, asked_about(dataset.examples, writing, tokens), tell)
        writing.finish(documents=documents, tokens=supervised)
    size = sum(path.stat().st_size for path in writing.folder.glob("part-*"))
    tell(
        f"{writing.folder}: {supervised:,} tokens of {documents:,} documents, {coding.nbytes} bytes a token,"
        f" {format_bytes(size)}"
    )
    tell(f"next: the same command with --teacher {writing.folder}, without --prepare")
    return {
        "teacher": str(writing.folder),
        "documents": documents,
        "tokens": supervised,
        "bytes": size,
        "bytes_per_token": coding.nbytes,
        "asked": len(writing.done) - had,
    }


def _ask_all(
    teacher: Asked,
    config: Config,
    writing: StoreWriter,
    batches: Iterator[tuple[list[Example], Batch]],
    tell: Callable[[str], None],
) -> None:
    """Load the teacher where something is lacking, and ask about that."""
    if (first := next(batches, None)) is None:
        return
    device, had = pick_device(config.memory.device, config.memory.threads), len(writing.done)
    says = teacher.load(device, precision(config.memory.dtype, device).name)
    try:
        for examples, batch in chain([first], batches):
            ask(writing, says, examples, batch.to(device))
            tell(f"asked about {len(writing.done) - had:,} documents")
    finally:  # of Ctrl-C too: what was said is kept
        writing.flush()


def ask(writing: StoreWriter, says: Teacher, examples: Sequence[Example], batch: Batch) -> None:
    """Add what a teacher says of a batch of documents. Raises CheckpointError where that is no number."""
    import numpy as np
    import torch

    log_q, rows, like = says(batch), len(batch.supervised()), torch.empty(0, device=batch.tokens_T.device)
    coding = writing.coding
    blocks = [slice(first, min(first + BLOCK, rows)) for first in range(0, rows, BLOCK)]
    ends = np.cumsum([0, *(example.num_supervised for example in examples)])
    raw: list[Any] = []
    for block in blocks:
        ids_BK, log_q_BK, rest_B = top_of(log_q(block, like), coding.top_k)
        bad_B = np.isnan(log_q_BK).any(1) | np.isnan(rest_B)
        if bad_B.any():  # softmax makes a row of NaN of one: all that comes of it would be noise
            token = block.start + int(bad_B.argmax())
            row = examples[int(np.searchsorted(ends, token, side="right")) - 1].row
            raise CheckpointError(
                f"the teacher says NaN of a token of row {row}: nothing can be learned from that",
                next="--dtype float32, if it is another now; else other weights of the teacher",
            )
        raw.append(coding.encode(ids_BK, log_q_BK, rest_B))
    rows_NB = np.concatenate(raw or [np.empty((0, coding.nbytes), np.uint8)])
    for example, (first, end) in zip(examples, pairwise(ends), strict=True):
        writing.add(example.checksum, rows_NB[first:end])


def _served(config: Config) -> str:
    """A server: its address, and the name of its model."""
    return f"{config.endpoint.served_name or 'model'} at {base_url(config.teacher)}"


def _name(teacher: Asked) -> str:
    """Who it is: its name and a hash of what its files are: their headers, some of the bytes of SAMPLED
    tensors, and an adapter's bytes. Two saves of one run have the same name and headers."""
    found, manifest = teacher.opened
    infos = sorted(manifest.tensors.values(), key=lambda info: info.name)
    tensors = [(info.name, info.dtype, info.shape, info.offset) for info in infos]
    digest = hashlib.sha256(json.dumps([manifest.config, tensors], sort_keys=True, default=str).encode())
    for info in infos[:: -(-len(infos) // SAMPLED) or 1]:
        with info.file.open("rb") as file:
            file.seek(info.offset)
            digest.update(file.read(min(info.nbytes, 4096)))
    for path in sorted(found.adapter.glob("*.safetensors")) if found.adapter else ():
        digest.update(path.read_bytes())
    return f"{Path(teacher.name).name} {digest.hexdigest()[:12]}"
