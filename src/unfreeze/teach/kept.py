"""The reference as numbers: l_ref of every answer, asked once before the first step and kept in the run.

    RUN/reference/reference.json          which model and data; how many micro-batches were asked
    RUN/reference/part-00001.safetensors  keys uint8 [n, 16], l_ref float64 [n]

The model as it began is the model that is there before the first step, so `--train all` needs no copy of it,
and a step has no forward pass of a reference. A document is found by its key, a checksum of its tokens and
weights. It is asked in the micro-batch where it first trains: there l_ref has the bits that
--preference.reference live has.
KTO's answers to other prompts are documents like any, new ones in each epoch.

A part is there whole or not at all; what was broken off goes on behind the last one. A run that goes on asks
its first micro-batch again, so that another model is refused, whatever its name.
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
"""Micro-batches of each process between two parts: what is lost when it is broken off."""
SAME = {"float32": 1e-4, "bfloat16": 2e-2}
"""|l - l kept| / max(1, |l|) of the same model: other kernels, threads or processes add in another order. In
bfloat16 (8 bits) a token's log p moves by up to 1 %, in float32 by 1e-6."""
LIVE = "--preference.reference live asks it in each step"


def keys_of(batch: Batch) -> list[bytes]:
    """16 bytes over the tokens and the weights of each document."""
    tokens_T, weights_T = batch.tokens_T.cpu().numpy(), batch.weights_T.cpu().numpy()
    starts = [*ints(batch.starts_S), batch.num_tokens]
    return [
        hashlib.blake2b(
            tokens_T[first:end].tobytes() + weights_T[first:end].tobytes(), digest_size=16
        ).digest()
        for first, end in pairwise(starts)
    ]


