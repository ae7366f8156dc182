"""benchmarks/configs.py as a module: what becomes of every field of config.json, and transformers' names.

The files of cases beside the tests (family_cases.py) can be imported by name.
"""

import importlib.util
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "configs.py"


@pytest.fixture(scope="session")
def bench():
    spec = importlib.util.spec_from_file_location("configs", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["configs"] = module  # a dataclass looks its module up
    spec.loader.exec_module(module)
    return module
