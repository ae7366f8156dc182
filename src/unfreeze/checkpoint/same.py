"""Compare the weights of two checkpoints, from their headers and less than a megabyte of data."""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unfreeze.checkpoint.manifest import Manifest, TensorInfo

MOST = 1 << 20  # bytes read from each of the two
OF_A_KIND = 64  # tensors compared per kind, that is per name without its numbers
OF_A_DIGEST = 8  # per kind in a digest, which is computed at every start: some 200 reads of a large model
PIECE = 1024


def same_weights(one: Manifest, other: Manifest) -> bool:
    """True for the same folder, or the same names, dtypes and shapes and the same sampled bytes.

    The sample is the middle of up to 64 tensors of each kind, spread over the layers. It detects training,
    unless only a few of very many tensors were trained, or few of their numbers moved.
    """
    if _packed(one) != _packed(other):
        return False
    if one.path.resolve() == other.path.resolve():
        return True
    one, other = on_disk(one), on_disk(other)
    facts = [{i.name: (i.dtype, i.shape, i.nbytes) for i in m.tensors.values()} for m in (one, other)]
    if not facts[0] or facts[0] != facts[1]:
        return False
    theirs = {info.name: info for info in other.tensors.values()}
    looked = _spread(one)
    piece = max(8, min(PIECE, MOST // len(looked)))
    return all(_middle(info, piece) == _middle(theirs[info.name], piece) for info in looked)


def weights_digest(manifest: Manifest) -> str:
    """16 hex digits over the data that same_weights compares, from fewer tensors and for any file layout.

    "" for a folder without weights.
    """
    digest = hashlib.sha256(_packed(manifest).encode())
    manifest = on_disk(manifest)
    for info in sorted(manifest.tensors.values(), key=lambda info: info.name):
        digest.update(f"{info.name} {info.dtype} {tuple(info.shape)} {info.nbytes};".encode())
    for info in _spread(manifest, OF_A_DIGEST):
        digest.update(_middle(info, PIECE))
    return digest.hexdigest()[:16] if manifest.tensors else ""


def _packed(manifest: Manifest) -> str:
    """Format and modules that a release is packed in while it is loaded; "" if it is not."""
    packed = manifest.on_load
    return "" if packed is None else " ".join((packed.format, *packed.modules))


def on_disk(manifest: Manifest) -> Manifest:
    """The files as they are, of a release that is packed while it is loaded."""
    return manifest if manifest.on_load is None else manifest.on_load.released


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
