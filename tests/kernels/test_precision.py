"""Which dtype "auto" is, on each kind of device."""

import pytest
import torch

from unfreeze.kernels import precision as module
from unfreeze.kernels.precision import Precision, precision, precision_on, slow


@pytest.fixture(params=[True, False], ids=["bf16 units", "none"])
def units(request, monkeypatch):
    monkeypatch.setattr(module, "multiplies_bf16", lambda: request.param)
    monkeypatch.setattr(module, "cpu_class", lambda: "cpu-amx" if request.param else "cpu-avx2")
    return request.param


def test_a_cpu_takes_what_it_multiplies(units):
    found = precision("auto", torch.device("cpu"))
    assert found == (
        Precision("bfloat16", "this CPU (amx) has bf16 matmul units")
        if units
        else Precision("float32", "this CPU (avx2) has no bfloat16 units")
    )
    assert precision_on("cpu") == found and precision_on("cuda").name == "bfloat16"


def test_what_is_asked_for_is_taken_and_called_slow_where_it_is(units):
    why = "as asked" if units else "as asked; this CPU (avx2) has no bfloat16 units, so it is slow"
    assert precision("bfloat16", "cpu") == Precision("bfloat16", why)
    assert precision("float32", "cpu").name == "float32" and slow("float32", "cpu") == ""
    expected = "" if units else "dtype = bfloat16 is slow here: this CPU (avx2) has no bfloat16 units"
    assert slow("bfloat16", "cpu") == expected


@pytest.mark.parametrize("emulated, name", [(False, "float32"), (True, "bfloat16")])
def test_a_gpu_that_only_emulates_takes_float32(monkeypatch, emulated, name):
    """torch calls emulation support unless it is asked not to."""

    def is_supported(including_emulation=True):
        return including_emulation or emulated

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_supported)
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    assert precision("auto", torch.device("cuda", 0)).name == name
