"""Cross entropy of a linear head, without ever holding the logits of all rows.

[T, V] logits of one Kimi-K2 step (65,536 tokens, a vocabulary of 163,840) would be 43 GB in float32. Here a
block of rows goes through the head, its loss and that loss's gradient are computed at once, and the block's
logits are dropped. Only the gradients of the hidden states and of the head's trainable parameters live until
backward. The reference works in blocks too: it runs unless a record is better.

N rows (supervised tokens), D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from unfreeze.kernels.choice.candidates import numba_refuses
from unfreeze.kernels.choice.choose import by_record, choose
from unfreeze.kernels.choice.draw import normal, uniform
from unfreeze.kernels.choice.op import Arguments, Candidate, Case, Op
from unfreeze.kernels.linear_cross_entropy import reference
from unfreeze.kernels.linear_cross_entropy.blocks import (
    ALL_WORDS,
    Answer,
    Dense,
    Sums,
    TargetSums,
    Words,
    least_rows,
    rows_per_block,
    through_dense,
    through_head,
)
from unfreeze.kernels.loops import triton_options

__all__ = [
    "ALL_WORDS",
    "OP",
    "DenseHead",
    "Sums",
    "Words",
    "block_cost",
    "bucket",
    "head_cross_entropy",
    "linear_cross_entropy",
    "sums_through_head",
]


class DenseHead(NamedTuple):
    """A head as tensors: z = factor · (W h) + b, then c · tanh(z / c) if softcap is a number c."""

    weight_VD: Tensor
    bias_V: Tensor | None = None
    factor: float = 1.0
    softcap: float | None = None


def linear_cross_entropy(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    weights_N: Tensor,
    block_rows: int | None = None,
    impl: str = "auto",
    *,
    softcap: float | None = None,
    words: Words = ALL_WORDS,
) -> Answer:
    """The weighted loss of a head W h + b, the weight of rows whose target is likeliest, and every log p.

        z_n = W h_n + b, with a softcap c · tanh(z_n / c);  log p_n = z_n[target_n] - logsumexp(z_n)
        -> (sum_n w_n · -log p_n,  sum_n w_n [z_n[target_n] is the largest],  log p_N)
        with `words`, z_n[:num_ids] / temperature takes the place of z_n

    hidden_ND  [N, D] in the dtype of weight_VD [V, D]; a frozen weight may be held in a narrower one
    targets_N  int64
    weights_N  float32, of any sign: a policy gradient has negative ones

    block_rows overrides the rows of a block. Sums and log p are float32 (float64 for float64). The first sum
    can be differentiated once, with respect to hidden, weight and bias. For a loss that is not linear in log
    p: call without gradients first, then with d loss / d log p_n as weights.
    """
    kind = bucket(hidden_ND, weight_VD, bias_V, targets_N, weights_N)
    return choose(OP, hidden_ND.device, hidden_ND.dtype, kind, impl)(
        hidden_ND, weight_VD, bias_V, targets_N, weights_N, block_rows, softcap, words
    )


def head_cross_entropy(
    hidden_ND: Tensor,
    head: nn.Module,
    targets_N: Tensor,
    weights_N: Tensor,
    block_rows: int | None = None,
    impl: str = "auto",
    *,
    words: Words = ALL_WORDS,
) -> Answer:
    """As linear_cross_entropy for a head that is a module; its trainable parameters get a gradient too.

    A head whose `dense_head()` returns its tensors uses linear_cross_entropy; so does torch's Linear. A
    packed or adapted one runs its own forward and backward, by blocks.
    """
    dense = _dense(head)
    if dense is not None and _multiplies(dense.weight_VD, hidden_ND):
        scaled_ND = hidden_ND if dense.factor == 1 else hidden_ND * dense.factor
        inputs = scaled_ND, dense.weight_VD, dense.bias_V, targets_N, weights_N
        return linear_cross_entropy(*inputs, block_rows, impl, softcap=dense.softcap, words=words)
    vocab, device = int(head.out_features), hidden_ND.device  # type: ignore[arg-type]
    size = block_rows or rows_per_block(
        len(hidden_ND), vocab, hidden_ND.element_size(), device.type, trained=False
    )
    chosen = choose(OP, device, hidden_ND.dtype, _bucket(vocab, trained=False), impl)
    functions = chosen.functions if isinstance(chosen, Dense) else reference
    sums = TargetSums(functions, hidden_ND, targets_N, weights_N, words)
    return cast(Answer, through_head(hidden_ND, head, sums, size))


def sums_through_head(hidden_ND: Tensor, head: nn.Module, sums: Sums, block_rows: int) -> tuple[Tensor, ...]:
    """The totals of another sum over rows (blocks.Sums), through any head that head_cross_entropy accepts.

    The first total can be differentiated once, with respect to the hidden states and the head's trainable
    parameters.
    """
    dense = _dense(head)
    if dense is None or not _multiplies(dense.weight_VD, hidden_ND):
        return through_head(hidden_ND, head, sums, block_rows)
    scaled_ND = hidden_ND if dense.factor == 1 else hidden_ND * dense.factor
    return through_dense(scaled_ND, dense.weight_VD, dense.bias_V, sums, block_rows, dense.softcap)


def _dense(head: nn.Module) -> DenseHead | None:
    """The head as tensors, if it is nothing more."""
    if _hooked(head):
        return None
    if type(head) is nn.Linear:
        return DenseHead(head.weight, head.bias)
    dense_head: Callable[[], DenseHead | None] | None = getattr(head, "dense_head", None)
    return None if dense_head is None else dense_head()


def _multiplies(weight_VD: Tensor, hidden_ND: Tensor) -> bool:
    """True if the blocks multiply that weight: of the hidden states' dtype, or frozen in a narrower one."""
    narrower = weight_VD.dtype.itemsize < hidden_ND.dtype.itemsize and not weight_VD.requires_grad
    return narrower or weight_VD.dtype == hidden_ND.dtype


