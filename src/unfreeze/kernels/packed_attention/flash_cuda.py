"""torch's flash kernel for documents of any lengths: the functions of varlen.py on CUDA.

They are the two operators behind torch.nn.attention.varlen.varlen_attn. Its own backward drops the gradient
of the log-sum-exp, which sinks need; its forward cannot be reused in a recomputed layer; and its import takes
1.8 s. Measured on an H100: docs/measured/h100.md.

Another kernel that is activated for these operators (torch.nn.attention.activate_flash_attention_impl) runs
here too.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from unfreeze.kernels.packed_attention.varlen import Documents

SHARED = ("query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal")
SHARED += ("scale", "window_size_left", "window_size_right")
OPERATORS = {
    "_flash_attention_forward": {*SHARED, "return_debug_mask"},
    "_flash_attention_backward": {*SHARED, "grad_out", "out", "logsumexp", "rng_state", "unused"},
}
"""Name -> the arguments that are given."""


@functools.cache
def missing() -> str:
    """The reason why the installed torch cannot do it; "" if it can: torch 2.13 can."""
    for name, wanted in OPERATORS.items():
        operator = getattr(torch.ops.aten, name, None)
        if operator is None:
            return f"torch {torch.__version__} has no {name}"
        names = {argument.name for argument in operator.default._schema.arguments}
        if lacking := sorted(wanted - names):
            return f"torch {torch.__version__}: {name} has no {', '.join(lacking)}"
    return ""


def forward(q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, documents: Documents) -> tuple[Tensor, Tensor]:
    """As VarlenFunctions.forward."""
    o_THd, lse_HT, *_ = torch.ops.aten._flash_attention_forward(
        q_THd, k_TGd, v_TGd, **_arguments(documents), return_debug_mask=False
    )
    return o_THd, lse_HT


def backward(
    do_THd: Tensor,
    q_THd: Tensor,
    k_TGd: Tensor,
    v_TGd: Tensor,
    o_THd: Tensor,
    lse_HT: Tensor,
    documents: Documents,
) -> tuple[Tensor, Tensor, Tensor]:
    """As VarlenFunctions.backward."""
    return torch.ops.aten._flash_attention_backward(
        do_THd,
        q_THd,
        k_TGd,
        v_TGd,
        o_THd,
        lse_HT,
        **_arguments(documents),
        # the state of dropout, which is off
        rng_state=lse_HT.new_empty(2, dtype=torch.uint64),
        unused=lse_HT.new_empty(0),
    )


def _arguments(documents: Documents) -> dict[str, Tensor | int | float | bool]:
    """Arguments of both operators. A window is the keys beside a query's own on either side; -1: all."""
    bounds_S1, longest, scale, window = documents
    return {
        "cum_seq_q": bounds_S1,
        "cum_seq_k": bounds_S1,
        "max_q": longest,
        "max_k": longest,
        "dropout_p": 0.0,
        "is_causal": window is None,
        "scale": scale,
        "window_size_left": -1 if window is None else window - 1,
        "window_size_right": 0,
    }
