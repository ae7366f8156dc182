"""swap in memory: a loaded model with a part in place of another, every weight trainable."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from unfreeze.adapters.whole import wholes
from unfreeze.compress.swap import left_on_disk
from unfreeze.compress.swapped import Wish, built, config_with, difference, shape_with, value_of
from unfreeze.core.errors import CheckpointError
from unfreeze.generate.model import Model
from unfreeze.models.blocks.residency import RESIDENT
from unfreeze.models.decoder import Decoder
from unfreeze.parallel.placement.place import hand_over


def swapped(model: Model, wish: Wish, *, keep: bool = True) -> Model:
    """Return `model` with the part of `wish` at its place.

    Every weight that is not packed trains, in the dtype of the computation. keep: `model` stays as it is, so
    weights that train are copies; packed ones, which no training changes, are shared. Without it the new
    model takes the weights over.
    Raises CheckpointError for a place, part or option that is unknown, for a model with adapters, or with
    weights elsewhere; ConfigError for parameters that do not fit.
    """
    before = model.decoder
    _refuse(before)
    # without values, and no weight in a narrower dtype than the computation's: one that trains has none
    own, after = built(before, before.shape), built(before, shape_with(before, wish))
    change = difference(own, after, wish)
    manifest = model.manifest
    if manifest is not None:
        gone = left_on_disk(manifest, own, after, change)
        config = manifest.config if change.same else config_with(manifest.config, wish)
        names = {info.name for name, info in manifest.by_model_name().items() if name in gone}
        tensors = {name: info for name, info in manifest.tensors.items() if name not in names}
        manifest = replace(manifest, config=config, tensors=tensors)
    if change.same:
        after = own
    _fill(before, after, change.drawn, wish.seed, keep=keep)
    return Model(after, model.tokenizer, stop_ids=model.engine.stop_ids, manifest=manifest)


def _fill(before: Decoder, after: Decoder, drawn: tuple[str, ...], seed: int, *, keep: bool) -> None:
    """Give every parameter and persistent buffer of `after`, on meta, its value."""
    old, new = before.state_dict(keep_vars=True), after.state_dict(keep_vars=True)
    by_id: dict[int, Tensor] = {}
    for name, empty in new.items():
        if id(empty) in by_id:  # a tied head
            continue
        if name in drawn:
            value = value_of(after, name, seed).to(before.device, empty.dtype)
        else:
            value = old[name].detach().to(empty.dtype)
            shared = value.data_ptr() == old[name].data_ptr()
            if keep and shared and (isinstance(empty, nn.Parameter) or empty.is_floating_point()):
                value = value.clone()
        by_id[id(empty)] = value
    hand_over(after, by_id, before.device)


def _refuse(decoder: Decoder) -> None:
    """Raise CheckpointError for a model whose weights are not all here, or that has adapters."""
    if any(".adapter." in name for name, _ in decoder.named_parameters()) or wholes(decoder):
        raise CheckpointError(
            "the model has adapters, which belong to the parts that it has now",
            next="unfreeze merge RUN --to bf16 --out DIR, then swap DIR",
        )
    if decoder.exchanges or decoder.residency is not RESIDENT:
        raise CheckpointError("the model's weights are not all in this memory", next="unfreeze.load(DIR)")
