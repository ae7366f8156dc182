"""live.py as a module: what counts the bytes alive. adapted.py can be imported by name."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def live() -> ModuleType:
    spec = importlib.util.spec_from_file_location("live", Path(__file__).parent / "live.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
