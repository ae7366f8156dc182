"""The numbers of a case come from the device that computes with them; on a CPU from the caller's generator."""

import pytest
import torch

from unfreeze.kernels.choice import draw, measure, ops

CPU, META = torch.device("cpu"), torch.device("meta")


def test_on_a_cpu_the_generator_draws_as_torch_does():
    one, two = (torch.Generator().manual_seed(3) for _ in range(2))
    assert torch.equal(draw.normal(CPU, one, 4, 5), torch.randn(4, 5, generator=two))
    assert torch.equal(draw.uniform(CPU, one, 7), torch.rand(7, generator=two))


@pytest.mark.parametrize(
    "name",
    [
        "attention",
        "expert_mlp",
        "grouped_mm",
        "int4_grouped_mm",
        "linear_cross_entropy",
        "rotary",
        "swiglu",
        "token_order",
    ],
)
def test_no_case_draws_its_tensors_on_the_host(name, monkeypatch):
    """For meta, in place of a GPU: the host draws a few thousand ids at most."""
    on_host = []
    for function in ("randn", "rand", "randint"):
        real = getattr(torch, function)

        def counted(*args, real=real, **how):
            made = real(*args, **how)
            on_host.append(made.numel() * (made.device.type == "cpu"))
            return made

        monkeypatch.setattr(torch, function, counted)
    for case in ops.import_op(name).cases:
        if "unpacked" in case.bucket or name != "expert_mlp":  # packing reads its weights
            case.inputs(META, torch.float32, torch.Generator())
    assert on_host and max(on_host) <= 1 << 13
    torch.randn(1 << 14)  # control arm
    assert max(on_host) > 1 << 13


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_a_seed_gives_the_same_numbers_twice():
    device = torch.device("cuda")
    for case in ops.import_op("swiglu").cases:
        one, two = (measure.arguments(case, device, torch.float32) for _ in range(2))
        assert torch.equal(one[0], two[0])
