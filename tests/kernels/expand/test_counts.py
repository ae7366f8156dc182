"""What an expansion costs on a GPU, counted: launches of a stack, and bytes that they read and write a weight."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from unfreeze.kernels.expand import OP
from unfreeze.kernels.expand.bucket import OTHER_FP8, OTHER_INT4
from unfreeze.kernels.expand.cases import KERNELS, drawn
from unfreeze.kernels.expand.reference import expand_reference, expand_stack_reference
from unfreeze.quant.grids import AT_ONCE

ROOT = Path(__file__).parents[3]
ROWS, COLUMNS = 384, 512
VIEWS = set(
    """view _unsafe_view slice select transpose t expand unsqueeze permute split detach as_strided alias unbind squeeze
    empty empty_like new_empty view_as _reshape_alias narrow empty_strided unfold""".split()
)


class Count(TorchDispatchMode):
    """launches: operations that are no views; bytes: of their inputs and outputs."""

    def __init__(self):
        super().__init__()
        self.launches = self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        if function.overloadpacket.__name__ not in VIEWS:
            self.launches += 1
            self.bytes += sum(x.nbytes for x in (*args, found) if isinstance(x, torch.Tensor))
        return found


def stack(kind, experts, rows=ROWS, columns=COLUMNS):
    return drawn(KERNELS[kind].codec, experts, rows, columns, torch.Generator().manual_seed(0))


def row(kind):
    """The line of the formats' page."""
    kernel, packed = KERNELS[kind], stack(kind, 5, 1536, 2048)
    out = torch.empty(5, 1536, 2048, dtype=torch.bfloat16)
    launches = counted(expand_stack_reference, packed, range(5), out).launches
    return f"| {kind} | `{KERNEL[kind]}` | {kernel.moved:g} | {kernel.reference:g} | {launches} |"


KERNEL = dict.fromkeys(("int4", "mxfp4", "nvfp4", "nf4", OTHER_INT4), "_four")
KERNEL |= dict.fromkeys(("fp8", "mxfp8", "int8", OTHER_FP8), "_bytes")
KERNEL |= dict.fromkeys(("awq", "gptq", "integers"), "_integers")


@pytest.fixture(autouse=True)
def slabs_of_a_gpu(monkeypatch):
    monkeypatch.setitem(AT_ONCE, "cpu", AT_ONCE["cuda"])


def counted(work, *args):
    with Count() as count:
        work(*args)
    return count


@pytest.mark.parametrize("kind", KERNELS)
def test_the_bytes_a_weight_in_a_prediction_are_those_counted(kind):
    kernel, out = KERNELS[kind], torch.empty(ROWS, COLUMNS, dtype=torch.bfloat16)
    moved = kernel.codec.nbytes(ROWS, COLUMNS) / out.numel() + out.itemsize
    assert kernel.moved == pytest.approx(moved, abs=0.1)
    reference = counted(expand_reference, stack(kind, 1), 0, out).bytes / out.numel()
    assert kernel.reference == pytest.approx(reference, rel=0.05)
    candidate = OP.candidates["triton" if kind == "int4" else f"triton_{kind}"]
    assert candidate.because == f"{kernel.moved:g} bytes a weight, the reference {kernel.reference:g}"


@pytest.mark.parametrize("kind", sorted(KERNELS.keys() - {"awq", "gptq", "nf4"}))
def test_the_reference_takes_as_many_launches_for_a_stack_as_for_a_matrix(kind):
    """Without Triton. AWQ, GPTQ and NF4, whose matrices are not split by rows, are expanded one by one."""
    packed, out = stack(kind, 6), torch.empty(6, ROWS, COLUMNS, dtype=torch.bfloat16)
    one = counted(expand_stack_reference, packed, [3], out[:1]).launches
    assert counted(expand_stack_reference, packed, range(6), out).launches == one
    assert torch.equal(out, packed.dequantize().float().bfloat16())
    expand_stack_reference(packed, [4, 1], out[:2])
    assert torch.equal(out[:2], packed.dequantize()[[4, 1]].float().bfloat16())


def test_the_page_has_what_is_counted():
    page = (ROOT / "docs/reference/formats.md").read_text(encoding="utf-8").splitlines()
    rows = [row(kind) for kind in KERNELS]
    first = page.index(rows[0])
    assert page[first : first + len(rows)] == rows


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("kind", KERNELS)
def test_a_kernel_is_launched_once_for_a_stack(kind, monkeypatch):
    from unfreeze.kernels.expand import triton_cuda

    launches = []

    class Kernel:
        def __init__(self, name):
            self.name = name

        def __getitem__(self, grid):
            return lambda enable_fp_fusion=True, **_: launches.append((self.name, enable_fp_fusion))

    for name in ("_four", "_bytes", "_integers"):
        monkeypatch.setattr(triton_cuda, name, Kernel(name))
    count = counted(triton_cuda.fill, stack(kind, 6), 0, torch.empty(6, ROWS, COLUMNS, dtype=torch.bfloat16))
    # absmax of double quantization is rounded after the product and after the sum, not once as a fused one
    assert launches == [(KERNEL[kind], kind != "nf4")] and count.launches == 0
