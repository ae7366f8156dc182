"""All ops by name, and the one public function of each. An op is imported when it is requested."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

from unfreeze.core.errors import ConfigError, nearest
from unfreeze.kernels.choice.op import Op

# name in records and on the command line -> folder in kernels/, and the function that other packages call
OPS = {
    "adamw": "adamw.adamw",
    "attention": "attention.attend",
    "expert_mlp": "expert_mlp.expert_mlp",
    "few_rows": "skinny_linear.skinny_linear",
    "expand": "expand.expand",
    "grouped_mm": "grouped_mm.grouped_mm",
    "int4_grouped_mm": "int4_grouped_mm.int4_grouped_mm",
    "linear_cross_entropy": "linear_cross_entropy.linear_cross_entropy",
    "packed_attention": "packed_attention.packed_attention",
    "replay": "cuda_graph.replay",
    "rms_norm": "rms_norm.rms_norm",
    "rotary": "rotary.rotary",
    "state_scan": "state_scan.state_scan",
    "swiglu": "swiglu.swiglu",
    "token_order": "token_permute.token_permute",
}


def import_op(name: str) -> Op:
    """The op of that name. Raises ConfigError if there is none."""
    return _folder(name).OP


def public(name: str) -> Callable[..., Any]:
    """The function that other packages call: it calls the implementation that choose() returns."""
    return getattr(_folder(name), OPS[name].partition(".")[2])


def _folder(name: str) -> ModuleType:
    if name not in OPS:
        raise ConfigError(f"there is no op {name!r}{nearest(name, OPS)}", next=f"one of {', '.join(OPS)}")
    return importlib.import_module(f"unfreeze.kernels.{OPS[name].partition('.')[0]}")
