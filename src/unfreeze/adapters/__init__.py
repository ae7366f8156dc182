"""L5, LoRA on Linear and on stacked experts, over a dense or a packed base.

Attach, the receipt, save, load and verify. To add a layout: a branch in layouts.py (writing), one in read.py,
its formula in verify.py, and a test against its own reader.
"""

from __future__ import annotations

from unfreeze.adapters.attach import (
    Site,
    adapter_parameters,
    attach,
    attached,
    detach,
    put,
    sites,
    with_adapters,
    without_adapters,
)
from unfreeze.adapters.layouts import save_adapter
from unfreeze.adapters.lora import ExpertLowRank, LowRank
from unfreeze.adapters.read import load_adapter
from unfreeze.adapters.receipt import Receipt
from unfreeze.adapters.verify import Verified, verify_adapter
from unfreeze.config.lora import LoraConfig

__all__ = [
    "ExpertLowRank",
    "LoraConfig",
    "LowRank",
    "Receipt",
    "Site",
    "Verified",
    "adapter_parameters",
    "attach",
    "attached",
    "detach",
    "load_adapter",
    "put",
    "save_adapter",
    "sites",
    "verify_adapter",
    "with_adapters",
    "without_adapters",
]
