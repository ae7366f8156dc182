"""Cached reference: l_ref of every answer, computed once before the first step and stored in the run.

RUN/reference/reference.json          which model and data; number of micro-batches done
RUN/reference/part-00001.safetensors  keys uint8 [n, 16], l_ref float64 [n]

The reference is the model before the first step, so `--train all` needs no copy of it, and a step has no
forward pass of a reference. A document is found by its key, a checksum of its tokens and weights. It is
computed in the micro-batch where it first trains, so l_ref has the same bits as with --preference.reference
live.
KTO's answers to other prompts are ordinary documents, new ones in each epoch.

A part is complete or absent; an interrupted pass continues after the last one. A resumed run computes its
first micro-batch again, so that another model is refused, whatever its name.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from unfreeze.core.errors import CheckpointError, ConfigError, DataError
from unfreeze.core.torch_types import floats, from_numpy, ints
from unfreeze.core.units import plural
from unfreeze.teach.reference import Kind, asked, compares
from unfreeze.teach.second import Beginning, Filled, Second
from unfreeze.untrusted.json_object import read_object

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from unfreeze.checkpoint.manifest import Manifest
    from unfreeze.core.batch import Batch
    from unfreeze.data.packing.source import Documents, Source
    from unfreeze.data.store.examples import Example
    from unfreeze.data.tokens.tokenizer import Tokenizer
    from unfreeze.models import Decoder
    from unfreeze.objectives.preference import Objective, Reference
    from unfreeze.parallel.processes.collectives import Group

FOLDER, HEAD, FORMAT = "reference", "reference.json", 1
ROUND = 64
"""Micro-batches of each process between two parts: the work lost when interrupted."""
SAME = {"float32": 1e-4, "bfloat16": 2e-2}
"""Tolerance of |l - stored l| / max(1, |l|) for the same model: other kernels, threads or processes sum in
another order. In bfloat16 (8 bits) a token's log p changes by up to 1 %, in float32 by 1e-6."""
LIVE = "--preference.reference live computes it in each step"


def keys_of(batch: Batch) -> list[bytes]:
    """Return 16 bytes per document: a hash of its tokens and weights."""
    tokens_T, weights_T = batch.tokens_T.cpu().numpy(), batch.weights_T.cpu().numpy()
    starts = [*ints(batch.starts_S), batch.num_tokens]
    return [
        hashlib.blake2b(
            tokens_T[first:end].tobytes() + weights_T[first:end].tobytes(), digest_size=16
        ).digest()
        for first, end in pairwise(starts)
    ]


