"""The fuzzers as a module, for the property tests; benchmarks/fuzz.py loads the same file."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def fuzzers() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fuzzers", Path(__file__).parent / "fuzzers.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fuzzers"] = module
    spec.loader.exec_module(module)
    return module
