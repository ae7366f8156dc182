"""The event schema: each kind of event, its fields, their types and units. docs/events.md says the same in words; a test holds the two together.

Types: int (never a boolean), float (an int is one too), text, bool, object (any JSON object); [T] a list of T, {T} an object whose values are T,
T? is T or null. An optional field is absent where it has nothing to say.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple


class Field(NamedTuple):
    """type and unit of one field; optional: it may be absent."""

    type: str
    unit: str
    optional: bool = False


class Kind(NamedTuple):
    """The fields of one kind of event; further: the type of fields not listed (metrics of an objective or a probe), "" if there may be none."""

    fields: Mapping[str, Field]
    further: str = ""


COMMON = {
    "kind": Field("text", "name"),
    "step": Field("int", "finished optimizer steps"),
    "time": Field("float", "seconds since 1970-01-01 UTC"),
    "warning": Field("text", "sentence", optional=True),
}
SCHEMA = {
    "data": Kind(
        {
            "summary": Field("text", "sentence"),
            "rows": Field("int", "rows"),
            "examples": Field("int", "documents"),
            "tokens": Field("int", "tokens"),
            "supervised": Field("int", "tokens"),
            "supervised_fraction": Field("float", "share, 0 to 1"),
            "longest": Field("int", "tokens"),
            "truncated": Field("int", "rows"),
            "dropped": Field("int", "rows"),
            "bad": Field("int", "rows"),
            "shapes": Field("{int}", "rows"),
            "notes": Field("{int}", "rows"),
            "listed": Field("[object]", "row and reason"),
            "split_rows": Field("int", "rows", optional=True),
            "examples_dropped": Field("int", "documents", optional=True),
            "tokens_cut": Field("int", "tokens", optional=True),
            "cuts": Field("[object]", "row and reason", optional=True),
            "duplicates": Field("int", "rows", optional=True),
            "repeats": Field("[object]", "row and reason", optional=True),
            "held_out": Field("int", "documents", optional=True),
            "packing": Field("text", "name", optional=True),
            "efficiency": Field("float?", "share, 0 to 1", optional=True),
            "reading": Field("text", "name", optional=True),
            "files": Field("{int}", "rows", optional=True),
        }
    ),
    "plan": Kind(
        {
            "terms": Field("{int}", "bytes"),
            "beside": Field("{int}", "bytes"),
            "total": Field("int", "bytes"),
            "load": Field("int", "bytes"),
            "usable": Field("int", "bytes"),
            "per_device": Field("[int]", "bytes"),
            "max_over_min": Field("float", "ratio"),
            "expanded_avoided": Field("int", "bytes"),
            "adapter_parameters": Field("int", "parameters"),
            "seconds_per_pass": Field("float?", "seconds"),
            "fits": Field("bool", "yes or no"),
            "hardware": Field("object", "core count, bytes"),
            "lines": Field("[text]", "sentences"),
            "start": Field("[text]", "sentences", optional=True),
        }
    ),
    "load": Kind(
        {
            "bytes": Field("int", "bytes"),
            "seconds": Field("float", "seconds"),
            "expanded_bytes": Field("int", "bytes"),
            "rounded": Field("int", "tensors"),
        }
    ),
    "start": Kind(
        {
            "steps": Field("int", "optimizer steps"),
            "resumed": Field("bool", "yes or no"),
            "model": Field("text", "folder or id"),
            "data": Field("text", "file"),
        }
    ),
    "train": Kind(
        {
            "loss": Field("float?", "nats per supervised token"),
            "grad_norm": Field("float?", "L2 norm before clipping"),
            "tokens": Field("int", "tokens", optional=True),
            "supervised_tokens": Field("int", "tokens", optional=True),
            "seconds": Field("float", "seconds", optional=True),
            "learning_rate": Field("float", "per step", optional=True),
            "peak_bytes": Field("int", "bytes", optional=True),
            "fragmentation_bytes": Field("int", "bytes", optional=True),
            "applied": Field("bool", "yes or no", optional=True),
            "expert_load": Field("{[int]}", "tokens per expert", optional=True),
            "expert_balance": Field("{object}", "see below", optional=True),
            "error": Field("text", "sentence", optional=True),
        },
        further="float?",
    ),
    "eval": Kind(
        {
            "loss": Field("float?", "nats per supervised token", optional=True),
            "perplexity": Field("float?", "exp(loss)", optional=True),
            "bits_per_byte": Field("float?", "bits per byte of text", optional=True),
            "tokens": Field("int", "tokens", optional=True),
            "seconds": Field("float", "seconds", optional=True),
        },
        further="float?",
    ),
    "sample": Kind(
        {
            "when": Field("text", "before, after or during"),
            "index": Field("int", "number of the prompt", optional=True),
            "prompt": Field("text", "text"),
            "text": Field("text", "text"),
        }
    ),
    "gap": Kind(
        {
            "when": Field("text", "before, after or during"),
            "logprob_gap_mean": Field("float", "nats"),
            "logprob_gap_max": Field("float", "nats"),
            "logprob_gap_tokens": Field("int", "tokens"),
        }
    ),
    "receipt": Kind(
        {
            "groups": Field("{object}", "see adapters/receipt.py"),
            "exceptions": Field("[object]", "matrices that were reached and have no gradient, or did not move", optional=True),
        }
    ),
    "save": Kind({"path": Field("text", "folder inside the run folder")}),
    "warning": Kind({"message": Field("text", "sentence")}),
    "end": Kind(
        {
            "reason": Field("text", "done or interrupted"),
            "steps": Field("int", "finished optimizer steps"),
            "tokens_per_second": Field("float?", "tokens per second of this session"),
        }
    ),
}
BALANCE = {
    "max_violation": Field("float?", "busiest expert over the mean, minus 1"),
    "entropy": Field("float?", "share of ln(experts), 0 to 1"),
    "dead": Field("int", "experts"),
}
"""What each layer's object in expert_balance holds; see core/balance.py."""