class Kept(Second):
    """The initial model as a second model that is evaluated once.

    It takes no memory beside a step: it runs before the first one, in a smaller forward pass.
    kind: what trains (teach/reference.py). minimise: reference outputs -> objective. loss: the objective in
    words.
    """

    def __init__(self, kind: Kind, minimise: Callable[[Reference], Objective], *, loss: str = ""):
        self.kind, self.minimise, self.loss = kind, minimise, loss
        self.kept: dict[bytes, float] = {}
        self._model = ""

    def check(self, start: Manifest, tokenizer: Tokenizer) -> None:
        """Record the names of its files; it is the model itself."""
        names = sorted((name, info.dtype, list(info.shape)) for name, info in start.tensors.items())
        words = json.dumps([start.config, names], sort_keys=True, default=str)
        self._model = hashlib.sha256(words.encode()).hexdigest()[:16]

    def said(self, start: Manifest) -> str:
        """'compares: dpo, beta 0.1, with the model as it began (asked once)'."""
        return compares(self.loss, "asked once")

    def source(self, source: Source, beginning: Beginning) -> Source:
        """Evaluate all documents, then add the results to each batch.

        Raises ConfigError for data in windows, because it would be read twice.
        """
        if beginning.in_windows:
            raise ConfigError(
                "--preference.reference cached evaluates all rows before the first step, but these are read"
                " in windows",
                next="--preference.reference live",
            )
        self.ask(
            beginning.model,
            beginning.batches(),
            count=beginning.count,
            data=beginning.data,
            dtype=beginning.dtype,
            folder=beginning.folder,
            group=beginning.group,
            say=beginning.say,
        )
        # a forward pass gathers sharded weights, but the optimizer needs the shards
        beginning.model.reshard()
        return Filled(cast("Documents", source), self.fill)

    def fill(self, batch: Batch, examples: Sequence[Example]) -> Batch:
        """Return the batch with l_ref of its documents, float64 [S] on the host."""
        return replace(batch, documents={**batch.documents, FOLDER: self._of(batch)})

    def _of(self, batch: Batch) -> Tensor:
        import torch

        if not bool(batch.weights_T.any()):  # a process without a batch left repeats one
            return torch.zeros(len(batch.starts_S), dtype=torch.float64)
        logps = [self.kept.get(key) for key in keys_of(batch)]
        if None in logps:
            raise DataError(
                f"{FOLDER}/ of this run lacks {logps.count(None)} of {len(logps)} answers", next=LIVE
            )
        return torch.tensor(logps, dtype=torch.float64)

    def objective(self, model: Decoder, device: torch.device, dtype: str) -> Objective:
        """Return the objective, using l_ref from the batch, or from the cache for a held-out batch."""
        from unfreeze.core.batch import send

        def read(batch: Batch) -> Tensor:
            stored = batch.documents.get(FOLDER)
            return send(self._of(batch) if stored is None else stored, model.device)

        return self.minimise(read)

    def ask(
        self,
        model: Decoder,
        batches: Iterable[Batch],
        *,
        count: int,
        data: str,
        dtype: str,
        folder: Path,
        group: Group,
        say: Callable[[str], None],
    ) -> None:
        """Evaluate the current model on every document missing in the folder. Every process calls it.

        batches: micro-batches of the run from the first on, then the held-out ones; count: how many are the
        run's.
        data: a fingerprint of the documents.
        Raises ConfigError if the folder belongs to another model or other data, CheckpointError if a part
        cannot be read.
        """
        started, path = time.perf_counter(), folder / FOLDER
        head = {"format": FORMAT, "model": self._model, "data": data, "dtype": dtype}
        there = json.loads(group.of_first(json.dumps(group.on_rank0(lambda: _opened(path, head))).encode()))
        raw = group.of_first(group.on_rank0(lambda: _read(path)) or b"")
        table = np.frombuffer(raw, dtype=[("key", "V16"), ("l", "<f8")])
        self.kept = {key.tobytes(): float(logp) for key, logp in zip(table["key"], table["l"], strict=True)}
        had, covers = len(self.kept), int(there["batches"])
        coming = set(self.kept)
        waiting: list[tuple[Batch, list[bytes]]] = []
        for number, batch in enumerate(batches):
            keys = keys_of(batch)
            if number == 0 and had:
                self._refuse_other(model, batch, keys, SAME[dtype], group, path)
            if covers >= count:
                break
            if coming.issuperset(keys):
                continue
            coming.update(keys)
            waiting.append((batch, keys))
            if len(waiting) == ROUND * group.size:
                self._round(model, waiting, path, group)
                waiting = []
        if waiting:
            self._round(model, waiting, path, group)
        if covers < count:
            group.on_rank0(lambda: _write_head(path, {**head, "batches": count}))
        if group.rank == 0 and len(self.kept) > had:
            seconds = time.perf_counter() - started
            new = plural(len(self.kept) - had, "answer")
            say(f"reference: log-probabilities of {new} kept in {path} ({seconds:.0f} s)")

    def _round(
        self, model: Decoder, waiting: list[tuple[Batch, list[bytes]]], path: Path, group: Group
    ) -> None:
        """Evaluate these batches, dealt out to the processes, and store new results as a part."""
        import torch

        each = [len(keys) for _, keys in waiting]
        ends = np.cumsum(each)
        said_S = torch.zeros(int(ends[-1]), dtype=torch.float64, device=model.device)
        # every process makes equally many passes: one without a batch in the last round repeats the first
        for first in range(0, len(waiting), group.size):
            place = first + group.rank
            batch, _ = waiting[place if place < len(waiting) else 0]
            l_S = self._asked(model, batch)
            if place < len(waiting):
                said_S[ends[place] - each[place] : ends[place]] = l_S
        group.sum_([said_S])  # the others added zeros, so these are the original bits
        new: dict[bytes, float] = {}
        for key, logp in zip(chain(*(keys for _, keys in waiting)), floats(said_S), strict=True):
            if key not in self.kept:
                new.setdefault(key, logp)
        self.kept |= new
        group.on_rank0(lambda: _write(path, new))

    def _asked(self, model: Decoder, batch: Batch) -> Tensor:
        adapters: dict[str, Any] | None = {} if self.kind == "base" else None
        return asked(model, adapters, batch.to(model.device))

    def _refuse_other(
        self, model: Decoder, batch: Batch, keys: list[bytes], same: float, group: Group, path: Path
    ) -> None:
        l_S = floats(self._asked(model, batch))
        pairs = [(logp, self.kept[key]) for key, logp in zip(keys, l_S, strict=True) if key in self.kept]
        other = [
            (logp, stored) for logp, stored in pairs if not abs(logp - stored) <= same * max(1.0, abs(logp))
        ]
        if group.any(bool(other)):
            details = f": log p of an answer was {other[0][1]:.4f}, and is {other[0][0]:.4f}" if other else ""
            raise ConfigError(
                f"{path} holds another model's outputs{details}", next="another --out, or remove that folder"
            )


