"""Merge-aware training of a run: the formats of its merge, the step it begins at, what it is refused with.

The rounding of each matrix comes from the merge's own plan (compress/work.py), so that what is trained is
what `unfreeze merge` writes.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unfreeze.config.adapter import ROUNDED, RoundedAs, lora_of, rounded_as
from unfreeze.core.errors import AdapterError, ConfigError
from unfreeze.job.watch.best import forget_best
from unfreeze.quant.bitsandbytes import Bits4
from unfreeze.quant.codec import Codec
from unfreeze.quant.fp8 import Fp8
from unfreeze.quant.fp8_scaled import Fp8Scaled
from unfreeze.quant.halves import Halves
from unfreeze.quant.int4 import Int4
from unfreeze.quant.kept import can_keep
from unfreeze.quant.mxfp4 import Mxfp4
from unfreeze.quant.nvfp4 import Nvfp4
from unfreeze.quant.requantize import BLOCK, Scales

if TYPE_CHECKING:
    import torch

    from unfreeze.adapters.merge_aware.begin import Roundings
    from unfreeze.checkpoint import Manifest
    from unfreeze.compress.work import MergeWork
    from unfreeze.config.lora import LoraConfig
    from unfreeze.models import Decoder
    from unfreeze.parallel.plan import Plan, PlannedModel
    from unfreeze.train.state import State
    from unfreeze.train.step import StepResult

CODECS: dict[str, tuple[type, ...]] = {
    "int4": (Int4,),
    "fp8": (Fp8, Fp8Scaled),
    "mxfp4": (Mxfp4,),
    "nvfp4": (Nvfp4,),
    "nf4": (Bits4,),
}


TEMPORARIES = 24  # bytes for each of the weights that are rounded at a time


def format_of(merge_aware: str, manifest: Manifest) -> str:
    """The value of `unfreeze merge --to` that writes what such a run trains.

    Raises ConfigError if the base's weights are in another format.
    """
    scheme = manifest.scheme()
    if scheme is None:
        if merge_aware == "int4":
            return "int4"
        to = "int4" if merge_aware == "same" else merge_aware
        raise ConfigError(
            f"merge_aware is {merge_aware}, but {manifest.path.name} is not quantized: a merge writes int4",
            next=f"--merge-aware int4, or first: unfreeze quantize {manifest.path} --to {to} --out DIR",
        )
    return "same"


def roundings_of(
    lora: LoraConfig, manifest: Manifest, model: Decoder, adapted: Mapping[str, tuple[str, ...]]
) -> Roundings:
    """(site, projection) -> its rounding in the merge of adapters at `adapted` (site -> projections).

    Raises ConfigError if no adapted weight has the format, or if the merge could not write it.
    """
    from unfreeze.adapters.merge_aware.matrix import Rounding
    from unfreeze.compress.deltas import NoChanges
    from unfreeze.compress.merge import check_formats
    from unfreeze.compress.work import MergeWork

    to: Any = format_of(lora.merge_aware, manifest)
    work = MergeWork(manifest, model, NoChanges(dict(adapted)), to)
    scales = scales_of(lora, work)
    check_formats(work, scales)
    roundings: dict[tuple[str, str], Rounding] = {}
    for weight in work.weights:
        if weight.home is None or weight.to is None or isinstance(weight.to, str):
            continue
        place, into = weight.home.place, None if weight.in_place else weight.to
        if into is None and not _is(weight.to, lora.merge_aware):
            raise ConfigError(
                f"merge_aware is {lora.merge_aware}, but {weight.name} is in {weight.to.name}",
                next="--merge-aware same",
            )
        own = Rounding(into, scales, halves=place.half is not None)
        roundings[place.site, place.projection] = own
    if not any(projection in adapted.get(site, ()) for site, projection in roundings):
        raise ConfigError(
            f"merge_aware is {lora.merge_aware}, but merging rounds no adapted weight to it",
            next="add layers that it quantizes to --lora.targets (widths in groups of 32), or leave it out",
        )
    return roundings


def scales_of(lora: LoraConfig, work: MergeWork) -> Scales:
    """The run's scales; unset, keep-change if all that is rounded stays in a format which has it."""
    if lora.merge_aware_scales is not None:
        return lora.merge_aware_scales
    own = [codec for codec, weight in work.codecs.items() if weight.in_place]
    return "keep-change" if own and all(map(can_keep, own)) else "refit"


