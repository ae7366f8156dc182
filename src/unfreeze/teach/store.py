"""A teacher's outputs on disk: the top K tokens at each supervised token, and all others together ("rest").

A folder:
teacher.json            origin: teacher, vocabulary, temperature, K, coding; and if it is complete
part-00001.safetensors  keys [documents, 16], counts [documents], rows [tokens, bytes per token],
                        checks [documents]: crc32 of a document's rows

A document is found by its key, a checksum of its tokens and weights (data/store/examples.py), so order and
packing do not matter; its rows are its supervised tokens in order. A part is complete or absent; an
interrupted pass continues after the last part. Only one process at a time writes into a folder.
"""

from __future__ import annotations

import fcntl
import json
import os
import zlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from unfreeze.core.errors import CheckpointError, ConfigError, DataError, printable
from unfreeze.core.torch_types import from_numpy
from unfreeze.teach.coding import Coding
from unfreeze.teach.second import Beginning, Beside, Filled, Second
from unfreeze.teach.vocabulary import Vocabulary, refuse_other, vocabulary
from unfreeze.untrusted.json_object import read_object

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from unfreeze.checkpoint.manifest import Manifest
    from unfreeze.core.batch import Batch
    from unfreeze.data.packing.source import Documents, Source
    from unfreeze.data.store.examples import Example, Examples
    from unfreeze.data.tokens.tokenizer import Tokenizer
    from unfreeze.models import Decoder
    from unfreeze.objectives.divergence import LogProbs
    from unfreeze.parallel.plan.aside import Aside
    from unfreeze.teach.second import Objective
    from unfreeze.teach.teacher import ToObjective

HEAD = "teacher.json"
FORMAT = 2
PART_TOKENS = 1 << 16  # supervised tokens per part: 8 MB in the compact coding
IDS, LOG_Q, REST = "teacher_ids", "teacher_log_q", "teacher_rest"


def is_store(source: str | Path) -> bool:
    """Return True if a name is such a folder."""
    return (Path(source) / HEAD).is_file()


def read_head(folder: Path) -> dict[str, Any]:
    """Read teacher.json. Raises CheckpointError if this version does not support it."""
    head = read_object(folder / HEAD, CheckpointError)
    wanted = {"format": int, "vocabulary": dict, "temperature": float, "top_k": int, "coding": str}
    bad = next((name for name, kind in wanted.items() if not isinstance(head.get(name), kind)), "")
    bad = bad or ("" if isinstance(head["vocabulary"].get("size"), int) else "vocabulary")
    if bad or head["format"] != FORMAT or head["coding"] not in ("compact", "float32"):
        raise CheckpointError(
            f"{folder / HEAD}: {bad or 'format'} is {head.get(bad or 'format')!r}, which is not read",
            next="unfreeze distill --prepare with another folder",
        )
    return head


def refuse_other_head(folder: Path, head: Mapping[str, Any]) -> None:
    """Raise ConfigError if a store belongs to another teacher, temperature or coding."""
    there = read_head(folder)
    other = next((name for name, value in head.items() if there.get(name) != value), "")
    if other:
        raise ConfigError(
            f"{folder} belongs to another {other} ({there.get(other)!r}, not {head[other]!r})",
            next="--prepare with another folder",
        )


