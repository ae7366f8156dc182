"""The names of a packed weight's parts, if a release spells them differently from "<module>.<suffix>".

    on disk                                         here
    …experts.gate_up_proj_blocks                    …experts.gate_up_proj.blocks               gpt-oss
    …q_proj.weight.absmax                           …q_proj.weight_absmax                      bitsandbytes
    …q_proj.weight.quant_state.bitsandbytes__nf4    …q_proj.weight_quant_state_nf4

Manifest.by_model_name uses the names on the right, so all code between a file and a parameter sees one
spelling; saving writes those on the left.
"""

from __future__ import annotations

import re

_STACKED = r"(\.experts\.(?:gate_up|down)_proj)"
_READ = (
    (re.compile(_STACKED + r"_(blocks|scales)$"), r"\1.\2"),
    (re.compile(r"\.weight\.((?:nested_)?(?:absmax|quant_map))$"), r".weight_\1"),
    (re.compile(r"\.weight\.quant_state\.bitsandbytes__(nf4|fp4)$"), r".weight_quant_state_\1"),
)
_WRITTEN = (
    (re.compile(_STACKED + r"\.(blocks|scales)$"), r"\1_\2"),
    (re.compile(r"\.weight_((?:nested_)?(?:absmax|quant_map))$"), r".weight.\1"),
    (re.compile(r"\.weight_quant_state_(nf4|fp4)$"), r".weight.quant_state.bitsandbytes__\1"),
)


def canonical(name: str) -> str:
    """A tensor's name on disk -> its name here; usually the same."""
    if ".weight." not in name and not name.endswith(("_blocks", "_scales")):  # 207,000 names in Kimi-K2
        return name
    return _spelled(name, _READ)


def on_disk(name: str) -> str:
    """The inverse of `canonical`."""
    if not name.endswith(("blocks", "scales", "absmax", "quant_map", "nf4", "fp4")):
        return name
    return _spelled(name, _WRITTEN)


def _spelled(name: str, rules: tuple[tuple[re.Pattern[str], str], ...]) -> str:
    for pattern, replacement in rules:
        name, count = pattern.subn(replacement, name)
        if count:
            break
    return name
