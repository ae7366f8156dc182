"""Layers with different attention masks: config.json's layer_types and sliding_window."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from unfreeze.core.errors import CheckpointError
from unfreeze.models.fields import shown
from unfreeze.models.shape import Shape, require

if TYPE_CHECKING:
    from unfreeze.kernels.attention import Mask

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


def layer_types(
    config: Mapping[str, Any], usual: Callable[[int], str], built: tuple[str, ...] = (FULL, SLIDING)
) -> tuple[str, ...]:
    """The kind of each layer: layer_types, or if absent `usual` of the layer's number.

    Raises CheckpointError for a wrong number of layers, a kind that is not implemented, and sliding layers
    without a sliding_window.
    """
    layers = int(require(config, "num_hidden_layers"))
    declared = config.get("layer_types")
    kinds = tuple(map(usual, range(layers))) if declared is None else tuple(declared)
    if len(kinds) != layers:
        raise CheckpointError(
            f"config.json: layer_types has {len(kinds):,} entries, num_hidden_layers is {layers:,}",
            next="get config.json from the model's publisher again",
        )
    unknown = [kind for kind in kinds if kind not in built]
    if unknown:
        raise CheckpointError(
            f"config.json: layer_types holds {shown(unknown[0])}, which is not built for model_type"
            f" {config.get('model_type')!r}; built: {', '.join(built)}",
            next="open an issue with the model's name",
        )
    if SLIDING in kinds and not config.get("sliding_window"):
        raise CheckpointError(
            f"config.json: layers are {SLIDING}, and sliding_window is {shown(config.get('sliding_window'))}",
            next="get config.json from the model's publisher again",
        )
    return kinds


def everywhere(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Kinds for a family whose layers all slide if sliding_window is a number (Mistral)."""
    kind = FULL if config.get("sliding_window") is None else SLIDING
    return layer_types(config, lambda index: kind)


def mask(shape: Shape, index: int) -> Mask:
    """The attention mask of a layer."""
    from unfreeze.kernels.attention import CAUSAL, Mask

    if not shape.layer_types or shape.layer_types[index] != SLIDING:
        return CAUSAL
    return Mask(window=int(shape.config["sliding_window"]))


def dense_layers(config: Mapping[str, Any], usual: int) -> frozenset[int]:
    """The layers whose MLP is dense: "dense" in mlp_layer_types, or if absent the first `usual`.

    Raises CheckpointError for a wrong number of entries and for one that is neither dense nor sparse.
    """
    layers = int(require(config, "num_hidden_layers"))
    declared = config.get("mlp_layer_types")
    if declared is None:
        return frozenset(range(min(usual, layers)))
    wrong = [kind for kind in declared if kind not in ("dense", "sparse")]
    if wrong or len(declared) != layers:
        what = f"holds {shown(wrong[0])}" if wrong else f"has {len(declared):,} entries"
        raise CheckpointError(
            f"config.json: mlp_layer_types {what}; it must be dense or sparse for each of"
            f" num_hidden_layers {layers:,}",
            next="get config.json from the model's publisher again",
        )
    return frozenset(index for index, kind in enumerate(declared) if kind == "dense")


def _usual(table: object, theta: float) -> bool:
    """True if a rotary table describes the plain rotation at this rope_theta."""
    usual = {"rope_type": "default", "type": "default", "rope_theta": theta}
    return isinstance(table, Mapping) and all(usual.get(name) == value for name, value in table.items())


def require_tables(tables: Mapping[str, Any], model_type: str) -> None:
    """Raise CheckpointError unless rope_parameters has a table with a rope_theta for each kind of layer."""
    for kind in (FULL, SLIDING):
        table = tables.get(kind)
        if not isinstance(table, Mapping) or "rope_theta" not in table:
            raise CheckpointError(
                f"config.json: rope_parameters has no {kind} with a rope_theta, which model_type"
                f" {model_type!r} needs",
                next="get config.json from the model's publisher again",
            )


def per_kind(config: Mapping[str, Any], *, full: float, sliding: float) -> tuple[dict[str, Any], ...]:
    """The config as read by its full and by its sliding layers, each with one rotary table.

    rope_parameters has a table per kind. Older configs have one, rope_scaling, for full layers alone. full,
    sliding: the default rope_theta. Raises CheckpointError for a rope_parameters without kinds, and for a
    rope_scaling with kinds: transformers ignores both. They are accepted if ignoring them changes nothing.
    """
    new, old = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    kinds = {FULL: full, SLIDING: sliding}
    nested = {kind: new.get(kind) or {} for kind in kinds}
    if wrong := next((kind for kind, table in nested.items() if not isinstance(table, Mapping)), ""):
        raise CheckpointError(
            f"config.json: rope_parameters.{wrong} is {shown(new[wrong])}; it must be an object",
            next="get config.json from the model's publisher again",
        )
    flat = {name: value for name, value in new.items() if name not in kinds}
    of_kinds = {kind: old.get(kind) for kind in kinds if kind in old}
    for name, tables in (
        ("rope_parameters", {kind: flat for kind in kinds if flat}),
        ("rope_scaling", of_kinds),
    ):
        ignored = [kind for kind, table in tables.items() if not _usual(table, kinds[kind])]
        if ignored:
            raise CheckpointError(
                f"config.json: {name} {shown(tables[ignored[0]])} for {ignored[0]} is not followed by"
                f" transformers' {config.get('model_type')!r}: it reads rope_parameters.{ignored[0]}",
                next=f"write what the publisher trained with under rope_parameters.{ignored[0]}",
            )
    tables = (nested[FULL] | ({} if of_kinds else dict(old)), nested[SLIDING])
    rest = {
        name: value
        for name, value in config.items()
        if name not in ("rope_parameters", "rope_scaling", "rope_theta")
    }
    return tuple(
        {**rest, "rope_parameters": {"rope_theta": theta, **table}}
        for table, theta in zip(tables, (full, sliding), strict=True)
    )