def faults(event: Mapping[str, Any]) -> list[str]:
    """What is wrong with one event, a sentence each; [] if it conforms."""
    kind = SCHEMA.get(str(event.get("kind")))
    if kind is None:
        return [f"kind {event.get('kind')!r} is not in the schema: {', '.join(SCHEMA)}"]
    fields = {**COMMON, **kind.fields}
    bad = [f"{event['kind']}.{name} is missing" for name, field in fields.items() if not field.optional and name not in event]
    for name, value in event.items():
        wanted = fields[name].type if name in fields else kind.further
        if not wanted:
            bad.append(f"{event['kind']}.{name} is not in the schema")
        elif not conforms(value, wanted):
            bad.append(f"{event['kind']}.{name} is not of type {wanted}: {value!r}"[:200])
    for layer, values in (event.get("expert_balance") or {}).items():
        bad += [f"expert_balance.{layer}.{name} is missing" for name in BALANCE.keys() - values.keys()]
        bad += [
            f"expert_balance.{layer}.{name} is not in the schema or not of its type: {value!r}"
            for name, value in values.items() if name not in BALANCE or not conforms(value, BALANCE[name].type)
        ]  # fmt: skip
    return bad


def conforms(value: object, wanted: str) -> bool:
    """Whether a JSON value is of a type in this module's notation."""
    if wanted.endswith("?"):
        return value is None or conforms(value, wanted[:-1])
    if wanted.startswith("["):
        return isinstance(value, list) and all(conforms(item, wanted[1:-1]) for item in value)
    if wanted.startswith("{"):
        return isinstance(value, dict) and all(isinstance(key, str) and conforms(item, wanted[1:-1]) for key, item in value.items())
    if wanted == "int":
        return isinstance(value, int) and not isinstance(value, bool)
    if wanted == "float":
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return isinstance(value, {"text": str, "bool": bool, "object": dict}[wanted])
