"""Scheme: the format of each module of a checkpoint.

A checkpoint may mix formats: attention in bf16, dense layers in FP8, experts in 4 bits. Its config.json
declares them by module names: groups with targets, lists of what stays unquantized. formats.recognise builds
a Scheme from that, and all code that needs a codec gets it per module from the Scheme. If there are files,
they decide if a module is packed at all: `stored` and `part_of` take their names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import translate
from functools import lru_cache

from unfreeze.core.errors import ConfigError
from unfreeze.quant.codec import Codec, kept_suffixes
from unfreeze.untrusted.pattern import pattern

CodecFor = Callable[[str], Codec | None]
"""Name of a module on disk -> the codec of its weight; None if it is not packed."""


UNREAD = frozenset(
    "input_scale activation_scale input_global_scale input_zero_point output_scale output_zero_point"
    " k_scale v_scale q_scale kv_scale k_zero_point v_zero_point q_zero_point prob_output_scale".split()
)
"""Last name parts of tensors beside quantized weights that are about activations: scales with which a server
rounds a layer's inputs or its cache. Training and generation here round neither."""


def is_unread(name: str) -> bool:
    """True if a quantized checkpoint's tensor of this name is about activations, and not needed here."""
    return name.rpartition(".")[2] in UNREAD


def nothing_packed(module: str) -> Codec | None:
    """No module of this checkpoint is packed."""
    return None


@dataclass(frozen=True)
class Modules:
    """A set of modules by their names, tested by `"model.layers.0.mlp" in modules`.

    names     these
    inside    these, and every module inside them
    within    modules whose names contain these consecutive parts: "mlp.gate" is model.layers.0.mlp.gate and
              everything inside it
    patterns  regular expressions, matched from the start of a name
    linear    every linear layer: all that can be packed
    """

    names: frozenset[str] = frozenset()
    inside: frozenset[str] = frozenset()
    within: frozenset[str] = frozenset()
    patterns: tuple[str, ...] = ()
    linear: bool = False

    def __contains__(self, module: str) -> bool:
        return self.linear or any(map(self._has, spellings(module)))

    def _has(self, name: str) -> bool:
        parts = name.split(".")
        return (
            name in self.names
            or any(".".join(parts[:end]) in self.inside for end in range(len(parts), 0, -1))
            or (bool(self.within) and any(run in self.within for run in _runs(parts)))
            or any(re.match(pattern, name) for pattern in self.patterns)
        )


def _runs(parts: list[str]) -> Iterator[str]:
    """Each run of name parts, joined: "a", "a.b", "b" of a.b."""
    for start in range(len(parts)):
        yield from (".".join(parts[start:end]) for end in range(start + 1, len(parts) + 1))


@lru_cache(maxsize=4096)
def spellings(module: str) -> tuple[str, ...]:
    """A module's names: its own, and those it has inside a multimodal model.

    Configs of Kimi-K2.5 use language_model.model.layers.0, those of Gemma 4 model.language_model.layers.0.
    """
    inner = module.removeprefix("model.")
    nested = (f"model.language_model.{inner}",) if inner != module else ()
    return (module, f"language_model.{module}", *nested)


def globs(entries: Iterable[str]) -> Modules:
    """Entries in shell syntax: "*.mlp.gate*". One without a star is a module and everything inside it."""
    starred = [entry for entry in entries if "*" in entry]
    # one pattern: releases list hundreds
    joined = "|".join(translate(entry) for entry in starred)
    return Modules(inside=frozenset(entries) - frozenset(starred), patterns=(joined,) if starred else ())


NOT_PLAIN = frozenset("\\*+?[](){}|^$")
"""Characters that no module name has: an entry with one of them is a pattern."""
_BOUNDARY = r"(?:(?<=\.)|(?=\.|$))"