def adapted_of(model: Decoder) -> dict[str, tuple[str, ...]]:
    """Site -> its adapted projections, "" of a linear layer."""
    from unfreeze.adapters.attach import sites
    from unfreeze.adapters.lora import LowRank
    from unfreeze.models.blocks.experts import Experts

    adapted: dict[str, tuple[str, ...]] = {}
    for site in sites(model):
        if isinstance(site.adapter, LowRank):
            adapted[site.name] = ("",)
        elif isinstance(site.owner, Experts):
            ranks = {site.owner.first: site.adapter.gate_up_rank, "down_proj": site.adapter.down_rank}
            adapted[site.name] = tuple(name for name, rank in ranks.items() if rank is not None)
    return adapted


def _is(codec: Codec, merge_aware: str) -> bool:
    own = codec.codec if isinstance(codec, Halves) else codec
    return merge_aware == "same" or isinstance(own, CODECS[merge_aware])


def check(lora: LoraConfig, manifest: Manifest) -> None:
    """Raise ConfigError if a merge of the run could not write the format; reads no tensor."""
    import torch

    from unfreeze import models
    from unfreeze.models.targets import chosen_by

    format_of(lora.merge_aware, manifest)
    model = models.meta_model(models.shape(manifest.config), manifest, torch.float32)
    adapted = {
        name: tuple(projection.removeprefix(name).removeprefix(".") for projection in projections)
        for name, (_, projections) in chosen_by(lora, model).items()
    }
    roundings_of(lora, manifest, model, adapted)


def check_plan(plan: Plan, manifest: Manifest) -> None:
    """Raise ConfigError for weights that are not where they are rounded, or not as in the files."""
    places = {name: getattr(plan.layout, name) for name in ("experts", "rest", "adapters")}
    for name, place in places.items():
        if place != "device":
            raise ConfigError(
                f"merge_aware with place.{name} = {place} is not built: it rounds weights on the device",
                next=f"--place.{name} device, or remove --merge-aware",
            )
    wide = [name for name, info in manifest.tensors.items() if info.dtype == "F32" and len(info.shape) > 1]
    if wide and manifest.scheme() is None and plan.sizes.compute_bytes < 4:
        raise ConfigError(
            f"merge_aware rounds the files' numbers, and {wide[0]} is float32 there",
            next="--memory.dtype float32",
        )


def planned(lora: LoraConfig, model: PlannedModel) -> PlannedModel:
    """The model that the plan counts, with `Sizes.rounding`."""
    size = rounding_bytes(lora, model.meta, model.dtype, model.device)
    return replace(model, sizes=replace(model.sizes, rounding=size))


def bytes_as_trained(meta: Decoder, adapter: Path, dtype: torch.dtype, device: torch.device) -> int:
    """Bytes that the rounding of an adapter takes beside the model (`compute_as_trained`); 0 without one."""
    from unfreeze.config.lora import LoraConfig

    if (own := rounded_as(adapter)) is None:
        return 0
    lora = LoraConfig.model_validate({**lora_of(adapter), "merge_aware": own.format})
    return rounding_bytes(lora, meta, dtype, device)


def rounding_bytes(lora: LoraConfig, meta: Decoder, dtype: torch.dtype, device: torch.device) -> int:
    """Bytes of rounding a model, which is on meta.

    One matrix on each core: ΔW in float32, half of it again, Ŵ, and some temporaries of its rounding. And the
    codes of all rounded matrices, which answers and samples read.
    """
    import torch

    from unfreeze.compress.work import KIMI
    from unfreeze.models.blocks.experts import Experts
    from unfreeze.models.targets import chosen_by

    largest = codes = 0
    for candidate, projections in chosen_by(lora, meta).values():
        owner = candidate.owner
        if isinstance(owner, Experts):
            named = {owner.first: owner.gate_up_proj, "down_proj": owner.down_proj}
            modules = [module for name, module in named.items() if f"{candidate.name}.{name}" in projections]
            D, I = owner.hidden_size, owner.intermediate_size
            shapes = [(owner.before * I, D) if module is owner.gate_up_proj else (D, I) for module in modules]
            matrices = len(owner.held)
        else:
            modules, shapes = [owner], [(owner.out_features, owner.in_features)]
            matrices = 1
        for module, (rows, columns) in zip(modules, shapes, strict=True):
            if module.codec is None and (lora.merge_aware != "int4" or columns % KIMI.group_size):
                continue
            largest = max(largest, rows * columns)
            codes += matrices * (module.codec or KIMI).nbytes(rows, columns)
    cores = torch.get_num_threads() if device.type == "cpu" else 1
    scratch = largest * (6 + dtype.itemsize) + TEMPORARIES * min(largest, BLOCK)
    return cores * scratch + codes


