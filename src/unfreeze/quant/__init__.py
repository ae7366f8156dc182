"""Quantized weight formats: recognised, packed, unpacked and dequantized in plain torch.

Recognised from a config.json, their bytes counted, behind one `Codec` interface. Importing this package
imports no torch.
"""

from unfreeze.quant.codec import Codec, Packed
from unfreeze.quant.formats import not_followed, recognise
from unfreeze.quant.fp8 import Fp8
from unfreeze.quant.int4 import Int4
from unfreeze.quant.scheme import Scheme

__all__ = ["Codec", "Fp8", "Int4", "Packed", "Scheme", "not_followed", "recognise"]