def not_converted(entries: Iterable[str], where: str) -> Modules:
    """modules_to_not_convert: parts of names, or patterns of their starts; the head is always included.

    A part is whole ("gate" is not in "gate_proj") and may be anywhere: autoawq, bitsandbytes and transformers
    4 search the whole name, transformers 5 its start and its end. A pattern stops at the end of a name's
    part: "model.layers.*.self_attn" includes everything inside it.
    Source: transformers' should_convert_module; compared with it in tests/quant/test_scheme.py. An entry that
    is not a regular expression ("*.mlp.gate") is read in shell syntax. Raises ConfigError naming `where` for
    a pattern that could match forever.
    """
    entries = [entry.strip(".") for entry in entries]  # "layers.0." too
    regular = [entry.removeprefix("re:") for entry in entries if NOT_PLAIN & set(entry)]
    starred = [entry for entry in regular if entry.startswith("*")]
    patterns = list(globs([*starred, *(f"{entry}.*" for entry in starred)]).patterns)
    for entry in regular:
        if entry not in starred:
            pattern(entry, f"config.json: {where}", ConfigError)
            patterns.append(f"(?:{entry}){_BOUNDARY}")
    plain = frozenset(entry for entry in entries if not NOT_PLAIN & set(entry)) | {"lm_head"}
    return Modules(within=plain, patterns=tuple(patterns))


@dataclass(frozen=True)
class Rule:
    """The modules in one format."""

    codec: Codec
    modules: Modules = Modules(linear=True)


@dataclass(frozen=True)
class Scheme:
    """The formats of a checkpoint: the first rule that has a module counts, unless `ignore` has it."""

    rules: tuple[Rule, ...]
    ignore: Modules = Modules()

    @property
    def codecs(self) -> tuple[Codec, ...]:
        """All codecs, each listed once."""
        return tuple(dict.fromkeys(rule.codec for rule in self.rules))

    @property
    def name(self) -> str:
        """The names of its formats: "int4-pack-quantized", or "fp8-block, mxfp4"."""
        return ", ".join(dict.fromkeys(codec.name for codec in self.codecs))

    def codec_for(self, module: str) -> Codec | None:
        """The codec that config.json gives a linear layer; None if it stays unquantized."""
        if module in self.ignore:
            return None
        return next((rule.codec for rule in self.rules if module in rule.modules), None)

    def stored(self, module: str, names: Collection[str]) -> Codec | None:
        """The codec of a module whose weight `names` hold packed; None if they do not.

        The files decide: a module that config.json leaves unquantized is also read by the codec whose parts
        are there. If several codecs have parts of these names, config.json's codec wins, then a codec that
        finds all of its parts, and of two the one with more parts.
        """
        present = [codec for codec in self.codecs if is_packed(module, names, codec)]
        if len(present) > 1:
            declared = self.codec_for(module)
            if declared in present:
                return declared
            whole = [c for c in present if all(f"{module}.{suffix}" in names for suffix in kept_suffixes(c))]
            return max(whole or present, key=lambda codec: len(kept_suffixes(codec)))
        return present[0] if present else None

    def part_of(self, name: str, names: Collection[str]) -> Codec | None:
        """The codec of the packed weight that tensor `name` is a part of; None if there is none."""
        module, _, suffix = name.rpartition(".")
        if not any(suffix in codec.suffixes for codec in self.codecs):
            return None
        codec = self.stored(module, names)
        return codec if codec is not None and suffix in codec.suffixes else None

    def as_stored(self, dtypes: Mapping[str, str]) -> Scheme:
        """The same scheme, with the scales of each codec in the dtype of the files.

        dtypes: name on disk -> dtype. Raises CheckpointError if the scales of one codec have several dtypes.
        """
        if len(self.codecs) == 1:
            new = {codec: codec.as_stored(dtypes) for codec in self.codecs}
        else:
            own: dict[Codec, dict[str, str]] = {codec: {} for codec in self.codecs}
            for name, dtype in dtypes.items():
                codec = self.part_of(name, dtypes)
                if codec is not None:
                    own[codec][name] = dtype
            new = {codec: codec.as_stored(names) for codec, names in own.items()}
        return self.replaced(new)

    def replaced(self, new: Mapping[Codec, Codec]) -> Scheme:
        """The same scheme with other codecs for some."""
        rules = (replace(rule, codec=new.get(rule.codec, rule.codec)) for rule in self.rules)
        return replace(self, rules=tuple(rules))


def is_packed(module: str, names: Collection[str], codec: Codec) -> bool:
    """True if `names` hold the weight of `module` in the codec's format.

    One of them must be a part that only a packed weight has.
    """
    return any(f"{module}.{suffix}" in names for suffix in kept_suffixes(codec) if suffix != "weight")
