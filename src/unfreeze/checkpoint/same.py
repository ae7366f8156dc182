"""Whether two checkpoints hold the same weights, from their headers and less than a megabyte."""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unfreeze.checkpoint.manifest import Manifest, TensorInfo

MOST = 1 << 20  # bytes read of each of the two
OF_A_KIND = 64  # tensors compared of those whose names differ in numbers alone
OF_A_DIGEST = 8  # of them in a digest, which is made at every start: some 200 reads of a large model
PIECE = 1024


def same_weights(one: Manifest, other: Manifest) -> bool:
    """The same folder; or the same names, dtypes and shapes, and the same bytes wherever it is looked.

    Looked at is the middle of up to 64 tensors of each kind, spread over the layers: what was trained is seen
    unless it is in a few of very many, or moved few numbers.
    """
    if one.path.resolve() == other.path.resolve():
        return True
    facts = [{i.name: (i.dtype, i.shape, i.nbytes) for i in m.tensors.values()} for m in (one, other)]
    if not facts[0] or facts[0] != facts[1]:
        return False
    theirs = {info.name: info for info in other.tensors.values()}
    looked = _spread(one)
    piece = max(8, min(PIECE, MOST // len(looked)))
    return all(_middle(info, piece) == _middle(theirs[info.name], piece) for info in looked)


def weights_digest(manifest: Manifest) -> str:
    """16 hex digits over what same_weights compares, of fewer tensors; however they lie in files.

    "" of a folder without weights.
    """
    found = hashlib.sha256()
    for info in sorted(manifest.tensors.values(), key=lambda info: info.name):
        found.update(f"{info.name} {info.dtype} {tuple(info.shape)} {info.nbytes};".encode())
    for info in _spread(manifest, OF_A_DIGEST):
        found.update(_middle(info, PIECE))
    return found.hexdigest()[:16] if manifest.tensors else ""


def _spread(manifest: Manifest, of_a_kind: int = OF_A_KIND) -> list[TensorInfo]:
    kinds: dict[str, list[TensorInfo]] = defaultdict(list)
    for info in sorted(manifest.tensors.values(), key=lambda info: info.name):
        kinds[re.sub(r"\d+", "", info.name)].append(info)
    return [
        infos[i * len(infos) // count]
        for infos in kinds.values()
        for count in [min(of_a_kind, len(infos))]
        for i in range(count)
    ]


def _middle(info: TensorInfo, piece: int) -> bytes:
    with info.file.open("rb") as file:
        file.seek(info.offset + max(0, info.nbytes - piece) // 2)
        return file.read(min(piece, info.nbytes))
