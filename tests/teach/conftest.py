"""live, which counts bytes (tests/parallel/live.py)."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def live() -> ModuleType:
    path = Path(__file__).parents[1] / "parallel" / "live.py"
    spec = importlib.util.spec_from_file_location("live", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
