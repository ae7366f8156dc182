"""Quantized weight formats: layout, pack, unpack, dequantize in plain torch, byte accounting. One `Codec` interface."""

from unfreeze.quant.codec import Codec, Packed
from unfreeze.quant.int4 import Int4, from_quantization_config, is_ignored, not_followed

__all__ = ["Codec", "Int4", "Packed", "from_quantization_config", "is_ignored", "not_followed"]
