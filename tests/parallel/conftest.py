"""live.py as a module: what counts the bytes alive."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def live() -> ModuleType:
    spec = importlib.util.spec_from_file_location("live", Path(__file__).parent / "live.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