@contextmanager
def one_writer(
    folder: Path,
    what: str = "a teacher's outputs",
    next: str = "wait for it, or --prepare with another folder",
) -> Generator[None]:
    """Create a folder if needed, and lock it against other writers. Raises ConfigError."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ConfigError(f"another process is writing {what} into {folder}", next=next) from None
    try:
        yield
    finally:
        os.close(descriptor)


class StoreParts:
    """The documents of a store: key -> (part, first row, rows, crc32 of these)."""

    def __init__(self, folder: Path, coding: Coding):
        from safetensors import safe_open

        self.places: dict[bytes, tuple[int, int, int, int]] = {}
        self.files: list[Any] = []
        self.paths = sorted(folder.glob("part-*.safetensors"))
        for path in self.paths:
            try:
                file = cast(Any, safe_open(path, "pt"))
                keys, counts = file.get_tensor("keys").numpy(), file.get_tensor("counts").tolist()
                checks = file.get_tensor("checks").tolist()
                rows, width = file.get_slice("rows").get_shape()
            except Exception as error:
                raise CheckpointError(
                    f"{path} cannot be read: {error}", next="remove it, and run the --prepare command again"
                ) from None
            if (
                not len(keys) == len(counts) == len(checks)
                or sum(counts) != rows
                or (rows and width != coding.nbytes)
            ):
                raise CheckpointError(
                    f"{path} has {rows:,} rows of {width} bytes, not {sum(counts):,} of {coding.nbytes}",
                    next="remove it, and run the --prepare command again",
                )
            first = 0
            for key, count, check in zip(keys, counts, checks, strict=True):
                self.places[key.tobytes()] = len(self.files), first, count, check
                first += count
            self.files.append(file)

    def rows(self, key: bytes) -> np.ndarray | None:
        """Return uint8 [tokens, bytes per token]; None for a missing document.

        Raises CheckpointError if they are not the bytes that were written.
        """
        if (place := self.places.get(key)) is None:
            return None
        part, first, count, check = place
        rows = self.files[part].get_slice("rows")[first : first + count].numpy()
        if zlib.crc32(rows.tobytes()) != check:
            raise CheckpointError(
                f"{self.paths[part]} was changed on disk: the teacher's outputs for a document are damaged",
                next="remove it, and run the --prepare command again",
            )
        return rows


class StoreWriter:
    """A store that is being written or continued; `done` are its documents.

    Raises ConfigError if the folder belongs to another teacher, temperature or coding.
    """

    def __init__(self, folder: Path, head: Mapping[str, Any], coding: Coding):
        from unfreeze.checkpoint.save import write_file

        self.folder, self.head, self.coding = folder, dict(head), coding
        if is_store(folder):
            refuse_other_head(folder, head)
        elif folder.exists() and any(folder.iterdir()):
            raise ConfigError(
                f"{folder} is not empty and has no teacher's outputs", next="--prepare with another folder"
            )
        else:
            folder.mkdir(parents=True, exist_ok=True)
            write_file(folder / HEAD, json.dumps({**head, "whole": False}, indent=1))
        parts = StoreParts(folder, coding)
        self.done, self._number = set(parts.places), len(parts.files)
        self._keys: list[bytes] = []
        self._rows: list[np.ndarray] = []

    def add(self, key: bytes, rows_NB: np.ndarray) -> None:
        """Add a document. It is written when there are enough."""
        if key in self.done:
            return
        self.done.add(key)
        self._keys.append(key)
        self._rows.append(rows_NB)
        if sum(map(len, self._rows)) >= PART_TOKENS:
            self.flush()

    def flush(self) -> None:
        """Write the added documents as a part, atomically."""
        import torch

        from unfreeze.checkpoint.save import write_safetensors

        if not self._keys:
            return
        keys = np.frombuffer(b"".join(self._keys), dtype=np.uint8).reshape(-1, 16)
        self._number += 1
        write_safetensors(
            self.folder / f"part-{self._number:05d}.safetensors",
            {
                "keys": from_numpy(keys.copy()),
                "counts": torch.tensor([len(rows) for rows in self._rows]),
                "checks": torch.tensor([zlib.crc32(rows.tobytes()) for rows in self._rows]),
                "rows": from_numpy(np.concatenate(self._rows)),
            },
        )
        self._keys, self._rows = [], []

    def finish(self, **facts: Any) -> None:
        """Mark the store complete; `facts` are stored beside the head."""
        from unfreeze.checkpoint.save import write_file

        self.flush()
        write_file(self.folder / HEAD, json.dumps({**self.head, **facts, "whole": True}, indent=1))


class Stored(Second):
    """A second model that need not be in memory: its outputs are in a store."""

    def __init__(
        self,
        folder: str,
        minimise: ToObjective,
        *,
        temperature: float = 1.0,
        beta: float = 0.0,
        loss: str = "",
    ):
        self.folder, self.minimise, self.temperature, self.beta = Path(folder), minimise, temperature, beta
        self.loss = loss
        self._coding: Coding | None = None
        self._parts: StoreParts | None = None

    def open(self, say: Any = None) -> None:
        """Read its head. Raises UserError if it is incomplete or of another temperature."""
        head = read_head(self.folder)
        if not head.get("whole"):
            raise CheckpointError(
                f"{self.folder} is incomplete: --prepare was interrupted",
                next="run the command with --prepare again; it continues where it stopped",
            )
        if head["temperature"] != self.temperature:
            raise ConfigError(
                f"{self.folder} was made at temperature {head['temperature']:g}, and {self.temperature:g} is"
                " requested: tokens that were not stored cannot be rescaled",
                next=f"--temperature {head['temperature']:g}, or another --prepare",
            )
        size = int(head["vocabulary"].get("size", 0))
        self._coding = Coding(head["coding"], head["top_k"], size)
        self._parts = StoreParts(self.folder, self._coding)

    @property
    def opened(self) -> tuple[Coding, StoreParts]:
        if self._coding is None or self._parts is None:
            self.open()
        assert self._coding is not None and self._parts is not None
        return self._coding, self._parts

    def check(self, start: Manifest, tokenizer: Tokenizer) -> None:
        """Raise CheckpointError for another vocabulary."""
        coding, _ = self.opened
        words = read_head(self.folder)["vocabulary"]
        refuse_other(
            vocabulary(tokenizer), Vocabulary(coding.words, str(words.get("hash"))), str(self.folder)
        )

    def said(self, start: Manifest) -> str:
        """'learns from: said (the 32 likeliest words of BIG 0a1b2c3d4e5f, compact); forward KL, …'."""
        coding, who = self.opened[0], read_head(self.folder).get("teacher")
        return (
            f"learns from: {self.folder} (the {coding.top_k} likeliest words of {printable(str(who))},"
            f" {coding.name}); {self.loss}"
        )

    def known(self, examples: Examples) -> None:
        """Raise DataError if a document is not in the store."""
        places = self.opened[1].places
        lacking = [i for i, key in enumerate(examples.checksums_N) if key.tobytes() not in places]
        if lacking:
            row = int(examples.rows_N[lacking[0]])
            raise self._lacks(f"{len(lacking):,} of {len(examples):,} documents", row)

    def _lacks(self, what: str, row: int) -> DataError:
        return DataError(
            f"{self.folder} lacks {what} of this data (first: row {row}): it was made from other rows,"
            " or at another sequence_length, template or mask",
            next="the same command with --prepare and --teacher, which adds the missing rows",
        )

    def source(self, source: Source, beginning: Beginning) -> Source:
        """Add the teacher's outputs for its documents to each batch."""
        return Filled(cast("Documents", source), self.fill)

    def fill(self, batch: Batch, examples: Sequence[Example]) -> Batch:
        """Return the batch with the teacher's outputs at its supervised tokens; zeros at the others."""

        coding, parts = self.opened
        raw: list[np.ndarray] = []
        for example in examples:
            rows = parts.rows(example.checksum)
            if rows is None or len(rows) != example.num_supervised:
                raise self._lacks("a document", example.row)
            raw.append(rows)
        decoded = coding.decode(np.concatenate(raw))
        rows_N, extras = batch.supervised(), dict(batch.extras)
        for name, values in zip((IDS, LOG_Q, REST), decoded, strict=True):
            values_N = from_numpy(values)
            extras[name] = values_N.new_zeros((batch.num_tokens, *values_N.shape[1:]))
            extras[name][rows_N] = values_N
        return replace(batch, extras=extras)

    def aside(self, beside: Beside) -> Aside:
        """Return the memory of a micro-batch's entries, twice: for all tokens and the supervised ones."""
        from unfreeze.models import shape
        from unfreeze.objectives.divergence import bytes_per_logit, divergence_rows
        from unfreeze.parallel.plan.aside import Aside

        student, dtype = shape(beside.start.config), beside.dtype
        rows = 0, student.vocab_size, dtype, beside.device, beside.head_trains, self.beta
        each = bytes_per_logit(dtype, self.beta) + dtype.itemsize * (student.softcap is not None)
        return Aside(
            outputs=2 * beside.tokens * (8 * self.opened[0].top_k + 4),
            loss_rows=divergence_rows(*rows),
            loss_bytes=each,
        )

    def objective(self, model: Decoder, device: torch.device, dtype: str) -> Objective:
        """Return the objective; nothing is loaded."""
        return self.minimise(said_in, self.opened[0].words)


