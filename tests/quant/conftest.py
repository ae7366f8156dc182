"""Weights that the libraries of a format packed and expanded (benchmarks/quant_vectors.py), by case."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

VECTORS = Path(__file__).parent / "vectors"


@pytest.fixture(scope="session")
def recorded() -> Callable[[str, str], dict[str, dict[str, torch.Tensor]]]:
    """(format, version of its library) -> case -> tensors of the file, and what they are expanded to."""

    def read(name: str, version: str) -> dict[str, dict[str, torch.Tensor]]:
        cases: dict[str, dict[str, torch.Tensor]] = {}
        with safe_open(VECTORS / f"{name}.safetensors", "pt") as file:
            assert file.metadata()["version"] == version
            for key in file.keys():  # noqa: SIM118 - not a dict
                case, _, part = key.partition("/")
                cases.setdefault(case, {})[part] = file.get_tensor(key)
        return cases

    return read
