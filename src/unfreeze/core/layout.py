"""Layout: placement of a run's weights, activations and moments, and the recompute policy.

    Layout()               the user's settings, [place] in TOML; the plan chooses fields that are "auto"
    parallel/plan/layouts  settings -> candidate layouts, fastest first
    RESIDENT               everything on the device, unsharded; a chosen layout has no "auto"

Plans, start lines, events, docs and flags (--place.experts host) use these names and values.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from unfreeze.core.field import about
from unfreeze.core.units import format_bytes

GIB = 2**30


class Layout(BaseModel):
    """Placement of a run's parts, and the activations kept for backward."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def __hash__(self) -> int:  # pydantic's own, which type checkers do not know
        return hash(tuple(self.__dict__.values()))

    experts: Literal["auto", "device", "host", "disk"] = Field(
        default="auto",
        description=(
            "place of frozen routed experts. device: all of them; host, disk: streamed layer by layer through"
            " two buffers; auto: the first that fits. Results are bit-identical"
        ),
        json_schema_extra=about("Memory and machine", was="experts", computes=False),
    )
    buffer: Literal["auto"] | Annotated[float, Field(ge=0)] = Field(
        default="auto",
        description=(
            "GiB of each of the two buffers for experts on host or disk; a larger layer is streamed in groups"
            " of experts. 0: a whole layer; auto: a whole layer, or as much as fits"
        ),
        json_schema_extra=about("Memory and machine", was="buffer", computes=False),
    )
    split: Literal["auto"] | Annotated[int, Field(ge=1)] = Field(
        default="auto",
        description=(
            "expert parallelism: processes that share one set of experts. 1: every process holds all; auto:"
            " 1 if that fits, else the fewest processes of one host that fit"
        ),
        json_schema_extra=about("Memory and machine", was="split", computes=False),
    )
    weights: Literal["auto", "device", "sharded"] = Field(
        default="auto",
        description=(
            "with --train all and several processes. device: each holds all weights; sharded: each holds a"
            " shard (as in FSDP and ZeRO-3); auto: device if that fits"
        ),
        json_schema_extra=about("Memory and machine", was="weights", computes=False),
    )
    rest: Literal["auto", "device", "peers", "host"] = Field(
        default="auto",
        description=(
            "with adapters: frozen weights other than experts. device: each process holds all; peers: each"
            " holds a shard, layers are all-gathered; host: not built, for plans only; auto: device if"
            " that fits. Results are bit-identical"
        ),
        json_schema_extra=about("Memory and machine", was="rest", computes=False),
    )
    boundary: Literal["auto", "device", "host"] = Field(
        default="auto",
        description=(
            "with CUDA and adapters: layer inputs kept for backward. host: offloaded, two on the device at"
            " a time; auto: device if that fits. Results are bit-identical"
        ),
        json_schema_extra=about("Memory and machine", was="boundary", computes=False),
    )
    optimizer: Literal["auto", "device", "host"] = Field(
        default="auto",
        description=(
            "with CUDA and adapters: AdamW's moments between updates. host: offloaded, copied in parts for"
            " an update; auto: device if that fits. Results are bit-identical"
        ),
        json_schema_extra=about("Memory and machine", computes=False),
    )
    adapters: Literal["auto", "device", "host"] = Field(
        default="auto",
        description=(
            "with CUDA: the adapters and their gradients. host: not built, for plans only; auto: device"
        ),
        json_schema_extra=about("Memory and machine", was="adapters", computes=False),
    )
    recompute: Literal["auto", "layers", "selective", "elementwise", "nothing"] = Field(
        default="auto",
        description=(
            "activations kept for backward (activation checkpointing). layers: each layer's input only;"
            " selective: also attention and experts; elementwise: also linear layers; nothing: all; auto: the"
            " fastest that fits"
        ),
        json_schema_extra=about("Memory and machine", was="recompute memory.recompute"),
    )
    keep_layers: int | None = Field(
        default=None,
        ge=0,
        description=(
            "with recompute selective or elementwise: keep activations of only the last N layers; unset: all"
            " layers"
        ),
        json_schema_extra=about("Memory and machine", was="keep_layers memory.keep_layers"),
    )

    def but(self, **changes: Any) -> Self:
        """Return a copy with some fields changed; the values are not checked."""
        return self.model_copy(update=changes)

    def moved(self) -> dict[str, Any]:
        """Return the fields of `place` that are neither "auto" nor the value of RESIDENT."""
        fixed = RESIDENT.model_dump(exclude={"recompute", "keep_layers"})
        return {name: value for name in fixed if (value := getattr(self, name)) not in ("auto", fixed[name])}

    @property
    def sharing(self) -> int:
        """Processes that share one set of experts, in a chosen layout."""
        return 1 if self.split == "auto" else self.split

    @property
    def buffer_bytes(self) -> int | None:
        """Bytes of one buffer for experts; None: those of a whole layer."""
        return None if self.buffer == "auto" or self.buffer == 0 else int(self.buffer * GIB)

    @property
    def boundary_leaves(self) -> bool:
        """True if layer inputs are offloaded to host memory. Without recompute there are none to offload."""
        return self.boundary == "host" and self.recompute != "nothing"

    @property
    def sharded(self) -> bool:
        """True if all weights train and are sharded over processes (parallel/placement/fsdp.py)."""
        return self.weights == "sharded"

    def not_built(self) -> list[str]:
        """Names of features that this layout needs and that are not built."""
        needs = {
            "split experts streamed in groups": self.sharing > 1 and self.buffer != 0,
            "other frozen weights streamed from host memory": self.rest == "host",
            "adapters and their optimizer in host memory": self.adapters == "host",
        }
        return [words for words, needed in needs.items() if needed]

    def words(self, num_experts: int = 1) -> str:
        """Words such as 'experts on host, split over 8; rest on peers; recompute layers'.

        Parts on the device, unsharded, are left out. num_experts: 0 leaves experts out.
        """
        place = {name: getattr(self, name) for name in ("rest", "boundary", "optimizer", "adapters")}
        experts = f"experts on {self.experts}"
        if self.buffer_bytes:
            experts += f" in groups of {format_bytes(self.buffer_bytes)}"
        if self.sharing > 1:
            experts += f", split over {self.sharing}"
        parts = [experts] if num_experts and experts != "experts on device" else []
        parts += ["weights sharded"] * self.sharded
        parts += [f"{name} on {where}" for name, where in place.items() if where != "device"]
        except_last = "" if self.keep_layers is None else f" except in the last {self.keep_layers} layers"
        return "; ".join(
            [*(parts or ["everything on the device"]), f"recompute {self.recompute}{except_last}"]
        )


RESIDENT = Layout(
    experts="device",
    buffer=0.0,
    split=1,
    weights="device",
    rest="device",
    boundary="device",
    optimizer="device",
    adapters="device",
    recompute="layers",
)
"""Everything on the device, unsharded; each layer keeps only its input."""