def _hooked(head: nn.Module) -> bool:
    """True if the module has hooks: then it must be called."""
    return bool(
        head._forward_hooks or head._forward_pre_hooks or head._backward_hooks or head._backward_pre_hooks
    )


def bucket(
    hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, targets_N: Tensor, weights_N: Tensor
) -> str:
    """The bucket by the softmax's cost relative to the GEMMs, and by a trained or frozen head."""
    return _bucket(len(weight_VD), weight_VD.requires_grad)


def _bucket(vocab: int, trained: bool) -> str:
    return f"{'small' if vocab < 1 << 14 else 'large'} vocabulary, head {'trained' if trained else 'frozen'}"


def block_cost(
    vocab: int, dtype: torch.dtype, device: torch.device, trained: bool, softcapped: bool = False
) -> tuple[int, int]:
    """For the plan: (rows of the largest block, bytes alive per logit of it).

    The candidates work in place. The reference's softmax adds a float32 copy, two for half precision. A
    softcap keeps its input, and has its slope in float32 beside the gradient. With more rows than a block, a
    trained head in half precision also sums its gradient in float32, [V, D].
    """
    most = rows_per_block(0, vocab, dtype.itemsize, device.type, trained, least_rows(dtype, device.type))
    in_place = by_record(OP, device, dtype, _bucket(vocab, trained)).runs in ("numba", "triton")
    beside = 0 if in_place else 4 if dtype.itemsize >= 4 else 8
    if softcapped:
        return most, 2 * dtype.itemsize + max(beside, 4)
    return most, dtype.itemsize + beside


def _load_numba() -> Dense:
    from unfreeze.kernels.linear_cross_entropy import numba_cpu

    return Dense(numba_cpu)


def _load_triton() -> Dense:
    from unfreeze.kernels.linear_cross_entropy import triton_cuda

    return Dense(triton_cuda)


def _case(rows: int, width: int, vocab: int, trained: bool) -> Case:
    def inputs(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Arguments:
        weight_VD = normal(device, generator, vocab, width) / width**0.5
        targets_N = torch.randint(0, vocab, (rows,), generator=generator).to(device)
        hidden_ND = normal(device, generator, rows, width)
        # every other row points at its target, so rounding cannot change which logit is the largest
        hidden_ND[::2] += 8 * weight_VD[targets_N[::2]]
        weights_N = 0.5 + uniform(device, generator, rows)
        hidden_ND, weight_VD = hidden_ND.to(dtype), weight_VD.to(dtype)
        return hidden_ND.requires_grad_(), weight_VD.requires_grad_(trained), None, targets_N, weights_N

    return Case(_bucket(vocab, trained), inputs)


OP = Op(
    name="linear_cross_entropy",
    reference=Dense(reference),
    preferred="numba",
    because=(
        "its gradient overwrites the logits, of which the reference holds two more copies in float32: the"
        " plan counts on that memory"
    ),
    candidates={
        "numba": Candidate(_load_numba, numba_refuses),
        "triton": triton_options.candidate(_load_triton, "6 bytes a logit, the reference 26"),
    },
    cases=(
        _case(512, 256, 8192, False),
        _case(512, 256, 8192, True),
        _case(128, 896, 1 << 15, False),
        _case(128, 896, 1 << 15, True),
    ),
    # bf16: logits of size 5 carry errors of 2^-9 · 5; in the exponent that is 1 % of a probability. The
    # reference's errors are as large
    tolerance={torch.float32: 5e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3},
)
