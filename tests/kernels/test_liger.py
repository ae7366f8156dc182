"""Liger-Kernel's functions say why they cannot run."""

import torch

from unfreeze.kernels import liger


def test_liger_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(liger.importlib.util, "find_spec", lambda name: None)
    assert liger.refuses("cuda", torch.bfloat16) == "liger-kernel is not installed"
    monkeypatch.setattr(liger.importlib.util, "find_spec", lambda name: object())
    assert liger.refuses("cuda", torch.bfloat16) == "" and "device cpu" in liger.refuses(
        "cpu", torch.bfloat16
    )
    assert "float64" in liger.refuses("cuda", torch.float64)
