"""peak_bytes sees an allocation that is gone again; after a reset it counts anew where the system allows
that."""

from __future__ import annotations

import pytest
import torch

from unfreeze.train.memory import peak_bytes, reset_peak_bytes

CPU = torch.device("cpu")


def test_the_peak_remembers_what_is_gone():
    torch.ones(32 * 2**20, dtype=torch.float32)  # 128 MiB, dropped at once
    assert peak_bytes(CPU) >= 128 * 2**20


def test_reset_starts_a_new_measurement():
    torch.ones(64 * 2**20, dtype=torch.float32)
    high = peak_bytes(CPU)
    if not reset_peak_bytes(CPU):
        pytest.skip("/proc/self/clear_refs cannot be written here")
    assert peak_bytes(CPU) <= high - 200 * 2**20
