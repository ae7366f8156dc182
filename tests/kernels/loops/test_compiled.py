"""torch.compile says why it cannot run here."""

import pytest
import torch

from unfreeze.kernels.loops import compiled


@pytest.fixture(autouse=True)
def fresh():
    compiled.refuses.cache_clear()
    yield
    compiled.refuses.cache_clear()


def test_without_a_compiler_it_refuses_with_the_reason(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert (
        compiled.refuses("cpu", torch.float32)
        == "torch.compile needs a C++ compiler, and no-such-compiler is not on the PATH"
    )
    assert "device mps" in compiled.refuses("mps", torch.float32)


def test_without_triton_it_refuses_cuda(monkeypatch):
    monkeypatch.setattr(compiled.importlib.util, "find_spec", lambda name: None)
    assert compiled.refuses("cuda", torch.float32) == "torch.compile needs triton, which is not installed"
