"""The functions of an op that others call: each is checked, and a bug in one of them alone bans the candidate."""

import importlib.util
from dataclasses import replace

import pytest
import torch

from unfreeze.kernels.choice import checked, ops
from unfreeze.kernels.choice.measure import Truth, tensors
from unfreeze.kernels.expand import cases

CPU, F32 = torch.device("cpu"), torch.float32


def of_16_rows(use):
    """Of expand, whose interpreted kernels are a program per row: a stack of 16 rows, not 64."""
    if use.name != "fill":
        return use
    (codec,) = use.inputs.args

    def inputs(*where):
        packed, _, out = cases._inputs(codec, 16, 256, *where)
        return packed, 1, out.new_zeros(cases.EXPERTS - 1, 32, 272)[:, :16, :256]

    return replace(use, inputs=inputs)


USES = [
    pytest.param(op, of_16_rows(use), id=f"{name}, {use.name}, {use.bucket}, {number}")
    for name, op in ((name, ops.import_op(name)) for name in ops.OPS)
    for number, use in enumerate(op.uses)
]
pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@pytest.mark.parametrize("op, use", USES)
def test_every_triton_kernel_has_the_function_and_is_right(op, use, interpreted):
    """In Triton's interpreter, in float32."""
    names = [
        name for name, part in op.candidates.items() if part.can("cpu", F32, use.bucket) and "triton" in name
    ]
    assert names
    for name in names:
        implementation = op.candidates[name].load()
        assert use.function(implementation) is not None
        errors = Truth(op, use, CPU, F32).errors(implementation)
        assert max(errors.forward, errors.backward) <= op.tolerance[F32]


@pytest.mark.parametrize("op, use", USES)
def test_control_arm_a_bug_in_that_function_alone_is_seen(op, use, monkeypatch):
    right = use.function(op.reference)

    def wrong(*args):
        """Right but for the last number of what it returns or writes."""
        returned = right(*args)
        last = list(tensors(args if returned is None else returned))[-1]
        last.detach()[..., -1] += 1
        return returned

    def quick(*args):
        return op.reference(*args)

    planted = replace(use, function=lambda implementation: wrong if implementation is quick else right)
    monkeypatch.setattr(checked, "running", lambda *_: ["quick"])
    monkeypatch.setattr(checked, "implementation_of", lambda *_: quick)
    fault = checked.of_uses(replace(op, uses=(planted,)), CPU, F32)["quick"]
    assert fault.startswith(f"{use.name}: error ")
    assert not checked.of_uses(replace(op, uses=(replace(planted, function=lambda _: right),)), CPU, F32)
