"""All ops by name, and the one public function of each. An op's folder bears its name and is imported when it is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from unfreeze.core.errors import ConfigError, nearest
from unfreeze.kernels.choice.op import Op

OPS = {
    "adamw": "adamw",
    "attention": "attend",
    "dense_mlp": "dense_mlp",
    "expert_mlp": "expert_mlp",
    "few_rows": "few_rows_linear",
    "int4_expand": "expand",
    "int4_grouped_mm": "int4_grouped_mm",
    "linear_cross_entropy": "linear_cross_entropy",
    "replay": "replay",
    "rms_norm": "rms_norm",
    "rotary": "rotary",
    "swiglu": "swiglu",
    "token_order": "token_order",
}


def load(name: str) -> Op:
    """The op of that name. Raises ConfigError where there is none."""
    return _folder(name).OP


def public(name: str) -> Callable[..., Any]:
    """The function the rest of the house calls: it asks choose() and calls what it gets."""
    return getattr(_folder(name), OPS[name])


def _folder(name: str) -> Any:
    if name not in OPS:
        raise ConfigError(f"there is no op {name!r}{nearest(name, OPS)}", next=f"one of {', '.join(OPS)}")
    return importlib.import_module(f"unfreeze.kernels.{name}")
