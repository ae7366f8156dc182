"""Tensors of a file in torch: torch's names of dtypes, and one tensor, memory-mapped."""

from __future__ import annotations

import numpy as np
import torch

from unfreeze.checkpoint.manifest import TensorInfo
from unfreeze.core.dtypes import ITEMSIZE

TORCH_DTYPE = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
NAME = {dtype: name for name, dtype in TORCH_DTYPE.items()}


def stored_tensor(info: TensorInfo) -> torch.Tensor:
    """One tensor, memory-mapped from its file: bytes are read when they are used. CPU.

    One that is not on disk (packing.py) is made from its matrix.
    """
    if info.packed_from is not None:
        from unfreeze.checkpoint.packing import made

        return made(info)
    if not info.nbytes:
        return torch.empty(info.shape, dtype=TORCH_DTYPE[info.dtype])
    # "c": the file is never written
    raw = np.memmap(info.file, dtype=np.uint8, mode="c", offset=info.offset, shape=(info.nbytes,))
    raw = torch.from_numpy(raw)
    if info.offset % ITEMSIZE[info.dtype]:
        raw = raw.clone()
    return raw.view(TORCH_DTYPE[info.dtype]).view(info.shape)