class Kept(Second):
    """The model as it began, as a second model of a run that is asked once.

    It takes no memory beside a step: it is asked before the first one, by a smaller forward pass.
    kind: what trains (teach/reference.py). minimise: what the reference says -> what is minimised. loss: that
    in words.
    """

    def __init__(self, kind: Kind, minimise: Callable[[Reference], Objective], *, loss: str = ""):
        self.kind, self.minimise, self.loss = kind, minimise, loss
        self.kept: dict[bytes, float] = {}
        self._model = ""

    def check(self, start: Manifest, tokenizer: Tokenizer) -> None:
        """It is the model itself; what its files are called is noted."""
        names = sorted((name, info.dtype, list(info.shape)) for name, info in start.tensors.items())
        words = json.dumps([start.config, names], sort_keys=True, default=str)
        self._model = hashlib.sha256(words.encode()).hexdigest()[:16]

    def said(self, start: Manifest) -> str:
        """'compares: dpo, beta 0.1, with the model as it began (asked once)'."""
        return compares(self.loss, "asked once")

    def source(self, source: Source, beginning: Beginning) -> Source:
        """Ask about all documents, then give each batch what was said of it.

        Raises ConfigError for data that comes in windows: it would be read twice.
        """
        if beginning.in_windows:
            raise ConfigError(
                "--preference.reference cached asks about all rows before the first step, and these come"
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
        # a forward pass gathers divided weights: the optimizer takes those held here
        beginning.model.reshard()
        return Filled(cast("Documents", source), self.fill)

    def fill(self, batch: Batch, examples: Sequence[Example]) -> Batch:
        """The batch with l_ref of its documents, float64 [S] on the host."""
        return replace(batch, documents={**batch.documents, FOLDER: self._of(batch)})

    def _of(self, batch: Batch) -> Tensor:
        import torch

        if not bool(
            batch.weights_T.any()
        ):  # what a process computes along with where no batch is left for it
            return torch.zeros(len(batch.starts_S), dtype=torch.float64)
        found = [self.kept.get(key) for key in keys_of(batch)]
        if None in found:
            raise DataError(
                f"{FOLDER}/ of this run lacks {found.count(None)} of {len(found)} answers", next=LIVE
            )
        return torch.tensor(found, dtype=torch.float64)

    def objective(self, model: Decoder, device: torch.device, dtype: str) -> Objective:
        """What is minimised, with the numbers that the batch brings along; of a held-out batch, looked up."""
        from unfreeze.core.batch import send

        def read(batch: Batch) -> Tensor:
            kept = batch.documents.get(FOLDER)
            return send(self._of(batch) if kept is None else kept, model.device)

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
        """Ask the model, as it is now, about every document that the folder lacks. Every process calls it.

        batches: micro-batches of the run from the first on, then the held-out ones; count: how many of the
        run. data: a fingerprint of the documents.
        Raises ConfigError where the folder holds what another model said, or said of other data,
        CheckpointError where a part cannot be read.
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
            new = f"{len(self.kept) - had:,} answers"
            say(f"reference: log-probabilities of {new} kept in {path} ({seconds:.0f} s)")

    def _round(
        self, model: Decoder, waiting: list[tuple[Batch, list[bytes]]], path: Path, group: Group
    ) -> None:
        """Ask about these batches, dealt out to the processes, and keep what is new as a part."""
        import torch

        each = [len(keys) for _, keys in waiting]
        ends = np.cumsum(each)
        said_S = torch.zeros(int(ends[-1]), dtype=torch.float64, device=model.device)
        # every process makes as many passes: where the last round has none for one, it repeats the first
        for first in range(0, len(waiting), group.size):
            place = first + group.rank
            batch, _ = waiting[place if place < len(waiting) else 0]
            l_S = self._asked(model, batch)
            if place < len(waiting):
                said_S[ends[place] - each[place] : ends[place]] = l_S
        group.sum_([said_S])  # the others added zeros, so these are the bits of who was asked
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
        other = [(logp, kept) for logp, kept in pairs if not abs(logp - kept) <= same * max(1.0, abs(logp))]
        if group.any(bool(other)):
            said = f": log p of an answer was {other[0][1]:.4f}, and is {other[0][0]:.4f}" if other else ""
            raise ConfigError(
                f"{path} holds what another model said{said}", next="another --out, or remove that folder"
            )


def _opened(path: Path, head: dict[str, Any]) -> dict[str, Any]:
    """reference.json; made where there is none."""
    if not (path / HEAD).is_file():
        path.mkdir(parents=True, exist_ok=True)
        _write_head(path, {**head, "batches": 0})
    there = read_object(path / HEAD, CheckpointError)
    other = next((name for name, value in head.items() if there.get(name) != value), "")
    if other or not isinstance(there.get("batches"), int):
        raise ConfigError(
            f"{path} is of another {other or 'format'} ({there.get(other)!r}, not {head.get(other)!r})",
            next="another --out, or remove that folder",
        )
    return there


def _write_head(path: Path, head: dict[str, Any]) -> None:
    from unfreeze.checkpoint.save import write_file

    write_file(path / HEAD, json.dumps(head, indent=1))


def _parts(path: Path) -> list[Path]:
    return sorted(path.glob("part-*.safetensors"))


def _read(path: Path) -> bytes:
    """All parts, 24 bytes a document: its key and l_ref."""
    # its PathLike is of nothing said
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
                next="remove it and reference.json; what it held is asked again",
            ) from None
        rows.append(table.tobytes())
    return b"".join(rows)


def _write(path: Path, said: dict[bytes, float]) -> None:
    import torch

    from unfreeze.checkpoint.save import write_safetensors

    if said:
        keys = np.frombuffer(b"".join(said), dtype=np.uint8).reshape(-1, 16)
        write_safetensors(
            path / f"part-{len(_parts(path)) + 1:05d}.safetensors",
            {
                "keys": from_numpy(keys.copy()),
                "l_ref": torch.tensor(list(said.values()), dtype=torch.float64),
            },
        )
