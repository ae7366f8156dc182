"""Encoding of a teacher's top-K tokens: K entries per token, and all others' total probability ("rest").

    compact   a token id in as many bits as the vocabulary needs, -log q in 11 bits (steps of 1/64 nat up to
              32), the rest's in 16: at K = 32 and 163,840 ids (18 bits) 32 · (18 + 11) + 16 bits = 118 bytes
    float32   ids in int32, log q and the rest's in float32: 260 bytes

The cost of rounding is measured in tests/teach/test_store.py. N tokens, K entries each, V ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

Name = Literal["compact", "float32"]
BITS, STEPS = 11, 64  # of -log q: 2^11 steps of 1/64 nat
REST_BITS, REST_STEPS = 16, 2048  # also up to 32 nats
LEAST = -80.0  # log of a probability that float32 cannot represent


@dataclass(frozen=True)
class Coding:
    """name: one of the two encodings; top_k: K; words: V."""

    name: Name
    top_k: int
    words: int

    @property
    def id_bits(self) -> int:
        return max(1, (self.words - 1).bit_length())

    @property
    def nbytes(self) -> int:
        """Bytes per token."""
        if self.name == "float32":
            return 8 * self.top_k + 4
        return -(-(self.top_k * (self.id_bits + BITS) + REST_BITS) // 8)

    def encode(self, ids_NK: np.ndarray, log_q_NK: np.ndarray, rest_N: np.ndarray) -> np.ndarray:
        """Encode ids, their log q, and the log of all others' total probability as uint8 [N, nbytes]."""
        if self.name == "float32":
            parts = (ids_NK.astype("<i4"), log_q_NK.astype("<f4"), rest_N.astype("<f4")[:, None])
            return np.concatenate([np.ascontiguousarray(part).view(np.uint8) for part in parts], axis=1)
        codes = _steps(log_q_NK, BITS, STEPS), _steps(rest_N[:, None], REST_BITS, REST_STEPS)
        bits = (_bits(ids_NK, self.id_bits), _bits(codes[0], BITS), _bits(codes[1], REST_BITS))
        return np.packbits(np.concatenate(bits, axis=1), axis=1)

    def decode(self, raw_NB: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (ids int32 [N, K], log q float32 [N, K], rest's log float32 [N]); compact ones sum to 1."""
        N, K = len(raw_NB), self.top_k
        if self.name == "float32":
            ids, log_q, rest = (
                np.ascontiguousarray(part) for part in np.split(raw_NB, [4 * K, 8 * K], axis=1)
            )
            return ids.view("<i4"), log_q.view("<f4"), rest.view("<f4").reshape(N)
        bits = np.unpackbits(raw_NB, axis=1)
        ends = np.cumsum([K * self.id_bits, K * BITS, REST_BITS])
        ids, codes, rest = np.split(bits, ends, axis=1)[:3]
        log_q = -_numbers(codes, K, BITS).astype(np.float64) / STEPS
        log_rest = -_numbers(rest, 1, REST_BITS).astype(np.float64) / REST_STEPS
        if self.words <= K:
            log_rest[:] = LEAST
        total = np.log(np.exp(log_q).sum(1) + np.exp(log_rest[:, 0]))
        log_q, log_rest = log_q - total[:, None], log_rest[:, 0] - total
        return _numbers(ids, K, self.id_bits).astype(np.int32), _single(log_q), _single(log_rest)


def top_of(log_q_BV: Tensor, top_k: int) -> tuple[Any, Any, Any]:
    """Return (ids, log q, log of the rest) of the K likeliest tokens, in order, as numpy arrays."""
    log_q_BK, ids_BK = log_q_BV.topk(top_k, dim=-1)
    others_BV = log_q_BV.exp().scatter_(1, ids_BK, 0.0)
    rest_B = others_BV.sum(-1).log().clamp_(min=LEAST)
    # an impossible token (-inf) gets e^LEAST, because 0 times -inf is NaN
    return ids_BK.cpu().numpy(), log_q_BK.clamp_(min=LEAST).cpu().numpy(), rest_B.cpu().numpy()


def _single(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float32)


def _steps(log_q: np.ndarray, bits: int, steps: int) -> np.ndarray:
    return np.clip(np.rint(-log_q.astype(np.float64) * steps), 0, 2**bits - 1).astype(np.int64)


def _bits(numbers_NK: np.ndarray, bits: int) -> np.ndarray:
    """Return uint8 [N, K · bits], most significant bit first."""
    places = np.arange(bits - 1, -1, -1)
    spread = (numbers_NK.astype(np.int64)[:, :, None] >> places) & 1
    return spread.astype(np.uint8).reshape(len(numbers_NK), -1)


def _numbers(bits_N: np.ndarray, count: int, bits: int) -> np.ndarray:
    powers = 1 << np.arange(bits - 1, -1, -1, dtype=np.int64)
    return bits_N.reshape(len(bits_N), count, bits) @ powers
