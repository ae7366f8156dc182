"""Compiles this room's Triton kernels for an H100/H200 (sm_90), which needs no GPU; run by test_triton_options.py without the interpreter.

Prints a line per kernel that does not compile, and last the number of those that do. The argument "planted" adds one that cannot.
"""

import sys

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from unfreeze.kernels.adamw import triton_cuda as adamw
from unfreeze.kernels.int4_expand import triton_cuda as int4_expand
from unfreeze.kernels.int4_grouped_mm import triton_cuda as int4_grouped_mm
from unfreeze.kernels.linear_cross_entropy import triton_cuda as linear_cross_entropy
from unfreeze.kernels.rms_norm import triton_cuda as rms_norm
from unfreeze.kernels.rotary import triton_cuda as rotary
from unfreeze.kernels.swiglu import triton_cuda as swiglu
from unfreeze.kernels.token_order import triton_cuda as token_order

B, F, I, L, S = "*bf16", "*fp32", "*i32", "*i64", "*i16"  # pointers; every parameter not named is an int32
GRADS = dict(dh=B, gate=B, up=B, weighted=B, dgate=B, dup=B)
EXPAND = dict(packed=I, scale=S, experts=L, out=B)
KERNELS = [
    (swiglu._forward, dict(gate=B, up=B, h=B), dict(BLOCK=2048)),
    (swiglu._backward, dict(**GRADS, weight=F, score=F), dict(WEIGHTED=True, BLOCK=1024)),
    (swiglu._backward, dict(**GRADS, weight=B, score=B), dict(WEIGHTED=False, BLOCK=1024)),
    *(
        (rotary._rotate, dict(x=B, y=B, cos=F, sin=F, sign="fp32"), dict(READ_STEP=read, WRITE_STEP=write, HEADS=16, PAIRS=32, KEPT=kept))
        for read, write, kept in ((1, 1, 0), (2, 1, 128), (1, 2, 128))
    ),
    *(
        (
            adamw._step,
            dict(chunks=L, addresses=L, numbers=F, keep1="fp32", keep2="fp32", eps="fp32", scale="fp32"),
            dict(GRADIENT=gradient, WEIGHT=weight, BLOCK=4096),
        )
        for gradient, weight in ((tl.float32, None), (tl.bfloat16, tl.bfloat16), (tl.float16, tl.float16), (tl.float32, tl.bfloat16))
    ),
    *(
        (linear_cross_entropy._softmax_gradient, dict(z=z, target=L, weight=F, log_p=F, wins="*i1"), dict(WANTED=wanted, BLOCK=4096))
        for z, wanted in ((B, True), (F, False))
    ),
    (token_order._count, dict(ids=L, counts=I), dict(SLOTS=128, EXPERTS=64)),
    (token_order._place, dict(ids=L, ends=I, counts=I, slot_n=L, row_of_slot=L), dict(SLOTS=128)),
    (token_order._gather, dict(source=B, slot_n=L, out=B), dict(BLOCK=2048)),
    (token_order._combine, dict(rows=B, row_of_slot=L, weight=F, out=F), dict(K=8, WEIGHTED=True, BLOCK=1024)),
    (token_order._combine, dict(rows=B, row_of_slot=L, weight=B, out=F), dict(K=8, WEIGHTED=False, BLOCK=1024)),
    (token_order._combine_backward, dict(dy=B, rows=B, slot_n=L, weight=F, drows=B, dweight=F), dict(BLOCK=1024)),
    (int4_expand._expand, EXPAND, dict(GROUP=32, CHOSEN=True, BY_HAND=False, WORDS=512)),
    (int4_expand._expand, EXPAND | dict(experts=I), dict(GROUP=12, CHOSEN=False, BY_HAND=False, WORDS=512)),
    *((rms_norm._forward, dict(x=B, weight=B, y=B, r=F, eps="fp32"), dict(ROWS=rows, BLOCK=block)) for rows, block in ((1, 8192), (16, 128))),
    (rms_norm._backward, dict(dy=B, x=B, weight=B, r=F, dx=B), dict(ROWS=1, BLOCK=8192)),
    (rms_norm._weight_gradient, dict(dy=B, x=B, r=F, partial=F), dict(ROWS=16, BLOCK=128)),
    *(
        (
            int4_grouped_mm._multiply,
            dict(x=B, packed=I, scale=S, offsets=I, y=B),
            dict(EXPERTS=64, ROWS=rows, OUT=64, IN=64, GROUP=32, BY_HAND=False),
        )
        for rows in (16, 64, 128)
    ),
]


@triton.jit
def planted(x, BLOCK: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK), tl.zeros((2 * BLOCK,), tl.float32))


def main() -> None:
    kernels = [*KERNELS, (planted, dict(x=F), dict(BLOCK=64))] if "planted" in sys.argv else KERNELS
    good = 0
    for kernel, pointers, constants in kernels:
        signature = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in kernel.arg_names}
        values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
        try:
            triton.compile(ASTSource(kernel, signature, values), target=GPUTarget("cuda", 90, 32))
            good += 1
        except Exception as error:
            print(f"{kernel.__module__}.{kernel.__name__} {constants}: {type(error).__name__}: {error}")
    print(good)


if __name__ == "__main__":
    main()