def _opened(path: Path, head: dict[str, Any]) -> dict[str, Any]:
    """Read reference.json; create it if it is missing."""
    if not (path / HEAD).is_file():
        path.mkdir(parents=True, exist_ok=True)
        _write_head(path, {**head, "batches": 0})
    there = read_object(path / HEAD, CheckpointError)
    other = next((name for name, value in head.items() if there.get(name) != value), "")
    if other or not isinstance(there.get("batches"), int):
        raise ConfigError(
            f"{path} belongs to another {other or 'format'} ({there.get(other)!r}, not {head.get(other)!r})",
            next="another --out, or remove that folder",
        )
    return there


def _write_head(path: Path, head: dict[str, Any]) -> None:
    from unfreeze.checkpoint.save import write_file

    write_file(path / HEAD, json.dumps(head, indent=1))


def _parts(path: Path) -> list[Path]:
    return sorted(path.glob("part-*.safetensors"))


def _read(path: Path) -> bytes:
    """Read all parts, 24 bytes per document: its key and l_ref."""
    # its PathLike is untyped
    from safetensors.numpy import load_file  # pyright: ignore[reportUnknownVariableType]

    rows: list[bytes] = []
    for part in _parts(path):
        try:
            tensors = load_file(part)
            table = np.empty(len(tensors["l_ref"]), dtype=[("key", "V16"), ("l", "<f8")])
            table["key"] = np.ascontiguousarray(tensors["keys"]).view("V16")[:, 0]
            table["l"] = tensors["l_ref"]
        except Exception as error:
            raise CheckpointError(
                f"{part} cannot be read: {error}",
                next="remove it and reference.json; its content is computed again",
            ) from None
        rows.append(table.tobytes())
    return b"".join(rows)


def _write(path: Path, logps: dict[bytes, float]) -> None:
    import torch

    from unfreeze.checkpoint.save import write_safetensors

    if logps:
        keys = np.frombuffer(b"".join(logps), dtype=np.uint8).reshape(-1, 16)
        write_safetensors(
            path / f"part-{len(_parts(path)) + 1:05d}.safetensors",
            {
                "keys": from_numpy(keys.copy()),
                "l_ref": torch.tensor(list(logps.values()), dtype=torch.float64),
            },
        )
