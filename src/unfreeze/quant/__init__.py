"""Quantized weight formats: recognised from a config.json, packed, unpacked and dequantized in plain torch,
their bytes counted. One `Codec` interface. Importing this room imports no torch."""

from unfreeze.quant.codec import Codec, Packed
from unfreeze.quant.formats import is_ignored, not_followed, recognise
from unfreeze.quant.int4 import Int4

__all__ = ["Codec", "Int4", "Packed", "is_ignored", "not_followed", "recognise"]