class MergeAware:
    """Hook of fit(): from a step on, the model is trained as it will be merged."""

    def __init__(self, lora: LoraConfig, manifest: Manifest):
        self._lora, self._manifest = lora, manifest

    def begins_at(self, steps: int) -> int:
        """The number of steps of ordinary LoRA."""
        return int(self._lora.merge_aware_from * steps)

    def first(self, state: State) -> None:
        """Before the first step of a session: a resumed run is where it was."""
        if state.step >= self.begins_at(state.schedule.steps):
            self._begin(state)

    def __call__(self, state: State, result: StepResult) -> None:
        if state.step != self.begins_at(state.schedule.steps):
            return
        self._begin(state)
        forget_best(state)  # losses before and after do not compare

    def _begin(self, state: State) -> None:
        from unfreeze.adapters.merge_aware import begin

        model = state.model
        begin(model, roundings_of(self._lora, self._manifest, model, adapted_of(model)))


def compute_as_trained(model: Decoder, manifest: Manifest, adapter: Path) -> None:
    """Let a model with an adapter compute as the adapter was trained: through its rounding, if it had one.

    Raises AdapterError if the model's weights are not in the format that they were rounded in.
    """
    if (own := rounded_as(adapter)) is None:
        return
    from unfreeze.adapters.merge_aware import begin
    from unfreeze.config.lora import LoraConfig

    lora = LoraConfig.model_validate({"merge_aware": own.format, "merge_aware_scales": own.scales})
    try:
        begin(model, roundings_of(lora, manifest, model, adapted_of(model)))
    except ConfigError as error:
        raise AdapterError(
            f"{adapter} was trained through the rounding of a merge ({own.format}): {error.message}",
            next="give the base that it was trained on: --base DIR",
        ) from None


def trained_as(model: Decoder, lora: LoraConfig) -> RoundedAs | None:
    """The rounding that this model trains through; None before it has begun, and for ordinary LoRA."""
    from unfreeze.adapters.merge_aware.begin import scales

    ways = scales(model)
    return RoundedAs(lora.merge_aware, ways.pop()) if ways else None


def write_rounded(folder: Path, rounded: RoundedAs | None) -> None:
    """Write beside an adapter what it was trained through; without a rounding remove an earlier one's."""
    from unfreeze.core.files import write_file

    if rounded is None:
        (folder / ROUNDED).unlink(missing_ok=True)
    else:
        write_file(folder / ROUNDED, json.dumps(rounded._asdict()) + "\n")


def refuse_beside(adapter: Path, name: str) -> None:
    """Raise ConfigError for an adapter that was trained through a rounding: several on one base are LoRA."""
    if flags := merge_flags(rounded_as(adapter)):
        raise ConfigError(
            f"{name} was trained through the rounding of a merge, so it is used by itself or merged",
            next=f"unfreeze merge {shlex.quote(name)} {flags}",
        )


def merge_flags(rounded: RoundedAs | None) -> str:
    """Flags of `unfreeze merge` that write what an adapter was trained as; "" for ordinary LoRA."""
    if rounded is None:
        return ""
    return f"--to {'int4' if rounded.format == 'int4' else 'same'}" + (
        "" if rounded.scales == "refit" else f" --scales {rounded.scales}"
    )


def other_merge(rounded: RoundedAs | None, to: str, scales: str, *, packed: bool) -> str:
    """A warning if a merge writes other weights than an adapter was trained as; "" if it does not.

    packed: the base is quantized.
    """
    if rounded is None:
        return ""
    own = to == "same" if packed and rounded.format != "int4" else to == "int4" or (packed and to == "same")
    if own and (scales == rounded.scales or not packed):  # an unquantized base has no scales to keep
        return ""
    return f"this run was trained for another merge: {merge_flags(rounded)}"


def begins(lora: LoraConfig) -> str:
    """Words for the plan's line on what is trained; "" for ordinary LoRA."""
    if not lora.merge_aware:
        return ""
    start = (
        f"from {100 * lora.merge_aware_from:g} % of the steps on" if lora.merge_aware_from else "throughout"
    )
    way = f", {lora.merge_aware_scales} scales" if lora.merge_aware_scales else ""
    return f", rounded as merged ({lora.merge_aware}{way}) {start}"
