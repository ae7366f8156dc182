"""torch's flash kernel for documents of any lengths: the functions of varlen.py on CUDA.

They are the two operators behind torch.nn.attention.varlen.varlen_attn. Its own backward drops the gradient
of the log-sum-exp, which sinks need, and its forward cannot be reused in a recomputed layer. Not run on a GPU
yet.

Another kernel that is activated for these operators (torch.nn.attention.activate_flash_attention_impl) runs
here too.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from unfreeze.kernels.packed_attention.varlen import Documents

FORWARD = ("query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k", "is_causal", "scale")
FORWARD += ("window_size", "enable_gqa")
BACKWARD = ("grad_out", "query", "key", "value", "out", "lse", "cu_seq_q", "cu_seq_k", "max_q", "max_k")
BACKWARD += ("is_causal", "rng_state", "scale", "window_size")


@functools.cache
def missing() -> str:
    """The reason why the installed torch cannot do it; "" if it can: torch 2.13 can."""
    try:
        import torch.nn.attention.varlen  # defines the operators

        operators = torch.ops.torch_attn
        for name, wanted in (("_varlen_attn", FORWARD), ("_varlen_attn_backward", BACKWARD)):
            names = tuple(argument.name for argument in getattr(operators, name).default._schema.arguments)
            if names[: len(wanted)] != wanted:
                lacking = [argument for argument in wanted if argument not in names]
                return f"torch {torch.__version__}: {name} has no {', '.join(lacking) or 'such order'}"
    except (ImportError, AttributeError) as error:
        return f"torch {torch.__version__} has no varlen_attn: {error}"
    return ""


def forward(q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, documents: Documents) -> tuple[Tensor, Tensor]:
    """As VarlenFunctions.forward."""
    o_THd, lse_HT, _ = torch.ops.torch_attn._varlen_attn(
        q_THd,
        k_TGd,
        v_TGd,
        *_bounds(documents),
        documents.window is None,
        documents.scale,
        _window(documents),
        True,
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
    unread = lse_HT.new_empty(2, dtype=torch.uint64)  # the state of dropout, which is off
    return torch.ops.torch_attn._varlen_attn_backward(
        do_THd,
        q_THd,
        k_TGd,
        v_TGd,
        o_THd,
        lse_HT,
        *_bounds(documents),
        documents.window is None,
        unread,
        documents.scale,
        _window(documents),
    )


def _bounds(documents: Documents) -> tuple[Tensor, Tensor, int, int]:
    """cu_seq_q, cu_seq_k, max_q, max_k."""
    return documents.bounds_S1, documents.bounds_S1, documents.longest, documents.longest


def _window(documents: Documents) -> list[int]:
    """Keys left and right of a query that it sees besides its own; -1: all."""
    return [-1 if documents.window is None else documents.window - 1, 0]