def said_in(batch: Batch) -> LogProbs:
    """Return the teacher's outputs stored in a batch (Stored.fill).

    Among tokens that were not stored, the teacher's rest is distributed like the student's:
    log q_i = log rest - log Σ_left out p + log p_i
    D is then that of K + 1 outcomes, the entries and "another token", and so is its gradient.
    """
    rows_N = batch.supervised()
    ids_NK, log_q_NK, rest_N = (batch.extras[name].index_select(0, rows_N) for name in (IDS, LOG_Q, REST))
    return partial(_with_the_rest, ids_NK, log_q_NK, rest_N)


def _with_the_rest(ids_NK: Tensor, log_q_NK: Tensor, rest_N: Tensor, rows: slice, log_p_BV: Tensor) -> Tensor:
    ids_BK = ids_NK[rows].long()
    left_B = log_p_BV.exp().scatter_(1, ids_BK, 0.0).sum(-1)
    # if the student gives them less than float32 can represent, use the smallest value
    log_left_B = left_B.clamp_(min=1e-35).log()
    moved_B = rest_N[rows].to(log_p_BV.dtype) - log_left_B
    return (log_p_BV + moved_B.unsqueeze(1)).scatter_(1, ids_BK, log_q_NK[rows].to(log_p_BV.dtype))


def asked_about(
    examples: Examples, writing: StoreWriter, tokens: int
) -> Iterator[tuple[list[Example], Batch]]:
    """The documents that a store lacks, as many to a batch as `tokens` holds; each with its Batch."""
    from unfreeze.data.packing.batches import pack

    group: list[Example] = []
    taken = set(writing.done)
    for example in examples:
        if (key := example.checksum) in taken:
            continue
        taken.add(key)
        if group and sum(member.num_tokens for member in group) + example.num_tokens > tokens:
            yield group, pack(group)
            group = []
        group.append(example)
    if group:
        yield group, pack(group)
