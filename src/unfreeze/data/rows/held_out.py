"""Choose rows for validation by a hash of their content."""

from __future__ import annotations

import hashlib


def is_held_out(digest: bytes, fraction: float, seed: int) -> bool:
    """Return True if a row belongs to validation.

    That is, if blake2b(digest, seed), read as a number in [0, 1), is below `fraction`.
    """
    drawn = hashlib.blake2b(digest + seed.to_bytes(8, "little"), digest_size=8, person=b"held out").digest()
    return int.from_bytes(drawn, "little") < fraction * 2**64
