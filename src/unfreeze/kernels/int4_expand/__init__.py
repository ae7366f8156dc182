"""INT4 codes to bf16 or float32, into memory the caller owns. `expand` picks the candidate; reference.py is the oracle."""

from __future__ import annotations

from torch import Tensor

from unfreeze.kernels.int4_expand.reference import expand_reference
from unfreeze.quant.codec import Packed

__all__ = ["expand", "expand_reference"]


def expand(packed: Packed, expert: int | None, out: Tensor) -> Tensor:
    """out[o, i] = (nibble - 8) * scale, rounded once to bf16; a float32 `out` holds that bf16 number, widened. Returns `out`.

    packed [out, in] (expert None) or [E, out, in]; out [out, in] bf16 or float32, rows may be strided (a block of a larger workspace).
    On CPU the numba loop (9 G elements/s and thread on a 2.6 GHz Zen 4, plain torch 0.4), elsewhere and for what numba_cpu.expandable
    refuses the reference. Both equal Packed.dequantize() bit for bit where the scales are finite.
    """
    from unfreeze.kernels.int4_expand import numba_cpu  # numba takes 0.4 s to import and only the CPU needs it

    if numba_cpu.expandable(packed) and out.device.type == "cpu":
        stack = packed if expert is not None else Packed(packed.codec, {name: part.unsqueeze(0) for name, part in packed.parts.items()})
        numba_cpu.Expander(stack).fill([expert or 0], out.unsqueeze(0))
        return out
    return expand_reference(packed, expert, out)
