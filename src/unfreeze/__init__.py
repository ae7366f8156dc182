"""unfreeze trains any open-weight language model, every weight of it, in the format it was published in.

    import unfreeze
    model = unfreeze.load("DIR_OR_ID_OR_RUN", dtype="float32")
    model.generate("Once upon", max_new_tokens=50, temperature=0)

The public nouns are imported on first use (PEP 562), so that `import unfreeze` and `unfreeze --help` do not import torch.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unfreeze.generate.model import Model as Model
    from unfreeze.generate.model import load as load

__all__ = ["Model", "__version__", "load"]

_HOME = {"load": "unfreeze.generate.model", "Model": "unfreeze.generate.model"}

try:
    __version__ = version("unfreeze")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+unknown"


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'unfreeze' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
