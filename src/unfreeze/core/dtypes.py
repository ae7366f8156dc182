"""Number formats by their names in safetensors files ("BF16", "I32", …), without torch.

checkpoint/tensors.py converts a name to a torch dtype.
"""

from __future__ import annotations

ITEMSIZE = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}
"""Bytes per element of every dtype of the format, except sub-byte ones, which no language model uses."""
FLOATS = ("BF16", "F16", "F32")
"""Formats of dense weights and of scales."""
