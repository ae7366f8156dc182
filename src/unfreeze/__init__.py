"""unfreeze trains any open-weight language model, every weight of it, in the format it was published in.

    import unfreeze
    run = unfreeze.sft(model="DIR_OR_ID", data="chat.jsonl", rank=16, epochs=2)
    run.loss, run.receipt, run.chat("What is the capital of France?"), run.report()
    model = unfreeze.load("DIR_OR_ID_OR_RUN", dtype="float32")
    model.chat([{"role": "user", "content": "…"}]), model.generate("Once upon", max_new_tokens=50)

The public nouns are imported on first use (PEP 562), so that `import unfreeze` and `unfreeze --help` do not import torch.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unfreeze.api import FinishedRun as FinishedRun
    from unfreeze.api import prepare as prepare
    from unfreeze.api import pretrain as pretrain
    from unfreeze.api import sft as sft
    from unfreeze.generate.model import Model as Model
    from unfreeze.generate.model import load as load

__all__ = ["FinishedRun", "Model", "__version__", "load", "prepare", "pretrain", "sft"]

_HOME = {
    "load": "unfreeze.generate.model", "Model": "unfreeze.generate.model",
    **dict.fromkeys(("FinishedRun", "prepare", "pretrain", "sft"), "unfreeze.api"),
}  # fmt: skip

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
